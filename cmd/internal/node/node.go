// Package node assembles one node of a cluster from top to bottom: the state engine and the log,
// the raft groups of its store, its member of the placement group, the replicas of its regions,
// the way to other nodes, and the gateway that clients talk to.
//
// It is wiring: what is decided is decided in the packages it puts together. What it owns are the
// listeners, the goroutines that bring the time, flush, collect garbage and create replicas, and
// the order in which everything starts and stops.
//
// The life of a node: the ports are bound, the data directory is checked, the log and the engine recover, the groups
// that were here start again; the peer listener opens; once the cluster's directory is known the
// replicas that belong here and are missing are created; the node registers itself, and that
// answer (given by a quorum of pd) is when the gateway begins to serve, once the leaders of the
// regions here are known. A node that stops hands over what it leads before anything else.
package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"braid/cmd/internal/admin"
	"braid/cmd/internal/config"
	"braid/cmd/internal/orderlog"
	"braid/gateway"
	"braid/leasesvc"
	"braid/mvcc/engine"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/raftstore/raftid"
	"braid/raftstore/transport"
	"braid/raftstore/wal"
	"braid/router"
	"braid/watchsvc"
)

// Node is a running node. Start returns one; Stop ends it.
type Node struct {
	cfg      *config.Config
	tuning   tuning
	log      *zap.Logger
	self     raftid.StoreID
	cluster  uint64 // the cluster's id; hashing it anew for each answer's header would show in profiles
	members  []config.Member
	registry *prometheus.Registry

	engine  *engine.Engine
	wal     *wal.Log
	net     *transport.Transport
	store   *raftstore.Store
	oracle  oracle
	regions *regions
	stores  *stores
	gateway *gateway.Server
	watches *watchsvc.Hub
	// followed answers other nodes about regions here, elsewhere asks them about those that are not.
	followed  *follows
	elsewhere *elsewhere
	order     *orderlog.Recorder // nil unless a test asked for the record
	leases    *leasesvc.Service
	router    atomic.Pointer[router.Router] // nil while starting

	metrics *metrics
	pages   pages

	identity identity    // as in the data directory; changed only by the start
	fresh    atomic.Bool // not a member yet, as far as it knows
	refusals refusals

	ctx     context.Context // of the node's own goroutines
	stop    context.CancelFunc
	wg      sync.WaitGroup
	fatal   chan error // holds at most one
	closers []func(ctx context.Context) error
}

// oracle is the placement group as the node sees it: through pd's client, or inside the one group
// of a single-group store.
type oracle interface {
	router.Oracle
	// Directory is nil until the cluster is known to exist.
	Directory() *order.Directory
	// Leader is the store that leads, zero when unknown, and its term.
	Leader() (raftid.StoreID, uint64)
	// RegisterStore makes this node known to the others.
	RegisterStore(ctx context.Context, s pdpb.Store) error
	// Group is the raft group whose state Status reports.
	Group() raftid.GroupID
	// Held is the number of order items that are not sealed, where that is known.
	Held() int
	// Tick brings the time, monotonic from any origin.
	Tick(now time.Duration)
}

const (
	clientTick = 100 * time.Millisecond // of pd's client: as rare as its timeouts allow, for idle nodes
	memberTick = 500 * time.Millisecond // of pd's member: idle marks
)

// quorumPatience is how long a node waits for a quorum before it says so.
const quorumPatience = time.Second

// Start brings a node up and returns when it serves clients. It waits for a quorum, as long as
// ctx lasts.
func Start(ctx context.Context, cfg *config.Config) (*Node, error) {
	return start(ctx, cfg, defaultTuning())
}

func start(ctx context.Context, cfg *config.Config, t tuning) (*Node, error) {
	n := &Node{
		cfg: cfg, tuning: t, log: cfg.Log(), self: raftid.StoreID(cfg.MemberID()), cluster: cfg.ClusterID(), members: cfg.Members(),
		registry: prometheus.NewRegistry(), fatal: make(chan error, 1),
	}
	n.ctx, n.stop = context.WithCancel(context.Background())
	if err := n.start(ctx); err != nil {
		sctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		return nil, errors.Join(err, n.Stop(sctx))
	}
	return n, nil
}

