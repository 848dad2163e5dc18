package sim

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	"go.etcd.io/raft/v3/raftpb"

	"braid/leasesvc"
	"braid/mvcc"
	"braid/pd"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/raftstore/raftid"
	"braid/region"
	"braid/region/regionpb"
	"braid/watchsvc"
)

// store is one node: what survives a crash (disk, engine as flushed) and what does not.
type store struct {
	w      *World
	i      int
	id     raftid.StoreID
	disk   *raftstore.MemDisk
	engine *mvcc.MemStore
	recent *region.Recent // of this life
	life   uint64

	up      bool
	oracle  oracle        // client, or own
	client  *order.Client // nil in single-group mode, like member
	own     *ownOracle
	hub     *watchsvc.Hub
	hubDue  time.Duration // its next turn if nobody wakes it, 0 for none
	member  *pd.Replica
	groups  map[raftid.GroupID]*group
	ids     []raftid.GroupID // of groups, ascending
	calls   map[uint64]func([]byte, error)
	lastID  uint64
	dirNews bool
	spans   map[uint64]*mvcc.MemSpan // exported state by handle; what a snapshot's bytes point to

	collected map[pdpb.RegionID]mvcc.Revision // superseded versions are removed through here
	ticks     int
	todo      []*group      // room for work
	ackFloor  mvcc.Revision // of compactions acknowledged by this store in this life
	doomed    int           // the step in which it crashes, 0 for none

	leases *leasesvc.Core
	loads  []*leaseLoad
	// confirming are the regions whose terms are being confirmed for leases.
	confirming map[pdpb.RegionID]bool
	// expiring are leases of one region and term that are about to be ended together.
	expiring []leasesvc.Action
	origin   time.Duration // of its time of leases
}

// group is a raft group with what reached it since its last turn.
type group struct {
	s       *store
	id      raftid.GroupID
	g       *raftstore.Group
	replica *region.Replica // nil for pd
	in      raftstore.Input
	out     raftstore.Output
	ready   bool
	install *raftstore.Staged
	// detached is what the replica left to be done beside its group.
	detached func()
	// installed is an installation that ended and that the group has not heard of.
	installed *raftstore.Installed
	leading   bool
}

func newStore(w *World, i int) *store {
	return &store{w: w, i: i, id: storeID(i), disk: raftstore.NewMemDisk(), engine: mvcc.NewMemStore(), spans: map[uint64]*mvcc.MemSpan{}}
}

// start brings the store up with what its disk and engine hold.
func (s *store) start() error {
	s.up = true
	s.life++
	s.groups, s.ids = map[raftid.GroupID]*group{}, nil
	s.calls = map[uint64]func([]byte, error){}
	s.collected = map[pdpb.RegionID]mvcc.Revision{}
	s.doomed, s.ackFloor = 0, order.NoFloor
	s.recent = region.NewRecent(6)
	s.openHub()
	s.openLeases()
	if s.w.aim.oneGroup {
		return s.startSingle()
	}
	members := make([]raftid.StoreID, len(s.w.stores))
	for i := range members {
		members[i] = storeID(i)
	}
	followed := members
	if s.w.aim.remote {
		followed = slices.DeleteFunc(slices.Clone(members), func(id raftid.StoreID) bool { return id == s.id })
	}
	s.client = order.NewClient(order.ClientConfig{
		ClientOptions: order.ClientOptions{
			Self: s.id, Members: followed, Session: s.life << 20,
			CallTimeout: 60 * time.Millisecond, RetryAfter: 5 * time.Millisecond, ResendAfter: 40 * time.Millisecond,
			FollowerDelay: 60 * time.Millisecond, SubscribeRetry: 40 * time.Millisecond, StandstillAfter: 120 * time.Millisecond,
			Mutants: s.w.mut.order,
		},
		Net:         simNet{s},
		OnDirectory: func(*order.Directory) { s.dirNews = true },
		OnMark:      s.hub.Poke,
	})
	s.oracle = s.client
	if err := s.startMember(members); err != nil {
		return err
	}
	positions := s.engine.Positions()
	ids := make([]uint64, 0, len(positions))
	for id := range positions {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		pos, err := regionpb.DecodePosition(positions[id])
		if err != nil {
			return err
		}
		if err := s.startRegion(pos, false); err != nil {
			return err
		}
	}
	return nil
}

