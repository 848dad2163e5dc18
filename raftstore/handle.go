package raftstore

import (
	"fmt"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
	"braid/raftstore/wal"
)

var _ Handle = (*Group)(nil)

// Term implements Handle.
func (g *Group) Term() uint64 { return g.term }

// Leader implements Handle.
func (g *Group) Leader() raftid.ReplicaID { return raftid.ReplicaID(g.lead) }

// Leading implements Handle.
func (g *Group) Leading() (uint64, bool) {
	if g.state != raft.StateLeader {
		return 0, false
	}
	return g.open, true
}

// FirstIndex implements Handle.
func (g *Group) FirstIndex() uint64 { return g.log.FirstIndex() }

// LastIndex implements Handle.
func (g *Group) LastIndex() uint64 { return g.last }

// Committed implements Handle.
func (g *Group) Committed() uint64 { return g.committed }

// TermAt implements Handle.
func (g *Group) TermAt(index uint64) (uint64, bool) {
	g.handOver(index + 1)
	return g.log.TermAt(index)
}

// Entries implements Handle.
func (g *Group) Entries(lo, hi uint64, maxBytes uint64) ([]*raftpb.Entry, error) {
	g.handOver(hi)
	return g.log.Entries(lo, hi, maxBytes)
}

// handOver makes sure that what the machine has just proposed is in the log when it asks for
// entries below hi.
func (g *Group) handOver(hi uint64) {
	if hi > g.log.LastIndex()+1 && hi <= g.last+1 {
		g.drain()
	}
}

// Propose implements Handle. Raft appends in the same step or not at all, so the entry's place is
// known at once and a refusal leaves nothing behind (E1).
func (g *Group) Propose(data []byte) (index, term uint64, err error) {
	if g.state != raft.StateLeader {
		if g.cfg.Mutants.Forward && g.lead != raft.None && g.rn.Propose(data) == nil {
			g.wake()
			return g.last + 1, g.term, nil
		}
		return 0, 0, ErrDropped
	}
	if g.full() {
		return 0, 0, ErrDropped
	}
	g.wake()
	if err := g.rn.Propose(data); err != nil {
		return 0, 0, ErrDropped
	}
	g.last++
	return g.last, g.term, nil
}

// readsMax bounds the questions that wait for a term's opening entry; more are dropped, as raft
// drops questions when leadership changes, and the machine asks again.
const readsMax = 1024

// ReadIndex implements Handle. A leader's question waits for the entry that opens its term: raft
// itself does not wait when the leader is the only voter (A13).
func (g *Group) ReadIndex(ctx []byte) {
	g.wake()
	if g.state == raft.StateLeader && g.committed < g.open {
		if len(g.reads) < readsMax {
			g.reads = append(g.reads, ctx)
		}
		return
	}
	g.ask(ctx)
}

func (g *Group) ask(ctx []byte) {
	if g.state == raft.StateLeader {
		g.reading++
	}
	g.rn.ReadIndex(ctx)
}

func (g *Group) releaseReads() {
	if len(g.reads) == 0 || g.state != raft.StateLeader || g.committed < g.open {
		return
	}
	reads := g.reads
	g.reads = nil
	for _, ctx := range reads {
		g.ask(ctx)
	}
}

// Transfer implements Handle.
func (g *Group) Transfer(to raftid.ReplicaID) {
	g.wake()
	g.rn.TransferLeader(uint64(to))
}

// Campaign implements Handle.
func (g *Group) Campaign() { g.startElection() }

// Truncate implements Handle. The machine names what it no longer needs (D6); some entries stay
// for followers, see GroupConfig.KeepEntries.
func (g *Group) Truncate(index uint64) {
	if index > g.committed {
		panic(fmt.Sprintf("raftstore: group %d: truncation at %d, commit index is %d", g.cfg.ID, index, g.committed))
	}
	keep := uint64(max(g.cfg.KeepEntries, 0))
	if index <= keep {
		return
	}
	// Raft may still have to read what it has not handed over: with a slow disk the machine can
	// be ahead of it (D5).
	index = min(index-keep, g.handed)
	if hold := uint64(max(g.cfg.KeepForFollowers, 0)); hold > 0 && g.state == raft.StateLeader {
		index = min(index, max(g.slowestFollower(), index-min(index, hold)))
	}
	if index < g.log.FirstIndex() {
		return
	}
	g.log.Append(&wal.Record{Truncate: index})
}

// Checkpoint implements Handle.
func (g *Group) Checkpoint(index, term uint64, data []byte) {
	if index > g.committed || index < g.confIndex {
		panic(fmt.Sprintf("raftstore: group %d: checkpoint at %d, commit index is %d, configuration of %d", g.cfg.ID, index, g.committed, g.confIndex))
	}
	g.checkpoint = &wal.Checkpoint{
		Position:  wal.Position{Index: index, Term: term},
		ConfState: cloneConf(g.conf),
		Data:      data,
	}
	g.writeCheckpoint()
}

// writeCheckpoint writes the newest checkpoint asked for, once raft needs nothing below it.
func (g *Group) writeCheckpoint() {
	if cp := g.checkpoint; cp != nil && cp.Index <= g.handed {
		g.checkpoint = nil
		g.append(&wal.Record{Checkpoint: cp}, nil)
	}
}

// ConfState implements Handle.
func (g *Group) ConfState() *raftpb.ConfState { return cloneConf(g.conf) }
