package region

import (
	"context"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/region/regionpb"
)

// Write hands a transaction to the leader. Any goroutine may call it. When this replica does not
// lead, or its queue is full, w.Reply is called at once: certainly not executed.
func (r *Replica) Write(w *Write) {
	w.size = writeSize(w)
	r.mu.Lock()
	var refuse *regionpb.Error
	switch {
	case r.mu.stopped:
		refuse = ErrStopped
	case !r.mu.leading:
		refuse = &regionpb.Error{Code: regionpb.NotLeader, Leader: r.mu.leader}
	case !r.mu.admit(&r.lim, w.size):
		refuse = regionpb.ErrorOf(regionpb.TooManyRequests)
	default:
		r.mu.inbox = append(r.mu.inbox, w)
	}
	first := len(r.mu.inbox) == 1
	r.mu.Unlock()
	if refuse != nil {
		w.Reply(nil, refuse)
	} else if first {
		r.cfg.Wake() // the owner takes the whole inbox at once
	}
}

// admit counts a request into the queue; false when there is no room. One alone always has.
func (s *shared) admit(l *Limits, size int) bool {
	if s.queueCount >= l.QueueCountMax || s.queueBytes+size > l.QueueBytesMax && s.queueCount > 0 {
		return false
	}
	s.queueCount++
	s.queueBytes += size
	return true
}

// AwaitCut returns when this replica is complete through cut: everything of the region that was
// ordered at or before it is applied (S2). For who reads the engine beside Read, as hashing does.
func (r *Replica) AwaitCut(ctx context.Context, cut pdpb.Cut) error {
	if r.completeFor(&regionpb.ReadRequest{Cut: cut}) {
		return nil
	}
	return r.awaitComplete(ctx, cut)
}

// Deliver hands over order items from the stream. Any goroutine; idempotent. Items for which
// there is no room are dropped; Wanted then says from where to deliver again, if they do not come
// with seals before.
func (r *Replica) Deliver(items []pdpb.Item) {
	r.mu.Lock()
	room := max(0, r.lim.ItemsMax-len(r.mu.items))
	r.mu.items = append(r.mu.items, items[:min(room, len(items))]...)
	stopped := r.mu.stopped
	r.mu.Unlock()
	if !stopped {
		r.cfg.Wake()
	}
}

// Wanted is the item from which on the stream must deliver: the first that this replica should
// hold and does not, because it is neither applied and sealed nor here. Any goroutine.
func (r *Replica) Wanted() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.wanted
}

// Tick tells that a tick of the group's clock has passed. Any goroutine. It wakes the group only
// when something waits for time to pass.
func (r *Replica) Tick() {
	r.mu.Lock()
	r.mu.ticks++
	busy := r.mu.busy && !r.mu.stopped
	r.mu.Unlock()
	if busy {
		r.cfg.Wake()
	}
}

// truncateStep is how many entries must have become durable for a truncation to be worth waking
// the group.
const truncateStep = 1024

// DurableAt tells that the engine holds position durably (D6): the log below it may go.
func (r *Replica) DurableAt(position []byte) error {
	p, err := regionpb.DecodePosition(position)
	if err != nil {
		return err
	}
	r.mu.Lock()
	worth := p.Index > r.mu.durable+truncateStep
	r.mu.durable = max(r.mu.durable, p.Index)
	stopped := r.mu.stopped
	r.mu.Unlock()
	if worth && !stopped {
		r.cfg.Wake() // else the next call of Work is early enough
	}
	return nil
}

// RaiseFloor records that versions superseded at or below rev will be removed (C1). It returns
// the floor up to which the caller may remove now, which is lower than rev while this replica is
// not complete through rev.
func (r *Replica) RaiseFloor(ctx context.Context, rev mvcc.Revision) (mvcc.Revision, error) {
	q := &floorRequest{rev: rev, done: make(chan mvcc.Revision, 1)}
	r.mu.Lock()
	if r.mu.stopped {
		r.mu.Unlock()
		return 0, ErrStopped
	}
	r.mu.floors = append(r.mu.floors, q)
	r.mu.Unlock()
	r.cfg.Wake()
	select {
	case floor, ok := <-q.done:
		if !ok {
			return 0, ErrStopped
		}
		return floor, nil
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// BuildReport returns what is committed here, for pd (P1, P2). Any goroutine; false until the
// log has been read.
func (r *Replica) BuildReport() (pdpb.Report, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.report, r.mu.reportOK
}

// Applied is the applied position. Any goroutine; its slices must not be changed.
func (r *Replica) Applied() Position {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.applied
}

// AppliedIndex is Applied().Index.
func (r *Replica) AppliedIndex() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.applied.Index
}

// Descriptor is the region's. Any goroutine.
func (r *Replica) Descriptor() pdpb.Descriptor {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.applied.Descriptor
}

// Leader is the store of the group's leader, zero when unknown, and whether it is this replica.
func (r *Replica) Leader() (leader raftid.StoreID, here bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.leader, r.mu.leading
}

// Stats returns counters and gauges. Any goroutine.
func (r *Replica) Stats() Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.mu.stats
	s.Queued = r.mu.queueCount
	return s
}