func (s *store) startMember(members []raftid.StoreID) error {
	storeOf := func(r raftid.ReplicaID) (raftid.StoreID, bool) {
		return storeID(int(r) - 1), r >= 1 && int(r) <= len(s.w.stores)
	}
	log := s.disk.Log(raftid.PDGroup)
	g := s.newGroup(raftid.PDGroup)
	member, err := pd.NewReplica(pd.Config{
		Store: s.id, Life: s.life, Wake: g.wake, StoreOf: storeOf, Bootstrap: s.w.boot, Local: s.client, Sender: simNet{s}, Net: simNet{s},
		Limits:  pd.Limits{CheckpointEvery: s.w.aim.checkpoint},
		OnApply: func(index, term uint64, e *pd.Entry, res pd.Result) { s.w.check.cutApplied(s, index, term, e, res) },
		Mutants: &s.w.mut.pd,
	}, log.Checkpoint())
	if err != nil {
		return err
	}
	conf := &raftpb.ConfState{}
	for i := range members {
		conf.Voters = append(conf.Voters, uint64(i+1))
	}
	applied, term := member.Applied()
	err = s.addGroup(g, raftstore.GroupConfig{
		ID: raftid.PDGroup, Replica: raftid.ReplicaID(s.i + 1), Peers: storeOf, ConfState: conf,
		Applied: applied, AppliedTerm: term, Log: log, Machine: member,
	})
	s.member = member
	s.client.SetMember(member)
	return err
}

func (s *store) newGroup(id raftid.GroupID) *group { return &group{s: s, id: id} }

func (g *group) wake() {
	g.in.Work = true
	g.ready = true
}

func (s *store) addGroup(g *group, cfg raftstore.GroupConfig) error {
	cfg.ElectionTicks, cfg.HeartbeatTicks = 10, 1
	cfg.KeepEntries, cfg.KeepForFollowers = -1, -1
	cfg.Durable = func(token uint64) {
		g.in.Durable = token
		g.ready = true
	}
	cfg.Mutants = &s.w.mut.raft
	var err error
	if g.g, err = raftstore.NewGroup(cfg); err != nil {
		return err
	}
	g.ready = true
	s.groups[g.id] = g
	s.ids = append(s.ids, g.id)
	slices.Sort(s.ids)
	return nil
}

