package node

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"braid/cmd/internal/config"
	"braid/mvcc"
	"braid/mvcc/engine"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/raftstore/raftid"
	"braid/raftstore/wal"
	"braid/region"
	"braid/region/regionpb"
	"braid/watchsvc"
)

// activeTicks is how long a replica hears the clock after something woke it: longer than any wait
// that a replica counts in ticks. An idle one costs nothing.
const activeTicks = 100

// regions are the replicas that live on this node.
type regions struct {
	node        *Node
	order       *order.Client // nil in single-group mode
	sharedFsync bool
	// self-ordered replicas of a single-group store get these.
	orderer region.Orderer
	meta    region.MetaMachine
	abandon func(pdpb.AttemptID) // nil in single-group mode
	recent  *region.Recent
	tallies *region.Tallies

	// Owned by reconcileLoop.
	compared   bool // the split keys
	stillSince time.Duration
	handedOver map[pdpb.RegionID]bool // in the standstill that began at stillSince

	ready   chan struct{} // closed once every replica that belongs here runs
	changed chan struct{} // the directory has changed

	mu struct {
		sync.RWMutex
		byID map[pdpb.RegionID]*hosted
		open bool // ready is not closed yet
	}
	active struct {
		sync.Mutex
		list []*hosted
	}
	gc collector
}

// hosted is a replica with what the node keeps beside it.
type hosted struct {
	*region.Replica
	id     pdpb.RegionID
	self   raftid.ReplicaID
	wake   func()
	ticks  atomic.Int32 // left until it is taken off the active list
	owner  *regions
	inList atomic.Bool
	feed   *watchsvc.Feed // into the hub; set before the replica runs
}

// Leading implements order.ReportSource.
func (h *hosted) Leading() bool {
	_, here := h.Leader()
	return here
}

// recentKeys is how many keys' newest versions the leaders of a store remember: 11 to 26 MiB.
const recentKeys = 64 << 10

func newRegions(n *Node) *regions {
	r := &regions{node: n, handedOver: map[pdpb.RegionID]bool{}, ready: make(chan struct{}), changed: make(chan struct{}, 1), recent: region.NewRecent(recentKeys), tallies: region.NewTallies(region.TallyOptions{})}
	r.mu.byID = map[pdpb.RegionID]*hosted{}
	r.mu.open = true
	r.gc.init(r)
	return r
}

func (r *regions) get(id pdpb.RegionID) *hosted {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.mu.byID[id]
}

func (r *regions) all() []*hosted {
	r.mu.RLock()
	defer r.mu.RUnlock()
	list := make([]*hosted, 0, len(r.mu.byID))
	for _, h := range r.mu.byID {
		list = append(list, h)
	}
	return list
}

func (r *regions) stop() {
	for _, h := range r.all() {
		h.Stop()
	}
}

// startExisting starts the replicas whose position the engine holds.
func (r *regions) startExisting() error {
	positions, err := r.node.engine.Positions()
	if err != nil {
		return fmt.Errorf("reading the replicas' positions: %w", err)
	}
	for id, data := range positions {
		if isProgress(id) {
			continue
		}
		pos, err := regionpb.DecodePosition(data)
		if err != nil {
			return fmt.Errorf("position of region %d: %w", id, err)
		}
		if err := r.start(pos, false); err != nil {
			return err
		}
	}
	return nil
}

