package raftstore

import (
	"fmt"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
	"braid/raftstore/wal"
)

// The life of a snapshot. Sender: raft asks for one (or a replica without state does), the
// machine pins its state, the source leaves in Output.Snapshots, the shell streams it and reports
// in Input.Sent. Receiver: the shell stages the stream in a sink of the machine, then hands both
// to the group; raft decides whether it wants the snapshot; if so the machine is parked, the
// shell installs it durably, then the log is reset in one record with what raft appended
// meanwhile, and only when that is durable raft's acknowledgement leaves (D3).

// installing is a snapshot on its way into the machine.
type installing struct {
	staged *Staged
	meta   SnapshotMeta
	// held are raft's log writes from the snapshot's own on, to be performed after it. Nil when
	// raft keeps its log because only the state was missing (D4).
	held []*raftpb.Message
}

// pin takes the machine's state for a follower, or says that there is none to be had now.
func (g *Group) pin() (*raftpb.Snapshot, SnapshotSource, error) {
	if g.sending > 0 || g.uninitialized || g.install != nil || g.parked {
		return nil, nil, raft.ErrSnapshotTemporarilyUnavailable
	}
	if g.cfg.AcquireSnapshot != nil && !g.cfg.AcquireSnapshot() {
		return nil, nil, raft.ErrSnapshotTemporarilyUnavailable
	}
	snap, src, err := g.takeSnapshot()
	if err != nil {
		if g.cfg.ReleaseSnapshot != nil {
			g.cfg.ReleaseSnapshot()
		}
		return nil, nil, err
	}
	g.sending++
	return snap, src, nil
}

func (g *Group) takeSnapshot() (*raftpb.Snapshot, SnapshotSource, error) {
	src, err := g.cfg.Machine.Snapshot()
	if err != nil {
		g.cfg.Logger.Warningf("group %d: snapshot: %v", g.cfg.ID, err)
		return nil, nil, raft.ErrSnapshotTemporarilyUnavailable
	}
	meta := src.Meta()
	conf := meta.ConfState
	if conf == nil && g.confIndex <= meta.Index {
		conf = g.conf
	}
	if conf == nil || meta.Index == 0 {
		if err := src.Close(); err != nil {
			g.cfg.Logger.Warningf("group %d: snapshot: %v", g.cfg.ID, err)
		}
		return nil, nil, raft.ErrSnapshotTemporarilyUnavailable
	}
	return &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{
		ConfState: cloneConf(conf), Index: new(meta.Index), Term: new(meta.Term),
	}}, src, nil
}

// sendSnapshot joins raft's MsgSnap with the state pinned for it.
func (g *Group) sendSnapshot(m *raftpb.Message) {
	if len(g.pinned) == 0 {
		panic(fmt.Sprintf("raftstore: group %d: a snapshot message without pinned state", g.cfg.ID))
	}
	src := g.pinned[0]
	g.pinned = g.pinned[1:]
	g.out.Snapshots = append(g.out.Snapshots, OutgoingSnapshot{Message: m, Source: src})
}

// takeNeedState sends state to a replica that has none (D4). Raft is not told: as far as it is
// concerned the replica is complete.
func (g *Group) takeNeedState(c *Control) {
	g.wake()
	if g.state != raft.StateLeader || c.Term != g.term {
		return
	}
	snap, src, err := g.pin()
	if err != nil {
		return // it asks again
	}
	g.out.Snapshots = append(g.out.Snapshots, OutgoingSnapshot{Source: src, Message: &raftpb.Message{
		Type: raftpb.MsgSnap.Enum(), From: new(uint64(g.cfg.Replica)), To: new(uint64(c.From)), Term: new(g.term), Snapshot: snap,
	}})
}

// WantsSnapshot says whether a snapshot at index is of use here; a shell asks before it stages
// one.
func (s GroupStatus) WantsSnapshot(index uint64) bool {
	return !s.Installing && (s.Uninitialized || index > s.Committed)
}

// ProbeOf is the question behind a snapshot that its receiver does not want, because its log
// reaches as far: an empty append at the snapshot's position. The shell steps it in the snapshot's
// place. Its answer tells the leader how far the log reaches; without one, a leader that missed the
// acknowledgement and has cut its log would send snapshots for ever.
func ProbeOf(m *raftpb.Message) *raftpb.Message {
	meta := snapshotMeta(m)
	return &raftpb.Message{
		Type: raftpb.MsgApp.Enum(), From: m.From, To: m.To, Term: m.Term,
		Index: new(meta.Index), LogTerm: new(meta.Term), Commit: new(meta.Index),
	}
}

