package watchsvc

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"braid/mvcc"
)

// world is a serial history over some regions, and the merger that hears of it in pieces.
type world struct {
	rnd     *rand.Rand
	m       *Merger
	sources []*source
	history []mvcc.Version // in order
	fed     []int          // per region: index into its own events
	own     [][]mvcc.Version
	last    mvcc.Revision
}

func newWorld(seed uint64, regions, revisions, windowBytes int) *world {
	w := &world{rnd: rand.New(rand.NewPCG(seed, 1)), m: NewMerger(windowBytes), fed: make([]int, regions), own: make([][]mvcc.Version, regions)}
	for i := range regions {
		span := mvcc.Span{Start: []byte{byte('a' + i)}, End: []byte{byte('a' + i + 1)}}
		if i == 0 {
			span.Start = nil
		}
		if i == regions-1 {
			span.End = nil
		}
		w.sources = append(w.sources, w.m.Add(span, 1, nil))
	}
	for rev := mvcc.Revision(2); rev < mvcc.Revision(2+revisions); rev++ {
		// One transaction, sometimes over several regions.
		for sub := range 1 + w.rnd.IntN(4) {
			r := w.rnd.IntN(regions)
			v := mvcc.Version{Key: fmt.Appendf(nil, "%c%d", 'a'+r, w.rnd.IntN(10)), Mod: rev, Sub: int64(sub), Version: 1, Create: rev}
			w.history = append(w.history, v)
			w.own[r] = append(w.own[r], v)
		}
		w.last = rev
	}
	return w
}

// step feeds one region some of its next events, or tells how far it is.
func (w *world) step() (done bool) {
	r := w.rnd.IntN(len(w.own))
	own := w.own[r][w.fed[r]:]
	n := 0
	for want := w.rnd.IntN(4); n < len(own) && (want > 0 || n > 0 && own[n-1].Mod == own[n].Mod); n++ {
		want--
	}
	through := w.last
	if n < len(own) {
		through = own[n].Mod - 1
	}
	if n > 0 {
		w.m.Feed(w.sources[r], slices.Clone(own[:n]), own[n-1].Mod)
		w.fed[r] += n
	}
	if w.rnd.IntN(2) == 0 {
		w.m.Complete(w.sources[r], through)
	}
	for i := range w.own {
		if w.fed[i] < len(w.own[i]) {
			return false
		}
	}
	return true
}

func line(v *mvcc.Version) string { return fmt.Sprintf("%d.%d %s", v.Mod, v.Sub, v.Key) }

func (w *world) expect(lo, hi int) string {
	var b strings.Builder
	for i := range w.history {
		if r := int(w.history[i].Key[0] - 'a'); r >= lo && r <= hi {
			fmt.Fprintln(&b, line(&w.history[i]))
		}
	}
	return b.String()
}

// TestMergerAnyInterleaving: whatever order the regions are heard in, a row of neighbours gives the
// same events in the same order, and never one that a later one precedes.
func TestMergerAnyInterleaving(t *testing.T) {
	for seed := range uint64(300) {
		w := newWorld(seed, 1+int(seed%7), 60, 1<<20)
		type reader struct {
			lo, hi   int
			frontier mvcc.Revision
			got      strings.Builder
		}
		var readers []*reader
		for range 4 {
			lo := w.rnd.IntN(len(w.sources))
			readers = append(readers, &reader{lo: lo, hi: lo + w.rnd.IntN(len(w.sources)-lo), frontier: 1})
		}
		read := func(revsMax int) {
			for _, r := range readers {
				group := w.sources[r.lo : r.hi+1]
				events, end, ok := w.m.Collect(nil, group, r.frontier, w.m.Through(group), revsMax)
				if !ok {
					t.Fatalf("seed %d: the window lost %d although it is not full", seed, r.frontier)
				}
				for _, e := range events {
					if e.Mod <= r.frontier || e.Mod > end {
						t.Fatalf("seed %d: %s outside (%d, %d]", seed, line(&e.Version), r.frontier, end)
					}
					fmt.Fprintln(&r.got, line(&e.Version))
				}
				r.frontier = end
			}
		}
		for !w.step() {
			if w.rnd.IntN(3) == 0 {
				read(1 + w.rnd.IntN(5))
			}
		}
		for _, s := range w.sources {
			w.m.Complete(s, w.last)
		}
		for range 100 {
			read(7)
		}
		for _, r := range readers {
			if want := w.expect(r.lo, r.hi); r.got.String() != want {
				t.Fatalf("seed %d: regions %d..%d got\n%swant\n%s", seed, r.lo, r.hi, r.got.String(), want)
			}
		}
	}
}

