package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"

	"braid/mvcc"
	"braid/pd"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/raftstore/raftid"
	"braid/raftstore/transport"
	"braid/region/regionpb"
)

// multiOracle is the placement group of a multi-group store.
type multiOracle struct {
	node     *Node
	client   *order.Client
	attempts attemptIDs
	abandons atomic.Int32 // questions of Abandon on their way
	member   *pd.Replica  // nil on nodes without one
	ticks    int
}

// orderCaller lets pd's client call other stores.
type orderCaller struct{ net *transport.Transport }

func (c orderCaller) Call(ctx context.Context, to raftid.StoreID, m order.Method, payload []byte) ([]byte, error) {
	return c.net.Call(ctx, to, transport.Method(m), payload)
}

// frameSender carries pd's frames to other stores.
type frameSender struct{ net *transport.Transport }

func (s frameSender) SendFrame(to raftid.StoreID, frame []byte) bool {
	return s.net.Send(to, transport.KindOrder, frame)
}

// sessionBits leaves a life of the store room for as many streams from pd before it would reach the
// numbers of the next.
const sessionBits = 32

// startMulti starts pd's member, if this node has one, its client, and the regions that are here.
func (n *Node) startMulti() error {
	voters := n.pdVoters()
	calls := order.NewCalls(orderCaller{n.net}, 3*time.Second)
	n.onClose(func(context.Context) error { calls.Close(); return nil })
	client := order.NewClient(order.ClientConfig{
		ClientOptions: order.ClientOptions{Self: n.self, Members: voters, Session: n.identity.Starts << sessionBits},
		Net:           calls,
		OnDirectory:   func(*order.Directory) { n.regions.directoryChanged() },
		OnMark:        n.markMoved,
	})
	n.onClose(func(context.Context) error { client.Close(); return nil })
	o := &multiOracle{node: n, client: client}
	n.oracle, n.regions.order, n.regions.abandon = o, client, o.Abandon
	n.net.Handle(transport.KindOrder, func(from raftid.StoreID, payload []byte) {
		if err := client.HandleFrameBytes(from, payload); err != nil {
			n.log.Warn("damaged order frame", zap.Stringer("from", from), zap.Error(err))
		}
	})
	n.net.OnDown(client.HandleDown)
	shared := len(n.members) == 1
	n.regions.sharedFsync = shared
	if shared {
		n.wal.SharedFsync(true)
	} else {
		n.wal.SetPriority(raftid.PDGroup)
	}
	if i := slices.Index(voters, n.self); i >= 0 {
		if err := n.startMember(o, voters, raftid.ReplicaID(i+1), calls); err != nil {
			return err
		}
	}
	return n.regions.startExisting()
}

// startMember starts this node's member of pd.
func (n *Node) startMember(o *multiOracle, voters []raftid.StoreID, self raftid.ReplicaID, calls order.Net) error {
	storeOf := func(r raftid.ReplicaID) (raftid.StoreID, bool) {
		if r < 1 || int(r) > len(voters) {
			return 0, false
		}
		return voters[r-1], true
	}
	conf := &raftpb.ConfState{}
	for i := range voters {
		conf.Voters = append(conf.Voters, uint64(i+1))
	}
	log := n.wal.Group(raftid.PDGroup)
	origin := time.Now()
	var onApply func(index, term uint64, e *pd.Entry, res pd.Result)
	if n.order != nil {
		onApply = func(_, _ uint64, e *pd.Entry, res pd.Result) { recordEvents(n.order, e, res) }
	}
	member, err := pd.NewReplica(pd.Config{
		Store: n.self, Life: n.identity.Starts, Wake: n.store.Waker(raftid.PDGroup), StoreOf: storeOf, Bootstrap: n.bootstrap(),
		Local: o.client, Sender: frameSender{n.net}, Net: calls,
		Now: func() time.Duration { return time.Since(origin) }, Metrics: n.metrics.pd(), OnApply: onApply,
	}, log.Checkpoint())
	if err != nil {
		return fmt.Errorf("the placement group's state: %w", err)
	}
	o.member = member
	if n.order != nil {
		n.order.PDStarted(member.Status().Mark.Cut)
	}
	for _, m := range order.Methods {
		n.net.HandleCall(transport.Method(m), func(_ context.Context, from raftid.StoreID, payload []byte, reply func([]byte, error)) {
			member.Serve(m, from, payload, reply)
		})
	}
	applied, term := member.Applied()
	if err := n.store.AddGroup(raftstore.GroupConfig{
		ID: raftid.PDGroup, Replica: self, Peers: storeOf, ConfState: conf, Applied: applied, AppliedTerm: term,
		ElectionTicks: n.cfg.ElectionTicks(), HeartbeatTicks: 1, Log: log, Machine: member, Logger: n.raftLogger(raftid.PDGroup),
	}); err != nil {
		return err
	}
	o.client.SetMember(member)
	return nil
}

func (o *multiOracle) Tick(now time.Duration) {
	o.client.Tick(now)
	if o.member == nil {
		return
	}
	if o.ticks++; o.ticks%int(memberTick/clientTick) == 0 {
		o.member.Tick()
	}
}

func (o *multiOracle) ReadPoint(ctx context.Context) (pdpb.ReadPoint, error) {
	p, err := o.client.ReadPoint(ctx)
	return p, orderError(err)
}

func (o *multiOracle) WaitRevision(ctx context.Context, rev mvcc.Revision) error {
	return orderError(o.client.WaitRevision(ctx, rev))
}

func (o *multiOracle) Compact(ctx context.Context, rev int64, hash pdpb.CompactHash) (mvcc.Revision, error) {
	at, err := o.client.Compact(ctx, rev, hash)
	return at, orderError(err)
}

func (o *multiOracle) CompactHash(ctx context.Context, rev mvcc.Revision) (pdpb.CompactHash, error) {
	h, err := o.client.CompactHash(ctx, rev)
	return h, orderError(err)
}

func (o *multiOracle) RegisterStore(ctx context.Context, s pdpb.Store) error {
	return o.client.RegisterStore(ctx, s)
}

func (o *multiOracle) Mark() pdpb.Mark                  { return o.client.Mark() }
func (o *multiOracle) Regions() []pdpb.Descriptor       { return o.client.Regions() }
func (o *multiOracle) RegionsVersion() uint64           { return o.client.RegionsVersion() }
func (o *multiOracle) Directory() *order.Directory      { return o.client.Directory() }
func (o *multiOracle) Leader() (raftid.StoreID, uint64) { return o.client.Leader() }
func (o *multiOracle) Group() raftid.GroupID            { return raftid.PDGroup }

func (o *multiOracle) Held() int {
	if o.member == nil {
		return 0
	}
	return o.member.Status().Held
}

// orderError turns the oracle's errors into those of a region, which the gateway knows.
func orderError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, order.ErrCompacted):
		return regionpb.ErrorOf(regionpb.Compacted)
	case errors.Is(err, order.ErrFutureRevision):
		return regionpb.ErrorOf(regionpb.FutureRevision)
	case errors.Is(err, order.ErrAborted):
		return regionpb.ErrorOf(regionpb.Aborted)
	case errors.Is(err, order.ErrOverloaded):
		return regionpb.ErrorOf(regionpb.TooManyRequests)
	case errors.Is(err, order.ErrUnknown):
		return regionpb.ErrorOf(regionpb.Unknown)
	case errors.Is(err, order.ErrClosed):
		return regionpb.ErrorOf(regionpb.Stopped)
	}
	return err
}