// startRegion starts a replica from its durable position, or uninitialized (D4).
func (s *store) startRegion(pos region.Position, uninitialized bool) error {
	d := pos.Descriptor
	var self raftid.ReplicaID
	for _, p := range d.Peers {
		if p.Store == s.id {
			self = p.Replica
		}
	}
	conf, err := region.ConfState(&pos)
	if err != nil {
		return err
	}
	g := s.newGroup(d.ID)
	mut := s.w.mut.region
	if s.w.mut.storeMark {
		mut.StoreMark = func() pdpb.Mark { return s.client.Mark() }
	}
	limits := region.TinyLimits
	limits.EntryBytesMax, limits.QueueBytesMax, limits.InflightBytesMax, limits.ItemsMax = 1<<10, 1<<16, 1<<14, 64
	limits.ReadKeysMax, limits.ReadBytesMax = 64, 1<<16
	limits.TurnBytesMax, limits.TurnKeysMax = 256, 6
	limits.LocksMax, limits.PreparedBytesMax = 16, 1<<12
	limits.LockTicksMax, limits.LockWaitTicksMax, limits.AbortTicks = 40, 60, 30
	if n := s.w.aim.patience; n > 0 {
		limits.LockTicksMax, limits.LockWaitTicksMax = n*limits.LockTicksMax, n*limits.LockWaitTicksMax
		limits.LocksMax *= 4
		if !s.w.aim.rush {
			limits.StandBackTicks *= n
		}
	}
	cfg := region.Config{
		Store: s.id, Replica: self, Life: s.life, Engine: s.engine, Position: pos, Wake: g.wake,
		Fatal:       func(err error) { s.w.fail("store %d: %v", s.i, err) },
		Limits:      limits,
		SharedFsync: s.w.mut.sharedFsync || len(s.w.stores) == 1,
		Snapshots:   backend{s, d.Span},
		Recent:      s.recent,
		Observer: region.Observer{Applied: func(index, term uint64, it *pdpb.Item, e *regionpb.Entry, rev mvcc.Revision, void bool) {
			s.w.check.applied(s, d.ID, index, term, it, e, rev, void)
		}, Decided: func(it *pdpb.Item, p *regionpb.Prepared, dec pdpb.Decision) {
			s.w.check.partDecided(s, d.ID, it, p, dec)
		}},
		Abort: func(id pdpb.AttemptID) {
			s.oracle.ProposeFunc(order.Event{Kind: order.EventAbort, Attempt: id}, func(order.EventResult, error) {})
		},
		Mutants: mut,
	}
	if s.own != nil {
		cfg.Orderer, cfg.Meta = s.own.core, ownMachine{s.own}
	} else {
		cfg.Order = s.client
	}
	attach := s.feedHub(&cfg)
	s.feedLeases(&cfg)
	if g.replica, err = region.NewReplica(cfg); err != nil {
		return err
	}
	attach(g.replica)
	if uninitialized {
		s.w.stats.Uninitialised++
	}
	if err := s.addGroup(g, raftstore.GroupConfig{
		ID: d.ID, Replica: self, ConfState: conf, ConfIndex: pos.ConfIndex, Applied: pos.Index, AppliedTerm: pos.Term,
		Peers: func(r raftid.ReplicaID) (raftid.StoreID, bool) {
			for _, p := range d.Peers {
				if p.Replica == r {
					return p.Store, true
				}
			}
			return 0, false
		},
		Uninitialized: uninitialized, LazyCommit: s.client != nil, Log: s.disk.Log(d.ID), Machine: g.replica,
	}); err != nil {
		return err
	}
	if s.client != nil {
		s.client.Register(d.ID, source{g.replica})
	}
	return nil
}

// source is a replica as the oracle's client sees it.
type source struct{ *region.Replica }

func (r source) Leading() bool {
	_, here := r.Leader()
	return here
}

