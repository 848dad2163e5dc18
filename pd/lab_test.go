package pd

import (
	"context"
	"fmt"
	"math/rand"
	"testing"
	"time"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"braid/mvcc"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/raftstore/raftid"
	"braid/raftstore/wal"
)

// lab runs members of pd and the clients of all stores in one goroutine. Raft is replaced by a
// script of what it promises: one log, committed by whoever leads the newest term; a leader that
// was deposed keeps believing in itself until it hears otherwise.
type lab struct {
	t         *testing.T
	rnd       *rand.Rand
	mutants   Mutants
	committed []*raftpb.Entry
	term      uint64
	leader    *labNode // of the newest term
	nodes     []*labNode
	regions   []*labRegion
	net       []func()
	now       time.Duration
	calm      bool
	sessions  uint64

	acked  pdpb.Cut // highest cut whose items a leader's store has seen: what users could know
	items  map[[2]uint64]pdpb.Item
	newest map[pdpb.Cut]map[pdpb.RegionID]uint64 // newest item of each region as of a cut
	err    error
	stats  struct{ restarts, snapshots, elections, cuts, reads, marks int }
}

// labNode is a store: a member of pd, a client, and a replica of every region.
type labNode struct {
	lab     *lab
	id      raftid.StoreID
	replica *Replica
	client  *order.Client
	known   uint64 // of the committed log
	role    raftstore.Role
	tail    []*raftpb.Entry // proposed, not committed
	base    uint64          // index before tail
	reads   []raft.ReadState
	pending [][]byte // questions before the opening entry is committed
	work    bool
	copies  []*labReplica
	cp      *wal.Checkpoint
	boot    *Bootstrap
	members []raftid.StoreID
}

// labRegion is a region's committed log, shared by its replicas.
type labRegion struct {
	id     pdpb.RegionID
	cums   []uint64 // cumulative count through index i+1
	leader int
	sealed uint64 // in the committed log
}

// labReplica has applied the items through have.
type labReplica struct {
	node   *labNode
	region *labRegion
	got    map[uint64]pdpb.Item
	have   uint64
	upto   uint64
}

// newLab makes a cluster of stores, the first members of which have a member of pd.
func newLab(t *testing.T, seed int64, members, stores, regions int, mut Mutants) *lab {
	l := &lab{
		t: t, rnd: rand.New(rand.NewSource(seed)), mutants: mut,
		items: map[[2]uint64]pdpb.Item{}, newest: map[pdpb.Cut]map[pdpb.RegionID]uint64{},
	}
	b := &Bootstrap{ClusterID: 7}
	var ids []raftid.StoreID
	for i := range stores {
		id := raftid.StoreID(i + 1)
		if i < members {
			ids = append(ids, id)
		}
		b.Stores = append(b.Stores, pdpb.Store{ID: id, Name: fmt.Sprintf("n%d", i+1)})
	}
	for i := range regions {
		d := pdpb.Descriptor{ID: pdpb.RegionID(i + 2), Epoch: 1}
		if i > 0 {
			d.Span.Start = []byte{byte(i)}
		}
		if i < regions-1 {
			d.Span.End = []byte{byte(i + 1)}
		}
		for j := range stores {
			d.Peers = append(d.Peers, pdpb.Peer{Replica: raftid.ReplicaID(j + 1), Store: raftid.StoreID(j + 1)})
		}
		b.Regions = append(b.Regions, d)
		l.regions = append(l.regions, &labRegion{id: d.ID})
	}
	for i := range stores {
		n := &labNode{lab: l, id: raftid.StoreID(i + 1)}
		l.nodes = append(l.nodes, n)
		n.start(b, ids)
		for _, g := range l.regions {
			c := &labReplica{node: n, region: g, got: map[uint64]pdpb.Item{}}
			n.copies = append(n.copies, c)
			n.client.Register(g.id, c)
		}
	}
	return l
}

func (n *labNode) start(b *Bootstrap, members []raftid.StoreID) {
	l := n.lab
	n.boot, n.members = b, members
	l.sessions += 1e6
	n.client = order.NewClient(order.ClientConfig{
		ClientOptions: order.ClientOptions{Self: n.id, Members: members, Session: l.sessions, Mutants: l.mutants.Mutants},
		Net:           n,
	})
	if int(n.id) > len(members) {
		return
	}
	r, err := NewReplica(Config{
		Store: n.id, Life: l.sessions, Wake: func() { n.work = true }, Bootstrap: b, Local: n.client, Sender: n, Net: n,
		StoreOf: func(r raftid.ReplicaID) (raftid.StoreID, bool) { return raftid.StoreID(r), true },
		Limits:  Limits{CheckpointEvery: 50},
		OnApply: n.onApply, Mutants: &l.mutants,
	}, n.cp)
	if err != nil {
		l.t.Fatal(err)
	}
	n.replica = r
	n.client.SetMember(r)
}

