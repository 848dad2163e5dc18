package gateway

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/router"
)

// clusterServer is etcd's Cluster service. Its headers have no revision.
type clusterServer struct {
	s *Server
	pb.UnsafeClusterServer
}

func (c *clusterServer) MemberList(ctx context.Context, r *pb.MemberListRequest) (*pb.MemberListResponse, error) {
	mctx, cancel := context.WithTimeout(ctx, c.s.cfg.RequestTimeout)
	defer cancel()
	members, err := c.s.cfg.Cluster.Members(mctx, r.Linearizable)
	if err != nil {
		if mctx.Err() != nil && ctx.Err() == nil {
			err = router.ErrTimeout // our time was up, not the client's
		}
		return nil, toStatus(err)
	}
	return &pb.MemberListResponse{Header: c.s.header.bare(), Members: members}, nil
}

func (c *clusterServer) MemberAdd(context.Context, *pb.MemberAddRequest) (*pb.MemberAddResponse, error) {
	return nil, unavailable("Cluster.MemberAdd")
}

func (c *clusterServer) MemberRemove(context.Context, *pb.MemberRemoveRequest) (*pb.MemberRemoveResponse, error) {
	return nil, unavailable("Cluster.MemberRemove")
}

func (c *clusterServer) MemberUpdate(context.Context, *pb.MemberUpdateRequest) (*pb.MemberUpdateResponse, error) {
	return nil, unavailable("Cluster.MemberUpdate")
}

func (c *clusterServer) MemberPromote(context.Context, *pb.MemberPromoteRequest) (*pb.MemberPromoteResponse, error) {
	return nil, unavailable("Cluster.MemberPromote")
}
