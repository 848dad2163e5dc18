// Package watchsvc is the watches of one store: it takes the numbered events of the regions that
// live here, keeps the newest of them in a bounded window, and gives every watcher the events of
// its span, each once, in revision order, those of one revision together (I7).
//
// It is not a network service (the gateway is), it reads no raft log and knows no region by name:
// a region is a Source that says through which revision it is complete, and a Feed that its owner
// pours events into. History below the window comes from the state engine.
//
// The life of an event: its region's owner feeds it once it is applied (Feed.Events, which appends
// to the window and never waits for a watcher); the hub's one goroutine releases it to each group
// of watchers when all the regions that the group spans are complete through its revision, and
// appends it to the bounded queues of the streams it concerns; whoever serves the stream takes it
// out (Stream.Next). A watcher that begins in the past, or whose queue was full, is behind: it
// reads the window or the engine on the goroutine of its own stream, as fast as its client takes
// it, until it has caught up with its group. So nobody waits for a slow client, and what a client
// can hold in memory is bounded.
//
// A hub made by New starts nothing and looks at no clock but Options.Now: its owner calls Turn when
// it is woken. NewHub adds the goroutine that does so. The simulator drives the former.
//
// Ownership: Hub.win guards the Merger, Hub.mu the watchers, groups and what streams know of
// them, Stream.mu a stream's queue; they are taken in the order mu, win, Stream.mu. Rule names
// (I7, W1, S2 ...) refer to docs/ordering.md.
package watchsvc

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"braid/mvcc"
)

// Source is a region's replica, on this store or, by way of what its owner hears of it, on another.
// Any goroutine; nothing blocks.
type Source interface {
	// CompleteThrough is a revision at or below which no further event will be fed. What it
	// counts on was fed before it returns.
	CompleteThrough() mvcc.Revision
	// Floor is the revision below which history may be gone.
	Floor() mvcc.Revision
	// Led says whether the replica knows a leader of its region; without one it falls behind.
	Led() bool
	// Watched says that somebody begins to watch the region, or that nobody does any more. It is
	// called with the hub's lock held: nothing but a Feed of the hub may be called from it.
	Watched(bool)
}

// History is the store's state engine, and those of others for regions that are not here.
type History interface {
	// Events calls fn with the events of span whose revisions lie in [from, to], in order; slices
	// are valid during the call.
	Events(ctx context.Context, from, to mvcc.Revision, span mvcc.Span, fn func(v *mvcc.Version) error) error
	// Get returns the newest version of a key with Mod <= at.
	Get(ctx context.Context, key []byte, at mvcc.Revision) (mvcc.Version, bool, error)
}

// Options of a Hub; zero values mean the defaults.
type Options struct {
	History History
	// Current is the newest revision the store has heard of, 0 for none. A cut has given it, or will
	// have when word of it comes.
	Current func() mvcc.Revision
	// Demand asks for word from the order about regions that have been quiet; it must not block.
	Demand func()

	// WindowBytes bounds the events kept in memory (64 MiB). Older ones are read from History.
	WindowBytes int
	// QueueMax and QueueBytesMax bound what waits in a stream (128 responses, 8 MiB). A watcher
	// whose event finds its queue full falls behind.
	QueueMax, QueueBytesMax int
	// BatchRevisions bounds the distinct revisions of one response to a watcher that is behind
	// (1000, as in etcd), BatchBytes its size where it holds more than one revision (256 KiB): a
	// client must be able to receive it with previous values beside, and it is what the transport
	// holds for a client that does not read.
	BatchRevisions, BatchBytes int
	// ScanRevisions and ScanBytes bound one look at the history (2,000 and 1 MiB): what it finds
	// waits in memory until the client takes it, and others wait for the core meanwhile.
	ScanRevisions, ScanBytes int
	// WatchersMax bounds the watchers of the store (1,000,000); more are refused. Those that a
	// compaction ended count until their clients cancel them, as in etcd.
	WatchersMax int
	// ProgressWait is how long a progress request waits for quiet regions to be heard of (80 ms).
	ProgressWait time.Duration
	// Rest lets time pass on the goroutine that serves a stream, between two looks at the history
	// while others write: as long as the last look and the delivery of what it found took, or
	// less. A watcher that is far behind would else read as fast as a core can, for as long as it
	// takes, and the writers wait for that core. New does not rest unless told how.
	Rest func(ctx context.Context, took time.Duration) error
	// Now is the clock (time.Now).
	Now func() time.Time
	// Mutants drops rules, for tests that show that their loss is noticed.
	Mutants Mutants
}

// Mutants drop one rule each, on purpose. The zero value drops none.
type Mutants struct {
	// SourceCursor (W1): a watch of several regions stands where the first of them stands, not
	// where its span does.
	SourceCursor bool
}

