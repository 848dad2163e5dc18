package region

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// txnGen makes random transactions over a few hot keys. Within one transaction the keys that are
// written are distinct, as the gateway guarantees.
type txnGen struct {
	rnd *rand.Rand
	rev func() int64 // a revision somewhere around the present
	// history is a revision for a range to name: readable, compacted or far in the future
	history func() int64
	used    map[string]bool
	n       int
}

func (g *txnGen) key() string { return string(rune('b' + g.rnd.IntN(6))) }

func (g *txnGen) pair() (key, end []byte) {
	key = []byte(g.key())
	switch g.rnd.IntN(4) {
	case 0:
		end = []byte(g.key())
	case 1:
		end = []byte("y")
	}
	return key, end
}

func (g *txnGen) txn(depth int) *pb.TxnRequest {
	if depth == 0 {
		g.used = map[string]bool{}
	}
	t := &pb.TxnRequest{}
	for range g.rnd.IntN(3) {
		t.Compare = append(t.Compare, g.compare())
	}
	// The branches exclude each other, but the simplest way to have distinct keys is over both.
	for range g.rnd.IntN(4) {
		t.Success = append(t.Success, g.op(depth))
	}
	for range g.rnd.IntN(3) {
		t.Failure = append(t.Failure, g.op(depth))
	}
	return t
}

func (g *txnGen) compare() *pb.Compare {
	key, end := g.pair()
	if g.rnd.IntN(2) == 0 {
		end = nil
	}
	c := &pb.Compare{Key: key, RangeEnd: end, Result: pb.Compare_CompareResult(g.rnd.IntN(4)), Target: pb.Compare_CompareTarget(g.rnd.IntN(5))}
	switch c.Target {
	case pb.Compare_VERSION:
		c.TargetUnion = &pb.Compare_Version{Version: int64(g.rnd.IntN(4))}
	case pb.Compare_CREATE:
		c.TargetUnion = &pb.Compare_CreateRevision{CreateRevision: g.rev()}
	case pb.Compare_MOD:
		c.TargetUnion = &pb.Compare_ModRevision{ModRevision: g.rev()}
	case pb.Compare_VALUE:
		c.TargetUnion = &pb.Compare_Value{Value: []byte(strconv.Itoa(g.rnd.IntN(9)))}
	case pb.Compare_LEASE:
		c.TargetUnion = &pb.Compare_Lease{Lease: int64(g.rnd.IntN(2))}
	}
	if g.rnd.IntN(20) == 0 {
		c.TargetUnion = nil // read as 0
	}
	if g.rnd.IntN(20) == 0 {
		c.Result = 9 // unknown results are true
	}
	return c
}

func (g *txnGen) op(depth int) *pb.RequestOp {
	switch x := g.rnd.IntN(10); {
	case x < 4:
		key := g.key()
		if g.used[key] {
			return g.rangeOp()
		}
		g.used[key] = true
		g.n++
		p := &pb.PutRequest{Key: []byte(key), Value: []byte(strconv.Itoa(g.rnd.IntN(9))), PrevKv: g.rnd.IntN(2) == 0}
		switch g.rnd.IntN(12) {
		case 0:
			p.Value, p.IgnoreValue = nil, true
		case 1:
			p.IgnoreLease = true
		case 2:
			if g.rnd.IntN(4) == 0 {
				p.Lease = 77
			}
		}
		return putOp(p)
	case x < 6:
		key, end := g.pair()
		for k := 'b'; k < 'h'; k++ {
			s := string(k)
			if s == string(key) || len(end) > 0 && s >= string(key) && s < string(end) {
				if g.used[s] {
					return g.rangeOp()
				}
			}
		}
		for k := 'b'; k < 'h'; k++ {
			s := string(k)
			if s == string(key) || len(end) > 0 && s >= string(key) && s < string(end) {
				g.used[s] = true
			}
		}
		return deleteOp(&pb.DeleteRangeRequest{Key: key, RangeEnd: end, PrevKv: g.rnd.IntN(2) == 0})
	case x < 7 && depth < 2:
		return txnOp(g.txn(depth + 1))
	}
	return g.rangeOp()
}

func (g *txnGen) rangeOp() *pb.RequestOp {
	key, end := g.pair()
	r := &pb.RangeRequest{Key: key, RangeEnd: end}
	some := func(n int) bool { return g.rnd.IntN(n) == 0 }
	if some(3) {
		r.Limit = int64(1 + g.rnd.IntN(4))
	}
	if some(2) {
		r.SortOrder, r.SortTarget = pb.RangeRequest_SortOrder(g.rnd.IntN(3)), pb.RangeRequest_SortTarget(g.rnd.IntN(5))
	}
	if some(4) {
		r.MinModRevision = g.rev()
	}
	if some(4) {
		r.MaxModRevision = g.rev()
	}
	if some(6) {
		r.MinCreateRevision = g.rev()
	}
	if some(6) {
		r.MaxCreateRevision = g.rev()
	}
	r.KeysOnly, r.CountOnly = some(4), some(6)
	if g.history != nil && some(5) {
		r.Revision = g.history()
	}
	return rangeOp(r)
}

// outcome is what a client got, in the order of the log.
type outcome struct {
	txn  *pb.TxnRequest
	resp *pb.TxnResponse
	err  error
}

