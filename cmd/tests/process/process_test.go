// Package process tests the binary as a user meets it: started with flags, spoken to by etcdctl,
// killed, stopped, started wrongly, and run out of disk.
//
// BRAID_BIN names the binary; without it braid is built from the repository. With BRAID_BIN set to
// an etcd the tests of what both promise run as well, and the rest is skipped.
package process

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"braid/cmd/tests/etcdbin"
	"braid/cmd/tests/proc"
)

const (
	startTimeout = 20 * time.Second
	// readySoon is what a user is ready to wait for an empty store.
	readySoon = 5 * time.Second
)

var regionArgs = []string{"--region-split-keys=b,d,f,h,j,l"}

// binary is the program under test.
func binary(t *testing.T) string {
	t.Helper()
	if os.Getenv("BRAID_BIN") == "" {
		if sources, err := filepath.Glob("../../braid/*.go"); err != nil || len(sources) == 0 {
			t.Skip("no cmd/braid here and BRAID_BIN is not set")
		}
	}
	bin, err := etcdbin.Braid()
	if err != nil {
		t.Fatal(err)
	}
	return bin
}

// isBraid says whether the program under test is braid; tests of what etcd does otherwise need it.
func isBraid(t *testing.T) bool {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), binary(t), "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(strings.ToLower(string(out)), "braid")
}

// cluster starts size nodes; they end with the test.
func cluster(t *testing.T, size int, args ...string) *proc.Cluster {
	t.Helper()
	if isBraid(t) {
		args = append(args, regionArgs...)
	}
	c, err := proc.NewCluster(binary(t), t.TempDir(), size, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Kill(); err != nil {
			t.Error(err)
		}
	})
	start(t, c.Start)
	return c
}

// node prepares one node without starting it.
func node(t *testing.T, change func(*proc.Config)) *proc.Node {
	t.Helper()
	addrs, err := proc.FreeAddrs(2)
	if err != nil {
		t.Fatal(err)
	}
	cfg := proc.Config{Name: "n1", Bin: binary(t), Dir: t.TempDir(), Client: addrs[0], Peer: addrs[1]}
	if change != nil {
		change(&cfg)
	}
	n := proc.New(cfg)
	t.Cleanup(func() {
		if err := n.Kill(); err != nil {
			t.Error(err)
		}
	})
	return n
}

func start(t *testing.T, start func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	if err := start(ctx); err != nil {
		t.Fatal(err)
	}
}

