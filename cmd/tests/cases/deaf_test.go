package cases

import (
	"fmt"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// TestClientsThatDoNotRead: watchers whose client never reads are bounded in memory, and neither
// writers nor watchers that do read notice them.
func TestClientsThatDoNotRead(t *testing.T) {
	const watchers = 1000
	for _, c := range []struct {
		name    string
		streams int
	}{{"one stream", 1}, {"a stream each", watchers}} {
		t.Run(c.name, func(t *testing.T) {
			s := start(t, 1, straddling)
			ctx := within(t, 3*time.Minute)
			// Connections of their own, and a window that does not grow: what waits, waits in the server.
			var deaf []*grpc.ClientConn
			for range 8 {
				deaf = append(deaf, dial(t, s.Nodes[0].Endpoint(), grpc.WithInitialWindowSize(64<<10), grpc.WithInitialConnWindowSize(16<<20)))
			}
			for i := range c.streams {
				w := (&store{s.Cluster, t, deaf[i%len(deaf):]}).watch(ctx, 0, unlimited)
				for range watchers / c.streams {
					w.create(&pb.WatchCreateRequest{Key: []byte("a"), RangeEnd: []byte("z"), PrevKv: true})
				}
				for range watchers / c.streams {
					w.created()
				}
			}
			reader := s.watch(ctx, 0)
			reader.create(&pb.WatchCreateRequest{Key: []byte("a"), RangeEnd: []byte("z")})
			from := reader.created().Header.Revision + 1
			before := s.rss(0)
			puts := scaled(10_000, 100_000)
			value := strings.Repeat("v", 1<<10)
			read := make(chan error, 1)
			go func() {
				for next := from; next < from+int64(puts); {
					r, err := reader.stream.Recv()
					if err != nil {
						read <- err
						return
					}
					for _, e := range r.Events {
						if e.Kv.ModRevision != next {
							read <- fmt.Errorf("event at %d instead of %d", e.Kv.ModRevision, next)
							return
						}
						next++
					}
				}
				read <- nil
			}()
			began := time.Now()
			s.fill(puts, func(i int) (string, string) { return fmt.Sprintf("%s/%d", threeKeys[i%3], i%1000), value })
			wrote := time.Since(began)
			if err := <-read; err != nil {
				t.Fatal(err)
			}
			late := time.Since(began) - wrote
			after := s.rss(0)
			t.Logf("%d puts in %v, read to the end %v later; memory %d MiB before, %d after; %.0f watchers are behind, %.0f events wait",
				puts, wrote, late, before, after, s.metric(0, "etcd_debugging_mvcc_slow_watcher_total"), s.metric(0, "etcd_debugging_mvcc_pending_events_total"))
			// The window of recent events, memtables and caches grow with any writes; and each stream
			// may hold a response that its transport cannot send.
			if after-before > 250+int64(c.streams)/2 {
				t.Errorf("memory grew by %d MiB", after-before)
			}
			if late > bound(time.Second) {
				t.Errorf("a watcher that reads got the last event %v after it was written", late)
			}
		})
	}
}
