package region

import (
	"bytes"
	"fmt"
	"slices"

	"braid/mvcc"
	"braid/region/regionpb"
)

// A lease is a record in the region that owns its place; keys in any region may be attached to it.
// The life of an attachment:
//
//	register  a leader that is asked to put with a lease it does not know answers with a token; the
//	          router adds the region's span to the record (L1) and comes again; the put's entry
//	          then registers the region as well (L3)
//	put       from then on a put there needs no trip: registered means that the lease exists,
//	          because whoever ends it locks it here too (L2) and takes the registration away
//	end       a lease with keys only where its record is, is one command; else an attempt over
//	          several regions: prepare.go

// leaseState is what the leader knows of leases beside records.
type leaseState struct {
	term uint64
	// asked holds the tokens that were given out in this term, by lease. A revocation that locks
	// the lease here takes its token back.
	asked map[int64]uint64
	seq   uint64

	// Of the write that is being evaluated: its tokens, and whether it names a lease that is not
	// registered here.
	tokens  []regionpb.LeaseToken
	missing bool

	// Test hooks, see Mutants.
	oneSpan, attachFirst bool
}

// leasesAskedMax bounds the tokens that are given out; when it is reached, all are taken back and
// their owners have to ask again.
const leasesAskedMax = 64 << 10

// revokeToken makes a registration that is under way start over: the lease is locked by whoever
// ends it.
func (s *leaseState) revokeToken(lease int64) { delete(s.asked, lease) }

func (s *leaseState) begin(term uint64) {
	if s.term != term {
		s.term = term
		clear(s.asked)
	}
}

func (s *leaseState) token(lease int64) regionpb.LeaseToken {
	if s.asked == nil {
		s.asked = map[int64]uint64{}
	}
	seq, ok := s.asked[lease]
	if !ok {
		if len(s.asked) >= leasesAskedMax {
			clear(s.asked)
		}
		s.seq++
		seq = s.seq
		s.asked[lease] = seq
	}
	return regionpb.LeaseToken{Lease: lease, Grant: regionpb.LockID{Term: s.term, Seq: seq}}
}

func (s *leaseState) valid(lease int64) bool {
	seq, ok := s.asked[lease]
	return ok && slices.Contains(s.tokens, regionpb.LeaseToken{Lease: lease, Grant: regionpb.LockID{Term: s.term, Seq: seq}})
}

// evaluate runs one write of the queue.
func (r *Replica) evaluate(c *command, w *Write) (verdict, error) {
	r.ev.leases.tokens, r.ev.leases.missing = w.Tokens, false
	r.ev.leases.oneSpan, r.ev.leases.attachFirst = r.cfg.Mutants.LeaseOneSpan, r.cfg.Mutants.LeaseAttachFirst
	var v verdict
	var err error
	if w.Lease != nil {
		v, err = r.ev.runLease(c, w.Lease)
	} else {
		v, err = r.ev.run(c, w.Txn)
	}
	if v == evaluated && err == nil && c.bytes > r.lim.CommandBytesMax && c.changes() > r.lim.CommandBytesMax {
		c.fault, v = regionpb.ErrorOf(regionpb.TooLarge), refusal
	}
	return v, err
}

// changes is what the command takes in its entry, in bytes.
func (c *command) changes() (n int) {
	for i := range c.effects {
		n += c.effects[i].Size()
	}
	for i := range c.records {
		n += len(c.records[i].Key.At) + len(c.records[i].Value) + 16
	}
	return n
}

// record returns a record of the system space as the command sees it; nil when there is none.
func (e *evaluator) record(k mvcc.RecordKey) []byte {
	if v, ok := e.ov.records.get(k); ok {
		return v
	}
	v, ok, err := e.r.Record(k)
	if err != nil {
		e.err = err
	}
	if !ok {
		return nil
	}
	return v
}

func (e *evaluator) setRecord(k mvcc.RecordKey, value []byte) {
	e.cmd.records = append(e.cmd.records, regionpb.RecordEffect{Key: k, Value: value})
	e.cmd.bytes += len(k.At) + len(value) + 16
	e.ov.records.put(k, value)
}

// leaseRecord returns the record of a lease, nil when there is none.
func (e *evaluator) leaseRecord(id int64) *regionpb.LeaseRecord {
	data := e.record(regionpb.LeaseKey(id))
	if len(data) == 0 {
		return nil
	}
	rec, err := regionpb.DecodeLeaseRecord(data)
	if err != nil {
		e.err = fmt.Errorf("record of lease %x: %w", uint64(id), err)
	}
	return rec
}

