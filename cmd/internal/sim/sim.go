// Package sim runs a whole cluster in one goroutine, from a seed, with the product's own cores:
// raft groups (raftstore.Group around raft's RawNode), pd's members and oracle, each store's
// oracle client, the regions' replicas with evaluation, order intake and apply, its watches and the
// time of its leases; or a cluster in single-group mode. Only what is below and between them is
// simulated: disks, the state engine, the network, clients and time.
//
// Messages are lost, delayed, duplicated and reordered, stores and links are cut off, stores
// crash to what their disks had flushed and come back, clocks stand still, leaders change, logs
// are cut so short that snapshots are needed. While that goes on, and after everything was
// healed, checkers hold what happened against the invariants I1 to I8 (see checker).
//
// It is not a model of the protocol: nothing is decided here. One World belongs to one goroutine.
// A run is a function of its Config and of raft's election jitter, which the caller must take
// from the same seed (testing/cryptotest); then it repeats exactly.
package sim

import (
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"runtime/debug"
	"strings"
	"time"

	"braid/mvcc"
	"braid/pd"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// Config is one run.
type Config struct {
	Seed    uint64
	Steps   int // before everything is healed; a step is a millisecond
	Regions int // default 4
	Mutant  string
	// Aim biases the schedule towards what a rule is about; see aims.
	Aim   string
	Trace io.Writer // every event in a line, nil for none
}

// Result is what a run did.
type Result struct {
	Err   error // the first violation
	Stats Stats
	Hash  uint64 // of all events in order: equal runs have equal hashes
}

const storesMax = 3 // of a cluster; an aim may have one

// World is a cluster in one goroutine.
type World struct {
	cfg     Config
	rng     *rand.Rand
	aim     aim
	mut     mutants
	now     time.Duration
	calm    bool // healing: no faults
	quiet   bool // no faults either, but requests as ever; see progress.go
	quietAt time.Duration
	stores  []*store
	net     network
	stopped int // the store whose clock stands still, -1 for none
	deposed deposal
	boot    *pd.Bootstrap
	check   *checker
	stats   Stats
	hash    interface {
		io.Writer
		Sum64() uint64
	}
	err error
}

// Run runs one schedule and checks it.
func Run(cfg Config) Result {
	w := newWorld(cfg)
	if w.err == nil {
		w.guard(func() {
			w.steps(cfg.Steps)
			w.heal()
			w.check.final()
		})
	}
	return w.result()
}

// newWorld describes the cluster and starts all stores.
func newWorld(cfg Config) *World {
	if cfg.Regions == 0 {
		cfg.Regions = 4
	}
	w := &World{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x6272616964)), stopped: -1, hash: fnv.New64a()}
	w.check = newChecker(w)
	w.err = w.setUp()
	return w
}

// guard turns a panic of the product into a violation.
func (w *World) guard(f func()) {
	defer func() {
		if p := recover(); p != nil && w.err == nil {
			w.err = fmt.Errorf("step %d: panic: %v\n%s", w.stats.Steps, p, debug.Stack())
		}
	}()
	f()
}

func (w *World) steps(n int) {
	for range n {
		if w.err != nil {
			return
		}
		w.stats.Steps++
		w.now += time.Millisecond
		w.step()
	}
}

func (w *World) result() Result {
	for _, s := range w.stores {
		if s != nil {
			s.countStats()
		}
	}
	w.stats.Revisions = int(w.check.mark.Rev)
	return Result{Err: w.err, Stats: w.stats, Hash: w.hash.Sum64()}
}

func (w *World) setUp() error {
	var ok bool
	if w.mut, ok = mutantByName(w.cfg.Mutant); !ok {
		return fmt.Errorf("no mutant %q", w.cfg.Mutant)
	}
	if w.aim, ok = aims[w.cfg.Aim]; !ok {
		return fmt.Errorf("no aim %q", w.cfg.Aim)
	}
	w.boot = &pd.Bootstrap{ClusterID: 7, Mode: pdpb.MultiGroup}
	if w.aim.regions > 0 {
		w.cfg.Regions = w.aim.regions
	}
	if w.aim.oneGroup {
		w.cfg.Regions, w.boot.Mode = 1, pdpb.SingleGroup
	}
	n := storesMax
	if w.aim.single {
		n = 1
	}
	for i := range n {
		w.boot.Stores = append(w.boot.Stores, pdpb.Store{ID: storeID(i), Name: fmt.Sprintf("s%d", i+1)})
	}
	var start []byte
	for r := range w.cfg.Regions {
		var end []byte
		if r < w.cfg.Regions-1 {
			end = key((r + 1) * keysPerRegion)
		}
		d := pdpb.Descriptor{ID: raftid.FirstRegion + raftid.GroupID(r), Span: mvcc.Span{Start: start, End: end}, Epoch: 1, Incarnation: 1, StartIndex: 10, StartTerm: 1}
		for j := range n {
			d.Peers = append(d.Peers, pdpb.Peer{Replica: raftid.ReplicaID(j + 1), Store: storeID((r + j) % n)})
		}
		w.boot.Regions = append(w.boot.Regions, d)
		start = end
	}
	for i := range n {
		w.stores = append(w.stores, newStore(w, i))
	}
	for _, s := range w.stores {
		if err := s.start(); err != nil {
			return err
		}
	}
	return nil
}

func storeID(i int) raftid.StoreID { return raftid.StoreID(i + 1) }

// key is the i-th key; keys of one region are neighbours.
func key(i int) []byte { return fmt.Appendf(nil, "k%02d", i) }

const keysPerRegion = 4

func (w *World) region(i int) *pdpb.Descriptor { return &w.boot.Regions[i] }

// chance is true once in n times; never for n = 0.
func (w *World) chance(n int) bool { return n > 0 && w.rng.IntN(n) == 0 }

// fail records the first violation.
func (w *World) fail(format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf("step %d: %s", w.stats.Steps, fmt.Sprintf(format, args...))
		w.event("VIOLATION %v", w.err)
	}
}

// event puts what happened into the trace and its hash.
func (w *World) event(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	io.WriteString(w.hash, line)
	if w.cfg.Trace != nil {
		fmt.Fprintf(w.cfg.Trace, "%6d %s\n", w.stats.Steps, strings.TrimRight(line, "\n"))
	}
}
