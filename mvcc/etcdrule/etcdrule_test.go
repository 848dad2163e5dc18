package etcdrule

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// TestCompares holds each target and result against plain comparison, and etcd's odd cases: no key,
// a union field of another target, targets and results that do not exist.
func TestCompares(t *testing.T) {
	kv := &mvccpb.KeyValue{Value: []byte("m"), Version: 5, CreateRevision: 5, ModRevision: 5, Lease: 5}
	compare := func(target pb.Compare_CompareTarget, result pb.Compare_CompareResult, n int64) *pb.Compare {
		c := &pb.Compare{Target: target, Result: result}
		switch target {
		case pb.Compare_VERSION:
			c.TargetUnion = &pb.Compare_Version{Version: n}
		case pb.Compare_CREATE:
			c.TargetUnion = &pb.Compare_CreateRevision{CreateRevision: n}
		case pb.Compare_MOD:
			c.TargetUnion = &pb.Compare_ModRevision{ModRevision: n}
		case pb.Compare_LEASE:
			c.TargetUnion = &pb.Compare_Lease{Lease: n}
		case pb.Compare_VALUE:
			c.TargetUnion = &pb.Compare_Value{Value: []byte{byte('m' - 5 + n)}}
		}
		return c
	}
	want := func(result pb.Compare_CompareResult, actual, n int64) bool {
		return map[pb.Compare_CompareResult]bool{
			pb.Compare_EQUAL: actual == n, pb.Compare_NOT_EQUAL: actual != n, pb.Compare_GREATER: actual > n, pb.Compare_LESS: actual < n, 99: true,
		}[result]
	}
	for target := range pb.Compare_CompareTarget(5) {
		for _, result := range []pb.Compare_CompareResult{pb.Compare_EQUAL, pb.Compare_NOT_EQUAL, pb.Compare_GREATER, pb.Compare_LESS, 99} {
			for n := int64(3); n <= 7; n++ {
				c := compare(target, result, n)
				if got := Holds(c, kv); got != want(result, 5, n) {
					t.Errorf("%v %v %d: %v", target, result, n, got)
				}
				if got := HoldsWithoutKey(c); got != (target != pb.Compare_VALUE && want(result, 0, n)) {
					t.Errorf("no key: %v %v %d: %v", target, result, n, got)
				}
			}
		}
	}
	other := compare(pb.Compare_LEASE, pb.Compare_GREATER, 7)
	other.Target = pb.Compare_VERSION
	if !Holds(other, kv) {
		t.Error("a field of another target must count as 0")
	}
	if !Holds(compare(99, pb.Compare_EQUAL, 7), kv) {
		t.Error("an unknown target must be equal")
	}
}

// TestOrders sorts by every target in every order; ties of the stable form stay in key order.
func TestOrders(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var kvs []*mvccpb.KeyValue
	for i := range 200 {
		kvs = append(kvs, &mvccpb.KeyValue{Key: fmt.Appendf(nil, "%03d", i), Value: []byte{byte(rng.IntN(9))},
			Version: rng.Int64N(9), CreateRevision: rng.Int64N(9), ModRevision: rng.Int64N(9)})
	}
	field := map[pb.RangeRequest_SortTarget]func(*mvccpb.KeyValue) string{
		pb.RangeRequest_KEY:     func(kv *mvccpb.KeyValue) string { return string(kv.Key) },
		pb.RangeRequest_VALUE:   func(kv *mvccpb.KeyValue) string { return string(kv.Value) },
		pb.RangeRequest_VERSION: func(kv *mvccpb.KeyValue) string { return fmt.Sprint(kv.Version) },
		pb.RangeRequest_CREATE:  func(kv *mvccpb.KeyValue) string { return fmt.Sprint(kv.CreateRevision) },
		pb.RangeRequest_MOD:     func(kv *mvccpb.KeyValue) string { return fmt.Sprint(kv.ModRevision) },
	}
	for target, of := range field {
		for _, order := range []pb.RangeRequest_SortOrder{pb.RangeRequest_NONE, pb.RangeRequest_ASCEND, pb.RangeRequest_DESCEND} {
			r := &pb.RangeRequest{SortTarget: target, SortOrder: order}
			o := OrderOf(r)
			if natural := target == pb.RangeRequest_KEY && order != pb.RangeRequest_DESCEND; o.Natural() != natural {
				t.Errorf("%v %v is natural: %v", target, order, o.Natural())
			}
			plain, stable := slices.Clone(kvs), slices.Clone(kvs)
			o.Sort(plain)
			o.SortStable(stable)
			for i := 1; i < len(kvs); i++ {
				for _, list := range [][]*mvccpb.KeyValue{plain, stable} {
					a, b := of(list[i-1]), of(list[i])
					if order == pb.RangeRequest_DESCEND && a < b || order != pb.RangeRequest_DESCEND && a > b {
						t.Fatalf("%v %v: %q before %q", target, order, a, b)
					}
				}
				if a, b := stable[i-1], stable[i]; of(a) == of(b) && string(a.Key) > string(b.Key) {
					t.Fatalf("%v %v: a tie out of key order", target, order)
				}
			}
		}
	}
}

// TestFilters: a bound of 0 is none, others are inclusive.
func TestFilters(t *testing.T) {
	for _, c := range []struct {
		r           *pb.RangeRequest
		mod, create int64
		want        bool
	}{
		{&pb.RangeRequest{}, 1, 1, true},
		{&pb.RangeRequest{MinModRevision: 3}, 3, 1, true}, {&pb.RangeRequest{MinModRevision: 3}, 2, 9, false},
		{&pb.RangeRequest{MaxModRevision: 3}, 3, 9, true}, {&pb.RangeRequest{MaxModRevision: 3}, 4, 1, false},
		{&pb.RangeRequest{MinCreateRevision: 3}, 1, 3, true}, {&pb.RangeRequest{MinCreateRevision: 3}, 9, 2, false},
		{&pb.RangeRequest{MaxCreateRevision: 3}, 9, 3, true}, {&pb.RangeRequest{MaxCreateRevision: 3}, 1, 4, false},
	} {
		if got := Passes(c.r, c.mod, c.create); got != c.want {
			t.Errorf("%v lets (%d, %d) pass: %v", c.r, c.mod, c.create, got)
		}
	}
}
