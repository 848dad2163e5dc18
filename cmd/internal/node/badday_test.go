package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/cmd/internal/config"
	"braid/region"
)

// TestStartsAreCounted: each start on a directory has a number of its own, also the one after a
// first start that was cut short before its identity was in place.
func TestStartsAreCounted(t *testing.T) {
	dir := t.TempDir()
	id := identity{ClusterID: 1, StoreID: 2, Name: "n", Mode: "m"}
	if err := os.WriteFile(filepath.Join(dir, "identity.json.tmp"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want := uint64(1); want <= 3; want++ {
		got, err := openIdentity(dir, id)
		if err != nil || got.Starts != want || !got.Joining {
			t.Fatalf("start %d: %+v, %v", want, got, err)
		}
	}
}

// TestRefusedDirectories starts on directories that are not this node's, and says what to do.
func TestRefusedDirectories(t *testing.T) {
	write := func(dir, name, content string) {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		name  string
		spoil func(cfg *config.Config)
		want  string
	}{
		{"etcd's", func(c *config.Config) { write(c.DataDir, "member/snap/db", "") }, "was written by etcd"},
		{"somebody's", func(c *config.Config) { write(c.DataDir, "notes.txt", "") }, "is not empty (notes.txt)"},
		{"a file", func(c *config.Config) { write(filepath.Dir(c.DataDir), filepath.Base(c.DataDir), "") }, "cannot create data directory"},
		{"damaged", func(c *config.Config) { write(c.DataDir, "identity.json", "{") }, "is damaged"},
		{"newer", func(c *config.Config) { write(c.DataDir, "identity.json", `{"format": 2}`) }, "has layout version 2 and this binary reads version 1"},
		{"another cluster's", func(c *config.Config) { write(c.DataDir, "identity.json", `{"format": 1, "clusterID": 5}`) }, "belongs to cluster 5"},
		{"another member's", func(c *config.Config) {
			write(c.DataDir, "identity.json", fmt.Sprintf(`{"format": 1, "clusterID": %d, "storeID": 7, "name": "m7"}`, c.ClusterID()))
		}, "belongs to member 7 (m7)"},
		{"empty, of a member that should exist", func(c *config.Config) { c.InitialClusterState = config.ClusterExisting }, "holds no data of this member"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newCluster(t, 1)
			tc.spoil(c.nodes[0].cfg)
			err := c.nodes[0].tryStart(within(t))
			if err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %v, want one line with %q", err, tc.want)
			}
		})
	}
}

