package transport

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"braid/raftstore/raftid"
	"braid/raftstore/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node is a transport behind a real listener on the loopback.
type node struct {
	*Transport
	s   *grpc.Server
	end chan error
}

// cluster makes n transports that know each other; change may adjust a configuration, setup
// registers handlers. A busy machine does not look like a silent store to them: who is down is mostly
// known by its streams.
func cluster(t *testing.T, n int, change func(i int, c *Config), setup func(i int, tr *Transport)) []*node {
	t.Helper()
	peers := make(map[raftid.StoreID][]string)
	var lis []net.Listener
	for i := range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		lis = append(lis, l)
		peers[raftid.StoreID(i+1)] = []string{"http://" + l.Addr().String()}
	}
	nodes := make([]*node, n)
	for i := range nodes {
		cfg := Config{Self: raftid.StoreID(i + 1), ClusterID: 77, Peers: peers, PingInterval: 20 * time.Millisecond, DownAfter: 5 * time.Second, BackoffMax: 50 * time.Millisecond}
		if change != nil {
			change(i, &cfg)
		}
		nodes[i] = start(t, cfg, lis[i], func(tr *Transport) {
			if setup != nil {
				setup(i, tr)
			}
		})
	}
	return nodes
}

func start(t *testing.T, cfg Config, l net.Listener, setup func(*Transport), opts ...grpc.ServerOption) *node {
	t.Helper()
	tr, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	setup(tr)
	n := &node{Transport: tr, s: grpc.NewServer(append(ServerOptions(), opts...)...), end: make(chan error, 1)}
	tr.Register(n.s)
	tr.Start()
	go func() { n.end <- n.s.Serve(l) }()
	t.Cleanup(n.stop)
	return n
}

func (n *node) stop() {
	if n.s == nil {
		return
	}
	n.Close()
	n.s.Stop()
	<-n.end
	n.s = nil
}

// eventually waits until ok, polling: what is waited for happens in other processes' goroutines.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			t.Fatalf("%s does not happen", what)
		case <-tick.C:
		}
	}
}

func TestFramesInOrder(t *testing.T) {
	const n = 2000
	var mu sync.Mutex
	got := map[Kind][]string{}
	nodes := cluster(t, 2, nil, func(i int, tr *Transport) {
		for _, k := range []Kind{KindRaft, KindOrder} {
			tr.Handle(k, func(from raftid.StoreID, b []byte) {
				mu.Lock()
				got[k] = append(got[k], fmt.Sprint(from, string(b[:min(len(b), 8)])))
				mu.Unlock()
			})
		}
	})
	eventually(t, "a connection", func() bool { return nodes[0].Alive(2) && nodes[1].Alive(1) })
	eventually(t, "an open stream", func() bool { return nodes[0].Send(2, KindRaft, []byte("first")) })
	for i := range n {
		p := []byte(fmt.Sprintf("%08d", i))
		if i%100 == 0 {
			p = append(p, make([]byte, 300<<10)...) // forces several messages
		}
		for _, k := range []Kind{KindRaft, KindOrder} {
			if !nodes[0].Send(2, k, p) {
				t.Fatal("a frame was refused")
			}
		}
	}
	eventually(t, "arrival", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(got[KindRaft]) == n+1 && len(got[KindOrder]) == n
	})
	for i := range n {
		if want := fmt.Sprint(raftid.StoreID(1), fmt.Sprintf("%08d", i)); got[KindRaft][i+1] != want || got[KindOrder][i] != want {
			t.Fatalf("frame %d is %s and %s", i, got[KindRaft][i+1], got[KindOrder][i])
		}
	}
	if !nodes[0].Send(1, KindRaft, []byte("self")) {
		t.Fatal("a frame to ourselves was refused")
	}
	eventually(t, "a frame to ourselves", func() bool { mu.Lock(); defer mu.Unlock(); return len(got[KindRaft]) == n+2 })
	if nodes[0].Send(9, KindRaft, nil) {
		t.Fatal("a frame to nobody was taken")
	}
}

