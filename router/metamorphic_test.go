package router_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"braid/mvcc"
	"braid/mvcc/etcdrule"
	"braid/region/regionpb"
	"braid/router"
	"braid/router/routertest"
)

// key names one of a small set of keys, so that requests meet.
func key(i int) []byte { return fmt.Appendf(nil, "k%02d", i) }

// splits divides the keys into so many regions.
func splits(regions int) []string {
	var list []string
	for i := 1; i < regions; i++ {
		list = append(list, string(key(i*60/regions)))
	}
	return list
}

func fastOptions() router.Options {
	return router.Options{RequestTimeout: time.Hour, RetryMin: time.Microsecond, RetryMax: time.Microsecond, CountWorkers: 3, ChunkBytes: 64, PageBytes: 200}
}

// generator makes requests.
type generator struct {
	*rand.Rand
	rev int64 // about the current revision
}

func (g *generator) one(n int) bool { return g.IntN(n) == 0 }

func (g *generator) bounds() (from, end []byte) {
	switch g.IntN(8) {
	case 0:
		return key(g.IntN(60)), nil
	case 1:
		return key(g.IntN(60)), []byte{0}
	case 2:
		return []byte{0}, []byte{0}
	}
	return key(g.IntN(60)), key(g.IntN(60)) // often empty
}

func (g *generator) revision() int64 {
	if g.one(3) {
		return g.Int64N(g.rev+4) - 2
	}
	return 0
}

func (g *generator) rangeRequest() *pb.RangeRequest {
	r := &pb.RangeRequest{Revision: g.revision(), Serializable: g.one(4), KeysOnly: g.one(4), CountOnly: g.one(8)}
	r.Key, r.RangeEnd = g.bounds()
	if g.one(2) {
		r.Limit = g.Int64N(25) - 2
	}
	if g.one(2) {
		r.SortOrder = pb.RangeRequest_SortOrder(g.IntN(3))
		r.SortTarget = pb.RangeRequest_SortTarget(g.IntN(5))
	}
	for _, f := range []*int64{&r.MinModRevision, &r.MaxModRevision, &r.MinCreateRevision, &r.MaxCreateRevision} {
		if g.one(8) {
			*f = g.Int64N(g.rev+2) - 1
		}
	}
	return r
}

func (g *generator) compare(k []byte) *pb.Compare {
	c := &pb.Compare{Key: k, Result: pb.Compare_CompareResult(g.IntN(4)), Target: pb.Compare_CompareTarget(g.IntN(5))}
	switch pb.Compare_CompareTarget(g.IntN(5)) { // sometimes one that does not belong to the target
	case pb.Compare_VERSION:
		c.TargetUnion = &pb.Compare_Version{Version: g.Int64N(3)}
	case pb.Compare_CREATE:
		c.TargetUnion = &pb.Compare_CreateRevision{CreateRevision: g.Int64N(g.rev + 1)}
	case pb.Compare_MOD:
		c.TargetUnion = &pb.Compare_ModRevision{ModRevision: g.Int64N(g.rev + 1)}
	case pb.Compare_VALUE:
		c.TargetUnion = &pb.Compare_Value{Value: g.value()}
	}
	return c
}

func (g *generator) value() []byte { return []byte("xxxxxxxxxxxxxxxxxxxxxxx")[:g.IntN(20)] }

func (g *generator) readTxn(depth int) *pb.TxnRequest {
	t := &pb.TxnRequest{}
	for range g.IntN(3) {
		c := g.compare(nil)
		c.Key, c.RangeEnd = g.bounds()
		t.Compare = append(t.Compare, c)
	}
	for _, branch := range []*[]*pb.RequestOp{&t.Success, &t.Failure} {
		for range g.IntN(3) {
			op := &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: g.rangeRequest()}}
			if depth > 0 && g.one(4) {
				op.Request = &pb.RequestOp_RequestTxn{RequestTxn: g.readTxn(depth - 1)}
			}
			*branch = append(*branch, op)
		}
	}
	return t
}

func (g *generator) writeTxn() *pb.TxnRequest {
	k := key(g.IntN(60))
	t := &pb.TxnRequest{Compare: []*pb.Compare{g.compare(k)}}
	get := &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: k, Revision: g.revision()}}}
	put := &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: k, Value: g.value(), PrevKv: g.one(2)}}}
	del := &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: k, PrevKv: g.one(2)}}}
	t.Success, t.Failure = []*pb.RequestOp{get, put, get}, []*pb.RequestOp{del, get}
	return t
}