func (o Options) withDefaults() Options {
	def := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&o.WindowBytes, 64<<20)
	def(&o.QueueMax, 128)
	def(&o.QueueBytesMax, 8<<20)
	def(&o.BatchRevisions, 1000)
	def(&o.BatchBytes, 256<<10)
	def(&o.ScanRevisions, 2000)
	def(&o.ScanBytes, 1<<20)
	def(&o.WatchersMax, 1_000_000)
	if o.ProgressWait <= 0 {
		o.ProgressWait = 80 * time.Millisecond
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Current == nil {
		o.Current = func() mvcc.Revision { return 0 }
	}
	if o.Demand == nil {
		o.Demand = func() {}
	}
	return o
}

// Stats are a hub's gauges and counters.
type Stats struct {
	Streams, Watchers, Behind, PendingEvents int64
	Events                                   uint64 // taken out of the streams
}

// Hub is the watches of one store.
type Hub struct {
	o Options

	win struct {
		sync.Mutex
		m *Merger
	}
	mu     sync.Mutex
	groups map[groupKey]*group
	order  []*group             // the same, in an order that does not depend on chance
	asking map[*Stream]struct{} // have progress requests that wait
	hint   mvcc.Revision        // compaction floor told by Compacted; guarded by mu

	scratch struct { // of the pump
		events  []*Event
		touched []*watcher
		sources []*source
		levels  []mvcc.Revision
	}

	watchers, streams, behind, pending atomic.Int64
	sent                               atomic.Uint64

	wake   chan struct{}
	done   chan struct{}
	closed atomic.Bool
	wg     sync.WaitGroup
}

// groupKey names a row of neighbouring regions by its ends; regions do not overlap.
type groupKey struct{ first, last *source }

// group is the watchers whose spans touch the same regions. They share one frontier: everything
// at or below it was given to those in index. W1: a watcher is known by its span, and its group
// can be found anew.
type group struct {
	key      groupKey
	at       int // in Hub.order
	sources  []*source
	frontier mvcc.Revision
	synced   index
	watchers int
}

// pumpRevisions is how many revisions are released to a group before others have a turn.
const pumpRevisions = 4096

// demandEvery is how often word is asked for while a progress request waits.
const demandEvery = 10 * time.Millisecond

// ErrClosed is returned by what a stream waits for when the hub is closed.
var ErrClosed = errors.New("watchsvc: closed")

// NewHub starts a hub with a goroutine of its own; Close must be called in the end.
func NewHub(o Options) *Hub {
	if o.Rest == nil {
		o.Rest = rest
	}
	h := New(o)
	h.wg.Go(h.run)
	return h
}

// restMax bounds a pause: looks take some ten milliseconds, but the engine or the client may have
// made one wait.
const restMax = 100 * time.Millisecond

