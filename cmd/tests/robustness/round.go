package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"braid/cmd/tests/control"
	"braid/cmd/tests/proc"
)

// Fault is what a round does to its cluster.
type Fault string

const (
	KillLeader  Fault = "kill -9 a region's leader"
	KillOracle  Fault = "kill -9 the oracle's leader"
	KillRandom  Fault = "kill -9 a node"
	KillAll     Fault = "kill -9 all nodes"
	PauseLeader Fault = "stop a region's leader"
	PauseOracle Fault = "stop the oracle's leader"
	PauseRandom Fault = "stop a node"
	Transfers   Fault = "leader transfers"
)

// faults in the order in which rounds take them.
var faults = []Fault{KillLeader, PauseOracle, Transfers, KillOracle, PauseLeader, KillRandom, KillAll, PauseRandom}

// Round times.
const (
	readyTimeout = 40 * time.Second
	beforeFault  = 2500 * time.Millisecond
	downTime     = 2500 * time.Millisecond // longer than an election
	afterFault   = 2 * time.Second
	readTimeout  = 2 * time.Minute
	checkTimeout = time.Minute
	windowsMax   = 4 // of beforeFault, to reach ackedMin
)

// ackedMin is the acknowledged writes per second a cluster must reach before its fault: a slow
// round proves little, so it does not count.
const ackedMin = 100

// RoundConfig says how to run a round.
type RoundConfig struct {
	Bin     string
	Regions bool // braid with regions, false: etcd
	Seed    uint64
	Fault   Fault
	Dir     string // for data, logs and the history; kept when the round fails
	Plant   Plant
	Args    []string
}

// RoundResult is what a round shows.
type RoundResult struct {
	Ops, Writes, Unknown int
	Spread               int     // acknowledged writes over several regions
	AckedPerSecond       float64 // before the fault
	Revisions            int64
	Changed              []string // groups that changed leader or term
	Compacted            int64
	CheckTime            time.Duration
	Violations           []string // by checker
}

// round is a running round.
type round struct {
	cfg     RoundConfig
	rng     *rand.Rand
	cluster *proc.Cluster
	mover   control.Mover
	traffic *Traffic
	past    *past
	result  *RoundResult
}

// RunRound starts three nodes on empty data, runs traffic through a fault, stops, reads the past
// and checks. An error means the round could not be run; violations are in the result.
func RunRound(ctx context.Context, cfg RoundConfig) (result *RoundResult, err error) {
	args := slices.Clone(cfg.Args)
	if cfg.Regions {
		args = append(args, "--region-split-keys="+splitKeys)
	}
	cluster, err := proc.NewCluster(cfg.Bin, cfg.Dir, 3, args...)
	if err != nil {
		return nil, err
	}
	r := &round{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 1)), cluster: cluster, result: &RoundResult{}}
	r.mover = control.Mover{Control: control.Etcd{Cluster: cluster}, Cluster: cluster, Rand: r.rng}
	if cfg.Regions {
		r.mover.Control = control.Braid{Cluster: cluster}
	}
	defer func() { err = errors.Join(err, cluster.Kill()) }()
	startCtx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err := cluster.Start(startCtx); err != nil {
		return nil, err
	}
	history, err := r.run(ctx)
	if err != nil {
		return r.result, err
	}
	r.check(history)
	if len(r.result.Violations) > 0 {
		path := filepath.Join(cfg.Dir, "history.jsonl")
		if err := history.Save(path); err != nil {
			return r.result, err
		}
	}
	return r.result, nil
}

func (r *round) run(ctx context.Context) (*History, error) {
	before, err := r.mover.Find(ctx)
	if err != nil {
		return nil, err
	}
	r.traffic = NewTraffic(r.cluster.Endpoints(), r.cfg.Seed, r.cfg.Plant)
	if r.past, err = newPast(r.traffic); err != nil {
		return nil, err
	}
	defer r.past.close()
	if err := r.firstRead(ctx); err != nil {
		return nil, err
	}
	if err := r.traffic.Start(ctx); err != nil {
		return nil, err
	}
	defer r.traffic.Stop()
	if err := r.warm(ctx); err != nil {
		return nil, err
	}
	if err := r.fault(ctx, before); err != nil {
		return nil, fmt.Errorf("%s: %w", r.cfg.Fault, err)
	}
	if err := proc.Wait(ctx, afterFault); err != nil {
		return nil, err
	}
	if r.result.Changed, err = r.mover.EnsureChange(ctx, before); err != nil {
		return nil, err
	}
	if err := proc.Wait(ctx, afterFault/2); err != nil { // with traffic under the last leader
		return nil, err
	}
	r.traffic.Stop()
	return r.collect(ctx)
}

// firstRead records a read at revision 1: the store is fresh, as etcd's checker wants to see.
func (r *round) firstRead(ctx context.Context) error {
	c, err := r.traffic.newClient(clients + 1)
	if err != nil {
		return err
	}
	defer func() {
		for _, conn := range c.conns {
			_ = conn.Close() // the read is in
		}
	}()
	return proc.Poll(ctx, 100*time.Millisecond, func() (bool, error) {
		op := &Op{ID: int(r.traffic.ids.Add(1)), Client: c.id, Req: everyKey()}
		sent := c.call(ctx, op)
		if sent {
			r.traffic.record(op)
		}
		return sent && op.OK(), nil
	})
}

