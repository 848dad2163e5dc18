package router

import (
	"bytes"
	"cmp"
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
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

// compare evaluates one compare: every key of its range must satisfy it. Without keys, numbers
// are compared as 0 and values never match, since protobuf cannot tell "no value" from "empty".
func (r *Router) compare(ctx context.Context, v view, a ahead, c *pb.Compare) (bool, error) {
	if kv, ok := a[string(c.Key)]; ok && len(c.RangeEnd) == 0 {
		if kv == nil {
			return matchesNothing(c), nil
		}
		return matches(c, kv), nil
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
			if !matches(c, kv) {
				return false, nil
			}
		}
	}
	if found {
		return true, nil
	}
	return matchesNothing(c), nil
}

// bareCompare says whether a compare needs neither value nor lease.
func bareCompare(c *pb.Compare) bool {
	return c.Target != pb.Compare_VALUE && c.Target != pb.Compare_LEASE
}

// matchesNothing compares where there is no key.
func matchesNothing(c *pb.Compare) bool {
	return c.Target != pb.Compare_VALUE && matches(c, &mvccpb.KeyValue{})
}

// matches compares one key. A union field that does not belong to the target counts as 0, an
// unknown target as equal, an unknown result as true.
func matches(c *pb.Compare, kv *mvccpb.KeyValue) bool {
	var d int
	switch c.Target {
	case pb.Compare_VALUE:
		d = bytes.Compare(kv.Value, c.GetValue())
	case pb.Compare_CREATE:
		d = cmp.Compare(kv.CreateRevision, c.GetCreateRevision())
	case pb.Compare_MOD:
		d = cmp.Compare(kv.ModRevision, c.GetModRevision())
	case pb.Compare_VERSION:
		d = cmp.Compare(kv.Version, c.GetVersion())
	case pb.Compare_LEASE:
		d = cmp.Compare(kv.Lease, c.GetLease())
	}
	switch c.Result {
	case pb.Compare_EQUAL:
		return d == 0
	case pb.Compare_NOT_EQUAL:
		return d != 0
	case pb.Compare_GREATER:
		return d > 0
	case pb.Compare_LESS:
		return d < 0
	}
	return true
}
