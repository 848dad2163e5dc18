package router

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// Compact moves the compaction floor to a revision: at once for everybody who reads, later for
// what lies on disk. With "physical" it also waits for that on this node; as in etcd, the wait
// has no time limit but the client's, and it comes before the refusal of a revision that is
// compacted already. The response's header holds only the revision.
func (r *Router) Compact(ctx context.Context, req *pb.CompactionRequest) (*pb.CompactionResponse, error) {
	var hash pdpb.CompactHash
	if req.Physical {
		hash = r.hashBefore(ctx, req.Revision)
	}
	rctx, cancel := r.deadline(ctx)
	rev, err := r.compact(rctx, req.Revision, hash)
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

// hashBefore hashes the store at the revision of a compaction that is to come. etcd does so in every
// compaction, since it walks over everything; here it costs much more than the compaction, so only
// whoever is ready to wait for a physical one pays for it. Without a hash HashKV at the revision
// changes; that is no reason not to compact.
func (r *Router) hashBefore(ctx context.Context, at int64) (hash pdpb.CompactHash) {
	err := r.at(ctx, false, nil, func(ctx context.Context, p point) error {
		rev := mvcc.Revision(at)
		if rev <= 0 || rev <= p.floor || rev > p.rev {
			return nil // refused, or nothing to hash
		}
		sum, err := r.hash(ctx, mvcc.HashSeed(), HashRequest{Cut: p.cut, At: rev, Floor: p.floor, Alive: true})
		hash = pdpb.CompactHash{Rev: rev, Floor: p.floor, Hash: sum}
		return err
	})
	if err != nil {
		return pdpb.CompactHash{}
	}
	return hash
}

// compact asks the oracle until the answer is one, or may be the loss of one.
func (r *Router) compact(ctx context.Context, at int64, hash pdpb.CompactHash) (mvcc.Revision, error) {
	for b := r.backoff(); ; {
		rev, err := r.oracle.Compact(ctx, at, hash)
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