// checkLease says whether keys may be attached to a lease here. When the lease is not registered
// the whole command is refused, with a token, before it has any effect (L3).
func (e *evaluator) checkLease(id int64) *regionpb.Error {
	if e.span.Contains(regionpb.LeasePlace(id)) {
		if e.leaseRecord(id) == nil && e.err == nil {
			return regionpb.ErrorOf(regionpb.LeaseNotFound)
		}
		return nil
	}
	k := regionpb.RegisteredKey(e.span.Start, id)
	if len(e.record(k)) > 0 || e.err != nil {
		return nil
	}
	if e.leases.attachFirst {
		return nil
	}
	if !e.leases.valid(id) {
		e.leases.missing = true
		return regionpb.NotRegistered(e.leases.token(id))
	}
	e.setRecord(k, registered)
	return nil
}

// registered is the value of a registration.
var registered = []byte{1}

// attached returns the keys that are attached to a lease here, pending ones included, in order.
// With detaching come those too that a pending version takes off the lease.
func (e *evaluator) attached(id int64, detaching bool) [][]byte {
	var keys [][]byte
	if err := e.r.Attached(id, e.span, func(key []byte) bool {
		if detaching || e.ov.get(key) == nil {
			keys = append(keys, bytes.Clone(key))
		}
		return true
	}); err != nil {
		e.err = err
	}
	n := len(keys)
	if keys = e.ov.attached(id, keys); len(keys) > n {
		slices.SortFunc(keys, bytes.Compare)
		keys = slices.CompactFunc(keys, bytes.Equal)
	}
	return keys
}

// runLease evaluates a command on a lease.
func (e *evaluator) runLease(cmd *command, l *regionpb.LeaseCommand) (verdict, error) {
	e.cmd, e.over = cmd, false
	defer func() { e.cmd = nil }()
	cmd.bytes = 64
	if l.Op == regionpb.LeaseAttach {
		if !e.span.Contains(l.Span.Start) {
			return outside, nil
		}
		if cmd.fault = e.checkLease(l.ID); e.leases.missing {
			return refusal, e.err
		}
		e.leaseAnswer()
		return evaluated, e.err
	}
	if !e.span.Contains(regionpb.LeasePlace(l.ID)) {
		return outside, nil
	}
	if l.Term != 0 && l.Term != e.leases.term {
		cmd.fault = regionpb.ErrorOf(regionpb.LeaseTermOver)
		return refusal, nil
	}
	if l.Op == regionpb.LeaseCheckpoint {
		e.checkpoint(l)
		e.leaseAnswer()
		return evaluated, e.err
	}
	rec := e.leaseRecord(l.ID)
	switch {
	case e.err != nil:
		return undecided, e.err
	case l.Op == regionpb.LeaseGrant && rec != nil:
		cmd.fault = regionpb.ErrorOf(regionpb.LeaseExists)
	case l.Op == regionpb.LeaseGrant:
		rec = &regionpb.LeaseRecord{TTL: l.TTL}
		e.setRecord(regionpb.LeaseKey(l.ID), rec.Append(nil))
	case rec == nil:
		cmd.fault = regionpb.ErrorOf(regionpb.LeaseNotFound)
	case l.Op == regionpb.LeaseRegister:
		if !slices.ContainsFunc(rec.Spans, func(s mvcc.Span) bool { return s.Covers(l.Span) }) {
			spans := []mvcc.Span{l.Span}
			for _, s := range rec.Spans {
				if !l.Span.Covers(s) && !e.leases.oneSpan {
					spans = append(spans, s)
				}
			}
			rec.Spans = spans
			e.setRecord(regionpb.LeaseKey(l.ID), rec.Append(nil))
		}
	case l.Op == regionpb.LeaseRevoke && slices.ContainsFunc(rec.Spans, func(s mvcc.Span) bool { return !e.span.Covers(s) }):
		cmd.fault = regionpb.ErrorOf(regionpb.LeaseSpread)
		return refusal, nil
	case l.Op == regionpb.LeaseRevoke:
		own := revision{num: &cmd.num}
		for _, key := range e.attached(l.ID, false) {
			if !e.visit(nil) {
				return exhausted, nil
			}
			e.write(regionpb.Effect{Key: key, Delete: true, Detach: l.ID}, pending{mod: own})
		}
		e.setRecord(regionpb.LeaseKey(l.ID), nil)
	}
	e.leaseAnswer()
	return evaluated, e.err
}

