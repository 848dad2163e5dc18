package sim

import (
	"context"

	"braid/mvcc"
	"braid/pd/order"
	"braid/pd/pdpb"
)

// eventCall is an administrator's call that waits: nobody answers when its store crashes.
type eventCall struct {
	name  string
	store int
	life  uint64
	done  bool
}

func (c *checker) propose(s *store, e order.Event, done func(order.EventResult, error)) {
	call := &eventCall{name: e.String(), store: s.i, life: s.life}
	c.events = append(c.events, call)
	s.oracle.ProposeFunc(e, func(r order.EventResult, err error) {
		call.done = true
		done(r, err)
	})
}

// raiseFence has pd raise the fence, as a change of authorisations will.
func (c *checker) raiseFence(s *store) {
	if !s.up {
		return
	}
	c.w.stats.Fences++
	c.propose(s, order.Event{Kind: order.EventRaiseFence}, func(r order.EventResult, err error) {
		if err == nil {
			c.ackFence = max(c.ackFence, r.Mark.Fence)
		}
	})
}

// compact asks for a compaction near the newest revision, now and then beyond it.
func (c *checker) compact(s *store) {
	if !s.up {
		return
	}
	rev := max(0, c.mark.Rev+2-mvcc.Revision(c.w.rng.IntN(60)))
	c.w.stats.Compactions++
	c.propose(s, order.Event{Kind: order.EventCompact, Rev: rev}, func(r order.EventResult, err error) {
		if err == nil {
			c.ackFloor, s.ackFloor = max(c.ackFloor, rev), max(s.ackFloor, rev)
			s.hub.Compacted(rev)
		}
	})
}

// checkEvents holds what a cut's events did against their place in the sequence (C3, F1, P3).
func (c *checker) checkEvents(m pdpb.Mark, events []order.Event, results []order.EventResult) {
	floor, fence := c.mark.Floor, c.mark.Fence
	for i := range events {
		want := order.Done
		switch e := &events[i]; {
		case e.Kind == order.EventAbort:
			continue // cutDecided has seen what came of it
		case e.Kind == order.EventRaiseFence:
			fence++
		case e.Kind == order.EventCompact && e.Rev <= floor:
			want = order.Compacted
		case e.Kind == order.EventCompact && e.Rev > m.Rev:
			want = order.Future
		case e.Kind == order.EventCompact:
			floor = e.Rev
		}
		if got := results[i]; got.Outcome != want || got.Mark.Floor != floor || got.Mark.Fence != fence || got.Mark.Rev != m.Rev {
			c.w.fail("I3: event %v of cut %d came to %v", &events[i], m.Cut, &got)
		}
	}
	if m.Floor != floor || m.Fence != fence {
		c.w.fail("I3: after its events cut %d is %v, not floor %d and fence %d", m.Cut, m, floor, fence)
	}
}

// collect removes superseded versions, as a node's collector does: the floor goes into the
// region's state first (C1).
func (c *checker) collect(s *store) {
	floor := s.oracle.Mark().Floor
	if floor <= 0 {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // the request is taken at once and carried out in the group's next turn
	for i := range c.w.cfg.Regions {
		g := c.readable(s, i)
		if g == nil {
			continue
		}
		c.checkFloor(s, g)
		if c.w.mut.removeFirst {
			c.w.stats.Removed += int(s.engine.GC(c.w.region(i).Span, 0, min(floor, g.replica.CompleteThrough())).Removed)
		}
		if to := g.replica.Applied().Floor; to > s.collected[g.id] {
			s.collected[g.id] = to
			st := s.engine.GC(c.w.region(i).Span, 0, to)
			c.w.stats.GCs++
			c.w.stats.Removed += int(st.Removed)
			c.w.event("s%d g%d collects to %d: %d", s.i, g.id, to, st.Removed)
		}
		if _, err := g.replica.RaiseFloor(ctx, floor); err != nil && ctx.Err() == nil {
			c.w.fail("store %d region %d: %v", s.i, g.id, err)
		}
	}
}

// checkFloor checks that a region's floor is one that a cut has ordered (I5).
func (c *checker) checkFloor(s *store, g *group) {
	if at := g.replica.Applied().Floor; at > c.mark.Floor {
		c.w.fail("I5: store %d has floor %d of region %d, and cuts have ordered %d", s.i, at, g.id, c.mark.Floor)
	}
}