// Done delivers the error that made the node stop working. The process must end then.
func (n *Node) Done() <-chan error { return n.fatal }

// Admin is what the admin service shows and does.
func (n *Node) Admin() admin.Backend { return &adminBackend{n} }

// fail takes the first error that the node cannot survive.
func (n *Node) fail(err error) {
	select {
	case n.fatal <- err:
		n.log.Error("the node cannot go on", zap.Error(err))
	default:
	}
}

func (n *Node) onClose(f func(ctx context.Context) error) { n.closers = append(n.closers, f) }

// Stop ends everything that Start started, in reverse order, and waits for it.
func (n *Node) Stop(ctx context.Context) error {
	var errs []error
	for i := len(n.closers) - 1; i >= 0; i-- {
		errs = append(errs, n.closers[i](ctx))
	}
	n.closers = nil
	return errors.Join(errs...)
}

func (n *Node) start(ctx context.Context) error {
	cfg := n.cfg
	// Ports first: one that is in use should cost neither a recovery nor a first start's directory.
	clients, err := n.listenClients()
	if err != nil {
		return err
	}
	peers, err := n.listenPeers()
	if err != nil {
		return err
	}
	pages, err := n.listenMetrics()
	if err != nil {
		return err
	}
	id, err := openIdentity(cfg.DataDir, identity{ClusterID: cfg.ClusterID(), StoreID: n.self, Name: cfg.Name, Mode: n.mode().String()})
	if err != nil {
		return err
	}
	if id.Joining && !cfg.NewCluster() && len(n.members) > 0 {
		return fmt.Errorf("--initial-cluster-state is existing, but %s holds no data of this member, and members cannot be added to a running cluster yet: start it with its old --data-dir", cfg.DataDir)
	}
	if err := os.RemoveAll(n.snapshotDir()); err != nil {
		return fmt.Errorf("cannot remove unfinished snapshots: %w", err)
	}
	n.identity = id
	n.fresh.Store(id.Joining)
	n.metrics = newMetrics(n)
	n.regions = newRegions(n) // before the engine, whose flushes it is told of
	if err := n.openStorage(); err != nil {
		return err
	}
	n.openWatches()
	if cfg.CommittedOrder {
		if err := n.openOrderLog(); err != nil {
			return err
		}
	}
	n.openLeases()
	if err := n.openNetwork(peers); err != nil {
		return err
	}
	n.store = raftstore.NewStore(raftstore.StoreConfig{
		Transport: n.net, TickInterval: time.Duration(cfg.HeartbeatMs) * time.Millisecond,
		OnFatal: n.fail, Logger: n.log,
	})
	// Closed in reverse: the groups stop first, then nobody but us touches their replicas.
	n.onClose(func(context.Context) error { n.regions.stop(); return nil })
	n.onClose(func(context.Context) error { n.store.Close(); return nil })
	if cfg.SingleGroup {
		err = n.startSingle()
	} else {
		err = n.startMulti()
	}
	if err != nil {
		return err
	}
	n.stores = newStores(n)
	n.stores.register()
	n.registerAdmin()
	n.metrics.registerStore()
	n.onClose(func(context.Context) error {
		n.stop()
		n.wg.Wait()
		return nil
	})
	n.wg.Go(n.clock)
	n.wg.Go(n.regions.reconcileLoop)
	n.wg.Go(n.regions.collectLoop)
	if n.order != nil {
		n.wg.Go(func() { n.order.Run(n.ctx, n.completeThrough) })
	}
	n.servePages(pages)
	n.servePeers(peers)
	if err := n.join(ctx); err != nil {
		return err
	}
	n.awaitLeaders(ctx)
	n.onClose(func(context.Context) error { n.logWrites(); return nil })
	if err := n.serveClients(clients); err != nil {
		return err
	}
	n.onClose(func(ctx context.Context) error { n.handOver(ctx); return nil }) // last, so first
	return nil
}