// TestFailedFirstStartBindsNothing: other flags may follow a first start that got no further than the
// identity, and none that may have voted (A7), which keeps its mode too (A16).
func TestFailedFirstStartBindsNothing(t *testing.T) {
	first := identity{ClusterID: 1, StoreID: 2, Name: "n", Mode: "m"}
	for _, other := range []identity{
		{ClusterID: 5, StoreID: 2, Name: "n", Mode: "m"}, {ClusterID: 1, StoreID: 5, Name: "n", Mode: "m"}, {ClusterID: 1, StoreID: 2, Name: "n", Mode: "x"},
	} {
		dir := t.TempDir()
		for i, id := range []identity{first, other, first} {
			want := id
			want.Format, want.Starts, want.Joining = identityFormat, uint64(i+1), true
			if got, err := openIdentity(dir, id); err != nil || got != want {
				t.Errorf("start %d: %+v, %v, want %+v", i+1, got, err, want)
			}
		}
		for _, name := range []string{"state", "wal"} {
			path := filepath.Join(dir, name)
			if err := os.Mkdir(path, 0o700); err != nil {
				t.Fatal(err)
			}
			if _, err := openIdentity(dir, other); err == nil || !strings.Contains(err.Error(), "; if this node never was a member of a cluster, the directory may be removed") {
				t.Errorf("%+v with %s: %v", other, name, err)
			}
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
		joined := first
		joined.Format, joined.Starts = identityFormat, 4
		if err := writeIdentity(dir, joined); err != nil {
			t.Fatal(err)
		}
		if _, err := openIdentity(dir, other); err == nil || strings.Contains(err.Error(), "may be removed") {
			t.Errorf("%+v on the directory of a member: %v", other, err)
		}
	}
}

// TestPortInUse names the port, and leaves nothing in the way of the next start, also on other ports.
func TestPortInUse(t *testing.T) {
	c := newCluster(t, 1)
	n := c.nodes[0]
	for _, addr := range []string{n.cfg.ListenClientURLs[0].Host, n.cfg.ListenPeerURLs[0].Host} {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		if err := n.tryStart(within(t)); err == nil || !strings.Contains(err.Error(), "cannot listen on http://"+addr) {
			t.Errorf("with %s in use: %v", addr, err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(identityPath(n.cfg.DataDir)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("with %s in use the directory was given an identity: %v", addr, err)
		}
	}
	c.start(n)
}

// TestNoQuorum asks the last of three nodes: serializable reads are served, everything else gets
// etcd's errors within etcd's time, and all is well when the others are back.
func TestNoQuorum(t *testing.T) {
	for _, shape := range []string{"regions", "single-group"} {
		t.Run(shape, func(t *testing.T) {
			t.Parallel() // it mostly waits
			change := splitAt("m")
			if shape == "single-group" {
				change = singleGroupMode
			}
			c := newCluster(t, 3, change)
			c.start(c.nodes...)
			last := c.nodes[0].put("a", "1")
			n := c.nodes[2]
			c.eventually("the last node has the write", func() bool { return int64(n.n.oracle.Mark().Rev) == last && n.get("a") == "1" })
			c.stop(c.nodes[:2]...)
			began := time.Now()
			resp, err := n.kv.Range(within(t), &pb.RangeRequest{Key: []byte("a"), Serializable: true})
			if err != nil || len(resp.Kvs) != 1 || resp.Header.Revision != last {
				t.Errorf("a serializable read: %v, %v", resp, err)
			}
			if took := time.Since(began); took > n.n.requestTimeout()/2 {
				t.Errorf("a serializable read took %v", took)
			}
			var wg sync.WaitGroup
			for what, f := range map[string]func(ctx context.Context) error{
				"put": func(ctx context.Context) error {
					_, err := n.kv.Put(ctx, &pb.PutRequest{Key: []byte("a"), Value: []byte("2")})
					return err
				},
				"range": func(ctx context.Context) error {
					_, err := n.kv.Range(ctx, &pb.RangeRequest{Key: []byte("a")})
					return err
				},
				"compact": func(ctx context.Context) error {
					_, err := n.kv.Compact(ctx, &pb.CompactionRequest{Revision: last})
					return err
				},
				"members": func(ctx context.Context) error {
					_, err := pb.NewClusterClient(n.conn).MemberList(ctx, &pb.MemberListRequest{Linearizable: true})
					return err
				},
			} {
				wg.Go(func() {
					err := f(within(t))
					if err == nil || !strings.Contains(err.Error(), "etcdserver: request timed out") && !strings.Contains(err.Error(), "etcdserver: no leader") {
						t.Errorf("%s without a quorum: %v", what, err)
					}
					if took := time.Since(began); took > 2*n.n.requestTimeout() {
						t.Errorf("%s took %v to fail", what, took)
					}
				})
			}
			wg.Wait()
			c.start(c.nodes[:2]...)
			n.put("a", "3")
			if got := n.get("a"); got != "3" {
				t.Errorf("a is %q", got)
			}
			c.stop(c.nodes...)
		})
	}
}

// TestTooManyRequests floods a node whose queues are tiny: some are refused in etcd's words, the rest
// is executed, and each exactly once.
func TestTooManyRequests(t *testing.T) {
	c := newCluster(t, 1)
	limits := region.DefaultLimits
	limits.QueueCountMax, limits.InflightEntriesMax, limits.EntryCommandsMax = 4, 2, 2
	c.tune.limits = &limits
	c.start(c.nodes...)
	n := c.nodes[0]
	const writers, each = 64, 20
	var mu sync.Mutex
	done, refused := 0, 0
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for range each {
				_, err := n.kv.Put(context.Background(), &pb.PutRequest{Key: []byte("k")})
				mu.Lock()
				switch {
				case err == nil:
					done++
				case strings.Contains(err.Error(), "etcdserver: too many requests"):
					refused++
				default:
					t.Errorf("put: %v", err)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	resp, err := n.kv.Range(within(t), &pb.RangeRequest{Key: []byte("k")})
	if err != nil || done == 0 || refused == 0 || resp.Kvs[0].Version != int64(done) || resp.Header.Revision != int64(1+done) {
		t.Errorf("%d done, %d refused; the key: %v, %v", done, refused, resp, err)
	}
}

// TestLateNode starts the third node long after the others have written, moved their logs on and
// cut them. It learns of its regions from the directory alone: what the groups sent it before it
// knew them was dropped (B6).
func TestLateNode(t *testing.T) {
	t.Parallel() // it mostly waits
	c := newCluster(t, 3, splitAt("m"))
	c.tiny()
	c.start(c.nodes[:2]...)
	c.nodes[0].put("z", "1")
	c.churn(c.nodes[0], "a", 1600)
	c.start(c.nodes[2])
	late := c.nodes[2]
	c.eventually("the late node reads", func() bool { return late.get("z") == "1" })
	// Now it counts: with one of the others gone it is the second of two.
	c.stop(c.nodes[0])
	if late.put("z", "2"); late.get("z") != "2" {
		t.Errorf("z is %q", late.get("z"))
	}
	want := c.nodes[1].all()
	if got := late.all(); got != want {
		t.Errorf("the late node reads %.200s, another %.200s", got, want)
	}
}