func TestQueueLimits(t *testing.T) {
	q := newSendQueue(1000)
	if q.push(frame{KindRaft, nil}) {
		t.Fatal("a queue whose peer is away took a frame")
	}
	q.setUp(true)
	if !q.push(frame{KindRaft, make([]byte, 5000)}) || q.push(frame{KindRaft, nil}) {
		t.Fatal("one frame beyond the limit, no second")
	}
	if !q.push(frame{KindOrder, []byte("x")}) {
		t.Fatal("a full lane refuses the other lane's frames")
	}
	if fs := q.takeFrames(10); len(fs) != 1 || fs[0].kind != KindOrder {
		t.Fatalf("urgent frames come first: %v", fs)
	}
	if fs := q.takeFrames(10); len(fs) != 1 || !q.push(frame{KindRaft, nil}) {
		t.Fatalf("taking frees the lane: %v", fs)
	}
	c := newCallQueue(100)
	c.setUp(true)
	if c.start(&call{payload: make([]byte, 200), done: make(chan struct{})}) != nil || !errors.Is(c.start(&call{}), ErrOverloaded) {
		t.Fatal("a full queue of calls refuses")
	}
}

func TestCalls(t *testing.T) {
	block := make(chan struct{})
	cancelled := make(chan error, 1)
	nodes := cluster(t, 2, nil, func(i int, tr *Transport) {
		tr.HandleCall(32, func(_ context.Context, from raftid.StoreID, b []byte, reply func([]byte, error)) {
			if string(b) == "bad" {
				reply(nil, errors.New("no good"))
				return
			}
			reply(append([]byte(fmt.Sprintf("%d%s ", i, from)), b...), nil)
			reply(nil, errors.New("a second answer is ignored"))
		})
		tr.HandleCall(33, func(ctx context.Context, _ raftid.StoreID, b []byte, reply func([]byte, error)) {
			if string(b) == "wait" {
				context.AfterFunc(ctx, func() { cancelled <- context.Cause(ctx) })
			}
			go func() { <-block; reply(b, nil) }()
		})
	})
	defer close(block)
	ctx := context.Background()
	var ce *CallError
	eventually(t, "an open stream", func() bool { _, err := nodes[0].Call(ctx, 2, 32, nil); return err == nil })
	for to, want := range map[raftid.StoreID]string{1: "01 x", 2: "11 x"} {
		if b, err := nodes[0].Call(ctx, to, 32, []byte("x")); err != nil || string(b) != want {
			t.Fatalf("to %s: %q, %v", to, b, err)
		}
		if _, err := nodes[0].Call(ctx, to, 32, []byte("bad")); !errors.As(err, &ce) || !ce.Sent || !ce.Remote || err.Error() != "no good" {
			t.Fatalf("to %s: %v", to, err)
		}
		if _, err := nodes[0].Call(ctx, to, 34, nil); !errors.As(err, &ce) || ce.Sent {
			t.Fatalf("to %s, no such method: %v", to, err)
		}
	}
	if _, err := nodes[0].Call(ctx, 9, 32, nil); !errors.As(err, &ce) || ce.Sent || !errors.Is(err, ErrUnavailable) {
		t.Fatalf("to nobody: %v", err)
	}
	// Cancellation reaches the handler.
	cctx, cancel := context.WithCancel(ctx)
	got := make(chan error, 1)
	go func() { _, err := nodes[0].Call(cctx, 2, 33, []byte("wait")); got <- err }()
	eventually(t, "the call's arrival", func() bool {
		nodes[0].peers[2].calls.mu.Lock()
		defer nodes[0].peers[2].calls.mu.Unlock()
		for _, c := range nodes[0].peers[2].calls.open {
			return c.sent
		}
		return false
	})
	cancel()
	if err := <-got; !errors.As(err, &ce) || !ce.Sent || !errors.Is(err, context.Canceled) {
		t.Fatalf("cancelled: %v", err)
	}
	<-cancelled
	// A deadline travels.
	dctx, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if _, err := nodes[0].Call(dctx, 2, 33, []byte("wait")); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("deadline: %v", err)
	}
	<-cancelled
	// So does the end of a time that several calls share, once it has come.
	expired := make(chan struct{})
	time.AfterFunc(20*time.Millisecond, func() { close(expired) })
	if _, err := nodes[0].CallUntil(ctx, expired, 2, 33, []byte("wait")); !errors.As(err, &ce) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("expired: %v", err)
	}
	<-cancelled
	if _, err := nodes[0].CallUntil(ctx, expired, 1, 33, []byte("wait here")); !errors.As(err, &ce) || !ce.Sent || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("expired, to itself: %v", err)
	}
	// Many at once, with large answers.
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			b := bytes.Repeat([]byte{byte(i)}, 50<<10)
			got, err := nodes[0].Call(ctx, 2, 32, b)
			if err != nil || !bytes.Equal(got[3:], b) {
				t.Errorf("call %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	// A broken connection answers what was sent with "unknown", later calls with "not sent".
	go func() { _, err := nodes[0].Call(ctx, 2, 33, []byte("lost")); got <- err }()
	eventually(t, "the call's arrival", func() bool {
		nodes[0].peers[2].calls.mu.Lock()
		defer nodes[0].peers[2].calls.mu.Unlock()
		for _, c := range nodes[0].peers[2].calls.open {
			return c.sent
		}
		return false
	})
	nodes[1].stop()
	if err := <-got; !errors.As(err, &ce) || !ce.Sent || ce.Remote {
		t.Fatalf("lost: %v", err)
	}
	if _, err := nodes[0].Call(ctx, 2, 32, nil); !errors.As(err, &ce) || ce.Sent {
		t.Fatalf("to a store that is away: %v", err)
	}
}

func TestTooManyCalls(t *testing.T) {
	var mu sync.Mutex
	var held []func([]byte, error)
	nodes := cluster(t, 2, func(_ int, c *Config) { c.Calls = 3 }, func(_ int, tr *Transport) {
		tr.HandleCall(32, func(_ context.Context, _ raftid.StoreID, b []byte, reply func([]byte, error)) {
			mu.Lock()
			held = append(held, reply)
			mu.Unlock()
		})
		tr.HandleCall(33, func(_ context.Context, _ raftid.StoreID, b []byte, reply func([]byte, error)) { reply(nil, nil) })
	})
	eventually(t, "an open stream", func() bool { _, err := nodes[0].Call(context.Background(), 2, 33, nil); return err == nil })
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if _, err := nodes[0].Call(context.Background(), 2, 32, nil); err != nil {
				t.Error(err)
			}
		})
	}
	eventually(t, "three calls at work", func() bool { mu.Lock(); defer mu.Unlock(); return len(held) == 3 })
	var ce *CallError
	if _, err := nodes[0].Call(context.Background(), 2, 32, nil); !errors.As(err, &ce) || ce.Sent || !errors.Is(err, ErrRefused) {
		t.Fatalf("a fourth: %v", err)
	}
	for _, r := range held {
		r(nil, nil)
	}
	wg.Wait()
}

