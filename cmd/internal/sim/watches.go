package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region"
	"braid/watchsvc"
)

// watch is a client's watch. It outlives the streams that serve it: when its store crashes, falls
// behind, or for no reason, it goes on at another from the revision after what it has (W1, W2).
type watch struct {
	id              int
	from, to        int // keys, to is exclusive
	noPut, noDelete bool
	start           mvcc.Revision // as asked for: 0 is after the newest
	begin           mvcc.Revision // first revision that it must see, 0 while nobody has said
	next            mvcc.Revision // everything in [begin, next) was received
	got             []*mvccpb.Event
	told            mvcc.Revision // the last progress response of st

	st      *watchStream  // nil: nobody serves it now
	asked   mvcc.Revision // where it begins at st
	wid     int64
	created bool // st has said so
	stale   bool // it began at st below a floor that st's store had acknowledged
	leaving bool // the client has canceled it
	over    bool
	lag     lag
}

func (a *watch) span() mvcc.Span { return mvcc.Span{Start: key(a.from), End: key(a.to)} }

// wants says whether an event belongs to the watch, whatever its revision.
func (a *watch) wants(k []byte, deleted bool) bool {
	return a.span().Contains(k) && !(deleted && a.noDelete) && !(!deleted && a.noPut)
}

// watchStream is a client's stream at a store, with what its answers have claimed.
type watchStream struct {
	store   *store
	life    uint64
	s       *watchsvc.Stream
	watches []*watch
	idle    bool          // its client seldom reads
	highest mvcc.Revision // of events and progress responses so far
	still   int           // steps for which its store has heard of no leader
}

// prevKV is what the hub knew of the state before an event.
type prevKV struct {
	key   string
	rev   mvcc.Revision // of the event
	found bool
	kv    kv
	floor mvcc.Revision // ordered by then
}

// watchState is what the checker knows of watches.
type watchState struct {
	all     []*watch
	open    []*watch // not over
	streams []*watchStream
	prevs   []prevKV
}

const (
	watchesMax = 14 // open at a time
	streamsMax = 6
)

// openHub starts the watches of a store, with windows and queues so small that watchers fall
// behind and history is read.
func (s *store) openHub() {
	s.hub = watchsvc.New(watchsvc.Options{
		History: simHistory{s},
		Current: func() mvcc.Revision { return s.oracle.Mark().Rev },
		Demand: func() {
			var newest pdpb.Cut
			for _, id := range s.ids {
				if r := s.groups[id].replica; r != nil {
					newest = max(newest, r.Applied().Cut)
				}
			}
			s.oracle.WantMark(newest)
		},
		WindowBytes: s.w.aim.window, QueueMax: 6, QueueBytesMax: 4 << 10, BatchRevisions: 5, BatchBytes: 2 << 10,
		ScanRevisions: 25, ScanBytes: 4 << 10, WatchersMax: 1000, ProgressWait: 80 * time.Millisecond,
		Now:     func() time.Time { return time.Unix(0, 0).Add(s.w.now) },
		Mutants: s.w.mut.watch,
	})
	s.hubDue = 0
}

// turnHub gives the hub a turn when it was woken, or when progress requests wait.
func (w *World) turnHub(s *store) {
	woken := s.hubDue > 0 && w.now >= s.hubDue
	select {
	case <-s.hub.Wake():
		woken = true
	default:
	}
	if !woken {
		return
	}
	s.hubDue = 0
	if s.hub.Turn() {
		s.hubDue = w.now + 10*time.Millisecond
	}
}

// feedHub makes a replica feed the hub; attach must be called once the replica exists.
func (s *store) feedHub(cfg *region.Config) (attach func(*region.Replica)) {
	var feed *watchsvc.Feed
	cfg.Observer.Events = func(events []mvcc.Version, through mvcc.Revision) { feed.Events(events, through) }
	cfg.Observer.Installed = func(p *region.Position) {
		if !s.w.mut.noReset {
			feed.Reset(p.Revision)
		}
	}
	span, through := cfg.Position.Descriptor.Span, cfg.Position.Revision
	return func(r *region.Replica) { feed = s.hub.Attach(span, through, watchSource{s, r}) }
}

// watchSource is a replica as the hub sees it.
type watchSource struct {
	s *store
	*region.Replica
}

// Floor implements watchsvc.Source.
func (x watchSource) Floor() mvcc.Revision { return max(x.Applied().Floor, x.s.oracle.Mark().Floor) }

// Led implements watchsvc.Source.
func (x watchSource) Led() bool {
	leader, here := x.Leader()
	return here || leader != 0
}

// Watched implements watchsvc.Source.
func (x watchSource) Watched(bool) {}

// simHistory is a store's engine as the hub sees it. While a watcher reads, the store goes on:
// replicas apply and install, versions are removed.
type simHistory struct{ s *store }

