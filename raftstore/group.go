package raftstore

import (
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"braid/raftstore/raftid"
	"braid/raftstore/wal"
)

// GroupConfig describes one replica of a group. Zero limits mean the defaults named.
type GroupConfig struct {
	ID      raftid.GroupID
	Replica raftid.ReplicaID
	// Peers tells on which store a replica lives. A store calls it with the replica's mailbox locked: it
	// must not post to its group, and must not wait.
	Peers func(raftid.ReplicaID) (raftid.StoreID, bool)
	// ConfState is the configuration as of ConfIndex, from the machine's position. Nil: that
	// of the log's checkpoint.
	ConfState *raftpb.ConfState
	// ConfIndex is the index of the newest configuration change that ConfState contains; replay
	// skips changes through it (D5).
	ConfIndex uint64
	// Applied and AppliedTerm are the machine's durable position. A log that ends before it is
	// reset to it (D2).
	Applied, AppliedTerm uint64
	// Uninitialized marks a replica whose state is missing: it keeps its log, term and vote,
	// votes and runs raft, but neither campaigns nor applies until a snapshot fills it (D4, B6).
	Uninitialized bool

	// ElectionTicks (10) and HeartbeatTicks (1) are raft's times; QuiesceTicks
	// (ElectionTicks) is how long a leader must have had nothing to do before it sleeps,
	// negative for never.
	ElectionTicks, HeartbeatTicks, QuiesceTicks int
	// MaxMessageBytes (512 KiB), MaxInflightMessages (256) and MaxInflightBytes (16 MiB) bound
	// what is on its way to one follower; MaxUncommittedBytes (64 MiB) bounds the leader's
	// uncommitted tail: beyond it Propose answers ErrDropped.
	MaxMessageBytes     uint64
	MaxInflightMessages int
	MaxInflightBytes    uint64
	MaxUncommittedBytes uint64
	// KeepEntries (256, negative for none) stay in the log when the machine lets it be cut, and
	// a leader keeps up to KeepForFollowers (32768, negative for none) for a follower that is
	// alive and behind, because sending entries is cheaper than sending the state.
	KeepEntries, KeepForFollowers int

	// LazyCommit leaves it to heartbeats, and to appends of entries, to tell followers the commit
	// index: for a machine that learns elsewhere what is committed (A6). An entry then takes half the
	// messages.
	LazyCommit bool

	// AcquireSnapshot asks for the right to pin state for a follower, ReleaseSnapshot gives it
	// back (the shell calls it). Nil: no bound beyond one for each group.
	AcquireSnapshot func() bool
	ReleaseSnapshot func()
	// Full says that too much waits for the disk: then nothing new is taken into the log, neither
	// proposals, which get ErrDropped, nor a leader's appends, which raft repeats. Nil: never.
	Full func() bool
	// Durable is told, from the log's writer and in order, that the record with this token is
	// durable. It must hand the token to Input.Durable, must not block, and must not call back.
	Durable func(token uint64)

	Log     LogStore
	Machine StateMachine
	// Logger is raft's; nil: silent but for panics.
	Logger  raft.Logger
	Mutants *Mutants
}

func (c *GroupConfig) setDefaults() error {
	if c.Log == nil || c.Machine == nil || c.Durable == nil {
		return errors.New("raftstore: a group needs a log, a machine and a durability callback")
	}
	if c.Replica == 0 {
		return errors.New("raftstore: a group needs a replica id")
	}
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.ElectionTicks, 10)
	def(&c.HeartbeatTicks, 1)
	def(&c.QuiesceTicks, c.ElectionTicks)
	def(&c.MaxInflightMessages, 256)
	def(&c.KeepEntries, 256)
	def(&c.KeepForFollowers, 32768)
	def64 := func(v *uint64, d uint64) {
		if *v == 0 {
			*v = d
		}
	}
	def64(&c.MaxMessageBytes, 512<<10)
	def64(&c.MaxInflightBytes, max(16<<20, c.MaxMessageBytes))
	def64(&c.MaxUncommittedBytes, 64<<20)
	if c.Logger == nil {
		c.Logger = quietLogger{}
	}
	if c.Mutants == nil {
		c.Mutants = new(Mutants)
	}
	if c.Peers == nil {
		c.Peers = func(raftid.ReplicaID) (raftid.StoreID, bool) { return 0, false }
	}
	return nil
}

