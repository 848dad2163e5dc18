package region

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"braid/mvcc"
	"braid/region/regionpb"
)

// TestSpanSet compares the index with a look at every pair.
func TestSpanSet(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 2))
	random := func() []regionpb.LockSpan {
		list := make([]regionpb.LockSpan, rng.IntN(6))
		for i := range list {
			l := &list[i]
			l.Exclusive = rng.IntN(2) == 0
			start, end := fmt.Sprint(rng.IntN(8)), fmt.Sprint(rng.IntN(8))
			switch rng.IntN(5) {
			case 0:
				l.Lease = 1 + rng.Int64N(4)
			case 1:
				l.Span = mvcc.Span{Start: []byte(min(start, end)), End: []byte(max(start, end) + "x")}
			case 2:
				l.Span = mvcc.Span{Start: []byte(start)}
			default:
				l.Span = mvcc.Key([]byte(start))
			}
		}
		return list
	}
	pair := func(a, b regionpb.LockSpan) bool {
		if !a.Exclusive && !b.Exclusive || a.Lease != b.Lease {
			return false
		}
		return a.Lease != 0 || !a.Span.Intersect(b.Span).Empty()
	}
	counts := map[bool]int{}
	for range 20_000 {
		a, b := random(), random()
		want := slices.ContainsFunc(a, func(x regionpb.LockSpan) bool {
			return slices.ContainsFunc(b, func(y regionpb.LockSpan) bool { return pair(x, y) })
		})
		set := newSpanSet(a)
		if got := set.conflicts(b); got != want {
			t.Fatalf("%v and %v conflict: %v, want %v", a, b, got, want)
		}
		counts[want]++
	}
	if counts[true] < 1000 || counts[false] < 1000 {
		t.Errorf("one-sided: %v", counts)
	}
}

// BenchmarkBehindLargeRevoke is what a put pays for a lease of 20,000 keys that is being ended.
func BenchmarkBehindLargeRevoke(b *testing.B) {
	spans := []regionpb.LockSpan{{Lease: 1, Exclusive: true}}
	for i := range 20_000 {
		spans = append(spans, regionpb.LockSpan{Span: mvcc.Key(fmt.Appendf(nil, "key%06d", i)), Exclusive: true})
	}
	t := lockTable{held: []*lock{{spans: spans, set: newSpanSet(spans)}}}
	put := []regionpb.LockSpan{{Span: mvcc.Key([]byte("key010000x")), Exclusive: true}, {Lease: 2}}
	for b.Loop() {
		if t.inFront(put, 0) {
			b.Fatal("in conflict")
		}
	}
}
