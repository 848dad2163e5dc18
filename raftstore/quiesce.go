package raftstore

import (
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"

	"braid/raftstore/raftid"
)

// Sleep (B12), in order: a leader that for QuiesceTicks had nothing to do, whose followers all
// answered recently and hold exactly its log, all of it committed, tells them so in one control
// and stops ticking. A follower that holds the same log takes the commit index from it and stops
// ticking too. Nobody sends anything. What wakes a replica: any message that says something new,
// a proposal or question of its machine, a shell that noticed a silent store.
//
// Elections stay safe: the control is stepped as a heartbeat first, so the follower's clock
// stands at the beginning of an election timeout and goes on from there when it wakes. A leader
// sleeps only while every follower counts as recently active, so its first quorum check after
// waking does not find it alone because it slept. If the control is lost, the follower times out,
// its pre-vote wakes the leader, and the leader's heartbeat settles it.

// quiesce is called at the end of a turn.
func (g *Group) quiesce(ticks int) {
	if g.state != raft.StateLeader || g.cfg.QuiesceTicks < 0 {
		return
	}
	if g.asleep {
		if g.parked || !g.cfg.Machine.Idle() {
			g.wake()
		}
		return
	}
	if !g.settled() {
		g.idleTicks = 0
		return
	}
	g.idleTicks += ticks
	if ticks == 0 || g.idleTicks < g.cfg.QuiesceTicks || !g.followersSettled() {
		return
	}
	lastTerm, _ := g.log.TermAt(g.last)
	for _, to := range g.peers {
		g.out.Controls = append(g.out.Controls, Control{
			Kind: ControlQuiesce, From: g.cfg.Replica, To: to, Term: g.term, Index: g.last, LogTerm: lastTerm,
		})
	}
	g.asleep = true
}

// settled says that this replica has nothing to do or to wait for.
func (g *Group) settled() bool {
	return !g.uninitialized && g.committed == g.last && g.last == g.log.LastIndex() && g.token == g.durable &&
		g.sending == 0 && g.install == nil && !g.parked && g.checkpoint == nil && g.reading == 0 && len(g.reads) == 0 &&
		!g.changed && !g.out.Again && g.cfg.Machine.Idle()
}

func (g *Group) followersSettled() bool {
	if g.rn.BasicStatus().LeadTransferee != raft.None {
		return false
	}
	ok := true
	g.rn.WithProgress(func(id uint64, _ raft.ProgressType, pr tracker.Progress) {
		if id != uint64(g.cfg.Replica) && (pr.Match != g.last || pr.State != tracker.StateReplicate || !pr.RecentActive) {
			ok = false
		}
	})
	return ok
}

// slowestFollower is the lowest index that a live follower still lacks nothing below; followers
// that are silent or wait for a snapshot do not count.
func (g *Group) slowestFollower() uint64 {
	lowest := g.last
	g.rn.WithProgress(func(id uint64, _ raft.ProgressType, pr tracker.Progress) {
		if id != uint64(g.cfg.Replica) && pr.RecentActive && pr.State != tracker.StateSnapshot {
			lowest = min(lowest, pr.Match)
		}
	})
	return lowest
}

// wake ends sleep; a leader then stays awake for at least QuiesceTicks. Messages to a leader that
// is awake do not put sleep off by themselves: answers to heartbeats come all the time.
func (g *Group) wake() {
	if g.asleep {
		g.asleep, g.idleTicks = false, 0
	}
}

// control takes a message that raft does not know.
func (g *Group) control(c *Control) {
	if c.To != g.cfg.Replica {
		return
	}
	switch c.Kind {
	case ControlQuiesce:
		g.takeQuiesce(c)
	case ControlNeedState:
		g.takeNeedState(c)
	}
}

// takeQuiesce puts a follower to sleep, if it holds the leader's log. Otherwise it stays awake,
// and its election timeout will wake the leader.
func (g *Group) takeQuiesce(c *Control) {
	g.drain()
	if c.Term != g.term || g.state != raft.StateFollower || g.install != nil || g.uninitialized ||
		g.last != c.Index || g.lead != raft.None && g.lead != uint64(c.From) {
		return
	}
	if t, ok := g.log.TermAt(g.last); !ok || t != c.LogTerm {
		return
	}
	g.quieting = true
	err := g.rn.Step(&raftpb.Message{
		Type: raftpb.MsgHeartbeat.Enum(), To: new(uint64(g.cfg.Replica)), From: new(uint64(c.From)),
		Term: new(c.Term), Commit: new(c.Index),
	})
	g.drain()
	g.quieting = false
	if err != nil || g.committed != g.last || g.token != g.durable {
		return
	}
	g.asleep = true
}

// NeedsState says whether the replica waits for a snapshot.
func (g *Group) NeedsState() bool { return g.uninitialized }

// askForState asks the leader for a snapshot. Raft sends one only to a replica whose log it
// cannot continue; a replica that has the log and lost the state looks complete to it (A7 iii).
func (g *Group) askForState(ticks int) {
	if !g.uninitialized || g.install != nil || g.lead == raft.None || g.last == 0 {
		return
	}
	g.needTicks -= ticks
	if g.needTicks > 0 {
		return
	}
	g.needTicks = g.cfg.ElectionTicks
	g.out.Controls = append(g.out.Controls, Control{
		Kind: ControlNeedState, From: g.cfg.Replica, To: raftid.ReplicaID(g.lead), Term: g.term, Index: g.last,
	})
}
