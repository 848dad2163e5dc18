package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/goleak"

	"braid/cmd/internal/config"
	"braid/cmd/internal/freeport"
)

// TestClusterSizes writes and reads through every node of clusters with one to five nodes, over
// more regions than nodes. With four and five nodes some regions have no replica on a node, and
// with four, one node has no member of pd.
func TestClusterSizes(t *testing.T) {
	t.Parallel() // it mostly waits
	for size := 1; size <= 5; size++ {
		for _, mode := range []string{"regions", "single-group"} {
			t.Run(fmt.Sprintf("%s/%d", mode, size), func(t *testing.T) {
				shape := splitAt("b", "d", "f", "h", "j", "l")
				if mode == "single-group" {
					shape = singleGroupMode
				}
				c := newCluster(t, size, shape)
				c.start(c.nodes...)
				rev := int64(1)
				for i, n := range c.nodes {
					for _, k := range []string{"a", "c", "e", "g", "i", "k", "m"} {
						rev++
						if got := n.put(k, fmt.Sprint(i)); got != rev {
							t.Fatalf("put %s on %s has revision %d, want %d", k, n.cfg.Name, got, rev)
						}
					}
				}
				want := c.nodes[0].all()
				for _, n := range c.nodes {
					if got := n.all(); got != want {
						t.Errorf("%s reads %s\nn0 %s", n.cfg.Name, got, want)
					}
					if got := n.hash(0); got.Hash != c.nodes[0].hash(0).Hash {
						t.Errorf("%s hashes otherwise", n.cfg.Name)
					}
					members, err := pb.NewClusterClient(n.conn).MemberList(within(t), &pb.MemberListRequest{Linearizable: true})
					if err != nil || len(members.Members) != size {
						t.Fatalf("members on %s: %v, %v", n.cfg.Name, members, err)
					}
					for _, m := range members.Members {
						if m.Name == "" || len(m.ClientURLs) != 1 {
							t.Errorf("%s does not know %v", n.cfg.Name, m)
						}
					}
					st, err := pb.NewMaintenanceClient(n.conn).Status(within(t), &pb.StatusRequest{})
					if err != nil || st.Leader == 0 || st.RaftTerm == 0 || st.RaftIndex == 0 || st.RaftAppliedIndex == 0 {
						t.Errorf("status of %s: %v, %v", n.cfg.Name, st, err)
					}
				}

				// The same after a restart of one node, and of all.
				c.restart(c.nodes[size-1])
				if got := c.nodes[size-1].all(); got != want {
					t.Errorf("after a restart n%d reads %s, want %s", size-1, got, want)
				}
				c.restart(c.nodes...)
				for _, n := range c.nodes {
					if got := n.all(); got != want {
						t.Errorf("after a restart of all %s reads %s, want %s", n.cfg.Name, got, want)
					}
				}
				if got := c.nodes[0].put("a", "again"); got != rev+1 {
					t.Errorf("the next revision is %d, want %d", got, rev+1)
				}
			})
		}
	}
}

// TestStartCancelled gives up waiting for a quorum, and leaves nothing behind.
func TestStartCancelled(t *testing.T) {
	for _, change := range []func(*config.Config){splitAt("m"), singleGroupMode} {
		c := newCluster(t, 3, change)
		before := goleak.IgnoreCurrent()
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
		defer cancel()
		if err := c.nodes[0].tryStart(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("starting alone: %v", err)
		}
		if err := goleak.Find(before); err != nil {
			t.Error(err)
		}
		// Nothing of the attempt is in the way of the next one.
		c.start(c.nodes...)
		if got := c.nodes[0].put("a", "1"); got != 2 {
			t.Errorf("the first revision is %d", got)
		}
		c.stop(c.nodes...)
	}
}

// TestLoneMemberSaysWhatItWaitsFor: soon, with numbers, and on the page where health is asked for.
func TestLoneMemberSaysWhatItWaitsFor(t *testing.T) {
	t.Parallel() // it mostly waits
	port, err := freeport.Range(1)
	if err != nil {
		t.Fatal(err)
	}
	page := fmt.Sprintf("http://127.0.0.1:%d", port)
	c := newCluster(t, 3)
	c.nodes[0].cfg.ListenMetricsURLs = types.MustNewURLs([]string{page})
	health := func() (int, string) {
		resp, err := (&http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}).Get(page + "/health")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(b)
	}
	ctx, cancel := context.WithCancel(within(t))
	ended := make(chan error, 1)
	go func() { ended <- c.nodes[0].tryStart(ctx) }()
	began := time.Now()
	c.eventually("it says what it waits for", func() bool {
		return c.nodes[0].logs.FilterMessage("waiting for a quorum of the placement group: 1 of its 3 members are here, and it takes 2").Len() > 0
	})
	if took := time.Since(began); took > 8*time.Second {
		t.Errorf("it was silent for %v", took)
	}
	if status, body := health(); status != http.StatusServiceUnavailable || body != `{"health":"false","reason":"RAFT NO LEADER"}`+"\n" {
		t.Errorf("/health says %d, %s", status, body)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	c.start(c.nodes...)
	if status, body := health(); status != http.StatusOK {
		t.Errorf("/health says %d, %s", status, body)
	}
}

// TestModeIsKept refuses a flag that contradicts the stored mode (A16).
func TestModeIsKept(t *testing.T) {
	for _, single := range []bool{false, true} {
		c := newCluster(t, 1, func(c *config.Config) { c.SingleGroup = single })
		n := c.nodes[0]
		c.start(n)
		n.put("a", "1")
		c.stop(n)
		n.cfg.SingleGroup = !single
		err := n.tryStart(within(t))
		if err == nil || !strings.Contains(err.Error(), "cannot be changed by a flag") {
			t.Errorf("started %v with the other mode: %v", single, err)
		}
		n.cfg.SingleGroup = single
		c.start(n)
		if got := n.get("a"); got != "1" {
			t.Errorf("a is %q", got)
		}
	}
}
