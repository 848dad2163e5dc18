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

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
	"go.etcd.io/etcd/tests/v3/robustness/validate"
	"go.uber.org/zap"

	"braid/cmd/tests/control"
	"braid/cmd/tests/netns"
	"braid/cmd/tests/proc"
)

const (
	nodes           = 3
	clientPort      = "2379"
	peerPort        = "2380"
	readyTimeout    = 40 * time.Second
	collectTimeout  = time.Minute
	validateTimeout = 5 * time.Minute
	reportDir       = "report" // below a round's, in the suite's own layout
	// writesMin is the acknowledged writes per second a cluster must reach before its fault.
	writesMin = 100
)

// round is one cluster, its traffic, one fault and the verdict. The exported results are valid after
// run, as far as it came.
type round struct {
	bin     string
	net     *netns.Net // nil: on the loopback interface
	profile profile
	seed    uint64
	fault   fault
	dir     string // for data, logs and, when something is wrong, the report

	rng     *rand.Rand
	cluster *proc.Cluster
	mover   control.Mover
	log     *zap.Logger

	calls, events, compactions int
	unknown, executed          int // writes without an answer, and how many of them were executed
	revision                   int64
	writesPerSecond            float64
	pause                      time.Duration // the longest without an acknowledged write, from the fault on
	changed                    []string
	spread                     *spread
	ended                      int // nodes whose record ends early
	checking                   time.Duration
}

// run does the round. Whatever is wrong, with the store or with the round, is an error.
func (r *round) run(ctx context.Context) (err error) {
	r.rng = rand.New(rand.NewPCG(r.seed, 1))
	if err := os.MkdirAll(r.dir, 0o755); err != nil {
		return err
	}
	cfg := zap.NewDevelopmentConfig()
	cfg.OutputPaths = []string{filepath.Join(r.dir, "validation.log")}
	cfg.DisableStacktrace = true
	if r.log, err = cfg.Build(); err != nil {
		return err
	}
	args := []string{
		"--region-split-keys=" + strings.Join(r.profile.splits, ","), "--experimental-committed-order",
		// As the suite starts its clusters. While a region has no leader its writes fail, reads do not,
		// and the search for a linearization suffers from every write that had no answer.
		"--watch-progress-notify-interval=100ms", "--heartbeat-interval=50", "--election-timeout=500",
	}
	if r.net == nil {
		if r.cluster, err = proc.NewCluster(r.bin, r.dir, nodes, args...); err != nil {
			return err
		}
	} else {
		places := make([]proc.Place, nodes)
		for i := range places {
			places[i] = proc.Place{Client: r.net.Addr(i) + ":" + clientPort, Peer: r.net.Addr(i) + ":" + peerPort, Wrap: r.net.Wrap(i)}
		}
		r.cluster = proc.NewClusterAt(r.bin, r.dir, places, args...)
	}
	r.mover = control.Mover{Control: control.Braid{Cluster: r.cluster}, Cluster: r.cluster, Rand: r.rng}
	defer func() { err = errors.Join(err, r.cluster.Kill()) }()
	startCtx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err := r.cluster.Start(startCtx); err != nil {
		return err
	}
	reports, err := r.drive(ctx)
	if err != nil {
		return err
	}
	if err := r.sameHash(ctx); err != nil {
		return err
	}
	requests, err := r.record(ctx)
	if err != nil {
		return err
	}
	return r.validate(reports, requests)
}

// sameHash compares the state of all nodes, as the suite does at the end of each test.
func (r *round) sameHash(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, collectTimeout)
	defer cancel()
	c, err := clientv3.New(clientv3.Config{Endpoints: r.cluster.Endpoints(), Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	defer c.Close()
	var first *clientv3.HashKVResponse
	for i, endpoint := range r.cluster.Endpoints() {
		h, err := c.HashKV(ctx, endpoint, r.revision)
		if err != nil {
			return fmt.Errorf("hash of node %d: %w", i+1, err)
		}
		if first == nil {
			first = h
		}
		if h.Header.Revision != first.Header.Revision || h.Hash != first.Hash || h.CompactRevision != first.CompactRevision || h.HashRevision != first.HashRevision {
			return fmt.Errorf("node %d differs: %v, node 1 %v", i+1, h, first)
		}
	}
	return nil
}

// validate saves what there is to judge and judges it.
func (r *round) validate(reports []report.ClientReport, requests []model.EtcdRequest) error {
	began := time.Now()
	defer func() { r.checking = time.Since(began) }()
	dir := filepath.Join(r.dir, reportDir)
	unique := r.profile.traffic.ExpectUniqueRevision()
	saved, err := report.NewTestReport(r.log, dir, nil, &report.TrafficDetail{ExpectUniqueRevision: unique})
	if err != nil {
		return err
	}
	saved.SetClientReports(reports)
	if err := saved.SaveEtcdData(); err != nil {
		return err
	}
	// In the suite's layout, without the data that a replay does not need.
	for _, n := range r.cluster.Nodes {
		if err := os.CopyFS(filepath.Join(dir, "server-"+n.Name, "member"), os.DirFS(filepath.Join(n.DataDir(), "member"))); err != nil {
			return err
		}
	}
	r.executed, err = judge(r.log, unique, reports, requests)
	return err
}

// judge runs our own comparison and the suite's validators. It returns how many of the unanswered
// writes were executed.
func judge(log *zap.Logger, unique bool, reports []report.ClientReport, requests []model.EtcdRequest) (executed int, err error) {
	if err := exact(reports, requests); err != nil {
		return 0, err
	}
	settled, executed, err := settle(reports, requests)
	if err != nil {
		return 0, err
	}
	result := validate.ValidateAndReturnVisualize(log, validate.Config{ExpectRevisionUnique: unique}, settled, requests, validateTimeout)
	if err := result.Error(); err != nil {
		return executed, err
	}
	// To the suite a check that was left out is no error.
	for _, part := range []validate.Result{result.Assumptions, result.Linearization.Result, result.Watch, result.Serializable} {
		if part.Status != validate.Success {
			return executed, fmt.Errorf("not all was checked: %+v", result)
		}
	}
	return executed, nil
}

// recheck judges the report of an earlier round.
func recheck(dir string) error {
	log, err := zap.NewDevelopment()
	if err != nil {
		return err
	}
	requests, err := report.LoadClusterPersistedRequests(log, dir)
	if err != nil {
		return err
	}
	reports, err := report.LoadClientReports(dir)
	if err != nil {
		return err
	}
	detail, err := report.LoadTrafficDetail(dir)
	if err != nil {
		return err
	}
	executed, err := judge(log, detail.ExpectUniqueRevision, reports, requests)
	log.Info("judged", zap.Int("executed without an answer", executed))
	return err
}

// line is the result in one line.
func (r *round) line() string {
	s := fmt.Sprintf("%d calls (%d writes without an answer, %d of them executed), longest pause of writes %s, revision %d, %.0f acknowledged writes/s before the fault, %d events at watchers, %d compactions, leaders changed: %s",
		r.calls, r.unknown, r.executed, r.pause.Round(time.Millisecond), r.revision, r.writesPerSecond, r.events, r.compactions, strings.Join(r.changed, " "))
	if r.spread != nil {
		s += fmt.Sprintf(", writes per region %v", r.spread.writes)
		if slices.Max(r.spread.spanning) > 0 {
			s += fmt.Sprintf(" (%v over several)", r.spread.spanning)
		}
	}
	if r.ended > 0 {
		s += fmt.Sprintf(", %d records ended by a snapshot", r.ended)
	}
	return s + ", checked in " + r.checking.Round(time.Millisecond).String()
}
