package node

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"braid/mvcc"
	"braid/raftstore/raftid"
	"braid/region/regionpb"
)

// This file is the side of a node that has a replica: it answers those that have none and serve
// watches all the same. It keeps nothing between two questions, so an asker that goes away leaves
// nothing behind, and one that is slow asks less often.

const (
	// followsMax bounds the questions that wait here; each node has one or two of them.
	followsMax = 64
	// followRevisions and followBytes bound an answer, except that a revision is never torn.
	followRevisions = 4096
	followBytes     = 1 << 20
	// followWaitMax bounds how long an answer waits for something to say.
	followWaitMax = 10 * time.Second
)

// follows wakes the questions that wait on this node.
type follows struct {
	slots   chan struct{}
	count   atomic.Int32 // of waiting, so that nobody else pays for a lock
	mu      sync.Mutex
	waiting map[chan struct{}]struct{}
}

func newFollows() *follows {
	return &follows{slots: make(chan struct{}, followsMax), waiting: map[chan struct{}]struct{}{}}
}

// wake says that some region here may be complete through more than before. It does not block.
func (f *follows) wake() {
	if f.count.Load() == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for ch := range f.waiting {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// join begins to be woken; what happened before is to be looked at afterwards.
func (f *follows) join() (woken <-chan struct{}, leave func()) {
	ch := make(chan struct{}, 1)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.waiting[ch] = struct{}{}
	f.count.Add(1)
	return ch, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.waiting, ch)
		f.count.Add(-1)
	}
}

// registerFollows makes other nodes' questions about events reach this one.
func (s *stores) registerFollows() {
	s.node.net.HandleCall(methodFollow, s.serveFollow)
	s.node.net.HandleCall(methodPast, func(ctx context.Context, _ raftid.StoreID, payload []byte, reply func([]byte, error)) {
		s.servePast(ctx, payload, reply, s.pastEvents)
	})
	s.node.net.HandleCall(methodGet, func(ctx context.Context, _ raftid.StoreID, payload []byte, reply func([]byte, error)) {
		s.servePast(ctx, payload, reply, s.pastGet)
	})
}

// serveFollow answers with what has happened, once something has.
func (s *stores) serveFollow(ctx context.Context, _ raftid.StoreID, payload []byte, reply func([]byte, error)) {
	q, err := decodeFollowQuery(payload)
	if err != nil {
		reply(nil, err)
		return
	}
	s.serveIn(s.node.followed.slots, func(err error) {
		if err == nil {
			err = s.awaitFollowed(ctx, q)
		}
		if err != nil {
			reply(nil, err)
			return
		}
		reply(appendFollowAnswer(nil, q.regions), nil)
	})
}

// awaitFollowed fills in the regions of a query, when one of them has something new or the wait is over.
func (s *stores) awaitFollowed(ctx context.Context, q *followQuery) error {
	woken, leave := s.node.followed.join()
	defer leave()
	timer := time.NewTimer(min(time.Duration(min(q.waitMs, 1<<30))*time.Millisecond, followWaitMax))
	defer timer.Stop()
	s.node.wantRevision(q.want)
	for over := false; ; {
		if s.lookFollowed(q) || over {
			return nil
		}
		select {
		case <-woken:
		case <-timer.C:
			over = true
		case <-ctx.Done():
			return ctx.Err()
		case <-s.node.ctx.Done():
			return regionpb.ErrorOf(regionpb.Stopped)
		}
	}
}

// lookFollowed fills in what there is, and says whether there is anything.
func (s *stores) lookFollowed(q *followQuery) (news bool) {
	left := followBytes
	for i := range q.regions {
		f := &q.regions[i]
		h := s.node.regions.get(f.id)
		if h == nil {
			f.state, news = followAbsent, true
			continue
		}
		src := watchSource{h}
		f.state, f.led, f.floor, f.through, f.events = followWhole, src.Led(), src.Floor(), f.after, nil
		if left <= 0 {
			continue // its turn is next time
		}
		events, through, ok := h.feed.Since(f.after, followRevisions, left)
		if !ok {
			f.state = followGap
		}
		if through > f.after {
			f.through, f.events, news = through, events, true
		}
		for j := range events {
			left -= len(events[j].Key) + len(events[j].Value) + followEventBytes
		}
	}
	return news
}

// followEventBytes is about what an event takes beside its key and value.
const followEventBytes = 32

// servePast answers a question about the past on a goroutine of its own, one of a bounded number.
func (s *stores) servePast(ctx context.Context, payload []byte, reply func([]byte, error), look func(context.Context, *hosted, *pastQuery) (*pastAnswer, error)) {
	q, err := decodePastQuery(payload)
	if err != nil {
		reply(nil, err)
		return
	}
	s.serve(func(err error) {
		if err != nil {
			reply(nil, err)
			return
		}
		h := s.node.regions.get(q.region)
		if h == nil {
			reply((&pastAnswer{state: followAbsent, end: q.from - 1}).append(nil), nil)
			return
		}
		a, err := look(ctx, h, q)
		// The floor is looked at after the read: it rises before the first removal (C1), so a read that
		// it has passed proves nothing, whatever it found.
		floor := watchSource{h}.Floor()
		switch {
		case floor > q.from:
			a = &pastAnswer{state: pastGone, end: q.from - 1}
		case err != nil:
			reply(nil, err)
			return
		}
		a.floor = floor
		reply(a.append(nil), nil)
	})
}

var errPageFull = errors.New("node: the page is full")

// pastEvents reads a page of history, which ends before what this replica is not complete through.
func (s *stores) pastEvents(ctx context.Context, h *hosted, q *pastQuery) (*pastAnswer, error) {
	a := &pastAnswer{end: min(q.to, h.feed.Through())}
	if a.end < q.from {
		a.end = q.from - 1
		return a, nil
	}
	size, bytesMax := 0, min(q.bytesHint, followBytes)
	err := s.node.engine.Events(ctx, q.from, a.end, q.span.Intersect(h.Descriptor().Span), func(v *mvcc.Version) error {
		if n := len(a.events); size >= bytesMax && n > 0 && a.events[n-1].Mod != v.Mod {
			a.end = v.Mod - 1
			return errPageFull
		}
		c := *v
		c.Key, c.Value = bytes.Clone(v.Key), bytes.Clone(v.Value)
		a.events = append(a.events, c)
		size += len(v.Key) + len(v.Value) + followEventBytes
		return nil
	})
	if err != nil && !errors.Is(err, errPageFull) {
		return nil, err
	}
	return a, nil
}

// pastGet reads what a key held at a revision.
func (s *stores) pastGet(_ context.Context, h *hosted, q *pastQuery) (*pastAnswer, error) {
	a := &pastAnswer{end: q.to}
	if h.feed.Through() < q.to {
		a.end = q.from - 1 // not complete
		return a, nil
	}
	v, ok, err := s.node.engine.Get(q.span.Start, q.to)
	if err != nil {
		return nil, err
	}
	if ok {
		a.events = []mvcc.Version{v}
	}
	return a, nil
}