func (l *lab) fail(format string, args ...any) {
	if l.err == nil {
		l.err = fmt.Errorf(format, args...)
	}
}

func (n *labNode) onApply(index, _ uint64, _ *Entry, res Result) {
	l := n.lab
	if res.Cut == nil {
		return
	}
	for _, it := range res.Cut.Items {
		key := [2]uint64{uint64(it.Region), it.N}
		if old, ok := l.items[key]; ok && !old.Equal(&it) {
			l.fail("I3: members differ: %v and %v", &old, &it)
		}
		l.items[key] = it
	}
	if l.newest[res.Cut.Mark.Cut] == nil {
		l.stats.cuts++
		m := map[pdpb.RegionID]uint64{}
		for _, g := range l.regions {
			p, _ := n.replica.Machine().Core().Position(g.id)
			m[g.id] = p.Newest
		}
		l.newest[res.Cut.Mark.Cut] = m
	}
	for _, x := range res.Cut.Rejected {
		if x.Verdict == order.Conflict {
			l.fail("entry %d: region %d rejected: %v", index, x.Region, x.Verdict)
		}
	}
}

// SendFrame implements Sender: frames are delayed and, unless calm, lost.
func (n *labNode) SendFrame(to raftid.StoreID, frame []byte) bool {
	l := n.lab
	if !l.calm && l.rnd.Intn(10) == 0 {
		return l.rnd.Intn(2) == 0
	}
	dst := l.nodes[to-1]
	l.net = append(l.net, func() {
		if err := dst.client.HandleFrameBytes(n.id, frame); err != nil {
			l.fail("frame: %v", err)
		}
	})
	return true
}

// Call implements order.Net.
func (n *labNode) Call(to raftid.StoreID, m order.Method, payload []byte, done func([]byte, error)) {
	l := n.lab
	if !l.calm && l.rnd.Intn(10) == 0 {
		if l.rnd.Intn(2) == 0 {
			l.net = append(l.net, func() { done(nil, order.ErrTimeout) })
		}
		return
	}
	l.net = append(l.net, func() {
		l.nodes[to-1].replica.Serve(m, n.id, payload, func(b []byte, err error) {
			l.net = append(l.net, func() { done(b, err) })
		})
	})
}

// elect makes a node leader of a new term. Some of what the old leader proposed survives.
func (l *lab) elect(n *labNode) {
	var kept []*raftpb.Entry
	if old := l.leader; old != nil {
		l.commit()
		kept = append(kept, old.tail[:l.rnd.Intn(len(old.tail)+1)]...)
	}
	l.term++
	l.stats.elections++
	n.tail, n.base = kept, uint64(len(l.committed))
	l.leader = n
	n.pending, n.reads = nil, nil
	open := n.append(nil)
	n.update(raftstore.Update{Role: &raftstore.Role{Term: l.term, Leader: raftid.ReplicaID(n.id), Leading: true, Open: open}})
}

func (n *labNode) append(data []byte) uint64 {
	index := n.base + uint64(len(n.tail)) + 1
	term := n.role.Term
	if n == n.lab.leader {
		term = n.lab.term
	}
	n.tail = append(n.tail, &raftpb.Entry{Index: new(index), Term: new(term), Data: data})
	return index
}

// hear tells a node about the newest term.
func (n *labNode) hear() {
	l := n.lab
	if n.replica == nil || l.leader == nil || n == l.leader || n.role.Term == l.term {
		return
	}
	n.tail, n.pending, n.reads = nil, nil, nil
	n.update(raftstore.Update{Role: &raftstore.Role{Term: l.term, Leader: raftid.ReplicaID(l.leader.id)}})
}

func (n *labNode) update(u raftstore.Update) {
	if u.Role != nil {
		n.role = *u.Role
	}
	u.Committed = n.known
	n.replica.Update(n, u)
	n.work = true
}

// commit commits some of what the leader proposed.
func (l *lab) commit() {
	n := l.leader
	if n == nil {
		return
	}
	k := l.rnd.Intn(len(n.tail) + 1)
	if l.calm {
		k = len(n.tail)
	}
	l.committed = append(l.committed, n.tail[:k]...)
	n.tail = n.tail[k:]
	n.base = uint64(len(l.committed))
	n.known = n.base
	for _, ctx := range n.pending {
		if n.known >= n.role.Open {
			n.reads = append(n.reads, raft.ReadState{Index: n.known, RequestCtx: ctx})
		}
	}
	if n.known >= n.role.Open {
		n.pending = nil
	}
	n.work = true
}

