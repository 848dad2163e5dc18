package regionpb

import (
	"encoding/binary"
	"fmt"

	"braid/mvcc"
)

// LeaseRecord is a lease as it is recorded. The record lies in the region that owns LeasePlace; only
// ordered entries change it.
type LeaseRecord struct {
	// Grant is who the lease is among all that ever have its id (L7): a number that nobody else drew.
	Grant uint64
	// TTL is what was granted, in seconds.
	TTL int64
	// Remaining is how many seconds were left at the last checkpoint; 0: all of TTL.
	Remaining int64
	// Spans are those of the regions that registered, besides the record's own (L1): all attached
	// keys lie in them or in the region that owns the record now.
	Spans []mvcc.Span
}

// Lease is a lease with its record.
type Lease struct {
	ID     int64
	Record *LeaseRecord
}

// LeasePlace is where in the key space a lease's record lies. Ids are mixed, so that records spread
// over regions however ids are chosen.
func LeasePlace(id int64) []byte {
	x := uint64(id) + 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return binary.BigEndian.AppendUint64(nil, x^x>>31)
}

// LeaseKey names a lease's record.
func LeaseKey(id int64) mvcc.RecordKey {
	return mvcc.RecordKey{Kind: mvcc.RecordLease, At: LeasePlace(id), ID: id}
}

// RegisteredKey names the record by which a region that begins at start may attach keys to a lease.
func RegisteredKey(start []byte, id int64) mvcc.RecordKey {
	return mvcc.RecordKey{Kind: mvcc.RecordRegistered, At: start, ID: id}
}

// leaseV2: V1 did not tell leases of one id apart.
const leaseV2 = 2

// Append appends the encoding to b.
func (l *LeaseRecord) Append(b []byte) []byte {
	b = binary.AppendUvarint(append(b, leaseV2), l.Grant)
	b = binary.AppendUvarint(b, zig(l.TTL))
	b = binary.AppendUvarint(b, zig(l.Remaining))
	b = binary.AppendUvarint(b, uint64(len(l.Spans)))
	for _, s := range l.Spans {
		b = appendSpan(b, s)
	}
	return b
}

// DecodeLeaseRecord reads what Append wrote; spans alias data.
func DecodeLeaseRecord(data []byte) (*LeaseRecord, error) {
	d := decoder{b: data}
	d.version(leaseV2, "lease record")
	l := &LeaseRecord{Grant: d.uvarint(), TTL: d.varint(), Remaining: d.varint()}
	for n := d.count(2); n > 0; n-- {
		l.Spans = append(l.Spans, d.span())
	}
	return l, d.done()
}

// String prints the record in one line.
func (l *LeaseRecord) String() string {
	s := fmt.Sprintf("ttl=%d", l.TTL)
	if l.Remaining > 0 {
		s += fmt.Sprintf(" remaining=%d", l.Remaining)
	}
	for _, span := range l.Spans {
		s += fmt.Sprintf(" %v", span)
	}
	return s
}

// RecordEffect is a change of a record of the system space, at its place in the order. It consumes
// no revision.
type RecordEffect struct {
	Key   mvcc.RecordKey
	Value []byte // empty removes the record
}

func (r *RecordEffect) size() int {
	return 1 + bytesLen(r.Key.At) + uvarintLen(zig(r.Key.ID)) + bytesLen(r.Value)
}

func (r *RecordEffect) append(b []byte) []byte {
	b = appendBytes(append(b, byte(r.Key.Kind)), r.Key.At)
	b = binary.AppendUvarint(b, zig(r.Key.ID))
	return appendBytes(b, r.Value)
}

func recordsSize(list []RecordEffect) int {
	n := uvarintLen(uint64(len(list)))
	for i := range list {
		n += list[i].size()
	}
	return n
}

func appendRecords(b []byte, list []RecordEffect) []byte {
	b = binary.AppendUvarint(b, uint64(len(list)))
	for i := range list {
		b = list[i].append(b)
	}
	return b
}

func (d *decoder) records() []RecordEffect {
	n := d.count(4)
	if n == 0 {
		return nil
	}
	list := make([]RecordEffect, n)
	for i := range list {
		list[i].Key = mvcc.RecordKey{Kind: mvcc.RecordKind(d.byte()), At: d.bytes(), ID: d.varint()}
		list[i].Value = d.bytes()
		if k := list[i].Key.Kind; k != mvcc.RecordLease && k != mvcc.RecordRegistered {
			d.fail("record kind")
		}
	}
	return list
}

// LeaseOp is what a LeaseCommand does.
type LeaseOp uint8

