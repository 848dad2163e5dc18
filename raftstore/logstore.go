package raftstore

import (
	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/wal"
)

// LogStore is one group's log. wal.GroupLog is the real one; MemLog is the simulator's. Append is
// called only by the group's owner; the reads too.
type LogStore interface {
	// Append adds one atomic change. It is visible to reads at once, durable later, and never
	// waits for the disk. Records become durable in the order of Append.
	Append(rec *wal.Record)
	// Hard is the newest hard state, durable or not.
	Hard() wal.HardState
	// FirstIndex is Start().Index+1; LastIndex is FirstIndex()-1 for a log without entries.
	FirstIndex() uint64
	LastIndex() uint64
	// TermAt returns the term of entry i, false when the log does not hold it.
	TermAt(i uint64) (uint64, bool)
	// Entries returns [lo, hi) up to about maxBytes, at least one. The caller owns the slice,
	// not the entries.
	Entries(lo, hi, maxBytes uint64) ([]*raftpb.Entry, error)
	// Checkpoint is the newest checkpoint, nil when there is none.
	Checkpoint() *wal.Checkpoint
	// Start is the position before the first entry.
	Start() wal.Position
	// DurableIndex is the last index that a crash now would keep.
	DurableIndex() uint64
}
