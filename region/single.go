package region

import (
	"errors"
	"fmt"

	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/region/regionpb"
)

// Single-group mode (architecture 12): this group's log holds the placement machine's commands
// too, and every entry that is not silent is a cut of its own, made by each replica from the
// committed log through the Orderer. The rest of the replica does not notice.

// nextOwn is the committed entry that is to be ordered next; nil when there is none, or when pd
// orders.
func (r *Replica) nextOwn() *entryInfo {
	if r.cfg.Orderer == nil || r.in.head == len(r.in.window) {
		return nil
	}
	e := &r.in.window[r.in.head]
	if e.silent || e.index > r.in.committed {
		return nil
	}
	return e
}

// orderOwn makes the item of the next entry, which is applied at once.
func (r *Replica) orderOwn(e *entryInfo) error {
	stamp := e.fence
	if e.meta || e.void {
		stamp = r.pos.Fence // they have none of their own, and consume nothing
	}
	it := r.cfg.Orderer.OrderCommitted(pdpb.Report{
		Region: r.id, Incarnation: r.in.desc.Incarnation,
		From: r.in.upto, Upto: e.index, UptoTerm: e.term, Cum: r.in.cum + e.count,
		Runs: []pdpb.Run{{Index: e.index, Stamp: stamp, Cum: r.in.cum + e.count}},
		// Nobody keeps items for this group, so nothing needs a seal.
		Sealed: r.in.item,
	})
	if it.N != r.in.item+1 || it.Upto != e.index {
		return fmt.Errorf("%w: entry %d was ordered as item %d up to %d", ErrDiverged, e.index, it.N, it.Upto)
	}
	return r.in.AddItem(&it)
}

// metaWrite is a command of the placement machine that waits for its place in the log.
type metaWrite struct {
	payload []byte
	done    func(error)
}

// size is what a command counts for in the queue.
func (m *metaWrite) size() int { return 64 + len(m.payload) }

// ProposeMeta puts a command of the placement machine into the log. done is called once, after
// MetaMachine.ApplyMeta and once its effects are visible, or with a *regionpb.Error. Any
// goroutine. The queue is bounded together with that of writes.
func (r *Replica) ProposeMeta(payload []byte, done func(error)) {
	m := &metaWrite{payload: payload, done: done}
	r.mu.Lock()
	var refuse *regionpb.Error
	switch {
	case r.mu.stopped:
		refuse = ErrStopped
	case !r.mu.leading:
		refuse = &regionpb.Error{Code: regionpb.NotLeader, Leader: r.mu.leader}
	case !r.mu.admit(&r.lim, m.size()):
		refuse = regionpb.ErrorOf(regionpb.TooManyRequests)
	default:
		r.mu.metas = append(r.mu.metas, m)
	}
	r.mu.Unlock()
	if refuse != nil {
		done(refuse)
		return
	}
	r.cfg.Wake()
}

// proposeMeta proposes the first waiting command; false when raft dropped it.
func (r *Replica) proposeMeta(h raftstore.Handle) bool {
	m := r.metas[0]
	index, term, err := h.Propose(regionpb.EncodeMeta(m.payload))
	if err != nil {
		if !errors.Is(err, raftstore.ErrDropped) {
			r.fail(fmt.Errorf("proposing: %w", err))
		}
		return false
	}
	r.metas[0] = nil
	r.metas = r.metas[1:]
	r.leftQueue(1, m.size())
	r.inflight.push(&proposal{index: index, term: term, meta: m, bytes: len(m.payload) + 64})
	return true
}
