package region

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/raftstore/raftid"
	"braid/region/regionpb"
)

// The life of a region's part in a transaction over several regions:
//
//	lock     the leader grants all spans at once, when what was evaluated before on them is applied
//	read     the coordinator takes a read point and reads there: nobody changes what is locked; of leases
//	         that it ends, the grant has told what there is
//	prepare  the leader of the lock's term puts effects and locks into the log, with all participants (T1, T2)
//	report   once committed, the prepare is a fact of the report's interval (P2)
//	apply    once ordered, it is in the position of every replica: prepared (D1)
//	decide   an item brings the decision after its entries (P3): a commit's effects become the
//	         events of its revision, the locks end, the coordinator is answered
//
// A prepared part whose decision does not come asks pd for an abort (T6).

// Lock asks for an attempt's locks in this region.
type Lock struct {
	Attempt pdpb.AttemptID
	Age     pdpb.AttemptID      // the transaction's first attempt; lower ones go first
	Owner   raftid.StoreID      // where its coordinator runs
	Spans   []regionpb.LockSpan // must not change any more
	Term    uint64              // if not 0: only a leader of that term may grant (L5)
	Now     bool                // refused with LockBusy rather than made to wait for another attempt (T5)
	// Reply is called exactly once and must not block, when the locks are granted or never will be.
	Reply func(regionpb.LockGrant, error)
}

// Prepare asks the leader that granted a lock to prepare the attempt.
type Prepare struct {
	Request *regionpb.PrepareRequest // must not change any more
	// Reply is called exactly once and must not block: with the revision of the commit, or an
	// error. Unknown leaves the outcome open; after Aborted the attempt is aborted; after any other
	// this region is not prepared and never will be.
	Reply func(mvcc.Revision, error)
}

// txnRequest is one of four in the inbox.
type txnRequest struct {
	lock    *Lock
	prepare *Prepare
	release pdpb.AttemptID
	down    raftid.StoreID
}

func (q *txnRequest) refuse(err *regionpb.Error) {
	switch {
	case q.lock != nil:
		q.lock.Reply(regionpb.LockGrant{}, err)
	case q.prepare != nil:
		q.prepare.Reply(0, err)
	}
}

// Lock hands a request to the leader. Any goroutine.
func (r *Replica) Lock(l *Lock) { r.enqueue(txnRequest{lock: l}) }

// Prepare hands a request to the leader. Any goroutine.
func (r *Replica) Prepare(p *Prepare) { r.enqueue(txnRequest{prepare: p}) }

// Release gives up an attempt's lock, unless it is used for a prepare already. Any goroutine.
func (r *Replica) Release(attempt pdpb.AttemptID) { r.enqueue(txnRequest{release: attempt}) }

// OwnerDown ends every lock whose coordinator ran on a store that fell silent, unless it is used for
// a prepare already; for what is prepared it asks pd for an abort. A coordinator that is alive after
// all is refused when it comes to prepare (T1). Any goroutine.
func (r *Replica) OwnerDown(store raftid.StoreID) { r.enqueue(txnRequest{down: store}) }

// endsRoom is how many times more room there is for what ends locks than for what asks for them: a
// release that is dropped leaves keys locked until the lock runs out.
const endsRoom = 4

func (r *Replica) enqueue(q txnRequest) {
	room := r.lim.LocksMax
	if q.lock == nil && q.prepare == nil {
		room *= endsRoom
	}
	r.mu.Lock()
	var refuse *regionpb.Error
	switch {
	case r.mu.stopped:
		refuse = ErrStopped
	case !r.mu.leading:
		refuse = &regionpb.Error{Code: regionpb.NotLeader, Leader: r.mu.leader}
	case len(r.mu.txns) >= room:
		refuse = regionpb.ErrorOf(regionpb.TooManyRequests)
	default:
		r.mu.txns = append(r.mu.txns, q)
		if q.lock != nil {
			// From here on, so that whoever asks in between whether a store that went away has
			// locks here is not told that there are none.
			r.mu.stats.Locks++
		}
	}
	r.mu.Unlock()
	if refuse != nil {
		q.refuse(refuse)
		return
	}
	r.cfg.Wake()
}

// refuseTxns answers what asked for locks and prepares and was not proposed: this replica does
// not lead any more.
func (r *Replica) refuseTxns(err *regionpb.Error) {
	for _, w := range r.locks.end() {
		w.reply(regionpb.LockGrant{}, err)
	}
	txns := r.txns
	r.txns = nil
	for i := range txns {
		txns[i].refuse(err)
	}
}