func rest(ctx context.Context, took time.Duration) error {
	timer := time.NewTimer(min(took, restMax))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// New returns a hub that does nothing unless its owner calls Turn.
func New(o Options) *Hub {
	h := &Hub{
		o: o.withDefaults(), groups: map[groupKey]*group{}, asking: map[*Stream]struct{}{},
		hint: -1, wake: make(chan struct{}, 1), done: make(chan struct{}),
	}
	h.win.m = NewMerger(h.o.WindowBytes)
	h.win.m.mut = h.o.Mutants
	return h
}

// Wake signals that Turn has something to do.
func (h *Hub) Wake() <-chan struct{} { return h.wake }

// Close ends the hub's goroutine and waits for it. Streams must have been closed.
func (h *Hub) Close() {
	if h.closed.CompareAndSwap(false, true) {
		close(h.done)
	}
	h.wg.Wait()
}

// Feed is where a region's events enter. Its methods are called by the region's owner; they
// append to the window and return.
type Feed struct {
	hub *Hub
	s   *source
}

// Attach makes a region known that is complete through a revision, before it feeds anything.
func (h *Hub) Attach(span mvcc.Span, through mvcc.Revision, src Source) *Feed {
	h.win.Lock()
	defer h.win.Unlock()
	return &Feed{hub: h, s: h.win.m.Add(span, through, src)}
}

// Events adds a batch of events in (revision, sub) order; nothing at or below through comes later.
// The slices are kept and must not change.
func (f *Feed) Events(events []mvcc.Version, through mvcc.Revision) {
	f.hub.win.Lock()
	f.hub.win.m.Feed(f.s, events, through)
	f.hub.win.Unlock()
	f.hub.Poke()
}

// Reset says that the region's state was replaced by a snapshot at a revision (W3). Watchers read
// what lies in between from the history.
func (f *Feed) Reset(through mvcc.Revision) {
	f.hub.win.Lock()
	f.hub.win.m.Reset(f.s, through)
	f.hub.win.Unlock()
	f.hub.Poke()
}

// Since returns what the window holds of the region's events above a revision, and the revision
// through which that is whole: at most so many revisions, and no second one beyond so many bytes. It
// is not ok when the window does not reach back that far; then through is what the region is complete
// through. The versions are shared and must not change.
func (f *Feed) Since(after mvcc.Revision, revsMax, bytesMax int) (events []mvcc.Version, through mvcc.Revision, ok bool) {
	complete := f.s.live.CompleteThrough() // before the window is looked at: what it counts on is in there
	f.hub.win.Lock()
	defer f.hub.win.Unlock()
	m := f.hub.win.m
	m.Complete(f.s, complete)
	if f.s.through <= after {
		return nil, f.s.through, true
	}
	found, through, ok := m.Collect(nil, []*source{f.s}, after, f.s.through, revsMax)
	if !ok {
		return nil, f.s.through, false
	}
	bytes := 0
	for i, e := range found {
		if bytes += e.size(); bytes > bytesMax && i > 0 && e.Mod != found[i-1].Mod {
			return events, e.Mod - 1, true
		}
		events = append(events, e.Version)
	}
	return events, through, true
}

// Through is the revision through which the region's events were fed, or are known not to exist.
func (f *Feed) Through() mvcc.Revision {
	complete := f.s.live.CompleteThrough()
	f.hub.win.Lock()
	defer f.hub.win.Unlock()
	f.hub.win.m.Complete(f.s, complete)
	return f.s.through
}

// Poke says that a source may be complete through more than before. It never blocks.
func (h *Hub) Poke() {
	if h.watchers.Load() == 0 {
		return
	}
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// Compacted tells of a compaction that was acknowledged to a client of this store, so that the
// next watch obeys it though the order's word may still be on its way.
func (h *Hub) Compacted(floor mvcc.Revision) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hint = max(h.hint, floor)
}

// Current is the newest revision this store knows of.
func (h *Hub) Current() mvcc.Revision {
	rev := h.o.Current()
	h.win.Lock()
	defer h.win.Unlock()
	return max(rev, h.win.m.newest, 1)
}

// Stats returns the gauges and counters of now.
func (h *Hub) Stats() Stats {
	return Stats{Streams: h.streams.Load(), Watchers: h.watchers.Load(), Behind: h.behind.Load(),
		PendingEvents: h.pending.Load(), Events: h.sent.Load()}
}

// Previous returns what a key held just before a revision, for prev_kv; false when it did not
// exist or the history of then may be gone.
func (h *Hub) Previous(ctx context.Context, key []byte, rev mvcc.Revision) (mvcc.Version, bool, error) {
	v, ok, err := h.o.History.Get(ctx, key, rev-1)
	if err != nil || !ok || v.Tombstone() {
		return mvcc.Version{}, false, err
	}
	// The floor is looked at after the read: it rises before the first removal (C1).
	h.win.Lock()
	sources, covered := h.win.m.Cover(mvcc.Key(key))
	h.win.Unlock()
	h.mu.Lock()
	floor := h.floorLocked(sources)
	h.mu.Unlock()
	if !covered || rev-1 < floor {
		return mvcc.Version{}, false, nil
	}
	return v, true, nil
}

// floorLocked is the highest floor known for some regions. Called with mu held.
func (h *Hub) floorLocked(sources []*source) mvcc.Revision {
	floor := h.hint
	for _, s := range sources {
		floor = max(floor, s.live.Floor())
	}
	return floor
}

// joinLocked adds a watcher to the group of its span; false when some of the span is not here.
// Called with mu held.
func (h *Hub) joinLocked(w *watcher) bool {
	h.win.Lock()
	sources, ok := h.win.m.Cover(w.span)
	h.win.Unlock()
	if !ok {
		return false
	}
	key := groupKey{sources[0], sources[len(sources)-1]}
	g := h.groups[key]
	if g == nil {
		g = &group{key: key, sources: append([]*source(nil), sources...)}
		for _, s := range g.sources {
			if s.groups++; s.groups == 1 {
				s.live.Watched(true)
			}
		}
		h.groups[key] = g
		g.at = len(h.order)
		h.order = append(h.order, g)
		g.frontier = h.refresh(g.sources)
	} else {
		// What is there already is the past for a watcher that begins with it.
		h.refresh(g.sources)
		h.release(g)
	}
	w.group = g
	g.watchers++
	return true
}

// refresh asks some sources how far they are. Called with mu held.
func (h *Hub) refresh(sources []*source) mvcc.Revision {
	levels := h.scratch.levels[:0]
	for _, s := range sources {
		levels = append(levels, s.live.CompleteThrough())
	}
	h.scratch.levels = levels
	h.win.Lock()
	defer h.win.Unlock()
	for i, s := range sources {
		h.win.m.Complete(s, levels[i])
	}
	return h.win.m.Through(sources)
}

// leaveLocked takes a watcher out of its group. Called with mu held.
func (h *Hub) leaveLocked(w *watcher) {
	g := w.group
	if g == nil {
		return
	}
	if w.synced {
		g.synced.remove(w)
	}
	w.group, w.synced = nil, false
	if g.watchers--; g.watchers == 0 {
		for _, s := range g.sources {
			if s.groups--; s.groups == 0 {
				s.live.Watched(false)
			}
		}
		delete(h.groups, g.key)
		last := h.order[len(h.order)-1]
		h.order[g.at], last.at = last, g.at
		h.order[len(h.order)-1] = nil
		h.order = h.order[:len(h.order)-1]
	}
}
