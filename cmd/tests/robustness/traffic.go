package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// The key space: regionLetters name one region each, given splitKeys; few keys, so that calls meet.
var (
	regionLetters = []string{"a", "c", "e", "g", "i"}
	splitKeys     = "b,d,f,h"
	keysPerRegion = 4
	trafficKeys   = allKeys()
)

func allKeys() (keys []string) {
	for _, letter := range regionLetters {
		for i := range keysPerRegion {
			keys = append(keys, fmt.Sprint(letter, i))
		}
	}
	return keys
}

const (
	clients       = 12
	callGap       = 18 * time.Millisecond // between a client's calls: keeps histories checkable
	dialPause     = 50 * time.Millisecond // after an endpoint could not be reached
	timeoutMin    = 200 * time.Millisecond
	timeoutMax    = time.Second
	pastRevisions = 40 // how far back reads of the past go
)

// Plant is a fault put into the clients, to prove that the checkers see through a real run.
type Plant string

const (
	// PlantStale records reads as linearizable that were sent as serializable.
	PlantStale Plant = "stale"
	// PlantRetry sends a write again when its outcome is unknown, and records one write.
	PlantRetry Plant = "retry"
)

// Traffic is the clients of a round. Start runs them, Stop ends and waits for them.
type Traffic struct {
	endpoints []string
	seed      uint64
	start     time.Time
	plant     Plant
	ids       atomic.Int64
	acked     atomic.Int64 // acknowledged writes so far
	newest    atomic.Int64 // highest revision any client has seen: where reads of the past start

	cancel context.CancelFunc
	wg     sync.WaitGroup
	mu     sync.Mutex
	ops    []*Op // guarded by mu
}

// NewTraffic prepares clients; the history's clock starts now.
func NewTraffic(endpoints []string, seed uint64, plant Plant) *Traffic {
	return &Traffic{endpoints: endpoints, seed: seed, start: time.Now(), plant: plant}
}

// Start lets the clients go.
func (t *Traffic) Start(ctx context.Context) error {
	ctx, t.cancel = context.WithCancel(ctx)
	for i := range clients {
		c, err := t.newClient(i)
		if err != nil {
			t.Stop()
			return err
		}
		t.wg.Go(func() { c.run(ctx) })
	}
	return nil
}

// Stop ends the clients; a call that is under way is cut off and recorded as unknown.
func (t *Traffic) Stop() {
	t.cancel()
	t.wg.Wait()
}

// Ops returns the calls recorded so far.
func (t *Traffic) Ops() []*Op {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ops[:len(t.ops):len(t.ops)]
}

// Acked is the number of acknowledged writes so far.
func (t *Traffic) Acked() int64 { return t.acked.Load() }

// record keeps a finished call and lets the next reads of the past know its revision.
func (t *Traffic) record(op *Op) {
	if op.OK() && op.Wrote() {
		t.acked.Add(1)
	}
	for rev := op.Revision(); ; {
		newest := t.newest.Load()
		if rev <= newest || t.newest.CompareAndSwap(newest, rev) {
			break
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ops = append(t.ops, op)
}

// client is one sequential caller; run's goroutine owns it.
type client struct {
	t     *Traffic
	id    int
	rng   *rand.Rand
	conns []*grpc.ClientConn
	at    int              // index of the endpoint in use
	mods  map[string]int64 // mod revision of keys as last seen by this client
}

func (t *Traffic) newClient(id int) (*client, error) {
	c := &client{t: t, id: id, rng: rand.New(rand.NewPCG(t.seed, uint64(id))), at: id % len(t.endpoints), mods: map[string]int64{}}
	for _, endpoint := range t.endpoints {
		conn, err := dial(endpoint)
		if err != nil {
			return nil, err
		}
		c.conns = append(c.conns, conn)
	}
	return c, nil
}

// dial makes a connection that tries again soon after its server went away.
func dial(endpoint string) (*grpc.ClientConn, error) {
	return grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.2, MaxDelay: 200 * time.Millisecond},
			MinConnectTimeout: time.Second,
		}))
}

func (c *client) run(ctx context.Context) {
	defer func() {
		for _, conn := range c.conns {
			// Nothing is under way any more; a connection that fails to close is gone as well.
			_ = conn.Close()
		}
	}()
	gap := time.NewTicker(callGap)
	defer gap.Stop()
	for {
		select {
		case <-gap.C:
		case <-ctx.Done():
			return
		}
		op := &Op{ID: int(c.t.ids.Add(1)), Client: c.id}
		op.Req = c.request(op.ID)
		if !c.call(ctx, op) {
			c.at = (c.at + 1) % len(c.conns)
			gap.Reset(dialPause)
			continue
		}
		gap.Reset(callGap)
		c.t.record(op)
		c.learn(op)
		if !op.OK() {
			c.at = (c.at + 1) % len(c.conns)
		}
	}
}

// call makes one attempt: no retries, so that one recorded call is one request. It returns false if
// the request certainly never left.
func (c *client) call(ctx context.Context, op *Op) bool {
	timeout := timeoutMin + time.Duration(c.rng.Int64N(int64(timeoutMax-timeoutMin)))
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	kv := pb.NewKVClient(c.conns[c.at])
	op.Call = time.Since(c.t.start)
	err := send(ctx, kv, op, c.t.plant)
	if err != nil && c.t.plant == PlantRetry && op.IsWrite() {
		again := pb.NewKVClient(c.conns[(c.at+1)%len(c.conns)])
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeoutMax)
		defer cancel()
		err = send(ctx, again, op, c.t.plant)
	}
	op.Return = time.Since(c.t.start)
	if err != nil {
		s := status.Convert(err)
		// grpc reports this only when no connection could be made for the call.
		if s.Code() == codes.Unavailable && strings.Contains(s.Message(), "Error while dialing") {
			return false
		}
		op.Resp, op.Err = nil, fmt.Sprintf("%s: %s", s.Code(), s.Message())
	}
	return true
}

