package process

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"braid/cmd/tests/proc"
)

// TestOverload puts a quarter of a megabyte a time, two thousand at once: what is refused is refused in etcd's
// words, memory stays within bounds, and the node serves on.
func TestOverload(t *testing.T) {
	if !isBraid(t) {
		t.Skip("etcd has other bounds")
	}
	n := node(t, func(c *proc.Config) { c.Args = append(c.Args, regionArgs...) })
	start(t, n.Start)
	const (
		writers = 2000
		conns   = 16
		// The bounds: 64 MiB wait and 64 MiB are in flight per region that is written to, the
		// same again in answers and in the log's queue, memtables, and the collector's share.
		rssMax = 2 << 30
	)
	value := strings.Repeat("v", 256<<10)
	var cls []*clientv3.Client
	for range conns {
		cls = append(cls, client(t, n.Endpoint()))
	}
	var done, refused, other atomic.Int64
	var first atomic.Value
	end := time.Now().Add(12 * time.Second)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for time.Now().Before(end) {
				_, err := cls[w%conns].Put(t.Context(), fmt.Sprintf("c%d", w), value)
				switch {
				case err == nil:
					done.Add(1)
				case strings.Contains(err.Error(), "etcdserver: too many requests"):
					refused.Add(1)
				default:
					other.Add(1)
					first.CompareAndSwap(nil, err.Error())
				}
			}
		})
	}
	over := make(chan struct{})
	go func() { wg.Wait(); close(over) }()
	peak := int64(0)
	for look := true; look; {
		rss, err := n.RSS()
		if err != nil {
			t.Fatal(err)
		}
		peak = max(peak, rss)
		select {
		case <-over:
			look = false
		case <-time.After(50 * time.Millisecond):
		}
	}
	t.Logf("%d done, %d refused, %d other (%v), %d MiB at most", done.Load(), refused.Load(), other.Load(), first.Load(), peak>>20)
	if done.Load() == 0 || refused.Load() == 0 {
		t.Errorf("%d done, %d refused: this proves nothing", done.Load(), refused.Load())
	}
	if peak > rssMax {
		t.Errorf("%d MiB in memory", peak>>20)
	}
	if _, err := cls[0].Put(within(t, 20*time.Second), "k", "v"); err != nil {
		t.Errorf("after the flood: %v", err)
	}
}
