package region

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/region/regionpb"
)

// lead is what only a leader does: evaluate what is queued and propose it, and seal.
func (r *Replica) lead(h raftstore.Handle, ticks int) (again bool, err error) {
	if !r.mayEvaluate(h) {
		return false, nil
	}
	if r.askedAge += ticks; r.askedAge > askMarkTicks {
		r.asked = 0
	}
	r.leadLeases()
	r.serveTxns(h, ticks)
	again, err = r.proposeQueue(h)
	if err != nil || r.detach != nil {
		return false, err
	}
	r.idle += ticks
	r.sealIdle(h)
	return again, nil
}

// mayEvaluate is E2: a leader evaluates on nothing but applied state and its own overlay, so
// everything before its term must be applied.
func (r *Replica) mayEvaluate(h raftstore.Handle) bool {
	if !r.role.Leading {
		return false
	}
	if open, ok := h.Leading(); !ok || open != r.role.Open || h.Term() != r.role.Term {
		return false // the role has changed; Update will say so
	}
	return r.pos.Index >= r.role.Open || r.cfg.Mutants.EvalEarly
}

// proposeQueue evaluates queued requests into entries and proposes them, as far as limits allow.
// It returns true when it stopped at its budget.
func (r *Replica) proposeQueue(h raftstore.Handle) (again bool, err error) {
	for len(r.metas) > 0 && !r.full() {
		if !r.proposeMeta(h) {
			return false, nil
		}
	}
	r.ev.left = r.lim.TurnKeysMax
	for n := 0; len(r.queue) > 0 && !r.full() && !r.gathering(h) && r.held == nil; n++ {
		if n == r.lim.ProposalsMax {
			return true, nil
		}
		proposed, err := r.proposeEntry(h)
		if err != nil || r.detach != nil {
			return false, err
		}
		if r.ev.over {
			return true, nil
		}
		if !proposed {
			return false, nil
		}
	}
	return false, nil
}

// gathering says that what is queued waits for the commit of the commands before it, to go together
// with what comes meanwhile. The commit, or the loss of leadership, calls Work again. Prepares do not
// count: they are proposed as they come, and while one follows another no commit is the last one.
func (r *Replica) gathering(h raftstore.Handle) bool {
	if len(r.queue) >= r.lim.PipelineCommandsMin {
		return false
	}
	committed := h.Committed()
	for i := len(r.inflight.list) - 1; i >= 0 && r.inflight.list[i].index > committed; i-- {
		if len(r.inflight.list[i].prepares) == 0 {
			return true
		}
	}
	return false
}

// lockedMax bounds the commands that one look at the queue passes over because of locks; when it is
// reached, everything behind them waits too.
const lockedMax = 1024

// askMarkTicks is when a mark that has not come is asked for again.
const askMarkTicks = 20

// askMark asks the stream for a mark that a waiting write needs (C-1), once, and to be woken by
// it: marks alone wake nobody.
func (r *Replica) askMark(cut pdpb.Cut) {
	if cut <= max(r.through, r.asked) {
		return
	}
	r.asked, r.askedAge = cut, 0
	if o, ok := r.cfg.Order.(interface {
		WaitMarkFunc(id pdpb.RegionID, cut pdpb.Cut, done func(error))
	}); ok {
		o.WaitMarkFunc(r.id, cut, func(error) { r.cfg.Wake() })
	}
}

// full says that nothing more may be in flight; what is queued waits for apply.
func (r *Replica) full() bool {
	return len(r.inflight.list) >= r.lim.InflightEntriesMax || r.inflight.bytes >= r.lim.InflightBytesMax
}

