package node

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"braid/mvcc"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/watchsvc"
)

const (
	// followIdle is how long a question may wait for news when nothing is known to be missing, and
	// followUrgent when this node has heard of a revision that some region has not reached.
	followIdle, followUrgent = 10 * time.Second, 300 * time.Millisecond
	// followSlack is how much longer the answer may take before the store counts as silent.
	followSlack = 700 * time.Millisecond
	// followEvery is the least time between two questions to a store: what many cuts bring comes together.
	followEvery = 2 * time.Millisecond
	// followRetry is the pause after a question that failed.
	followRetry = 50 * time.Millisecond
	// lagMax is how long a replica may stay behind what the order is known to have reached before
	// another one is asked (W2).
	lagMax = time.Second
)

// elsewhere is the regions without a replica on this node. Each is a source of the hub like those that
// are here: while it is watched, a follower asks a store that has a replica for its events, and feeds
// them. What is asked for lies above what came last, so that a store that is silent, or behind, is
// replaced by any other without a gap and without a repetition (W1, W2). Events that the other
// store's window does not hold any more are left out and read from its history, as after a snapshot
// (W3).
//
// There is one follower for each store, with one question on its way for all the regions it follows
// there, and what it asks for is bounded; nothing is sent that was not asked for.
//
// Its life: know makes sources of the regions as the directory tells of them, and followers with the
// first; run and the followers end with the node's context, and the node waits for them.
type elsewhere struct {
	node    *Node
	news    chan struct{} // the order may have come further
	watched atomic.Int32  // sources

	list atomic.Pointer[[]*remoteSource] // by start key; only know changes it

	// mu guards the followers, and what is marked in the sources. The hub's lock may be held when it
	// is taken, the window's may be taken under it.
	mu        sync.Mutex
	followers map[raftid.StoreID]*follower
}

// remoteSource is a region without a replica here, as the hub sees it.
type remoteSource struct {
	e    *elsewhere
	id   pdpb.RegionID
	span mvcc.Span
	feed *watchsvc.Feed // set under elsewhere.mu, before anybody watches
	// peers have a replica.
	peers []raftid.StoreID

	through, floor atomic.Int64 // what was fed, and the highest floor told
	led            atomic.Bool

	// Guarded by elsewhere.mu.
	at     int  // in peers: who is asked
	on     bool // watched
	goal   mvcc.Revision
	goalAt time.Time // when the order was known to have reached goal
}

// follower asks one store. Guarded by elsewhere.mu, but for wake.
type follower struct {
	store raftid.StoreID
	wake  chan struct{}
	idle  context.CancelFunc // of a question that waits for news, nil when there is none
	want  mvcc.Revision      // of that question
}

func newElsewhere(n *Node) *elsewhere {
	e := &elsewhere{node: n, news: make(chan struct{}, 1), followers: map[raftid.StoreID]*follower{}}
	e.list.Store(&[]*remoteSource{})
	return e
}

// know makes sources of regions that live elsewhere. One goroutine calls it.
func (e *elsewhere) know(d *order.Directory) {
	old := *e.list.Load()
	list := slices.Clone(old)
	for i := range d.Regions {
		r := &d.Regions[i]
		if _, here := peerOn(*r, e.node.self); here || slices.ContainsFunc(old, func(s *remoteSource) bool { return s.id == r.ID }) {
			continue
		}
		s := &remoteSource{e: e, id: r.ID, span: r.Span}
		for _, p := range r.Peers {
			s.peers = append(s.peers, p.Store)
		}
		// Replicas share the load: who asks decides which is the first.
		s.at = int((uint64(e.node.self) + uint64(r.ID)) % uint64(len(s.peers)))
		s.led.Store(true)
		list = append(list, s)
	}
	if len(list) == len(old) {
		return
	}
	slices.SortFunc(list, func(a, b *remoteSource) int { return slices.Compare(a.span.Start, b.span.Start) })
	if len(old) == 0 {
		e.begin()
	}
	e.list.Store(&list) // first, because the history of what can be watched must be found
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range list {
		if s.feed == nil {
			s.feed = e.node.watches.Attach(s.span, 0, s)
		}
	}
}