// Group is one replica of a group: a raft core, its log and its machine. It has one owner at a
// time, who calls Process; nothing in it is safe for concurrent use.
//
// Invariants: the log store holds everything raft handed over; last is raft's last index;
// tokens are durable in order; while a snapshot is being installed neither the machine nor the
// log store is touched.
type Group struct {
	cfg GroupConfig
	rn  *raft.RawNode
	log LogStore

	// What raft said last.
	term, vote, committed, last uint64
	state                       raft.StateType
	lead                        uint64
	open                        uint64 // index of the entry that opened the term, when leading
	role                        Role   // as the machine was told
	handed                      uint64 // raft's applied index: what it has handed over

	conf      *raftpb.ConfState
	confIndex uint64
	// peers are all replicas of the configuration but this one.
	peers []raftid.ReplicaID

	hard    wal.HardState // as in the log
	token   uint64        // of the last record that must be durable
	durable uint64        // highest token known to be durable
	waiting []waiting     // responses that promise durability, by token
	update  Update        // not yet told to the machine
	changed bool          // update has something
	reads   [][]byte      // contexts that wait for the term's opening entry (A13)
	reading int           // contexts handed to raft and not answered
	// checkpoint waits until raft has handed over everything it contains: writing it cuts the
	// log there.
	checkpoint *wal.Checkpoint

	uninitialized bool
	needTicks     int // until the next request for state (D4)

	pinned   []SnapshotSource // taken by raft's Snapshot, not yet in a message
	sending  int              // outgoing snapshots not yet reported
	staged   *Staged          // handed to raft, not yet taken or refused
	install  *installing
	campaign bool // the only voter: campaign in the first turn

	heir succession

	probing   bool // in this turn answers to heartbeats came, on which raft looks for what was lost
	asleep    bool
	idleTicks int
	quieting  bool // a quiesce control is being stepped as a heartbeat: its answer is dropped

	// parked: what the machine detached has not ended; detach is what it asked for in this turn.
	parked bool
	detach func()

	out  *Output // during Process
	work bool    // during a call of the machine
}

// waiting are responses that leave when token is durable.
type waiting struct {
	token     uint64
	responses []*raftpb.Message
}

// NewGroup starts a replica from its log and the position of its machine (D2).
func NewGroup(cfg GroupConfig) (*Group, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	g := &Group{cfg: cfg, log: cfg.Log, uninitialized: cfg.Uninitialized, out: new(Output)}
	g.conf, g.confIndex = cfg.ConfState, cfg.ConfIndex
	if cp := g.log.Checkpoint(); g.conf == nil && cp != nil {
		g.conf, g.confIndex = cp.ConfState, cp.Index
	}
	if g.uninitialized {
		// Without state the configuration is not known; raft with an empty one votes and
		// takes entries but never campaigns.
		g.conf, g.confIndex, g.cfg.Applied, g.cfg.AppliedTerm = nil, 0, 0, 0
	} else if g.conf == nil || len(g.conf.GetVoters()) == 0 {
		return nil, fmt.Errorf("raftstore: group %d has no configuration", cfg.ID)
	}
	if g.conf == nil {
		g.conf = new(raftpb.ConfState)
	}
	if err := g.reconcile(); err != nil {
		return nil, err
	}
	if err := g.startRaft(g.cfg.Applied); err != nil {
		return nil, err
	}
	g.campaign = g.soleVoter()
	// The machine learns in the first turn where it stands.
	g.role = Role{Term: g.term}
	g.update, g.changed = Update{Role: &Role{Term: g.term}, Committed: g.committed}, true
	return g, nil
}

