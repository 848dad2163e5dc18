package router

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestExpiries: no request has less than its time, none much more, and few timers serve many.
func TestExpiries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const after = 64 * time.Second
		e := expiries{after: after}
		channels := map[<-chan struct{}]bool{}
		for range 40 {
			over, began := e.of(time.Now()), time.Now()
			channels[over] = true
			go func() {
				<-over
				if took := time.Since(began); took < after || took > after+after/expirySteps {
					t.Errorf("a request had %v of %v", took, after)
				}
			}()
			time.Sleep(100 * time.Millisecond)
		}
		if len(channels) != 4 {
			t.Errorf("%d timers for 40 requests in 4 s", len(channels))
		}
		time.Sleep(2 * after)
		synctest.Wait()
	})
}