// begin starts the followers.
func (e *elsewhere) begin() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, m := range e.node.members {
		if id := raftid.StoreID(m.ID); id != e.node.self {
			f := &follower{store: id, wake: make(chan struct{}, 1)}
			e.followers[id] = f
			e.node.wg.Go(func() { e.follow(f) })
		}
	}
	e.node.wg.Go(e.run)
}

// CompleteThrough implements watchsvc.Source.
func (s *remoteSource) CompleteThrough() mvcc.Revision { return mvcc.Revision(s.through.Load()) }

// Floor implements watchsvc.Source.
func (s *remoteSource) Floor() mvcc.Revision {
	return max(mvcc.Revision(s.floor.Load()), s.e.node.oracle.Mark().Floor)
}

// Led implements watchsvc.Source: the replica that is followed knows a leader.
func (s *remoteSource) Led() bool { return s.led.Load() }

// Watched implements watchsvc.Source.
func (s *remoteSource) Watched(on bool) {
	e := s.e
	e.mu.Lock()
	defer e.mu.Unlock()
	s.on, s.goal = on, 0
	if !on {
		e.watched.Add(-1)
		return // the next question leaves it out
	}
	e.watched.Add(1)
	if !e.node.net.Alive(s.peers[s.at]) {
		e.replace(s)
	}
	e.followers[s.peers[s.at]].ask()
}

// raise notes a floor that was told.
func (s *remoteSource) raise(floor mvcc.Revision) {
	for {
		old := s.floor.Load()
		if int64(floor) <= old || s.floor.CompareAndSwap(old, int64(floor)) {
			return
		}
	}
}

