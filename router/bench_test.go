package router_test

import (
	"context"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/pd/pdpb"
	"braid/region/regionpb"
	"braid/router"
	"braid/router/routertest"
)

// instant answers at once with the same responses, so that only the router is measured.
type instant struct {
	*routertest.Store
	write *pb.TxnResponse
	read  *regionpb.ReadResponse
}

func (s *instant) Write(context.Context, <-chan struct{}, pdpb.Descriptor, *regionpb.WriteRequest) (*pb.TxnResponse, error) {
	return s.write, nil
}

func (s *instant) Read(context.Context, pdpb.Descriptor, *regionpb.ReadRequest) (*regionpb.ReadResponse, error) {
	return s.read, nil
}

func newInstant() *instant {
	var borders []string
	for i := range 1000 {
		borders = append(borders, string(key(i)))
	}
	return &instant{
		Store: routertest.New(borders...),
		write: &pb.TxnResponse{Header: &pb.ResponseHeader{Revision: 2}, Responses: []*pb.ResponseOp{
			{Response: &pb.ResponseOp_ResponsePut{ResponsePut: &pb.PutResponse{Header: &pb.ResponseHeader{Revision: 2}}}}}},
		read: &regionpb.ReadResponse{KVs: []*mvccpb.KeyValue{{Key: []byte("k00")}}, Rev: 2},
	}
}

func BenchmarkPut(b *testing.B) {
	s := newInstant()
	r := router.New(s, s, router.Options{})
	req := &pb.PutRequest{Key: []byte("k500"), Value: make([]byte, 256)}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := r.Put(context.Background(), req); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkGet(b *testing.B) {
	s := newInstant()
	r := router.New(s, s, router.Options{})
	req := &pb.RangeRequest{Key: []byte("k500")}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := r.Range(context.Background(), req); err != nil {
			b.Fatal(err)
		}
	}
}
