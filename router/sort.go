package router

import (
	"bytes"
	"sort"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// order is how a result is sorted; nil less keeps the order of keys.
type order struct {
	less    func(a, b *mvccpb.KeyValue) bool
	descend bool
}

// orderOf translates etcd's sort options. A target other than the key without an order means
// ascending.
func orderOf(req *pb.RangeRequest) order {
	o := order{descend: req.SortOrder == pb.RangeRequest_DESCEND}
	switch req.SortTarget {
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

// kvSort sorts keys and values; the order of equal ones is the sorting algorithm's.
type kvSort struct {
	kvs  []*mvccpb.KeyValue
	less func(a, b *mvccpb.KeyValue) bool
}

func (s *kvSort) Len() int           { return len(s.kvs) }
func (s *kvSort) Swap(i, j int)      { s.kvs[i], s.kvs[j] = s.kvs[j], s.kvs[i] }
func (s *kvSort) Less(i, j int) bool { return s.less(s.kvs[i], s.kvs[j]) }

// A sorted and limited range has to see all keys, but need not keep them. Up to these bounds they
// are kept, so that equal ones come out in the very order that etcd's unstable sort gives them;
// beyond, only those that can still be in the answer.
const (
	keepKeysMax  = 4096
	keepBytesMax = 16 << 20
)

// collector gathers keys that arrive in key order and hands out the first limit of them in the
// wanted order. It keeps at most about the answer and the bounds above.
type collector struct {
	limit int64 // <= 0 is none
	order order

	kvs   []*mvccpb.KeyValue
	bytes int   // of kvs, about; only when it may have to let go of some
	seen  int64 // all that were added
	cut   bool  // some were let go: ties are broken by key from then on
}

func (c *collector) add(kvs []*mvccpb.KeyValue) {
	c.seen += int64(len(kvs))
	if c.kvs == nil {
		c.kvs = kvs
	} else {
		c.kvs = append(c.kvs, kvs...)
	}
	if c.limit <= 0 || c.order.less == nil {
		return
	}
	for _, kv := range kvs {
		c.bytes += len(kv.Key) + len(kv.Value)
	}
	// Twice the limit, so that the sort is paid for by as many additions.
	if n := int64(len(c.kvs)); n/2 > c.limit && (n > keepKeysMax || c.bytes > keepBytesMax) {
		c.trim()
	}
}

// trim lets go of everything that cannot be among the first limit any more.
func (c *collector) trim() {
	c.cut = true
	c.sort()
	clear(c.kvs[c.limit:])
	c.kvs = c.kvs[:c.limit]
	c.bytes = 0
	for _, kv := range c.kvs {
		c.bytes += len(kv.Key) + len(kv.Value)
	}
}

func (c *collector) sort() {
	if c.order.less == nil {
		return
	}
	s := sort.Interface(&kvSort{kvs: c.kvs, less: c.order.less})
	if c.order.descend {
		s = sort.Reverse(s)
	}
	if c.cut {
		// Those kept so far are in front and lie below the new ones, so stability is order
		// by key.
		sort.Stable(s)
		return
	}
	sort.Sort(s)
}

// result returns the answer, and whether the limit cut it.
func (c *collector) result() (kvs []*mvccpb.KeyValue, more bool) {
	c.sort()
	more = c.limit > 0 && c.seen > c.limit
	if more {
		c.kvs = c.kvs[:min(c.limit, int64(len(c.kvs)))]
	}
	return c.kvs, more
}