// ask makes the follower ask anew. A question that is urgent is answered soon and is waited for, so
// that no number of reasons to ask anew can keep all answers from coming. Called with mu held.
func (f *follower) ask() {
	if f.idle != nil {
		f.idle()
		f.idle = nil
	}
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// replace chooses another replica that is up, if there is one (W2). Called with mu held.
func (e *elsewhere) replace(s *remoteSource) {
	for i := 1; i < len(s.peers); i++ {
		if at := (s.at + i) % len(s.peers); e.node.net.Alive(s.peers[at]) {
			s.at = at
			e.followers[s.peers[at]].ask()
			return
		}
	}
}

// moved says that the order may have come further; it does not block.
func (e *elsewhere) moved() {
	if e.watched.Load() == 0 {
		return
	}
	select {
	case e.news <- struct{}{}:
	default:
	}
}

// run makes followers whose question waits for news ask anew when the order has come further: who
// watches a quiet region and a busy one must hear soon that nothing happened in the first (S4).
func (e *elsewhere) run() {
	for {
		select {
		case <-e.node.ctx.Done():
			return
		case <-e.news:
		}
		current := e.node.current()
		e.mu.Lock()
		for _, f := range e.followers {
			if f.idle != nil && f.want < current {
				f.ask()
			}
		}
		e.mu.Unlock()
	}
}

// follow is a follower's goroutine.
func (e *elsewhere) follow(f *follower) {
	pause := time.NewTimer(0)
	defer pause.Stop()
	rest := func(d time.Duration) bool {
		pause.Reset(d)
		select {
		case <-pause.C:
			return true
		case <-e.node.ctx.Done():
			return false
		}
	}
	for rest(followEvery) {
		ctx, cancel, q, asked := e.question(f)
		if len(asked) == 0 {
			cancel()
			select {
			case <-f.wake:
				continue
			case <-e.node.ctx.Done():
				return
			}
		}
		answer, err := e.putQuestion(ctx, f, q)
		again := errors.Is(ctx.Err(), context.Canceled)
		cancel()
		switch {
		case err == nil:
			err = e.take(f, asked, answer)
		case again:
			continue // there is more to ask, or the node stops
		}
		if err != nil {
			e.failed(f, asked, err)
			if !rest(followRetry) {
				return
			}
		}
	}
}

// question makes the next question to a store, about the regions that are to be followed there.
func (e *elsewhere) question(f *follower) (ctx context.Context, cancel context.CancelFunc, q *followQuery, asked []*remoteSource) {
	current := e.node.current()
	e.mu.Lock()
	defer e.mu.Unlock()
	q = &followQuery{want: current}
	urgent := false
	for _, s := range *e.list.Load() {
		if s.on && s.peers[s.at] == f.store {
			asked = append(asked, s)
			q.regions = append(q.regions, followed{id: s.id, after: s.CompleteThrough()})
			urgent = urgent || s.CompleteThrough() < current
		}
	}
	wait := followIdle
	if urgent {
		wait = followUrgent
	}
	q.waitMs = uint64(wait / time.Millisecond)
	ctx, cancel = context.WithTimeout(e.node.ctx, wait+followSlack)
	if f.want = current; !urgent && len(asked) > 0 {
		f.idle = cancel
	}
	return ctx, cancel, q, asked
}

func (e *elsewhere) putQuestion(ctx context.Context, f *follower, q *followQuery) ([]followed, error) {
	data, err := e.node.stores.call(ctx, f.store, methodFollow, q.append(nil))
	e.mu.Lock()
	f.idle = nil
	e.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return decodeFollowAnswer(data)
}

var errFollowAbsent = errors.New("node: the store has no replica of a region")

// take feeds what an answer brought to the hub.
func (e *elsewhere) take(f *follower, asked []*remoteSource, answer []followed) error {
	if len(answer) != len(asked) {
		return errBadFollow
	}
	mark := e.node.oracle.Mark().Rev
	newest := mark
	var err error
	e.mu.Lock()
	for i, s := range asked {
		a := &answer[i]
		if a.id != s.id {
			err = errBadFollow
			break
		}
		if s.peers[s.at] != f.store || a.after != s.CompleteThrough() {
			continue // it was replaced meanwhile
		}
		if a.state == followAbsent {
			err = errFollowAbsent
			e.replace(s)
			continue
		}
		s.led.Store(a.led)
		s.raise(a.floor)
		if a.through > a.after {
			if a.state == followGap {
				s.feed.Reset(a.through)
			} else {
				s.feed.Events(a.events, a.through)
			}
			s.through.Store(int64(a.through)) // after it was fed
			newest = max(newest, a.through)
		}
		e.judge(s, mark, time.Now())
	}
	e.mu.Unlock()
	// Quiet regions that are here must be complete through what others brought (S4).
	e.node.wantRevision(newest)
	return err
}

// judge replaces a replica that has not come as far as the order for too long (W2). Called with mu
// held.
func (e *elsewhere) judge(s *remoteSource, mark mvcc.Revision, now time.Time) {
	if s.goal == 0 || s.CompleteThrough() >= s.goal {
		s.goal, s.goalAt = mark, now
		return
	}
	if now.Sub(s.goalAt) > lagMax {
		s.goalAt = now
		e.replace(s)
	}
}

// failed replaces a store that did not answer.
func (e *elsewhere) failed(f *follower, asked []*remoteSource, err error) {
	if e.node.ctx.Err() != nil {
		return
	}
	e.node.log.Debug("following regions on another store", zap.Stringer("store", f.store), zap.Error(err))
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range asked {
		if s.peers[s.at] == f.store {
			s.led.Store(false)
			e.replace(s)
		}
	}
}

// touching returns the sources whose regions a span touches, by start key.
func (e *elsewhere) touching(span mvcc.Span) []*remoteSource {
	list := *e.list.Load()
	var found []*remoteSource
	for _, s := range list {
		if !s.span.Intersect(span).Empty() {
			found = append(found, s)
		}
	}
	return found
}

// byPosition orders events of several regions: those of one transaction by their place in it (R1).
func byPosition(a, b *mvcc.Version) int {
	return cmp.Or(cmp.Compare(a.Mod, b.Mod), cmp.Compare(a.Sub, b.Sub))
}