// runDifferential runs transactions through a leader whose entries are committed, ordered and applied
// at random moments, and checks every answer against the model, run in the order of the log.
func runDifferential(t *testing.T, seed uint64, gaps bool) (deferred uint64) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	var befores []mvcc.Revision
	limits := DefaultLimits
	limits.EntryCommandsMax = 1 + rnd.IntN(5)
	if seed%3 == 0 {
		limits = TinyLimits
		limits.QueueBytesMax, limits.QueueCountMax = 1<<20, 1000
		limits.InflightBytesMax = 1 << 20
	}
	h := newHost(1, testDesc, func(c *Config) {
		c.Limits = limits
		c.Observer.Applied = func(_, _ uint64, _ *pdpb.Item, e *regionpb.Entry, rev mvcc.Revision, void bool) {
			if void {
				t.Fatalf("seed %d: a void entry", seed)
			}
			for i := range e.Commands {
				befores = append(befores, rev)
				if len(e.Commands[i].Effects) > 0 {
					rev++
				}
			}
		}
	})
	follower := newHost(2, testDesc, nil)
	o := newFakeOrder(&testDesc)
	model := newModel()
	gen := &txnGen{rnd: rnd, rev: func() int64 { return max(1, int64(o.rev)+int64(rnd.IntN(12))-6) }}
	gen.history = func() int64 {
		switch rnd.IntN(6) {
		case 0:
			return -1
		case 1:
			return int64(o.rev) + 10_000
		}
		return 1 + rnd.Int64N(int64(o.rev))
	}
	o.cut, o.rev = 1, 20
	if seed%4 == 3 {
		o.floor = 9
	}
	h.lead(6)
	follower.follow(6, 1)
	var got []outcome
	floor := int64(o.floor)
	check := func() {
		for len(got) > 0 {
			g := got[0]
			got = got[1:]
			before := befores[0]
			befores = befores[1:]
			model.rev = int64(before)
			want, werr := model.run(g.txn, int64(before), floor)
			if fmt.Sprint(g.err) != fmt.Sprint(werr) || !proto.Equal(g.resp, want) {
				t.Fatalf("REGION_SEED=%d: before revision %d\n%s\ngot  %s %v\nwant %s %v\nmodel\n%s", seed, before, prototext.Format(g.txn),
					g.resp, g.err, want, werr, model.dump())
			}
		}
	}
	step := func(send bool) {
		switch x := rnd.IntN(10); {
		case x < 5 && send:
			txn := gen.txn(0)
			h.r.Write(&Write{Txn: txn, Cut: o.cut, Reply: func(resp *pb.TxnResponse, err error) { got = append(got, outcome{txn: txn, resp: resp, err: err}) }})
			if rnd.IntN(3) == 0 {
				h.work()
			}
		case x < 6:
			if rnd.IntN(3) == 0 {
				h.log.drop = true // one dropped proposal must leave nothing behind
			}
			h.work()
		case x < 8:
			h.commit(h.log.committed + uint64(rnd.IntN(int(h.log.LastIndex()-h.log.committed)+1)))
		default:
			if rep, ok := h.r.BuildReport(); ok {
				others := 0
				if gaps {
					others = rnd.IntN(3)
				}
				o.order(&rep, others)
			}
			if rnd.IntN(2) == 0 {
				h.feed(o)
			}
		}
		if h.fatal != nil {
			t.Fatalf("seed %d: %v", seed, h.fatal)
		}
		check()
	}
	for range 150 {
		step(true)
	}
	for i := 0; h.r.Stats().Queued > 0 || h.r.Stats().Inflight > 0; i++ {
		if i > 3000 {
			t.Fatalf("seed %d: %d queued, %+v", seed, h.r.Stats().Queued, h.r.Stats())
		}
		step(false)
	}
	h.feed(o)
	follower.copyFrom(h, h.log.LastIndex())
	follower.commit(h.log.committed)
	follower.feed(o)
	if follower.fatal != nil {
		t.Fatalf("seed %d: follower: %v", seed, follower.fatal)
	}
	want := model.dump()
	for _, x := range []*host{h, follower} {
		if d := dump(x.store); d != want {
			t.Fatalf("seed %d: replica %d holds\n%s\nthe model\n%s", seed, x.id, d, want)
		}
	}
	if a, b := h.r.Applied(), follower.r.Applied(); a.String() != b.String() {
		t.Fatalf("seed %d: positions differ: %s, %s", seed, &a, &b)
	}
	deferred += h.r.Stats().Deferred
	if h.r.ov.len() != 0 {
		t.Fatalf("seed %d: %d keys left in the overlay", seed, h.r.ov.len())
	}
	return deferred
}

// dump prints every version of user keys that a store holds.
func dump(s *mvcc.MemStore) string {
	out := ""
	for k := 'b'; k < 'h'; k++ {
		at := mvcc.Latest
		var lines []string
		for {
			v, ok, err := s.Get([]byte(string(k)), at)
			must(err)
			if !ok {
				break
			}
			lines = append(lines, fmt.Sprintf("%c@%d c%d v%d %q\n", k, v.Mod, v.Create, v.Version, v.Value))
			at = v.Mod - 1
		}
		for i := len(lines) - 1; i >= 0; i-- {
			out += lines[i]
		}
	}
	return out
}

// seeds says which seeds to run: REGION_SEED=n runs one alone.
func seeds(t *testing.T, n uint64) (from, to uint64) {
	if s := os.Getenv("REGION_SEED"); s != "" {
		v, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return v, v + 1
	}
	if testing.Short() {
		n /= 10
	}
	return 0, n
}

func TestEvaluationMatchesSequentialModel(t *testing.T) {
	from, to := seeds(t, 600)
	var deferred uint64
	for seed := from; seed < to; seed++ {
		deferred += runDifferential(t, seed, seed%2 == 0)
	}
	if deferred == 0 && to-from > 1 {
		t.Error("no compare ever had to wait for a number: the test does not reach E4")
	}
}