// serveTxns is a leader's turn at locks and prepares.
func (r *Replica) serveTxns(h raftstore.Handle, ticks int) {
	if r.locks.term != r.role.Term {
		r.locks.begin(r.role.Term, r.pos.Prepared, &r.lim)
	}
	if r.locks.empty() && len(r.txns) == 0 {
		return
	}
	r.beginEvaluation()
	late, orphans := r.locks.tick(ticks, &r.lim)
	for _, l := range late {
		l.reply(regionpb.LockGrant{}, regionpb.ErrorOf(regionpb.LockLost))
	}
	for _, id := range orphans {
		if r.cfg.Abort != nil {
			r.cfg.Abort(id)
		}
	}
	txns := r.txns
	r.txns = nil
	var prepares []*Prepare
	for i := range txns {
		switch q := &txns[i]; {
		case q.lock != nil:
			r.takeLock(q.lock)
		case q.prepare != nil:
			prepares = append(prepares, q.prepare)
		case q.down != 0:
			r.ownerDown(q.down)
		default:
			r.takeRelease(q.release)
		}
	}
	for len(prepares) > 0 {
		n := r.proposePrepares(h, prepares)
		if n == 0 {
			break
		}
		prepares = prepares[n:]
	}
	for _, p := range prepares {
		r.txns = append(r.txns, txnRequest{prepare: p}) // no room in flight, or the role is about to change
	}
	// Keys of which the bytes alone are more than a prepare may have need not all be looked up.
	withKeys := func(spans []regionpb.LockSpan) ([]regionpb.LockSpan, []regionpb.Attachment, bool) {
		return r.ev.withKeys(spans, r.lim.PrepareBytesMax)
	}
	granted, refused := r.locks.grant(grantRules{withKeys: withKeys, inFlight: r.inFlight, goesFirst: r.goesFirst, anyAge: r.cfg.Mutants.LocksAnyAge})
	for _, l := range refused {
		l.reply(regionpb.LockGrant{}, regionpb.ErrorOf(l.refused))
	}
	for _, l := range granted {
		for i := range l.spans {
			if l.spans[i].Exclusive && !r.cfg.Mutants.LeaseTokensStay {
				r.ev.leases.revokeToken(l.spans[i].Lease)
			}
		}
		l.reply(r.granted(l), nil)
		l.reply = nil
	}
	if r.ev.err != nil {
		r.fail(fmt.Errorf("locking leases: %w", r.ev.err))
	}
}

func (r *Replica) takeLock(q *Lock) {
	if q.Term != 0 && q.Term != r.role.Term {
		q.Reply(regionpb.LockGrant{}, regionpb.ErrorOf(regionpb.LeaseTermOver))
		return
	}
	for i := range q.Spans {
		if q.Spans[i].Lease == 0 && !r.pos.Descriptor.Span.Covers(q.Spans[i].Span) {
			d := r.pos.Descriptor
			q.Reply(regionpb.LockGrant{}, &regionpb.Error{Code: regionpb.EpochMismatch, Descriptor: &d})
			return
		}
	}
	if r.locks.len() >= r.lim.LocksMax {
		q.Reply(regionpb.LockGrant{}, regionpb.ErrorOf(regionpb.TooManyRequests))
		return
	}
	if !r.locks.request(&lock{attempt: q.Attempt, age: q.Age, owner: q.Owner, since: r.clock, spans: q.Spans, now: q.Now, reply: q.Reply}) {
		q.Reply(regionpb.LockGrant{}, regionpb.ErrorOf(regionpb.LockLost))
	}
}

func (r *Replica) takeRelease(attempt pdpb.AttemptID) {
	if l := r.locks.cancel(attempt); l != nil {
		l.reply(regionpb.LockGrant{}, regionpb.ErrorOf(regionpb.LockLost))
	}
	// Whoever is not the owner frees nothing (A3), and what is in the log ends by a decision only.
	if l := r.locks.find(attempt); l != nil && l.state == lockGranted {
		r.locks.release(attempt)
	}
}

// ownerDown ends what a lost coordinator left here; a part that is prepared need not wait before it
// asks for an abort (T6).
func (r *Replica) ownerDown(store raftid.StoreID) {
	for _, attempt := range r.locks.ownedBy(store) {
		r.takeRelease(attempt)
		if l := r.locks.find(attempt); l != nil && l.state == lockPrepared && r.cfg.Abort != nil {
			r.cfg.Abort(attempt)
		}
	}
}

// Locks prints who holds and who waits for what. For the group's owner.
func (r *Replica) Locks() string { return r.locks.String() }

