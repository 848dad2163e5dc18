package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/raftstore/transport"
	"braid/region"
	"braid/region/regionpb"
	"braid/router"
)

// Methods of this package at the transport: regions take 32 to 63, the node 64 to 95.
const (
	methodWrite    transport.Method = 32
	methodRead     transport.Method = 33
	methodTransfer transport.Method = 64
)

// remoteReadsMax bounds the reads that this node serves for others at one time; more are refused,
// and their senders try another replica or again.
const remoteReadsMax = 256

// stores reaches regions for the router: on this node by a call, on others by the transport.
type stores struct {
	node  *Node
	hints sync.Map // pdpb.RegionID -> raftid.StoreID: who led, when this node has no replica
	reads chan struct{}
	// releases bounds the releases of locks that are on their way.
	releases chan struct{}
}

func newStores(n *Node) *stores {
	return &stores{node: n, reads: make(chan struct{}, remoteReadsMax), releases: make(chan struct{}, remoteReadsMax)}
}

// register makes the other stores' requests for regions reach the replicas here.
func (s *stores) register() {
	s.node.net.HandleCall(methodWrite, s.serveWrite)
	s.node.net.HandleCall(methodRead, s.serveRead)
	s.registerTxns()
	s.node.net.HandleCall(methodLeases, s.node.serveLeases)
	s.node.net.HandleCall(methodHash, s.serveHash)
	s.registerFollows()
}

// Write implements router.Stores.
func (s *stores) Write(ctx context.Context, expired <-chan struct{}, d pdpb.Descriptor, req *regionpb.WriteRequest) (*pb.TxnResponse, error) {
	h := s.node.regions.get(d.ID)
	leader, here := s.leader(h, &d)
	if here {
		return writeHere(ctx, expired, h.Replica, req)
	}
	if leader == 0 {
		return nil, regionpb.ErrorOf(regionpb.NotLeader)
	}
	payload, err := regionpb.AppendWriteRequest(nil, req)
	if err != nil {
		return nil, err
	}
	data, err := s.callUntil(ctx, expired, leader, methodWrite, payload)
	if err != nil {
		return nil, err
	}
	resp, err := regionpb.DecodeWriteResponse(data)
	s.learn(d.ID, err)
	return resp, err
}

// leader says where a region is led: by what the replica here knows, else by what others said
// last, else where it was meant to be at first. Where this node has no replica, nothing would tell
// it that a leader has died, so a store that is not heard of is passed over: any other replica
// knows the new leader.
func (s *stores) leader(h *hosted, d *pdpb.Descriptor) (leader raftid.StoreID, here bool) {
	if h != nil {
		return h.Leader()
	}
	if l, ok := s.hints.Load(d.ID); ok && s.node.net.Alive(l.(raftid.StoreID)) {
		return l.(raftid.StoreID), false
	}
	for _, p := range d.Peers {
		if s.node.net.Alive(p.Store) {
			return p.Store, false
		}
	}
	return 0, false
}

// learn remembers where an answer says that the region is led.
func (s *stores) learn(id pdpb.RegionID, err error) {
	var re *regionpb.Error
	if !errors.As(err, &re) || re.Code != regionpb.NotLeader {
		return
	}
	if re.Leader == 0 {
		s.hints.Delete(id)
	} else {
		s.hints.Store(id, re.Leader)
	}
}

// call is a call of the transport with the router's notion of what was not sent.
func (s *stores) call(ctx context.Context, to raftid.StoreID, m transport.Method, payload []byte) ([]byte, error) {
	return s.callUntil(ctx, nil, to, m, payload)
}

// callUntil is call that waits no longer than until expired is closed.
func (s *stores) callUntil(ctx context.Context, expired <-chan struct{}, to raftid.StoreID, m transport.Method, payload []byte) ([]byte, error) {
	data, err := s.node.net.CallUntil(ctx, expired, to, m, payload)
	return data, callError(err)
}

// callError says of a call that was not sent that it may be sent again, unless it is larger than any
// connection takes: that will not change, so it is the region's refusal, and the client's answer.
func callError(err error) error {
	if err == nil {
		return nil
	}
	var ce *transport.CallError
	switch {
	case !errors.As(err, &ce) || ce.Sent:
		return err
	case errors.Is(err, transport.ErrTooLarge):
		return fmt.Errorf("%w: %w", regionpb.ErrorOf(regionpb.TooLarge), err)
	}
	return fmt.Errorf("%w: %w", router.ErrNotSent, err)
}

type outcome struct {
	resp *pb.TxnResponse
	err  error
}

// outcomes are channels of writes that were answered; one whose answer is still to come is left
// to the garbage collector.
var outcomes = sync.Pool{New: func() any { return make(chan outcome, 1) }}

