package etcdrule

import (
	"bytes"
	"sort"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// HasRevisionFilters says whether a range filters by revisions.
func HasRevisionFilters(r *pb.RangeRequest) bool {
	return r.GetMinModRevision() != 0 || r.GetMaxModRevision() != 0 || r.GetMinCreateRevision() != 0 || r.GetMaxCreateRevision() != 0
}

// Passes says whether revisions pass the filters of a range.
func Passes(r *pb.RangeRequest, mod, create int64) bool {
	return !(r.GetMinModRevision() != 0 && mod < r.GetMinModRevision() ||
		r.GetMaxModRevision() != 0 && mod > r.GetMaxModRevision() ||
		r.GetMinCreateRevision() != 0 && create < r.GetMinCreateRevision() ||
		r.GetMaxCreateRevision() != 0 && create > r.GetMaxCreateRevision())
}

// KeyOrder says whether a range wants the natural order, ascending by key. As in etcd, an order
// of NONE with a target other than the key counts as natural order for the place where the limit
// is applied, although the result is then sorted.
func KeyOrder(r *pb.RangeRequest) bool {
	return r.GetSortOrder() == pb.RangeRequest_NONE ||
		r.GetSortTarget() == pb.RangeRequest_KEY && r.GetSortOrder() == pb.RangeRequest_ASCEND
}

// KeysFromIndex says whether etcd answers a range from its index, which knows neither value nor
// lease: of keys alone, except where the order is by value.
func KeysFromIndex(r *pb.RangeRequest) bool {
	return r.GetKeysOnly() && r.GetSortTarget() != pb.RangeRequest_VALUE
}

// Order is how a result is sorted. The zero value keeps the order of keys.
type Order struct {
	less    func(a, b *mvccpb.KeyValue) bool
	descend bool
}

// OrderOf translates etcd's sort options. A target other than the key without an order means
// ascending.
func OrderOf(r *pb.RangeRequest) Order {
	o := Order{descend: r.GetSortOrder() == pb.RangeRequest_DESCEND}
	switch r.GetSortTarget() {
	case pb.RangeRequest_VERSION:
		o.less = func(a, b *mvccpb.KeyValue) bool { return a.Version < b.Version }
	case pb.RangeRequest_CREATE:
		o.less = func(a, b *mvccpb.KeyValue) bool { return a.CreateRevision < b.CreateRevision }
	case pb.RangeRequest_MOD:
		o.less = func(a, b *mvccpb.KeyValue) bool { return a.ModRevision < b.ModRevision }
	case pb.RangeRequest_VALUE:
		o.less = func(a, b *mvccpb.KeyValue) bool { return bytes.Compare(a.Value, b.Value) < 0 }
	default:
		if o.descend {
			o.less = func(a, b *mvccpb.KeyValue) bool { return bytes.Compare(a.Key, b.Key) < 0 }
		}
	}
	return o
}

// Natural says that keys in their own order need no sorting.
func (o Order) Natural() bool { return o.less == nil }

// Sort sorts keys that are in key order with the algorithm that etcd uses. It is not stable; on the
// same input ties come out alike.
func (o Order) Sort(kvs []*mvccpb.KeyValue) {
	if !o.Natural() {
		sort.Sort(o.of(kvs))
	}
}

// SortStable sorts and leaves equal ones in the order they have.
func (o Order) SortStable(kvs []*mvccpb.KeyValue) {
	if !o.Natural() {
		sort.Stable(o.of(kvs))
	}
}

func (o Order) of(kvs []*mvccpb.KeyValue) sort.Interface {
	s := &sorter{kvs: kvs, less: o.less}
	if o.descend {
		return sort.Reverse(s)
	}
	return s
}

type sorter struct {
	kvs  []*mvccpb.KeyValue
	less func(a, b *mvccpb.KeyValue) bool
}

func (s *sorter) Len() int           { return len(s.kvs) }
func (s *sorter) Less(i, j int) bool { return s.less(s.kvs[i], s.kvs[j]) }
func (s *sorter) Swap(i, j int)      { s.kvs[i], s.kvs[j] = s.kvs[j], s.kvs[i] }
