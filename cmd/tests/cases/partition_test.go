package cases

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"braid/cmd/tests/etcdbin"
	"braid/cmd/tests/proc"
)

// network is a cluster whose nodes live in network namespaces of their own, with a cable to a
// switch for peers and another to a switch for clients.
type network struct {
	t    *testing.T
	name string // prefix of everything made
	sub  byte   // third byte of the addresses
}

var networks int // made so far

func run(args ...string) error {
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

func (n *network) must(args ...string) {
	n.t.Helper()
	if err := run(args...); err != nil {
		n.t.Fatal(err)
	}
}

func (n *network) ns(node int) string         { return fmt.Sprintf("%sn%d", n.name, node) }
func (n *network) peerCable(node int) string  { return fmt.Sprintf("%sp%d", n.name, node) }
func (n *network) peerAddr(node int) string   { return fmt.Sprintf("10.213.%d.%d", n.sub, node+1) }
func (n *network) clientAddr(node int) string { return fmt.Sprintf("10.214.%d.%d", n.sub, node+1) }

// newNetwork lays the cables of size nodes; the test is skipped where that is not allowed.
func newNetwork(t *testing.T, size int) *network {
	t.Helper()
	// The kernel takes a while to forget what is deleted, so no name is used twice.
	networks++
	n := &network{t: t, name: fmt.Sprintf("bc%d%c", os.Getpid()%100_000, 'a'+networks%26), sub: byte((os.Getpid() + networks) % 250)}
	if err := run("ip", "netns", "add", n.ns(0)); err != nil {
		t.Skipf("network namespaces cannot be made here: %v", err)
	}
	t.Cleanup(func() { n.check(run("ip", "netns", "del", n.ns(0))) })
	for _, sw := range []string{n.name + "P", n.name + "C"} {
		n.must("ip", "link", "add", sw, "type", "bridge")
		t.Cleanup(func() { n.check(run("ip", "link", "del", sw)) })
		n.must("ip", "link", "set", sw, "up")
	}
	n.must("ip", "addr", "add", fmt.Sprintf("10.214.%d.254/24", n.sub), "dev", n.name+"C")
	for i := range size {
		if i > 0 {
			n.must("ip", "netns", "add", n.ns(i))
			t.Cleanup(func() { n.check(run("ip", "netns", "del", n.ns(i))) })
		}
		n.must("ip", "-n", n.ns(i), "link", "set", "lo", "up")
		for _, c := range []struct{ outside, inside, addr, sw string }{
			{n.peerCable(i), "peer", n.peerAddr(i), n.name + "P"}, {fmt.Sprintf("%sc%d", n.name, i), "client", n.clientAddr(i), n.name + "C"},
		} {
			n.must("ip", "link", "add", c.outside, "type", "veth", "peer", "name", c.inside, "netns", n.ns(i))
			n.must("ip", "link", "set", c.outside, "master", c.sw, "up")
			n.must("ip", "-n", n.ns(i), "addr", "add", c.addr+"/24", "dev", c.inside)
			n.must("ip", "-n", n.ns(i), "link", "set", c.inside, "up")
		}
	}
	return n
}

func (n *network) check(err error) {
	if err != nil {
		n.t.Error(err)
	}
}

// cut pulls a node's peer cable; mend plugs it in again.
func (n *network) cut(node int)  { n.must("ip", "link", "set", n.peerCable(node), "down") }
func (n *network) mend(node int) { n.must("ip", "link", "set", n.peerCable(node), "up") }

// start runs a cluster in the namespaces.
func (n *network) start(size int, l layout) *store {
	t := n.t
	t.Helper()
	bin, err := etcdbin.Braid()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cluster := &proc.Cluster{}
	var members []string
	for i := range size {
		// ip execs the program, so signals reach it.
		script := filepath.Join(dir, fmt.Sprintf("braid%d", i))
		if err := os.WriteFile(script, fmt.Appendf(nil, "#!/bin/sh\nexec ip netns exec %s %s \"$@\"\n", n.ns(i), bin), 0o755); err != nil {
			t.Fatal(err)
		}
		cfg := proc.Config{Name: fmt.Sprintf("n%d", i+1), Bin: script, Dir: filepath.Join(dir, fmt.Sprintf("n%d", i+1)),
			Client: n.clientAddr(i) + ":2379", Peer: n.peerAddr(i) + ":2380"}
		if l.splits != "" {
			cfg.Args = []string{"--region-split-keys=" + l.splits}
		}
		members = append(members, cfg.Name+"=http://"+cfg.Peer)
		cluster.Nodes = append(cluster.Nodes, proc.New(cfg))
	}
	t.Cleanup(func() {
		if err := cluster.Kill(); err != nil {
			t.Error(err)
		}
	})
	for _, node := range cluster.Nodes {
		node.InitialCluster = strings.Join(members, ",")
	}
	if err := cluster.Start(within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	s := &store{Cluster: cluster, t: t}
	for _, node := range cluster.Nodes {
		s.conns = append(s.conns, dial(t, node.Endpoint()))
	}
	return s
}

func requireLeader(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, rpctypes.MetadataRequireLeaderKey, rpctypes.MetadataHasLeader)
}

// TestPartition is https://github.com/etcd-io/etcd/issues/8660 and
// https://github.com/kubernetes/kubernetes/issues/89488: case 17. A node that is cut off from its
// peers and not from its clients says so in bounded time, and they go on elsewhere.
func TestPartition(t *testing.T) {
	perLayout(t, func(t *testing.T, l layout) {
		n := newNetwork(t, 3)
		s := n.start(3, l)
		out := s.settled(1).oracle // the worst to lose
		s.put("b", "0")
		first := s.put("t", "0") + 1
		const electionTimeout = time.Second

		followers := s.client()
		var watches []*watching
		for _, k := range []string{"b", "t"} {
			w := s.watch(requireLeader(within(t, 2*time.Minute)), out)
			w.create(&pb.WatchCreateRequest{Key: []byte(k), StartRevision: first})
			w.created()
			watches = append(watches, w)
		}
		follow := func(from int64) clientv3.WatchChan {
			return followers.Watch(clientv3.WithRequireLeader(within(t, 2*time.Minute)), "a", watchRange(from)...)
		}
		followed := follow(first)

		// Clients that know all nodes go on.
		w := s.write(16, "v")
		waitPuts(t, w, 100)
		if _, err := s.kv(out).Range(within(t, time.Minute), &pb.RangeRequest{Key: []byte("b")}); err != nil {
			t.Fatal(err)
		}
		n.cut(out)
		began := time.Now()
		type outcome struct {
			err  error
			took time.Duration
		}
		read, ended := make(chan outcome, 1), make(chan outcome, len(watches))
		go func() {
			_, err := s.kv(out).Range(within(t, time.Minute), &pb.RangeRequest{Key: []byte("b")})
			read <- outcome{err, time.Since(began)}
		}()
		for _, w := range watches {
			go func() {
				for {
					if _, err := w.stream.Recv(); err != nil {
						ended <- outcome{err, time.Since(began)}
						return
					}
				}
			}()
		}
		if r := <-read; status.Code(r.err) != codes.Unavailable || r.took > max(9*time.Second, bound(3*time.Second)) {
			t.Errorf("a read on the node that is cut off: %v after %v", r.err, r.took)
		} else {
			t.Logf("a linearizable read ended after %v: %v", r.took, r.err)
		}
		asked := time.Now()
		if r, err := s.kv(out).Range(within(t, time.Minute), &pb.RangeRequest{Key: []byte("b"), Serializable: true}); err != nil || len(r.Kvs) != 1 || time.Since(asked) > bound(time.Second) {
			t.Errorf("a serializable read on the node that is cut off: %v, %v after %v", r, err, time.Since(asked))
		}
		for range watches {
			// A node notices within two election timeouts that it has no leader; then it waits for three.
			r := <-ended
			if !refused(r.err, codes.Unavailable, "etcdserver: no leader") || r.took > bound(6*electionTimeout) {
				t.Errorf("a watch on the node that is cut off ended with %v after %v", r.err, r.took)
			} else {
				t.Logf("a watch ended after %v", r.took)
			}
		}
		gap := w.gap(began, time.Now())
		pause(t, time.Second)
		w.end()
		w.check(t)
		t.Logf("%d puts, at most %v without one", w.count.Load(), gap)
		if gap > bound(3*time.Second) {
			t.Errorf("no put for %v", gap)
		}
		highest := int64(0)
		for _, a := range w.between(time.Time{}, time.Now()) {
			highest = max(highest, a.rev)
		}
		for next := first; next <= highest; {
			select {
			case resp, ok := <-followed:
				if !ok || errors.Is(resp.Err(), rpctypes.ErrNoLeader) {
					followed = follow(next) // as who requires a leader must; some node has one
					continue
				}
				if resp.Err() != nil {
					t.Fatalf("the watch of a client that knows all nodes ended: %v", resp.Err())
				}
				for _, e := range resp.Events {
					if e.Kv.ModRevision != next {
						t.Fatalf("event at %d instead of %d", e.Kv.ModRevision, next)
					}
					next++
				}
			case <-time.After(time.Minute):
				t.Fatalf("nothing at %d", next)
			}
		}
		n.mend(out)
		if err := proc.Poll(within(t, time.Minute), 200*time.Millisecond, func() (bool, error) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			r, err := s.kv(out).Range(ctx, &pb.RangeRequest{Key: []byte("b")})
			return err == nil && r.Header.Revision >= highest, nil
		}); err != nil {
			t.Errorf("the node does not come back: %v", err)
		}
	})
}

