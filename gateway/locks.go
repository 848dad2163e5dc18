package gateway

import (
	"fmt"
	"math"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	"go.uber.org/zap"
	"google.golang.org/grpc"
)

// registerLocks adds etcd's Lock and Election services. They are etcd's own: all they need is a
// client, so they get one whose connection is a pipe to the gRPC server of this process, and what
// they do passes the limits and checks of every client. The two packages bring in nothing of etcd's
// server but generated code.
func (s *Server) registerLocks(to grpc.ServiceRegistrar) error {
	c, err := clientv3.New(clientv3.Config{
		Endpoints:   []string{"gateway"},
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(s.dialPipe)},
		Logger:      zap.NewNop(), // what goes wrong is told to whoever asked

		MaxCallSendMsgSize: math.MaxInt32, MaxCallRecvMsgSize: math.MaxInt32,
	})
	if err != nil {
		return fmt.Errorf("gateway: client of the lock service: %w", err)
	}
	s.locks = c
	v3lockpb.RegisterLockServer(to, v3lock.NewLockServer(c))
	v3electionpb.RegisterElectionServer(to, v3election.NewElectionServer(c))
	return nil
}
