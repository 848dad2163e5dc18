package region

import (
	"bytes"
	"context"
	"encoding/binary"

	"go.etcd.io/raft/v3"

	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/raftstore/raftid"
	"braid/region/regionpb"
)

// readIndexer batches questions for a confirmed quorum: one ReadIndex of raft at a time, and whoever
// comes while it is on its way takes the next. It belongs to the group's owner.
type readIndexer struct {
	seq uint64
	ctx []byte // of the request on its way
	// term is that in which this replica led when it sent the request; 0 when it did not lead. Raft
	// forgets a leader's own request when its term ends, so an answer confirms that term.
	term    uint64
	waiting []readIndexWaiter // for the request on its way
	age     int               // ticks since it was sent
}

// readIndexWaiter is told the answer by the group's owner, and must not wait.
type readIndexWaiter func(readIndexResult)

type readIndexResult struct {
	index, term uint64
	err         error
}

// readIndexRetryTicks is when an unanswered ReadIndex is asked again: raft drops one that meets
// no leader.
const readIndexRetryTicks = 10

// ReadPoint confirms the quorum of a single-group store and returns a position that includes
// everything acknowledged before the call (S1). Any goroutine.
func (r *Replica) ReadPoint(ctx context.Context) (pdpb.ReadPoint, error) {
	answered := make(chan readIndexResult, 1)
	r.readIndex(func(res readIndexResult) { answered <- res })
	var res readIndexResult
	select {
	case res = <-answered:
	case <-ctx.Done():
		return pdpb.ReadPoint{}, ctx.Err()
	}
	if res.err != nil {
		return pdpb.ReadPoint{}, res.err
	}
	if err := r.awaitApplied(ctx, appliedWaiter{index: res.index}); err != nil {
		return pdpb.ReadPoint{}, err
	}
	p, _ := r.PointAt(res.index)
	return p, nil
}

// ReadIndex is the first half of ReadPoint for who cannot wait: done is called once, by the group's
// owner, with the index whose PointAt is the point. Any goroutine.
func (r *Replica) ReadIndex(done func(index uint64, err error)) {
	r.readIndex(func(res readIndexResult) { done(res.index, res.err) })
}

// PointAt is the read point of this replica if it has applied index. Any goroutine.
func (r *Replica) PointAt(index uint64) (pdpb.ReadPoint, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return pdpb.ReadPoint{Cut: r.mu.applied.Cut, Rev: r.mu.vouched, Floor: r.mu.floor}, r.mu.applied.Index >= index
}

// ConfirmLeader asks a quorum whether this replica leads. done is called once, by the group's owner,
// with the term in which it did at some moment after the call; with 0 when another does. It waits until
// there is a leader. Any goroutine.
func (r *Replica) ConfirmLeader(done func(term uint64, err error)) {
	r.readIndex(func(res readIndexResult) { done(res.term, res.err) })
}

// readIndex has w told the answer to a ReadIndex that is sent after the call.
func (r *Replica) readIndex(w readIndexWaiter) {
	var refuse error
	r.mu.Lock()
	switch {
	case r.mu.stopped:
		refuse = ErrStopped
	case len(r.mu.reads) >= r.lim.QueueCountMax:
		refuse = regionpb.ErrorOf(regionpb.TooManyRequests)
	default:
		r.mu.reads = append(r.mu.reads, w)
	}
	r.mu.Unlock()
	if refuse != nil {
		w(readIndexResult{err: refuse})
		return
	}
	r.cfg.Wake()
}

// readIndexContext names a request. No other request of the group may ever have the same name: raft
// counts the heartbeats that a quorum answers by it, and one that was asked earlier, by another replica
// or in an earlier life of this one, would make a deposed leader seem confirmed; so would its late
// answer be taken for one to a later question.
func readIndexContext(self raftid.ReplicaID, life, seq uint64) []byte {
	b := make([]byte, 0, 24)
	for _, v := range [...]uint64{uint64(self), life, seq} {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	return b
}

func (ri *readIndexer) empty() bool { return len(ri.waiting) == 0 }

// answered takes raft's answers; only the newest request's counts.
func (ri *readIndexer) answered(states []raft.ReadState) {
	for _, s := range states {
		if len(ri.waiting) > 0 && bytes.Equal(s.RequestCtx, ri.ctx) {
			for _, w := range ri.waiting {
				w(readIndexResult{index: s.Index, term: ri.term})
			}
			ri.waiting = nil
		}
	}
}

// roleChanged makes the next call ask again: the request may have gone to the old leader.
func (ri *readIndexer) roleChanged() { ri.age = readIndexRetryTicks }

func (ri *readIndexer) stop(more []readIndexWaiter) {
	for _, w := range append(ri.waiting, more...) {
		w(readIndexResult{err: ErrStopped})
	}
	ri.waiting = nil
}

// serveReadIndex asks raft for those who wait. A leader asks only once the entry that opens its
// term is applied: a single voter would answer before (A13).
func (r *Replica) serveReadIndex(h raftstore.Handle, ticks int) {
	ri := &r.readIdx
	ri.age += ticks
	if len(ri.waiting) > 0 && ri.age < readIndexRetryTicks {
		return
	}
	if h.Leader() == 0 || (r.role.Leading && r.pos.Index < r.role.Open) {
		return
	}
	r.mu.Lock()
	ri.waiting = append(ri.waiting, r.mu.reads...)
	r.mu.reads = nil
	r.mu.Unlock()
	if len(ri.waiting) == 0 {
		return
	}
	ri.seq++
	ri.age, ri.term = 0, 0
	if r.mayEvaluate(h) {
		ri.term = r.role.Term
	}
	ri.ctx = readIndexContext(r.cfg.Replica, r.cfg.Life, ri.seq)
	h.ReadIndex(ri.ctx)
}