// restart crashes a node; it comes back from its last checkpoint.
func (n *labNode) restart() {
	l := n.lab
	l.stats.restarts++
	if l.leader == n {
		l.commit()
		l.leader = nil // what is in its tail was not durable
	}
	n.role, n.tail, n.pending, n.reads, n.known = raftstore.Role{}, nil, nil, nil, 0
	if n.cp != nil {
		n.known = n.cp.Index
	}
	n.start(n.boot, n.members)
	for _, c := range n.copies {
		clear(c.got)
		n.client.Register(c.region.id, c)
	}
}

// snapshot gives a node that lags the state of another one.
func (n *labNode) snapshot(from *labNode) {
	l := n.lab
	if n.replica == nil || from.replica == nil {
		return
	}
	index, term := from.replica.Applied()
	if n == l.leader || n.role.Leading || index <= n.known {
		return
	}
	src, err := from.replica.Snapshot()
	if err != nil || src.Meta().Index != index || src.Meta().Term != term {
		l.fail("snapshot: %v, meta %v", err, src.Meta())
		return
	}
	sink, err := n.replica.Receive(src.Meta())
	if err == nil {
		err = src.WriteTo(context.Background(), sink)
	}
	if err == nil {
		err = sink.Install()
	}
	if err != nil {
		l.fail("snapshot: %v", err)
		return
	}
	l.stats.snapshots++
	n.cp = &wal.Checkpoint{Position: wal.Position{Index: index, Term: term}, Data: sink.(raftstore.CheckpointSink).Checkpoint()}
	n.known = index
	meta := src.Meta()
	n.update(raftstore.Update{Installed: &meta})
}

// step lets a node learn commits and work.
func (n *labNode) step() {
	l := n.lab
	if n.replica == nil {
		return
	}
	if n != l.leader && (n.role.Term == l.term || l.calm) {
		n.hear()
		k := uint64(l.rnd.Intn(len(l.committed) - int(n.known) + 1))
		if l.calm {
			k = uint64(len(l.committed)) - n.known
		}
		n.known += k
		n.work = n.work || k > 0
	}
	for i := 0; n.work && i < 100; i++ {
		n.work = false
		if len(n.reads) > 0 {
			rs := n.reads
			n.reads = nil
			n.update(raftstore.Update{ReadStates: rs})
		}
		if n.replica.Work(n) {
			n.work = true
		}
	}
}

// The Handle of a node.
func (n *labNode) Term() uint64                 { return n.role.Term }
func (n *labNode) Leader() raftid.ReplicaID     { return n.role.Leader }
func (n *labNode) Leading() (uint64, bool)      { return n.role.Open, n.role.Leading }
func (n *labNode) FirstIndex() uint64           { return 1 }
func (n *labNode) LastIndex() uint64            { return n.base + uint64(len(n.tail)) }
func (n *labNode) Committed() uint64            { return n.known }
func (n *labNode) TermAt(uint64) (uint64, bool) { return 0, false }
func (n *labNode) Transfer(raftid.ReplicaID)    {}
func (n *labNode) Campaign()                    {}
func (n *labNode) Detach(f func())              { f(); n.work = true }
func (n *labNode) Truncate(uint64)              {}
func (n *labNode) ConfState() *raftpb.ConfState { return nil }

func (n *labNode) Entries(lo, hi, _ uint64) ([]*raftpb.Entry, error) {
	return n.lab.committed[lo-1 : hi-1], nil
}

func (n *labNode) Propose(data []byte) (index, term uint64, err error) {
	if !n.role.Leading || n.lab.rnd.Intn(20) == 0 {
		return 0, 0, raftstore.ErrDropped
	}
	return n.append(data), n.role.Term, nil
}

func (n *labNode) ReadIndex(ctx []byte) {
	switch {
	case n != n.lab.leader: // no quorum answers a deposed leader
	case n.known < n.role.Open:
		n.pending = append(n.pending, ctx)
	default:
		n.reads = append(n.reads, raft.ReadState{Index: n.known, RequestCtx: ctx})
		n.work = true
	}
}

func (n *labNode) Checkpoint(index, term uint64, data []byte) {
	n.cp = &wal.Checkpoint{Position: wal.Position{Index: index, Term: term}, Data: data}
	m, err := LoadMachine(data, n.lab.mutants.Mutants)
	if err != nil {
		n.lab.fail("checkpoint: %v", err)
		return
	}
	if m.String() != n.replica.Machine().String() {
		n.lab.fail("checkpoint differs:\n%v%v", m, n.replica.Machine())
	}
}

