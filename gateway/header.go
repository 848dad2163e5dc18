package gateway

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
)

// header completes response headers. The revision is part of what a request means (the snapshot it
// was served from), so whoever executed the request has set it.
type header struct{ cluster Cluster }

// fill completes a header whose revision is set.
func (h header) fill(rh *pb.ResponseHeader) {
	rh.ClusterId = h.cluster.ClusterID()
	rh.MemberId = h.cluster.MemberID()
	rh.RaftTerm = h.cluster.RaftTerm()
}

// at returns a header for what was executed at a revision.
func (h header) at(rev mvcc.Revision) *pb.ResponseHeader {
	rh := &pb.ResponseHeader{Revision: int64(rev)}
	h.fill(rh)
	return rh
}

// local returns a header for what is answered from this node's own knowledge.
func (h header) local() *pb.ResponseHeader {
	rh := &pb.ResponseHeader{Revision: h.cluster.Revision()}
	h.fill(rh)
	return rh
}

// bare returns a header without a revision, as the cluster service has it.
func (h header) bare() *pb.ResponseHeader {
	rh := &pb.ResponseHeader{}
	h.fill(rh)
	return rh
}
