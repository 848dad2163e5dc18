package wal

import (
	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
)

// Position is an entry's place in a raft log.
type Position struct{ Index, Term uint64 }

// HardState is what raft must remember: its term, its vote and how far it knew of commits.
type HardState struct {
	Term   uint64
	Vote   raftid.ReplicaID
	Commit uint64
}

// Checkpoint is the state of a machine that lives in memory, as of a position.
type Checkpoint struct {
	Position
	ConfState *raftpb.ConfState
	Data      []byte
}

// Record is one atomic change of one group's log: its parts take effect together, in the order
// of the fields, and a crash keeps all of them or none.
type Record struct {
	// Destroy leaves a tombstone: the replica is gone, its id may never be used again (D4), and
	// everything the log holds of the group is dropped.
	Destroy raftid.ReplicaID
	// Reset drops every entry; the log goes on after this position (D2, D3).
	Reset *Position
	// Checkpoint replaces the previous one and truncates the log through its position.
	Checkpoint *Checkpoint
	// Entries replace everything at or above the first one's index; they leave no hole.
	Entries []*raftpb.Entry
	// Hard replaces the hard state.
	Hard *HardState
	// Truncate forgets entries through this index. It needs no sync of its own.
	Truncate uint64
	// Done, if set, is called once, after the record is durable, from the log's writer
	// goroutine and in the order of Append. It must not block.
	Done func()
}