func TestSnapshots(t *testing.T) {
	var mu sync.Mutex
	got := map[string][]byte{}
	nodes := cluster(t, 2, nil, func(_ int, tr *Transport) {
		tr.HandleSnapshot(func(_ context.Context, from raftid.StoreID, g raftid.GroupID, header []byte, r io.Reader) error {
			if string(header) == "refuse" {
				return errors.New("not now")
			}
			b, err := io.ReadAll(r)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				got[fmt.Sprintf("%s%d%s", from, g, header)] = b
			}
			return err
		})
	})
	data := bytes.Repeat([]byte("0123456789abcdef"), 200_000)
	write := func(w io.Writer) error { _, err := io.Copy(w, bytes.NewReader(data)); return err }
	ctx := context.Background()
	if err := nodes[0].SendSnapshot(ctx, 2, 7, []byte("h"), write); err != nil || !bytes.Equal(got["17h"], data) {
		t.Fatalf("%v, %d bytes", err, len(got["17h"]))
	}
	if err := nodes[0].SendSnapshot(ctx, 2, 7, []byte("empty"), func(io.Writer) error { return nil }); err != nil || got["17empty"] == nil {
		t.Fatalf("an empty one: %v", err)
	}
	if err := nodes[0].SendSnapshot(ctx, 2, 7, []byte("refuse"), write); err == nil || !strings.Contains(err.Error(), "not now") {
		t.Fatalf("refused: %v", err)
	}
	// A source that fails never counts as complete.
	broken := errors.New("broken")
	if err := nodes[0].SendSnapshot(ctx, 2, 7, []byte("broken"), func(w io.Writer) error {
		if _, err := w.Write(data); err != nil {
			return err
		}
		return broken
	}); !errors.Is(err, broken) {
		t.Fatalf("broken: %v", err)
	}
	mu.Lock()
	defer mu.Unlock()
	if got["17broken"] != nil {
		t.Fatal("half a snapshot was taken for a whole one")
	}
}