// reconcile makes log and state fit (D2): what the machine has applied is committed, and a log
// that does not reach it, or holds something else there, goes on behind it.
func (g *Group) reconcile() error {
	h, applied, start := g.log.Hard(), g.cfg.Applied, g.log.Start()
	if cp := g.log.Checkpoint(); cp != nil && applied < cp.Index && !g.uninitialized {
		return fmt.Errorf("raftstore: group %d: the machine is at %d, its checkpoint at %d", g.cfg.ID, applied, cp.Index)
	}
	term, ok := g.log.TermAt(applied)
	switch {
	case g.uninitialized:
	case applied < start.Index:
		return fmt.Errorf("raftstore: group %d: the log begins at %d, after the applied position %d: entries are missing",
			g.cfg.ID, start.Index, applied)
	case !ok || applied > 0 && term != g.cfg.AppliedTerm:
		if g.cfg.AppliedTerm == 0 && applied > 0 {
			return fmt.Errorf("raftstore: group %d: applied position %d without a term", g.cfg.ID, applied)
		}
		if g.cfg.AppliedTerm > h.Term {
			h = wal.HardState{Term: g.cfg.AppliedTerm}
		}
		h.Commit = applied
		hard := h // the log keeps what it is given
		g.append(&wal.Record{Reset: &wal.Position{Index: applied, Term: g.cfg.AppliedTerm}, Hard: &hard}, nil)
	}
	h.Commit = max(h.Commit, applied, g.log.Start().Index)
	if last := g.log.LastIndex(); h.Commit > last {
		return fmt.Errorf("raftstore: group %d: the log ends at %d, below its commit index %d: entries are missing", g.cfg.ID, last, h.Commit)
	}
	if t, _ := g.log.TermAt(g.log.LastIndex()); t > h.Term {
		return fmt.Errorf("raftstore: group %d: the log ends in term %d, above its own term %d: the hard state is missing", g.cfg.ID, t, h.Term)
	}
	g.hard = h
	return nil
}

// startRaft builds the raft core from log, hard state and configuration.
func (g *Group) startRaft(applied uint64) error {
	rn, err := raft.NewRawNode(&raft.Config{
		ID:                        uint64(g.cfg.Replica),
		ElectionTick:              g.cfg.ElectionTicks,
		HeartbeatTick:             g.cfg.HeartbeatTicks,
		Storage:                   storage{g},
		Applied:                   applied,
		AsyncStorageWrites:        true,
		MaxSizePerMsg:             g.cfg.MaxMessageBytes,
		MaxCommittedSizePerReady:  4 << 20,
		MaxUncommittedEntriesSize: g.cfg.MaxUncommittedBytes,
		MaxInflightMsgs:           g.cfg.MaxInflightMessages,
		MaxInflightBytes:          g.cfg.MaxInflightBytes,
		CheckQuorum:               true,
		PreVote:                   true,
		ReadOnlyOption:            raft.ReadOnlySafe,
		Logger:                    g.cfg.Logger,
		DisableProposalForwarding: !g.cfg.Mutants.Forward,
		StepDownOnRemoval:         true,
	})
	if err != nil {
		return fmt.Errorf("raftstore: group %d: %w", g.cfg.ID, err)
	}
	g.rn = rn
	g.term, g.vote, g.committed = g.hard.Term, uint64(g.hard.Vote), g.hard.Commit
	g.last, g.state, g.lead = g.log.LastIndex(), raft.StateFollower, raft.None
	g.handed = max(applied, g.log.Start().Index)
	g.setPeers()
	return nil
}

func (g *Group) setPeers() {
	g.peers = g.peers[:0]
	for _, set := range [][]uint64{g.conf.GetVoters(), g.conf.GetLearners(), g.conf.GetVotersOutgoing()} {
		for _, id := range set {
			if r := raftid.ReplicaID(id); r != g.cfg.Replica && !slices.Contains(g.peers, r) {
				g.peers = append(g.peers, r)
			}
		}
	}
}

