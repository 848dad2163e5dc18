package router_test

import (
	"context"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/pd/pdpb"
	"braid/region/regionpb"
	"braid/router"
	"braid/router/routertest"
)

// lateStores has something written between what a leader said and what follows.
type lateStores struct {
	*routertest.Store
	between func()
	tries   []bool // IfWrites of each write
}

func (s *lateStores) Write(ctx context.Context, expired <-chan struct{}, d pdpb.Descriptor, req *regionpb.WriteRequest) (*pb.TxnResponse, error) {
	s.tries = append(s.tries, req.IfWrites)
	resp, err := s.Store.Write(ctx, expired, d, req)
	if s.between != nil {
		s.between()
		s.between = nil
	}
	return resp, err
}

// TestIfWrites: a transaction that would change nothing is read at a point; when the point is behind a
// write that makes it take the other branch, it is executed.
func TestIfWrites(t *testing.T) {
	put := func(key, value string) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(key), Value: []byte(value)}}}
	}
	get := &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("k")}}}
	cas := &pb.TxnRequest{
		Compare: []*pb.Compare{{Key: []byte("k"), Target: pb.Compare_VERSION, TargetUnion: &pb.Compare_Version{Version: 1}}},
		Success: []*pb.RequestOp{put("k", "2")}, Failure: []*pb.RequestOp{get},
	}
	s := &lateStores{Store: routertest.New()}
	r := router.New(s, s, router.Options{})
	begin, err := r.Range(t.Context(), &pb.RangeRequest{Key: []byte("k")})
	if err != nil {
		t.Fatal(err)
	}
	resp, err := r.Txn(t.Context(), cas)
	if err != nil || resp.Succeeded || resp.Header.Revision != begin.Header.Revision || resp.Responses[0].GetResponseRange().Count != 0 {
		t.Fatalf("a compare that fails: %v, %v", resp, err)
	}
	if len(s.tries) != 1 || !s.tries[0] {
		t.Errorf("it was written %v", s.tries)
	}
	s.tries = nil
	s.between = func() {
		if _, err := s.Txn(&pb.TxnRequest{Success: []*pb.RequestOp{put("k", "1")}}); err != nil {
			t.Error(err)
		}
	}
	resp, err = r.Txn(t.Context(), cas)
	if err != nil || !resp.Succeeded || resp.Header.Revision != begin.Header.Revision+2 {
		t.Fatalf("a compare that comes true: %v, %v", resp, err)
	}
	if len(s.tries) != 2 || !s.tries[0] || s.tries[1] {
		t.Errorf("it was written %v", s.tries)
	}
	got, err := r.Range(t.Context(), &pb.RangeRequest{Key: []byte("k")})
	if err != nil || len(got.Kvs) != 1 || string(got.Kvs[0].Value) != "2" {
		t.Errorf("%v, %v", got, err)
	}
}