// start starts a replica. Its position is durable, or it has none and is uninitialized (D4).
func (r *regions) start(pos region.Position, uninitialized bool) error {
	n, d := r.node, pos.Descriptor
	self, ok := peerOn(d, n.self)
	if !ok {
		return fmt.Errorf("region %d has no replica on this store: %v", d.ID, &d)
	}
	conf, err := region.ConfState(&pos)
	if err != nil {
		return err
	}
	h := &hosted{id: d.ID, self: self, owner: r}
	waker := n.store.Waker(d.ID)
	h.wake = func() {
		h.activate()
		waker()
	}
	cfg := region.Config{
		Store: n.self, Replica: self, Life: n.identity.Starts, Engine: n.engine, Position: pos, Wake: h.wake, Fatal: n.fail,
		Stalled: n.engine.Stalled, SharedFsync: r.sharedFsync, Snapshots: snapshots{n.engine, &r.gc},
		Abort: r.abandon, Limits: lockLimits(time.Duration(n.cfg.HeartbeatMs)*time.Millisecond, n.requestTimeout()),
		Orderer: r.orderer, Meta: r.meta, Recent: r.recent, Tallies: r.tallies,
	}
	if r.order != nil {
		cfg.Order = r.order
	}
	if l := n.tuning.limits; l != nil {
		cfg.Limits = *l
	}
	attach := h.watched(&cfg)
	if n.order != nil {
		h.recorded(&cfg)
	}
	h.leased(&cfg)
	if h.Replica, err = region.NewReplica(cfg); err != nil {
		return err
	}
	attach()
	r.mu.Lock()
	r.mu.byID[d.ID] = h
	r.mu.Unlock()
	if err := n.store.AddGroup(raftstore.GroupConfig{
		ID: d.ID, Replica: self, ConfState: conf, ConfIndex: pos.ConfIndex, Applied: pos.Index, AppliedTerm: pos.Term,
		Peers: func(id raftid.ReplicaID) (raftid.StoreID, bool) {
			for _, p := range d.Peers {
				if p.Replica == id {
					return p.Store, true
				}
			}
			return 0, false
		},
		Uninitialized: uninitialized, ElectionTicks: n.cfg.ElectionTicks(), HeartbeatTicks: 1,
		LazyCommit: r.order != nil,
		Full:       n.wal.Full, Log: n.wal.Group(d.ID), Machine: h.Replica, Logger: n.raftLogger(d.ID),
	}); err != nil {
		return err
	}
	if r.order != nil {
		r.order.Register(d.ID, h)
	}
	h.activate()
	return nil
}

func peerOn(d pdpb.Descriptor, store raftid.StoreID) (raftid.ReplicaID, bool) {
	for _, p := range d.Peers {
		if p.Store == store {
			return p.Replica, true
		}
	}
	return 0, false
}

// activate makes the replica hear the clock for a while.
func (h *hosted) activate() {
	if h.ticks.Load() != activeTicks {
		h.ticks.Store(activeTicks)
	}
	if !h.inList.Load() && h.inList.CompareAndSwap(false, true) {
		h.owner.active.Lock()
		h.owner.active.list = append(h.owner.active.list, h)
		h.owner.active.Unlock()
	}
}

// tick brings a tick of raft's clock to the replicas that were active lately.
func (r *regions) tick() {
	r.active.Lock()
	list := r.active.list
	r.active.list = nil
	r.active.Unlock()
	kept := list[:0]
	for _, h := range list {
		if h.ticks.Add(-1) <= 0 {
			h.inList.Store(false)
			if h.ticks.Load() <= 0 {
				continue
			}
			// Woken meanwhile by somebody who may have seen it in the list.
			if !h.inList.CompareAndSwap(false, true) {
				continue
			}
		}
		kept = append(kept, h)
		h.Tick()
	}
	clear(list[len(kept):])
	r.active.Lock()
	r.active.list = append(kept, r.active.list...)
	r.active.Unlock()
}

// directoryChanged is called by pd's client or machine and must not block.
func (r *regions) directoryChanged() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// reconcileLoop creates the replicas that belong here and are missing.
func (r *regions) reconcileLoop() {
	retry := time.NewTicker(time.Second)
	defer retry.Stop()
	began := time.Now()
	for {
		if d := r.node.oracle.Directory(); d != nil && d.Version > 0 {
			if err := r.reconcile(d); err != nil {
				r.node.fail(err)
				return
			}
		}
		select {
		case <-r.node.ctx.Done():
			return
		case <-r.changed:
		case <-retry.C:
			r.leaveStandstill()
			if time.Since(began) < electFirstFor {
				r.electFirst()
			}
		}
	}
}

