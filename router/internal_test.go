package router

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc/etcdrule"
)

// TestCollectorLetsGo compares a collector that cannot keep everything with a sort of everything.
func TestCollectorLetsGo(t *testing.T) {
	for _, descend := range []pb.RangeRequest_SortOrder{pb.RangeRequest_ASCEND, pb.RangeRequest_DESCEND} {
		rng := rand.New(rand.NewPCG(7, uint64(descend)))
		req := &pb.RangeRequest{SortTarget: pb.RangeRequest_VERSION, SortOrder: descend, Limit: 50}
		c := collector{limit: req.Limit, order: etcdrule.OrderOf(req)}
		var all []*mvccpb.KeyValue
		held := 0
		for page := range 200 {
			var kvs []*mvccpb.KeyValue
			for i := range 100 {
				kvs = append(kvs, &mvccpb.KeyValue{Key: fmt.Appendf(nil, "%03d%03d", page, i), Version: rng.Int64N(500)})
			}
			all = append(all, kvs...)
			c.add(kvs)
			held = max(held, len(c.kvs))
		}
		got, more := c.result()
		slices.SortStableFunc(all, func(a, b *mvccpb.KeyValue) int {
			if descend == pb.RangeRequest_DESCEND {
				return int(b.Version - a.Version)
			}
			return int(a.Version - b.Version)
		})
		if !more || !slices.Equal(got, all[:50]) {
			t.Errorf("%v: wrong answer, more %v", descend, more)
		}
		if held > keepKeysMax+100 {
			t.Errorf("%v: %d keys were held", descend, held)
		}
	}
}

func TestNextChunk(t *testing.T) {
	for _, c := range []struct {
		keys       int64
		size, want int
		next       int64
	}{{10, 100, 1000, 20}, {10, 500, 1000, 10}, {10, 2000, 1000, 10}, {10, 2001, 1000, 5}, {1, 9999, 1000, 1}} {
		if got := nextChunk(c.keys, c.size, c.want); got != c.next {
			t.Errorf("%+v: %d", c, got)
		}
	}
}
