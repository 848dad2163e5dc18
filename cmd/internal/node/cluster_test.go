package node

import (
	"context"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"braid/cmd/internal/config"
	"braid/cmd/internal/freeport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds everything that a test waits for. Nothing should come near it.
const patience = 3 * time.Minute

// testCluster is a cluster of nodes in this process, on loopback.
type testCluster struct {
	t     *testing.T
	tune  tuning
	nodes []*testNode
}

// testNode is one of them; n is nil while it is stopped.
type testNode struct {
	*testCluster
	i    int
	cfg  *config.Config
	logs *observer.ObservedLogs
	n    *Node
	conn *grpc.ClientConn
	kv   pb.KVClient
}

// newCluster describes a cluster and starts nothing.
func newCluster(t *testing.T, size int, change ...func(*config.Config)) *testCluster {
	t.Helper()
	c := &testCluster{t: t, tune: defaultTuning()}
	c.tune.gcGrace, c.tune.collectEvery = 100*time.Millisecond, 20*time.Millisecond
	c.tune.refusedFor = 200 * time.Millisecond
	port, err := freeport.Range(2 * size)
	if err != nil {
		t.Fatal(err)
	}
	urls := make([]url.URL, 2*size)
	for i := range urls {
		urls[i] = url.URL{Scheme: "http", Host: fmt.Sprintf("127.0.0.1:%d", port+i)}
	}
	initial := types.URLsMap{}
	for i := range size {
		initial[fmt.Sprint("n", i)] = types.URLs{urls[2*i]}
	}
	dir := t.TempDir()
	for i := range size {
		cfg := &config.Config{
			Name: fmt.Sprint("n", i), DataDir: filepath.Join(dir, fmt.Sprint("n", i)), InitialCluster: initial,
			ListenPeerURLs: urls[2*i : 2*i+1], InitialAdvertisePeerURLs: urls[2*i : 2*i+1],
			ListenClientURLs: urls[2*i+1 : 2*i+2], AdvertiseClientURLs: urls[2*i+1 : 2*i+2],
			HeartbeatMs: 50, ElectionMs: 500, UnsafeNoFsync: true,
		}
		for _, f := range change {
			f(cfg)
		}
		cfg.Fill()
		if err := cfg.Validate(); err != nil {
			t.Fatal(err)
		}
		n := &testNode{testCluster: c, i: i, cfg: cfg}
		var core zapcore.Core
		core, n.logs = observer.New(zapcore.InfoLevel)
		if err := cfg.Prepare(zap.New(core)); err != nil {
			t.Fatal(err)
		}
		c.nodes = append(c.nodes, n)
	}
	t.Cleanup(func() {
		c.stop(c.nodes...)
		if t.Failed() {
			c.dump()
		}
	})
	return c
}

// splitAt gives a cluster regions.
func splitAt(keys ...string) func(*config.Config) {
	return func(c *config.Config) {
		for _, k := range keys {
			c.SplitKeys = append(c.SplitKeys, []byte(k))
		}
	}
}

func singleGroupMode(c *config.Config) { c.SingleGroup = true }

// dump shows the last of what the nodes had to say.
func (c *testCluster) dump() {
	for _, n := range c.nodes {
		all := n.logs.All()
		for _, e := range all[max(0, len(all)-25):] {
			c.t.Logf("%s %s %s %s %v", n.cfg.Name, e.Time.Format("05.000"), e.Level, e.Message, e.ContextMap())
		}
	}
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// start starts nodes at the same time and waits until all of them serve.
func (c *testCluster) start(nodes ...*testNode) {
	c.t.Helper()
	errs := make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() { errs[i] = n.tryStart(within(c.t)) })
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			c.t.Fatalf("starting %s: %v", nodes[i].cfg.Name, err)
		}
	}
}

func (n *testNode) tryStart(ctx context.Context) error {
	nd, err := start(ctx, n.cfg, n.tune)
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient(n.cfg.ListenClientURLs[0].Host, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return err
	}
	n.n, n.conn, n.kv = nd, conn, pb.NewKVClient(conn)
	return nil
}

// stop stops nodes at the same time; those that are stopped stay so.
func (c *testCluster) stop(nodes ...*testNode) {
	c.t.Helper()
	var wg sync.WaitGroup
	for _, n := range nodes {
		if n.n == nil {
			continue
		}
		wg.Go(func() {
			began := time.Now()
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			if err := n.conn.Close(); err != nil {
				c.t.Errorf("closing the connection to %s: %v", n.cfg.Name, err)
			}
			if err := n.n.Stop(ctx); err != nil {
				c.t.Errorf("stopping %s: %v", n.cfg.Name, err)
			}
			if took := time.Since(began); took > 20*time.Second { // drainMax is a tenth of it
				c.t.Errorf("stopping %s took %v", n.cfg.Name, took)
			}
			n.n = nil
		})
	}
	wg.Wait()
}

// restart stops nodes and starts them again.
func (c *testCluster) restart(nodes ...*testNode) {
	c.t.Helper()
	c.stop(nodes...)
	c.start(nodes...)
}

// put writes and returns the revision of the write.
func (n *testNode) put(key, value string) int64 {
	n.t.Helper()
	resp, err := n.kv.Put(within(n.t), &pb.PutRequest{Key: []byte(key), Value: []byte(value)})
	if err != nil {
		n.t.Fatalf("put %q on %s: %v", key, n.cfg.Name, err)
	}
	return resp.Header.Revision
}

// get reads a key, "" when it is not there.
func (n *testNode) get(key string) string {
	n.t.Helper()
	resp, err := n.kv.Range(within(n.t), &pb.RangeRequest{Key: []byte(key)})
	if err != nil {
		n.t.Fatalf("get %q on %s: %v", key, n.cfg.Name, err)
	}
	if len(resp.Kvs) == 0 {
		return ""
	}
	return string(resp.Kvs[0].Value)
}

// all reads every key in one request.
func (n *testNode) all() string {
	n.t.Helper()
	resp, err := n.kv.Range(within(n.t), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
	if err != nil {
		n.t.Fatalf("range on %s: %v", n.cfg.Name, err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d:", resp.Header.Revision)
	for _, kv := range resp.Kvs {
		fmt.Fprintf(&b, " %s=%s@%d", kv.Key, kv.Value, kv.ModRevision)
	}
	return b.String()
}

// hash is HashKV's number at the newest revision.
func (n *testNode) hash(rev int64) *pb.HashKVResponse {
	n.t.Helper()
	resp, err := pb.NewMaintenanceClient(n.conn).HashKV(within(n.t), &pb.HashKVRequest{Revision: rev})
	if err != nil {
		n.t.Fatalf("HashKV on %s: %v", n.cfg.Name, err)
	}
	return resp
}

// eventually waits until ok holds.
func (c *testCluster) eventually(what string, ok func() bool) {
	c.t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			c.t.Fatalf("in vain waited until %s", what)
		}
	}
}