// proposeEntry evaluates requests into one entry and proposes it in the same step (E1). It
// returns false when nothing could be proposed now.
func (r *Replica) proposeEntry(h raftstore.Handle) (bool, error) {
	r.beginEvaluation()
	p := &proposal{index: h.LastIndex() + 1, term: r.role.Term}
	e := regionpb.Entry{Term: p.term, Index: p.index, Fence: r.fence}
	var (
		taken   []*Write
		rest    = r.queue[:0:0]
		blocked keySet
		size    int
		done    int // writes of the queue that left it, one way or another
		sizes   int // their bytes
		refused []func()
		wantCut pdpb.Cut
		waits   int // for locks
	)
	r.ev.over = false
	for i, w := range r.queue {
		if len(p.cmds) >= r.lim.EntryCommandsMax || size >= r.lim.EntryBytesMax || blocked.full() {
			rest = append(rest, r.queue[i:]...)
			break
		}
		if w.abandoned() {
			refused = append(refused, func() { w.Reply(nil, regionpb.ErrorOf(regionpb.Abandoned)) })
			done++
			sizes += w.size
			continue
		}
		if r.blocked(w) {
			rest = append(rest, w)
			if waits++; waits >= lockedMax {
				rest = append(rest, r.queue[i+1:]...)
				break
			}
			continue
		}
		if w.Cut > r.through || blocked.touches(w.Txn) {
			rest = append(rest, w)
			wantCut = max(wantCut, w.Cut)
			continue
		}
		if w.long {
			if w.undecidedAt == r.pos.Index {
				blocked.add(w.Txn) // E4, as below
				rest = append(rest, w)
				continue
			}
			if len(p.cmds) == 0 {
				r.detachEvaluation(p, w)
			}
			rest = append(rest, r.queue[i:]...)
			break
		}
		c := &command{reply: w.Reply}
		undo, fresh := r.ov.mark(), r.ev.left == r.lim.TurnKeysMax
		v, err := r.evaluate(c, w)
		if v == exhausted && err == nil {
			r.ov.rollback(undo)
			w.long = fresh // it had all of the turn's keys; else the next turn will tell
			rest = append(rest, r.queue[i:]...)
			break
		}
		switch {
		case err != nil:
			return false, fmt.Errorf("evaluating: %w", err)
		case v == undecided:
			// E4: it waits for the number, and what comes after it on its keys waits behind, so
			// that it cannot wait for ever.
			r.ov.rollback(undo)
			blocked.add(w.Txn)
			rest = append(rest, w)
			continue
		case v == outside:
			d := r.pos.Descriptor
			refused = append(refused, func() { w.Reply(nil, &regionpb.Error{Code: regionpb.EpochMismatch, Descriptor: &d}) })
		case v == refusal:
			r.ov.rollback(undo)
			refused = append(refused, func() { w.Reply(nil, c.fault) })
		case w.IfWrites && c.fault == nil && len(c.effects)+len(c.records) == 0:
			r.ov.rollback(undo)
			refused = append(refused, func() { w.Reply(nil, regionpb.ErrorOf(regionpb.WritesNothing)) })
		default:
			p.cmds = append(p.cmds, c)
			e.Commands = append(e.Commands, regionpb.Command{Effects: c.effects, Records: c.records})
			p.bytes += c.bytes + 256
			size += c.bytes
			taken = append(taken, w)
		}
		done++
		sizes += w.size
	}
	r.askMark(wantCut)
	if n := blocked.len(); n > 0 {
		r.count(func(s *Stats) { s.Deferred += uint64(n) })
	}
	ok := false
	if len(p.cmds) > 0 {
		e.Seals = r.in.Seals(r.sealed+1, r.lim.SealsMax)
		ok = r.propose(h, p, &e)
		if !ok {
			// Nothing of it may remain: nothing was built on it, and nothing will be (E1).
			r.ov.rollback(overlayMark{})
			for _, w := range taken {
				done--
				sizes -= w.size
			}
			rest = append(taken, rest...)
		}
	}
	r.queue = rest
	r.leftQueue(done, sizes)
	for _, f := range refused {
		f()
	}
	return ok, nil
}

// abandoned says that nobody waits for the answer any more.
func (w *Write) abandoned() bool {
	select {
	case <-w.Done:
		return true
	default:
		return false
	}
}

// beginEvaluation makes the evaluator look at what is applied and in flight now.
func (r *Replica) beginEvaluation() {
	r.ev.begin(r.cfg.Engine, r.ov, r.pos.Descriptor.Span, r.v, max(r.floor, r.pos.Floor))
}

// propose appends an entry to the log, at the place that its header says. It returns false when
// raft dropped it.
func (r *Replica) propose(h raftstore.Handle, p *proposal, e *regionpb.Entry) bool {
	return r.proposeEncoded(h, p, e, e.Encode())
}