// openStorage recovers the log and the state engine.
func (n *Node) openStorage() error {
	began := time.Now()
	log, err := wal.Open(filepath.Join(n.cfg.DataDir, "wal"), wal.Options{
		OnFatal: func(err error) { n.fail(fmt.Errorf("the log cannot be written: %w", err)) },
		OnSync:  n.metrics.onSync, Logger: n.log, FS: walFS(n.tuning.logFS, n.cfg.UnsafeNoFsync), SegmentBytes: n.tuning.segmentBytes,
	})
	if err != nil {
		return fmt.Errorf("cannot open the log: %w", err)
	}
	n.wal = log
	n.onClose(func(context.Context) error { return log.Close() })
	eng, err := engine.Open(engine.Options{
		Dir: filepath.Join(n.cfg.DataDir, "state"), Logger: n.log, MemTableBytes: n.memTableBytes(),
		OnFlush: func() { n.regions.flushed() },
		OnFatal: func(err error) { n.fail(fmt.Errorf("the state engine failed: %w", err)) },
	})
	if err != nil {
		return fmt.Errorf("cannot open the state engine: %w", err)
	}
	n.engine = eng
	n.onClose(func(context.Context) error { return eng.Close() })
	if err := n.checkLogKept(); err != nil {
		return err
	}
	n.log.Info("recovered", zap.Int("groups", len(log.Groups())), zap.Duration("took", time.Since(began)))
	return nil
}

// checkLogKept refuses a member whose log is gone: with it went its votes and what it acknowledged
// and had not flushed, so it could vote a second time (A7). A log that merely ends before the state
// is another matter (D2).
func (n *Node) checkLogKept() error {
	if n.fresh.Load() || len(n.wal.Groups()) > 0 {
		return nil
	}
	positions, err := n.engine.Positions()
	if err != nil {
		return fmt.Errorf("cannot read the state engine: %w", err)
	}
	if len(positions) == 0 && !slices.Contains(n.pdVoters(), n.self) {
		return nil // it had no replica yet
	}
	return fmt.Errorf("the log in %s is gone, and with it this member's votes and acknowledged writes: bring it back as it was", filepath.Join(n.cfg.DataDir, "wal"))
}

// join waits until the cluster exists and knows this node, which takes a quorum.
func (n *Node) join(ctx context.Context) error {
	warn := time.NewTimer(quorumPatience) // soon at first: who started it looks at the log
	defer warn.Stop()
	look := time.NewTicker(n.tuning.refusedFor / 4)
	defer look.Stop()
	began := time.Now()
	for {
		select {
		case <-n.regions.ready:
		case <-look.C:
			if err := n.refusals.hopeless(len(n.members), n.tuning.refusedFor); err != nil {
				return err
			}
			continue
		case err := <-n.fatal:
			return err
		case <-ctx.Done():
			return ctx.Err()
		case <-warn.C:
			warn.Reset(10 * time.Second)
			voters := n.pdVoters()
			here := 0
			for _, id := range voters {
				if n.storeAlive(id) {
					here++
				}
			}
			n.log.Warn(fmt.Sprintf("waiting for a quorum of the placement group: %d of its %d members are here, and it takes %d", here, len(voters), len(voters)/2+1),
				zap.Duration("waited", time.Since(began)))
			continue
		}
		break
	}
	if d := n.oracle.Directory(); d.Mode != n.mode() {
		return fmt.Errorf("the store in %s runs in %v mode; start it %s --single-group", n.cfg.DataDir, d.Mode,
			map[bool]string{true: "without", false: "with"}[n.cfg.SingleGroup])
	}
	if n.fresh.Load() {
		if err := n.admit(n.self); err != nil { // let in by peers that had not heard of it
			return err
		}
	}
	me := pdpb.Store{ID: n.self, Name: n.cfg.Name, PeerURLs: urlStrings(n.cfg.InitialAdvertisePeerURLs), ClientURLs: urlStrings(n.cfg.AdvertiseClientURLs)}
	for {
		actx, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := n.register(actx, me)
		cancel()
		if err == nil {
			return nil
		}
		if err := n.refusals.hopeless(len(n.members), n.tuning.refusedFor); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		select {
		case ferr := <-n.fatal:
			return ferr
		default:
		}
		n.log.Warn("cannot register this node yet", zap.Duration("waited", time.Since(began)), zap.Error(err))
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// register makes the node known to the others. From then on they refuse it when it comes without its
// data, so that it joined is recorded before, and only when a quorum has answered: the peers that
// remember a member which lost its data do not.
func (n *Node) register(ctx context.Context, me pdpb.Store) error {
	if n.fresh.Load() {
		if _, err := n.oracle.ReadPoint(ctx); err != nil {
			return err
		}
		n.identity.Joining = false
		if err := writeIdentity(n.cfg.DataDir, n.identity); err != nil {
			return err
		}
		n.fresh.Store(false)
	}
	return n.oracle.RegisterStore(ctx, me)
}

func (n *Node) mode() pdpb.Mode {
	if n.cfg.SingleGroup {
		return pdpb.SingleGroup
	}
	return pdpb.MultiGroup
}

// clock brings the time to everything that has no clock of its own. It ticks as often as the
// shorter of the two intervals needs; a tick that comes a little early counts.
func (n *Node) clock() {
	origin := time.Now()
	raftTick := time.Duration(n.cfg.HeartbeatMs) * time.Millisecond
	step := min(raftTick, clientTick)
	tick := time.NewTicker(step)
	defer tick.Stop()
	var lastRaft, lastClient time.Duration
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-tick.C:
		}
		now := time.Since(origin)
		if now-lastClient >= clientTick-step/2 {
			lastClient = now
			n.oracle.Tick(now)
			n.leases.Tick()
		}
		if now-lastRaft >= raftTick-step/2 {
			lastRaft = now
			n.regions.tick()
		}
	}
}

