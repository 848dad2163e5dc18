package gateway_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"braid/gateway"
	"braid/router"
	"braid/router/routertest"
)

// cluster is a Cluster whose facts a test sets.
type cluster struct {
	store   *routertest.Store
	leader  atomic.Uint64
	alarms  []*pb.AlarmMember
	learner bool
	version string
}

func newCluster(s *routertest.Store) *cluster {
	c := &cluster{store: s, version: "3.7.0"}
	c.leader.Store(0xb2)
	return c
}

func (c *cluster) ClusterID() uint64 { return 0xc1 }
func (c *cluster) MemberID() uint64  { return 0xb2 }
func (c *cluster) Members(context.Context, bool) ([]*pb.Member, error) {
	return []*pb.Member{{ID: 0xb2, Name: "one", PeerURLs: []string{"http://p:2380"}, ClientURLs: []string{"http://c:2379"}}}, nil
}
func (c *cluster) Leader() uint64               { return c.leader.Load() }
func (c *cluster) RaftTerm() uint64             { return 3 }
func (c *cluster) RaftIndex() uint64            { return 40 }
func (c *cluster) RaftAppliedIndex() uint64     { return 39 }
func (c *cluster) Revision() int64              { return int64(c.store.Mark().Rev) }
func (c *cluster) CompactRevision() int64       { return int64(c.store.Mark().Floor) }
func (c *cluster) DBSize() (total, inUse int64) { return 1000, 900 }
func (c *cluster) Keys() int64                  { return 3 }
func (c *cluster) DBSizeQuota() int64           { return 0 }
func (c *cluster) Alarms() []*pb.AlarmMember    { return c.alarms }
func (c *cluster) IsLearner() bool              { return c.learner }
func (c *cluster) ClusterVersion() string       { return c.version }
func (c *cluster) StorageVersion() string       { return c.version }

// fixture is a gateway over the store in a map, on a loopback port.
type fixture struct {
	store   *routertest.Store
	cluster *cluster
	server  *gateway.Server
	addr    string
	conn    *grpc.ClientConn
}

// start serves requests with a time that nothing comes near, however slow the machine: a test that
// waits for the end of a request's time makes it short.
func start(t *testing.T, change func(*gateway.Config), splits ...string) *fixture {
	t.Helper()
	f := &fixture{store: routertest.New(splits...)}
	f.cluster = newCluster(f.store)
	cfg := gateway.Config{Cluster: f.cluster}
	cfg.RequestTimeout = time.Minute
	if change != nil {
		change(&cfg)
	}
	cfg.KV = router.New(f.store, f.store, router.Options{RequestTimeout: cfg.RequestTimeout, RetryMin: time.Millisecond})
	var err error
	if f.server, err = gateway.New(cfg); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f.addr = l.Addr().String()
	served := make(chan error, 1)
	go func() { served <- f.server.Serve(l, gateway.Port{}) }()
	if f.conn, err = grpc.NewClient(f.addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(64<<20))); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		f.conn.Close()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		f.server.Stop(ctx)
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	return f
}