func (r *Replica) proposeEncoded(h raftstore.Handle, p *proposal, e *regionpb.Entry, data []byte) bool {
	if r.cfg.Mutants.Forward {
		r.ov.commit(p.index)
		if len(e.Seals) > 0 {
			r.sealed = e.Seals[len(e.Seals)-1].N
		}
		r.held = &heldProposal{p: p, data: data}
		r.cfg.Wake()
		return true
	}
	index, term, err := h.Propose(data)
	if err != nil {
		if !errors.Is(err, raftstore.ErrDropped) {
			r.fail(fmt.Errorf("proposing: %w", err))
		}
		return false
	}
	if index != e.Index || term != e.Term {
		r.fail(fmt.Errorf("%w: an entry meant for %d/%d was put at %d/%d", ErrDiverged, e.Index, e.Term, index, term))
		return false
	}
	if len(e.Seals) > 0 {
		r.sealed = e.Seals[len(e.Seals)-1].N
	}
	if len(p.cmds)+len(p.prepares) > 0 {
		r.ov.commit(index)
		r.inflight.push(p)
		r.idle = 0
		r.count(func(s *Stats) { s.Evaluated += uint64(len(p.cmds)); s.Proposed++ })
	}
	return true
}

// sealIdle lets an idle leader seal what it has applied, after a short delay, in entries that
// are silent: sealing them makes nothing new to seal (B2).
func (r *Replica) sealIdle(h raftstore.Handle) {
	if r.cfg.Orderer != nil {
		// A single-group store orders its own log; there is nobody who keeps items for it.
		return
	}
	for r.held == nil && r.idle >= r.lim.SealDelayTicks && r.sealed < r.pos.Item {
		p := &proposal{index: h.LastIndex() + 1, term: r.role.Term}
		e := regionpb.Entry{Term: p.term, Index: p.index, Fence: r.fence, Seals: r.in.Seals(r.sealed+1, r.lim.SealsMax)}
		if len(e.Seals) == 0 || !r.propose(h, p, &e) {
			return
		}
		r.count(func(s *Stats) { s.Seals++ })
	}
}

// heldProposal is the Forward mutant's: evaluated now, proposed later.
type heldProposal struct {
	p    *proposal
	data []byte
}

func (r *Replica) proposeHeld(h raftstore.Handle) {
	if r.held == nil {
		return
	}
	held := r.held
	r.held = nil
	index, term, err := h.Propose(held.data)
	if err != nil {
		held.p.fail(regionpb.ErrorOf(regionpb.Unknown))
		r.sealed = r.in.SealedInLog()
		return
	}
	held.p.index, held.p.term = index, term
	if len(held.p.cmds) > 0 {
		r.inflight.push(held.p)
	}
}

// refuseQueue answers everything that was not proposed.
func (r *Replica) refuseQueue(err *regionpb.Error) {
	queue, metas, sizes := r.queue, r.metas, 0
	r.queue, r.metas = nil, nil
	for _, w := range queue {
		sizes += w.size
	}
	for _, m := range metas {
		sizes += m.size()
	}
	r.leftQueue(len(queue)+len(metas), sizes)
	for _, w := range queue {
		w.Reply(nil, err)
	}
	for _, m := range metas {
		m.done(err)
	}
}

// leftQueue gives room for new requests.
func (r *Replica) leftQueue(n, bytes int) {
	if n == 0 {
		return
	}
	r.mu.Lock()
	r.mu.queueCount -= n
	r.mu.queueBytes -= bytes
	r.mu.Unlock()
}

func (r *Replica) count(f func(*Stats)) {
	r.mu.Lock()
	f(&r.mu.stats)
	r.mu.Unlock()
}

// writeSize is what a request counts for in the queue.
func writeSize(w *Write) int { return 64 + proto.Size(w.Txn) }

// raiseFloors writes removal floors into the position (C1): the batch that holds it is before
// any deletion in the engine's order, so no crash keeps a deletion and loses the floor.
func (r *Replica) raiseFloors(reqs []*floorRequest) error {
	if len(reqs) == 0 {
		return nil
	}
	r.lookAtMark()
	want := r.pos.Floor
	for _, q := range reqs {
		// Not above what this replica is complete through: a version applied later would not be
		// seen by a removal that has already passed its revision (B13).
		want = max(want, min(q.rev, r.v))
	}
	if want > r.pos.Floor {
		r.pos.Floor = want
		batch := r.cfg.Engine.NewBatch()
		err := r.writePosition(batch)
		if cerr := batch.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return err
		}
		r.publishApplied()
	}
	for _, q := range reqs {
		q.done <- min(q.rev, r.pos.Floor)
	}
	return nil
}

type floorRequest struct {
	rev  mvcc.Revision
	done chan mvcc.Revision // buffered
}
