package router

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/region/regionpb"
)

// Compact moves the compaction floor to a revision: at once for everybody who reads, later for
// what lies on disk. With "physical" it also waits for that on this node; as in etcd, the wait
// has no time limit but the client's, and it comes before the refusal of a revision that is
// compacted already. The response's header holds only the revision.
func (r *Router) Compact(ctx context.Context, req *pb.CompactionRequest) (*pb.CompactionResponse, error) {
	rctx, cancel := r.deadline(ctx)
	rev, err := r.compact(rctx, req.Revision)
	cancel()
	refused := codeOf(err) == regionpb.Compacted
	if err != nil && !refused {
		return nil, settle(ctx, err)
	}
	if req.Physical && r.opts.Scrubbed != nil {
		if serr := r.opts.Scrubbed(ctx, mvcc.Revision(req.Revision)); serr != nil && !refused {
			return nil, settle(ctx, serr)
		}
	}
	if err != nil {
		return nil, err
	}
	return &pb.CompactionResponse{Header: &pb.ResponseHeader{Revision: int64(rev)}}, nil
}

// compact asks the oracle until the answer is one, or may be the loss of one.
func (r *Router) compact(ctx context.Context, at int64) (mvcc.Revision, error) {
	for b := r.backoff(); ; {
		rev, err := r.oracle.Compact(ctx, at)
		if err == nil {
			return rev, nil
		}
		if !notExecuted(err) {
			return 0, unknown(err)
		}
		if werr := b.wait(ctx); werr != nil {
			return 0, werr
		}
	}
}