const (
	// LeaseGrant makes the record, with Grant and TTL.
	LeaseGrant LeaseOp = iota + 1
	// LeaseRevoke removes leases whose keys all lie in the record's region, with their keys: its own
	// and those of More. Those that have ended, or are of another grant, are passed over, unless all do.
	LeaseRevoke
	// LeaseRegister adds Span to the record.
	LeaseRegister
	// LeaseCheckpoint records Remaining, and those of More; leases that have ended, or are of another
	// grant, are passed over.
	LeaseCheckpoint
	// LeaseAttach registers the region that contains Span.Start, with a token, as a put would.
	LeaseAttach
)

// LeaseCommand is a command on leases for the region that owns their records, LeaseAttach excepted.
type LeaseCommand struct {
	Op LeaseOp
	ID int64
	// Grant of a LeaseGrant is the one to record, not 0. Of a LeaseCheckpoint or LeaseRevoke it is the one
	// that is meant (L7); 0: whichever has the id.
	Grant     uint64
	TTL       int64 // LeaseGrant: seconds
	Remaining int64 // LeaseCheckpoint: seconds
	Span      mvcc.Span
	// Term, if not 0: only a leader of that term may execute it. Who decided that a lease is over
	// did so by the clock of that term (L5).
	Term uint64
	// More are further leases of a LeaseCheckpoint or LeaseRevoke, whose records lie in the same
	// region. A revocation says of none what it has left.
	More []LeaseLeft
}

// ManyLeases is a LeaseRevoke or LeaseCheckpoint of leases whose records lie in one region, at least
// one; with a term, only as that term's leader.
func ManyLeases(op LeaseOp, list []LeaseLeft, term uint64) *LeaseCommand {
	return &LeaseCommand{Op: op, ID: list[0].ID, Grant: list[0].Grant, Remaining: list[0].Remaining, Term: term, More: list[1:]}
}

// LeaseLeft is a lease of several, and what it has left.
type LeaseLeft struct {
	ID        int64
	Grant     uint64 // the one that is meant (L7); 0: whichever has the id
	Remaining int64  // seconds; 0 is all
}

// Leases are the leases of a LeaseRevoke or LeaseCheckpoint.
func (c *LeaseCommand) Leases() []LeaseLeft {
	return append(append(make([]LeaseLeft, 0, 1+len(c.More)), LeaseLeft{c.ID, c.Grant, c.Remaining}), c.More...)
}

// Means says whether a record, nil when there is none, is of the lease that is meant (L7).
func (l *LeaseLeft) Means(rec *LeaseRecord) bool {
	return rec != nil && (l.Grant == 0 || l.Grant == rec.Grant)
}

// LeaseToken shows that a region's leader was asked to register for a lease, and that nobody has
// locked the lease there for a revocation since (L3).
type LeaseToken struct {
	Lease int64
	Grant LockID
}

func appendLeaseCommand(b []byte, c *LeaseCommand) []byte {
	b = append(b, byte(c.Op))
	for _, v := range [...]int64{c.ID, c.TTL, c.Remaining} {
		b = binary.AppendUvarint(b, zig(v))
	}
	b = binary.AppendUvarint(b, c.Grant)
	b = appendSpan(b, c.Span)
	b = binary.AppendUvarint(b, c.Term)
	b = binary.AppendUvarint(b, uint64(len(c.More)))
	for _, l := range c.More {
		b = binary.AppendUvarint(binary.AppendUvarint(binary.AppendUvarint(b, zig(l.ID)), l.Grant), zig(l.Remaining))
	}
	return b
}

func (d *decoder) leaseCommand() *LeaseCommand {
	c := &LeaseCommand{Op: LeaseOp(d.byte()), ID: d.varint(), TTL: d.varint(), Remaining: d.varint(), Grant: d.uvarint(), Span: d.span(), Term: d.uvarint()}
	for n := d.count(3); n > 0; n-- {
		c.More = append(c.More, LeaseLeft{ID: d.varint(), Grant: d.uvarint(), Remaining: d.varint()})
	}
	if c.Op < LeaseGrant || c.Op > LeaseAttach {
		d.fail("lease command")
	}
	return c
}

func appendTokens(b []byte, tokens []LeaseToken) []byte {
	b = binary.AppendUvarint(b, uint64(len(tokens)))
	for _, t := range tokens {
		b = binary.AppendUvarint(b, zig(t.Lease))
		b = binary.AppendUvarint(b, t.Grant.Term)
		b = binary.AppendUvarint(b, t.Grant.Seq)
	}
	return b
}

func (d *decoder) tokens() (tokens []LeaseToken) {
	for n := d.count(3); n > 0; n-- {
		tokens = append(tokens, LeaseToken{Lease: d.varint(), Grant: LockID{Term: d.uvarint(), Seq: d.uvarint()}})
	}
	return tokens
}
