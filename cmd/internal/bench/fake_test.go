package bench

import (
	"context"
	"net"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// fakeStore answers as the functions of a test say; reads find nothing.
type fakeStore struct {
	pb.UnimplementedKVServer
	pb.UnimplementedLeaseServer
	pb.UnimplementedWatchServer
	put    func(*pb.PutRequest) error
	events chan *pb.WatchResponse // what the watchers receive
}

// start serves the store until the test ends.
func (f *fakeStore) start(t *testing.T) Target {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	pb.RegisterKVServer(s, f)
	pb.RegisterLeaseServer(s, f)
	pb.RegisterWatchServer(s, f)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }() // ends with Stop
	t.Cleanup(func() { s.Stop(); <-done })
	return Target{Endpoints: []string{l.Addr().String()}}
}

func (f *fakeStore) Range(context.Context, *pb.RangeRequest) (*pb.RangeResponse, error) {
	return &pb.RangeResponse{Header: &pb.ResponseHeader{}}, nil
}

func (f *fakeStore) Put(_ context.Context, r *pb.PutRequest) (*pb.PutResponse, error) {
	return &pb.PutResponse{Header: &pb.ResponseHeader{}}, f.put(r)
}

// LeaseGrant grants leases that are due at once.
func (f *fakeStore) LeaseGrant(context.Context, *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	return &pb.LeaseGrantResponse{Header: &pb.ResponseHeader{}, ID: 1}, nil
}

func (f *fakeStore) Watch(stream pb.Watch_WatchServer) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	if err := stream.Send(&pb.WatchResponse{Header: &pb.ResponseHeader{}, Created: true}); err != nil {
		return err
	}
	for {
		select {
		case e := <-f.events:
			if err := stream.Send(e); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		}
	}
}