// Events implements watchsvc.History.
func (h simHistory) Events(ctx context.Context, from, to mvcc.Revision, span mvcc.Span, fn func(*mvcc.Version) error) error {
	w := h.s.w
	w.stats.Histories++
	if w.chance(3) {
		w.work(h.s, 1+w.rng.IntN(3))
	}
	if w.chance(4) {
		w.check.collect(h.s)
	}
	err := h.s.engine.Events(ctx, from, to, span, fn)
	if w.chance(3) {
		w.work(h.s, 1+w.rng.IntN(3))
	}
	return err
}

// Get implements watchsvc.History.
func (h simHistory) Get(_ context.Context, k []byte, at mvcc.Revision) (mvcc.Version, bool, error) {
	return h.s.engine.Get(k, at)
}

// stepWatches lets the clients that watch do something.
func (c *checker) stepWatches() {
	w := c.w
	ws := &c.watches
	if !w.calm {
		if w.rng.IntN(1000) < w.aim.watches {
			c.startWatch()
		}
		if len(ws.streams) > 0 && w.rng.IntN(1000) < w.aim.watches {
			c.disturb(ws.streams[w.rng.IntN(len(ws.streams))])
		}
	}
	c.leaveLagging()
	if w.aim.lag > 0 && w.stats.Steps%20 == 0 && !w.calm {
		c.checkLag()
	}
	for _, a := range ws.open {
		if a.st == nil && (w.calm || w.chance(20)) {
			c.place(a)
		}
	}
	for _, st := range slices.Clone(ws.streams) {
		if w.calm || w.chance(3) && (!st.idle || w.chance(60)) {
			c.readStream(st)
		}
	}
}

// startWatch begins a watch of a key, of a region, or of several, in the past, now or in the future.
func (c *checker) startWatch() {
	w := c.w
	if len(c.watches.open) >= watchesMax {
		return
	}
	keys := w.cfg.Regions * keysPerRegion
	a := &watch{id: len(c.watches.all)}
	switch a.from = w.rng.IntN(keys); w.rng.IntN(4) {
	case 0:
		a.to = a.from + 1
	case 1:
		a.from -= a.from % keysPerRegion
		a.to = a.from + keysPerRegion
	default:
		a.to = a.from + 1 + w.rng.IntN(keys-a.from)
	}
	a.noPut, a.noDelete = w.chance(8), w.chance(8)
	switch w.rng.IntN(6) {
	case 0, 1:
	case 2:
		a.start = c.mark.Rev + 1 + mvcc.Revision(w.rng.IntN(30))
	case 3:
		a.start = max(1, c.mark.Floor)
	default:
		a.start = 1 + mvcc.Revision(w.rng.IntN(int(c.mark.Rev)))
	}
	a.begin, a.next = a.start, a.start
	c.watches.all = append(c.watches.all, a)
	c.watches.open = append(c.watches.open, a)
	w.stats.Watches++
	c.place(a)
}

// place finds a stream for a watch, or opens one.
func (c *checker) place(a *watch) {
	w := c.w
	s := w.stores[w.rng.IntN(len(w.stores))]
	if !s.up {
		return
	}
	var st *watchStream
	for _, x := range c.watches.streams {
		if x.store == s && w.chance(2) {
			st = x
		}
	}
	if st == nil {
		if len(c.watches.streams) >= streamsMax {
			return
		}
		st = &watchStream{store: s, life: s.life, s: s.hub.NewStream(), idle: w.chance(4)}
		c.watches.streams = append(c.watches.streams, st)
	}
	req := watchsvc.Request{Span: a.span(), Start: a.next, NoPut: a.noPut, NoDelete: a.noDelete, Tag: a}
	stale := req.Start > 0 && req.Start < s.ackFloor
	if err := st.s.Watch(ended, req); err != nil {
		return // its queue is full: later
	}
	a.st, a.asked, a.created, a.stale, a.told = st, req.Start, false, stale, 0
	st.watches = append(st.watches, a)
	w.event("watch %d [%d, %d) from %d at s%d", a.id, a.from, a.to, req.Start, s.i)
}

// ended is a context whose time is up: calls that would wait give up instead.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// disturb has a stream's client ask for progress, cancel a watch, or go elsewhere.
func (c *checker) disturb(st *watchStream) {
	w := c.w
	switch x := w.rng.IntN(10); {
	case x < 4:
		w.stats.ProgressAsked++
		st.s.RequestProgress()
	case x < 6 && len(st.watches) > 0:
		if a := st.watches[w.rng.IntN(len(st.watches))]; a.created {
			st.s.Progress(a.wid)
		}
	case x < 7 && len(st.watches) > 0:
		if a := st.watches[w.rng.IntN(len(st.watches))]; a.created && !a.leaving {
			a.leaving = st.s.Cancel(ended, a.wid) == nil
		}
	case x < 8:
		c.endStream(st)
	default:
		st.idle = !st.idle
	}
}

