package watchsvc

import (
	"bytes"
	"container/heap"
	"fmt"
	"slices"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
)

// Event is one numbered event, shared by the window and by all the watchers that get it.
type Event struct {
	mvcc.Version
	// pb is made when the first watcher wants it; guarded by Hub.mu.
	pb *mvccpb.Event
}

// proto returns the event as etcd sends it: all of a put, of a delete the key and its revision.
func (e *Event) proto() *mvccpb.Event {
	if e.pb == nil {
		e.pb = toProto(&e.Version)
	}
	return e.pb
}

func toProto(v *mvcc.Version) *mvccpb.Event {
	if v.Tombstone() {
		return &mvccpb.Event{Type: mvccpb.Event_DELETE, Kv: &mvccpb.KeyValue{Key: v.Key, ModRevision: int64(v.Mod)}}
	}
	return &mvccpb.Event{Type: mvccpb.Event_PUT, Kv: &mvccpb.KeyValue{
		Key: v.Key, Value: v.Value, Lease: v.Lease,
		CreateRevision: int64(v.Create), ModRevision: int64(v.Mod), Version: v.Version,
	}}
}

// eventOverheadBytes is what an event costs beside its key and value.
const eventOverheadBytes = 256

func (e *Event) size() int { return len(e.Key) + len(e.Value) + eventOverheadBytes }

// Merger is the window of recent events of all regions of a store, with the revision through which
// each region is complete, and the merge of any neighbouring regions in revision order. It is pure;
// its owner locks.
//
// A region's events come in revision order. What may be released for a set of regions ends at the
// least of their completes, so no later call can bring an event at or below it (I7): regions do
// not wait for each other but where one watcher watches them all.
type Merger struct {
	sources  []*source // by start key
	newest   mvcc.Revision
	bytes    int
	bytesMax int
	fed      []feed // oldest first from head: what goes when the window is full
	head     int
	merge    mergeHeap // reused
	mut      Mutants
}

// source is one region in the window. Invariant: every event of the region with a revision in
// (low, through] is in events, in (revision, sub) order.
type source struct {
	span    mvcc.Span
	through mvcc.Revision
	low     mvcc.Revision
	events  []*Event
	live    Source
	groups  int // of the hub, that include it; guarded by Hub.mu
}

// feed is one addition to the window; it leaves as a whole, so that no revision is torn.
type feed struct {
	s     *source
	count int
	bytes int
}

// NewMerger makes a window of at most so many bytes.
func NewMerger(bytesMax int) *Merger { return &Merger{bytesMax: bytesMax} }

// Add makes the merger know a region that is complete through a revision.
func (m *Merger) Add(span mvcc.Span, through mvcc.Revision, live Source) *source {
	s := &source{span: span, through: through, low: through, live: live}
	at, _ := slices.BinarySearchFunc(m.sources, span.Start, func(o *source, start []byte) int {
		return bytes.Compare(o.span.Start, start)
	})
	m.sources = slices.Insert(m.sources, at, s)
	m.newest = max(m.newest, through)
	return s
}

// Feed adds events above the source's complete, in (revision, sub) order, after which it is
// complete through another revision. The versions' bytes are kept.
func (m *Merger) Feed(s *source, events []mvcc.Version, through mvcc.Revision) {
	if len(events) > 0 {
		block := make([]Event, len(events))
		last, size := s.through, 0
		for i := range events {
			if events[i].Mod < last || events[i].Mod <= s.through {
				// A watcher may have been told that nothing more comes here: better no store
				// than one that breaks that promise.
				panic(fmt.Sprintf("watchsvc: event at revision %d of %v, which is complete through %d", events[i].Mod, s.span, s.through))
			}
			last = events[i].Mod
			block[i].Version = events[i]
			s.events = append(s.events, &block[i])
			size += block[i].size()
		}
		m.fed = append(m.fed, feed{s, len(events), size})
		m.bytes += size
		m.newest = max(m.newest, last)
	}
	m.Complete(s, max(through, s.lastFed()))
	m.evict()
}

func (s *source) lastFed() mvcc.Revision {
	if n := len(s.events); n > 0 {
		return s.events[n-1].Mod
	}
	return 0
}

// Complete says that nothing more comes from the source at or below a revision. A lower one than
// before says nothing.
func (m *Merger) Complete(s *source, through mvcc.Revision) {
	s.through = max(s.through, through)
	m.newest = max(m.newest, s.through)
}

