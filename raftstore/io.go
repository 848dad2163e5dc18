package raftstore

import (
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
)

// Input is what reached a group since its last turn. The zero Input is a turn in which nothing
// happened.
type Input struct {
	// Messages came from other replicas, in the order of arrival per sender. The group takes
	// the pointers over.
	Messages []*raftpb.Message
	// Controls came from other replicas.
	Controls []Control
	// Ticks is how many ticks passed. A shell that lags reports one, not many: a backlog of
	// ticks at once would look like a silent leader.
	Ticks int
	// Durable is the highest token of which GroupConfig.Durable was told, 0 for none.
	Durable uint64
	// Staged is a snapshot that arrived whole. The group takes the sink over and gives it back
	// in Output.Install or Output.Discard.
	Staged *Staged
	// Installed is the end of what Output.Install asked for.
	Installed *Installed
	// Detached says that what Output.Detached asked for has ended.
	Detached bool
	// Sent tells how sending of Output.Snapshots ended.
	Sent []SnapshotSent
	// Unreachable names replicas to which messages were not sent.
	Unreachable []raftid.ReplicaID
	// Wake ends the group's sleep: the replica ticks again and waits a whole election timeout
	// before it campaigns.
	Wake bool
	// Down are stores that fell silent, or came back as another process. They wake the group (B12),
	// and if its leader was there, it is replaced without waiting for an election timeout.
	Down []raftid.StoreID
	// Campaign starts an election here; Transfer, when not zero, hands leadership over.
	Campaign bool
	Transfer raftid.ReplicaID
	// Work calls the machine's Work even when the log has not changed.
	Work bool
}

// Output is what a group wants done. A shell may do the parts in any order and reuses the value
// through Reset.
type Output struct {
	// Messages go to other replicas. They may be lost, duplicated and reordered.
	Messages []*raftpb.Message
	// Controls go to other replicas, after the messages.
	Controls []Control
	// Snapshots go to other replicas; each is answered by Input.Sent.
	Snapshots []OutgoingSnapshot
	// Install asks for Sink.Install, off the owner's goroutine; the answer is Input.Installed.
	// Until then the machine is parked.
	Install *Staged
	// Detached is to be run away from the owner's goroutine (Handle.Detach); its end is
	// Input.Detached. Until then the machine is parked.
	Detached func()
	// Discard holds sinks to close: they are installed, or were not wanted.
	Discard []SnapshotSink
	// Again asks for another turn soon.
	Again bool
}

// Reset empties the output for the next turn.
func (o *Output) Reset() {
	clear(o.Messages)
	clear(o.Snapshots)
	clear(o.Discard)
	*o = Output{Messages: o.Messages[:0], Controls: o.Controls[:0], Snapshots: o.Snapshots[:0], Discard: o.Discard[:0]}
}

// Staged is an incoming snapshot whose data is all in the sink.
type Staged struct {
	// Message is the MsgSnap that announced it; its snapshot has no data.
	Message *raftpb.Message
	Sink    SnapshotSink
}

// Installed is the result of an installation. An error stops the node: raft has taken the
// snapshot's position over and the state is not there.
type Installed struct {
	Sink SnapshotSink
	Err  error
}

// CheckpointSink is a SnapshotSink of a machine that lives in memory. After Install the group
// writes the checkpoint in the same record that resets the log, so that a crash finds both or
// neither (D3).
type CheckpointSink interface {
	SnapshotSink
	Checkpoint() []byte
}

// OutgoingSnapshot is pinned state on its way to a replica. The shell closes the source and then
// calls GroupConfig.ReleaseSnapshot, if set.
type OutgoingSnapshot struct {
	Message *raftpb.Message
	Source  SnapshotSource
}

// SnapshotSent says whether the receiver took the snapshot.
type SnapshotSent struct {
	To raftid.ReplicaID
	OK bool
}

// ControlKind says what a Control is about.
type ControlKind uint8

const (
	// ControlQuiesce: the leader is asleep; its log ends at (Index, LogTerm) and all of it is
	// committed (B12).
	ControlQuiesce ControlKind = iota + 1
	// ControlNeedState: a replica has the log but not the state, and asks its leader for a
	// snapshot that raft would never send (D4).
	ControlNeedState
)

// Control is a message between replicas that raft does not know.
type Control struct {
	Kind           ControlKind
	From, To       raftid.ReplicaID
	Term           uint64
	Index, LogTerm uint64
}

// String prints the control in one line.
func (c Control) String() string {
	name := "quiesce"
	if c.Kind == ControlNeedState {
		name = "need-state"
	}
	return fmt.Sprintf("%d->%d %s term:%d last:%d/%d", c.From, c.To, name, c.Term, c.Index, c.LogTerm)
}

// Mutants drop rules on purpose, so that tests can show that the rules are needed. The zero
// value keeps all.
type Mutants struct {
	// Forward lets followers forward proposals to their leader (E1).
	Forward bool
	// NoUninitialisedVoters refuses votes of replicas without state (B6).
	NoUninitialisedVoters bool
	// EarlyAcknowledge sends what promises durability before the log is durable (D3, I8).
	EarlyAcknowledge bool
}
