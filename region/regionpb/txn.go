package regionpb

import (
	"encoding/binary"
	"fmt"
	"slices"

	"braid/mvcc"
	"braid/pd/pdpb"
)

// LockSpan is what an attempt of a transaction over several regions locks: keys it reads shared,
// keys it may write exclusively; or a lease (L2), shared to attach keys to it, exclusively to end it.
type LockSpan struct {
	Span      mvcc.Span // not of a lease
	Lease     int64     // 0: keys
	Exclusive bool
}

// Prepared is one region's part of an attempt that is prepared and not decided: what it locks and
// what a commit does. It is durable in the region's log, and then in its position (D1).
type Prepared struct {
	Attempt      pdpb.AttemptID
	Participants []RegionID // all of them, ascending
	Locks        []LockSpan
	Effects      []Effect // none when the region is only read (T2)
	// Subs are the effects' places among the events of the attempt's revision: the coordinator
	// counts over all regions, in the order in which the transaction names them (R1, C-4).
	Subs []int64
	// Records are changes of the system space, which take place with a commit.
	Records []RecordEffect

	// enc is the encoding, once somebody needed it: a position is written with each batch.
	enc []byte
}

// Encoded returns the encoding, which must not be changed. The value must not change any more.
func (p *Prepared) Encoded() []byte {
	if p.enc == nil {
		p.enc = p.append(nil)
	}
	return p.enc
}

func (p *Prepared) append(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(p.Attempt))
	b = appendRegions(b, p.Participants)
	b = appendLocks(b, p.Locks)
	b = appendEffects(b, p.Effects, p.Subs)
	return appendRecords(b, p.Records)
}

func appendLocks(b []byte, locks []LockSpan) []byte {
	b = binary.AppendUvarint(b, uint64(len(locks)))
	for i := range locks {
		l := &locks[i]
		var flags byte
		if l.Exclusive {
			flags |= lockExclusive
		}
		if l.Lease != 0 {
			b = binary.AppendUvarint(append(b, flags|lockLease), zig(l.Lease))
		} else {
			b = appendSpan(append(b, flags), l.Span)
		}
	}
	return b
}

const (
	lockExclusive = 1 << iota
	lockLease
)

func appendEffects(b []byte, effects []Effect, subs []int64) []byte {
	b = binary.AppendUvarint(b, uint64(len(effects)))
	for i := range effects {
		b = binary.AppendUvarint(b, uint64(subs[i]))
		b = effects[i].append(b)
	}
	return b
}

func (d *decoder) locks() []LockSpan {
	n := d.count(2)
	if n == 0 {
		return nil
	}
	locks := make([]LockSpan, n)
	for i := range locks {
		flags := d.byte()
		locks[i].Exclusive = flags&lockExclusive != 0
		switch flags &^ lockExclusive {
		case 0:
			locks[i].Span = d.span()
		case lockLease:
			if locks[i].Lease = d.varint(); locks[i].Lease == 0 {
				d.fail("lock of no lease")
			}
		default:
			d.fail("lock")
		}
	}
	return locks
}

func (d *decoder) subEffects() (effects []Effect, subs []int64) {
	n := d.count(3)
	if n == 0 {
		return nil, nil
	}
	effects, subs = make([]Effect, n), make([]int64, n)
	for i := range effects {
		subs[i] = int64(d.uvarint())
		effects[i] = d.effect()
		if effects[i].CreateKind == CreateResolve && !effects[i].Delete {
			// A locked key has no pending version whose number would have to be found (T1).
			d.fail("create kind of a prepared effect")
		}
	}
	return effects, subs
}

// prepared reads what Prepared.append wrote; keys and values alias the input, slices do not.
func (d *decoder) prepared() (p Prepared) {
	before := d.b
	p.Attempt = pdpb.AttemptID(d.uvarint())
	p.Participants = d.regions()
	p.Locks = d.locks()
	p.Effects, p.Subs = d.subEffects()
	p.Records = d.records()
	if d.err == nil {
		n := len(before) - len(d.b)
		p.enc = before[:n:n]
	}
	return p
}