// TestRegionWithoutQuorum is the second half of case 17: one region has lost its quorum, and the
// others, and watches on them alone, go on.
func TestRegionWithoutQuorum(t *testing.T) {
	s := start(t, 5, layout{"many", "c,e,g,i,k,m,o,q,s,u,w"})
	var list struct {
		Regions []struct {
			Start string `json:"start"`
			Peers []struct {
				Store number `json:"store"`
			} `json:"peers"`
		} `json:"regions"`
	}
	s.settled(0)
	var pd struct {
		Stores []struct {
			ID   number `json:"id"`
			Name string `json:"name"`
		} `json:"stores"`
	}
	if err := s.braid(0, &pd, "pd", "status"); err != nil {
		t.Fatal(err)
	}
	if err := s.braid(0, &list, "region", "list"); err != nil {
		t.Fatal(err)
	}
	nodeOf := map[number]int{}
	for _, st := range pd.Stores {
		nodeOf[st.ID] = slices.IndexFunc(s.Nodes, func(n *proc.Node) bool { return n.Name == st.Name })
	}
	// Two nodes that together are the quorum of some regions and not of others.
	var dead, alive []int
	pair := [2]int{-1, -1}
	for a := range 5 {
		for b := range a {
			var d, v []int
			for i, r := range list.Regions {
				here := 0
				for _, p := range r.Peers {
					if node := nodeOf[p.Store]; node == a || node == b {
						here++
					}
				}
				if here == 2 {
					d = append(d, i)
				} else {
					v = append(v, i)
				}
			}
			if len(d) > 0 && len(v) > 0 && (pair[0] < 0 || len(d) < len(dead)) {
				pair, dead, alive = [2]int{a, b}, d, v
			}
		}
	}
	if pair[0] < 0 {
		t.Fatalf("no two nodes are the quorum of some regions only: %+v", list.Regions)
	}
	key := func(region int) []byte { return []byte{byte('b' + 2*region)} }
	for i := range list.Regions {
		s.put(string(key(i)), "before")
	}
	for _, node := range pair {
		if err := s.Nodes[node].Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("nodes %v are stopped: regions %v of %d have no quorum", pair, dead, len(list.Regions))
	var up []int
	for i := range s.Nodes {
		if !slices.Contains(pair[:], i) {
			up = append(up, i)
		}
	}
	// Leaders that were on the stopped nodes are replaced.
	for _, region := range alive {
		for _, node := range up {
			err := proc.Poll(within(t, time.Minute), 50*time.Millisecond, func() (bool, error) {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				_, err := s.kv(node).Put(ctx, &pb.PutRequest{Key: key(region), Value: []byte("after")})
				return err == nil, nil
			})
			if err != nil {
				t.Fatalf("region %d has its quorum and takes no put through node %d: %v", region, node, err)
			}
			if _, err := s.kv(node).Range(within(t, time.Minute), &pb.RangeRequest{Key: key(region)}); err != nil {
				t.Errorf("region %d has its quorum and node %d cannot read it: %v", region, node, err)
			}
		}
	}
	// A watch on a region that lives, on a node that has it.
	watched := false
	for _, region := range alive {
		for _, p := range list.Regions[region].Peers {
			if node := nodeOf[p.Store]; slices.Contains(up, node) && !watched {
				watched = true
				w := s.watch(within(t, time.Minute), node)
				w.create(&pb.WatchCreateRequest{Key: key(region)})
				w.created()
				r, err := s.kv(node).Put(within(t, time.Minute), &pb.PutRequest{Key: key(region), Value: []byte("watched")})
				if err != nil {
					t.Fatal(err)
				}
				if e := w.next(); len(e.Events) != 1 || e.Events[0].Kv.ModRevision != r.Header.Revision {
					t.Errorf("the watch of region %d says %v", region, e)
				}
				if err := w.askProgress(); err != nil {
					t.Fatal(err)
				}
				if e := w.next(); e.WatchId != -1 || e.Header.Revision < r.Header.Revision {
					t.Errorf("progress of region %d is %v", region, e)
				}
			}
		}
	}
	// The dead region: an error in bounded time, no effect on anybody.
	began := time.Now()
	_, err := s.kv(up[0]).Put(within(t, time.Minute), &pb.PutRequest{Key: key(dead[0]), Value: []byte("lost")})
	if status.Code(err) != codes.Unavailable || time.Since(began) > max(9*time.Second, bound(3*time.Second)) {
		t.Errorf("a put to the region without quorum: %v after %v", err, time.Since(began))
	}
	for _, node := range pair {
		if err := s.Nodes[node].Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
	if err := proc.Poll(within(t, time.Minute), 100*time.Millisecond, func() (bool, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := s.kv(up[0]).Put(ctx, &pb.PutRequest{Key: key(dead[0]), Value: []byte("back")})
		return err == nil, nil
	}); err != nil {
		t.Errorf("the region does not come back: %v", err)
	}
}
