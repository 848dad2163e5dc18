package gateway

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/protobuf/proto"

	"braid/router"
)

// kvServer is etcd's KV service. Each method checks, is admitted, executes on the goroutine that
// gRPC gave it, and completes the header.
type kvServer struct {
	s *Server
	// New methods of the service must not compile unnoticed.
	pb.UnsafeKVServer
}

func (k *kvServer) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	if err := checkRange(r); err != nil {
		return nil, err
	}
	if !k.s.limits.enter(0) {
		return nil, rpctypes.ErrTooManyRequests
	}
	defer k.s.limits.leave(0)
	resp, err := k.s.cfg.KV.Range(ctx, r)
	if err != nil {
		return nil, toStatus(err)
	}
	k.s.metrics.ranges.Inc()
	k.s.header.fill(resp.Header)
	return resp, nil
}

func (k *kvServer) RangeStream(r *pb.RangeRequest, stream pb.KV_RangeStreamServer) error {
	if err := checkRangeStream(r); err != nil {
		return err
	}
	if !k.s.limits.enter(0) {
		return rpctypes.ErrTooManyRequests
	}
	defer k.s.limits.leave(0)
	k.s.metrics.ranges.Inc()
	out := &pb.RangeStreamResponse{}
	err := k.s.cfg.KV.RangeStream(stream.Context(), r, func(resp *pb.RangeResponse) error {
		if resp.Header != nil {
			k.s.header.fill(resp.Header)
		}
		out.RangeResponse = resp
		return stream.Send(out)
	})
	return toStatus(err)
}

// admit measures a write as etcd would propose it, and takes its place among the requests in
// flight; the caller must leave with the returned size.
func (s *Server) admit(r proto.Message) (int, error) {
	size := s.sizer().write(r)
	if !s.limits.enter(size) {
		return 0, rpctypes.ErrTooManyRequests
	}
	if size > s.cfg.MaxRequestBytes {
		s.limits.leave(size)
		return 0, rpctypes.ErrGRPCRequestTooLarge
	}
	return size, nil
}

func (s *Server) sizer() sizer { return newSizer(s.cfg.Cluster.MemberID()) }

func (k *kvServer) Put(ctx context.Context, r *pb.PutRequest) (*pb.PutResponse, error) {
	if err := checkPut(r); err != nil {
		return nil, err
	}
	size, err := k.s.admit(r)
	if err != nil {
		return nil, err
	}
	defer k.s.limits.leave(size)
	resp, err := k.s.cfg.KV.Put(ctx, r)
	if err != nil {
		return nil, toStatus(err)
	}
	k.s.metrics.puts.Inc()
	k.s.header.fill(resp.Header)
	return resp, nil
}

func (k *kvServer) DeleteRange(ctx context.Context, r *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	if err := checkDelete(r); err != nil {
		return nil, err
	}
	size, err := k.s.admit(r)
	if err != nil {
		return nil, err
	}
	defer k.s.limits.leave(size)
	resp, err := k.s.cfg.KV.DeleteRange(ctx, r)
	if err != nil {
		return nil, toStatus(err)
	}
	k.s.metrics.deletes.Inc()
	k.s.header.fill(resp.Header)
	return resp, nil
}

func (k *kvServer) Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	if err := checkTxn(r, k.s.cfg.MaxTxnOps); err != nil {
		return nil, err
	}
	size := 0
	if router.ReadOnly(r) { // never proposed in etcd, so its size is not limited
		if !k.s.limits.enter(0) {
			return nil, rpctypes.ErrTooManyRequests
		}
	} else {
		var err error
		if size, err = k.s.admit(r); err != nil {
			return nil, err
		}
	}
	defer k.s.limits.leave(size)
	resp, err := k.s.cfg.KV.Txn(ctx, r)
	if err != nil {
		return nil, toStatus(err)
	}
	k.s.metrics.countTxn(resp)
	k.s.header.fill(resp.Header)
	return resp, nil
}

func (k *kvServer) Compact(ctx context.Context, r *pb.CompactionRequest) (*pb.CompactionResponse, error) {
	if !k.s.limits.enter(0) {
		return nil, rpctypes.ErrTooManyRequests
	}
	defer k.s.limits.leave(0)
	resp, err := k.s.cfg.KV.Compact(ctx, r)
	if err != nil {
		return nil, toStatus(err)
	}
	k.s.header.fill(resp.Header)
	return resp, nil
}
