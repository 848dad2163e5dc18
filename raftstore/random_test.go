package raftstore

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/cryptotest"

	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
)

// TestRandom runs one group of three through lost, repeated and reordered messages, crashes to
// what was flushed, engines that are durable ahead of the log, truncation and snapshots, and
// checks that all replicas apply the same entries; afterwards that they agree and fall asleep.
func TestRandom(t *testing.T) {
	seeds := 400
	if testing.Short() || raceEnabled {
		seeds = 20
	}
	var total randomStats
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			cryptotest.SetGlobalRandom(t, uint64(seed))
			total.add(runRandom(t, uint64(seed), 3000, nil))
		})
	}
	t.Logf("%+v", total)
	if total.crashes == 0 || total.installs == 0 || total.applied == 0 || total.sleeps == 0 {
		t.Fatalf("the runs show too little: %+v", total)
	}
}

// TestRandomMutant: the check bites.
func TestRandomMutant(t *testing.T) {
	for seed := range uint64(200) {
		cryptotest.SetGlobalRandom(t, seed)
		probe := &probeT{TB: t}
		func() {
			defer func() {
				if v := recover(); v != nil && v != errProbe { // raft's own checks count too
					probe.failed = true
				}
			}()
			runRandom(probe, seed, 3000, &Mutants{EarlyAcknowledge: true})
		}()
		if probe.failed {
			return
		}
	}
	t.Fatal("acknowledging early goes unnoticed")
}

var errProbe = fmt.Errorf("stop")

// probeT notes a failure instead of failing.
type probeT struct {
	testing.TB
	failed bool
}

func (p *probeT) Fatalf(string, ...any) { p.failed = true; panic(errProbe) }
func (p *probeT) Helper()               {}

type randomStats struct{ crashes, installs, applied, sleeps int }

func (s *randomStats) add(o randomStats) {
	s.crashes += o.crashes
	s.installs += o.installs
	s.applied += o.applied
	s.sleeps += o.sleeps
}

func runRandom(t testing.TB, seed uint64, steps int, mutants *Mutants) (stats randomStats) {
	rng := rand.New(rand.NewPCG(seed, 1))
	e := &env{nodes: make(map[uint64]*envNode), cut: make(map[uint64]bool)}
	history := map[uint64]string{} // index -> what the first replica applied there
	watch := func(n *envNode) {
		n.toy.onApply = func(index, term uint64, data string) {
			what := fmt.Sprintf("%d %q", term, data)
			if was, ok := history[index]; ok && was != what {
				t.Fatalf("seed %d: replica %d applies %s at %d, another applied %s", seed, n.id, what, index, was)
			}
			history[index] = what
			stats.applied++
		}
		n.toy.note = nil
	}
	start := func(n *envNode) {
		n.start()
		if n.g == nil {
			t.Fatalf("seed %d: %s", seed, e.out.String())
		}
		watch(n)
	}
	for id := uint64(1); id <= 3; id++ {
		n := &envNode{e: e, id: id, disk: NewMemDisk(), toy: &toy{conf: &raftpb.ConfState{Voters: []uint64{1, 2, 3}}}}
		n.toy.durable.Index, n.toy.durable.Term = 5, 1
		n.cfg = GroupConfig{ID: 7, Replica: raftid.ReplicaID(id), KeepEntries: -1, KeepForFollowers: -1, QuiesceTicks: 3, LazyCommit: seed%2 == 1, Peers: storeOfReplica, Mutants: mutants}
		e.nodes[id] = n
		start(n)
	}
	proposed := 0
	for range steps {
		n := e.nodes[1+rng.Uint64N(3)]
		switch k := rng.IntN(100); {
		case k < 40 && len(e.net) > 0: // one message, out of order, now and then twice or never
			i := rng.IntN(len(e.net))
			if rng.IntN(3) > 0 {
				i = 0
			}
			m := e.net[i]
			if rng.IntN(20) > 0 {
				e.net = slices.Delete(e.net, i, i+1)
			}
			x := e.nodes[m.to]
			if rng.IntN(20) > 0 {
				if m.m != nil {
					x.in.Messages = append(x.in.Messages, m.m)
				} else {
					x.in.Controls = append(x.in.Controls, *m.c)
				}
				x.turn()
			}
		case k < 55:
			if !n.g.Asleep() {
				n.in.Ticks = 1
				n.turn()
			}
		case k < 70:
			n.disk.Flush(rng.IntN(4))
			n.turn()
		case k < 82:
			proposed++
			n.toy.queue = append(n.toy.queue, fmt.Sprint("c", proposed))
			n.in.Work = true
			n.turn()
		case k < 90:
			n.toy.persist(n.g.ConfState())
			n.toy.truncate = n.toy.durable.Index
			n.in.Work = true
			n.turn()
		case k < 93:
			if n.install != nil {
				n.finishInstall()
				stats.installs++
			}
			n.turn()
		case k < 94:
			if rng.IntN(2) == 0 {
				n.in.Wake = true
			} else {
				n.in.Down = append(n.in.Down, raftid.StoreID(1+rng.Uint64N(3))) // rightly or not
			}
			n.turn()
		case k < 95:
			stats.crashes++
			n.disk = n.disk.Crash()
			start(n)
		case k < 96:
			n.in.Transfer = raftid.ReplicaID(1 + rng.Uint64N(3))
			n.turn()
		default:
			n.turn()
		}
		if len(e.net) > 200 {
			e.net = e.net[100:]
		}
	}
	// Heal: everything arrives, all agree, all sleep.
	for round := range 400 {
		e.settle()
		asleep := 0
		for _, id := range e.ids() {
			if x := e.nodes[id]; x.g.Asleep() {
				asleep++
			} else {
				x.in.Ticks = 1
				x.turn()
			}
		}
		if asleep == 3 && len(e.net) == 0 {
			stats.sleeps++
			break
		}
		if round == 399 {
			t.Fatalf("seed %d: the group does not come to rest: %s; %s; %s", seed, e.nodes[1].g.Status(), e.nodes[2].g.Status(), e.nodes[3].g.Status())
		}
	}
	for _, id := range e.ids() {
		if x := e.nodes[id]; x.toy.applied != e.nodes[1].toy.applied || !slices.Equal(x.toy.state, e.nodes[1].toy.state) {
			t.Fatalf("seed %d: replica %d is at %v with %v, replica 1 at %v with %v", seed, id, x.toy.applied, x.toy.state, e.nodes[1].toy.applied, e.nodes[1].toy.state)
		}
	}
	return stats
}
