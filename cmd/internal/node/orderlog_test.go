package node

import (
	"errors"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/cmd/internal/config"
	"braid/cmd/internal/orderlog"
	"braid/cmd/internal/orderlog/orderlogtest"
)

// TestCommittedOrder: all nodes record the same, through a restart.
func TestCommittedOrder(t *testing.T) {
	t.Parallel() // it mostly waits
	for name, shape := range map[string]func(*config.Config){"regions": splitAt("c", "m"), "single group": singleGroupMode} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, 3, shape, func(c *config.Config) { c.CommittedOrder = true })
			c.start(c.nodes...)
			n := c.nodes[0]
			for _, key := range []string{"a", "n", "d"} {
				n.put(key, "1")
			}
			if _, err := n.kv.Compact(within(t), &pb.CompactionRequest{Revision: 3}); err != nil {
				t.Fatal(err)
			}
			c.stop(c.nodes[2])
			n.put("z", "2")
			c.start(c.nodes[2])
			if _, err := n.kv.DeleteRange(within(t), &pb.DeleteRangeRequest{Key: []byte("b"), RangeEnd: []byte("y")}); err != nil {
				t.Fatal(err)
			}
			leases := pb.NewLeaseClient(n.conn)
			if _, err := leases.LeaseGrant(within(t), &pb.LeaseGrantRequest{ID: 7, TTL: 600}); err != nil {
				t.Fatal(err)
			}
			for _, key := range []string{"b", "n"} {
				if _, err := n.kv.Put(within(t), &pb.PutRequest{Key: []byte(key), Lease: 7}); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := leases.LeaseRevoke(within(t), &pb.LeaseRevokeRequest{ID: 7}); err != nil {
				t.Fatal(err)
			}
			if _, err := leases.LeaseGrant(within(t), &pb.LeaseGrantRequest{ID: 8, TTL: 1}); err != nil {
				t.Fatal(err)
			}
			for left := 1; left > 0; { // its time is up
				resp, err := leases.LeaseLeases(within(t), &pb.LeaseLeasesRequest{})
				if err != nil {
					t.Fatal(err)
				}
				left = len(resp.Leases)
				<-time.After(20 * time.Millisecond)
			}
			n.put("last", "")
			const want = "1 put a; 2 put n; 3 put d; 4 compact 3; 5 put z; 6 del d del n; " +
				"7 grant 7; 8 put b; 9 put n; 10 revoke 7; 11 grant 8; 12 revoke 8; 13 put last; "
			for _, n := range c.nodes {
				var got string
				for began := time.Now(); got != want && time.Since(began) < patience; {
					if got = orderlogtest.Read(t, n.cfg.DataDir); !strings.HasPrefix(want, got) {
						break
					}
					<-time.After(20 * time.Millisecond)
				}
				if got != want {
					t.Errorf("%s recorded %s\nwant %s", n.cfg.Name, got, want)
				}
			}
		})
	}
}

// TestCommittedOrderFromTheStart: a store that was used without the record cannot begin one.
func TestCommittedOrderFromTheStart(t *testing.T) {
	c := newCluster(t, 1)
	n := c.nodes[0]
	c.start(n)
	n.put("a", "1")
	c.stop(n)
	n.cfg.CommittedOrder = true
	if err := n.tryStart(within(t)); !errors.Is(err, orderlog.ErrHole) {
		t.Errorf("started: %v", err)
	}
}
