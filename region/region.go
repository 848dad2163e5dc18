// Package region is the state machine of one region: one replica of one raft group that owns a
// span of keys.
//
// The leader's replica evaluates requests against applied state plus the effects it has proposed
// but that have no revision yet (the overlay), and proposes what they do as entries of effects.
// Every replica, the leader's included, takes the region's order items (what cuts said of this
// region), numbers committed entries by them, and writes the numbered effects into the state
// engine. Replicas evaluate nothing, so nothing they do can diverge.
//
// It is not the revision oracle (pd), it does not know of other regions (S6: order is per
// region), of clients, watches or Pebble, and it starts no goroutine: Replica is driven by its
// raft group through raftstore.StateMachine.
//
// The life of a write here:
//
//	Write    any goroutine puts it into the bounded inbox and wakes the group
//	evaluate the owner evaluates it in a batch and proposes one entry, in one step (E1, eval*.go)
//	report   once committed, the entry is in the report that pd's client fetches (P2, intake.go)
//	apply    the item that covers the entry numbers it; one batch holds data and position (apply.go)
//	reply    the template made by evaluation gets its revisions and is released (E5, E6)
//
// Ownership: what only the group's owner touches is documented as such; what any goroutine may
// touch is in Replica.mu. Rule names (E4, O1, P2 ...) refer to docs/ordering.md.
package region

import (
	"context"
	"errors"
	"io"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/region/regionpb"
)

// Position is a replica's applied position (D1).
type Position = regionpb.Position

// Order is how a replica knows the order of its region: pd's stream to this store. All methods
// may be called from any goroutine and, WaitMark apart, do not block.
type Order interface {
	// State returns what the stream has delivered for a region, read atomically: everything
	// through mark.Cut was handed to Replica.Deliver, and newest is the highest item of that.
	// ok is false while the subscription is not acknowledged (S2).
	State(id pdpb.RegionID) (mark pdpb.Mark, newest uint64, ok bool)
	// Report says that Replica.BuildReport has changed.
	Report(id pdpb.RegionID)
	// WaitMark returns once State(id).mark.Cut >= cut, asking for a mark if need be (S4).
	WaitMark(ctx context.Context, id pdpb.RegionID, cut pdpb.Cut) error
}

// Orderer numbers the entries of a single-group store, in place of pd's cuts: it makes one item,
// and so one cut, for each entry that is not silent. It must be a function of the sequence of its
// calls, because every replica has its own. The group's owner calls it.
type Orderer interface {
	OrderCommitted(r pdpb.Report) pdpb.Item
	// Mark is the position after the last call.
	Mark() pdpb.Mark
}

// MetaMachine is the placement machine of a single-group store: its commands are entries of the
// region's log. The group's owner calls it.
type MetaMachine interface {
	// ApplyMeta applies a command at its place in the order.
	ApplyMeta(index, term uint64, payload []byte)
	// AppendState appends the machine's whole state (the Orderer's too, if it is one thing with
	// it) to b; it is kept with the applied position.
	AppendState(b []byte) []byte
	// LoadState replaces the state, at start and after a snapshot. Empty means a new store, whose
	// order goes on from the position.
	LoadState(state []byte, position *Position) error
}

// SnapshotBackend pins and replaces the state of one group in the state engine.
type SnapshotBackend interface {
	// Pin returns the engine's state as it is now.
	Pin() (PinnedState, error)
	// Import opens a staging area for a span's state in the framing that PinnedState.Export made.
	Import(group uint64, span mvcc.Span) (StateImport, error)
}

// PinnedState is a pinned view of the state engine.
type PinnedState interface {
	Position(group uint64) ([]byte, bool, error)
	// Export streams the span's state in bounded memory.
	Export(ctx context.Context, span mvcc.Span, w io.Writer) error
	Close() error
}

// StateImport stages a span's state.
type StateImport interface {
	io.Writer
	// Install replaces the span's state and the group's position durably (D3).
	Install(position []byte) error
	Close() error
}

// Observer sees what a replica applies; nil functions are skipped. The group's owner calls them,
// after the batch is visible and before clients are answered. They must not block.
type Observer struct {
	// Applied is called for each entry at its place in the order. rev is the last revision given
	// out before the entry, void says that it has no effect (E1, F2).
	Applied func(index, term uint64, item *pdpb.Item, e *regionpb.Entry, rev mvcc.Revision, void bool)
	// Decided is called for each decision at its place, before p leaves the prepared set.
	Decided func(item *pdpb.Item, p *regionpb.Prepared, d pdpb.Decision)
	// Position is called after each batch.
	Position func(p *Position)
	// Events is called after each batch, before Applied moves, with the batch's events in
	// (revision, sub) order: the replica is complete through a revision, and feeds nothing at or
	// below it any more (I7). The callee may keep the slices and must not change them.
	Events func(events []mvcc.Version, through mvcc.Revision)
	// LeaseTerm is called when this replica begins to lead a term and everything before it is
	// applied, and with 0 when it does not lead any more.
	LeaseTerm func(term uint64)
	// Leases is called after each batch that changes records of leases, on any replica, in order.
	Leases func(changes []LeaseChange)
	// Installed is called when a snapshot has replaced the state, before Applied moves: the events
	// up to its revision were not all fed (W3).
	Installed func(p *Position)
}

