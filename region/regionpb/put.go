package regionpb

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// Most writes are one put. They are transactions like all others, but made in one allocation, and
// shorter between stores.

// NewPut makes the write of one put in one allocation.
func NewPut(req *pb.PutRequest) *WriteRequest {
	w := &struct {
		req  WriteRequest
		txn  pb.TxnRequest
		op   pb.RequestOp
		put  pb.RequestOp_RequestPut
		list [1]*pb.RequestOp
	}{}
	w.put.RequestPut = req
	w.op.Request = &w.put
	w.list[0] = &w.op
	w.txn.Success = w.list[:]
	w.req.Txn = &w.txn
	return &w.req
}

// lonePut returns the put that a transaction consists of; nil when there is more to it.
func lonePut(txn *pb.TxnRequest) *pb.PutRequest {
	if len(txn.GetCompare()) != 0 || len(txn.GetFailure()) != 0 || len(txn.GetSuccess()) != 1 {
		return nil
	}
	return txn.Success[0].GetRequestPut()
}

// NewPutResponse makes the response to the put of a transaction in one allocation; its header is empty.
func NewPutResponse() (*pb.ResponseOp, *pb.PutResponse) {
	a := &struct {
		op    pb.ResponseOp
		union pb.ResponseOp_ResponsePut
		resp  pb.PutResponse
		head  pb.ResponseHeader
	}{}
	a.op.Response, a.union.ResponsePut, a.resp.Header = &a.union, &a.resp, &a.head
	return &a.op, &a.resp
}

// donePut is the answer to a lone put that was executed at a revision.
func donePut(rev int64) *pb.TxnResponse {
	a := &struct {
		txn   pb.TxnResponse
		list  [1]*pb.ResponseOp
		op    pb.ResponseOp
		union pb.ResponseOp_ResponsePut
		put   pb.PutResponse
		heads [2]pb.ResponseHeader
	}{}
	a.heads[0].Revision, a.heads[1].Revision = rev, rev
	a.put.Header = &a.heads[1]
	a.union.ResponsePut = &a.put
	a.op.Response = &a.union
	a.list[0] = &a.op
	a.txn.Header, a.txn.Succeeded, a.txn.Responses = &a.heads[0], true, a.list[:]
	return &a.txn
}

// isDonePut says whether an answer is what donePut makes.
func isDonePut(resp *pb.TxnResponse) bool {
	if !resp.GetSucceeded() || len(resp.GetResponses()) != 1 {
		return false
	}
	put := resp.Responses[0].GetResponsePut()
	return put != nil && put.PrevKv == nil && onlyRevision(resp.Header, resp.Header.GetRevision()) && onlyRevision(put.Header, resp.Header.Revision)
}

func onlyRevision(h *pb.ResponseHeader, rev int64) bool {
	return h != nil && h.ClusterId == 0 && h.MemberId == 0 && h.RaftTerm == 0 && h.Revision == rev
}
