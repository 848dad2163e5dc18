package region

import (
	"fmt"
	"slices"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/region/regionpb"
)

// apply writes what has its number into the engine: items in order, each whole, several to a
// batch. It returns true when it stopped at its budget rather than for want of items. What would
// take long is left to be applied beside the group, where h is nil (detach.go).
func (r *Replica) apply(h raftstore.Handle) (again bool, err error) {
	start, startItem := r.in.Index(), r.in.Item()
	stalled := h != nil && r.stalled()
	var batch mvcc.Batch
	defer func() {
		if batch == nil {
			return
		}
		if cerr := batch.Close(); err == nil && cerr != nil {
			err = fmt.Errorf("closing a batch: %w", cerr)
		}
	}()
	bytes := 0
	// full says whether the next item belongs into another batch. An entry that has to read create
	// revisions from the engine needs what this batch holds to be visible first.
	full := func(entries []entryInfo, size int) bool {
		return bytes >= r.lim.ApplyBytesMax || batch != nil && (resolves(entries) || r.leave(h, entries, size))
	}
	for {
		r.in.silentAhead()
		if e := r.nextOwn(); e != nil {
			// Not before it is applied next: the orderer's state is written with the position and
			// its mark is shown to readers, so it must never be ahead of what is applied (D1, I4).
			own := r.in.window[r.in.head : r.in.head+1]
			if again = full(own, e.size); again {
				break
			}
			if batch == nil && (stalled || r.leave(h, own, e.size)) {
				return false, r.detachApply(h, own)
			}
			if err := r.orderOwn(e); err != nil {
				return false, err
			}
		}
		it, entries, err := r.in.Next()
		if err != nil {
			return false, err
		}
		if it == nil {
			break
		}
		size := r.sizeOf(it, entries)
		if again = full(entries, size); again {
			break
		}
		if batch == nil {
			if r.cfg.Orderer == nil && (stalled || r.leave(h, entries, size)) {
				return false, r.detachApply(h, entries)
			}
			batch = r.cfg.Engine.NewBatch()
		}
		if err := r.applyItem(h, batch, it, entries); err != nil {
			return false, err
		}
		bytes += size
		r.in.Applied(it)
		r.pos.Item, r.pos.Upto, r.pos.UptoTerm, r.pos.Cut = it.N, it.Upto, it.UptoTerm, it.Cut
		r.pos.Revision, r.pos.Cum, r.pos.Fence = max(r.pos.Revision, it.Last()), it.Cum, max(r.pos.Fence, it.Fence)
	}
	if r.in.Index() == start && r.in.Item() == startItem {
		return false, nil
	}
	r.pos.Index, r.pos.Term, r.pos.Sealed = r.in.index, r.in.term, r.in.sealed
	if batch == nil {
		batch = r.cfg.Engine.NewBatch()
	}
	if err := r.writePosition(batch); err != nil {
		return false, err
	}
	r.applied()
	return again, nil
}

// applied follows a batch that has become visible: the overlay gives up what is in the engine
// now, clients are answered, readers woken.
func (r *Replica) applied() {
	r.ov.prune(r.pos.Index)
	r.v = max(r.v, r.pos.Revision)
	r.through = max(r.through, r.pos.Cut)
	r.raiseFence(r.pos.Fence)
	for _, p := range r.inflight.below(r.pos.Index + 1) { // silent entries of another term took their places
		r.answerAll(p, regionpb.Unknown)
	}
	if f := r.cfg.Observer.Events; f != nil {
		f(r.events, r.v)
		r.events = nil
	}
	if len(r.leaseChanges) > 0 {
		r.cfg.Observer.Leases(r.leaseChanges)
		r.leaseChanges = r.leaseChanges[:0]
	}
	r.publishApplied()
	if f := r.cfg.Observer.Position; f != nil {
		f(&r.pos)
	}
	if r.entryEffects() > effectsKeptMax {
		r.entry = regionpb.Entry{}
	}
	for i := range r.replies {
		r.replies[i].send()
		r.replies[i] = answer{}
	}
	r.replies = r.replies[:0]
}

