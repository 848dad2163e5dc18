package sim

import (
	"go.etcd.io/raft/v3"

	"braid/pd"
	"braid/pd/order"
	"braid/raftstore"
	"braid/raftstore/raftid"
	"braid/region"
)

// aim biases a schedule. Rules that random schedules seldom touch have one of their own.
type aim struct {
	reorder    int // how far ahead in the queue a packet may be taken
	loss       int // one packet in so many is lost
	crash      int // of 10,000 steps
	partition  int
	transfer   int
	fence      int
	flush      int // of the engine
	restart    int // of 1,000 steps of a store that is down
	lateStream int // one in so many client ticks is skipped: streams lag
	reconcile  int // one in so many steps with news from the directory
	ops        int // of 1,000 steps
	reads      int
	logFlush   int
}

var plain = aim{reorder: 12, loss: 40, crash: 20, partition: 20, transfer: 40, fence: 10, flush: 250, restart: 60,
	lateStream: 4, reconcile: 3, ops: 140, reads: 60, logFlush: 160}

func vary(f func(*aim)) aim {
	a := plain
	f(&a)
	return a
}

var aims = map[string]aim{
	"": plain,
	// Long partitions and many elections: deposed leaders that do not know.
	"partition": vary(func(a *aim) { a.partition, a.transfer, a.crash, a.reads = 120, 60, 10, 150 }),
	// Logs that are cut short, snapshots, crashes between flushes.
	"snapshot": vary(func(a *aim) { a.flush, a.crash, a.partition = 600, 70, 60 }),
	// State that is seldom flushed and stores that crash often.
	"crash": vary(func(a *aim) { a.flush, a.crash, a.logFlush, a.restart = 60, 120, 80, 200 }),
	// Streams that lag behind the regions, resubscriptions.
	"stream": vary(func(a *aim) { a.lateStream, a.loss, a.reads = 2, 15, 200 }),
	// Replicas that hear of their region from its leader before they hear of it from pd.
	"bootstrap": vary(func(a *aim) { a.reconcile, a.crash, a.reorder = 400, 60, 40 }),
	// Fences under load.
	"fence": vary(func(a *aim) { a.fence, a.ops, a.lateStream = 250, 300, 2 }),
}

// mutants are the rules that a run drops, by layer.
type mutants struct {
	raft          raftstore.Mutants
	region        region.Mutants
	order         order.Mutants
	pd            pd.Mutants
	sharedFsync   bool
	storeMark     bool
	ingestNoFlush bool
	logger        raft.Logger
}

// Mutant is a rule dropped on purpose and the aim that shows its loss.
type Mutant struct {
	Name, Rule, Aim string
	set             func(*mutants)
}

// Mutants are all rules that can be dropped; each must be caught.
var Mutants = []Mutant{
	{"evalearly", "E2", "", func(m *mutants) { m.region.EvalEarly = true }},
	{"forward", "E1", "partition", func(m *mutants) { m.region.Forward, m.raft.Forward = true, true }},
	{"commitfromitem", "O1", "partition", func(m *mutants) { m.region.CommitFromItem = true }},
	{"sealuncommitted", "P4", "partition", func(m *mutants) { m.region.SealUncommitted = true }},
	{"truncapplied", "D6", "crash", func(m *mutants) { m.region.TruncApplied = true }},
	{"snapnocum", "D1", "snapshot", func(m *mutants) { m.region.SnapNoCum = true }},
	{"delta", "P1", "", func(m *mutants) { m.order.Delta, m.pd.Delta = true, true }},
	{"fromidx", "P2", "", func(m *mutants) { m.region.FromIdx = true }},
	{"noquorum", "S1", "partition", func(m *mutants) { m.pd.ReadPointWithoutQuorum = true }},
	{"storemark", "S2", "stream", func(m *mutants) { m.storeMark = true; m.order.PerStoreMark = true }},
	{"lrev", "S1", "stream", func(m *mutants) { m.region.LRevision = true }},
	{"sharedfsync", "A1", "partition", func(m *mutants) { m.sharedFsync = true }},
	{"sealping", "O2", "", func(m *mutants) { m.region.SealPing = true }},
	{"ingestnoflush", "D3", "snapshot", func(m *mutants) { m.ingestNoFlush = true }},
	{"nouninit", "B6", "bootstrap", func(m *mutants) { m.raft.NoUninitialisedVoters = true }},
	{"nofence", "F2", "fence", func(m *mutants) { m.region.NoFence, m.order.NoFence, m.pd.NoFence = true, true, true }},
	{"earlyack", "I8", "crash", func(m *mutants) { m.raft.EarlyAcknowledge = true }},
	{"earlyread", "A13", "partition", func(m *mutants) { m.pd.EarlyRead = true }},
	{"forgetall", "P4", "stream", func(m *mutants) { m.order.ForgetAll, m.pd.ForgetAll = true, true }},
}

func mutantByName(name string) (mutants, bool) {
	m := mutants{}
	if name == "" {
		return m, true
	}
	for _, x := range Mutants {
		if x.Name == name {
			x.set(&m)
			return m, true
		}
	}
	return m, false
}

