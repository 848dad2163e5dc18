package gateway

import (
	"context"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/api/v3/version"
)

// quotaBytesDefault is etcd's quota when none is configured.
const quotaBytesDefault = 2 << 30

// maintenanceServer is etcd's Maintenance service: what this node says of itself.
type maintenanceServer struct {
	s *Server
	pb.UnsafeMaintenanceServer
}

func (m *maintenanceServer) Status(context.Context, *pb.StatusRequest) (*pb.StatusResponse, error) {
	c := m.s.cfg.Cluster
	resp := &pb.StatusResponse{
		Header:           m.s.header.local(),
		Version:          version.Version,
		Leader:           c.Leader(),
		RaftIndex:        c.RaftIndex(),
		RaftTerm:         c.RaftTerm(),
		RaftAppliedIndex: c.RaftAppliedIndex(),
		IsLearner:        c.IsLearner(),
		StorageVersion:   c.StorageVersion(),
		DbSizeQuota:      c.DBSizeQuota(),
		DowngradeInfo:    &pb.DowngradeInfo{},
	}
	resp.DbSize, resp.DbSizeInUse = c.DBSize()
	if resp.DbSizeQuota == 0 {
		resp.DbSizeQuota = quotaBytesDefault
	}
	if resp.Leader == 0 {
		resp.Errors = append(resp.Errors, rpctypes.ErrNoLeader.Error())
	}
	for _, a := range c.Alarms() {
		resp.Errors = append(resp.Errors, a.String())
	}
	return resp, nil
}

func (m *maintenanceServer) HashKV(ctx context.Context, r *pb.HashKVRequest) (*pb.HashKVResponse, error) {
	began := time.Now()
	h, err := m.s.cfg.KV.HashKV(ctx, r.Revision)
	if err != nil {
		return nil, toStatus(err)
	}
	m.s.metrics.hashes.Observe(time.Since(began).Seconds())
	resp := &pb.HashKVResponse{
		Header:          &pb.ResponseHeader{Revision: int64(h.Revision)},
		Hash:            h.Hash,
		CompactRevision: int64(h.Floor),
		HashRevision:    int64(h.At),
	}
	m.s.header.fill(resp.Header)
	return resp, nil
}

// Hash is etcd's checksum of its whole backend file. There is no such file here; the nearest thing
// that members can be compared by is the hash of all keys at the current revision.
func (m *maintenanceServer) Hash(ctx context.Context, _ *pb.HashRequest) (*pb.HashResponse, error) {
	h, err := m.s.cfg.KV.HashKV(ctx, 0)
	if err != nil {
		return nil, toStatus(err)
	}
	resp := &pb.HashResponse{Header: &pb.ResponseHeader{Revision: int64(h.Revision)}, Hash: h.Hash}
	m.s.header.fill(resp.Header)
	return resp, nil
}

// Alarm lists alarms; raising and clearing them is not available yet.
func (m *maintenanceServer) Alarm(_ context.Context, r *pb.AlarmRequest) (*pb.AlarmResponse, error) {
	if r.Action != pb.AlarmRequest_GET {
		return nil, unavailable("Maintenance.Alarm other than GET")
	}
	resp := &pb.AlarmResponse{Header: m.s.header.local()}
	for _, a := range m.s.cfg.Cluster.Alarms() {
		if r.Alarm == pb.AlarmType_NONE || r.Alarm == a.Alarm {
			resp.Alarms = append(resp.Alarms, a)
		}
	}
	return resp, nil
}

// Defragment has nothing to do: the state engine gives space back as it goes, in the background.
// What maintenance jobs expect of it, a smaller size after a compaction, has happened by itself.
func (m *maintenanceServer) Defragment(context.Context, *pb.DefragmentRequest) (*pb.DefragmentResponse, error) {
	return &pb.DefragmentResponse{}, nil
}

func (m *maintenanceServer) MoveLeader(context.Context, *pb.MoveLeaderRequest) (*pb.MoveLeaderResponse, error) {
	return nil, unavailable("Maintenance.MoveLeader")
}

func (m *maintenanceServer) Downgrade(context.Context, *pb.DowngradeRequest) (*pb.DowngradeResponse, error) {
	return nil, unavailable("Maintenance.Downgrade")
}
