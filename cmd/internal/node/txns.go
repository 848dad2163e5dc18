package node

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"

	"braid/mvcc"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/raftstore/transport"
	"braid/region"
	"braid/region/regionpb"
)

// Methods of transactions over several regions.
const (
	methodLock    transport.Method = 34
	methodPrepare transport.Method = 35
	methodRelease transport.Method = 36
)

// A release on its way to another store is sent again until it has come: what it would leave locked is
// locked for everybody until the lock runs out, and a link that has lost it may come back long before,
// and long before its end is counted as down. Each is waited for, and all together no longer than a lock lasts.
const (
	releaseTimeout = time.Second
	releasePause   = 100 * time.Millisecond
)

func (s *stores) registerTxns() {
	s.node.net.HandleCall(methodLock, s.serveLock)
	s.node.net.HandleCall(methodPrepare, s.servePrepare)
	s.node.net.HandleCall(methodRelease, s.serveRelease)
	s.node.net.OnDown(func(store raftid.StoreID) {
		for _, h := range s.node.regions.all() {
			if h.Stats().Locks > 0 {
				h.OwnerDown(store)
			}
		}
	})
}

// toLeader sends a request to the region's leader on another store.
func (s *stores) toLeader(ctx context.Context, id pdpb.RegionID, leader raftid.StoreID, m transport.Method, payload []byte) ([]byte, error) {
	if leader == 0 {
		return nil, regionpb.ErrorOf(regionpb.NotLeader)
	}
	return s.call(ctx, leader, m, payload)
}

// Lock implements router.Stores.
func (s *stores) Lock(ctx context.Context, d pdpb.Descriptor, req *regionpb.LockRequest) (regionpb.LockGrant, error) {
	h := s.node.regions.get(d.ID)
	leader, here := s.leader(h, &d)
	if !here {
		data, err := s.toLeader(ctx, d.ID, leader, methodLock, regionpb.AppendLockRequest(nil, req))
		if err != nil {
			return regionpb.LockGrant{}, err
		}
		g, err := regionpb.DecodeLockResponse(data)
		s.learn(d.ID, err)
		return g, err
	}
	type outcome struct {
		grant regionpb.LockGrant
		err   error
	}
	ch := make(chan outcome, 1)
	lockHere(h.Replica, s.node.self, req, func(g regionpb.LockGrant, err error) { ch <- outcome{g, err} })
	select {
	case o := <-ch:
		return o.grant, o.err
	case <-ctx.Done():
		return regionpb.LockGrant{}, ctx.Err()
	}
}

func lockHere(r *region.Replica, owner raftid.StoreID, req *regionpb.LockRequest, reply func(regionpb.LockGrant, error)) {
	if d := r.Descriptor(); d.Epoch != req.Epoch {
		reply(regionpb.LockGrant{}, &regionpb.Error{Code: regionpb.EpochMismatch, Descriptor: &d})
		return
	}
	r.Lock(&region.Lock{Attempt: req.Attempt, Age: req.Age, Owner: owner, Spans: req.Locks, Term: req.Term, Now: req.Now, Reply: reply})
}

// serveLock takes a request from another store. Whoever does not wait for the answer any more, or
// cannot get it, must not be granted locks later on: others would wait until they run out.
func (s *stores) serveLock(ctx context.Context, from raftid.StoreID, payload []byte, reply func([]byte, error)) {
	req, err := regionpb.DecodeLockRequest(payload)
	if err != nil {
		reply(nil, err)
		return
	}
	h := s.node.regions.get(req.Region)
	if h == nil {
		reply(regionpb.AppendLockResponse(nil, nil, regionpb.ErrorOf(regionpb.RegionNotFound)), nil)
		return
	}
	stop := context.AfterFunc(ctx, func() { h.Release(req.Attempt) })
	lockHere(h.Replica, from, req, func(g regionpb.LockGrant, err error) {
		stop()
		reply(regionpb.AppendLockResponse(nil, &g, err), nil)
	})
}