// The replicas of regions.
func (c *labReplica) Leading() bool  { return c.region.leader == int(c.node.id)-1 }
func (c *labReplica) Wanted() uint64 { return c.have + 1 }

func (c *labReplica) BuildReport() (pdpb.Report, bool) {
	g := c.region
	r := pdpb.Report{Region: g.id, From: c.upto, Upto: uint64(len(g.cums)), UptoTerm: 1, Sealed: g.sealed}
	if r.Upto == 0 {
		r.UptoTerm = 0
	}
	if r.Upto > 0 {
		r.Cum = g.cums[r.Upto-1]
	}
	if r.Upto > r.From {
		r.Runs = []pdpb.Run{{Index: r.Upto, Cum: r.Cum}}
	}
	return r, true
}

func (c *labReplica) Deliver(items []pdpb.Item) {
	for _, it := range items {
		c.got[it.N] = it
	}
	c.apply()
}

func (c *labReplica) apply() {
	for {
		it, ok := c.got[c.have+1]
		if !ok && c.have < c.region.sealed { // its log has it
			it, ok = c.node.lab.items[[2]uint64{uint64(c.region.id), c.have + 1}], true
		}
		if !ok {
			return
		}
		c.have, c.upto = it.N, it.Upto
		if c.Leading() {
			c.node.lab.acked = max(c.node.lab.acked, it.Cut)
		}
		delete(c.got, it.N)
	}
}

// write commits entries in a region.
func (g *labRegion) write(consumes uint64) {
	var cum uint64
	if n := len(g.cums); n > 0 {
		cum = g.cums[n-1]
	}
	g.cums = append(g.cums, cum+consumes)
}

// checkStates looks at every region everywhere: a replica that holds what its state calls the
// newest item is complete through the mark (S2), so it must not lack anything of that cut.
func (l *lab) checkStates() {
	for _, n := range l.nodes {
		for _, c := range n.copies {
			mark, newest, ok := n.client.State(c.region.id)
			if !ok || mark.Cut == 0 {
				continue
			}
			if want := l.newest[mark.Cut][c.region.id]; newest < want {
				l.fail("S2: store %v calls region %d complete through cut %d with item %d, but it has %d", n.id, c.region.id, mark.Cut, newest, want)
			}
		}
	}
}

func (l *lab) read(n *labNode) {
	acked := l.acked
	n.client.ReadPointFunc(func(p pdpb.ReadPoint, err error) {
		if err == nil {
			l.stats.reads++
			g := l.regions[l.rnd.Intn(len(l.regions))]
			n.client.WaitMarkFunc(g.id, p.Cut, func(err error) {
				mark, newest, ok := n.client.State(g.id)
				if err == nil && (!ok || mark.Cut < p.Cut || newest < l.newest[p.Cut][g.id]) {
					l.fail("S4: waited for cut %d of region %d, got %v newest %d %v", p.Cut, g.id, mark, newest, ok)
				}
				l.stats.marks++
			})
		}
		if err == nil && p.Cut < acked {
			l.fail("S1: read point %v, but cut %d was acknowledged before it was asked for", p, acked)
		}
	})
}

func (l *lab) deliver(k int) {
	for range k {
		if len(l.net) == 0 {
			return
		}
		i := 0
		if !l.calm {
			i = l.rnd.Intn(min(len(l.net), 3)) // mild reordering
		}
		f := l.net[i]
		l.net = append(l.net[:i:i], l.net[i+1:]...)
		f()
	}
}

func (l *lab) tick(d time.Duration) {
	l.now += d
	for _, n := range l.nodes {
		n.client.Tick(l.now)
		if n.replica != nil && l.now%(200*time.Millisecond) == 0 {
			n.replica.Tick()
		}
	}
}

