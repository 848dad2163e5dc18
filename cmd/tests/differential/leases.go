package main

import (
	"context"
	"math"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// Requests on leases. What depends on clocks is kept out: leases live for longer than any run, ends are
// revocations, and of the time that is left only that there is some is compared. Ids are given, never
// chosen by the store.

// leaseIDs are those in use, so few that requests meet.
var leaseIDs = []int64{1, 2, 3, 4, 5, 6, 0x7fff0001, 1 << 40, math.MaxInt64, -1, -2, math.MinInt64}

// leaseID draws an id; missing is how often it is one that is never granted, percent.
func (g *generator) leaseID(missing int) int64 {
	if g.chance(missing) {
		return pick[int64](g, 0, 999, -999)
	}
	return leaseIDs[g.rng.IntN(len(leaseIDs))]
}

func (g *generator) leaseRequest() Request {
	switch n := g.rng.IntN(100); {
	case n < 40:
		id := leaseIDs[g.rng.IntN(len(leaseIDs))]
		ttl := pick[int64](g, 10_000, 3_600_000, 1<<32, 1<<33, 9_000_000_000)
		if g.chance(10) {
			ttl = pick[int64](g, 9_000_000_001, math.MaxInt64)
		}
		return Request{"LeaseGrant", &pb.LeaseGrantRequest{ID: id, TTL: ttl}}
	case n < 60:
		return Request{"LeaseRevoke", &pb.LeaseRevokeRequest{ID: g.leaseID(10)}}
	case n < 75:
		return Request{"LeaseKeepAlive", &pb.LeaseKeepAliveRequest{ID: g.leaseID(15)}}
	case n < 95:
		return Request{"LeaseTimeToLive", &pb.LeaseTimeToLiveRequest{ID: g.leaseID(15), Keys: g.chance(80)}}
	}
	return Request{"LeaseLeases", &pb.LeaseLeasesRequest{}}
}

// leaseAudits are what is asked of leases when the whole state is compared.
func leaseAudits() []Request {
	list := []Request{{"LeaseLeases", &pb.LeaseLeasesRequest{}}}
	for _, id := range leaseIDs {
		list = append(list, Request{"LeaseTimeToLive", &pb.LeaseTimeToLiveRequest{ID: id, Keys: true}})
	}
	return list
}

// keepAlive renews once, on a stream of its own.
func keepAlive(ctx context.Context, leases pb.LeaseClient, req *pb.LeaseKeepAliveRequest) (*pb.LeaseKeepAliveResponse, error) {
	stream, err := leases.LeaseKeepAlive(ctx, grpc.WaitForReady(true))
	if err != nil {
		return nil, err
	}
	if err := stream.Send(req); err != nil {
		return nil, err
	}
	resp, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	return resp, stream.CloseSend()
}