// step does one random thing.
func (w *World) step() {
	s := w.stores[w.rng.IntN(stores)]
	a := &w.aim
	if x := w.rng.IntN(10000); x < a.crash+a.partition+a.transfer+a.fence {
		w.fault(s, x)
		return
	}
	if !s.up {
		if w.rng.IntN(1000) < a.restart {
			w.restart(s)
		} else {
			w.deliverSome(3)
		}
		return
	}
	if w.rng.IntN(60) == 0 {
		if g := w.leaderless(); g != nil {
			g.in.Campaign, g.ready = true, true
		}
	}
	if s.dirNews && w.rng.IntN(a.reconcile) == 0 {
		if err := s.reconcile(); err != nil {
			w.fail("store %d: %v", s.i, err)
		}
	}
	defer w.breathe()
	x := w.rng.IntN(1000)
	take := func(n int) bool {
		x -= n
		return x < 0
	}
	switch {
	case take(a.ops):
		w.check.clientOp()
	case take(a.reads):
		w.check.clientRead()
	case take(a.logFlush):
		n := s.disk.Pending()
		if n > 0 && w.rng.IntN(3) == 0 {
			n = w.rng.IntN(n) + 1
		}
		s.disk.Flush(n)
	case take(a.flush / 10):
		s.flushEngine()
	case take(90):
		w.tick(s)
	case take(260):
		w.deliverSome(4 + w.rng.IntN(12))
	default:
		w.work(s, 6)
	}
}

// breathe lets everybody do a little, so that most steps of a schedule find a cluster that moves.
func (w *World) breathe() {
	for _, s := range w.stores {
		if !s.up || w.rng.IntN(4) == 0 {
			continue
		}
		w.work(s, 3)
		if w.rng.IntN(1000) < 2*w.aim.logFlush {
			s.disk.Flush(-1)
		}
	}
	w.deliverSome(6)
}

// fault is something that goes wrong, or a leader that moves.
func (w *World) fault(s *store, x int) {
	a := &w.aim
	switch {
	case x < a.crash:
		if s.up {
			w.event("s%d crashes", s.i)
			w.stats.Crashes++
			s.crash()
		}
	case x < a.crash+a.partition:
		w.cut = w.rng.IntN(stores+2) - 2
		w.stats.Partitions++
		w.event("cut off: %d", w.cut)
	case x < a.crash+a.partition+a.transfer:
		if !s.up || len(s.ids) == 0 {
			return
		}
		g := s.groups[s.ids[w.rng.IntN(len(s.ids))]]
		if w.leaderless() != nil {
			g = w.leaderless()
		}
		if w.rng.IntN(2) == 0 {
			g.in.Transfer = raftid.ReplicaID(w.rng.IntN(stores) + 1)
		} else {
			g.in.Campaign = true
		}
		g.ready = true
	default:
		w.check.raiseFence(s)
	}
}

// leaderless is a replica of a group that nobody leads, nil when all are led.
func (w *World) leaderless() *group {
	for i := range w.boot.Regions {
		id := w.boot.Regions[i].ID
		var any *group
		led := false
		for _, s := range w.stores {
			if g := s.groups[id]; s.up && g != nil {
				led = led || g.g.Status().Leading
				if any == nil || w.rng.IntN(2) == 0 {
					any = g
				}
			}
		}
		if !led && any != nil {
			return any
		}
	}
	return nil
}

func (w *World) restart(s *store) {
	w.event("s%d restarts", s.i)
	w.stats.Restarts++
	if err := s.start(); err != nil {
		w.fail("store %d does not start: %v", s.i, err)
	}
}

// tick lets time pass at a store.
func (w *World) tick(s *store) {
	for _, id := range s.ids {
		g := s.groups[id]
		if !g.g.Asleep() {
			g.in.Ticks = 1
			g.ready = true
		}
		if g.replica != nil {
			g.replica.Tick()
		}
	}
	if w.calm || w.rng.IntN(w.aim.lateStream) == 0 {
		s.client.Tick(w.now)
		s.member.Tick()
	}
}

// work gives up to n groups that have something to do a turn.
func (w *World) work(s *store, n int) {
	for range n {
		var ready []*group
		for _, id := range s.ids {
			if g := s.groups[id]; g.ready || g.install != nil {
				ready = append(ready, g)
			}
		}
		if len(ready) == 0 || w.err != nil {
			return
		}
		g := ready[w.rng.IntN(len(ready))]
		if g.install != nil {
			if w.calm || w.rng.IntN(3) == 0 {
				g.finishInstall()
			}
		}
		if g.ready {
			g.turn()
		}
	}
}

// heal ends all faults and lets the cluster come to rest.
func (w *World) heal() {
	const rounds = 900
	w.calm, w.cut = true, -1
	w.event("healing")
	var why string
	for round := range rounds {
		w.now += 1e6
		for _, s := range w.stores {
			if !s.up {
				w.restart(s)
			}
			if w.err != nil {
				return
			}
			if s.dirNews {
				if err := s.reconcile(); err != nil {
					w.fail("store %d: %v", s.i, err)
					return
				}
			}
			s.disk.Flush(-1)
			w.work(s, 40)
			w.deliverSome(60)
			if round%3 == 0 {
				w.tick(s)
			}
			if round%20 == 0 {
				s.flushEngine()
			}
		}
		w.check.pollReads()
		if w.err != nil {
			return
		}
		if round > 30 {
			if why = w.check.unrest(); why == "" {
				break
			}
		}
	}
	if why != "" {
		w.fail("LIVENESS: after %d rounds of healing %s", rounds, why)
		return
	}
	w.check.silence()
}