// inFlight says whether a lock on spans has to wait for what is evaluated and not applied.
func (r *Replica) inFlight(spans []regionpb.LockSpan) bool {
	if r.ev.err != nil {
		return true // what is attached to a lease is not known
	}
	for i := range spans {
		if l := spans[i].Lease; l == 0 && r.ov.any(spans[i].Span) || l != 0 && r.ov.leasePending(r.pos.Descriptor.Span.Start, l) {
			return true
		}
	}
	return false
}

// goesFirst says whether the n-th waiter, for a lock on spans, has to wait for a command that has
// waited long enough.
func (r *Replica) goesFirst(spans []regionpb.LockSpan, n int) bool {
	var set spanSet
	for made, i := false, 0; i < len(r.queue); i++ {
		if w := r.queue[i]; r.aged(w) {
			if !made {
				set, made = newSpanSet(spans), true
			}
			if set.conflicts(w.spans()) && r.waitersBefore(w) <= n {
				return true
			}
		}
	}
	return false
}

// spans are what a write conflicts with, made once.
func (w *Write) spans() []regionpb.LockSpan {
	if w.locks == nil && w.Lease != nil {
		w.locks = leaseLocks(w.Lease)
	} else if w.locks == nil {
		w.locks = spansOf(nil, w.Txn)
	}
	return w.locks
}

func (r *Replica) aged(w *Write) bool { return r.clock-w.since > r.lim.StandBackTicks }

// waitersBefore returns how many waiters a command stands back for.
func (r *Replica) waitersBefore(w *Write) int {
	switch {
	case !r.aged(w):
		return len(r.locks.waiting)
	case r.cfg.Mutants.AgedGoFirst:
		return 0
	}
	return r.locks.before(w.since)
}

// blocked says whether a command has to wait for an attempt over several regions.
func (r *Replica) blocked(w *Write) bool {
	if r.locks.empty() {
		return false
	}
	spans := w.spans()
	if r.cfg.Mutants.LeaseNoLock && w.Txn != nil {
		spans = slices.DeleteFunc(slices.Clone(spans), func(s regionpb.LockSpan) bool { return s.Lease != 0 })
	}
	if w.Lease != nil && w.Lease.Op == regionpb.LeaseRevoke {
		// Which keys it deletes may change while it waits.
		spans, _, _ = r.ev.withKeys(spans, math.MaxInt)
	}
	return r.locks.inFront(spans, r.waitersBefore(w))
}

// deciding is a prepare that was proposed here and waits for its decision.
type deciding struct {
	attempt pdpb.AttemptID
	reply   func(mvcc.Revision, error)
}

// proposePrepares puts the first of some prepares into one entry and proposes it in the same step.
// It returns how many it took care of, 0 when nothing can be proposed now.
func (r *Replica) proposePrepares(h raftstore.Handle, list []*Prepare) (taken int) {
	if r.full() || r.held != nil {
		return 0
	}
	p := &proposal{index: h.LastIndex() + 1, term: r.role.Term}
	e := regionpb.Entry{Term: p.term, Index: p.index, Fence: r.fence}
	bytes, bytesPrepared := 0, 0
	for i := range r.pos.Prepared {
		bytesPrepared += len(r.pos.Prepared[i].Encoded())
	}
	var used []*lock
	for _, q := range list {
		if len(e.Prepares) >= r.lim.EntryCommandsMax || (bytes >= r.lim.EntryBytesMax && bytes > 0) {
			break
		}
		taken++
		l := r.locks.find(q.Request.Attempt)
		if r.cfg.Mutants.NoLockCheck && (l == nil || l.id != q.Request.Lock) {
			l = &lock{attempt: q.Request.Attempt, id: q.Request.Lock, state: lockGranted}
		}
		// T1: what the coordinator read is what is here only if the lock was held all the time.
		if l == nil || l.state != lockGranted || l.id != q.Request.Lock {
			q.Reply(0, regionpb.ErrorOf(regionpb.LockLost))
			continue
		}
		x := regionpb.Prepared{Attempt: l.attempt, Participants: q.Request.Participants, Locks: l.spans,
			Effects: q.Request.Effects, Subs: q.Request.Subs, Records: q.Request.Records}
		size, refusal := len(x.Encoded()), regionpb.Code(0)
		if size > r.lim.PrepareBytesMax {
			refusal = regionpb.TooLarge
		} else if bytesPrepared+bytes+size > r.lim.PreparedBytesMax && bytesPrepared+bytes > 0 {
			refusal = regionpb.TooManyRequests
		}
		if refusal != 0 {
			r.locks.release(l.attempt) // the attempt never commits: others need not wait until its lock runs out
			q.Reply(0, regionpb.ErrorOf(refusal))
			continue
		}
		l.state = lockProposed // no second prepare of it
		bytes += size
		used = append(used, l)
		e.Prepares = append(e.Prepares, x)
		p.prepares = append(p.prepares, deciding{l.attempt, q.Reply})
	}
	if len(e.Prepares) == 0 {
		return taken
	}
	e.Seals = r.in.Seals(r.sealed+1, r.lim.SealsMax)
	p.bytes = bytes + 256*len(e.Prepares)
	if !r.propose(h, p, &e) {
		// Dropped for certain (E1). The role is about to change, or raft has too much in flight;
		// either way these are certainly not prepared.
		for i, l := range used {
			r.locks.release(l.attempt)
			p.prepares[i].reply(0, regionpb.ErrorOf(regionpb.LockLost))
		}
	}
	return taken
}