// endStream closes a stream; its watches go on elsewhere.
func (c *checker) endStream(st *watchStream) {
	c.w.event("stream of s%d ends", st.store.i)
	c.w.stats.WatchMoves += len(st.watches)
	st.s.Close()
	c.dropStream(st)
}

// dropStream leaves the watches of a stream that is gone to be placed again.
func (c *checker) dropStream(st *watchStream) {
	for _, a := range st.watches {
		if a.st = nil; a.leaving {
			c.endWatch(a)
		}
	}
	ws := &c.watches
	ws.streams = slices.DeleteFunc(ws.streams, func(x *watchStream) bool { return x == st })
}

func (c *checker) endWatch(a *watch) {
	a.over = true
	if st := a.st; st != nil {
		st.watches = slices.DeleteFunc(st.watches, func(x *watch) bool { return x == a })
	}
	ws := &c.watches
	ws.open = slices.DeleteFunc(ws.open, func(x *watch) bool { return x == a })
}

// crashedWatches is told that a store is gone.
func (c *checker) crashedWatches(s *store) {
	for _, st := range slices.Clone(c.watches.streams) {
		if st.store == s {
			c.w.stats.WatchMoves += len(st.watches)
			c.dropStream(st)
		}
	}
}

// readStream takes some responses.
func (c *checker) readStream(st *watchStream) {
	n := 1 + c.w.rng.IntN(4)
	if c.w.calm {
		n = 100
	}
	for range n {
		r, ok, err := st.s.Next(ended)
		if err != nil {
			c.w.fail("watch at store %d: %v", st.store.i, err)
		}
		if !ok || err != nil || c.w.err != nil {
			return
		}
		c.watched(st, &r)
	}
}

// watched takes a response (I7).
func (c *checker) watched(st *watchStream, r *watchsvc.Response) {
	a, _ := r.Tag.(*watch)
	switch {
	case r.Refused != nil && !errors.Is(r.Refused, watchsvc.ErrNotHere):
		c.w.fail("watch %d at store %d: %v", a.id, st.store.i, r.Refused)
	case r.Refused != nil: // its region will come
		a.st = nil
		st.watches = slices.DeleteFunc(st.watches, func(x *watch) bool { return x == a })
	case r.Created:
		a.created, a.wid = true, r.ID
		if a.begin == 0 {
			a.begin, a.next = r.Revision+1, r.Revision+1
		}
	case r.Compacted > 0:
		c.w.stats.WatchesCompacted++
		c.w.event("watch %d is compacted at %d", a.id, r.Compacted)
		if a.next >= r.Compacted || r.Compacted > c.mark.Floor {
			c.w.fail("I7: watch %d, which has everything below %d, is told that %d is compacted; the floor is %d", a.id, a.next, r.Compacted, c.mark.Floor)
		}
		c.endWatch(a)
	case r.Canceled:
		c.endWatch(a)
	case len(r.Events) > 0:
		c.watchedEvents(st, a, r)
	default:
		c.progress(st, a, r.Revision)
	}
}

func (c *checker) watchedEvents(st *watchStream, a *watch, r *watchsvc.Response) {
	if !a.created || a.over || a.stale {
		c.w.fail("I7: watch %d at store %d gets events (created %v, over %v, began below an acknowledged floor %v)", a.id, st.store.i, a.created, a.over, a.stale)
		return
	}
	last := a.next - 1
	for i, e := range r.Events {
		rev := mvcc.Revision(e.Kv.ModRevision)
		if rev < a.next || rev < last {
			c.w.fail("I7: watch %d, which has everything through %d and now revision %d, gets an event of revision %d from store %d", a.id, a.next-1, last, rev, st.store.i)
			return
		}
		if rev > c.mark.Rev {
			c.w.fail("I5: watch %d gets revision %d, cuts have given %d", a.id, rev, c.mark.Rev)
		}
		last = rev
		if i == 0 && c.w.chance(8) {
			c.previous(st, e)
		}
	}
	a.got = append(a.got, r.Events...)
	a.next = last + 1
	c.w.stats.WatchEvents += len(r.Events)
	c.w.event("watch %d has %d events through %d", a.id, len(r.Events), last)
	if r.Revision < last {
		c.w.fail("I7: watch %d gets revision %d under a header of %d", a.id, last, r.Revision)
	}
	st.highest = max(st.highest, last)
}