// String prints the part in one stable line.
func (p *Prepared) String() string {
	s := fmt.Sprintf("t%d of %v", p.Attempt, p.Participants)
	for i := range p.Locks {
		mode := "r"
		if p.Locks[i].Exclusive {
			mode = "w"
		}
		s += fmt.Sprintf(" %s%v", mode, &p.Locks[i])
	}
	s += fmt.Sprintf(" effects=%d", len(p.Effects))
	if len(p.Records) > 0 {
		s += fmt.Sprintf(" records=%d", len(p.Records))
	}
	return s
}

// String prints what is locked, without the mode.
func (l *LockSpan) String() string {
	if l.Lease != 0 {
		return fmt.Sprintf("lease %x", uint64(l.Lease))
	}
	return l.Span.String()
}

// LockRequest asks a region's leader to lock spans for an attempt, all at once (T5).
type LockRequest struct {
	Region  RegionID
	Epoch   uint64
	Attempt pdpb.AttemptID
	// Age is the transaction's first attempt: lower ones go first, so that nobody starves by having
	// to try again.
	Age   pdpb.AttemptID
	Locks []LockSpan
	// Term, if not 0: only a leader of that term may grant (L5).
	Term uint64
	// Now: refuse with LockBusy where the attempt would have to wait for another one.
	Now bool
}

// LockID names a grant: a lock belongs to an attempt, a region and a term (T1). Seq tells grants
// of one term apart, so that a prepare cannot use a lock that was lost and taken anew.
type LockID struct {
	Term uint64
	Seq  uint64
}

// LockGrant is the answer to a LockRequest.
type LockGrant struct {
	ID LockID
	// Whole: the lock is of leases that are to be ended, and what follows is all that there is of them in the
	// region. It stays so while the lock is held. Without it, as when it is too much for an answer, it has
	// to be read.
	Whole    bool
	Records  []Lease      // those of the leases that are recorded there: their grants and spans only
	Attached []Attachment // the keys that are attached to the leases there
}

// Attachment is a key that is attached to a lease.
type Attachment struct {
	Lease int64
	Key   []byte
}

// PrepareRequest asks the leader that holds the attempt's lock to prepare it.
type PrepareRequest struct {
	Region       RegionID
	Attempt      pdpb.AttemptID
	Lock         LockID
	Participants []RegionID // ascending
	Effects      []Effect
	Subs         []int64
	Records      []RecordEffect
}

// ReleaseRequest gives up an attempt's lock that was not prepared.
type ReleaseRequest struct {
	Region  RegionID
	Attempt pdpb.AttemptID
}

// AppendLockRequest appends the encoding of r to b.
func AppendLockRequest(b []byte, r *LockRequest) []byte {
	b = append(b, rpcV1)
	b = binary.AppendUvarint(b, uint64(r.Region))
	b = binary.AppendUvarint(b, r.Epoch)
	b = binary.AppendUvarint(b, uint64(r.Attempt))
	b = binary.AppendUvarint(b, uint64(r.Age))
	b = binary.AppendUvarint(b, r.Term)
	b = appendBool(b, r.Now)
	return appendLocks(b, r.Locks)
}

// DecodeLockRequest reads what AppendLockRequest wrote. The result aliases data.
func DecodeLockRequest(data []byte) (*LockRequest, error) {
	d := decoder{b: data}
	d.version(rpcV1, "lock request")
	r := &LockRequest{Region: RegionID(d.uvarint()), Epoch: d.uvarint(), Attempt: pdpb.AttemptID(d.uvarint()),
		Age: pdpb.AttemptID(d.uvarint()), Term: d.uvarint(), Now: d.bool(), Locks: d.locks()}
	return r, d.done()
}

// AppendLockResponse appends the answer to a lock request: g, or err when it is not nil.
func AppendLockResponse(b []byte, g *LockGrant, err error) []byte {
	b = append(b, lockV2)
	if err != nil {
		return appendError(append(b, 1), err)
	}
	b = binary.AppendUvarint(append(b, 0), g.ID.Term)
	b = appendBool(binary.AppendUvarint(b, g.ID.Seq), g.Whole)
	if !g.Whole {
		return b
	}
	b = binary.AppendUvarint(b, uint64(len(g.Records)))
	for i := range g.Records {
		b = binary.AppendUvarint(b, zig(g.Records[i].ID))
		b = appendBytes(b, g.Records[i].Record.Append(nil))
	}
	b = binary.AppendUvarint(b, uint64(len(g.Attached)))
	for i := range g.Attached {
		b = appendBytes(binary.AppendUvarint(b, zig(g.Attached[i].Lease)), g.Attached[i].Key)
	}
	return b
}

