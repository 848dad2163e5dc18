package node

import (
	"context"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/cmd/internal/config"
	"braid/raftstore"
	"braid/raftstore/raftid"
)

// TestCleanStopHandsOver: a node that stops gives its groups away first: they have a new leader when
// it is gone, one term later, nobody waits for an election timeout, and the groups that others
// lead notice nothing. Without the other nodes there is nobody to hand over to, and nothing that
// waits for a quorum keeps the last one from stopping.
func TestCleanStopHandsOver(t *testing.T) {
	// Nobody calls an election because the machine is slow: terms are counted below. A request that
	// waits for its own time is told from one that the stop ends.
	c := newCluster(t, 3, splitAt("h", "p"), func(c *config.Config) { c.ElectionMs = 5000 })
	c.start(c.nodes...)
	for i, key := range []string{"a", "k", "z"} {
		c.nodes[i].put(key, "v") // each of the regions has a leader, and is awake
	}
	leader, _ := c.nodes[0].n.oracle.Leader()
	var victim *testNode
	var others []*testNode
	for _, n := range c.nodes {
		if n.n.self == leader {
			victim = n
		} else {
			others = append(others, n)
		}
	}
	before := map[raftid.GroupID]raftstore.GroupStatus{}
	led := 0
	for _, st := range victim.n.store.Statuses() {
		before[st.ID] = st
		if st.Leading {
			led++
		}
	}
	if led == 0 || !before[raftid.PDGroup].Leading {
		t.Fatalf("%s leads %d groups, not the one that it should", victim.cfg.Name, led)
	}
	c.stop(victim)
	for id, was := range before {
		found := false
		for _, n := range others {
			st, ok := n.n.store.Status(id)
			if !ok || !st.Leading {
				continue
			}
			found = true
			want := was.Term
			if was.Leading {
				want++
			}
			if st.Term != want {
				t.Errorf("group %d: term %d, want %d", id, st.Term, want)
			}
		}
		if !found {
			t.Errorf("group %d has no leader when the old one has stopped", id)
		}
	}
	for i, key := range []string{"a", "k", "z"} {
		others[i%2].put(key, "w")
	}

	c.stop(others[0])
	last := others[1]
	answered := make(chan error, 1)
	kv := last.kv
	c.eventually("a request waits for the quorum", func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
		defer cancel()
		_, err := kv.Put(ctx, &pb.PutRequest{Key: []byte("a"), Value: []byte("x")})
		return ctx.Err() != nil && err != nil
	})
	go func() {
		_, err := kv.Range(within(t), &pb.RangeRequest{Key: []byte("a")})
		answered <- err
	}()
	began := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := last.n.Stop(ctx); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > drainMax+last.n.requestTimeout()/2 {
		t.Errorf("without a quorum the stop took %v", took)
	}
	last.n = nil
	if err := <-answered; err == nil {
		t.Error("a read was answered without a quorum")
	}
	if err := last.conn.Close(); err != nil {
		t.Error(err)
	}
}
