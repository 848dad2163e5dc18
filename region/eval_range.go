package region

import (
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/mvcc/etcdrule"
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
	keysOnly := etcdrule.KeysFromIndex(r)
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
	return etcdrule.KeyOrder(r) && !etcdrule.HasRevisionFilters(r)
}

func needsRevisions(r *pb.RangeRequest) bool {
	return etcdrule.HasRevisionFilters(r) || r.GetSortTarget() == pb.RangeRequest_MOD || r.GetSortTarget() == pb.RangeRequest_CREATE
}

// finishRange filters, sorts and cuts the keys of a range, in etcd's order of these steps.
func finishRange(resp *pb.RangeResponse, kvs []*mvccpb.KeyValue, r *pb.RangeRequest) {
	if etcdrule.HasRevisionFilters(r) {
		kvs = slices.DeleteFunc(kvs, func(kv *mvccpb.KeyValue) bool { return !etcdrule.Passes(r, kv.ModRevision, kv.CreateRevision) })
	}
	etcdrule.OrderOf(r).Sort(kvs)
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