// effectsKeptMax is how many effects the entry that apply reuses may keep room for.
const effectsKeptMax = 16 << 10

func (r *Replica) entryEffects() (n int) {
	for i := range r.entry.Commands {
		n += cap(r.entry.Commands[i].Effects)
	}
	return n
}

// writePosition puts the position into batch and commits it.
func (r *Replica) writePosition(batch mvcc.Batch) error {
	if r.cfg.Meta != nil {
		r.pos.Meta = r.cfg.Meta.AppendState(nil)
	}
	r.posBytes = r.pos.Append(r.posBytes[:0])
	if err := batch.SetPosition(uint64(r.id), r.posBytes); err != nil {
		return fmt.Errorf("writing the position: %w", err)
	}
	if err := batch.Commit(); err != nil {
		return fmt.Errorf("applying: %w", err)
	}
	return nil
}

func resolves(entries []entryInfo) bool {
	for i := range entries {
		if entries[i].resolves {
			return true
		}
	}
	return false
}

// applyItem numbers the entries of an item and puts their effects into the batch (O3).
func (r *Replica) applyItem(h raftstore.Handle, batch mvcc.Batch, it *pdpb.Item, entries []entryInfo) error {
	clear(r.creates)
	if resolves(entries) && r.creates == nil {
		r.creates = map[string]mvcc.Revision{}
	}
	track := resolves(entries)
	rev := it.Base
	if r.cfg.Mutants.DecisionsFirst {
		if _, err := r.applyDecisions(batch, it); err != nil {
			return err
		}
	}
	for i := range entries {
		info := &entries[i]
		p, passed := r.inflight.take(info.index)
		for _, q := range passed {
			r.answerAll(q, regionpb.Unknown)
		}
		if p != nil && p.term != info.term {
			r.answerAll(p, regionpb.Unknown)
			p = nil
		}
		if info.silent {
			continue
		}
		data, err := r.payload(h, info)
		if err != nil {
			return err
		}
		if info.meta {
			payload, _ := regionpb.DecodeMeta(data)
			if r.cfg.Meta == nil {
				return fmt.Errorf("%w: entry %d is of a single-group store", ErrDiverged, info.index)
			}
			r.cfg.Meta.ApplyMeta(info.index, info.term, payload)
			if p != nil {
				r.replies = append(r.replies, answer{meta: p.meta})
			}
			continue
		}
		if err := regionpb.DecodeEntry(data, &r.entry); err != nil {
			return fmt.Errorf("entry %d: %w", info.index, err)
		}
		void := info.void || (info.fence < it.Fence && !r.cfg.Mutants.NoFence)
		if f := r.cfg.Observer.Applied; f != nil {
			f(info.index, info.term, it, &r.entry, rev, void)
		}
		r.mu.Lock()
		if void {
			r.mu.stats.Void += uint64(len(r.entry.Commands))
		} else {
			r.mu.stats.Applied += uint64(len(r.entry.Commands))
		}
		r.mu.Unlock()
		if void {
			if p != nil {
				r.answerAll(p, regionpb.VoidByFence)
			}
			continue
		}
		if err := r.applyPrepares(&r.entry, p); err != nil {
			return err
		}
		if p != nil && len(p.cmds) != len(r.entry.Commands) {
			return fmt.Errorf("%w: entry %d has %d commands, %d were proposed", ErrDiverged, info.index, len(r.entry.Commands), len(p.cmds))
		}
		for c := range r.entry.Commands {
			if p != nil {
				r.replies = append(r.replies, p.cmds[c].settle(rev))
			}
			if err := r.putRecords(batch, r.entry.Commands[c].Records); err != nil {
				return err
			}
			effects := r.entry.Commands[c].Effects
			if len(effects) == 0 {
				continue
			}
			rev++
			if err := r.putEffects(batch, effects, nil, rev, track); err != nil {
				return err
			}
		}
	}
	r.count(func(s *Stats) { s.Writes += uint64(rev - it.Base) })
	if rev != it.Base+mvcc.Revision(it.Count) {
		return fmt.Errorf("%w: item %d gives %d revisions, its entries took %d", ErrDiverged, it.N, it.Count, rev-it.Base)
	}
	if r.cfg.Mutants.DecisionsFirst {
		return nil
	}
	_, err := r.applyDecisions(batch, it)
	return err
}