// Prepare implements router.Stores.
func (s *stores) Prepare(ctx context.Context, d pdpb.Descriptor, req *regionpb.PrepareRequest) (mvcc.Revision, error) {
	h := s.node.regions.get(d.ID)
	leader, here := s.leader(h, &d)
	if !here {
		data, err := s.toLeader(ctx, d.ID, leader, methodPrepare, regionpb.AppendPrepareRequest(nil, req))
		if err != nil {
			return 0, err
		}
		rev, err := regionpb.DecodePrepareResponse(data)
		s.learn(d.ID, err)
		return rev, err
	}
	type outcome struct {
		rev mvcc.Revision
		err error
	}
	ch := make(chan outcome, 1)
	h.Prepare(&region.Prepare{Request: req, Reply: func(rev mvcc.Revision, err error) { ch <- outcome{rev, err} }})
	select {
	case o := <-ch:
		return o.rev, o.err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

func (s *stores) servePrepare(_ context.Context, _ raftid.StoreID, payload []byte, reply func([]byte, error)) {
	req, err := regionpb.DecodePrepareRequest(payload)
	if err != nil {
		reply(nil, err)
		return
	}
	answer := func(rev mvcc.Revision, err error) { reply(regionpb.AppendPrepareResponse(nil, rev, err), nil) }
	if h := s.node.regions.get(req.Region); h != nil {
		h.Prepare(&region.Prepare{Request: req, Reply: answer})
	} else {
		answer(0, regionpb.ErrorOf(regionpb.RegionNotFound))
	}
}

// Release implements router.Stores.
func (s *stores) Release(d pdpb.Descriptor, req *regionpb.ReleaseRequest) {
	h := s.node.regions.get(d.ID)
	leader, here := s.leader(h, &d)
	if here {
		h.Release(req.Attempt)
		return
	}
	select {
	case s.releases <- struct{}{}:
	default:
		return // so many are on their way already that the locks may as well run out
	}
	s.node.wg.Go(func() {
		defer func() { <-s.releases }()
		all, cancel := context.WithTimeout(s.node.ctx, lockTime(s.node.requestTimeout()))
		defer cancel()
		payload := regionpb.AppendReleaseRequest(nil, req)
		for {
			ctx, cancel := context.WithTimeout(all, releaseTimeout)
			_, err := s.toLeader(ctx, d.ID, leader, methodRelease, payload)
			cancel()
			if err == nil {
				return
			}
			select {
			case <-all.Done():
				s.node.log.Debug("a lock's release was lost", zap.Uint64("region", uint64(d.ID)), zap.Error(err))
				return
			case <-time.After(releasePause):
			}
			// What was granted in a term ends with it; so a leader that follows need not be told, but may.
			if leader, here = s.leader(h, &d); here {
				return
			}
		}
	})
}

func (s *stores) serveRelease(_ context.Context, _ raftid.StoreID, payload []byte, reply func([]byte, error)) {
	req, err := regionpb.DecodeReleaseRequest(payload)
	if err == nil {
		if h := s.node.regions.get(req.Region); h != nil {
			h.Release(req.Attempt)
		}
	}
	reply(nil, err)
}

// lockTime is how long what is granted to a coordinator is kept for it.
func lockTime(request time.Duration) time.Duration { return request + time.Second }

// lockLimits are the times of locks in ticks: seconds, however long a tick is. A lock lasts for longer
// than a request may take: whoever evaluates under it for long must find it still there, and where
// its coordinator has gone it ends at once.
func lockLimits(tick, request time.Duration) region.Limits {
	ticks := func(d time.Duration) int { return max(1, int(d/tick)) }
	return region.Limits{
		LockTicksMax: ticks(lockTime(request)), LockWaitTicksMax: ticks(5 * time.Second),
		AbortTicks: ticks(2 * time.Second), StandBackTicks: ticks(300 * time.Millisecond),
	}
}

// attemptBlock is how many attempt ids a node takes from pd at a time, attemptBlockAge how long it
// uses them: ids say which attempt is older, and pd forgets old ones.
const (
	attemptBlock    = 64
	attemptBlockAge = 2 * time.Second
)

// attemptIDs hands out ids from blocks.
type attemptIDs struct {
	mu         sync.Mutex // held while a block is fetched: everybody else needs the same
	next, left uint64
	until      time.Time
}

func (a *attemptIDs) take(ctx context.Context, fresh bool, alloc func(ctx context.Context, n uint64) (uint64, error)) (pdpb.AttemptID, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.left == 0 || fresh || time.Now().After(a.until) {
		first, err := alloc(ctx, attemptBlock)
		if err != nil {
			return 0, err
		}
		a.next, a.left, a.until = first, attemptBlock, time.Now().Add(attemptBlockAge)
	}
	id := a.next
	a.next++
	a.left--
	return pdpb.AttemptID(id), nil
}

// Attempt implements router.Oracle.
func (o *multiOracle) Attempt(ctx context.Context, fresh bool) (pdpb.AttemptID, error) {
	id, err := o.attempts.take(ctx, fresh, o.client.AllocIDs)
	return id, orderError(err)
}

// Abort implements router.Oracle.
func (o *multiOracle) Abort(ctx context.Context, attempt pdpb.AttemptID) (mvcc.Revision, error) {
	rev, err := o.client.Abort(ctx, attempt)
	return rev, orderError(err)
}

// abandonsMax bounds the questions of Abandon on their way; one too many is dropped, and the regions ask.
const abandonsMax = 256

// Abandon implements router.Oracle, and is what regions ask when a decision does not come (T6); they
// repeat it, and the client of pd sends it again where a link has lost it.
func (o *multiOracle) Abandon(attempt pdpb.AttemptID) {
	if o.abandons.Add(1) > abandonsMax {
		o.abandons.Add(-1)
		return
	}
	o.client.ProposeFunc(order.Event{Kind: order.EventAbort, Attempt: attempt}, func(order.EventResult, error) { o.abandons.Add(-1) })
}

// errOneRegion says that a store of one region has no transactions over several.
var errOneRegion = errors.New("node: a single-group store has one region")

// Attempt implements router.Oracle; it is never asked for.
func (o *singleOracle) Attempt(context.Context, bool) (pdpb.AttemptID, error) { return 0, errOneRegion }

// Abandon implements router.Oracle; it is never asked for.
func (o *singleOracle) Abandon(pdpb.AttemptID) {}

// Abort implements router.Oracle; it is never asked for.
func (o *singleOracle) Abort(context.Context, pdpb.AttemptID) (mvcc.Revision, error) {
	return 0, errOneRegion
}