// lockV2: V1 said nothing of leases.
const lockV2 = 2

// DecodeLockResponse reads what AppendLockResponse wrote; an error of the region comes back as
// *Error, damage as ErrCorrupt. The result aliases data.
func DecodeLockResponse(data []byte) (g LockGrant, err error) {
	d := decoder{b: data}
	d.version(lockV2, "lock response")
	if failed := d.bool(); d.err == nil && failed {
		return g, d.error()
	}
	g = LockGrant{ID: LockID{Term: d.uvarint(), Seq: d.uvarint()}, Whole: d.bool()}
	if !g.Whole {
		return g, d.done()
	}
	for n := d.count(2); n > 0; n-- {
		id := d.varint()
		rec, err := DecodeLeaseRecord(d.bytes())
		if err != nil {
			d.fail("record of a lease")
		}
		g.Records = append(g.Records, Lease{ID: id, Record: rec})
	}
	for n := d.count(2); n > 0; n-- {
		g.Attached = append(g.Attached, Attachment{Lease: d.varint(), Key: d.bytes()})
	}
	return g, d.done()
}

// AppendPrepareRequest appends the encoding of r to b.
func AppendPrepareRequest(b []byte, r *PrepareRequest) []byte {
	b = append(b, rpcV1)
	for _, v := range [...]uint64{uint64(r.Region), uint64(r.Attempt), r.Lock.Term, r.Lock.Seq} {
		b = binary.AppendUvarint(b, v)
	}
	b = appendRegions(b, r.Participants)
	b = appendEffects(b, r.Effects, r.Subs)
	return appendRecords(b, r.Records)
}

// DecodePrepareRequest reads what AppendPrepareRequest wrote. The result aliases data.
func DecodePrepareRequest(data []byte) (*PrepareRequest, error) {
	d := decoder{b: data}
	d.version(rpcV1, "prepare request")
	r := &PrepareRequest{Region: RegionID(d.uvarint()), Attempt: pdpb.AttemptID(d.uvarint())}
	r.Lock = LockID{Term: d.uvarint(), Seq: d.uvarint()}
	r.Participants = d.regions()
	r.Effects, r.Subs = d.subEffects()
	r.Records = d.records()
	return r, d.done()
}

// AppendPrepareResponse appends the answer to a prepare: the revision of the commit, or err. An
// abort is an error with the code Aborted.
func AppendPrepareResponse(b []byte, rev mvcc.Revision, err error) []byte {
	b = append(b, rpcV1)
	if err != nil {
		return appendError(append(b, 1), err)
	}
	return binary.AppendUvarint(append(b, 0), uint64(rev))
}

// DecodePrepareResponse reads what AppendPrepareResponse wrote.
func DecodePrepareResponse(data []byte) (mvcc.Revision, error) {
	d := decoder{b: data}
	d.version(rpcV1, "prepare response")
	if failed := d.bool(); d.err == nil && failed {
		return 0, d.error()
	}
	rev := mvcc.Revision(d.uvarint())
	return rev, d.done()
}

// AppendReleaseRequest appends the encoding of r to b. Its answer is empty.
func AppendReleaseRequest(b []byte, r *ReleaseRequest) []byte {
	b = binary.AppendUvarint(append(b, rpcV1), uint64(r.Region))
	return binary.AppendUvarint(b, uint64(r.Attempt))
}

// DecodeReleaseRequest reads what AppendReleaseRequest wrote.
func DecodeReleaseRequest(data []byte) (*ReleaseRequest, error) {
	d := decoder{b: data}
	d.version(rpcV1, "release request")
	r := &ReleaseRequest{Region: RegionID(d.uvarint()), Attempt: pdpb.AttemptID(d.uvarint())}
	return r, d.done()
}

func appendRegions(b []byte, list []RegionID) []byte {
	b = binary.AppendUvarint(b, uint64(len(list)))
	for _, id := range list {
		b = binary.AppendUvarint(b, uint64(id))
	}
	return b
}

func (d *decoder) regions() []RegionID {
	n := d.count(1)
	if n == 0 {
		return nil
	}
	list := make([]RegionID, n)
	for i := range list {
		list[i] = RegionID(d.uvarint())
	}
	if !slices.IsSorted(list) {
		d.fail("regions out of order")
	}
	return list
}
