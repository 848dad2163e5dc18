package order

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// Member is the pd member of the client's own store; pd.Replica implements it. Nothing blocks.
type Member interface {
	Subscribe(from raftid.StoreID, s *Subscribe)
	WantMark(from raftid.StoreID, session uint64, cut pdpb.Cut)
	// ReportsReady asks the member to call Client.PullReports soon.
	ReportsReady()
	ReadPoint(done func(pdpb.ReadPoint, error))
	Propose(e Event, done func(EventResult, error))
	// Directory is nil before there is one.
	Directory() *Directory
}

// Net carries requests to the pd members of other stores. Call must not block; done is called
// once, from any goroutine, never from within Call.
type Net interface {
	Call(to raftid.StoreID, m Method, payload []byte, done func([]byte, error))
}

// ReportSource is a replica as the client sees it. Any goroutine, nothing blocks.
type ReportSource interface {
	// BuildReport states what is committed (P2); false when there is nothing to state yet.
	BuildReport() (pdpb.Report, bool)
	// Deliver hands order items over; it may be given an item more than once.
	Deliver(items []pdpb.Item)
	// Leading says whether the replica leads its region, as far as it knows.
	Leading() bool
	// Wanted is the first item that the replica neither has applied nor holds.
	Wanted() uint64
}

// ClientConfig is what a Client needs.
type ClientConfig struct {
	ClientOptions
	// Net is nil on a store that is alone.
	Net Net
	// ReadsMax bounds callers that wait for a read point (65,536); more get ErrOverloaded.
	ReadsMax int
	// OnDirectory is told each new version of the directory, one call at a time.
	OnDirectory func(*Directory)
	// OnMark is called after each frame whose mark the states have moved to; it must not block.
	// Optional.
	OnMark func()
}

// Client is one store's side of the oracle: it follows a member's stream for the regions that
// have replicas here, sends their reports to pd's leader, and asks it for read points. ClientCore
// decides; Client locks, encodes, calls.
//
// It has no goroutine and no clock: somebody calls Tick, and everything else happens inside the
// calls that cause it. Callbacks run without any lock of the client held.
type Client struct {
	cfg ClientConfig

	mu      sync.RWMutex // guards all below
	core    *ClientCore
	member  Member
	sources map[pdpb.RegionID]ReportSource
	order   []pdpb.RegionID // sources in the order of registration, for the round of Tick
	round   int
	dir     *Directory
	closed  bool

	readers   []*reader // wait for a request that is not sent yet
	asking    []*reader // wait for the request in flight
	gone      int       // readers whose callers went away since the last sweep
	events    map[uint64]func(EventResult, error)
	lastToken uint64
	marks     []*markWaiter

	frames    sync.Mutex // one frame at a time
	directory sync.Mutex // one OnDirectory at a time
}

type reader struct {
	done func(pdpb.ReadPoint, error)
	gone bool
}

// markWaiter waits for a region's mark at a cut, or with rev set for the store's newest mark at a
// revision.
type markWaiter struct {
	id   pdpb.RegionID
	cut  pdpb.Cut
	rev  mvcc.Revision
	done func(error)
}

// NewClient returns a client without a member in process; see SetMember.
func NewClient(cfg ClientConfig) *Client {
	if cfg.ReadsMax == 0 {
		cfg.ReadsMax = 65536
	}
	return &Client{
		cfg: cfg, core: NewClientCore(cfg.ClientOptions), sources: map[pdpb.RegionID]ReportSource{},
		events: map[uint64]func(EventResult, error){},
	}
}

// SetMember gives the client the pd member of its own store; called once, before Tick.
func (c *Client) SetMember(m Member) {
	c.mu.Lock()
	c.member = m
	c.mu.Unlock()
	if d := m.Directory(); d != nil {
		c.HandleDirectory(d)
	}
	c.with(func() {})
}

// SetMembers replaces the list of stores that have a member of pd.
func (c *Client) SetMembers(members []raftid.StoreID) {
	c.with(func() { c.core.SetMembers(members) })
}

