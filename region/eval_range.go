package region

import (
	"bytes"
	"sort"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/region/regionpb"
)

// checkRange refuses a range at a revision that is not, or no longer, readable. It fails the
// whole transaction, so it must be known before anything is counted (C-1): the write waited
// until the region was complete through the cut that its gateway took, hence a revision that
// the client can have seen is not above V.
func (e *evaluator) checkRange(r *pb.RangeRequest) *regionpb.Error {
	rev := mvcc.Revision(r.GetRevision())
	switch {
	case rev == 0:
		return nil
	case rev > e.v:
		return regionpb.ErrorOf(regionpb.FutureRevision)
	case rev < e.floor:
		return regionpb.ErrorOf(regionpb.Compacted)
	}
	return nil
}

// rangeOp runs a range inside a transaction. With a revision it reads history, which no pending
// version can be part of; else it sees the overlay and what the transaction wrote before it.
func (e *evaluator) rangeOp(r *pb.RangeRequest) *pb.RangeResponse {
	resp := &pb.RangeResponse{Header: &pb.ResponseHeader{}}
	e.stamp(&resp.Header.Revision)
	at := latest
	if r.GetRevision() > 0 {
		at = mvcc.Revision(r.GetRevision())
	}
	if r.GetCountOnly() {
		resp.Count = e.count(r.GetKey(), r.GetRangeEnd(), at)
		return resp
	}
	// Keys alone come without lease too, as etcd answers them from its index; not when sorted by
	// value, because it must fetch them then.
	keysOnly := r.GetKeysOnly() && r.GetSortTarget() != pb.RangeRequest_VALUE
	var max int64
	if limitFirst(r) {
		max = limitOf(r.GetLimit())
	}
	all := e.scan(r.GetKey(), r.GetRangeEnd(), at, keysOnly, max)
	if e.stopped() {
		return resp
	}
	open := false
	kvs := make([]*mvccpb.KeyValue, len(all))
	for i := range all {
		p := &all[i].pending
		if keysOnly {
			p.value, p.lease = nil, 0
		}
		_, mod := p.mod.value()
		_, create := p.create.value()
		open = open || !mod || !create
		kvs[i] = e.kv(all[i].key, p)
	}
	resp.Count = int64(len(all))
	if max > 0 && int64(len(all)) >= max {
		resp.Count = e.count(r.GetKey(), r.GetRangeEnd(), at)
	}
	if open && needsRevisions(r) {
		e.cmd.tmpl.late = append(e.cmd.tmpl.late, lateRange{resp: resp, req: r, kvs: kvs})
	} else {
		finishRange(resp, kvs, r)
	}
	return resp
}

// limitFirst says whether the limit is applied to the keys in key order, before sorting. For a
// sort target without an order etcd does that too, although it then sorts what is left.
func limitFirst(r *pb.RangeRequest) bool {
	inOrder := r.GetSortOrder() == pb.RangeRequest_NONE ||
		r.GetSortTarget() == pb.RangeRequest_KEY && r.GetSortOrder() == pb.RangeRequest_ASCEND
	return inOrder && !filtered(r)
}

func sorted(r *pb.RangeRequest) bool {
	return r.GetSortTarget() != pb.RangeRequest_KEY || r.GetSortOrder() == pb.RangeRequest_DESCEND
}

func filtered(r *pb.RangeRequest) bool {
	return r.GetMinModRevision() != 0 || r.GetMaxModRevision() != 0 || r.GetMinCreateRevision() != 0 || r.GetMaxCreateRevision() != 0
}

func needsRevisions(r *pb.RangeRequest) bool {
	return filtered(r) || r.GetSortTarget() == pb.RangeRequest_MOD || r.GetSortTarget() == pb.RangeRequest_CREATE
}

// finishRange filters, sorts and cuts the keys of a range, in etcd's order of these steps.
func finishRange(resp *pb.RangeResponse, kvs []*mvccpb.KeyValue, r *pb.RangeRequest) {
	if filtered(r) {
		kept := kvs[:0]
		for _, kv := range kvs {
			if (r.GetMaxModRevision() != 0 && kv.ModRevision > r.GetMaxModRevision()) ||
				(r.GetMinModRevision() != 0 && kv.ModRevision < r.GetMinModRevision()) ||
				(r.GetMaxCreateRevision() != 0 && kv.CreateRevision > r.GetMaxCreateRevision()) ||
				(r.GetMinCreateRevision() != 0 && kv.CreateRevision < r.GetMinCreateRevision()) {
				continue
			}
			kept = append(kept, kv)
		}
		kvs = kept
	}
	if sorted(r) {
		sortKVs(kvs, r.GetSortTarget(), r.GetSortOrder())
	}
	if limit := r.GetLimit(); limit > 0 && int64(len(kvs)) > limit {
		kvs, resp.More = kvs[:limit], true
	}
	if r.GetKeysOnly() {
		for _, kv := range kvs {
			kv.Value = nil
		}
	}
	resp.Kvs = kvs
}

// kvSorter is sorted with the algorithm that etcd uses, which is not stable, so that ties come
// out alike.
type kvSorter struct {
	kvs  []*mvccpb.KeyValue
	less func(a, b *mvccpb.KeyValue) bool
}

func (s *kvSorter) Len() int           { return len(s.kvs) }
func (s *kvSorter) Less(i, j int) bool { return s.less(s.kvs[i], s.kvs[j]) }
func (s *kvSorter) Swap(i, j int)      { s.kvs[i], s.kvs[j] = s.kvs[j], s.kvs[i] }

func sortKVs(kvs []*mvccpb.KeyValue, target pb.RangeRequest_SortTarget, order pb.RangeRequest_SortOrder) {
	s := &kvSorter{kvs: kvs}
	switch target {
	case pb.RangeRequest_KEY:
		s.less = func(a, b *mvccpb.KeyValue) bool { return bytes.Compare(a.Key, b.Key) < 0 }
	case pb.RangeRequest_VERSION:
		s.less = func(a, b *mvccpb.KeyValue) bool { return a.Version < b.Version }
	case pb.RangeRequest_CREATE:
		s.less = func(a, b *mvccpb.KeyValue) bool { return a.CreateRevision < b.CreateRevision }
	case pb.RangeRequest_MOD:
		s.less = func(a, b *mvccpb.KeyValue) bool { return a.ModRevision < b.ModRevision }
	case pb.RangeRequest_VALUE:
		s.less = func(a, b *mvccpb.KeyValue) bool { return bytes.Compare(a.Value, b.Value) < 0 }
	default:
		return // refused by the gateway
	}
	if order == pb.RangeRequest_DESCEND {
		sort.Sort(sort.Reverse(s))
	} else { // also NONE, with another target than the key
		sort.Sort(s)
	}
}