// putEffects writes one command's effects as the events of rev. subs are their places among these
// events, nil when they are all of them in order (R1).
func (r *Replica) putEffects(batch mvcc.Batch, effects []regionpb.Effect, subs []int64, rev mvcc.Revision, track bool) error {
	if r.cfg.Observer.Events != nil {
		r.events = slices.Grow(r.events, len(effects))
	}
	for i := range effects {
		f := &effects[i]
		v := mvcc.Version{Key: f.Key, Mod: rev, Sub: int64(i)}
		if subs != nil {
			v.Sub = subs[i]
		}
		if !f.Delete {
			v.Version, v.Lease, v.Value = f.Version, f.Lease, f.Value
			switch f.CreateKind {
			case regionpb.CreateNew:
				v.Create = rev
			case regionpb.CreateKnown:
				v.Create = f.Create
			case regionpb.CreateResolve:
				create, err := r.resolveCreate(f)
				if err != nil {
					return err
				}
				v.Create = create
			}
			if track {
				r.creates[string(f.Key)] = v.Create
			}
		}
		if err := batch.Put(&v); err != nil {
			return fmt.Errorf("applying revision %d: %w", rev, err)
		}
		if f.Delete && f.Detach != 0 {
			r.ev.recent.forget(f.Key) // many end with their leases, and few come again
		} else {
			r.ev.recent.note(&v)
		}
		if f.Detach != 0 {
			if err := batch.Detach(f.Detach, f.Key); err != nil {
				return fmt.Errorf("applying revision %d: %w", rev, err)
			}
		}
		if r.cfg.Observer.Events != nil {
			r.events = append(r.events, v)
		}
	}
	return nil
}

// resolveCreate finds the create revision of a key whose creator was pending at evaluation: it is
// the newest version's, in this item or in the engine (C-5).
func (r *Replica) resolveCreate(f *regionpb.Effect) (mvcc.Revision, error) {
	if c, ok := r.creates[string(f.Key)]; ok {
		return c, nil
	}
	v, ok, err := r.cfg.Engine.Get(f.Key, mvcc.Latest)
	if err != nil {
		return 0, fmt.Errorf("resolving a create revision: %w", err)
	}
	if !ok || v.Version != f.Version-1 {
		return 0, fmt.Errorf("%w: version %d of key %q follows version %d", ErrDiverged, f.Version, f.Key, v.Version)
	}
	return v.Create, nil
}

// payload returns an entry's payload, from the log if the window did not keep it.
func (r *Replica) payload(h raftstore.Handle, info *entryInfo) ([]byte, error) {
	if info.data != nil {
		return info.data, nil
	}
	if h == nil {
		return nil, fmt.Errorf("%w: entry %d is wanted where the log cannot be read", ErrDiverged, info.index)
	}
	entries, err := h.Entries(info.index, info.index+1, 1)
	if err != nil {
		return nil, fmt.Errorf("reading entry %d: %w", info.index, err)
	}
	if len(entries) != 1 || entries[0].GetTerm() != info.term {
		return nil, fmt.Errorf("%w: the log changed under entry %d", ErrDiverged, info.index)
	}
	return entries[0].GetData(), nil
}

func (r *Replica) answerAll(p *proposal, code regionpb.Code) {
	err := regionpb.ErrorOf(code)
	for _, c := range p.cmds {
		r.replies = append(r.replies, answer{cmd: c, err: err})
	}
	for _, d := range p.prepares {
		r.replies = append(r.replies, answer{prepare: d.reply, err: err})
	}
	if p.meta != nil {
		r.replies = append(r.replies, answer{meta: p.meta, err: err})
	}
}
