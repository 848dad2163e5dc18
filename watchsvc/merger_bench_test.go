package watchsvc

import (
	"fmt"
	"testing"

	"braid/mvcc"
)

// BenchmarkMerge: regions feed batches of events in turn, and one watcher of all of them collects
// what is complete. One operation is one event.
func BenchmarkMerge(b *testing.B) {
	for _, regions := range []int{1, 8, 100} {
		b.Run(fmt.Sprintf("regions=%d", regions), func(b *testing.B) {
			const batch = 64
			m := NewMerger(16 << 20)
			sources := make([]*source, regions)
			events := make([][]mvcc.Version, regions)
			value := make([]byte, 256)
			for i := range sources {
				sources[i] = m.Add(mvcc.Span{Start: fmt.Appendf(nil, "k%05d", i), End: fmt.Appendf(nil, "k%05d", i+1)}, 1, nil)
			}
			var got []*Event
			rev, after, seen := mvcc.Revision(1), mvcc.Revision(1), 0
			b.ReportAllocs()
			for seen < b.N {
				// Revisions go round the regions, as they do under even load: the worst case for a merge.
				for i := range events {
					events[i] = make([]mvcc.Version, 0, batch)
				}
				for range batch {
					for i := range events {
						rev++
						events[i] = append(events[i], mvcc.Version{Key: sources[i].span.Start, Mod: rev, Create: 2, Version: int64(rev), Value: value})
					}
				}
				for i, s := range sources {
					m.Feed(s, events[i], rev)
				}
				var ok bool
				got, after, ok = m.Collect(got[:0], sources, after, m.Through(sources), 1<<30)
				if !ok || after != rev || len(got) != batch*regions {
					b.Fatalf("%d events through %d of %d, %v", len(got), after, rev, ok)
				}
				seen += len(got)
			}
		})
	}
}
