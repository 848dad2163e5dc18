package gateway

import (
	"context"
	"errors"
	"io"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"braid/leasesvc"
	"braid/mvcc"
)

// Leases executes requests on leases. *leasesvc.Service is one.
type Leases interface {
	Grant(ctx context.Context, id, ttl int64) (gotID, gotTTL int64, rev mvcc.Revision, err error)
	Revoke(ctx context.Context, id int64) (mvcc.Revision, error)
	TimeToLive(ctx context.Context, id int64, keys bool) (leasesvc.Info, mvcc.Revision, error)
	List(ctx context.Context) ([]int64, mvcc.Revision, error)
	Renew(ctx context.Context, id int64) (ttl int64, err error)
}

// leaseTTLMax is etcd's, in seconds.
const leaseTTLMax = 9_000_000_000

type leaseServer struct {
	pb.UnsafeLeaseServer
	s *Server
}

func (l *leaseServer) LeaseGrant(ctx context.Context, req *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	if req.TTL > leaseTTLMax {
		return nil, rpctypes.ErrGRPCLeaseTTLTooLarge
	}
	if !l.s.limits.enter(0) {
		return nil, rpctypes.ErrTooManyRequests
	}
	defer l.s.limits.leave(0)
	id, ttl, rev, err := l.s.cfg.Leases.Grant(ctx, req.ID, req.TTL)
	if err != nil {
		return nil, toStatus(err)
	}
	return &pb.LeaseGrantResponse{Header: l.s.header.at(rev), ID: id, TTL: ttl}, nil
}

func (l *leaseServer) LeaseRevoke(ctx context.Context, req *pb.LeaseRevokeRequest) (*pb.LeaseRevokeResponse, error) {
	if !l.s.limits.enter(0) {
		return nil, rpctypes.ErrTooManyRequests
	}
	defer l.s.limits.leave(0)
	rev, err := l.s.cfg.Leases.Revoke(ctx, req.ID)
	if err != nil {
		return nil, toStatus(err)
	}
	return &pb.LeaseRevokeResponse{Header: l.s.header.at(rev)}, nil
}

func (l *leaseServer) LeaseTimeToLive(ctx context.Context, req *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error) {
	if !l.s.limits.enter(0) {
		return nil, rpctypes.ErrTooManyRequests
	}
	defer l.s.limits.leave(0)
	rctx, cancel := context.WithTimeout(ctx, l.s.cfg.RequestTimeout)
	defer cancel()
	info, rev, err := l.s.cfg.Leases.TimeToLive(rctx, req.ID, req.Keys)
	if errors.Is(err, leasesvc.ErrNotFound) {
		return &pb.LeaseTimeToLiveResponse{Header: l.s.header.at(rev), ID: req.ID, TTL: -1}, nil
	}
	if err != nil {
		return nil, toStatus(timeUp(err, rctx, ctx))
	}
	return &pb.LeaseTimeToLiveResponse{Header: l.s.header.at(rev), ID: req.ID, GrantedTTL: info.TTL,
		TTL: int64(info.Remaining.Seconds()), Keys: info.Keys}, nil
}

func (l *leaseServer) LeaseLeases(ctx context.Context, _ *pb.LeaseLeasesRequest) (*pb.LeaseLeasesResponse, error) {
	if !l.s.limits.enter(0) {
		return nil, rpctypes.ErrTooManyRequests
	}
	defer l.s.limits.leave(0)
	ids, rev, err := l.s.cfg.Leases.List(ctx)
	if err != nil {
		return nil, toStatus(err)
	}
	resp := &pb.LeaseLeasesResponse{Header: l.s.header.at(rev), Leases: make([]*pb.LeaseStatus, len(ids))}
	for i, id := range ids {
		resp.Leases[i] = &pb.LeaseStatus{ID: id}
	}
	return resp, nil
}

// LeaseKeepAlive answers the renewals of a stream in order. Its client ends it, or the want
// of a leader when it requires one.
func (l *leaseServer) LeaseKeepAlive(stream pb.Lease_LeaseKeepAliveServer) error {
	leaderless, done := l.s.leaderless.channel(stream.Context(), nil)
	defer done()
	ended := make(chan error, 1)
	l.s.receivers.Go(func() { ended <- l.keepAlive(stream) })
	select {
	case err := <-ended:
		return err
	case <-stream.Context().Done():
		return toStatus(stream.Context().Err())
	case <-leaderless:
		return rpctypes.ErrGRPCNoLeader
	case <-l.s.stopping:
		return rpctypes.ErrGRPCStopped
	}
}

func (l *leaseServer) keepAlive(stream pb.Lease_LeaseKeepAliveServer) error {
	for {
		req, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		// Before the renewal: a client that sees the lease end at a revision must not have seen it
		// renewed at a later one.
		resp := &pb.LeaseKeepAliveResponse{ID: req.ID, Header: l.s.header.local()}
		ctx, cancel := context.WithTimeout(stream.Context(), l.s.cfg.RequestTimeout)
		resp.TTL, err = l.s.cfg.Leases.Renew(ctx, req.ID)
		if errors.Is(err, leasesvc.ErrNotFound) {
			resp.TTL, err = 0, nil
		}
		err = timeUp(err, ctx, stream.Context())
		cancel()
		if err != nil {
			return toStatus(err)
		}
		if err := stream.Send(resp); err != nil {
			return err
		}
	}
}

// timeUp makes an error that came with the end of a request's own time etcd's error for that; what the
// client did to its request passes through.
func timeUp(err error, request, client context.Context) error {
	if err != nil && request.Err() != nil && client.Err() == nil {
		return rpctypes.ErrGRPCTimeout
	}
	return err
}
