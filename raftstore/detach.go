package raftstore

import (
	"fmt"
	"runtime/debug"
)

// A machine that finds that it has much to do, a deletion of a million keys or an engine that is
// slow to take what is applied, does it beside its group: it detaches a function, and is parked
// until that has returned (Handle.Detach). Raft goes on meanwhile, so a leader keeps its quorum and
// a follower acknowledges; what changes is collected and told afterwards.

// Detach implements Handle.
func (g *Group) Detach(f func()) {
	if !g.work || g.detach != nil {
		panic(fmt.Sprintf("raftstore: group %d: detached outside of Work, or twice", g.cfg.ID))
	}
	g.detach = f
}

// park hands over what Work detached; false when it was nothing.
func (g *Group) park() bool {
	if g.detach == nil {
		return false
	}
	g.out.Detached, g.detach, g.parked = g.detach, nil, true
	return true
}

func (g *Group) takeDetached() {
	if !g.parked {
		panic(fmt.Sprintf("raftstore: group %d: something ended that was not detached", g.cfg.ID))
	}
	g.parked = false
}

// runDetached runs f in a goroutine of its own and tells the group of its end. It has begun when
// Close lets it: a store that closes waits for it, and gives the group no turn after it.
func (s *Store) runDetached(r *replica, f func()) {
	r.mail.Lock()
	r.mail.detached = true
	r.mail.Unlock()
	run := func() {
		defer func() {
			if v := recover(); v != nil {
				// As in a worker: the group is left as it is, parked.
				s.fail(fmt.Errorf("raftstore: %v\n%s", v, debug.Stack()))
			}
		}()
		s.detached <- struct{}{}
		defer func() { <-s.detached }()
		f()
		r.mail.Lock()
		defer r.mail.Unlock()
		r.mail.detached = false
		r.mail.in.Detached = true
		r.idle.Broadcast()
		if !r.mail.removed {
			r.schedule()
		}
	}
	if !s.task(run) {
		r.mail.Lock()
		r.mail.detached = false
		r.idle.Broadcast()
		r.mail.Unlock()
	}
}