// reconcile creates the replicas that the directory knows and the store has not, flushed before
// they vote.
func (s *store) reconcile() error {
	d := s.oracle.Directory()
	if d == nil {
		return nil
	}
	s.dirNews = false
	for i := range d.Regions {
		if s.groups[d.Regions[i].ID] == nil {
			if err := s.create(d.Regions[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// crash loses what was not flushed. The disk may have written some of it without having said so.
func (s *store) crash() {
	s.w.event("s%d crashes", s.i)
	s.w.stats.Crashes++
	s.countStats()
	s.up = false
	if n := s.disk.Pending(); n > 0 && s.w.chance(2) {
		s.disk.Flush(s.w.rng.IntN(n + 1))
	}
	s.disk = s.disk.Crash()
	s.engine = s.engine.Crash()
	s.w.check.crashed(s)
}

// countStats takes over the counters of replicas that end.
func (s *store) countStats() {
	if !s.up {
		return
	}
	for _, id := range s.ids {
		if r := s.groups[id].replica; r != nil {
			s.w.stats.Deferred += int(r.Stats().Deferred)
		}
	}
}

// turnsPerStep bounds the turns of a run: more is a cluster that does not come to rest.
const turnsPerStep = 60

// turn lets a group take what reached it.
func (g *group) turn() {
	in := g.in
	g.in = raftstore.Input{}
	g.ready = false
	g.out.Reset()
	s, w := g.s, g.s.w
	g.g.Process(&in, &g.out)
	if w.stats.Turns++; w.stats.Turns > turnsPerStep*(w.cfg.Steps+2000) {
		w.fail("LIVENESS: %d turns, and group %d of store %d still wants one", w.stats.Turns, g.id, s.i)
		return
	}
	if l := g.g.Status().Leading; l != g.leading {
		g.leading = l
		switch {
		case !l:
		case g.id == raftid.PDGroup:
			w.stats.PDElections++
		default:
			w.stats.Elections++
		}
		w.event("s%d g%d leading %v", s.i, g.id, l)
	}
	for _, m := range g.out.Messages {
		w.send(&packet{kind: raftPacket, from: s.i, to: g.storeOf(raftid.ReplicaID(m.GetTo())), group: g.id, msg: m})
	}
	for _, c := range g.out.Controls {
		w.send(&packet{kind: controlPacket, from: s.i, to: g.storeOf(c.To), group: g.id, control: c})
	}
	for _, o := range g.out.Snapshots {
		var buf bytes.Buffer
		if err := errors.Join(o.Source.WriteTo(context.Background(), &buf), o.Source.Close()); err != nil {
			w.fail("store %d group %d: snapshot: %v", s.i, g.id, err)
			return
		}
		w.stats.Snapshots++
		w.send(&packet{kind: snapshotPacket, from: s.i, to: g.storeOf(raftid.ReplicaID(o.Message.GetTo())), group: g.id, msg: o.Message, data: buf.Bytes(), life: s.life})
	}
	if g.out.Install != nil {
		g.install = g.out.Install
	}
	if g.out.Detached != nil {
		g.detached = g.out.Detached
		w.stats.Detached++
	}
	for _, d := range g.out.Discard {
		if err := d.Close(); err != nil {
			w.fail("store %d group %d: %v", s.i, g.id, err)
		}
	}
	if g.out.Again {
		g.ready = true
	}
}

func (g *group) storeOf(r raftid.ReplicaID) int {
	if g.id == raftid.PDGroup {
		return int(r) - 1
	}
	for _, p := range g.s.w.boot.Regions[g.id-raftid.FirstRegion].Peers {
		if p.Replica == r {
			return int(p.Store) - 1
		}
	}
	return -1
}

// finishInstall performs a snapshot's installation. Some stores crash right after it, or soon.
func (g *group) finishInstall() {
	st, w := g.install, g.s.w
	g.install = nil
	if g.id == raftid.PDGroup {
		w.stats.PDInstalls++
	} else {
		w.stats.Installs++
	}
	w.event("s%d g%d installs", g.s.i, g.id)
	g.installed = &raftstore.Installed{Sink: st.Sink, Err: st.Sink.Install()}
	if !w.calm && !w.quiet && w.chance(w.aim.installs) {
		g.s.doomed = w.stats.Steps + w.rng.IntN(12)
	}
}

// finishDetached does what a replica left to be done beside its group.
func (g *group) finishDetached() {
	g.detached()
	g.detached = nil
	g.in.Detached, g.ready = true, true
}

// flushEngine makes applied state durable and tells the replicas (D6).
func (s *store) flushEngine() {
	s.engine.Flush()
	s.w.stats.Flushes++
	for _, id := range s.ids {
		g := s.groups[id]
		if g.replica == nil {
			continue
		}
		if !s.w.calm && s.w.chance(4) {
			continue // it hears of a later one
		}
		if pos, ok := s.engine.DurablePosition(uint64(id)); ok {
			if err := g.replica.DurableAt(pos); err != nil {
				s.w.fail("store %d region %d: %v", s.i, id, err)
			}
			g.wake()
		}
	}
}