// TestStalledSnapshot: a source that makes no progress is given up, at both ends, and is not complete
// whatever it writes later.
func TestStalledSnapshot(t *testing.T) {
	ends := make(chan error, 1)
	nodes := cluster(t, 2, func(_ int, c *Config) { c.SnapshotStall = 300 * time.Millisecond }, func(_ int, tr *Transport) {
		tr.HandleSnapshot(func(_ context.Context, _ raftid.StoreID, _ raftid.GroupID, _ []byte, r io.Reader) error {
			_, err := io.ReadAll(r)
			ends <- err
			return err
		})
	})
	data := make([]byte, 1<<20)
	err := nodes[0].SendSnapshot(t.Context(), 2, 7, []byte("h"), func(w io.Writer) error {
		if _, err := w.Write(data); err != nil {
			return err
		}
		select {
		case err := <-ends:
			if err == nil {
				t.Error("the receiver took half a snapshot for a whole one")
			}
		case <-time.After(time.Minute):
			t.Error("a snapshot without progress goes on")
		}
		_, err := w.Write(data)
		return err
	})
	if err == nil {
		t.Error("a stalled snapshot was taken")
	}
}

func TestDownAndRestart(t *testing.T) {
	down := make(chan raftid.StoreID, 10)
	// A socket's name stays ours while nobody listens, as a port would not.
	dir, peers := t.TempDir(), make(map[raftid.StoreID][]string)
	name := func(s raftid.StoreID) string { return filepath.Join(dir, fmt.Sprint("s", uint64(s))) }
	for s := raftid.StoreID(1); s <= 2; s++ {
		peers[s] = []string{"unix://" + name(s)}
	}
	run := func(s raftid.StoreID, setup func(*Transport)) *node {
		l, err := net.Listen("unix", name(s))
		if err != nil {
			t.Fatal(err)
		}
		return start(t, Config{Self: s, Peers: peers, PingInterval: 20 * time.Millisecond, DownAfter: 5 * time.Second, BackoffMax: 50 * time.Millisecond}, l, setup)
	}
	one := run(1, func(tr *Transport) { tr.OnDown(func(s raftid.StoreID) { down <- s }) })
	two := run(2, func(*Transport) {})
	eventually(t, "life", func() bool { return one.Alive(2) && two.Alive(1) })
	two.stop()
	eventually(t, "the end of life", func() bool { return !one.Alive(2) })
	if s := <-down; s != 2 {
		t.Fatalf("down: %s", s)
	}
	again := run(2, func(*Transport) {})
	eventually(t, "life after a restart", func() bool { return one.Alive(2) && again.Alive(1) })
	// Another process that takes over before the silence is noticed is told apart all the same.
	one.peers[2].met(again.incarnation + 1)
	if s := <-down; s != 2 {
		t.Fatalf("restarted: %s", s)
	}
}