// Register makes the client follow and report a region. A region that is there is begun anew.
func (c *Client) Register(id pdpb.RegionID, src ReportSource) {
	have := src.Wanted() - 1
	c.with(func() {
		if _, ok := c.sources[id]; !ok {
			c.order = append(c.order, id)
		}
		c.sources[id] = src
		c.core.Register(id, have)
	})
	c.Report(id)
}

// Unregister forgets a region. An item that is being delivered may still arrive.
func (c *Client) Unregister(id pdpb.RegionID) {
	var waiters []*markWaiter
	c.with(func() {
		delete(c.sources, id)
		for i, o := range c.order {
			if o == id {
				c.order = append(c.order[:i], c.order[i+1:]...)
				break
			}
		}
		c.core.Unregister(id)
		waiters = c.takeMarks(func(w *markWaiter) bool { return w.rev == 0 && w.id == id })
	})
	for _, w := range waiters {
		w.done(ErrNotSubscribed)
	}
}

// State implements region.Order.
func (c *Client) State(id pdpb.RegionID) (mark pdpb.Mark, newest uint64, ok bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.core.State(id)
}

// Report implements region.Order. It may call the source's BuildReport, so the caller must hold
// no lock that this takes.
func (c *Client) Report(id pdpb.RegionID) {
	c.mu.RLock()
	src := c.sources[id]
	c.mu.RUnlock()
	if src == nil {
		return
	}
	leading := src.Leading()
	c.with(func() { c.core.Changed(id, leading) })
}

// WaitMark implements region.Order.
func (c *Client) WaitMark(ctx context.Context, id pdpb.RegionID, cut pdpb.Cut) error {
	if err := c.awaitMark(ctx, &markWaiter{id: id, cut: cut}); err != ctx.Err() || err == nil {
		return err
	}
	return fmt.Errorf("%w: waiting for cut %d of region %d: %w", ErrTimeout, cut, id, ctx.Err())
}

// WaitRevision returns once Mark().Rev >= rev, asking for a mark if need be (S4): somebody was told
// of this revision, so that there is or will be a cut which gave it.
func (c *Client) WaitRevision(ctx context.Context, rev mvcc.Revision) error {
	if err := c.awaitMark(ctx, &markWaiter{rev: rev}); err != ctx.Err() || err == nil {
		return err
	}
	return fmt.Errorf("%w: waiting for revision %d: %w", ErrTimeout, rev, ctx.Err())
}

func (c *Client) awaitMark(ctx context.Context, w *markWaiter) error {
	ch := make(chan error, 1)
	w.done = func(err error) { ch <- err }
	c.waitMark(w)
	select {
	case err := <-ch:
		return err
	case <-ctx.Done():
		c.with(func() { c.takeMarks(func(o *markWaiter) bool { return o == w }) })
		return ctx.Err()
	}
}

// WantMark asks for a mark at or after a cut, for whoever would like to hear of quiet regions
// without waiting (S4).
func (c *Client) WantMark(cut pdpb.Cut) {
	c.with(func() { c.core.WantMark(cut) })
}

// WaitMarkFunc is WaitMark for callers that must not block. done is called once, at once when
// the mark is there.
func (c *Client) WaitMarkFunc(id pdpb.RegionID, cut pdpb.Cut, done func(error)) {
	c.waitMark(&markWaiter{id: id, cut: cut, done: done})
}

func (c *Client) waitMark(w *markWaiter) {
	var err error
	now := true
	c.with(func() {
		switch {
		case c.closed:
			err = ErrClosed
		case w.rev == 0 && c.sources[w.id] == nil:
			err = ErrNotSubscribed
		case c.reached(w):
		default:
			now = false
			c.marks = append(c.marks, w)
			if w.rev == 0 {
				c.core.WantMark(w.cut)
			} else {
				c.core.WantMark(c.core.Newest().Cut + 1)
			}
		}
	})
	if now {
		w.done(err)
	}
}