// Mutants drop one rule each, on purpose, so that tests can show that its absence is noticed.
// The zero value drops none.
type Mutants struct {
	EvalEarly        bool // E2: evaluate before the entry that opens the term is applied
	RecentStays      bool // E2: a leader believes what it remembers of its earlier terms
	Forward          bool // E1: propose at the next call instead of in one step, and take entries meant for another place
	CommitFromItem   bool // O1: apply an item by its index alone
	SealUncommitted  bool // P4: report seals that are not committed
	FromIdx          bool // P2: the report begins at the applied index instead of the last item's up-to
	SealPing         bool // O2: entries that only seal are reported and ordered
	LRevision        bool // S1: complete when the mark's revision reaches the wanted one, whatever its cut
	NoFence          bool // F2: entries with a lower stamp are applied
	SnapNoCum        bool // D1: snapshots do not carry the cumulative count
	NoLockCheck      bool // T1: prepare without the lock
	AgedGoFirst      bool // T5: a command that has waited long goes before attempts that have waited longer
	LocksAnyAge      bool // T5: a lock is granted past older attempts that wait for its keys
	SnapNoPrepared   bool // D1: snapshots do not carry what is prepared
	FenceKeepsLocks  bool // F3: a raised fence leaves locks that are not prepared
	DecisionsFirst   bool // P3: decisions take effect before the entries of their item
	SnapFloorLate    bool // C1: readers hear of a snapshot's floor after they see its state
	LocalOrdinals    bool // R1: each region numbers its events of a transaction by itself
	FactsAsLevel     bool // P2: every report lists what is prepared
	LeaseOneSpan     bool // L1: a record names only the region that registered last
	LeaseNoLock      bool // L2: puts do not lock their leases
	LeaseTokensStay  bool // L3: an end that locks a lease does not take tokens back
	LeaseAttachFirst bool // L3: keys are attached before the region is registered
	TruncApplied     bool // D6: truncate to the applied position instead of the flushed one
	// StoreMark replaces S2's mark per region by one for the store: the newest of any region.
	StoreMark func() pdpb.Mark
}

// ErrStopped is returned to what waits in a replica that is stopped.
var ErrStopped = regionpb.ErrorOf(regionpb.Stopped)

// ErrDiverged reports that this replica's own count of an item, or what it holds of the log,
// contradicts what the cluster agreed on (O3). Only this replica sees it: the process must stop.
var ErrDiverged = errors.New("region: replica diverged from the order")

// Write is a transaction, or a command on a lease, for the region's leader.
type Write struct {
	Txn    *pb.TxnRequest         // must not change any more
	Lease  *regionpb.LeaseCommand // instead of Txn; its answer is a header
	Tokens []regionpb.LeaseToken  // of leases that the region is to be registered for
	// Cut: evaluate only when complete through it; 0 for none (C-1).
	Cut pdpb.Cut
	// IfWrites: a transaction that would change nothing is refused with WritesNothing.
	IfWrites bool
	// Done, if not nil, is closed when nobody waits for the answer any more. A write that is still
	// queued then is dropped: a queue that stood still must not be executed long after its clients
	// have given up, in front of those who have not.
	Done <-chan struct{}
	// Reply is called exactly once and must not block: by the group's owner, or by Write itself
	// when the request is refused at once. An error is a *regionpb.Error.
	Reply func(*pb.TxnResponse, error)

	size  int
	since int                 // the owner's clock when it took it
	locks []regionpb.LockSpan // made when it first meets a lock
	// long: it takes more than a turn, so it is evaluated beside the group (detach.go). undecidedAt
	// is the applied index at which that found it undecided (E4).
	long        bool
	undecidedAt uint64
}

// Config makes a Replica. All fields without "optional" are needed.
type Config struct {
	Store    raftid.StoreID
	Replica  raftid.ReplicaID
	Life     uint64 // of the store: higher than in any life before
	Engine   mvcc.Store
	Position Position // as loaded from the engine, or InitialPosition
	// Order is the stream from pd; nil with an Orderer.
	Order Order
	// Orderer and Meta make it the one group of a single-group store; optional.
	Orderer Orderer
	Meta    MetaMachine
	// Recent is the store's table of newest versions; optional.
	Recent *Recent
	// Tallies are the store's; optional.
	Tallies *Tallies
	// Wake asks the group's worker to call Work soon. Any goroutine; must not block.
	Wake func()
	// Abort asks pd to abort an attempt whose decision does not come (T6); optional. The group's
	// owner calls it; it must not block, and need not succeed: it is called again.
	Abort func(pdpb.AttemptID)
	// Fatal is called for what only this replica sees and cannot survive (a failed engine, O3).
	// The process must stop; the replica does nothing more.
	Fatal func(error)
	// Stalled says that the engine makes writers wait, or soon will; optional. Any goroutine.
	Stalled func() bool
	// Limits; zero fields mean DefaultLimits.
	Limits Limits
	// SharedFsync: this store is the only voter of the region and of pd and their logs share one
	// ordered sync, so reports cover what is appended (A1).
	SharedFsync bool
	Snapshots   SnapshotBackend // optional: without it the group sends and takes no snapshots
	Observer    Observer        // optional
	Mutants     Mutants         // test hook
}

// InitialPosition is the position of a replica of a region that has just been created: nothing
// is applied, the log starts after the descriptor's start.
func InitialPosition(d pdpb.Descriptor, rev mvcc.Revision) Position {
	return Position{
		Index: d.StartIndex, Term: d.StartTerm,
		Upto: d.StartIndex, UptoTerm: d.StartTerm,
		Revision: rev, Floor: -1, ConfIndex: d.StartIndex, Descriptor: d,
	}
}