// progress takes a progress response, for one watch or for all of the stream.
func (c *checker) progress(st *watchStream, of *watch, rev mvcc.Revision) {
	c.w.stats.Progress++
	c.w.event("progress %d at s%d", rev, st.store.i)
	if rev > c.mark.Rev {
		c.w.fail("I5: progress at revision %d, cuts have given %d", rev, c.mark.Rev)
	}
	if of == nil {
		if rev < st.highest {
			c.w.fail("I7: progress at revision %d after %d on the same stream of store %d", rev, st.highest, st.store.i)
		}
		st.highest = rev
	}
	for _, a := range st.watches {
		if !a.created || of != nil && a != of {
			continue
		}
		if a.stale {
			c.w.fail("I7: watch %d began below an acknowledged floor, and hears of progress at %d", a.id, rev)
		}
		if rev < a.told {
			c.w.fail("I7: watch %d hears of progress at %d after %d", a.id, rev, a.told)
		}
		a.told = rev
		a.next = max(a.next, rev+1)
	}
}

// previous asks for what a key held before an event.
func (c *checker) previous(st *watchStream, e *mvccpb.Event) {
	rev := mvcc.Revision(e.Kv.ModRevision)
	v, ok, err := st.store.hub.Previous(context.Background(), e.Kv.Key, rev)
	if err != nil {
		c.w.fail("previous of %s at store %d: %v", e.Kv.Key, st.store.i, err)
		return
	}
	c.watches.prevs = append(c.watches.prevs, prevKV{string(e.Kv.Key), rev, ok, kv{v.Value, int64(v.Create), int64(v.Mod), v.Version, v.Lease}, c.mark.Floor})
}

// restWatches says what a watch still waits for in a healed cluster, "" for nothing. Events must
// come by themselves; only then progress is asked for, which must say that there is no more.
func (c *checker) restWatches() string {
	for _, a := range slices.Clone(c.watches.open) {
		if a.st != nil && a.asked > c.mark.Rev {
			// It begins in the future, and there is none. As in etcd its stream has no progress.
			if a.created && !a.leaving {
				a.leaving = a.st.s.Cancel(ended, a.wid) == nil
			}
			return fmt.Sprintf("watch %d begins at %d", a.id, a.asked)
		}
		if a.st == nil || !a.created {
			return fmt.Sprintf("watch %d is not created", a.id)
		}
		for rev := a.next; rev <= c.mark.Rev; rev++ {
			for _, f := range c.effects[rev] {
				if a.wants(f.Key, f.Delete) {
					return fmt.Sprintf("watch %d at store %d, which has everything through %d, waits for revision %d", a.id, a.st.store.i, a.next-1, rev)
				}
			}
		}
	}
	why := ""
	for _, a := range c.watches.open {
		if a.next <= c.mark.Rev {
			a.st.s.RequestProgress()
			why = fmt.Sprintf("watch %d at store %d knows of everything through %d of %d", a.id, a.st.store.i, a.next-1, c.mark.Rev)
		}
	}
	return why
}

// checkWatches holds what every watch was sent against the replayed history: exactly the events of
// its span from where it began to where it came.
func (c *checker) checkWatches(h history) error {
	for _, a := range c.watches.all {
		got := a.got
		for rev := a.begin; rev > 0 && rev < a.next && rev <= c.mark.Rev; rev++ {
			for _, f := range c.effects[rev] {
				if !a.wants(f.Key, f.Delete) {
					continue
				}
				if len(got) == 0 || mvcc.Revision(got[0].Kv.ModRevision) != rev || string(got[0].Kv.Key) != string(f.Key) {
					return fmt.Errorf("I7: watch %d of [%d, %d) has everything in [%d, %d), but not %s of revision %d; what comes next is %v", a.id, a.from, a.to, a.begin, a.next, f.Key, rev, got[:min(1, len(got))])
				}
				e := got[0]
				got = got[1:]
				have := kv{e.Kv.Value, e.Kv.CreateRevision, e.Kv.ModRevision, e.Kv.Version, e.Kv.Lease}
				if e.Type == mvccpb.Event_DELETE {
					have = kv{}
				}
				if want := h.at(f.Key, rev); !same(have, want) {
					return fmt.Errorf("I7: watch %d got %v, the state after revision %d is %+v", a.id, e, rev, want)
				}
			}
		}
		if len(got) > 0 {
			return fmt.Errorf("I7: watch %d of [%d, %d) in [%d, %d) got %v, which never was", a.id, a.from, a.to, a.begin, a.next, got[0])
		}
	}
	for _, p := range c.watches.prevs {
		want := h.at([]byte(p.key), p.rev-1)
		if p.found && !same(p.kv, want) || !p.found && want.version > 0 && p.rev-1 >= p.floor {
			return fmt.Errorf("I7: before revision %d %s was %+v, a watcher was given %+v, %v", p.rev, p.key, want, p.kv, p.found)
		}
	}
	return nil
}