// reached says whether a waiter's mark is here. Called with mu held.
func (c *Client) reached(w *markWaiter) bool {
	if w.rev > 0 {
		return c.core.Newest().Rev >= w.rev
	}
	mark, _, ok := c.core.State(w.id)
	return ok && mark.Cut >= w.cut
}

// takeMarks removes and returns waiters. Called with mu held.
func (c *Client) takeMarks(which func(*markWaiter) bool) (taken []*markWaiter) {
	kept := c.marks[:0]
	for _, w := range c.marks {
		if which(w) {
			taken = append(taken, w)
		} else {
			kept = append(kept, w)
		}
	}
	clear(c.marks[len(kept):])
	c.marks = kept
	return taken
}

// ReadPoint returns a confirmed position of the whole store: every write that was acknowledged
// before the call is at or below it (S1). All callers of the store share one request at a time.
// Errors: ErrNoLeader or ErrTimeout when ctx ends first, ErrOverloaded, ErrClosed.
func (c *Client) ReadPoint(ctx context.Context) (pdpb.ReadPoint, error) {
	type answer struct {
		p   pdpb.ReadPoint
		err error
	}
	ch := make(chan answer, 1)
	r := c.readPoint(func(p pdpb.ReadPoint, err error) { ch <- answer{p, err} })
	select {
	case a := <-ch:
		return a.p, a.err
	case <-ctx.Done():
		c.mu.Lock()
		r.gone = true
		c.gone++
		c.mu.Unlock()
		return pdpb.ReadPoint{}, c.late(ctx)
	}
}

// ReadPointFunc is ReadPoint for callers that must not block; it waits for a leader without limit.
func (c *Client) ReadPointFunc(done func(pdpb.ReadPoint, error)) { c.readPoint(done) }

func (c *Client) readPoint(done func(pdpb.ReadPoint, error)) *reader {
	r := &reader{done: done}
	var err error
	c.with(func() {
		switch {
		case c.closed:
			err = ErrClosed
		case len(c.readers)+len(c.asking) >= c.cfg.ReadsMax:
			err = ErrOverloaded
		default:
			c.readers = append(c.readers, r)
			c.core.WantRead(true)
		}
	})
	if err != nil {
		done(pdpb.ReadPoint{}, err)
	}
	return r
}

func (c *Client) late(ctx context.Context) error {
	c.mu.RLock()
	leader := c.core.Role().Leader
	c.mu.RUnlock()
	if leader == 0 {
		return fmt.Errorf("%w: %w", ErrNoLeader, ctx.Err())
	}
	return fmt.Errorf("%w: %w", ErrTimeout, ctx.Err())
}

// Propose has an event executed at its place in the order. Events that may be executed twice
// without harm are repeated until they are answered; a Compact whose fate is unknown is not:
// ErrUnknown. The result is valid also with ErrCompacted and ErrFutureRevision.
func (c *Client) Propose(ctx context.Context, e Event) (EventResult, error) {
	type answer struct {
		r   EventResult
		err error
	}
	ch := make(chan answer, 1)
	token := c.propose(e, func(r EventResult, err error) { ch <- answer{r, err} })
	select {
	case a := <-ch:
		return a.r, a.err
	case <-ctx.Done():
		c.with(func() {
			delete(c.events, token)
			c.core.Forget(token)
		})
		return EventResult{}, c.late(ctx)
	}
}

// ProposeFunc is Propose for callers that must not block.
func (c *Client) ProposeFunc(e Event, done func(EventResult, error)) { c.propose(e, done) }

func (c *Client) propose(e Event, done func(EventResult, error)) (token uint64) {
	var err error
	c.with(func() {
		c.lastToken++
		token = c.lastToken
		switch {
		case c.closed:
			err = ErrClosed
		case !c.core.Propose(e, token):
			err = ErrOverloaded
		default:
			c.events[token] = done
		}
	})
	if err != nil {
		done(EventResult{}, err)
	}
	return token
}

