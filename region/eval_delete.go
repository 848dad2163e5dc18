package region

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/region/regionpb"
)

const latest = mvcc.Latest

// deleteRange deletes the living keys of a range, in key order. It changes nothing, and has no
// revision of its own, when there are none.
func (e *evaluator) deleteRange(r *pb.DeleteRangeRequest) *pb.DeleteRangeResponse {
	resp := &pb.DeleteRangeResponse{Header: &pb.ResponseHeader{}}
	all := e.scan(r.GetKey(), r.GetRangeEnd(), latest, !r.GetPrevKv(), 0)
	if e.err != nil {
		return resp
	}
	if r.GetPrevKv() && len(all) > 0 {
		resp.PrevKvs = make([]*mvccpb.KeyValue, len(all))
		for i := range all {
			resp.PrevKvs[i] = e.kv(all[i].key, &all[i].pending)
		}
	}
	own := revision{num: &e.cmd.num}
	for i := range all {
		e.write(regionpb.Effect{Key: all[i].key, Delete: true}, pending{mod: own})
	}
	resp.Deleted = int64(len(all))
	e.stamp(&resp.Header.Revision)
	return resp
}