// TestMergerSmallWindow: a window that is too small says so instead of leaving something out.
func TestMergerSmallWindow(t *testing.T) {
	for seed := range uint64(200) {
		w := newWorld(seed, 3, 60, 20*eventOverheadBytes)
		frontier, lost := mvcc.Revision(1), 0
		var got strings.Builder
		read := func() {
			events, end, ok := w.m.Collect(nil, w.sources, frontier, w.m.Through(w.sources), 1000)
			if !ok {
				lost++
				// What history would give.
				end = w.m.Through(w.sources)
				for i := range w.history {
					if v := &w.history[i]; v.Mod > frontier && v.Mod <= end {
						fmt.Fprintln(&got, line(v))
					}
				}
			}
			for _, e := range events {
				fmt.Fprintln(&got, line(&e.Version))
			}
			frontier = end
		}
		for !w.step() {
			if w.m.bytes > w.m.bytesMax {
				t.Fatalf("seed %d: the window holds %d bytes, limit %d", seed, w.m.bytes, w.m.bytesMax)
			}
			if w.rnd.IntN(20) == 0 {
				if r := w.rnd.IntN(3); w.rnd.IntN(4) == 0 {
					w.m.Reset(w.sources[r], w.sources[r].through)
				}
				read()
			}
		}
		for _, s := range w.sources {
			w.m.Complete(s, w.last)
		}
		read()
		if want := w.expect(0, 2); got.String() != want {
			t.Fatalf("seed %d: got\n%swant\n%s", seed, got.String(), want)
		}
		if seed == 0 && lost == 0 {
			t.Error("the window was never too small: this test shows nothing")
		}
	}
}

// TestMergerRefusesThePast: an event where nothing more was to come is a bug that must not be
// passed on.
func TestMergerRefusesThePast(t *testing.T) {
	m := NewMerger(1 << 20)
	s := m.Add(mvcc.Span{}, 1, nil)
	m.Complete(s, 10)
	defer func() {
		if recover() == nil {
			t.Error("an event at 10 was taken after complete-through 10")
		}
	}()
	m.Feed(s, []mvcc.Version{{Key: []byte("a"), Mod: 10, Version: 1}}, 10)
}

func TestCover(t *testing.T) {
	m := NewMerger(1)
	m.Add(mvcc.Span{Start: []byte("c"), End: []byte("f")}, 1, nil)
	m.Add(mvcc.Span{End: []byte("c")}, 1, nil)
	m.Add(mvcc.Span{Start: []byte("m")}, 1, nil)
	for _, tc := range []struct {
		start, end string // end "": no bound
		n          int    // 0: not covered
	}{
		{"a", "b", 1}, {"", "c", 1}, {"a", "d", 2}, {"c", "f", 1}, {"e", "g", 0}, {"g", "h", 0}, {"f", "n", 0},
		{"m", "", 1}, {"z", "", 1}, {"a", "", 0}, {"a", "z", 0},
	} {
		span := mvcc.Span{Start: []byte(tc.start)}
		if tc.end != "" {
			span.End = []byte(tc.end)
		}
		got, ok := m.Cover(span)
		if ok != (tc.n > 0) || ok && len(got) != tc.n {
			t.Errorf("%v: %d regions, %v; want %d", span, len(got), ok, tc.n)
		}
	}
}

// TestIndexAgainstList compares the index with looking at every watcher.
func TestIndexAgainstList(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 7))
	key := func() []byte { return fmt.Appendf(nil, "%03d", rnd.IntN(300)) }
	var x index
	var all []*watcher
	for i := range 4000 {
		if rnd.IntN(3) > 0 || len(all) == 0 {
			w := &watcher{id: int64(i), span: mvcc.Key(key())}
			switch a, b := key(), key(); {
			case rnd.IntN(3) == 0:
				w.span = mvcc.Span{Start: a}
			case rnd.IntN(2) == 0 && string(a) < string(b):
				w.span = mvcc.Span{Start: a, End: b}
			}
			x.add(w)
			all = append(all, w)
		} else {
			j := rnd.IntN(len(all))
			x.remove(all[j])
			all = slices.Delete(all, j, j+1)
		}
		if i%20 != 0 {
			continue
		}
		k := key()
		got, want := map[int64]int{}, map[int64]int{}
		x.match(k, func(w *watcher) { got[w.id]++ })
		for _, w := range all {
			if w.span.Contains(k) {
				want[w.id] = 1
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("step %d, key %s: %v, want %v", i, k, got, want)
		}
		n := 0
		x.each(func(*watcher) { n++ })
		if n != len(all) {
			t.Fatalf("step %d: each saw %d of %d", i, n, len(all))
		}
	}
}