// Compact moves the logical compaction floor (C3) and returns the revision of the store at that
// point, for the response's header. Errors: ErrCompacted, ErrFutureRevision (both with the
// revision), ErrUnknown, ErrNoLeader, ErrTimeout.
//
// What the store hashes to at the revision may come along, to be remembered; a zero hash is none.
func (c *Client) Compact(ctx context.Context, rev int64, hash pdpb.CompactHash) (mvcc.Revision, error) {
	r, err := c.Propose(ctx, Event{Kind: EventCompact, Rev: mvcc.Revision(rev), Hash: hash})
	return r.Mark.Rev, err
}

// CompactHash returns the hash that came with a compaction at rev, or a zero one.
func (c *Client) CompactHash(ctx context.Context, rev mvcc.Revision) (pdpb.CompactHash, error) {
	r, err := c.Propose(ctx, Event{Kind: EventCompactHash, Rev: rev})
	if errors.Is(err, ErrForgotten) {
		err = nil
	}
	return r.Hash, err
}

// RaiseFence voids what is evaluated under the present fence and ordered after this (F1).
func (c *Client) RaiseFence(ctx context.Context) (pdpb.Fence, error) {
	r, err := c.Propose(ctx, Event{Kind: EventRaiseFence})
	return r.Mark.Fence, err
}

// Abort aborts an attempt of a transaction unless it is decided, and says how it was decided:
// ErrAborted, or nil with the revision of its commit. Other errors leave the outcome open;
// ErrForgotten is final.
func (c *Client) Abort(ctx context.Context, attempt pdpb.AttemptID) (mvcc.Revision, error) {
	r, err := c.Propose(ctx, Event{Kind: EventAbort, Attempt: attempt})
	return r.Rev, err
}

// AllocIDs returns the first of n consecutive ids that nobody else gets.
func (c *Client) AllocIDs(ctx context.Context, n uint64) (first uint64, err error) {
	r, err := c.Propose(ctx, Event{Kind: EventAllocIDs, N: n})
	return r.FirstID, err
}

// RegisterStore adds a store to the directory, or replaces what it says of it.
func (c *Client) RegisterStore(ctx context.Context, s pdpb.Store) error {
	_, err := c.Propose(ctx, Event{Kind: EventRegisterStore, Store: s})
	return err
}

// Directory is the newest known picture of the cluster; nil before it exists.
func (c *Client) Directory() *Directory {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.dir
}

// Regions are the directory's regions by start key; the slice is shared and must not be changed.
func (c *Client) Regions() []pdpb.Descriptor {
	if d := c.Directory(); d != nil {
		return d.Regions
	}
	return nil
}

// RegionsVersion is the directory's version; 0 before it exists.
func (c *Client) RegionsVersion() uint64 {
	if d := c.Directory(); d != nil {
		return d.Version
	}
	return 0
}

// Stores are the directory's stores by id; the slice is shared and must not be changed.
func (c *Client) Stores() []pdpb.Store {
	if d := c.Directory(); d != nil {
		return d.Stores
	}
	return nil
}

// Mark is the newest mark that reached this store.
func (c *Client) Mark() pdpb.Mark {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.core.Newest()
}

// Leader is pd's leader as far as known, and its term.
func (c *Client) Leader() (store raftid.StoreID, term uint64) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	r := c.core.Role()
	return r.Leader, r.Term
}

// StandsStillSince says since when this store has been cut off from the order, by the clock of
// Tick; ok is false while it is not. Leaders of regions should move elsewhere (S5).
func (c *Client) StandsStillSince() (since time.Duration, ok bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.core.StandsStillSince()
}

// Close fails every waiter with ErrClosed; later calls fail at once.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	readers := append(c.readers, c.asking...)
	events, marks := c.events, c.marks
	c.readers, c.asking, c.marks = nil, nil, nil
	c.events = map[uint64]func(EventResult, error){}
	c.core.WantRead(false)
	c.mu.Unlock()
	for _, r := range readers {
		r.done(pdpb.ReadPoint{}, ErrClosed)
	}
	for _, done := range events {
		done(EventResult{}, ErrClosed)
	}
	for _, w := range marks {
		w.done(ErrClosed)
	}
}

var errNoNet = errors.New("order: no way to other stores")