// warm lets traffic run and measures it.
func (r *round) warm(ctx context.Context) error {
	if err := proc.Wait(ctx, beforeFault/5); err != nil { // connections are made
		return err
	}
	// A window in which a busy machine had no time for the cluster may be followed by better ones.
	for range windowsMax {
		from, acked := time.Now(), r.traffic.Acked()
		if err := proc.Wait(ctx, beforeFault); err != nil {
			return err
		}
		r.result.AckedPerSecond = float64(r.traffic.Acked()-acked) / time.Since(from).Seconds()
		if r.result.AckedPerSecond >= ackedMin {
			break
		}
	}
	if r.result.AckedPerSecond < ackedMin {
		return fmt.Errorf("only %.0f acknowledged writes per second before the fault, %d are needed", r.result.AckedPerSecond, ackedMin)
	}
	// One round in three removes old revisions while traffic runs, so that reads of the past meet
	// the compaction.
	if r.rng.IntN(3) == 0 {
		compactCtx, cancel := context.WithTimeout(ctx, readTimeout)
		defer cancel()
		r.result.Compacted = r.traffic.newest.Load() - pastRevisions/2
		if r.result.Compacted > 1 {
			return r.past.compact(compactCtx, r.result.Compacted)
		}
	}
	return nil
}

// fault does the round's fault and repairs it.
func (r *round) fault(ctx context.Context, leaders control.Leaders) error {
	regions := leaders.Regions()
	victim := r.rng.IntN(len(r.cluster.Nodes))
	switch r.cfg.Fault {
	case KillLeader, PauseLeader:
		victim = leaders[regions[r.rng.IntN(len(regions))]].Node
	case KillOracle, PauseOracle:
		victim = leaders[control.Oracle].Node
	}
	node := r.cluster.Nodes[victim]
	switch r.cfg.Fault {
	case KillLeader, KillOracle, KillRandom:
		if err := node.Kill(); err != nil {
			return err
		}
		if err := proc.Wait(ctx, downTime); err != nil {
			return err
		}
		readyCtx, cancel := context.WithTimeout(ctx, readyTimeout)
		defer cancel()
		return node.Start(readyCtx)
	case KillAll:
		if err := r.cluster.Kill(); err != nil {
			return err
		}
		readyCtx, cancel := context.WithTimeout(ctx, readyTimeout)
		defer cancel()
		return r.cluster.Start(readyCtx)
	case PauseLeader, PauseOracle, PauseRandom:
		if err := node.Pause(); err != nil {
			return err
		}
		return errors.Join(proc.Wait(ctx, downTime), node.Resume())
	case Transfers:
		for range 4 {
			now, err := r.mover.Find(ctx)
			if err != nil {
				return err
			}
			groups := append(now.Regions(), control.Oracle)
			if err := r.mover.Move(ctx, now, groups[r.rng.IntN(len(groups))]); err != nil {
				return err
			}
			if err := proc.Wait(ctx, 400*time.Millisecond); err != nil {
				return err
			}
		}
	}
	return nil
}

// collect reads the rest of the past and makes the history.
func (r *round) collect(ctx context.Context) (*History, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	last, err := r.past.current(ctx)
	if err != nil {
		return nil, err
	}
	if err := r.past.readThrough(ctx, last); err != nil {
		return nil, err
	}
	h := &History{Seed: r.cfg.Seed, Ops: r.traffic.Ops(), States: r.past.states}
	r.result.Ops, r.result.Revisions = len(h.Ops), last
	for _, op := range h.Ops {
		if op.IsWrite() {
			r.result.Writes++
			switch {
			case !op.OK():
				r.result.Unknown++
			case op.Wrote() && op.Regions() > 1:
				r.result.Spread++
			}
		}
	}
	if r.result.Spread == 0 {
		return nil, errors.New("no write over several regions was acknowledged in this round")
	}
	return h, nil
}

// check runs all checkers.
func (r *round) check(h *History) {
	started := time.Now()
	for _, checker := range checkers {
		for _, violation := range checker.check(h) {
			r.result.Violations = append(r.result.Violations, checker.name+": "+violation)
		}
	}
	r.result.CheckTime = time.Since(started)
}

var checkers = []struct {
	name  string
	check func(*History) []string
}{
	{"order", CheckOrder},
	{"keys", func(h *History) []string { return CheckKeys(h, checkTimeout) }},
	{"etcd", func(h *History) []string { return CheckEtcd(h, checkTimeout) }},
}

// Line is the result in one line.
func (res *RoundResult) Line() string {
	verdict := "ok"
	if len(res.Violations) > 0 {
		verdict = fmt.Sprintf("%d VIOLATIONS", len(res.Violations))
	}
	line := fmt.Sprintf("%d calls, %d writes (%.0f acked/s before the fault, %d over several regions, %d unknown), %d revisions", res.Ops, res.Writes, res.AckedPerSecond, res.Spread, res.Unknown, res.Revisions)
	if res.Compacted > 1 {
		line += fmt.Sprintf(", compacted at %d", res.Compacted)
	}
	return fmt.Sprintf("%s, leaders changed: %s; checked in %s: %s", line, strings.Join(res.Changed, " "), res.CheckTime.Round(10*time.Millisecond), verdict)
}

// keep says where a failed round's files are, and removes those of a good one.
func keep(dir string, failed bool) (string, error) {
	if failed {
		return "files kept in " + dir, nil
	}
	return "", os.RemoveAll(dir)
}
