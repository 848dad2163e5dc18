package bench

import (
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// TestRunCounts sends a number of requests: without a warm-up the store sees no more, and with one
// no more are measured.
func TestRunCounts(t *testing.T) {
	var puts atomic.Int64
	f := &fakeStore{put: func(*pb.PutRequest) error { puts.Add(1); return nil }}
	target := f.start(t)
	for _, warmUp := range []time.Duration{0, 50 * time.Millisecond} {
		for _, rate := range []float64{0, 10_000} {
			puts.Store(0)
			rep, err := Run(t.Context(), target, Load{Mix: []Share{{"put", 1}}}, Options{Clients: 16, Connections: 2, Rate: rate, WarmUp: warmUp, Count: 100, Timeout: time.Minute}, Observer{})
			if err != nil {
				t.Fatal(err)
			}
			if n := rep.Kind("put").Count; n != 100 || warmUp == 0 && puts.Load() != 100 {
				t.Errorf("warm-up %s, rate %g: %d measured, %d sent", warmUp, rate, n, puts.Load())
			}
		}
	}
}
