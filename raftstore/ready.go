package raftstore

import (
	"fmt"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"braid/raftstore/raftid"
	"braid/raftstore/wal"
)

// drain takes over everything raft has ready. Messages for the log and for the machine are
// handled in place, in raft's order; those for other replicas go to the output.
func (g *Group) drain() {
	for g.rn.HasReady() {
		rd := g.rn.Ready()
		if h := rd.HardState; h != nil {
			g.noteHard(h)
		}
		if s := rd.SoftState; s != nil {
			g.lead, g.state = s.Lead, s.RaftState
		}
		if rd.HardState != nil || rd.SoftState != nil {
			g.noteRole(rd.Entries)
		}
		if len(rd.ReadStates) > 0 {
			g.reading -= min(g.reading, len(rd.ReadStates))
			g.update.ReadStates = append(g.update.ReadStates, rd.ReadStates...)
			g.changed = true
		}
		for _, m := range rd.Messages {
			switch m.GetTo() {
			case raft.LocalAppendThread:
				g.storageAppend(m)
			case raft.LocalApplyThread:
				g.storageApply(m)
			default:
				g.send(m)
			}
		}
		g.releaseReads()
	}
}

func (g *Group) noteHard(h *raftpb.HardState) {
	g.term, g.vote = h.GetTerm(), h.GetVote()
	if c := h.GetCommit(); c != g.committed {
		if c < g.committed {
			panic(fmt.Sprintf("raftstore: group %d: commit index went back from %d to %d", g.cfg.ID, g.committed, c))
		}
		g.committed = c
		g.update.Committed = c
		g.changed = true
	}
}

// noteRole compares term, leader and leadership with what the machine knows. Raft appends the
// entry that opens a term in the step that makes the leader, so it is in the same Ready.
func (g *Group) noteRole(entries []*raftpb.Entry) {
	leading := g.state == raft.StateLeader
	if leading && (!g.role.Leading || g.role.Term != g.term) {
		g.open = 0
		for _, e := range entries {
			if e.GetTerm() == g.term {
				g.open = e.GetIndex()
				break
			}
		}
		if g.open == 0 {
			panic(fmt.Sprintf("raftstore: group %d: no entry opens term %d", g.cfg.ID, g.term))
		}
	}
	r := Role{Term: g.term, Leader: raftid.ReplicaID(g.lead), Leading: leading}
	if leading {
		r.Open = g.open
	}
	if r == g.role {
		return
	}
	if r.Term != g.role.Term || r.Leading != g.role.Leading {
		g.reads, g.reading, g.idleTicks = nil, 0, 0 // raft forgot what it was asked
	}
	g.role = r
	g.update.Role = &r
	g.changed = true
}

// send puts a message into the output.
func (g *Group) send(m *raftpb.Message) {
	switch {
	case m.GetType() == raftpb.MsgSnap:
		g.sendSnapshot(m)
		return
	case g.quieting && m.GetType() == raftpb.MsgHeartbeatResp:
		return
	}
	g.out.Messages = append(g.out.Messages, m)
}

// withoutNeedless leaves out the appends that only tell a commit index: where a later append of the
// same turn to the same replica tells it too, which under load is every second append, because a group
// has its next entry ready when the one before is committed; and all of them if lazy.
//
// An append without entries is also how raft finds out that others were lost. It may be lost itself,
// so raft repeats it after each heartbeat that was answered, and then lazy must be false.
func withoutNeedless(msgs []*raftpb.Message, lazy bool) []*raftpb.Message {
	kept := msgs[:0]
	for i, m := range msgs {
		if m.GetType() == raftpb.MsgApp && len(m.GetEntries()) == 0 && (lazy || overtaken(m, msgs[i+1:])) {
			continue
		}
		kept = append(kept, m)
	}
	clear(msgs[len(kept):])
	return kept
}

// overtaken says whether a later append tells all that m tells, which has no entries.
func overtaken(m *raftpb.Message, later []*raftpb.Message) bool {
	for _, l := range later {
		// One that begins further on would be refused by a replica that lacks what m asks after.
		if l.GetType() == raftpb.MsgApp && l.GetTo() == m.GetTo() && l.GetTerm() == m.GetTerm() &&
			l.GetIndex() <= m.GetIndex() && l.GetCommit() >= m.GetCommit() {
			return true
		}
	}
	return false
}

// storageAppend performs a MsgStorageAppend. While a snapshot is being installed they wait
// behind it, in order; raft needs nothing of them until then.
func (g *Group) storageAppend(m *raftpb.Message) {
	if n := len(m.GetEntries()); n > 0 {
		g.last = m.GetEntries()[n-1].GetIndex()
		if !g.uninitialized {
			g.noteAppended(m.GetEntries())
		}
	}
	if m.GetSnapshot() != nil {
		g.beginInstall(m)
	}
	if g.install != nil && g.install.held != nil {
		g.install.held = append(g.install.held, m)
		return
	}
	g.writeAppend(m, nil, nil)
}