func (g *Group) soleVoter() bool {
	return len(g.conf.GetVoters()) == 1 && g.conf.GetVoters()[0] == uint64(g.cfg.Replica) && len(g.conf.GetVotersOutgoing()) == 0
}

// Peers returns the other replicas of the active configuration; read-only, owner only.
func (g *Group) Peers() []raftid.ReplicaID { return g.peers }

// Asleep says that the group needs no ticks until something reaches it (B12).
func (g *Group) Asleep() bool { return g.asleep }

// Process is one turn: it takes everything of in, lets the machine see and do its part, and adds
// to out what is to be done outside.
func (g *Group) Process(in *Input, out *Output) {
	g.out = out
	before := len(out.Messages)
	g.probing = false
	if g.campaign || in.Campaign {
		g.campaign = false
		g.startElection()
	}
	g.takeDurable(in.Durable)
	if in.Detached {
		g.takeDetached()
	}
	if in.Installed != nil {
		g.takeInstalled(in.Installed)
	}
	if in.Staged != nil {
		// Before the messages: the leader goes on behind the snapshot as soon as it is handed over.
		g.takeStaged(in.Staged)
	}
	for _, m := range in.Messages {
		g.step(m)
	}
	for i := range in.Controls {
		g.control(&in.Controls[i])
	}
	for _, s := range in.Sent {
		g.sending--
		status := raft.SnapshotFinish
		if !s.OK {
			status = raft.SnapshotFailure
		}
		g.rn.ReportSnapshot(uint64(s.To), status)
	}
	for _, r := range in.Unreachable {
		g.rn.ReportUnreachable(uint64(r))
	}
	if in.Wake {
		g.wake()
	}
	for _, store := range in.Down {
		g.storeDown(store)
	}
	if in.Transfer != 0 {
		g.Transfer(in.Transfer)
	}
	g.tick(in.Ticks)
	g.drain()
	g.runMachine(in.Work || in.Detached)
	g.quiesce(in.Ticks)
	out.Messages = append(out.Messages[:before], withoutNeedless(out.Messages[before:], g.cfg.LazyCommit && !g.probing)...)
	g.out = nil
}

// runMachine tells the machine what changed and lets it work, unless it has no state, its state is
// being replaced, or it is parked.
func (g *Group) runMachine(work bool) {
	if g.uninitialized || g.install != nil || g.parked {
		return
	}
	if g.tell() || work {
		g.work = true
		if g.cfg.Machine.Work(g) {
			g.out.Again = true
		}
		g.work = false
		g.drain()
		if g.park() {
			return
		}
		// What the machine's own work changed it is told in the same turn, but it works on that
		// in the next one: a machine cannot hold its owner.
		if appended := len(g.update.Appended) > 0 && g.updateOnlyAppends(); g.tell() && !appended {
			g.out.Again = true
		}
	}
}

func (g *Group) updateOnlyAppends() bool {
	return g.update.Role == nil && len(g.update.ReadStates) == 0 && g.update.Installed == nil && g.update.Committed == 0
}

// tell hands the pending update over; false when there is none.
func (g *Group) tell() bool {
	if !g.changed {
		return false
	}
	u := g.update
	u.Committed = g.committed
	g.update, g.changed = Update{}, false
	g.work = true
	g.cfg.Machine.Update(g, u)
	g.work = false
	return true
}

func (g *Group) startElection() {
	g.wake()
	if g.uninitialized || g.install != nil {
		return
	}
	if err := g.rn.Campaign(); err != nil {
		g.cfg.Logger.Debugf("campaign: %v", err)
	}
}

func (g *Group) tick(n int) {
	if g.asleep {
		return
	}
	for range n {
		g.rn.Tick()
	}
	g.askForState(n)
	g.succeed(n)
}