// TestStaleStreamEnds: the end of a stream says nothing of a peer that has opened another since.
func TestStaleStreamEnds(t *testing.T) {
	tr, err := New(Config{Self: 1, Peers: map[raftid.StoreID][]string{2: {"http://127.0.0.1:1"}}})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	p := tr.peers[2]
	down := func() (down bool) {
		for range looksPerPing + 1 {
			down = down || p.look()
		}
		return down
	}
	old, young := p.joined(), p.joined()
	p.heard()
	p.lost(old)
	if down() {
		t.Error("down, because a stream ended that another one had followed")
	}
	p.heard()
	p.lost(young)
	if !down() {
		t.Error("alive for more than an interval after its stream broke")
	}
}

// A store that can be heard and not reached is down, like one that is silent: what raft says there is
// not heard any more, what others say is. Once it answers again it is alive.
func TestOneWay(t *testing.T) {
	var mu sync.Mutex
	got := map[Kind]int{} // at store 1, from store 2
	var way *transporttest.Proxy
	nodes := cluster(t, 2, func(i int, c *Config) {
		c.DownAfter = 400 * time.Millisecond
		if i == 0 { // what store 1 sends to store 2 goes through a proxy
			way = transporttest.NewProxy(t, strings.TrimPrefix(c.Peers[2][0], "http://"))
			c.Peers = map[raftid.StoreID][]string{1: c.Peers[1], 2: {"http://" + way.Addr()}}
		}
	}, func(i int, tr *Transport) {
		for _, k := range []Kind{KindRaft, KindRaftUrgent, KindOrder} {
			tr.Handle(k, func(raftid.StoreID, []byte) {
				mu.Lock()
				defer mu.Unlock()
				if i == 0 {
					got[k]++
				}
			})
		}
	})
	count := func(k Kind) int {
		mu.Lock()
		defer mu.Unlock()
		return got[k]
	}
	// say has store 2 send a frame of each kind, until one of the others that is not raft's arrives.
	say := func() (raft bool) {
		before, order := count(KindRaft)+count(KindRaftUrgent), count(KindOrder)
		eventually(t, "a frame", func() bool {
			return nodes[1].Send(1, KindRaftUrgent, []byte("x")) && nodes[1].Send(1, KindRaft, []byte("x")) && nodes[1].Send(1, KindOrder, []byte("x")) && count(KindOrder) > order
		})
		return count(KindRaft)+count(KindRaftUrgent) > before
	}
	reached := func() bool {
		p := nodes[0].peers[2]
		p.life.Lock()
		defer p.life.Unlock()
		return p.life.answered
	}
	eventually(t, "a connection", func() bool { return nodes[0].Alive(2) && nodes[1].Alive(1) && reached() })
	eventually(t, "raft is heard from a store that is alive", say)
	way.Block()
	eventually(t, "that the store is missed", func() bool { return !nodes[0].Alive(2) })
	if say() {
		t.Error("raft is heard from a store that cannot be reached")
	}
	if _, err := nodes[0].Call(t.Context(), 2, 1, nil); !errors.Is(err, ErrUnavailable) {
		t.Errorf("a call to a store that cannot be reached: %v", err)
	}
	way.Unblock()
	eventually(t, "that the store is back and raft is heard", say)
}

func TestRefusals(t *testing.T) {
	core, logs := observer.New(zap.ErrorLevel)
	for _, c := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.ClusterID = 78 }, "cluster ID mismatch: the caller belongs to cluster 4e, this node to 4d"},
		{func(c *Config) { c.Terms = "single-group mode" }, "store 2 was started in single-group mode, store 1 in multi-group mode: all stores"},
		{func(c *Config) { c.Fresh = func() bool { return true } }, "store 2 had a history"},
		{func(c *Config) { c.Self = 5 }, "store 5 is not a member"},
		{func(c *Config) { c.Peers = map[raftid.StoreID][]string{3: c.Peers[1]} }, "store ID mismatch: the caller looks for store 3 at this address, this is 1"},
	} {
		logs.TakeAll()
		nodes := cluster(t, 2, func(i int, cfg *Config) {
			cfg.Terms = "multi-group mode"
			cfg.Admit = func(from raftid.StoreID) error { return fmt.Errorf("store %s had a history", from) }
			if i == 1 {
				c.change(cfg)
				cfg.Logger = zap.New(core)
			}
		}, nil)
		eventually(t, c.want, func() bool {
			for _, e := range logs.All() {
				if strings.Contains(fmt.Sprint(e.ContextMap()), c.want) {
					return true
				}
			}
			return false
		})
		for _, n := range nodes {
			n.stop()
		}
	}
	if _, err := New(Config{Self: 1, Peers: map[raftid.StoreID][]string{2: {"https://x:1"}}}); err == nil {
		t.Fatal("https without TLS")
	}
	if _, err := New(Config{Self: 1, Peers: map[raftid.StoreID][]string{2: {"ftp://x:1"}}}); err == nil {
		t.Fatal("an unknown scheme")
	}
}