// Reset says that the source's state was replaced by one at a revision: what happened in between
// is in the engine and not in the window (W3).
func (m *Merger) Reset(s *source, through mvcc.Revision) {
	for i := m.head; i < len(m.fed); i++ {
		if m.fed[i].s == s {
			m.bytes -= m.fed[i].bytes
			m.fed[i] = feed{}
		}
	}
	s.events = nil
	m.Complete(s, through)
	s.low = s.through
}

// evict removes the oldest feeds while there is too much.
func (m *Merger) evict() {
	for m.bytes > m.bytesMax && m.head < len(m.fed) {
		f := m.fed[m.head]
		m.fed[m.head] = feed{}
		m.head++
		if f.s == nil {
			continue
		}
		m.bytes -= f.bytes
		f.s.low = f.s.events[f.count-1].Mod
		clear(f.s.events[:f.count])
		f.s.events = f.s.events[f.count:]
	}
	if m.head > 1024 && m.head > len(m.fed)/2 {
		m.fed = m.fed[:copy(m.fed, m.fed[m.head:])]
		m.head = 0
	}
}

// Cover returns the regions that a span touches; false when some of it belongs to none of them.
func (m *Merger) Cover(span mvcc.Span) ([]*source, bool) {
	lo, found := slices.BinarySearchFunc(m.sources, span.Start, func(o *source, start []byte) int {
		return bytes.Compare(o.span.Start, start)
	})
	if !found {
		lo--
	}
	if lo < 0 {
		return nil, false
	}
	for hi := lo; hi < len(m.sources); hi++ {
		s := m.sources[hi]
		if hi > lo && !bytes.Equal(m.sources[hi-1].span.End, s.span.Start) {
			return nil, false
		}
		if s.span.End == nil || (span.End != nil && bytes.Compare(span.End, s.span.End) <= 0) {
			return m.sources[lo : hi+1 : hi+1], s.span.Contains(span.Start) || hi > lo
		}
	}
	return nil, false
}

// Through is the least complete of some regions.
func (m *Merger) Through(sources []*source) mvcc.Revision {
	least := sources[0].through
	for _, s := range sources[1:] {
		if m.mut.SourceCursor {
			least = max(least, s.through)
			continue
		}
		least = min(least, s.through)
	}
	return least
}

// Collect appends the events of some regions with revisions in (after, upto], merged in (revision,
// sub) order, but no more than revsMax distinct revisions; end is the revision through which the
// result is whole. It is not ok when the window does not reach back to after. upto must not be
// above Through.
func (m *Merger) Collect(into []*Event, sources []*source, after, upto mvcc.Revision, revsMax int) (events []*Event, end mvcc.Revision, ok bool) {
	if upto > m.Through(sources) {
		panic(fmt.Sprintf("watchsvc: collecting through %d, complete is %d", upto, m.Through(sources)))
	}
	m.merge = m.merge[:0]
	for _, s := range sources {
		if s.low > after {
			return into, after, false
		}
		n := len(s.events)
		if n == 0 || s.events[n-1].Mod <= after {
			continue
		}
		at, _ := slices.BinarySearchFunc(s.events, after+1, func(e *Event, rev mvcc.Revision) int { return int(e.Mod - rev) })
		m.merge = append(m.merge, s.events[at:])
	}
	heap.Init(&m.merge)
	last, revs := after, 0
	for len(m.merge) > 0 {
		e := m.merge[0][0]
		if e.Mod > upto {
			break
		}
		if e.Mod != last {
			if revs == revsMax {
				clear(m.merge)
				return into, e.Mod - 1, true
			}
			last = e.Mod
			revs++
		}
		into = append(into, e)
		if m.merge[0] = m.merge[0][1:]; len(m.merge[0]) == 0 {
			heap.Pop(&m.merge)
		} else if len(m.merge) > 1 {
			heap.Fix(&m.merge, 0)
		}
	}
	clear(m.merge)
	return into, upto, true
}

// mergeHeap holds what is left of each source, the least first event on top.
type mergeHeap [][]*Event

func (h mergeHeap) Len() int { return len(h) }
func (h mergeHeap) Less(i, j int) bool {
	a, b := h[i][0], h[j][0]
	if a.Mod != b.Mod {
		return a.Mod < b.Mod
	}
	return a.Sub < b.Sub // one transaction over several regions (R1)
}
func (h mergeHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *mergeHeap) Push(x any)   { *h = append(*h, x.([]*Event)) }
func (h *mergeHeap) Pop() any {
	n := len(*h) - 1
	x := (*h)[n]
	(*h)[n] = nil
	*h = (*h)[:n]
	return x
}