// reconcile creates what the directory says belongs here. First replicas come from the directory
// and from nothing else, and their position is flushed before they vote: a replica that forgot
// where its log starts could vote twice (A7).
func (r *regions) reconcile(d *order.Directory) error {
	n := r.node
	if d.ClusterID != n.cfg.ClusterID() {
		return fmt.Errorf("the placement group describes cluster %x, this node belongs to %x", d.ClusterID, n.cfg.ClusterID())
	}
	if d.Mode != n.mode() {
		r.nowReady() // join says what is wrong
		return nil
	}
	r.compareSplits(d)
	var missing []pdpb.Descriptor
	for i := range d.Regions {
		if _, here := peerOn(d.Regions[i], n.self); here && r.get(d.Regions[i].ID) == nil {
			missing = append(missing, d.Regions[i])
		}
	}
	if len(missing) > 0 {
		if err := r.create(missing); err != nil {
			return err
		}
		n.log.Info("created replicas", zap.Int("regions", len(missing)))
	}
	n.elsewhere.know(d)
	r.nowReady()
	return nil
}

// compareSplits warns, once, when a new store has other regions than the flags of this node ask for:
// those of pd's first leader count.
func (r *regions) compareSplits(d *order.Directory) {
	if r.compared || !r.node.fresh.Load() || len(r.node.cfg.SplitKeys) == 0 {
		return
	}
	r.compared = true
	var have [][]byte
	for i := range d.Regions {
		if start := d.Regions[i].Span.Start; len(start) > 0 {
			have = append(have, start)
		}
	}
	if want := r.node.cfg.SplitKeys; !slices.EqualFunc(have, want, bytes.Equal) {
		r.node.log.Warn("the store was made with other --region-split-keys than this node was given; those of the store count",
			zap.String("given", config.FormatSplitKeys(want)), zap.String("store", config.FormatSplitKeys(have)))
	}
}

func (r *regions) nowReady() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.open {
		r.mu.open = false
		close(r.ready)
	}
}

func (r *regions) create(missing []pdpb.Descriptor) error {
	n := r.node
	batch := n.engine.NewBatch()
	defer batch.Close()
	parked := map[pdpb.RegionID]bool{}
	for _, d := range missing {
		log := n.wal.Group(d.ID)
		if log.LastIndex() > 0 || log.Hard() != (wal.HardState{}) {
			// The log knows a replica whose state is gone: it keeps log, term and vote, and is
			// filled by a snapshot (D4), if there is anybody to send one.
			if len(d.Peers) == 1 {
				return fmt.Errorf("the state in %s is gone, and nobody else has region %d: bring it back as it was", filepath.Join(n.cfg.DataDir, "state"), d.ID)
			}
			parked[d.ID] = true
			continue
		}
		pos := region.InitialPosition(d, order.FirstRevision)
		if err := batch.SetPosition(uint64(d.ID), pos.Append(nil)); err != nil {
			return err
		}
	}
	if err := batch.Commit(); err != nil {
		return fmt.Errorf("creating replicas: %w", err)
	}
	if err := n.engine.Flush(); err != nil {
		return fmt.Errorf("creating replicas: %w", err)
	}
	for _, d := range missing {
		if err := r.start(region.InitialPosition(d, order.FirstRevision), parked[d.ID]); err != nil {
			return err
		}
		// The first replica of each region campaigns at once, so that a new cluster does not wait
		// for election timeouts and its leaders are spread.
		if d.Peers[0].Store == n.self && !parked[d.ID] {
			if err := n.store.Campaign(d.ID); err != nil {
				return err
			}
		}
	}
	return nil
}

// electFirstFor is how long after the start leaderless regions are looked for.
const electFirstFor = time.Minute

// electFirst campaigns where a region that is meant to be led here has no leader: at the first start
// the other replicas may not have been there yet. PreVote keeps this from disturbing anybody.
func (r *regions) electFirst() {
	for _, h := range r.all() {
		leader, here := h.Leader()
		if leader != 0 || here || h.Descriptor().Peers[0].Store != r.node.self {
			continue
		}
		if err := r.node.store.Campaign(h.id); err != nil {
			r.node.log.Warn("campaign", zap.Uint64("region", uint64(h.id)), zap.Error(err))
		}
	}
}

