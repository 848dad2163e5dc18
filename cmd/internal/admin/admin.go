// Package admin serves braid.admin.v1: what regions and stores there are, where they are led, and
// the transfer of leadership. It is what `braid region` and `braid pd` talk to.
//
// The package translates between the wire and Backend, bounds what one call may return, and turns
// the backend's errors into gRPC codes; it keeps no state and starts no goroutine. The node
// implements Backend.
package admin

import (
	"bytes"
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"braid/cmd/internal/admin/adminpb"
)

// pageMax bounds the regions of one ListRegions answer.
const pageMax = 1000

// Errors of a Backend; wrap them with %w and say which region or store is meant. Any other error
// is reported as Unknown with its text.
var (
	ErrNotFound    = errors.New("not found")              // no such region or store
	ErrRefused     = errors.New("refused")                // cannot be done in the present state
	ErrUnavailable = errors.New("unavailable, try later") // the leader cannot be reached
)

// Peer is a replica of a region.
type Peer struct{ Replica, Store uint64 }

// Region is a region as the answering node knows it. AppliedIndex and Revision are of the node's
// own replica, 0 without one.
type Region struct {
	ID            uint64
	Start, End    []byte // End nil: no upper bound
	Epoch         uint64
	Incarnation   uint32
	Peers         []Peer
	LeaderStore   uint64 // 0: not known
	Term          uint64
	AppliedIndex  uint64
	Revision      int64 // complete through it
	ItemsRetained uint64
}

// Store is a node of the cluster.
type Store struct {
	ID         uint64
	Name       string
	PeerURLs   []string
	ClientURLs []string
	PDVoter    bool
	Alive      bool
}

// PD is the placement group as the answering node knows it.
type PD struct {
	ClusterID       uint64
	SingleGroup     bool
	LeaderStore     uint64 // 0: not known
	Term            uint64
	AppliedIndex    uint64
	Cut             uint64
	Revision        int64
	CompactRevision int64
	Fence           uint64
	Regions         uint64
	ItemsRetained   uint64
	Stores          []Store
}

// Backend is what the node gives to the service. Methods may be called from any goroutine; what
// they return belongs to the caller.
type Backend interface {
	// Regions returns, in key order, at most limit regions that end above from.
	Regions(ctx context.Context, from []byte, limit int) (rs []Region, more bool, err error)
	// TransferRegion starts moving the leadership of a region to its replica on the store.
	TransferRegion(ctx context.Context, region, store uint64) error
	// PD describes the placement group.
	PD(ctx context.Context) (PD, error)
	// TransferPD starts moving the leadership of the placement group to the store.
	TransferPD(ctx context.Context, store uint64) error
}

// Register adds the service to a gRPC server.
func Register(s grpc.ServiceRegistrar, b Backend) {
	adminpb.RegisterAdminServer(s, &server{backend: b})
}

type server struct {
	adminpb.UnimplementedAdminServer
	backend Backend
}

func (s *server) ListRegions(ctx context.Context, req *adminpb.ListRegionsRequest) (*adminpb.ListRegionsResponse, error) {
	limit := int(req.GetLimit())
	if limit == 0 || limit > pageMax {
		limit = pageMax
	}
	rs, more, err := s.backend.Regions(ctx, req.GetFrom(), limit)
	if err != nil {
		return nil, toStatus(err)
	}
	resp := &adminpb.ListRegionsResponse{More: more}
	for i := range rs {
		resp.Regions = append(resp.Regions, regionToWire(&rs[i]))
	}
	return resp, nil
}

func (s *server) TransferRegion(ctx context.Context, req *adminpb.TransferRegionRequest) (*adminpb.TransferRegionResponse, error) {
	if req.GetRegion() == 0 || req.GetStore() == 0 {
		return nil, status.Error(codes.InvalidArgument, "region and store are needed")
	}
	if err := s.backend.TransferRegion(ctx, req.GetRegion(), req.GetStore()); err != nil {
		return nil, toStatus(err)
	}
	return &adminpb.TransferRegionResponse{}, nil
}

func (s *server) PDStatus(ctx context.Context, _ *adminpb.PDStatusRequest) (*adminpb.PDStatusResponse, error) {
	p, err := s.backend.PD(ctx)
	if err != nil {
		return nil, toStatus(err)
	}
	return pdToWire(&p), nil
}

