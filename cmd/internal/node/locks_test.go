package node

import (
	"context"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
)

// TestLockServices takes locks and wins elections through etcd's services, on different nodes, and
// stops a node on which somebody waits.
func TestLockServices(t *testing.T) {
	t.Parallel() // it mostly waits
	shapes(t, 3, func(t *testing.T, c *testCluster) {
		ctx := within(t)
		lease := func(n *testNode, ttl int64) int64 {
			t.Helper()
			g, err := pb.NewLeaseClient(n.conn).LeaseGrant(ctx, &pb.LeaseGrantRequest{TTL: ttl})
			if err != nil {
				t.Fatal(err)
			}
			return g.ID
		}
		l0, l1 := v3lockpb.NewLockClient(c.nodes[0].conn), v3lockpb.NewLockClient(c.nodes[1].conn)
		first, err := l0.Lock(ctx, &v3lockpb.LockRequest{Name: []byte("a/lock"), Lease: lease(c.nodes[0], 60)})
		if err != nil || first.Header.GetRevision() == 0 {
			t.Fatal(first, err)
		}
		second := make(chan error, 1)
		mine := lease(c.nodes[1], 60)
		go func() {
			_, err := l1.Lock(ctx, &v3lockpb.LockRequest{Name: []byte("a/lock"), Lease: mine})
			second <- err
		}()
		c.eventually("the second waits", func() bool {
			r, err := c.nodes[2].kv.Range(ctx, &pb.RangeRequest{Key: []byte("a/lock/"), RangeEnd: []byte("a/lock0"), CountOnly: true})
			return err == nil && r.Count == 2
		})
		select {
		case err := <-second:
			t.Fatalf("two holders: %v", err)
		default:
		}
		if _, err := l0.Unlock(ctx, &v3lockpb.UnlockRequest{Key: first.Key}); err != nil {
			t.Fatal(err)
		}
		if err := <-second; err != nil {
			t.Fatal(err)
		}

		e := v3electionpb.NewElectionClient(c.nodes[2].conn)
		won, err := e.Campaign(ctx, &v3electionpb.CampaignRequest{Name: []byte("z/vote"), Lease: lease(c.nodes[2], 60), Value: []byte("me")})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := e.Proclaim(ctx, &v3electionpb.ProclaimRequest{Leader: won.Leader, Value: []byte("again")}); err != nil {
			t.Fatal(err)
		}
		if r, err := v3electionpb.NewElectionClient(c.nodes[0].conn).Leader(ctx, &v3electionpb.LeaderRequest{Name: []byte("z/vote")}); err != nil || string(r.Kv.Value) != "again" {
			t.Errorf("leader %v %v", r, err)
		}
		if _, err := e.Resign(ctx, &v3electionpb.ResignRequest{Leader: won.Leader}); err != nil {
			t.Fatal(err)
		}

		// Who waits does not keep a node from stopping.
		waiting := make(chan error, 1)
		third := lease(c.nodes[0], 60)
		go func() {
			_, err := l0.Lock(context.Background(), &v3lockpb.LockRequest{Name: []byte("a/lock"), Lease: third})
			waiting <- err
		}()
		c.eventually("the third waits", func() bool {
			r, err := c.nodes[2].kv.Range(ctx, &pb.RangeRequest{Key: []byte("a/lock/"), RangeEnd: []byte("a/lock0"), CountOnly: true})
			return err == nil && r.Count == 2
		})
		c.stop(c.nodes[0]) // says when that takes long
		if err := <-waiting; err == nil {
			t.Error("got a lock from a node that stops")
		}
	})
}
