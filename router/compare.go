package router

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc/etcdrule"
)

// compares evaluates a list of compares in a snapshot, of which some keys are there; all must hold.
func (r *Router) compares(ctx context.Context, v view, a ahead, list []*pb.Compare) (bool, error) {
	for _, c := range list {
		ok, err := r.compare(ctx, v, a, c)
		if !ok || err != nil {
			return false, err
		}
	}
	return true, nil
}

// compare evaluates one compare: every key of its range must satisfy it.
func (r *Router) compare(ctx context.Context, v view, a ahead, c *pb.Compare) (bool, error) {
	if kv, ok := a[string(c.Key)]; ok && len(c.RangeEnd) == 0 {
		if kv == nil {
			return etcdrule.HoldsWithoutKey(c), nil
		}
		return etcdrule.Holds(c, kv), nil
	}
	s := r.scan(v, selection{keysOnly: bareCompare(c)}, rangeSpan(c.Key, c.RangeEnd))
	found := false
	for !s.done {
		kvs, err := s.next(ctx, 0)
		if err != nil {
			return false, err
		}
		found = found || len(kvs) > 0
		for _, kv := range kvs {
			if !etcdrule.Holds(c, kv) {
				return false, nil
			}
		}
	}
	return found || etcdrule.HoldsWithoutKey(c), nil
}

// bareCompare says whether a compare needs neither value nor lease.
func bareCompare(c *pb.Compare) bool {
	return c.Target != pb.Compare_VALUE && c.Target != pb.Compare_LEASE
}