func send(ctx context.Context, kv pb.KVClient, op *Op, plant Plant) (err error) {
	switch r := op.Req.(type) {
	case *pb.RangeRequest:
		if plant == PlantStale {
			r = proto.CloneOf(r)
			r.Serializable = true
		}
		op.Resp, err = kv.Range(ctx, r)
	case *pb.PutRequest:
		op.Resp, err = kv.Put(ctx, r)
	case *pb.DeleteRangeRequest:
		op.Resp, err = kv.DeleteRange(ctx, r)
	case *pb.TxnRequest:
		op.Resp, err = kv.Txn(ctx, r)
	case *pb.CompactionRequest:
		op.Resp, err = kv.Compact(ctx, r)
	}
	return err
}

// learn remembers mod revisions for later compares.
func (c *client) learn(op *Op) {
	note := func(r *pb.RangeResponse) {
		for _, kv := range r.GetKvs() {
			c.mods[string(kv.Key)] = kv.ModRevision
		}
	}
	switch r := op.Resp.(type) {
	case *pb.RangeResponse:
		if op.Req.(*pb.RangeRequest).Revision == 0 {
			note(r)
		}
	case *pb.PutResponse:
		c.mods[string(op.Req.(*pb.PutRequest).Key)] = r.Header.Revision
	case *pb.DeleteRangeResponse:
		for _, key := range keysIn(op.Req.(*pb.DeleteRangeRequest)) {
			delete(c.mods, key)
		}
	case *pb.TxnResponse:
		if r.Succeeded {
			for _, op := range op.Req.(*pb.TxnRequest).Success {
				if p := op.GetRequestPut(); p != nil {
					c.mods[string(p.Key)] = r.Header.Revision
				}
			}
			break
		}
		for i, o := range r.Responses { // keys that are gone are in no answer
			delete(c.mods, string(op.Req.(*pb.TxnRequest).Failure[i].GetRequestRange().GetKey()))
			note(o.GetResponseRange())
		}
	}
}

// request draws a request. Values begin with the call's id, which makes them unique.
func (c *client) request(id int) proto.Message {
	letter := regionLetters[c.rng.IntN(len(regionLetters))]
	key := func() []byte { return []byte(fmt.Sprint(letter, c.rng.IntN(keysPerRegion))) }
	k := key()
	value := func(part int) []byte { return []byte(fmt.Sprintf("%d-%d", id, part)) }
	switch n := c.rng.IntN(1000); {
	case n < 380:
		return &pb.PutRequest{Key: k, Value: value(0), PrevKv: n < 80}
	case n < 500:
		return &pb.RangeRequest{Key: k}
	case n < 540:
		return &pb.RangeRequest{Key: []byte(letter), RangeEnd: []byte(letter + "~")}
	case n < 580:
		return everyKey()
	case n < 620:
		r := everyKey()
		r.Revision = max(1, c.t.newest.Load()-c.rng.Int64N(pastRevisions)+1)
		return r
	case n < 650:
		r := everyKey()
		r.Serializable = true
		return r
	case n < 770:
		return c.compareAndSet([][]byte{k}, &pb.RequestOp{Request: put(k, value(0))})
	case n < 820:
		other := key()
		ops := []*pb.RequestOp{{Request: put(k, value(0))}}
		if string(other) != string(k) {
			ops = append(ops, &pb.RequestOp{Request: put(other, value(1))})
		}
		return c.compareAndSet([][]byte{k}, ops...)
	case n < 890:
		return &pb.DeleteRangeRequest{Key: k, PrevKv: n < 850}
	case n < 900:
		return c.compareAndSet([][]byte{k}, &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: k}}})
	case n < 990:
		return c.overRegions(value, n < 950)
	case n < 996:
		// Everything from some region on; prev_kv tells the checkers what it met.
		return &pb.DeleteRangeRequest{Key: []byte(letter), RangeEnd: []byte("z"), PrevKv: true}
	default:
		return &pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte("z"), PrevKv: true}
	}
}

// overRegions writes one key in each of two to all regions, if all of them are as this client last
// saw them, or without asking.
func (c *client) overRegions(value func(part int) []byte, compare bool) *pb.TxnRequest {
	var keys [][]byte
	var ops []*pb.RequestOp
	for i, at := range c.rng.Perm(len(regionLetters))[:2+c.rng.IntN(len(regionLetters)-1)] {
		keys = append(keys, []byte(fmt.Sprint(regionLetters[at], c.rng.IntN(keysPerRegion))))
		ops = append(ops, &pb.RequestOp{Request: put(keys[i], value(i))})
	}
	if !compare {
		return &pb.TxnRequest{Success: ops}
	}
	return c.compareAndSet(keys, ops...)
}

// everyKey reads all keys the traffic uses.
func everyKey() *pb.RangeRequest { return &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z")} }

func put(key, value []byte) *pb.RequestOp_RequestPut {
	return &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: key, Value: value}}
}

// compareAndSet does ops if the keys are as this client last saw them, else it reads them: what
// Kubernetes sends for every update.
func (c *client) compareAndSet(keys [][]byte, ops ...*pb.RequestOp) *pb.TxnRequest {
	t := &pb.TxnRequest{Success: ops}
	for _, key := range keys {
		t.Compare = append(t.Compare, &pb.Compare{Key: key, Target: pb.Compare_MOD, Result: pb.Compare_EQUAL, TargetUnion: &pb.Compare_ModRevision{ModRevision: c.mods[string(key)]}})
		t.Failure = append(t.Failure, &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: key}}})
	}
	return t
}