// wideTxn writes and reads anywhere, nested too. As etcd wants it, no key is written twice on one
// way through it: below a border only ranges are deleted, each part once, above it keys are put.
func (g *generator) wideTxn(low, border, high, depth int) *pb.TxnRequest {
	t := g.readTxn(0)
	t.Success, t.Failure = nil, nil
	if g.one(2) {
		t.Compare = nil
	}
	for _, branch := range []*[]*pb.RequestOp{&t.Success, &t.Failure} {
		at, put := low, border
		for range g.IntN(6) {
			op := &pb.RequestOp{}
			switch g.IntN(5) {
			case 0:
				end := at + g.IntN(border-at+1)
				del := &pb.DeleteRangeRequest{Key: key(at), RangeEnd: key(end), PrevKv: g.one(2)}
				op.Request = &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: del}
				at = end
			case 1, 2:
				if put += 1 + g.IntN(12); put >= high {
					continue
				}
				op.Request = &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: key(put), Value: g.value(), PrevKv: g.one(2), IgnoreValue: g.one(12)}}
			case 3:
				if depth == 0 || put+12 >= high {
					continue
				}
				op.Request = &pb.RequestOp_RequestTxn{RequestTxn: g.wideTxn(put+1, put+1, put+12, depth-1)}
				put += 12
			default:
				op.Request = &pb.RequestOp_RequestRange{RequestRange: g.rangeRequest()}
			}
			*branch = append(*branch, op)
		}
	}
	return t
}

// request runs one random request on a router and returns what came of it.
func request(g *generator) func(r *router.Router) (proto.Message, error) {
	ctx := context.Background()
	switch g.IntN(12) {
	case 10:
		req := g.wideTxn(0, g.IntN(50), 60, 1)
		return func(r *router.Router) (proto.Message, error) { return r.Txn(ctx, proto.Clone(req).(*pb.TxnRequest)) }
	case 11:
		if !g.one(3) {
			break
		}
		req := &pb.DeleteRangeRequest{PrevKv: g.one(2)}
		req.Key, req.RangeEnd = g.bounds()
		return func(r *router.Router) (proto.Message, error) { return r.DeleteRange(ctx, req) }
	case 0, 1:
		req := &pb.PutRequest{Key: key(g.IntN(60)), Value: g.value(), PrevKv: g.one(2)}
		req.IgnoreValue = g.one(10)
		return func(r *router.Router) (proto.Message, error) { return r.Put(ctx, req) }
	case 2:
		req := &pb.DeleteRangeRequest{Key: key(g.IntN(60)), PrevKv: g.one(2)}
		return func(r *router.Router) (proto.Message, error) { return r.DeleteRange(ctx, req) }
	case 3:
		req := g.writeTxn()
		return func(r *router.Router) (proto.Message, error) { return r.Txn(ctx, req) }
	case 4:
		req := g.readTxn(2)
		return func(r *router.Router) (proto.Message, error) { return r.Txn(ctx, req) }
	case 5:
		if !g.one(4) {
			break
		}
		req := &pb.CompactionRequest{Revision: g.Int64N(g.rev+2) - 1}
		return func(r *router.Router) (proto.Message, error) { return r.Compact(ctx, req) }
	case 6:
		rev := g.revision()
		return func(r *router.Router) (proto.Message, error) {
			h, err := r.HashKV(ctx, rev)
			return &pb.HashKVResponse{Header: &pb.ResponseHeader{Revision: int64(h.Revision)}, Hash: h.Hash,
				CompactRevision: int64(h.Floor), HashRevision: int64(h.At)}, err
		}
	case 7:
		req := g.rangeRequest()
		req.SortOrder, req.MinModRevision, req.MaxModRevision, req.MinCreateRevision, req.MaxCreateRevision = 0, 0, 0, 0, 0
		req.SortTarget = 0
		return func(r *router.Router) (proto.Message, error) { return streamed(r, req) }
	}
	req := g.rangeRequest()
	return func(r *router.Router) (proto.Message, error) { return r.Range(ctx, req) }
}

// streamed puts the chunks of a stream together and checks their shape.
func streamed(r *router.Router, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	whole := &pb.RangeResponse{}
	last := false
	err := r.RangeStream(context.Background(), req, func(chunk *pb.RangeResponse) error {
		if last {
			return errors.New("a chunk after the last one")
		}
		if len(whole.Kvs) == 0 && len(chunk.Kvs) > 10 {
			return fmt.Errorf("the first chunk has %d keys", len(chunk.Kvs))
		}
		last = chunk.Header != nil
		if !last && (chunk.More || chunk.Count != 0 || len(chunk.Kvs) == 0) {
			return fmt.Errorf("a chunk that is not the last: %v", chunk)
		}
		proto.Merge(whole, chunk)
		return nil
	})
	if err == nil && !last {
		err = errors.New("no last chunk")
	}
	return whole, err
}