func (s *server) TransferPD(ctx context.Context, req *adminpb.TransferPDRequest) (*adminpb.TransferPDResponse, error) {
	if req.GetStore() == 0 {
		return nil, status.Error(codes.InvalidArgument, "store is needed")
	}
	if err := s.backend.TransferPD(ctx, req.GetStore()); err != nil {
		return nil, toStatus(err)
	}
	return &adminpb.TransferPDResponse{}, nil
}

// toStatus is the only place where errors of this service get their code.
func toStatus(err error) error {
	code := codes.Unknown
	switch {
	case errors.Is(err, context.Canceled):
		code = codes.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		code = codes.DeadlineExceeded
	case errors.Is(err, ErrNotFound):
		code = codes.NotFound
	case errors.Is(err, ErrRefused):
		code = codes.FailedPrecondition
	case errors.Is(err, ErrUnavailable):
		code = codes.Unavailable
	}
	return status.Error(code, err.Error())
}

func regionToWire(r *Region) *adminpb.Region {
	w := &adminpb.Region{Id: r.ID, StartKey: r.Start, EndKey: r.End, Epoch: r.Epoch, Incarnation: r.Incarnation,
		LeaderStore: r.LeaderStore, Term: r.Term, AppliedIndex: r.AppliedIndex, Revision: r.Revision, ItemsRetained: r.ItemsRetained}
	for _, p := range r.Peers {
		w.Peers = append(w.Peers, &adminpb.Peer{Replica: p.Replica, Store: p.Store})
	}
	return w
}

func regionFromWire(w *adminpb.Region) Region {
	r := Region{ID: w.GetId(), Start: bytes.Clone(w.GetStartKey()), Epoch: w.GetEpoch(), Incarnation: w.GetIncarnation(),
		LeaderStore: w.GetLeaderStore(), Term: w.GetTerm(), AppliedIndex: w.GetAppliedIndex(), Revision: w.GetRevision(), ItemsRetained: w.GetItemsRetained()}
	if len(w.GetEndKey()) > 0 {
		r.End = bytes.Clone(w.GetEndKey())
	}
	for _, p := range w.GetPeers() {
		r.Peers = append(r.Peers, Peer{Replica: p.GetReplica(), Store: p.GetStore()})
	}
	return r
}

const (
	modeMulti  = "multi-group"
	modeSingle = "single-group"
)

func pdToWire(p *PD) *adminpb.PDStatusResponse {
	w := &adminpb.PDStatusResponse{ClusterId: p.ClusterID, Mode: modeMulti, LeaderStore: p.LeaderStore, Term: p.Term, AppliedIndex: p.AppliedIndex,
		Cut: p.Cut, Revision: p.Revision, CompactRevision: p.CompactRevision, Fence: p.Fence, Regions: p.Regions, ItemsRetained: p.ItemsRetained}
	if p.SingleGroup {
		w.Mode = modeSingle
	}
	for _, s := range p.Stores {
		w.Stores = append(w.Stores, &adminpb.Store{Id: s.ID, Name: s.Name, PeerUrls: s.PeerURLs, ClientUrls: s.ClientURLs, PdVoter: s.PDVoter, Alive: s.Alive})
	}
	return w
}

func pdFromWire(w *adminpb.PDStatusResponse) PD {
	p := PD{ClusterID: w.GetClusterId(), SingleGroup: w.GetMode() == modeSingle, LeaderStore: w.GetLeaderStore(), Term: w.GetTerm(),
		AppliedIndex: w.GetAppliedIndex(), Cut: w.GetCut(), Revision: w.GetRevision(), CompactRevision: w.GetCompactRevision(),
		Fence: w.GetFence(), Regions: w.GetRegions(), ItemsRetained: w.GetItemsRetained()}
	for _, s := range w.GetStores() {
		p.Stores = append(p.Stores, Store{ID: s.GetId(), Name: s.GetName(), PeerURLs: s.GetPeerUrls(), ClientURLs: s.GetClientUrls(), PDVoter: s.GetPdVoter(), Alive: s.GetAlive()})
	}
	return p
}
