package raftstore

import (
	"context"
	"errors"
	"io"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
)

// ErrDropped says that a proposal was certainly not appended to the log (E1): this replica does
// not lead, is handing leadership over, or has too much in flight.
var ErrDropped = errors.New("raftstore: proposal dropped")

// Handle is what a state machine may do with its own raft group. It is valid only during a call
// of StateMachine, on the goroutine that owns the group.
type Handle interface {
	// Term is raft's current term here; Leader is zero when unknown.
	Term() uint64
	Leader() raftid.ReplicaID
	// Leading says whether this replica leads, and the index of the entry that opened its term.
	Leading() (open uint64, ok bool)
	// FirstIndex..LastIndex is what the log holds, entries that are not yet durable included.
	FirstIndex() uint64
	LastIndex() uint64
	// Committed is raft's commit index.
	Committed() uint64
	// TermAt returns the term of an entry, false when the log does not hold it.
	TermAt(index uint64) (uint64, bool)
	// Entries returns entries [lo, hi) up to about maxBytes, at least one.
	Entries(lo, hi uint64, maxBytes uint64) ([]*raftpb.Entry, error)
	// Propose appends data to the log as its next entry and returns where. The entry is at
	// LastIndex()+1 of the current term: evaluation and proposal are one step (E1).
	Propose(data []byte) (index, term uint64, err error)
	// ReadIndex asks raft to confirm the quorum; the answer comes in Update.ReadStates.
	ReadIndex(ctx []byte)
	// Transfer hands leadership to another replica.
	Transfer(to raftid.ReplicaID)
	// Campaign starts an election here.
	Campaign()
	// Truncate lets the log forget entries through index (D6: never above the flushed position).
	Truncate(index uint64)
	// Checkpoint writes the state of a machine that lives in memory into the log store, as of
	// index; once it is durable the log is truncated there.
	Checkpoint(index, term uint64, data []byte)
	// Detach has f run away from the owner's goroutine once this call of Work has returned, because
	// it takes long. Until f has returned the machine is parked: nothing of it is called by its
	// group but Receive, and f owns what the owner owned, except the Handle. The group itself goes
	// on: it hears, answers, keeps its leadership. After f comes what changed meanwhile (Update),
	// then Work. Only Work may call it, once, and as the last thing that it does with the Handle.
	Detach(f func())
	// ConfState is the active configuration.
	ConfState() *raftpb.ConfState
}

// Update is what changed in a group's log since the last one. Slices are read-only and may be
// kept.
type Update struct {
	// Appended was put into the log, replacing everything at or above its first index. It is
	// not durable yet.
	Appended []*raftpb.Entry
	// Committed is raft's commit index after this update.
	Committed uint64
	// Role is set when term, leader or leadership changed.
	Role *Role
	// ReadStates answer Handle.ReadIndex.
	ReadStates []raft.ReadState
	// Installed is set when a snapshot replaced the machine's state; the machine re-reads its
	// own position. Waiters that it skipped are told "unknown" (E6).
	Installed *SnapshotMeta
}

// Role is a replica's part in its group.
type Role struct {
	Term    uint64
	Leader  raftid.ReplicaID // zero when unknown
	Leading bool
	Open    uint64 // when leading: index of the entry that opened the term
}

// StateMachine is driven by a group. Update and Work are called only by the worker that owns the
// group at that moment, never concurrently; they must not block on IO other than the log reads
// of Handle and the state engine's writes without sync, nor hold the owner for long: a leader whose
// group gets no turn for an election timeout is no leader any more. What takes long is detached.
type StateMachine interface {
	// Update tells what changed in the log. Called before Work.
	Update(h Handle, u Update)
	// Work does what waits outside raft: evaluates requests and proposes, takes in order items,
	// applies. It returns true when it stopped at its own budget and wants to be called again.
	Work(h Handle) (again bool)
	// Idle says whether nothing is pending here, so that the group may stop ticking (B12).
	Idle() bool
	// Snapshot pins the applied state. Called by the owner; the source is used elsewhere.
	Snapshot() (SnapshotSource, error)
	// Receive opens a sink for an incoming snapshot. Called off the owner's goroutine.
	Receive(meta SnapshotMeta) (SnapshotSink, error)
}

// SnapshotMeta is the raft position of a snapshot.
type SnapshotMeta struct {
	Index, Term uint64
	ConfState   *raftpb.ConfState
}

// SnapshotSource streams pinned state; it must be closed.
type SnapshotSource interface {
	Meta() SnapshotMeta
	// WriteTo streams the state in bounded memory until done or ctx ends.
	WriteTo(ctx context.Context, w io.Writer) error
	Close() error
}

// SnapshotSink stages incoming state without touching what is live.
type SnapshotSink interface {
	io.Writer
	// Install replaces the live state durably (D3: engine flushed first, ingest, proven durable).
	// It is called while the group is parked: no Update or Work runs. After it the log is reset.
	Install() error
	// Close discards what was staged and not installed.
	Close() error
}

// StaleSink is a sink whose state may turn out to be older than the live one though its index is
// higher. The group's owner asks right before raft is offered the snapshot, and discards a stale
// one; the leader sends another.
type StaleSink interface{ Stale() bool }