// requestTimeout bounds a unary request: etcd's rule.
func (n *Node) requestTimeout() time.Duration {
	return 5*time.Second + 2*time.Duration(n.cfg.ElectionMs)*time.Millisecond
}

// serveClients opens the gateway.
func (n *Node) serveClients(clients []clientPort) error {
	cfg := n.cfg
	timeout := n.requestTimeout()
	r := router.New(watchedOracle{n.oracle, n.watches}, n.stores, router.Options{
		RequestTimeout: timeout, LocalWait: n.tuning.localWait, Scrubbed: n.regions.scrubbed,
	})
	n.router.Store(r)
	if p, err := cfg.AutoCompaction(); err != nil {
		return err
	} else if p.Enabled() {
		n.wg.Go(func() { n.compactLoop(p) })
	}
	gw, err := gateway.New(gateway.Config{
		KV: r, Leases: n.leases, Cluster: &clusterView{n}, Logger: n.log, Registry: n.registry,
		ExtensiveMetrics: cfg.Metrics == "extensive", MaxRequestBytes: int(cfg.MaxRequestBytes), MaxTxnOps: int(cfg.MaxTxnOps),
		MaxConcurrentStreams: cfg.MaxConcurrentStreams, RequestTimeout: timeout,
		ServerOptions: keepaliveOptions(cfg), Pprof: cfg.EnablePprof, HostWhitelist: cfg.HostWhitelist, CORS: cfg.CORS,
		DisableJSON: cfg.DisableJSON, WarnDuration: cfg.WarnUnaryRequest,
		Watches: n.watches, ProgressNotifyInterval: cfg.WatchProgressNotifyInterval, ElectionTimeout: time.Duration(cfg.ElectionMs) * time.Millisecond,
		SnapshotDir: n.snapshotDir(), SnapshotSpace: n.snapshotSpace,
		Register: func(s grpc.ServiceRegistrar) { admin.Register(s, n.Admin()) },
	})
	if err != nil {
		return err
	}
	n.gateway = gw
	n.onClose(func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, drainMax)
		defer cancel()
		gw.Stop(ctx)
		return nil
	})
	for _, l := range clients {
		n.wg.Go(func() {
			if err := gw.Serve(l.Listener, l.port); err != nil && n.ctx.Err() == nil {
				n.fail(fmt.Errorf("serving clients on %s: %w", l.Addr(), err))
			}
		})
	}
	n.pages.ready(gw.MetricsHandler())
	n.onClose(n.pages.stop) // what the pages show is there as long as they are
	return nil
}
