// Package regionpb holds what a region writes into its raft log, what it answers to reads and
// writes, and the errors that cross the network. It is a leaf that every package may import.
package regionpb

import (
	"fmt"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// CreateKind says how a replica finds the create revision of a put (C-5).
type CreateKind uint8

const (
	// CreateNew: the put creates the key, so its own revision is the create revision.
	CreateNew CreateKind = iota
	// CreateKnown: the create revision had its number at evaluation; Effect.Create holds it.
	CreateKnown
	// CreateResolve: the creating version was pending at evaluation; the replica takes it from
	// the key's newest version at apply.
	CreateResolve
)

// Effect is one physical change. Its place in Command.Effects is its position among the events
// of the command's revision.
type Effect struct {
	Key        []byte
	Value      []byte
	Lease      int64
	Delete     bool
	Version    int64 // the key's version after a put
	CreateKind CreateKind
	Create     mvcc.Revision
	// Detach is the lease that the key was attached to before and is not any more; 0 is none.
	Detach int64
}

// Command is what one request does. It consumes a revision exactly when it has effects; without
// effects it still has its place in the order.
type Command struct {
	Effects []Effect
	Records []RecordEffect
}

// Entry is the payload of a raft entry of a region. An entry without commands and prepares is
// silent (O2).
type Entry struct {
	Term, Index uint64      // where the leader meant it to be; a mismatch voids it (E1)
	Fence       pdpb.Fence  // the fence its leader knew (F2)
	Seals       []pdpb.Item // contiguous items, so that the log is self-contained (O2, P4)
	Commands    []Command
	Prepares    []Prepared // they consume no revision here; the commit does

	arena []Effect // where DecodeEntry keeps the effects of all commands
}

// Silent says whether the entry has nothing to order.
func (e *Entry) Silent() bool { return len(e.Commands) == 0 && len(e.Prepares) == 0 }

// Count is the number of revisions the entry consumes when it is not void.
func (e *Entry) Count() uint64 {
	var n uint64
	for i := range e.Commands {
		if len(e.Commands[i].Effects) > 0 {
			n++
		}
	}
	return n
}

// Code classifies an Error.
type Code uint8

const (
	// Certainly not executed; may be retried elsewhere.
	NotLeader       Code = iota + 1 // Leader is a hint, zero when unknown
	EpochMismatch                   // Descriptor is the current one, if known
	RegionNotFound                  // no replica here
	TooManyRequests                 // limits of the region or store are reached
	VoidByFence                     // the entry was void (F2)
	// May have been executed, now or later.
	Unknown // leadership was lost, or a snapshot skipped the waiter (E6)
	// Results of evaluation; recorded in the order (E5).
	KeyNotFound
	LeaseNotFound
	Compacted
	FutureRevision
	// Reads.
	NotComplete // the replica is not complete through the wanted cut
	// Local trouble.
	Stopped
	// Attempts over several regions, certainly not executed.
	LockLost // the leader of the lock's term does not hold it any more (T1); not prepared
	Aborted  // the attempt was aborted
	TooLarge // larger than a region or a connection takes; certainly not executed, and final: its parts may fare better
	// Leases.
	LeaseExists        // a result of evaluation, recorded in the order
	LeaseNotRegistered // Lease is not registered here; Token is for the next try (L3); not executed
	LeaseSpread        // a lease has keys in other regions, so one region cannot end it; not executed
	LeaseTermOver      // the term in which a lease's end was decided is over (L5); not executed
	// Abandoned: whoever asked has gone. Nobody hears it.
	Abandoned
	// LockBusy: another attempt is in the way of one that would not wait (T5); not executed.
	LockBusy
	// WritesNothing: the transaction would change nothing, and its sender would rather read (IfWrites);
	// not executed.
	WritesNothing
)

// Error is an error of a region.
type Error struct {
	Code       Code
	Leader     raftid.StoreID
	Descriptor *pdpb.Descriptor
	Token      LeaseToken // LeaseNotRegistered
}

var codeNames = [...]string{"?", "not leader", "epoch mismatch", "region not found", "too many requests",
	"void by fence", "outcome unknown", "key not found", "lease not found", "compacted",
	"future revision", "not complete", "stopped",
	"lock lost", "aborted", "too large",
	"lease exists", "lease not registered", "lease has keys in other regions", "term of the lease's end is over", "abandoned", "locked by another attempt", "writes nothing"}

// String is the code in words.
func (c Code) String() string {
	if int(c) < len(codeNames) {
		return codeNames[c]
	}
	return codeNames[0]
}

func (e *Error) Error() string {
	if e.Leader != 0 {
		return fmt.Sprintf("region: %s (leader %s)", e.Code, e.Leader)
	}
	return "region: " + e.Code.String()
}

// Is makes errors.Is compare codes, so that hints do not matter.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

// ErrorOf returns an error that has a code and no hint.
func ErrorOf(c Code) *Error { return &Error{Code: c} }

// NotRegistered returns the error by which a leader asks to be registered for a lease.
func NotRegistered(t LeaseToken) *Error { return &Error{Code: LeaseNotRegistered, Token: t} }

// NotExecuted says whether the request had certainly no effect and never will.
func (e *Error) NotExecuted() bool { return e.Code != Unknown }

// ReadRequest reads one region at a revision, on any replica. A reply is bounded; More tells to
// go on from Resume.
type ReadRequest struct {
	Region RegionID
	Epoch  uint64
	// Cut: the replica must be complete through it (S3); 0 asks for whatever is applied here
	// (serializable). Rev: read at this revision; 0 with Cut 0 means the newest applied here.
	Cut  pdpb.Cut
	Rev  mvcc.Revision
	Span mvcc.Span
	// Keys, when there are any, asks for these keys of Span only, ascending; filters, Limit and counts
	// are not used with it.
	Keys [][]byte
	// Limit bounds the keys returned after the filters; 0 is no limit.
	Limit     int64
	KeysOnly  bool // neither value nor lease
	NoValues  bool // no value
	CountOnly bool
	// Filters; zero is none.
	MinMod, MaxMod, MinCreate, MaxCreate mvcc.Revision
	// WantCount asks for Count as well as keys.
	WantCount bool
	// MaxBytes bounds one reply; the server has its own bound too.
	MaxBytes int64
	// Leases asks for the records of leases that lie in the span, instead of keys: their ids, in
	// eight bytes, and encodings. Lease, if not 0, asks for the keys of the span that are attached
	// to it; both together ask whether keys of the region may be attached to it, which one empty key
	// says. All look at what is applied, which includes everything through Cut; they have no history.
	Leases bool
	Lease  int64
	// Of asks the same of several leases at once: with Leases for their records; without for the keys
	// of the span that are attached to them now, each with its lease. The reply answers as many of them
	// as fit, in their order, and Count says how many; of records it is always one at least.
	Of []int64
}

// RegionID is pdpb.RegionID.
type RegionID = pdpb.RegionID

// ReadResponse is the answer to a ReadRequest.
type ReadResponse struct {
	KVs   []*mvccpb.KeyValue
	Count int64 // keys alive in the span (of the first reply when paged), filters and limit ignored
	// More: the reply's byte bound was reached; go on with Span.Start = Resume, Limit reduced.
	More   bool
	Resume []byte
	Rev    mvcc.Revision // the revision that was read
	// Now is the newest revision this replica can vouch for: what a serializable answer's header
	// shows, also when the read was of an older revision.
	Now mvcc.Revision
	// LimitHit: the limit cut the list (there is at least one more matching key).
	LimitHit bool
}