// accepted are the messages that may come from the network. MsgProp is not among them: a
// proposal belongs to the state it was evaluated on (E1).
func (g *Group) accepted(t raftpb.MessageType) bool {
	switch t {
	case raftpb.MsgApp, raftpb.MsgAppResp, raftpb.MsgVote, raftpb.MsgVoteResp, raftpb.MsgPreVote, raftpb.MsgPreVoteResp,
		raftpb.MsgHeartbeat, raftpb.MsgHeartbeatResp, raftpb.MsgTimeoutNow, raftpb.MsgTransferLeader,
		raftpb.MsgReadIndex, raftpb.MsgReadIndexResp:
		return true
	case raftpb.MsgProp:
		return g.cfg.Mutants.Forward
	}
	return false
}

func (g *Group) step(m *raftpb.Message) {
	t := m.GetType()
	if m.GetTo() != uint64(g.cfg.Replica) || !g.accepted(t) {
		return
	}
	if t == raftpb.MsgApp && len(m.GetEntries()) > 0 && g.full() {
		return // the log's queue is bounded; the leader sends it again
	}
	if g.asleep && t == raftpb.MsgHeartbeatResp && m.GetTerm() == g.term && len(m.GetContext()) == 0 {
		return // the answer to the last heartbeat before we slept says nothing new
	}
	if g.uninitialized && g.cfg.Mutants.NoUninitialisedVoters && (t == raftpb.MsgVote || t == raftpb.MsgPreVote) {
		return
	}
	if t == raftpb.MsgReadIndex && g.state == raft.StateLeader && g.committed < g.open && g.soleVoter() {
		return // A13, for a learner's question; it asks again
	}
	if t == raftpb.MsgHeartbeatResp {
		g.probing = true
	}
	g.wake()
	if err := g.rn.Step(m); err != nil {
		// A response of a replica that is not in the configuration, or a forwarded proposal
		// that was dropped: nothing to do.
		g.cfg.Logger.Debugf("step %s from %d: %v", t, m.GetFrom(), err)
	}
}

func (g *Group) full() bool { return g.cfg.Full != nil && g.cfg.Full() }

// GroupStatus is a replica's state at a glance.
type GroupStatus struct {
	ID        raftid.GroupID
	Replica   raftid.ReplicaID
	Term      uint64
	Vote      raftid.ReplicaID
	Leader    raftid.ReplicaID // zero when unknown
	Leading   bool
	Open      uint64 // when leading: index of the entry that opened the term
	Committed uint64
	First     uint64
	Last      uint64
	// Quiesced: asleep. Uninitialized: without state. Installing: a snapshot is replacing it.
	Quiesced, Uninitialized, Installing bool
	Voters                              []uint64
}

// Status describes the group; owner only.
func (g *Group) Status() GroupStatus {
	s := GroupStatus{
		ID: g.cfg.ID, Replica: g.cfg.Replica, Term: g.term, Vote: raftid.ReplicaID(g.vote),
		Leader: raftid.ReplicaID(g.lead), Leading: g.state == raft.StateLeader, Committed: g.committed,
		First: g.log.FirstIndex(), Last: g.last, Quiesced: g.asleep, Uninitialized: g.uninitialized,
		Installing: g.install != nil, Voters: g.conf.GetVoters(),
	}
	if s.Leading {
		s.Open = g.open
	}
	return s
}

// String prints the status in one line.
func (s GroupStatus) String() string {
	role := "follower"
	if s.Leading {
		role = "leader"
	}
	out := fmt.Sprintf("group %d replica %d: %s term:%d lead:%d log:[%d,%d] commit:%d", s.ID, s.Replica, role, s.Term, s.Leader, s.First, s.Last, s.Committed)
	if s.Quiesced {
		out += " asleep"
	}
	if s.Uninitialized {
		out += " uninitialized"
	}
	if s.Installing {
		out += " installing"
	}
	return out
}

func cloneConf(cs *raftpb.ConfState) *raftpb.ConfState {
	return proto.Clone(cs).(*raftpb.ConfState)
}
