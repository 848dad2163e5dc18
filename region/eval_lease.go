package region

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
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
//	end       leases with keys only where their records are, are one command, also when there are
//	          several; else an attempt over several regions: prepare.go

// leaseState is what the leader knows of leases beside records.
type leaseState struct {
	term uint64
	// asked holds the tokens that were given out in this term, by lease. A revocation that locks
	// the lease here takes its token back.
	asked map[int64]uint64
	seq   uint64
	// known is what applied records say, of leases of which a record was applied in this term: to end them
	// none has to be looked up. Those that name the same regions share the list, in regions.
	known   map[int64]knownLease
	regions map[string][]mvcc.Span

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

// knownLease is who a lease is and where it may have keys.
type knownLease struct {
	grant uint64
	spans []mvcc.Span // besides the record's region
}

// leasesKnownMax and leaseRegionsMax bound leaseState.known and regions; other records are looked up.
const leasesKnownMax, leaseRegionsMax = 1 << 18, 256

// note takes a record of a lease as it is applied; nil when it is gone.
func (s *leaseState) note(id int64, rec *regionpb.LeaseRecord) {
	if s.term == 0 {
		return
	}
	delete(s.known, id)
	if rec == nil || len(s.known) >= leasesKnownMax {
		return
	}
	spans, ok := s.shared(rec.Spans)
	if !ok {
		return
	}
	if s.known == nil {
		s.known = map[int64]knownLease{}
	}
	s.known[id] = knownLease{rec.Grant, spans}
}

// shared returns the one list with some spans; false when there are too many of them.
func (s *leaseState) shared(spans []mvcc.Span) ([]mvcc.Span, bool) {
	if len(spans) == 0 {
		return nil, true
	}
	var room [64]byte
	name := room[:0]
	for _, x := range spans {
		name = append(binary.AppendUvarint(name, uint64(len(x.Start))), x.Start...)
		if x.End == nil {
			name = append(name, 0)
		} else {
			name = append(binary.AppendUvarint(name, uint64(len(x.End))+1), x.End...)
		}
	}
	list, ok := s.regions[string(name)]
	if !ok && len(s.regions) < leaseRegionsMax {
		if s.regions == nil {
			s.regions = map[string][]mvcc.Span{}
		}
		list, ok = spans, true
		s.regions[string(name)] = list
	}
	return list, ok
}

// revokeToken makes a registration that is under way start over: the lease is locked by whoever
// ends it.
func (s *leaseState) revokeToken(lease int64) { delete(s.asked, lease) }

func (s *leaseState) begin(term uint64) {
	if s.term != term {
		s.term, s.known, s.regions = term, nil, nil
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

// leaseRecords returns the records of leases in their order, as far as they say who it is and where keys may
// be; nil where there is none, or one of another grant (L7).
func (e *evaluator) leaseRecords(list []regionpb.LeaseLeft) []*regionpb.LeaseRecord {
	out := make([]*regionpb.LeaseRecord, len(list))
	decode := func(i int, data []byte) {
		rec, err := regionpb.DecodeLeaseRecord(data)
		if err != nil {
			e.err = fmt.Errorf("record of lease %x: %w", uint64(list[i].ID), err)
		} else if list[i].Means(rec) {
			out[i] = rec
		}
	}
	keys, at := make([]mvcc.RecordKey, 0, len(list)), make([]int, 0, len(list))
	for i := range list {
		k := regionpb.LeaseKey(list[i].ID)
		if data, ok := e.ov.records.get(k); !ok {
			if x, known := e.leases.known[list[i].ID]; known {
				if rec := (&regionpb.LeaseRecord{Grant: x.grant, Spans: x.spans}); list[i].Means(rec) {
					out[i] = rec
				}
				continue
			}
			keys, at = append(keys, k), append(at, i)
		} else if len(data) > 0 {
			decode(i, data)
		}
	}
	if len(keys) == 0 {
		return out
	}
	if err := e.r.Lookup(keys, func(i int, data []byte) { decode(at[i], data) }); err != nil {
		e.err = err
	}
	return out
}

// attached returns the keys that are attached to leases here, pending ones included, in order; no more
// than most of those that are applied, nor many more than bytesMax bytes of them. With detaching come those
// too that a pending version takes off its lease; such a key may come twice, of two leases.
func (e *evaluator) attached(ids []int64, detaching bool, most, bytesMax int) []regionpb.Attachment {
	var list []regionpb.Attachment
	size := 0
	var room []byte // for the keys of several
	if err := e.r.Attached(ids, e.span, func(lease int64, key []byte) bool {
		if detaching || e.ov.get(key) == nil {
			if len(room)+len(key) > cap(room) {
				room = make([]byte, 0, max(len(key), min(64+16*cap(room), 16<<10)))
			}
			n := len(room)
			room = append(room, key...)
			list = append(list, regionpb.Attachment{Lease: lease, Key: room[n:len(room):len(room)]})
		}
		size += len(key)
		return len(list) < most && size <= bytesMax
	}); err != nil {
		e.err = err
	}
	n := len(list)
	for _, id := range ids {
		list = e.ov.attached(id, list)
	}
	if len(ids) > 1 || len(list) > n {
		slices.SortFunc(list, func(a, b regionpb.Attachment) int {
			return cmp.Or(bytes.Compare(a.Key, b.Key), cmp.Compare(a.Lease, b.Lease))
		})
		list = slices.CompactFunc(list, func(a, b regionpb.Attachment) bool { return a.Lease == b.Lease && bytes.Equal(a.Key, b.Key) })
	}
	return list
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
	switch l.Op {
	case regionpb.LeaseCheckpoint:
		e.checkpoint(l)
		e.leaseAnswer()
		return evaluated, e.err
	case regionpb.LeaseRevoke:
		return e.revoke(l)
	}
	rec := e.leaseRecord(l.ID)
	switch {
	case e.err != nil:
		return undecided, e.err
	case l.Op == regionpb.LeaseGrant && rec != nil:
		cmd.fault = regionpb.ErrorOf(regionpb.LeaseExists)
	case l.Op == regionpb.LeaseGrant:
		rec = &regionpb.LeaseRecord{Grant: l.Grant, TTL: l.TTL}
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
	}
	e.leaseAnswer()
	return evaluated, e.err
}

// revoke ends leases, all or none, and deletes their keys, in the order of keys. Several that are too
// much for one command, or whose records do not all lie here, are refused with TooLarge: their parts may
// fare better.
func (e *evaluator) revoke(l *regionpb.LeaseCommand) (verdict, error) {
	list, cmd := l.Leases(), e.cmd
	refuse := func(code regionpb.Code) (verdict, error) {
		cmd.fault = regionpb.ErrorOf(code)
		return refusal, e.err
	}
	if slices.ContainsFunc(list, func(x regionpb.LeaseLeft) bool { return !e.span.Contains(regionpb.LeasePlace(x.ID)) }) {
		return refuse(regionpb.TooLarge)
	}
	// Those that are ended together have keys in the same regions: the first one tells of most.
	first := e.leaseRecords(list[:1])
	if e.spread(first[0]) && e.err == nil {
		return refuse(regionpb.LeaseSpread)
	}
	records := append(first, e.leaseRecords(list[1:])...)
	if e.err != nil {
		return undecided, e.err
	}
	ids := make([]int64, 0, len(list))
	for i, rec := range records {
		if rec == nil {
			continue
		}
		if e.spread(rec) {
			return refuse(regionpb.LeaseSpread)
		}
		ids = append(ids, list[i].ID)
	}
	if len(ids) == 0 {
		cmd.fault = regionpb.ErrorOf(regionpb.LeaseNotFound)
		return evaluated, e.err
	}
	most := math.MaxInt
	if e.whole && len(ids) > 1 {
		return refuse(regionpb.TooLarge) // a command of one lease may take its time
	} else if !e.whole {
		most = max(e.left, 0) + 1
	}
	keys := e.attached(ids, false, most, math.MaxInt)
	own := revision{num: &cmd.num}
	cmd.effects = make([]regionpb.Effect, 0, len(keys))
	for i := range keys {
		if !e.visit(nil) {
			return exhausted, nil
		}
		e.write(regionpb.Effect{Key: keys[i].Key, Delete: true, Detach: keys[i].Lease}, pending{mod: own})
	}
	// Neighbours one after the other, which is the quickest way to write them.
	gone := make([]mvcc.RecordKey, len(ids))
	for i, id := range ids {
		gone[i] = regionpb.LeaseKey(id)
	}
	slices.SortFunc(gone, mvcc.RecordKey.Compare)
	for _, k := range gone {
		e.setRecord(k, nil)
	}
	e.leaseAnswer()
	return evaluated, e.err
}

// spread says whether a lease may have keys in other regions.
func (e *evaluator) spread(rec *regionpb.LeaseRecord) bool {
	return rec != nil && slices.ContainsFunc(rec.Spans, func(s mvcc.Span) bool { return !e.span.Covers(s) })
}

// checkpoint records what leases have left.
func (e *evaluator) checkpoint(l *regionpb.LeaseCommand) {
	for _, left := range l.Leases() {
		if !e.span.Contains(regionpb.LeasePlace(left.ID)) {
			continue
		}
		if rec := e.leaseRecord(left.ID); e.err == nil && left.Means(rec) {
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
		if x.Key.Kind != mvcc.RecordLease {
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
		r.ev.leases.note(change.ID, change.Record)
		if r.cfg.Observer.Leases == nil {
			continue
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

// withKeys adds to locks that end leases the keys that are attached to them now, and returns those as well:
// nobody may detach or change them once the lock is granted, and nobody can attach more. Whoever holds the
// lock acts on applied state, so a key that is being detached counts, until that is applied: its pending
// version makes the lock wait. It is false when the keys have more than bytesMax bytes, and some are left out.
func (e *evaluator) withKeys(spans []regionpb.LockSpan, bytesMax int) ([]regionpb.LockSpan, []regionpb.Attachment, bool) {
	var ids []int64
	for i := range spans {
		if spans[i].Lease != 0 && spans[i].Exclusive {
			ids = append(ids, spans[i].Lease)
		}
	}
	if len(ids) == 0 {
		return slices.Clip(spans), nil, true
	}
	keys := e.attached(ids, true, math.MaxInt, bytesMax)
	out := append(make([]regionpb.LockSpan, 0, len(spans)+len(keys)), spans...)
	size := 0
	for i := range keys {
		out = append(out, regionpb.LockSpan{Span: mvcc.Key(keys[i].Key), Exclusive: true})
		size += len(keys[i].Key)
	}
	return out, keys, size <= bytesMax
}

// granted is the answer to whoever got a lock. If it ends leases, all of them that is applied here goes with
// it: nothing of it is in flight, or the lock would have waited, and nothing will change.
func (r *Replica) granted(l *lock) regionpb.LockGrant {
	g := regionpb.LockGrant{ID: l.id}
	keys := l.attached
	l.attached = nil
	ends := false
	var list []regionpb.LeaseLeft
	for i := range l.spans {
		if x := &l.spans[i]; x.Lease != 0 && x.Exclusive {
			ends = true
			if r.pos.Descriptor.Span.Contains(regionpb.LeasePlace(x.Lease)) {
				list = append(list, regionpb.LeaseLeft{ID: x.Lease})
			}
		}
	}
	if !ends || len(list)+len(keys) > r.lim.ReadKeysMax {
		return g
	}
	size := 0
	for i := range keys {
		size += len(keys[i].Key)
	}
	if size > r.lim.ReadBytesMax {
		return g
	}
	g.Whole, g.Attached = true, keys
	for i, rec := range r.ev.leaseRecords(list) {
		if rec != nil {
			g.Records = append(g.Records, regionpb.Lease{ID: list[i].ID, Record: &regionpb.LeaseRecord{Grant: rec.Grant, Spans: rec.Spans}})
		}
	}
	return g
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