// leaveStandstill hands leadership away while this node hears nothing from pd: its regions would
// be down for writes although their replicas are healthy (S5). Once for each region and standstill:
// when pd itself is down everybody stands still, and leadership must not go round in circles.
func (r *regions) leaveStandstill() {
	if r.order == nil {
		return
	}
	since, still := r.order.StandsStillSince()
	if !still || since != r.stillSince {
		clear(r.handedOver)
		r.stillSince = since
	}
	if !still {
		return
	}
	for _, h := range r.all() {
		if !h.Leading() || r.handedOver[h.id] {
			continue
		}
		r.handedOver[h.id] = true
		for _, p := range h.Descriptor().Peers {
			if p.Store != r.node.self && r.node.net.Alive(p.Store) {
				r.node.log.Warn("no word from the placement group; handing a region over",
					zap.Uint64("region", uint64(h.id)), zap.Stringer("to", p.Store))
				if err := r.node.store.Transfer(h.id, p.Replica); err != nil {
					r.node.log.Warn("transfer", zap.Error(err))
				}
				break
			}
		}
	}
}

// flushed tells the replicas what the engine holds durably, so that their logs can be cut (D6).
func (r *regions) flushed() {
	r.mu.RLock()
	none := len(r.mu.byID) == 0
	r.mu.RUnlock()
	if none {
		return
	}
	positions, err := r.node.engine.DurablePositions()
	if err != nil {
		r.node.log.Warn("reading durable positions", zap.Error(err))
		return
	}
	for id, data := range positions {
		if h := r.get(pdpb.RegionID(id)); h != nil {
			if err := h.DurableAt(data); err != nil {
				r.node.fail(fmt.Errorf("durable position of region %d: %w", id, err))
				return
			}
		}
	}
}

// local returns the descriptors of regions with a replica here that serves reads.
func (r *regions) local(list []pdpb.Descriptor) (here, elsewhere []pdpb.Descriptor) {
	for _, d := range list {
		if r.get(d.ID) != nil {
			here = append(here, d)
		} else {
			elsewhere = append(elsewhere, d)
		}
	}
	return here, elsewhere
}

// snapshots pins and replaces regions' state in the engine.
type snapshots struct {
	engine *engine.Engine
	gc     *collector
}

func (s snapshots) Pin() (region.PinnedState, error) { return s.engine.Snapshot() }

func (s snapshots) Import(group uint64, span mvcc.Span) (region.StateImport, error) {
	imp, err := s.engine.NewImport(group, span)
	if err != nil {
		return nil, err
	}
	return stateImport{imp, pdpb.RegionID(group), s.gc}, nil
}

// stateImport makes the collector begin anew with a region whose state is replaced: what comes may
// hold versions that the sender had not removed yet and this store had (R3).
type stateImport struct {
	*engine.Import
	id pdpb.RegionID
	gc *collector
}

// Install implements region.StateImport. It flushes the engine before anything else (D3), so the
// collector's forgetting is durable before the new state is.
func (s stateImport) Install(position []byte) error {
	if err := s.gc.replacing(s.id); err != nil {
		return err
	}
	defer s.gc.replaced(s.id)
	return s.Import.Install(position)
}

// sorted returns the replicas in order of their spans.
func sorted(list []*hosted) []*hosted {
	slices.SortFunc(list, func(a, b *hosted) int {
		return slices.Compare(a.Descriptor().Span.Start, b.Descriptor().Span.Start)
	})
	return list
}

// await waits until a replica is complete through a cut.
func (r *regions) await(ctx context.Context, id pdpb.RegionID, cut pdpb.Cut) error {
	h := r.get(id)
	if h == nil {
		return regionpb.ErrorOf(regionpb.RegionNotFound)
	}
	return h.AwaitCut(ctx, cut)
}