// checkpoint records what leases have left.
func (e *evaluator) checkpoint(l *regionpb.LeaseCommand) {
	for _, left := range l.Lefts() {
		if !e.span.Contains(regionpb.LeasePlace(left.ID)) {
			continue
		}
		if rec := e.leaseRecord(left.ID); rec != nil && e.err == nil {
			rec.Remaining = left.Remaining
			e.setRecord(regionpb.LeaseKey(left.ID), rec.Append(nil))
		}
	}
}

// leaseAnswer is a header with the revision of the command's place.
func (e *evaluator) leaseAnswer() {
	if e.cmd.fault == nil && e.err == nil {
		resp := newTxnResponse()
		e.stamp(&resp.Header.Revision)
		e.cmd.tmpl.resp = resp
	}
}

// LeaseChange is a lease's record after an entry; nil when it is gone.
type LeaseChange struct {
	ID     int64
	Record *regionpb.LeaseRecord
}

// leadLeases tells, once in each term, that this replica leads and that all records of leases
// that are ordered before the term are applied.
func (r *Replica) leadLeases() {
	if r.ev.leases.term == r.role.Term {
		return
	}
	r.ev.leases.begin(r.role.Term)
	if f := r.cfg.Observer.LeaseTerm; f != nil {
		f(r.role.Term)
	}
}

// endLeases tells that this replica does not lead any more.
func (r *Replica) endLeases() {
	if r.ev.leases.term == 0 {
		return
	}
	r.ev.leases.begin(0)
	if f := r.cfg.Observer.LeaseTerm; f != nil {
		f(0)
	}
}

// putRecords writes changes of the system space.
func (r *Replica) putRecords(batch mvcc.Batch, list []regionpb.RecordEffect) error {
	for i := range list {
		x := &list[i]
		value := x.Value
		if len(value) == 0 {
			value = nil
		}
		if err := batch.SetRecord(x.Key, value); err != nil {
			return fmt.Errorf("applying record %v: %w", x.Key, err)
		}
		if x.Key.Kind != mvcc.RecordLease || r.cfg.Observer.Leases == nil {
			continue
		}
		change := LeaseChange{ID: x.Key.ID}
		if value != nil {
			rec, err := regionpb.DecodeLeaseRecord(bytes.Clone(value))
			if err != nil {
				return fmt.Errorf("applying record %v: %w", x.Key, err)
			}
			change.Record = rec
		}
		r.leaseChanges = append(r.leaseChanges, change)
	}
	return nil
}

// KeepAwake says whether somebody's clock runs for leases of this region, so that its group must
// not sleep (B12). Any goroutine.
func (r *Replica) KeepAwake(on bool) {
	r.mu.Lock()
	r.mu.awake = on
	r.mu.Unlock()
}

// leaseLocks are what a command on a lease conflicts with.
func leaseLocks(l *regionpb.LeaseCommand) []regionpb.LockSpan {
	list := []regionpb.LockSpan{{Lease: l.ID, Exclusive: l.Op != regionpb.LeaseAttach}}
	for i := range l.More {
		list = append(list, regionpb.LockSpan{Lease: l.More[i].ID, Exclusive: true})
	}
	return list
}

// withKeys adds to locks that end leases the keys that are attached to them now: nobody may detach
// or change them once the lock is granted, and nobody can attach more. Whoever holds the lock reads
// applied state, so a key that is being detached counts, until that is applied: its pending version
// makes the lock wait.
func (e *evaluator) withKeys(spans []regionpb.LockSpan) []regionpb.LockSpan {
	out := slices.Clip(spans)
	for i := range spans {
		if spans[i].Lease == 0 || !spans[i].Exclusive {
			continue
		}
		for _, key := range e.attached(spans[i].Lease, true) {
			out = append(out, regionpb.LockSpan{Span: mvcc.Key(key), Exclusive: true})
		}
	}
	return out
}

// leasePending says whether what is in flight changes what a lease is here.
func (o *overlay) leasePending(start []byte, id int64) bool {
	if o.leased.pending(id) {
		return true
	}
	for _, k := range [...]mvcc.RecordKey{regionpb.LeaseKey(id), regionpb.RegisteredKey(start, id)} {
		if _, ok := o.records.get(k); ok {
			return true
		}
	}
	return false
}
