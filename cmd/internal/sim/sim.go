// Package sim runs a whole cluster in one goroutine, from a seed, with the product's own cores:
// raft groups (raftstore.Group around raft's RawNode), pd's member and oracle, each store's oracle
// client, and the regions' replicas with evaluation, order intake and apply. Only what is below
// and between them is simulated: disks, the state engine, the network and time.
//
// Messages are lost, delayed, duplicated and reordered, stores are cut off, crash to what their
// disks had flushed, and come back; leaders change; logs are cut so short that snapshots are
// needed. While that goes on, and after everything was healed, checkers (check.go) hold what
// happened against the invariants I1 to I6 and I8.
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
	Steps   int
	Regions int // default 4
	Mutant  string
	// Aim biases the schedule towards what a rule is about; see aims.
	Aim   string
	Trace io.Writer // every step in a line, nil for none
}

// Result is what a run did.
type Result struct {
	Err   error // the first violation
	Stats Stats
	Hash  uint64 // of everything that happened in order: equal runs have equal hashes
}

// Stats counts what a run did; it is also how one sees that a schedule does its work.
type Stats struct {
	Steps, Turns, Delivered, Lost, Duplicated   int
	Crashes, Restarts, Partitions, Elections    int
	Ops, Acked, Unknown, Refused, Void          int
	Reads, Served, Cuts, Items, Fences          int
	Snapshots, Installs, Uninitialised, Flushes int
	Revision                                    mvcc.Revision
}

// Add adds up.
func (s *Stats) Add(o Stats) {
	for _, p := range [...][2]*int{
		{&s.Steps, &o.Steps}, {&s.Turns, &o.Turns}, {&s.Delivered, &o.Delivered}, {&s.Lost, &o.Lost}, {&s.Duplicated, &o.Duplicated},
		{&s.Crashes, &o.Crashes}, {&s.Restarts, &o.Restarts}, {&s.Partitions, &o.Partitions}, {&s.Elections, &o.Elections},
		{&s.Ops, &o.Ops}, {&s.Acked, &o.Acked}, {&s.Unknown, &o.Unknown}, {&s.Refused, &o.Refused}, {&s.Void, &o.Void},
		{&s.Reads, &o.Reads}, {&s.Served, &o.Served}, {&s.Cuts, &o.Cuts}, {&s.Items, &o.Items}, {&s.Fences, &o.Fences},
		{&s.Snapshots, &o.Snapshots}, {&s.Installs, &o.Installs}, {&s.Uninitialised, &o.Uninitialised}, {&s.Flushes, &o.Flushes},
	} {
		*p[0] += *p[1]
	}
	s.Revision += o.Revision
}

// String prints the counts in one line.
func (s Stats) String() string {
	return fmt.Sprintf("steps %d turns %d delivered %d lost %d dup %d | crashes %d restarts %d partitions %d elections %d | "+
		"ops %d acked %d unknown %d refused %d void %d | reads %d/%d cuts %d items %d fences %d | snapshots %d installs %d uninitialised %d flushes %d | revisions %d",
		s.Steps, s.Turns, s.Delivered, s.Lost, s.Duplicated, s.Crashes, s.Restarts, s.Partitions, s.Elections,
		s.Ops, s.Acked, s.Unknown, s.Refused, s.Void, s.Served, s.Reads, s.Cuts, s.Items, s.Fences,
		s.Snapshots, s.Installs, s.Uninitialised, s.Flushes, s.Revision)
}

const stores = 3

// World is a cluster in one goroutine.
type World struct {
	cfg    Config
	rng    *rand.Rand
	aim    aim
	mut    mutants
	now    time.Duration
	calm   bool // healing: no faults
	stores [stores]*store
	net    []*packet
	cut    int // store that is cut off, -1 for none
	boot   *pd.Bootstrap
	check  *checker
	stats  Stats
	hash   interface {
		io.Writer
		Sum64() uint64
	}
	err error
}

// Run runs one schedule and checks it.
func Run(cfg Config) (res Result) {
	if cfg.Regions == 0 {
		cfg.Regions = 4
	}
	w := &World{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x6272616964)), cut: -1, hash: fnv.New64a()}
	defer func() {
		if p := recover(); p != nil {
			if w.err == nil {
				w.err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
			}
		}
		w.stats.Revision = w.check.revision()
		res = Result{Err: w.err, Stats: w.stats, Hash: w.hash.Sum64()}
	}()
	w.check = newChecker(w)
	if w.err = w.setUp(); w.err != nil {
		return
	}
	for w.stats.Steps < cfg.Steps && w.err == nil {
		w.stats.Steps++
		w.now += time.Millisecond
		w.step()
	}
	if w.err == nil {
		w.heal()
	}
	if w.err == nil {
		w.check.final()
	}
	return
}

// setUp describes the cluster and starts all stores.
func (w *World) setUp() error {
	var ok bool
	if w.mut, ok = mutantByName(w.cfg.Mutant); !ok {
		return fmt.Errorf("no mutant %q", w.cfg.Mutant)
	}
	if w.aim, ok = aims[w.cfg.Aim]; !ok {
		return fmt.Errorf("no aim %q", w.cfg.Aim)
	}
	w.boot = &pd.Bootstrap{ClusterID: 7, Mode: pdpb.MultiGroup}
	for i := range stores {
		w.boot.Stores = append(w.boot.Stores, pdpb.Store{ID: storeID(i), Name: fmt.Sprintf("s%d", i+1)})
	}
	var start []byte
	for r := range w.cfg.Regions {
		var end []byte
		if r < w.cfg.Regions-1 {
			end = key((r + 1) * keysPerRegion)
		}
		d := pdpb.Descriptor{ID: raftid.FirstRegion + raftid.GroupID(r), Span: mvcc.Span{Start: start, End: end}, Epoch: 1, Incarnation: 1, StartIndex: 10, StartTerm: 1}
		for j := range stores {
			d.Peers = append(d.Peers, pdpb.Peer{Replica: raftid.ReplicaID(j + 1), Store: storeID((r + j) % stores)})
		}
		w.boot.Regions = append(w.boot.Regions, d)
		start = end
	}
	for i := range w.stores {
		w.stores[i] = newStore(w, i)
		if err := w.stores[i].start(); err != nil {
			return err
		}
	}
	return nil
}

func storeID(i int) raftid.StoreID { return raftid.StoreID(i + 1) }

// key is the i-th key; keys of one region are neighbours.
func key(i int) []byte { return fmt.Appendf(nil, "k%02d", i) }

const keysPerRegion = 4

func (w *World) keys() int { return w.cfg.Regions * keysPerRegion }

func (w *World) regionOf(k int) *pdpb.Descriptor { return &w.boot.Regions[k/keysPerRegion] }

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
