package node

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"braid/mvcc"
	"braid/pd"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/raftstore/transport"
	"braid/region"
	"braid/region/regionpb"
)

// singleGroup is the one group of a single-group store: region and placement group in one.
const singleGroup = raftid.FirstRegion

// methodMeta asks the leader of a single-group store to put an event into its log.
const methodMeta transport.Method = 65

// singleOracle is the placement group of a single-group store (architecture, section 12): pd.Single in
// the node, where a read point is a ReadIndex. The machine inside belongs to the group's owner; the rest
// may be called from any goroutine.
type singleOracle struct {
	node *Node
	core *pd.Single

	directory atomic.Pointer[order.Directory]
	floor     atomic.Int64
	fence     atomic.Uint64
}

// startSingle starts the one group.
func (n *Node) startSingle() error {
	o := &singleOracle{node: n}
	cfg := pd.SingleConfig{Bootstrap: n.bootstrap(), Origin: rand.Uint64(), OnChange: o.publish}
	if r := n.order; r != nil {
		cfg.OnCut = func(_, _ uint64, p *order.CutProposal, res *order.CutResult) {
			if len(p.Events) > 0 {
				recordEvents(r, &pd.Entry{Cut: p}, pd.Result{Cut: res})
			}
		}
	}
	o.core = pd.NewSingle(cfg)
	n.oracle = o
	n.regions.orderer, n.regions.meta = o.core, singleMachine{o.core}
	n.net.HandleCall(methodMeta, o.serveMeta)
	if err := n.regions.startExisting(); err != nil {
		return err
	}
	if n.regions.get(singleGroup) != nil {
		return nil
	}
	b := n.bootstrap()
	if _, here := peerOn(b.Regions[0], n.self); !here {
		return fmt.Errorf("--single-group: such a store has at most %d nodes, and --initial-cluster names %d; leave the flag out for more", singleVotersMax, len(n.members))
	}
	return n.regions.create(b.Regions)
}

// replica is the one replica; nil while starting.
func (o *singleOracle) replica() *hosted { return o.node.regions.get(singleGroup) }

// singleMachine is pd.Single as its replica calls it.
type singleMachine struct{ *pd.Single }

// LoadState implements region.MetaMachine. A new store begins with the cluster that the flags describe,
// which is the same on all nodes: the cluster id is a hash of it.
func (m singleMachine) LoadState(state []byte, _ *region.Position) error { return m.Load(state) }

// publish tells other goroutines what the machine says now.
func (o *singleOracle) publish(m *pd.Machine) {
	d := m.Directory()
	if old := o.directory.Load(); old == nil || old.Version != d.Version {
		o.directory.Store(d)
		o.node.regions.directoryChanged()
	}
	mark := m.Core().Mark()
	o.floor.Store(int64(mark.Floor))
	o.fence.Store(uint64(mark.Fence))
}

// Directory implements oracle.
func (o *singleOracle) Directory() *order.Directory { return o.directory.Load() }

// Regions implements router.Oracle.
func (o *singleOracle) Regions() []pdpb.Descriptor {
	if d := o.directory.Load(); d != nil {
		return d.Regions
	}
	return nil
}

// RegionsVersion implements router.Oracle.
func (o *singleOracle) RegionsVersion() uint64 {
	if d := o.directory.Load(); d != nil {
		return d.Version
	}
	return 0
}

// Mark implements router.Oracle: what is applied here.
func (o *singleOracle) Mark() pdpb.Mark {
	h := o.replica()
	if h == nil {
		return pdpb.Mark{}
	}
	p := h.Applied()
	return pdpb.Mark{Cut: p.Cut, Rev: p.Revision, Floor: mvcc.Revision(o.floor.Load()), Fence: pdpb.Fence(o.fence.Load())}
}

// WaitRevision implements router.Oracle.
func (o *singleOracle) WaitRevision(ctx context.Context, rev mvcc.Revision) error {
	h := o.replica()
	if h == nil {
		return regionpb.ErrorOf(regionpb.RegionNotFound)
	}
	return h.WaitRevision(ctx, rev)
}

// ReadPoint implements router.Oracle.
func (o *singleOracle) ReadPoint(ctx context.Context) (pdpb.ReadPoint, error) {
	h := o.replica()
	if h == nil {
		return pdpb.ReadPoint{}, regionpb.ErrorOf(regionpb.RegionNotFound)
	}
	return h.ReadPoint(ctx)
}