func client(t *testing.T, endpoints ...string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func etcdctl(t *testing.T, n *proc.Node, args ...string) string {
	t.Helper()
	bin, err := etcdbin.Etcdctl()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(within(t, 10*time.Second), bin, append([]string{"--endpoints=" + n.Endpoint()}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("etcdctl %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func TestStartPutGet(t *testing.T) {
	c := cluster(t, 1)
	n := c.Nodes[0]
	if out := etcdctl(t, n, "put", "k1", "v1"); out != "OK\n" {
		t.Errorf("put says %q", out)
	}
	if out := etcdctl(t, n, "get", "k1"); out != "k1\nv1\n" {
		t.Errorf("get says %q", out)
	}
	etcdctl(t, n, "put", "a1", "w1")
	if out := etcdctl(t, n, "get", "", "--from-key"); out != "a1\nw1\nk1\nv1\n" {
		t.Errorf("get of all says %q", out)
	}
	if out := etcdctl(t, n, "endpoint", "status", "-w", "fields"); !strings.Contains(out, `"Revision" : 3`) {
		t.Errorf("status says %s", out)
	}
	if out := etcdctl(t, n, "endpoint", "health"); !strings.Contains(out, "is healthy") {
		t.Errorf("health says %s", out)
	}
}

func TestReadySoon(t *testing.T) {
	n := node(t, nil)
	if err := n.Start(within(t, readySoon)); err != nil {
		t.Fatal(err)
	}
}

// TestKillKeepsData kills again and again in the middle of writes: what was acknowledged is there,
// at its revision, and the next revision goes on from it.
func TestKillKeepsData(t *testing.T) {
	n := cluster(t, 1).Nodes[0]
	acked := map[string]int64{}
	letters := "aceghik" // one region each
	for round := range 4 {
		c := client(t, n.Endpoint())
		killed := make(chan struct{})
		time.AfterFunc(400*time.Millisecond, func() {
			defer close(killed)
			if err := n.Kill(); err != nil {
				t.Error(err)
			}
		})
		for i := 0; ; i++ {
			key := fmt.Sprintf("%c%d-%d", letters[i%len(letters)], round, i)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			resp, err := c.Put(ctx, key, "v"+key)
			cancel()
			if err != nil {
				break
			}
			acked[key] = resp.Header.Revision
		}
		<-killed
		start(t, n.Start)
		c = client(t, n.Endpoint())
		resp, err := c.Get(within(t, 10*time.Second), "\x00", clientv3.WithFromKey())
		if err != nil {
			t.Fatal(err)
		}
		found := map[string]*int64{}
		highest := int64(1)
		for _, kv := range resp.Kvs {
			found[string(kv.Key)] = &kv.ModRevision
			highest = max(highest, kv.ModRevision)
			if string(kv.Value) != "v"+string(kv.Key) {
				t.Fatalf("%s has the value %q", kv.Key, kv.Value)
			}
		}
		if resp.Header.Revision != highest {
			t.Fatalf("the store is at revision %d, its newest key at %d", resp.Header.Revision, highest)
		}
		// Keys are never overwritten here, so every revision is one key: dense means as many.
		if int64(len(resp.Kvs)) != highest-1 {
			t.Fatalf("%d keys by revision %d", len(resp.Kvs), highest)
		}
		for key, rev := range acked {
			if found[key] == nil || *found[key] != rev {
				t.Fatalf("%s was acknowledged at revision %d, found at %v", key, rev, found[key])
			}
		}
		if len(acked) < 20*(round+1) {
			t.Fatalf("only %d writes acknowledged, this proves nothing", len(acked))
		}
	}
}

// fails expects the node to exit by itself with status 1 and one clear line that contains all of
// want, ready never said.
func fails(t *testing.T, n *proc.Node, want ...string) {
	t.Helper()
	if err := n.Launch(); err != nil {
		t.Fatal(err)
	}
	code, err := n.ExitCode(within(t, startTimeout))
	if err != nil {
		t.Fatalf("%v\n%s", err, n.LogTail())
	}
	log := n.LogTail()
	if code != 1 {
		t.Errorf("exit status %d, want 1:\n%s", code, log)
	}
	if strings.Contains(log, "goroutine ") || strings.Contains(log, "panic") {
		t.Errorf("a crash is not a message:\n%s", log)
	}
	lines := strings.Split(strings.TrimSpace(log), "\n")
	last := lines[len(lines)-1]
	for _, w := range want {
		if !strings.Contains(last, w) {
			t.Errorf("the last line does not say %q:\n%s", w, log)
		}
	}
}

func TestPortInUse(t *testing.T) {
	if !isBraid(t) {
		t.Skip("etcd's message is its own")
	}
	for name, which := range map[string]func(*proc.Config) string{
		"client": func(c *proc.Config) string { return c.Client },
		"peer":   func(c *proc.Config) string { return c.Peer },
	} {
		t.Run(name, func(t *testing.T) {
			var addr string
			n := node(t, func(c *proc.Config) { addr = which(c) })
			l, err := net.Listen("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			_, port, _ := net.SplitHostPort(addr)
			fails(t, n, port, "address already in use")
		})
	}
}

// TestUnwritableDir: root may write anywhere, so a file in the way of the directory stands for a
// missing permission too.
func TestUnwritableDir(t *testing.T) {
	if !isBraid(t) {
		t.Skip("etcd's message is its own")
	}
	t.Run("file in the way", func(t *testing.T) {
		n := node(t, nil)
		if err := os.WriteFile(n.DataDir(), nil, 0o644); err != nil {
			t.Fatal(err)
		}
		fails(t, n, n.DataDir())
	})
	t.Run("read-only file system", func(t *testing.T) {
		n := node(t, nil)
		mount(t, n.DataDir(), "ro,size=1m")
		fails(t, n, n.DataDir())
	})
}

// mount puts a tmpfs on dir, which needs root.
func mount(t *testing.T, dir, options string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	flags := uintptr(0)
	if rest, ok := strings.CutPrefix(options, "ro,"); ok {
		flags, options = syscall.MS_RDONLY, rest
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", flags, options); errors.Is(err, syscall.EPERM) {
		t.Skip("mounting is not allowed here")
	} else if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// TestWrongCluster starts a node on the data of another cluster, and one of another member.
func TestWrongCluster(t *testing.T) {
	if !isBraid(t) {
		t.Skip("etcd goes by its data and ignores what it is told")
	}
	n := node(t, nil)
	start(t, n.Start)
	if err := n.Term(within(t, startTimeout)); err != nil {
		t.Fatal(err)
	}
	t.Run("token", func(t *testing.T) {
		cfg := n.Config
		cfg.Token = "another-cluster"
		fails(t, proc.New(cfg), "cluster")
	})
	t.Run("foreign files", func(t *testing.T) {
		n := node(t, nil)
		if err := os.MkdirAll(filepath.Join(n.DataDir(), "member"), 0o755); err != nil {
			t.Fatal(err)
		}
		fails(t, n, n.DataDir())
	})
	t.Run("damaged identity", func(t *testing.T) {
		if err := filepath.WalkDir(n.DataDir(), func(path string, d os.DirEntry, err error) error {
			if err == nil && d.Name() == "identity.json" {
				return os.WriteFile(path, []byte("{"), 0o644)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		fails(t, proc.New(n.Config), "identity")
	})
}

func TestUnknownFlag(t *testing.T) {
	n := node(t, func(c *proc.Config) { c.Args = []string{"--lisen-client-urls=http://127.0.0.1:1"} })
	if err := n.Launch(); err != nil {
		t.Fatal(err)
	}
	code, err := n.ExitCode(within(t, startTimeout))
	if err != nil {
		t.Fatal(err)
	}
	if code != 2 {
		t.Errorf("exit status %d, want 2:\n%s", code, n.LogTail())
	}
	if isBraid(t) && !strings.Contains(n.LogTail(), "listen-client-urls") {
		t.Errorf("no hint at the flag that was meant:\n%s", n.LogTail())
	}
}

// TestTermination: SIGTERM ends the process soon and by the same signal, as etcd's does, and the
// data is there after it.
func TestTermination(t *testing.T) {
	n := cluster(t, 1).Nodes[0]
	etcdctl(t, n, "put", "k", "v")
	if err := n.Term(within(t, 5*time.Second)); err != nil {
		t.Fatal(err)
	}
	if code, err := n.ExitCode(t.Context()); err != nil || (code != -1 && code != 0 && code != 143) {
		t.Errorf("exit status %d (%v):\n%s", code, err, n.LogTail())
	}
	if (isBraid(t) && strings.Contains(n.LogTail(), `"level":"error"`)) || strings.Contains(n.LogTail(), "goroutine ") {
		t.Errorf("a clean stop logs errors:\n%s", n.LogTail())
	}
	start(t, n.Start)
	if out := etcdctl(t, n, "get", "k"); out != "k\nv\n" {
		t.Errorf("after the restart get says %q", out)
	}
}

// TestDiskFull fills a small file system. The node must stop by itself; given room, it must come
// back with all that was acknowledged.
func TestDiskFull(t *testing.T) {
	if !isBraid(t) {
		t.Skip("etcd's answer to a full disk is its own")
	}
	n := node(t, nil)
	mount(t, n.DataDir(), "size=96m")
	start(t, n.Start)
	c := client(t, n.Endpoint())
	value := strings.Repeat("v", 256<<10)
	acked := map[string]int64{}
	for i := 0; ; i++ {
		key := fmt.Sprint("k", i)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		resp, err := c.Put(ctx, key, value+key)
		cancel()
		if err != nil {
			break
		}
		acked[key] = resp.Header.Revision
		if i > 4000 {
			t.Fatal("the disk does not fill")
		}
	}
	if _, err := n.ExitCode(within(t, 20*time.Second)); err != nil {
		t.Fatalf("the disk is full, but %v\n%s", err, n.LogTail())
	}
	if log := n.LogTail(); !strings.Contains(log, "no space left on device") {
		t.Errorf("the log does not say why:\n%s", log)
	}
	if err := syscall.Mount("tmpfs", n.DataDir(), "tmpfs", syscall.MS_REMOUNT, "size=1g"); err != nil {
		t.Fatal(err)
	}
	start(t, n.Start)
	c = client(t, n.Endpoint())
	for key, rev := range acked {
		resp, err := c.Get(within(t, 10*time.Second), key)
		if err != nil {
			t.Fatal(err)
		}
		if len(resp.Kvs) != 1 || string(resp.Kvs[0].Value) != value+key || resp.Kvs[0].ModRevision != rev {
			t.Fatalf("%s, acknowledged at revision %d, is lost or damaged", key, rev)
		}
	}
	if len(acked) < 50 {
		t.Fatalf("only %d writes acknowledged before the disk was full", len(acked))
	}
	t.Logf("%d writes acknowledged before the disk was full, all there", len(acked))
}

// TestOneOfThreeKilled: each node in turn is killed; writes to all regions go on within the time of
// an election, and the node comes back to the same data.
func TestOneOfThreeKilled(t *testing.T) {
	c := cluster(t, 3)
	written := 0
	for i, victim := range c.Nodes {
		if err := victim.Kill(); err != nil {
			t.Fatal(err)
		}
		var others []string
		for _, n := range c.Nodes {
			if n != victim {
				others = append(others, n.Endpoint())
			}
		}
		cl := client(t, others...)
		for _, letter := range "aceghik" {
			key := fmt.Sprintf("%c%d", letter, i)
			if err := proc.Poll(within(t, 15*time.Second), 100*time.Millisecond, func() (bool, error) {
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
				defer cancel()
				_, err := cl.Put(ctx, key, "v")
				return err == nil, nil
			}); err != nil {
				t.Fatalf("no write to %s with %s down: %v", key, victim.Name, err)
			}
			written++
		}
		start(t, victim.Start)
		resp, err := client(t, victim.Endpoint()).Get(within(t, 15*time.Second), "\x00", clientv3.WithFromKey(), clientv3.WithCountOnly())
		if err != nil {
			t.Fatalf("%s after its restart: %v", victim.Name, err)
		}
		if resp.Count != int64(written) {
			t.Fatalf("%s shows %d keys of %d after its restart", victim.Name, resp.Count, written)
		}
	}
}

// TestNoQuorum: with two of three nodes gone, writes and linearizable reads fail in bounded time
// with etcd's errors, serializable reads are served; when the nodes are back all goes on.
func TestNoQuorum(t *testing.T) {
	c := cluster(t, 3)
	last := c.Nodes[2]
	all := client(t, c.Endpoints()...)
	for _, key := range []string{"a", "k"} {
		if _, err := all.Put(within(t, 10*time.Second), key, "v"); err != nil {
			t.Fatal(err)
		}
	}
	// A linearizable read through the last node: now it has the data itself.
	cl := client(t, last.Endpoint())
	if _, err := cl.Get(within(t, 10*time.Second), "\x00", clientv3.WithFromKey()); err != nil {
		t.Fatal(err)
	}
	for _, n := range c.Nodes[:2] {
		if err := n.Kill(); err != nil {
			t.Fatal(err)
		}
	}

	// etcd's own bound: 5 s + 2 election timeouts.
	const bound = 10 * time.Second
	kv := pb.NewKVClient(cl.ActiveConnection())
	for name, call := range map[string]func(ctx context.Context) error{
		"put": func(ctx context.Context) error {
			_, err := kv.Put(ctx, &pb.PutRequest{Key: []byte("a"), Value: []byte("w")})
			return err
		},
		"read": func(ctx context.Context) error {
			_, err := kv.Range(ctx, &pb.RangeRequest{Key: []byte("a")})
			return err
		},
	} {
		from := time.Now()
		err := call(within(t, 2*bound))
		took := time.Since(from)
		s := status.Convert(err)
		if s.Code() != codes.Unavailable || !strings.HasPrefix(s.Message(), "etcdserver: ") {
			t.Errorf("%s without quorum: %v after %s, want one of etcd's Unavailable errors", name, err, took)
		}
		if took > bound {
			t.Errorf("%s without quorum took %s", name, took)
		}
	}
	for _, key := range []string{"a", "k"} {
		resp, err := cl.Get(within(t, 5*time.Second), key, clientv3.WithSerializable())
		if err != nil || len(resp.Kvs) != 1 {
			t.Errorf("serializable read of %s without quorum: %v %v", key, resp, err)
		}
	}

	for _, n := range c.Nodes[:2] {
		start(t, n.Start)
	}
	if err := proc.Poll(within(t, 20*time.Second), 200*time.Millisecond, func() (bool, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		_, err := all.Put(ctx, "k", "w")
		return err == nil, nil
	}); err != nil {
		t.Fatalf("no write after the quorum is back: %v", err)
	}
}
