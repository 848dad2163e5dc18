package raftstore

import (
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"braid/raftstore/raftid"
	"braid/raftstore/transport"
	"braid/raftstore/wal"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// lockedToy is a toy that a test may look into while a store drives it.
type lockedToy struct {
	mu sync.Mutex
	toy
}

func (t *lockedToy) Update(h Handle, u Update) { t.mu.Lock(); defer t.mu.Unlock(); t.toy.Update(h, u) }
func (t *lockedToy) Work(h Handle) bool        { t.mu.Lock(); defer t.mu.Unlock(); return t.toy.Work(h) }
func (t *lockedToy) Idle() bool                { t.mu.Lock(); defer t.mu.Unlock(); return t.toy.Idle() }
func (t *lockedToy) Snapshot() (SnapshotSource, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.toy.Snapshot()
}
func (t *lockedToy) Receive(meta SnapshotMeta) (SnapshotSink, error) {
	return &lockedSink{toySink{t: &t.toy, meta: meta}, t}, nil
}

type lockedSink struct {
	toySink
	lt *lockedToy
}

func (s *lockedSink) Install() error {
	s.lt.mu.Lock()
	defer s.lt.mu.Unlock()
	return s.toySink.Install()
}

func (t *lockedToy) look(f func(*toy) bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return f(&t.toy)
}

// host is one node of a test cluster: log, transport, store.
type host struct {
	c     *hosts
	id    raftid.StoreID
	addr  string
	log   *wal.Log
	tr    *transport.Transport
	srv   *grpc.Server
	end   chan error
	store *Store
	toys  map[raftid.GroupID]*lockedToy
	fatal chan error
}

type hosts struct {
	t      testing.TB
	dir    string
	groups int
	nodes  []*host
	tick   time.Duration
}

func newHosts(t testing.TB, n, groups int, tick time.Duration) *hosts {
	c := &hosts{t: t, dir: t.TempDir(), groups: groups, tick: tick}
	for i := range n {
		// A socket's name stays ours while the node is down, as a port would not.
		h := &host{c: c, id: raftid.StoreID(i + 1), addr: filepath.Join(c.dir, fmt.Sprint("s", i+1)), toys: make(map[raftid.GroupID]*lockedToy)}
		c.nodes = append(c.nodes, h)
	}
	for _, h := range c.nodes {
		h.start()
	}
	t.Cleanup(func() {
		for _, h := range c.nodes {
			h.stop()
		}
	})
	return c
}

func (c *hosts) conf() *raftpb.ConfState {
	cs := new(raftpb.ConfState)
	for _, h := range c.nodes {
		cs.Voters = append(cs.Voters, uint64(h.id))
	}
	return cs
}

// start starts a node from what it left on disk and from its machines' durable state.
func (h *host) start() {
	t := h.c.t
	var err error
	if h.log, err = wal.Open(filepath.Join(h.c.dir, fmt.Sprint(h.id)), wal.Options{SegmentBytes: 4 << 20}); err != nil {
		t.Fatal(err)
	}
	h.log.SetPriority(raftid.PDGroup)
	peers := make(map[raftid.StoreID][]string)
	for _, x := range h.c.nodes {
		peers[x.id] = []string{"unix://" + x.addr}
	}
	// Who is down is mostly known by its streams; a busy machine's silence does not count.
	if h.tr, err = transport.New(transport.Config{Self: h.id, ClusterID: 5, Peers: peers, PingInterval: 250 * time.Millisecond, DownAfter: 5 * time.Second, BackoffMax: 100 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	h.fatal = make(chan error, 1)
	h.store = NewStore(StoreConfig{Transport: h.tr, TickInterval: h.c.tick, OnFatal: func(err error) { h.fatal <- err }})
	for g := raftid.PDGroup; g < raftid.PDGroup+raftid.GroupID(h.c.groups); g++ {
		h.add(g)
	}
	l, err := net.Listen("unix", h.addr)
	if err != nil {
		t.Fatal(err)
	}
	h.srv, h.end = grpc.NewServer(transport.ServerOptions()...), make(chan error, 1)
	h.tr.Register(h.srv)
	h.tr.Start()
	go func(s *grpc.Server, end chan error) { end <- s.Serve(l) }(h.srv, h.end)
}

func (h *host) add(g raftid.GroupID) {
	toy := &lockedToy{}
	if old := h.toys[g]; old != nil {
		toy.durable, toy.durableState = old.durable, old.durableState
	} else {
		toy.durable = wal.Position{Index: 5, Term: 1}
	}
	toy.applied, toy.state = toy.durable, slices.Clone(toy.durableState)
	h.toys[g] = toy
	err := h.store.AddGroup(GroupConfig{
		ID: g, Replica: raftid.ReplicaID(h.id), ConfState: h.c.conf(), Applied: toy.durable.Index, AppliedTerm: toy.durable.Term,
		Peers:       func(r raftid.ReplicaID) (raftid.StoreID, bool) { return raftid.StoreID(r), true },
		KeepEntries: -1, KeepForFollowers: -1,
		Log: h.log.Group(g), Machine: toy,
	})
	if err != nil {
		h.c.t.Fatal(err)
	}
}

func (h *host) stop() {
	if h.store == nil {
		return
	}
	h.tr.Close()
	h.srv.Stop()
	<-h.end
	h.store.Close()
	if err := h.log.Close(); err != nil {
		h.c.t.Error(err)
	}
	select {
	case err := <-h.fatal:
		h.c.t.Error(err)
	default:
	}
	h.store = nil
}

func eventually(t testing.TB, what string, ok func() bool) {
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

// leader waits for a leader of the group among the nodes that run.
func (c *hosts) leader(g raftid.GroupID) *host {
	c.t.Helper()
	var l *host
	eventually(c.t, fmt.Sprintf("a leader of group %d", g), func() bool {
		l = nil
		var term uint64
		for _, h := range c.nodes {
			if h.store == nil {
				continue
			}
			if s, _ := h.store.Status(g); s.Leading && s.Committed >= s.Open && s.Term > term {
				l, term = h, s.Term
			}
		}
		return l != nil
	})
	return l
}

// propose proposes through whoever leads until the command is applied there.
func (c *hosts) propose(g raftid.GroupID, cmd string) {
	c.t.Helper()
	eventually(c.t, "the command "+cmd, func() bool {
		l := c.leader(g)
		if l.toys[g].look(func(t *toy) bool { return slices.Contains(t.state, cmd) }) {
			return true
		}
		if l.toys[g].look(func(t *toy) bool { return len(t.queue) == 0 && t.role.Leading && t.applied.Index == l.last(g) }) {
			l.toys[g].look(func(t *toy) bool { t.queue = append(t.queue, cmd); return true })
			l.store.Wake(g)
		}
		return false
	})
}

func (h *host) last(g raftid.GroupID) uint64 {
	s, _ := h.store.Status(g)
	return s.Last
}

// same waits until all running nodes have the same commands, once each.
func (c *hosts) same(g raftid.GroupID, want ...string) {
	c.t.Helper()
	var got []string
	for _, h := range c.nodes {
		if h.store == nil {
			continue
		}
		eventually(c.t, fmt.Sprintf("group %d at %s has %v, not %v", g, h.id, got, want), func() bool {
			h.toys[g].look(func(t *toy) bool { got = slices.Clone(t.state); return true })
			return slices.Equal(got, want)
		})
	}
}

func TestStoresOverNetwork(t *testing.T) {
	const groups = 4
	c := newHosts(t, 3, groups, 10*time.Millisecond)
	for g := raftid.PDGroup; g <= groups; g++ {
		c.propose(g, "a")
		c.same(g, "a")
	}
	// The leader dies; the others elect and go on; it comes back from its log.
	l := c.leader(2)
	l.stop()
	c.propose(2, "b")
	l.start()
	c.same(2, "a", "b")
	// A replica that lags behind the others' logs gets a snapshot.
	var lagging *host
	for _, h := range c.nodes {
		if h != c.leader(2) {
			lagging = h
		}
	}
	lagging.stop()
	c.propose(2, "c")
	c.propose(2, "d")
	for _, h := range c.nodes {
		if h == lagging {
			continue
		}
		eventually(t, "a truncated log", func() bool {
			h.toys[2].look(func(t *toy) bool { t.truncate = t.applied.Index; return true })
			h.store.Wake(2)
			s, _ := h.store.Status(2)
			return h.toys[2].look(func(t *toy) bool { return len(t.state) == 4 }) && s.First > s.Committed
		})
	}
	lagging.start()
	c.same(2, "a", "b", "c", "d")
	// The sink replaces the state before the group tells the machine so.
	eventually(t, "a snapshot at the lagging replica", func() bool {
		return lagging.toys[2].look(func(t *toy) bool { return t.installed > 0 })
	})
	c.propose(2, "e")
	c.same(2, "a", "b", "c", "d", "e")
	// Leadership moves on request.
	to := lagging
	if c.leader(2) == lagging {
		to = c.nodes[lagging.id%3]
	}
	eventually(t, "the transfer", func() bool {
		l := c.leader(2)
		if err := l.store.Transfer(2, raftid.ReplicaID(to.id)); err != nil {
			t.Fatal(err)
		}
		return l == to
	})
	// A removed group is gone, the others stay.
	if err := c.nodes[0].store.Remove(3); err != nil {
		t.Fatal(err)
	}
	if _, ok := c.nodes[0].store.Status(3); ok {
		t.Fatal("a removed group has a status")
	}
	c.propose(4, "z")
	c.same(4, "a", "z")
}

// TestIdleGroupsSleep: a thousand idle groups send nothing; a write wakes its group alone; a
// store that dies wakes its peers, which elect.
func TestIdleGroupsSleep(t *testing.T) {
	groups := 1000
	if testing.Short() || raceEnabled {
		groups = 50
	}
	c := newHosts(t, 3, groups, 50*time.Millisecond)
	awake := func() (n int) {
		for _, h := range c.nodes {
			if h.store != nil {
				n += h.store.Stats().Awake
			}
		}
		return n
	}
	sent := func() (n uint64) {
		for _, h := range c.nodes {
			n += h.store.Stats().Messages
		}
		return n
	}
	for g := raftid.PDGroup; g < raftid.PDGroup+raftid.GroupID(groups); g++ {
		c.leader(g)
	}
	eventually(t, "sleep", func() bool { return awake() == 0 })
	// The last answers may be on their way when all sleep.
	eventually(t, "a time without messages that is longer than any election timeout", func() bool {
		before, turns := sent(), c.nodes[0].store.Stats().Turns
		<-time.After(25 * c.tick)
		return sent() == before && c.nodes[0].store.Stats().Turns == turns
	})
	c.propose(7, "x")
	c.same(7, "x")
	if n := awake(); n > 3 {
		t.Fatalf("one write woke %d replicas", n)
	}
	eventually(t, "sleep again", func() bool { return awake() == 0 })
	dead := c.leader(7)
	led := 0
	for _, s := range dead.store.Statuses() {
		if s.Leading {
			led++
		}
	}
	dead.stop()
	for g := raftid.PDGroup; g < raftid.PDGroup+raftid.GroupID(groups); g++ {
		c.leader(g)
	}
	c.propose(7, "y")
	c.same(7, "x", "y")
	t.Logf("%d groups elected a new leader", led)
	dead.start()
	c.same(7, "x", "y")
	eventually(t, "sleep after the restart", func() bool { return awake() == 0 })
}

// TestFatal: a machine that finds itself damaged stops the node, not silently its group.
func TestFatal(t *testing.T) {
	fatal := make(chan error, 1)
	s := NewStore(StoreConfig{TickInterval: time.Millisecond, OnFatal: func(err error) { fatal <- err }})
	disk := NewMemDisk()
	toy := &lockedToy{}
	toy.onRole = func(r Role) {
		if r.Leading {
			panic("toy: damaged")
		}
	}
	log := &flushingLog{MemLog: disk.Log(2)}
	if err := s.AddGroup(GroupConfig{ID: 2, Replica: 1, ConfState: &raftpb.ConfState{Voters: []uint64{1}}, Log: log, Machine: toy}); err != nil {
		t.Fatal(err)
	}
	if err := <-fatal; !strings.Contains(err.Error(), "toy: damaged") {
		t.Fatal(err)
	}
	s.Close()
}

// TestAddGroupBesideTheLog: what a new group appends is durable, and a worker runs the group, before AddGroup
// is done with it. The race detector is the judge.
func TestAddGroupBesideTheLog(t *testing.T) {
	s := NewStore(StoreConfig{TickInterval: time.Millisecond, OnFatal: func(err error) { t.Error(err) }})
	defer s.Close()
	for g := raftid.GroupID(2); g < 50; g++ {
		var waited atomic.Bool
		if err := s.AddGroup(GroupConfig{
			ID: g, Replica: 1, ConfState: &raftpb.ConfState{Voters: []uint64{1}, Learners: []uint64{2}}, Applied: 5, AppliedTerm: 1, Log: laterLog{NewMemDisk().Log(g)}, Machine: &lockedToy{toy: toy{applied: wal.Position{Index: 5, Term: 1}}},
			Peers: func(raftid.ReplicaID) (raftid.StoreID, bool) {
				if !waited.Swap(true) {
					// AddGroup asks, and the worker has its turn. That the worker waits for the mailbox cannot be
					// observed, and without the lock it need not come either: so there is no condition to wait for.
					time.Sleep(5 * time.Millisecond)
				}
				return 1, true
			},
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// laterLog is durable a moment later, by another goroutine's doing.
type laterLog struct{ *MemLog }

func (l laterLog) Append(rec *wal.Record) {
	done := rec.Done
	rec.Done = func() { time.AfterFunc(time.Millisecond, done) }
	l.MemLog.Append(rec)
	l.disk.Flush(-1)
}

// flushingLog is durable at once.
type flushingLog struct{ *MemLog }

func (l *flushingLog) Append(rec *wal.Record) {
	l.MemLog.Append(rec)
	l.disk.Flush(-1)
}

// BenchmarkStore: closed-loop proposals of 256 bytes on one store with one voter in each group,
// and on three; the log is real.
func BenchmarkStore(b *testing.B) {
	for _, n := range []int{1, 3} {
		for _, groups := range []int{1, 64} {
			b.Run(fmt.Sprintf("stores=%d/groups=%d", n, groups), func(b *testing.B) {
				c := newHosts(b, n, groups, 100*time.Millisecond)
				const clients = 256
				done := make(chan struct{}, clients)
				payload := strings.Repeat("x", 256)
				leaders := make([]*host, groups)
				for i := range groups {
					g := raftid.PDGroup + raftid.GroupID(i)
					leaders[i] = c.leader(g)
					leaders[i].toys[g].look(func(t *toy) bool {
						t.onApply = func(_, _ uint64, data string) {
							t.state = nil
							if data != "" {
								done <- struct{}{}
							}
						}
						return true
					})
				}
				b.ResetTimer()
				next := 0
				issue := func() {
					i := next % groups
					next++
					g := raftid.PDGroup + raftid.GroupID(i)
					leaders[i].toys[g].look(func(t *toy) bool { t.queue = append(t.queue, payload); return true })
					leaders[i].store.Wake(g)
				}
				for range min(clients, b.N) {
					issue()
				}
				for i := range b.N {
					<-done
					if i+clients < b.N {
						issue()
					}
				}
				b.StopTimer()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "prop/s")
				for _, h := range c.nodes {
					h.stop()
				}
			})
		}
	}
}
