package node

import (
	"context"
	"net/url"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/client/pkg/v3/types"

	"braid/cmd/internal/config"
	"braid/raftstore/raftid"
	"braid/raftstore/transport/transporttest"
)

// TestOutOfReach: a node that leads everything is heard by the others and hears nothing of them. It
// would go on saying that it leads until it counts its quorum, and only then would the others begin to
// wait for an election: two election timeouts at the least. They notice that it does not answer them,
// and lead everything themselves before.
func TestOutOfReach(t *testing.T) {
	t.Parallel() // it mostly waits
	var way *transporttest.Proxy
	c := newCluster(t, 3, splitAt("h", "p"), func(cfg *config.Config) {
		cfg.ElectionMs = 3000 // longer than stores are missed
		if cfg.Name == "n0" {
			way = transporttest.NewProxy(t, cfg.ListenPeerURLs[0].Host)
			cfg.InitialAdvertisePeerURLs = []url.URL{{Scheme: "http", Host: way.Addr()}}
			cfg.InitialCluster["n0"] = types.URLs(cfg.InitialAdvertisePeerURLs) // all configurations have this map
		}
	})
	c.start(c.nodes...)
	victim, others := c.nodes[0], c.nodes[1:]
	leads := func() (n int) {
		for _, st := range victim.n.store.Statuses() {
			if st.Leading {
				n++
			}
		}
		return n
	}
	ask := time.NewTicker(200 * time.Millisecond)
	defer ask.Stop()
	c.eventually("one node leads everything", func() bool {
		select {
		case <-ask.C:
			for _, n := range others {
				for _, st := range n.n.store.Statuses() {
					if !st.Leading {
						continue
					}
					for _, r := range st.Voters {
						if store, ok := n.n.storeOf(st.ID, raftid.ReplicaID(r)); ok && store == victim.n.self {
							if err := n.n.store.Transfer(st.ID, raftid.ReplicaID(r)); err != nil {
								t.Error(err)
							}
						}
					}
				}
			}
		default:
		}
		return leads() == 4
	})
	keys := []string{"a", "k", "z"}
	for _, key := range keys {
		others[0].put(key, "before")
	}
	began := time.Now()
	way.Block()
	for i, key := range keys {
		// What was sent to the node before it was missed ends like anything that a lost leader has.
		c.eventually("the others lead "+key, func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			_, err := others[i%2].kv.Put(ctx, &pb.PutRequest{Key: []byte(key), Value: []byte("after")})
			return err == nil
		})
	}
	if took := time.Since(began); took > 2*3000*time.Millisecond {
		t.Errorf("clients of the others were without answers for %v", took)
	}
	// A transaction over all regions, whose parts were prepared by nobody yet.
	resp, err := others[1].kv.Txn(within(t), &pb.TxnRequest{Success: []*pb.RequestOp{
		{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("a"), Value: []byte("txn")}}},
		{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("z"), Value: []byte("txn")}}},
	}})
	if err != nil || !resp.Succeeded {
		t.Fatalf("a transaction: %v, %v", resp, err)
	}
	way.Unblock()
	if got := victim.get("a"); got != "txn" {
		t.Errorf("afterwards a is %q at the node that was out of reach", got)
	}
	victim.put("k", "back")
	if got := others[0].get("k"); got != "back" {
		t.Errorf("k is %q", got)
	}
}