// TestSecure: TLS, with both sides' certificates, and a unix socket.
func TestSecure(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	cfg := &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		RootCAs:      pool, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
	}
	l1, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	sock := filepath.Join(t.TempDir(), "s")
	l2, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	peers := map[raftid.StoreID][]string{1: {"https://" + l1.Addr().String()}, 2: {"unix://" + sock}}
	a := start(t, Config{Self: 1, Peers: peers, TLS: cfg}, l1, func(*Transport) {}, grpc.Creds(credentials.NewTLS(cfg)))
	b := start(t, Config{Self: 2, Peers: peers, TLS: cfg}, l2, func(*Transport) {})
	eventually(t, "connections", func() bool { return a.Alive(2) && b.Alive(1) })
}

// callers is a listener that knows where connections come from.
type callers struct {
	net.Listener
	from chan net.Addr
}

func (l callers) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		select {
		case l.from <- c.RemoteAddr():
		default:
		}
	}
	return c, err
}

// TestLocalAddr: peers that compare a caller's address with its certificate see the address that
// was configured.
func TestLocalAddr(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := callers{l, make(chan net.Addr, 8)}
	sock, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	peers := map[raftid.StoreID][]string{1: {"unix://" + sock.Addr().String()}, 2: {"http://" + l.Addr().String()}}
	local := netip.MustParseAddr("127.0.0.9")
	a := start(t, Config{Self: 1, Peers: peers, LocalAddr: local}, sock, func(*Transport) {})
	b := start(t, Config{Self: 2, Peers: peers, LocalAddr: local}, c, func(*Transport) {}) // no hindrance on a socket of another kind
	eventually(t, "connections", func() bool { return a.Alive(2) && b.Alive(1) })
	if from, ok := (<-c.from).(*net.TCPAddr); !ok || from.AddrPort().Addr() != local {
		t.Fatalf("the peer was called from %v, want %s", from, local)
	}
}

// FuzzIncoming: bytes from the network do no harm.
func FuzzIncoming(f *testing.F) {
	f.Add([]byte{framesVersion, byte(KindRaft), 2, 1, 2, 0, 0})
	f.Add([]byte{callsVersion, itemCall, 1, 32, 0, 1, 7, itemCancel, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		n := 0
		if err := eachFrame(b, func(_ Kind, p []byte) { n += len(p) }); err == nil && n > len(b) {
			t.Fatal("more payload than bytes")
		}
		r := itemReader{b: b}
		for r.version(); r.more(); {
			r.byte()
			r.uvarint()
			r.bytes()
		}
		if _, err := decodeHello(b); err == nil && (len(b) < helloBytes || len(b) > helloBytes+termsBytesMax) {
			t.Fatal("a hello of another length")
		}
	})
}

func BenchmarkCall(b *testing.B) {
	t := &testing.T{}
	nodes := cluster(t, 2, nil, func(_ int, tr *Transport) {
		tr.HandleCall(32, func(_ context.Context, _ raftid.StoreID, p []byte, reply func([]byte, error)) { reply(p, nil) })
	})
	defer nodes[0].stop()
	defer nodes[1].stop()
	eventually(t, "an open stream", func() bool { _, err := nodes[0].Call(context.Background(), 2, 32, nil); return err == nil })
	payload := make([]byte, 256)
	b.SetParallelism(64)
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := nodes[0].Call(context.Background(), 2, 32, payload); err != nil {
				b.Error(err)
			}
		}
	})
}