// run plays a random schedule and then heals everything.
func (l *lab) run(steps int) (err error) {
	defer func() {
		if r := recover(); r != nil && l.err == nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	for i := 0; i < steps && l.err == nil; i++ {
		n := l.nodes[l.rnd.Intn(len(l.nodes))]
		g := l.rnd.Intn(len(l.regions))
		switch k := l.rnd.Intn(100); {
		case l.leader == nil || k < 2:
			l.elect(l.nodes[l.rnd.Intn(len(n.members))])
		case k < 5:
			l.regions[g].leader = l.rnd.Intn(len(l.nodes))
		case k < 15:
			l.regions[g].write(uint64(l.rnd.Intn(3)))
			for _, m := range l.nodes {
				m.client.Report(l.regions[g].id)
			}
		case k < 20: // the leader seals what it has
			r := l.regions[g]
			r.sealed = max(r.sealed, l.nodes[r.leader].copies[g].have)
			for _, m := range l.nodes {
				m.copies[g].apply()
				m.client.Report(r.id)
			}
		case k < 28:
			l.read(n)
		case k < 30:
			n.client.ProposeFunc(order.Event{Kind: order.EventAllocIDs, N: 1}, func(order.EventResult, error) {})
		case k < 35:
			n.hear()
		case k < 45:
			l.commit()
		case k < 75:
			n.step()
		case k < 97:
			l.deliver(1 + l.rnd.Intn(4))
		case k < 98 && l.rnd.Intn(3) == 0:
			n.restart()
		case k < 98 && l.rnd.Intn(2) == 0:
			n.snapshot(l.nodes[l.rnd.Intn(len(l.nodes))])
		case k < 98: // a replica leaves and comes back
			c := n.copies[g]
			n.client.Unregister(c.region.id)
			n.client.Register(c.region.id, c)
		default:
			l.tick(50 * time.Millisecond)
		}
		l.checkStates()
	}
	if l.err == nil {
		l.heal()
	}
	return l.err
}

// heal lets everything through; then every replica has every item and pd retains nothing.
func (l *lab) heal() {
	l.calm = true
	if l.leader == nil {
		l.elect(l.nodes[0])
	}
	for i := range 400 {
		if i == 100 || i == 200 { // seal what there is
			for k, r := range l.regions {
				r.sealed = l.nodes[r.leader].copies[k].have
			}
		}
		for _, n := range l.nodes {
			n.hear()
			for _, c := range n.copies {
				c.apply()
				if i%100 == 0 {
					n.client.Report(c.region.id)
				}
			}
		}
		for range 4 {
			l.commit()
			for _, n := range l.nodes {
				n.step()
			}
			l.deliver(len(l.net))
		}
		l.tick(50 * time.Millisecond)
		l.checkStates()
	}
	for _, n := range l.nodes {
		member := n
		if n.replica == nil {
			member = l.leader
		}
		core := member.replica.Machine().Core()
		for _, c := range n.copies {
			p, _ := core.Position(c.region.id)
			mark, newest, ok := n.client.State(c.region.id)
			if p.Upto != uint64(len(c.region.cums)) || c.have != p.Newest || !ok || newest != p.Newest || mark != core.Mark() {
				l.fail("store %v region %d after healing: ordered %+v of %d, applied item %d, state %v newest %d %v, pd at %v, leader %v",
					n.id, c.region.id, p, len(c.region.cums), c.have, mark, newest, ok, core.Mark(), l.leader.id)
				return
			}
		}
		if core.Held() > 0 {
			l.fail("store %v: pd retains %d items after healing\n%v", n.id, core.Held(), core)
		}
		var want mvcc.Revision = order.FirstRevision
		for _, g := range l.regions {
			if k := len(g.cums); k > 0 {
				want += mvcc.Revision(g.cums[k-1])
			}
		}
		if got := core.Mark().Rev; got != want {
			l.fail("I1: revision %d, the regions count %d", got, want)
		}
		if n.client.Directory() == nil || len(n.client.Regions()) != len(l.regions) {
			l.fail("store %v has no directory", n.id)
		}
	}
}

func TestLab(t *testing.T) {
	seeds := int64(150)
	if testing.Short() {
		seeds = 30
	}
	for seed := range seeds {
		members := 1 + int(seed%3)
		l := newLab(t, seed, members, members+int(seed/3%2), 1+int(seed%4), Mutants{})
		if err := l.run(1500); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if testing.Verbose() {
			t.Logf("seed %d: %+v", seed, l.stats)
		}
	}
}

// TestLabCatches drops rules one at a time: the lab must notice.
func TestLabCatches(t *testing.T) {
	for name, mut := range map[string]Mutants{
		"delta":           {Mutants: order.Mutants{Delta: true}},
		"per-store marks": {Mutants: order.Mutants{PerStoreMark: true}},
		"forget all":      {Mutants: order.Mutants{ForgetAll: true}},
		"early read":      {Mutants: order.Mutants{EarlyRead: true}},
		"no quorum":       {ReadPointWithoutQuorum: true},
	} {
		caught := false
		for seed := int64(0); seed < 40 && !caught; seed++ {
			caught = newLab(t, seed, 3, 3, 3, mut).run(1500) != nil
		}
		if !caught {
			t.Errorf("%s: not noticed", name)
		}
	}
}
