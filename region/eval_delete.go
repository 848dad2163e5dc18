package region

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/region/regionpb"
)

const latest = mvcc.Latest

// deleteRange deletes the living keys of a range, in key order. It changes nothing, and has no
// revision of its own, when there are none.
func (e *evaluator) deleteRange(r *pb.DeleteRangeRequest) *pb.DeleteRangeResponse {
	resp := &pb.DeleteRangeResponse{Header: &pb.ResponseHeader{}}
	own := revision{num: &e.cmd.num}
	e.each(r.GetKey(), r.GetRangeEnd(), latest, !r.GetPrevKv(), func(key []byte, p *pending) bool {
		if r.GetPrevKv() {
			resp.PrevKvs = append(resp.PrevKvs, e.kv(key, p))
		}
		e.write(regionpb.Effect{Key: key, Delete: true, Detach: p.lease}, pending{mod: own})
		resp.Deleted++
		return true
	})
	if e.stopped() {
		return resp
	}
	e.stamp(&resp.Header.Revision)
	return resp
}