// takeStaged offers a complete snapshot to raft. One that comes while the machine is parked is
// refused: it is sent again.
func (g *Group) takeStaged(s *Staged) {
	g.wake()
	m := s.Message
	if g.install != nil || g.parked || m.GetType() != raftpb.MsgSnap || m.GetTo() != uint64(g.cfg.Replica) || m.GetSnapshot().GetMetadata().GetIndex() == 0 {
		g.out.Discard = append(g.out.Discard, s.Sink)
		return
	}
	if x, ok := s.Sink.(StaleSink); ok && x.Stale() {
		g.out.Discard = append(g.out.Discard, s.Sink)
		return
	}
	g.drain()
	g.staged = s
	if err := g.rn.Step(m); err != nil {
		g.cfg.Logger.Debugf("step %s: %v", m.GetType(), err)
	}
	g.drain() // raft's acceptance is a log write with the snapshot, see beginInstall
	if g.staged == nil {
		return
	}
	g.staged = nil
	meta := snapshotMeta(m)
	if t, ok := g.log.TermAt(meta.Index); g.uninitialized && ok && t == meta.Term && meta.Index <= g.committed {
		// The log goes on from where it is; only the state comes from the snapshot.
		g.install = &installing{staged: s, meta: meta}
		g.out.Install = s
		return
	}
	g.out.Discard = append(g.out.Discard, s.Sink)
}

func snapshotMeta(m *raftpb.Message) SnapshotMeta {
	md := m.GetSnapshot().GetMetadata()
	return SnapshotMeta{Index: md.GetIndex(), Term: md.GetTerm(), ConfState: md.GetConfState()}
}

// beginInstall parks the machine: raft has accepted the snapshot of this log write.
func (g *Group) beginInstall(m *raftpb.Message) {
	meta := snapshotMeta(m)
	if g.staged == nil || g.install != nil {
		panic(fmt.Sprintf("raftstore: group %d: raft restores a snapshot at %d that was not staged", g.cfg.ID, meta.Index))
	}
	g.install = &installing{staged: g.staged, meta: meta, held: []*raftpb.Message{}}
	g.out.Install = g.staged
	g.staged = nil
	if len(m.GetEntries()) == 0 {
		g.last = meta.Index
	}
	// What the machine was to be told of the old log, and to be written of the old state, is void.
	g.update.Appended, g.checkpoint = nil, nil
	g.conf, g.confIndex = cloneConf(meta.ConfState), meta.Index
	g.setPeers()
}

// takeInstalled goes on after the machine's state was replaced.
func (g *Group) takeInstalled(in *Installed) {
	inst := g.install
	if inst == nil || inst.staged.Sink != in.Sink {
		panic(fmt.Sprintf("raftstore: group %d: an installation ended that had not begun", g.cfg.ID))
	}
	if in.Err != nil {
		panic(fmt.Sprintf("raftstore: group %d: installing the snapshot at %d: %v", g.cfg.ID, inst.meta.Index, in.Err))
	}
	g.install = nil
	g.out.Discard = append(g.out.Discard, in.Sink)
	pos := wal.Position{Index: inst.meta.Index, Term: inst.meta.Term}
	var cp *wal.Checkpoint
	if s, ok := in.Sink.(CheckpointSink); ok {
		cp = &wal.Checkpoint{Position: pos, ConfState: cloneConf(inst.meta.ConfState), Data: s.Checkpoint()}
	}
	if inst.held == nil {
		if cp != nil {
			g.append(&wal.Record{Checkpoint: cp}, nil)
		}
		g.initialize(inst)
	} else {
		g.handed = pos.Index
		reset := &pos
		for _, m := range inst.held {
			g.writeAppend(m, reset, cp)
			reset, cp = nil, nil
		}
	}
	g.uninitialized = false
	meta := inst.meta
	g.update.Installed = &meta
	g.changed = true
}

// initialize starts raft anew with the configuration that came with the state; log, term and
// vote stay (B6). Responses that still wait for the log leave as usual.
func (g *Group) initialize(inst *installing) {
	g.drain()
	g.conf, g.confIndex = cloneConf(inst.meta.ConfState), inst.meta.Index
	g.hard = wal.HardState{Term: g.term, Vote: raftid.ReplicaID(g.vote), Commit: g.committed}
	if err := g.startRaft(inst.meta.Index); err != nil {
		panic(err.Error())
	}
	g.noteRole(nil)
}
