package region

import (
	"fmt"
	"slices"

	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/region/regionpb"
)

// What takes long is done beside the group (raftstore.Handle.Detach): otherwise a leader that
// deletes a million keys would be silent for longer than an election timeout, and a successor
// would be elected before the deletion is proposed. There are two such things: the evaluation of a
// command that looks at very many keys, and the application of a large item, or of any item while
// the engine makes writers wait. Meanwhile nothing else of the replica is called, so whoever runs
// them is its owner.

// longCommand is a command that is evaluated beside the group, in an entry of its own. Its request
// stays in the queue, to be answered if leadership ends, until the entry is proposed.
type longCommand struct {
	w    *Write
	p    *proposal
	e    regionpb.Entry
	data []byte
	v    verdict
	err  error
	// fault is the answer to a refusal.
	fault *regionpb.Error
}

// detachEvaluation leaves the evaluation of w into the entry p to be done beside the group.
// Whatever is proposed before it makes it void, so nothing is.
func (r *Replica) detachEvaluation(p *proposal, w *Write) {
	l := &longCommand{w: w, p: p, e: regionpb.Entry{Term: p.term, Index: p.index, Fence: r.fence, Seals: r.in.Seals(r.sealed+1, r.lim.SealsMax)}}
	r.long = l
	r.detach = func() {
		c := &command{reply: w.Reply}
		r.ev.whole = true
		l.v, l.err = r.evaluate(c, w)
		r.ev.whole = false
		l.fault = c.fault
		if l.v != evaluated || l.err != nil {
			return
		}
		p.cmds, p.bytes = []*command{c}, c.bytes+256
		l.e.Commands = []regionpb.Command{{Effects: c.effects, Records: c.records}}
		l.data = l.e.Encode()
		l.e.Commands = nil
	}
}

// proposeLong proposes what was evaluated beside the group, before anything else happens here, if
// it still belongs at the end of the log (E1); else it is evaluated again, or was refused with
// the rest of the queue.
func (r *Replica) proposeLong(h raftstore.Handle) error {
	l := r.long
	if l == nil {
		return nil
	}
	r.long = nil
	if l.err != nil {
		return fmt.Errorf("evaluating: %w", l.err)
	}
	at := slices.Index(r.queue, l.w)
	ok := at >= 0 && l.v == evaluated && r.mayEvaluate(h) && l.p.term == r.role.Term && l.p.index == h.LastIndex()+1 &&
		r.proposeEncoded(h, l.p, &l.e, l.data)
	if !ok && at >= 0 && l.v == refusal {
		r.ov.rollback(overlayMark{})
		r.queue = slices.Delete(r.queue, at, at+1)
		r.leftQueue(1, l.w.size)
		l.w.Reply(nil, l.fault)
		return nil
	}
	if !ok {
		r.ov.rollback(overlayMark{})
		if l.v == undecided {
			l.w.undecidedAt = r.pos.Index
		}
		return nil
	}
	r.queue = slices.Delete(r.queue, at, at+1)
	r.leftQueue(1, l.w.size)
	return nil
}

// stalled says that whoever writes into the engine may have to wait.
func (r *Replica) stalled() bool { return r.cfg.Stalled != nil && r.cfg.Stalled() }

// leave says that an item is too large to be applied in a turn.
func (r *Replica) leave(h raftstore.Handle, entries []entryInfo, size int) bool {
	if h != nil {
		return size > r.lim.TurnBytesMax
	}
	// Beside the group there is time, but the log cannot be read.
	for i := range entries {
		if e := &entries[i]; e.data == nil && !e.silent {
			return true
		}
	}
	return false
}

// sizeOf is how much an item applies, in bytes.
func (r *Replica) sizeOf(it *pdpb.Item, entries []entryInfo) (size int) {
	for i := range entries {
		size += entries[i].size
	}
	for i := range it.Decisions {
		if j, ok := r.prepared(it.Decisions[i].Attempt); ok {
			size += len(r.pos.Prepared[j].Encoded())
		}
	}
	return size
}

// detachApply leaves what can be applied to be applied beside the group: an item of these entries,
// and what follows it as far as its payloads are at hand.
func (r *Replica) detachApply(h raftstore.Handle, entries []entryInfo) error {
	for i := range entries {
		info := &entries[i]
		if info.silent {
			continue
		}
		data, err := r.payload(h, info)
		if err != nil {
			return err
		}
		r.in.keep(info, data)
	}
	r.detach = func() {
		if _, err := r.apply(nil); err != nil {
			r.fail(err)
		}
	}
	return nil
}

// giveBack leaves floors to the call of Work that comes when what was detached has ended.
func (r *Replica) giveBack(floors []*floorRequest) {
	if len(floors) == 0 {
		return
	}
	r.mu.Lock()
	r.mu.floors = append(floors, r.mu.floors...)
	r.mu.Unlock()
}