// Stop answers everything that waits: what was not proposed is certainly not executed, the fate
// of the rest is unknown. Called once the group calls the replica no more.
func (r *Replica) Stop() {
	r.mu.Lock()
	r.mu.stopped = true // first: nothing may come in behind what is answered here
	waiters := r.mu.waiters
	r.mu.waiters = nil
	reads := r.mu.reads
	r.mu.reads = nil
	r.mu.Unlock()
	in := r.takeInbox()
	for _, q := range in.floors {
		close(q.done)
	}
	r.refuseQueue(ErrStopped)
	r.refuseTxns(ErrStopped)
	r.failDeciding()
	for _, p := range r.inflight.drain() {
		p.fail(regionpb.ErrorOf(regionpb.Unknown))
	}
	if r.held != nil {
		r.held.p.fail(regionpb.ErrorOf(regionpb.Unknown))
	}
	for _, w := range waiters {
		close(w.woken)
	}
	r.readIdx.stop(reads)
}

// taken is what the owner took from mu in one go.
type taken struct {
	items   []pdpb.Item
	ticks   int
	durable uint64
	floors  []*floorRequest
}

func (r *Replica) takeInbox() taken {
	r.mu.Lock()
	t := taken{items: r.mu.items, ticks: r.mu.ticks, durable: r.mu.durable, floors: r.mu.floors}
	r.queue = append(r.queue, r.mu.inbox...)
	r.metas = append(r.metas, r.mu.metas...)
	r.txns = append(r.txns, r.mu.txns...)
	for _, w := range r.mu.inbox {
		w.since = r.clock
	}
	clear(r.mu.inbox)
	r.mu.txns = nil
	r.mu.inbox, r.mu.metas, r.mu.items, r.mu.ticks, r.mu.floors = r.mu.inbox[:0], nil, nil, 0, nil
	leading, leader := r.mu.leading, r.mu.leader
	r.mu.Unlock()
	if !leading && len(r.queue)+len(r.metas)+len(r.txns) > 0 {
		// They came between the loss of leadership and this call.
		err := &regionpb.Error{Code: regionpb.NotLeader, Leader: leader}
		r.refuseQueue(err)
		r.refuseTxns(err)
	}
	return t
}

// publishApplied lets other goroutines see the applied position, and wakes who waited for it.
func (r *Replica) publishApplied() {
	r.mu.Lock()
	r.mu.applied = r.pos
	r.mu.vouched, r.mu.through = max(r.mu.vouched, r.v), max(r.mu.through, r.pos.Cut)
	r.mu.wanted = r.in.Wanted()
	kept := r.mu.waiters[:0]
	for _, w := range r.mu.waiters {
		if r.mu.reached(&w) {
			close(w.woken)
		} else {
			kept = append(kept, w)
		}
	}
	clear(r.mu.waiters[len(kept):])
	r.mu.waiters = kept
	r.mu.Unlock()
}

// publish lets other goroutines see the report and what else changes outside apply.
func (r *Replica) publish() {
	report, changed := r.in.Report()
	if r.cfg.Mutants.FactsAsLevel && report.Upto > report.From {
		for i := range r.pos.Prepared {
			p := &r.pos.Prepared[i]
			report.Facts = append(report.Facts, pdpb.Fact{Index: report.Upto, Stamp: r.fence, Attempt: p.Attempt, Participants: p.Participants, Writes: len(p.Effects) > 0})
		}
	}
	r.mu.Lock()
	r.mu.report, r.mu.reportOK = report, true
	r.mu.vouched, r.mu.through = max(r.mu.vouched, r.v), max(r.mu.through, r.through)
	r.mu.floor = r.floor
	r.mu.wanted = r.in.Wanted()
	s := &r.mu.stats
	s.Inflight, s.InflightSize = len(r.inflight.list), r.inflight.bytes
	s.OverlayKeys, s.Window = r.ov.len(), len(r.in.window)-r.in.head
	s.Locks, s.Prepared = r.locks.len(), len(r.pos.Prepared)
	for i := range r.mu.txns {
		if r.mu.txns[i].lock != nil {
			s.Locks++
		}
	}
	r.mu.busy = len(r.queue) > 0 || !r.inflight.empty() || len(r.mu.reads) > 0 || !r.readIdx.empty() ||
		(r.role.Leading && (!r.locks.empty() || len(r.txns) > 0 || len(r.pos.Prepared) > 0)) ||
		(r.role.Leading && r.cfg.Orderer == nil && r.sealed < r.pos.Item)
	r.mu.Unlock()
	// Who leads reports at once, and repeats what a lost report said of seals (P4): a new leader
	// has to say so even when its report says nothing new.
	if (changed || r.stood) && r.cfg.Order != nil {
		r.stood = false
		r.cfg.Order.Report(r.id)
	}
}