// Leader implements oracle.
func (o *singleOracle) Leader() (raftid.StoreID, uint64) {
	h := o.replica()
	if h == nil {
		return 0, 0
	}
	st, _ := o.node.store.Status(singleGroup)
	leader, here := h.Leader()
	if here {
		leader = o.node.self
	}
	return leader, st.Term
}

// Group implements oracle.
func (o *singleOracle) Group() raftid.GroupID { return singleGroup }

// Held implements oracle: this group needs no seals.
func (o *singleOracle) Held() int { return 0 }

// Tick implements oracle.
func (o *singleOracle) Tick(time.Duration) {}

// Compact implements router.Oracle.
func (o *singleOracle) Compact(ctx context.Context, rev int64, hash pdpb.CompactHash) (mvcc.Revision, error) {
	res, err := o.propose(ctx, order.Event{Kind: order.EventCompact, Rev: mvcc.Revision(rev), Hash: hash})
	if err == nil {
		err = orderError(res.Err())
	}
	return res.Mark.Rev, err
}

// CompactHash implements router.Oracle.
func (o *singleOracle) CompactHash(ctx context.Context, rev mvcc.Revision) (pdpb.CompactHash, error) {
	res, err := o.propose(ctx, order.Event{Kind: order.EventCompactHash, Rev: rev})
	return res.Hash, err
}

// RegisterStore implements oracle. Repeating it is harmless, so it is tried until ctx ends.
func (o *singleOracle) RegisterStore(ctx context.Context, s pdpb.Store) error {
	for {
		res, err := o.propose(ctx, order.Event{Kind: order.EventRegisterStore, Store: s})
		if err == nil {
			return res.Err()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", err, ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// propose has an event executed at its place in the log, wherever the leader is.
func (o *singleOracle) propose(ctx context.Context, e order.Event) (order.EventResult, error) {
	type answer struct {
		res order.EventResult
		err error
	}
	ch := make(chan answer, 1)
	o.proposeHere(e, func(res order.EventResult, err error) { ch <- answer{res, err} })
	var a answer
	select {
	case a = <-ch:
	case <-ctx.Done():
		return order.EventResult{}, ctx.Err()
	}
	var re *regionpb.Error
	if !errors.As(a.err, &re) || re.Code != regionpb.NotLeader || re.Leader == 0 || re.Leader == o.node.self {
		return a.res, a.err
	}
	data, err := o.node.stores.call(ctx, re.Leader, methodMeta, order.AppendEvent(nil, &e))
	if err != nil {
		return order.EventResult{}, err
	}
	r, err := order.DecodeReply(order.MethodPropose, data)
	switch {
	case err != nil:
		return order.EventResult{}, err
	case r.Err != nil:
		var nl *order.NotLeaderError
		if errors.As(r.Err, &nl) {
			return order.EventResult{}, regionpb.ErrorOf(regionpb.NotLeader)
		}
		return order.EventResult{}, orderError(r.Err)
	}
	return r.Result, nil
}

func (o *singleOracle) proposeHere(e order.Event, done func(order.EventResult, error)) {
	h := o.replica()
	if h == nil {
		done(order.EventResult{}, regionpb.ErrorOf(regionpb.RegionNotFound))
		return
	}
	payload, id := o.core.Command(e)
	h.ProposeMeta(payload, func(err error) {
		res, ok := o.core.Take(id)
		switch {
		case err != nil:
			done(order.EventResult{}, err)
		case !ok:
			done(order.EventResult{}, regionpb.ErrorOf(regionpb.Unknown))
		default:
			done(res, nil)
		}
	})
}

// serveMeta takes an event of another node.
func (o *singleOracle) serveMeta(_ context.Context, _ raftid.StoreID, payload []byte, reply func([]byte, error)) {
	e, err := order.DecodeEvent(payload)
	if err != nil {
		reply(nil, err)
		return
	}
	o.proposeHere(e, func(res order.EventResult, err error) {
		r := &order.Reply{Result: res}
		if err != nil {
			r.Err = order.ErrUnknown
			var re *regionpb.Error
			switch {
			case !errors.As(err, &re) || !re.NotExecuted():
			case re.Code == regionpb.TooManyRequests:
				r.Err = order.ErrOverloaded
			default:
				r.Err = &order.NotLeaderError{Leader: re.Leader}
			}
		}
		reply(order.AppendReply(nil, order.MethodPropose, r), nil)
	})
}