// writeAppend hands one MsgStorageAppend to the log. reset and checkpoint come before its
// entries in the same record (D3).
func (g *Group) writeAppend(m *raftpb.Message, reset *wal.Position, checkpoint *wal.Checkpoint) {
	hard := g.hard
	if m.Term != nil {
		hard = wal.HardState{Term: m.GetTerm(), Vote: raftid.ReplicaID(m.GetVote()), Commit: m.GetCommit()}
	}
	promises := hard.Term != g.hard.Term || hard.Vote != g.hard.Vote
	if len(m.GetEntries()) == 0 && reset == nil && !promises {
		// Only the commit index moved, or nothing: it goes with the next record. Responses
		// promise what was appended before.
		g.hard = hard
		g.respond(g.token, m.GetResponses())
		return
	}
	rec := &wal.Record{Reset: reset, Checkpoint: checkpoint, Entries: m.GetEntries(), Hard: &hard}
	g.append(rec, m.GetResponses())
}

// append gives a record to the log with a token of its own; responses leave when it is durable.
func (g *Group) append(rec *wal.Record, responses []*raftpb.Message) {
	g.token++
	token := g.token
	rec.Done = func() { g.cfg.Durable(token) }
	if rec.Hard != nil {
		g.hard = *rec.Hard
	}
	g.log.Append(rec)
	g.respond(token, responses)
}

// respond lets responses out once token is durable.
func (g *Group) respond(token uint64, responses []*raftpb.Message) {
	switch {
	case len(responses) == 0:
	case token <= g.durable || g.cfg.Mutants.EarlyAcknowledge:
		g.deliver(responses)
	case len(g.waiting) > 0 && g.waiting[len(g.waiting)-1].token == token:
		w := &g.waiting[len(g.waiting)-1]
		w.responses = append(w.responses, responses...)
	default:
		g.waiting = append(g.waiting, waiting{token: token, responses: responses})
	}
}

// takeDurable lets out what waited for tokens up to this one.
func (g *Group) takeDurable(token uint64) {
	if token <= g.durable {
		return
	}
	if token > g.token {
		panic(fmt.Sprintf("raftstore: group %d: token %d is durable, only %d were given", g.cfg.ID, token, g.token))
	}
	g.durable = token
	n := 0
	for n < len(g.waiting) && g.waiting[n].token <= token {
		g.deliver(g.waiting[n].responses)
		n++
	}
	clear(g.waiting[:n])
	g.waiting = g.waiting[n:]
	if len(g.waiting) == 0 {
		g.waiting = nil
	}
}

// deliver steps responses to this replica into raft and sends the others.
func (g *Group) deliver(responses []*raftpb.Message) {
	for _, m := range responses {
		if m.GetTo() != uint64(g.cfg.Replica) {
			g.out.Messages = append(g.out.Messages, m)
			continue
		}
		if err := g.rn.Step(m); err != nil {
			g.cfg.Logger.Debugf("step own %s: %v", m.GetType(), err)
		}
	}
}

// storageApply performs a MsgStorageApply: raft's applied index moves at hand-over, because the
// machine applies in its own order; configuration changes act here, at raft's commit (D5).
func (g *Group) storageApply(m *raftpb.Message) {
	for _, e := range m.GetEntries() {
		if t := e.GetType(); t != raftpb.EntryNormal && e.GetIndex() > g.confIndex && !g.uninitialized {
			g.applyConfChange(e)
		}
	}
	if n := len(m.GetEntries()); n > 0 {
		g.handed = m.GetEntries()[n-1].GetIndex()
	}
	g.deliver(m.GetResponses())
	g.writeCheckpoint()
}

func (g *Group) applyConfChange(e *raftpb.Entry) {
	var cc raftpb.ConfChangeI
	switch e.GetType() {
	case raftpb.EntryConfChange:
		c := new(raftpb.ConfChange)
		if err := proto.Unmarshal(e.GetData(), c); err != nil {
			panic(fmt.Sprintf("raftstore: group %d: configuration change at %d: %v", g.cfg.ID, e.GetIndex(), err))
		}
		cc = c
	default:
		c := new(raftpb.ConfChangeV2)
		if err := proto.Unmarshal(e.GetData(), c); err != nil {
			panic(fmt.Sprintf("raftstore: group %d: configuration change at %d: %v", g.cfg.ID, e.GetIndex(), err))
		}
		cc = c
	}
	g.conf, g.confIndex = g.rn.ApplyConfChange(cc), e.GetIndex()
	g.setPeers()
}

// noteAppended adds entries to the update; they replace what is there from their first on.
func (g *Group) noteAppended(entries []*raftpb.Entry) {
	g.changed = true
	have := g.update.Appended
	first := entries[0].GetIndex()
	for len(have) > 0 && have[len(have)-1].GetIndex() >= first {
		have = have[:len(have)-1]
	}
	if len(have) == 0 {
		g.update.Appended = entries[:len(entries):len(entries)]
		return
	}
	g.update.Appended = append(have[:len(have):len(have)], entries...)
}