// applyPrepares makes the prepares of an entry part of the position.
func (r *Replica) applyPrepares(e *regionpb.Entry, p *proposal) error {
	if p != nil && len(p.prepares) != len(e.Prepares) {
		return fmt.Errorf("%w: entry %d has %d prepares, %d were proposed", ErrDiverged, e.Index, len(e.Prepares), len(p.prepares))
	}
	for i := range e.Prepares {
		x := e.Prepares[i]
		j, ok := r.prepared(x.Attempt)
		if ok {
			return fmt.Errorf("%w: attempt %d is prepared twice", ErrDiverged, x.Attempt)
		}
		next := make([]regionpb.Prepared, 0, len(r.pos.Prepared)+1)
		r.pos.Prepared = append(append(append(next, r.pos.Prepared[:j]...), x), r.pos.Prepared[j:]...)
		if l := r.locks.find(x.Attempt); l != nil {
			l.state, l.ticks = lockPrepared, 0
		}
		if p != nil {
			r.deciding = append(r.deciding, p.prepares[i])
		}
	}
	return nil
}

func (r *Replica) prepared(attempt pdpb.AttemptID) (int, bool) {
	return slices.BinarySearchFunc(r.pos.Prepared, attempt, func(p regionpb.Prepared, id pdpb.AttemptID) int { return cmp.Compare(p.Attempt, id) })
}

// applyDecisions ends attempts, after the item's entries (P3).
func (r *Replica) applyDecisions(batch mvcc.Batch, it *pdpb.Item) (bytes int, err error) {
	for _, d := range it.Decisions {
		i, ok := r.prepared(d.Attempt)
		if !ok && r.cfg.Mutants.DecisionsFirst {
			continue
		}
		if !ok {
			return 0, fmt.Errorf("%w: item %d decides attempt %d, which is not prepared here (A17)", ErrDiverged, it.N, d.Attempt)
		}
		p := r.pos.Prepared[i]
		if d.Commit && len(p.Effects) > 0 {
			subs := p.Subs
			if r.cfg.Mutants.LocalOrdinals {
				subs = nil
			}
			if err := r.putEffects(batch, p.Effects, subs, d.Rev, false); err != nil {
				return 0, err
			}
			bytes += len(p.Encoded())
			r.count(func(s *Stats) { s.Writes++; s.Crossed++ })
		}
		if d.Commit {
			if err := r.putRecords(batch, p.Records); err != nil {
				return 0, err
			}
		}
		if f := r.cfg.Observer.Decided; f != nil {
			f(it, &p, d)
		}
		next := make([]regionpb.Prepared, 0, len(r.pos.Prepared)-1)
		r.pos.Prepared = append(append(next, r.pos.Prepared[:i]...), r.pos.Prepared[i+1:]...)
		r.locks.release(d.Attempt)
		for k := range r.deciding {
			if w := r.deciding[k]; w.attempt == d.Attempt {
				a := answer{prepare: w.reply, rev: d.Rev}
				if !d.Commit {
					a.err = regionpb.ErrorOf(regionpb.Aborted)
				}
				r.replies = append(r.replies, a)
				r.deciding = slices.Delete(r.deciding, k, k+1)
				break
			}
		}
	}
	return bytes, nil
}

// failDeciding tells coordinators that they will not hear here what became of their prepares.
func (r *Replica) failDeciding() {
	list := r.deciding
	r.deciding = nil
	for _, w := range list {
		w.reply(0, regionpb.ErrorOf(regionpb.Unknown))
	}
}