func writeHere(ctx context.Context, expired <-chan struct{}, r *region.Replica, req *regionpb.WriteRequest) (*pb.TxnResponse, error) {
	ch := outcomes.Get().(chan outcome)
	r.Write(&region.Write{Txn: req.Txn, Lease: req.Lease, Tokens: req.Tokens, Cut: req.Cut, IfWrites: req.IfWrites, Done: ctx.Done(), Reply: func(resp *pb.TxnResponse, err error) { ch <- outcome{resp, err} }})
	select {
	case o := <-ch:
		outcomes.Put(ch)
		return o.resp, o.err
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-expired:
		return nil, context.DeadlineExceeded
	}
}

// serveWrite takes a write of another store; the answer comes from the group's owner.
func (s *stores) serveWrite(ctx context.Context, _ raftid.StoreID, payload []byte, reply func([]byte, error)) {
	req, err := regionpb.DecodeWriteRequest(payload)
	if err != nil {
		reply(nil, err)
		return
	}
	answer := func(resp *pb.TxnResponse, err error) { reply(regionpb.AppendWriteResponse(nil, resp, err)) }
	h := s.node.regions.get(req.Region)
	if h == nil {
		answer(nil, regionpb.ErrorOf(regionpb.RegionNotFound))
		return
	}
	if d := h.Descriptor(); d.Epoch != req.Epoch {
		answer(nil, &regionpb.Error{Code: regionpb.EpochMismatch, Descriptor: &d})
		return
	}
	h.Write(&region.Write{Txn: req.Txn, Lease: req.Lease, Tokens: req.Tokens, Cut: req.Cut, IfWrites: req.IfWrites, Done: ctx.Done(), Reply: answer})
}

// readPatience is how long a replica elsewhere may take before the next one is asked: the first may
// be cut off from the order while others are complete.
const readPatience = time.Second

// Read implements router.Stores: on the replica here if there is one, else on the first peer that
// is up and answers.
func (s *stores) Read(ctx context.Context, d pdpb.Descriptor, req *regionpb.ReadRequest) (*regionpb.ReadResponse, error) {
	if h := s.node.regions.get(d.ID); h != nil {
		return h.Read(ctx, req)
	}
	data := regionpb.AppendReadRequest(nil, req)
	err := error(regionpb.ErrorOf(regionpb.RegionNotFound))
	for _, p := range d.Peers {
		if !s.node.net.Alive(p.Store) {
			continue
		}
		var resp *regionpb.ReadResponse
		if resp, err = s.readFrom(ctx, p.Store, data); err == nil || ctx.Err() != nil {
			return resp, err
		}
		var re *regionpb.Error
		if errors.As(err, &re) && re.Code != regionpb.NotComplete && re.Code != regionpb.RegionNotFound && re.Code != regionpb.TooManyRequests {
			return nil, err // another replica would say the same
		}
	}
	return nil, err
}

func (s *stores) readFrom(ctx context.Context, store raftid.StoreID, data []byte) (*regionpb.ReadResponse, error) {
	rctx, cancel := context.WithTimeout(ctx, readPatience)
	defer cancel()
	answer, err := s.call(rctx, store, methodRead, data)
	if err != nil {
		if rctx.Err() != nil && ctx.Err() == nil {
			return nil, fmt.Errorf("%w: store %s was too slow", regionpb.ErrorOf(regionpb.NotComplete), store)
		}
		return nil, err
	}
	return regionpb.DecodeReadResponse(answer)
}

// serveRead reads for another store.
func (s *stores) serveRead(ctx context.Context, _ raftid.StoreID, payload []byte, reply func([]byte, error)) {
	req, err := regionpb.DecodeReadRequest(payload)
	if err != nil {
		reply(nil, err)
		return
	}
	s.serve(func(err error) {
		var resp *regionpb.ReadResponse
		h := s.node.regions.get(req.Region)
		switch {
		case err != nil:
		case h == nil:
			err = regionpb.ErrorOf(regionpb.RegionNotFound)
		default:
			resp, err = h.Read(ctx, req)
		}
		if err != nil && ctx.Err() != nil {
			reply(nil, err)
			return
		}
		var b []byte
		if resp != nil {
			b = make([]byte, 0, regionpb.ReadResponseSize(resp))
		}
		reply(regionpb.AppendReadResponse(b, resp, err), nil)
	})
}

// serve calls f, which may wait, on a goroutine of its own; when too many of them run, at once and
// with the error that f is to answer.
func (s *stores) serve(f func(refused error)) { s.serveIn(s.reads, f) }

// serveIn is serve with slots of its own.
func (s *stores) serveIn(slots chan struct{}, f func(refused error)) {
	select {
	case slots <- struct{}{}:
	default:
		f(regionpb.ErrorOf(regionpb.TooManyRequests))
		return
	}
	s.node.wg.Go(func() {
		defer func() { <-slots }()
		f(nil)
	})
}