// locked is randomness for what counts on several goroutines.
type locked struct {
	mu  sync.Mutex
	rng *rand.Rand
}

func (l *locked) IntN(n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rng.IntN(n)
}

// TestRegionsDoNotMatter is the law of a sharded store: the same requests give the same answers
// over any number of regions, whatever splits, refusals and small replies happen on the way.
func TestRegionsDoNotMatter(t *testing.T) {
	for seed := range uint64(30) {
		run := func() {
			faults := &locked{rng: rand.New(rand.NewPCG(seed, 99))}
			var stores []*routertest.Store
			var routers []*router.Router
			for i, n := range []int{1, 3, 17, 3} {
				s := routertest.New(splits(n)...)
				if i > 0 {
					s.ReplyBytesMax = 40
					hashes := 0 // refused in a row; a hash is not tried for ever
					s.Fail = func(op string) error {
						if faults.IntN(10) > 0 {
							if op == "hash" {
								hashes = 0
							}
							return nil
						}
						if op == "hash" {
							if hashes++; hashes > 3 {
								hashes = 0
								return nil
							}
						}
						errs := []error{regionpb.ErrorOf(regionpb.NotLeader), regionpb.ErrorOf(regionpb.RegionNotFound),
							regionpb.ErrorOf(regionpb.VoidByFence), fmt.Errorf("full: %w", router.ErrNotSent)}
						return errs[faults.IntN(len(errs))]
					}
				}
				stores = append(stores, s)
				routers = append(routers, router.New(s, s, fastOptions()))
			}
			g := &generator{Rand: rand.New(rand.NewPCG(seed, 1)), rev: 1}
			for step := range 150 {
				do := request(g)
				want, wantErr := do(routers[0])
				for i, r := range routers[1:] {
					if faults.IntN(20) == 0 {
						stores[i+1].Split(string(key(faults.IntN(60))))
					}
					if faults.IntN(20) == 0 {
						stores[i+1].Overtake()
					}
					got, err := do(r)
					if fmt.Sprint(err) != fmt.Sprint(wantErr) {
						t.Fatalf("seed %d step %d store %d: error %v, with one region %v", seed, step, i+1, err, wantErr)
					}
					if err == nil && !proto.Equal(got, want) {
						t.Fatalf("seed %d step %d store %d: answer\n%v\nwith one region\n%v", seed, step, i+1, prototext.Format(got), prototext.Format(want))
					}
				}
				g.rev = int64(stores[0].Mark().Rev)
			}
		}
		run()
	}
}

// TestRangeIsTheModels compares ranges with the plain way to answer them, and streams with ranges.
func TestRangeIsTheModels(t *testing.T) {
	for seed := range uint64(20) {
		g := &generator{Rand: rand.New(rand.NewPCG(seed, 2)), rev: 1}
		s := routertest.New(splits(5)...)
		s.ReplyBytesMax = 60
		r := router.New(s, s, fastOptions())
		for range 120 {
			if _, err := r.Put(t.Context(), &pb.PutRequest{Key: key(g.IntN(60)), Value: g.value()}); err != nil {
				t.Fatal(err)
			}
		}
		g.rev = int64(s.Mark().Rev)
		for step := range 60 {
			req := g.rangeRequest()
			req.Revision = max(req.Revision, 0)
			got, err := r.Range(t.Context(), req)
			if req.Revision > g.rev {
				if !errors.Is(err, regionpb.ErrorOf(regionpb.FutureRevision)) {
					t.Fatalf("seed %d step %d: %v at a future revision", seed, step, err)
				}
				continue
			}
			if err != nil {
				t.Fatalf("seed %d step %d: %v", seed, step, err)
			}
			rev := mvcc.Revision(req.Revision)
			if rev == 0 {
				rev = mvcc.Revision(g.rev)
			}
			want := routertest.Range(s.Alive(req.Key, req.RangeEnd, rev), req)
			want.Header = &pb.ResponseHeader{Revision: g.rev}
			if !proto.Equal(got, want) {
				t.Fatalf("seed %d step %d: %v\ngot\n%v\nwant\n%v", seed, step, req, prototext.Format(got), prototext.Format(want))
			}
			if etcdrule.KeyOrder(req) && !etcdrule.HasRevisionFilters(req) && req.SortTarget == pb.RangeRequest_KEY {
				got, err := streamed(r, req)
				if err != nil {
					t.Fatalf("seed %d step %d: stream: %v", seed, step, err)
				}
				if !proto.Equal(got, want) {
					t.Fatalf("seed %d step %d: %v\nstreamed\n%v\nwant\n%v", seed, step, req, prototext.Format(got), prototext.Format(want))
				}
			}
		}
	}
}
