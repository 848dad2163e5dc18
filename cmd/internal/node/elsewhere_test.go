package node

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"braid/cmd/internal/config"
	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// fiveNodes is a cluster where no node has a replica of every region.
func fiveNodes(t *testing.T, change ...func(*config.Config)) *testCluster {
	t.Helper()
	c := newCluster(t, 5, append(change, splitAt("b", "d", "h", "k", "p", "t"))...)
	c.start(c.nodes...)
	for _, n := range c.nodes {
		if here, elsewhere := n.n.regions.local(n.n.oracle.Regions()); len(here) == 0 || len(elsewhere) == 0 {
			t.Fatalf("%s has %d regions, and %d are elsewhere", n.cfg.Name, len(here), len(elsewhere))
		}
	}
	return c
}

// source is the node that another one asks for the events of the region of a key, nil when it has a
// replica itself.
func (n *testNode) source(key string) *testNode {
	e := n.n.elsewhere
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range *e.list.Load() {
		if s.span.Contains([]byte(key)) {
			at := slices.IndexFunc(n.nodes, func(o *testNode) bool { return raftid.StoreID(o.cfg.MemberID()) == s.peers[s.at] })
			return n.nodes[at]
		}
	}
	return nil
}

// seen is a watch's events, each once, in order.
type seen struct {
	name string
	ch   clientv3.WatchChan
	next int64
}

func (s *seen) expect(t *testing.T, upto int64) {
	t.Helper()
	for s.next < upto {
		r, ok := <-s.ch
		if !ok || r.Err() != nil {
			t.Fatalf("%s ended at %d: %v", s.name, s.next, r.Err())
		}
		for _, e := range r.Events {
			if e.Kv.ModRevision != s.next {
				t.Fatalf("%s: event %d, want %d", s.name, e.Kv.ModRevision, s.next)
			}
			if e.Kv.Version > 1 && e.PrevKv == nil || e.PrevKv != nil && string(e.PrevKv.Key) != string(e.Kv.Key) {
				t.Fatalf("%s: event %d of version %d with %v before", s.name, s.next, e.Kv.Version, e.PrevKv)
			}
			s.next++
		}
	}
}

// TestWatchFiveNodes: every node serves watches of everything, history and live, also while the nodes
// that it hears of events from stop and come back.
func TestWatchFiveNodes(t *testing.T) {
	t.Parallel() // it mostly waits
	c := fiveNodes(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience) // it is long with the race detector
	defer cancel()
	next := int64(2)
	write := func(n *testNode, count int) {
		for range count {
			if got := n.put(fmt.Sprintf("%c", "acfjmqx"[next%7]), "v"); got != next {
				t.Fatalf("put at %d, want %d", got, next)
			}
			next++
		}
	}
	write(c.nodes[0], 70)
	watch := func(n *testNode, from int64) *seen {
		return &seen{fmt.Sprint(n.cfg.Name, " from ", from), n.client().Watch(ctx, "a", clientv3.WithFromKey(), clientv3.WithRev(from), clientv3.WithPrevKV()), from}
	}
	lists := make([][]*seen, len(c.nodes))
	for i, n := range c.nodes {
		lists[i] = []*seen{watch(n, 2), watch(n, 50), watch(n, next+20)}
	}
	expect := func(list []*seen) {
		t.Helper()
		for _, s := range list {
			s.expect(t, next)
		}
	}
	write(c.nodes[1], 70)
	for _, list := range lists {
		expect(list)
	}
	for i := range c.nodes {
		c.stop(c.nodes[i])
		write(c.nodes[(i+1)%5], 30)
		for j := range lists {
			if j != i {
				expect(lists[j])
			}
		}
		c.start(c.nodes[i])
		write(c.nodes[i], 30)
		lists[i] = []*seen{watch(c.nodes[i], 2)}
		for _, list := range lists {
			expect(list)
		}
	}
	c.stop(c.nodes...)
}

// TestWatchElsewhere: watches of regions that are on other nodes only, alone and with others, answer as
// those that are not.
func TestWatchElsewhere(t *testing.T) {
	t.Parallel() // it mostly waits
	c := fiveNodes(t, func(c *config.Config) { c.WatchProgressNotifyInterval = 100 * time.Millisecond })
	for _, n := range c.nodes {
		for _, key := range []string{"a", "c", "f", "j", "m", "q", "x"} {
			cl := n.client()
			first := n.put(key, "1")
			w := n.watch()
			w.create(&pb.WatchCreateRequest{Key: []byte(key), PrevKv: true, StartRevision: first})
			if r := w.next(); !r.Created || r.Canceled {
				t.Fatalf("%s: %s", n.cfg.Name, show(r))
			}
			if r := w.next(); len(r.Events) != 1 || r.Events[0].Kv.ModRevision != first {
				t.Fatalf("%s: %s, want the put at %d", n.cfg.Name, show(r), first)
			}
			// A transaction over all the regions is one response, in the order of the keys' operations.
			var ops []clientv3.Op
			for _, k := range []string{"x", "c", "a", "m", "f", "q", "j"} {
				ops = append(ops, clientv3.OpPut(k, "2"))
			}
			all := n.watch()
			all.create(&pb.WatchCreateRequest{Key: []byte("a"), RangeEnd: []byte{0}})
			all.next()
			txn := mustDo[*clientv3.TxnResponse](t)(cl.Txn(within(t)).Then(ops...).Commit())
			var order []byte
			for _, e := range all.next().Events {
				order = append(order, e.Kv.Key...)
			}
			if string(order) != "xcamfqj" {
				t.Fatalf("%s: a transaction's events came as %q", n.cfg.Name, order)
			}
			r := w.next()
			if want := fmt.Sprintf("id=0 rev=%d PUT(%s=2@%d c%d v%d)<-1@%d", txn.Header.Revision, key, txn.Header.Revision, r.Events[0].Kv.CreateRevision, r.Events[0].Kv.Version, first); show(r) != want {
				t.Fatalf("%s: got  %s\nwant %s", n.cfg.Name, show(r), want)
			}
			// Progress: on request, and though nothing happens in the region.
			other := c.nodes[(n.i+1)%5].put("zz", "far away")
			if got := n.put("z", "further"); got != other+1 {
				t.Fatal("somebody else writes")
			}
			w.progress()
			for r := w.next(); r.Header.Revision < other+1; r = w.next() {
				if len(r.Events) > 0 || r.WatchId != -1 {
					t.Fatalf("%s: %s, want progress", n.cfg.Name, show(r))
				}
				w.progress()
			}
			w.cancel()
			all.cancel()
		}
	}
	// Compacted history is refused with the revision, wherever it would have been.
	rev := c.nodes[0].put("a", "last")
	mustDo[*clientv3.CompactResponse](t)(c.nodes[0].client().Compact(within(t), rev, clientv3.WithCompactPhysical()))
	for _, n := range c.nodes {
		cl := n.client()
		for _, key := range []string{"a", "c", "f", "j", "m", "q", "x"} {
			// A node that is behind the compaction may have the history still, as with etcd.
			c.eventually(fmt.Sprintf("on %s a watch of %s from 2 on is compacted at %d", n.cfg.Name, key, rev), func() bool {
				ctx, cancel := context.WithCancel(within(t))
				defer cancel()
				r := <-cl.Watch(ctx, key, clientv3.WithRev(2))
				if r.CompactRevision == 0 && (r.Err() != nil || len(r.Events) == 0) {
					t.Errorf("%s, a watch of %s from 2 on: %v", n.cfg.Name, key, r)
				}
				return r.CompactRevision == rev
			})
		}
	}
	c.stop(c.nodes...)
}

// sourced is a node and a key whose region it hears of from another node that does not lead it.
func (c *testCluster) sourced() (n *testNode, key string) {
	for _, n := range c.nodes {
		for _, k := range []string{"a", "c", "f", "j", "m", "q", "x"} {
			if src := n.source(k); src != nil && !src.n.regions.byKey(k).Leading() {
				return n, k
			}
		}
	}
	c.t.Skip("every source leads what it is asked about")
	return nil, ""
}

// TestWatchSilentSource: a node that is up and does not answer is left for another one (W2).
func TestWatchSilentSource(t *testing.T) {
	t.Parallel() // it mostly waits
	c := fiveNodes(t)
	n, key := c.sourced()
	ch := n.client().Watch(within(t), key, clientv3.WithPrevKV())
	rev := n.put(key, "0")
	(&seen{"before", ch, rev}).expect(t, rev+1)
	silent := n.source(key)
	// Who holds this lock keeps it from answering; its connections stand.
	silent.n.followed.mu.Lock()
	defer silent.n.followed.mu.Unlock()
	for i := range 5 {
		rev = n.put(key, fmt.Sprint(i))
		(&seen{"after", ch, rev}).expect(t, rev+1)
	}
	if now := n.source(key); now == silent {
		t.Errorf("the events of %s still come from %s", key, now.cfg.Name)
	}
}

// TestWatchLaggingSource: a replica that stays behind what the order has reached is left for another
// one, without a gap (W2).
func TestWatchLaggingSource(t *testing.T) {
	t.Parallel() // it mostly waits
	c := fiveNodes(t)
	n, key := c.sourced()
	next := n.put(key, "0") + 1
	w := &seen{"watch", n.client().Watch(within(t), key, clientv3.WithRev(next), clientv3.WithPrevKV()), next}
	e := n.n.elsewhere
	i := slices.IndexFunc(*e.list.Load(), func(s *remoteSource) bool { return s.span.Contains([]byte(key)) })
	s := (*e.list.Load())[i]
	judged := func(short mvcc.Revision, ago time.Duration) (replaced bool) {
		e.mu.Lock()
		defer e.mu.Unlock()
		before, now := s.at, time.Now()
		s.goal, s.goalAt = s.CompleteThrough()+short, now.Add(-ago)
		e.judge(s, s.goal, now)
		return s.at != before
	}
	for _, j := range []struct {
		short    mvcc.Revision
		ago      time.Duration
		replaced bool
	}{{0, 10 * lagMax, false}, {1, lagMax / 2, false}, {1, 2 * lagMax, true}, {9, 2 * lagMax, true}} {
		if got := judged(j.short, j.ago); got != j.replaced {
			t.Errorf("%d revisions behind for %v: replaced is %v", j.short, j.ago, got)
		}
		for range 3 {
			if rev := n.put(key, "v"); rev != w.next {
				t.Fatalf("put at %d, want %d", rev, w.next)
			}
			w.expect(t, w.next+1)
		}
	}
	c.stop(c.nodes...)
}

// byKey is the replica here of a key's region, for tests.
func (r *regions) byKey(key string) *hosted {
	for _, h := range r.all() {
		if h.Descriptor().Span.Contains([]byte(key)) {
			return h
		}
	}
	return nil
}

func TestFollowWire(t *testing.T) {
	q := &followQuery{waitMs: 300, want: 77, regions: []followed{{id: 3, after: 5}, {id: 9, after: 0}}}
	if got, err := decodeFollowQuery(q.append(nil)); err != nil || fmt.Sprint(got) != fmt.Sprint(q) {
		t.Fatalf("%v, %v, want %v", got, err, q)
	}
	events := []mvcc.Version{
		{Key: []byte("k"), Mod: 6, Sub: 1, Create: 2, Version: 3, Lease: 9, Value: []byte("v")}, {Key: []byte("l"), Mod: 6, Sub: 2},
		{Key: []byte("m"), Mod: 8, Create: 8, Version: 1},
	}
	list := []followed{
		{id: 3, after: 5, state: followWhole, led: true, floor: 1, through: 9, events: events},
		{id: 4, after: 1, state: followGap, through: 9}, {id: pdpb.RegionID(1 << 40), state: followAbsent},
	}
	data := appendFollowAnswer(nil, list)
	if got, err := decodeFollowAnswer(data); err != nil || fmt.Sprint(got) != fmt.Sprint(list) {
		t.Fatalf("%v, %v, want %v", got, err, list)
	}
	p := &pastAnswer{state: followWhole, floor: 2, end: 9, events: events}
	page := p.append(nil)
	if got, err := decodePastAnswer(page, 5); err != nil || fmt.Sprint(got) != fmt.Sprint(p) {
		t.Fatalf("%v, %v, want %v", got, err, p)
	}
	pq := &pastQuery{region: 7, from: 3, to: 9, span: mvcc.Span{Start: []byte("a")}, bytesHint: 99}
	if got, err := decodePastQuery(pq.append(nil)); err != nil || fmt.Sprint(got) != fmt.Sprint(pq) || got.span.End != nil {
		t.Fatalf("%v, %v, want %v", got, err, pq)
	}
	// What is cut off, or says events where there must be none, is refused and not believed.
	for n := range data {
		got, err := decodeFollowAnswer(data[:n])
		if err == nil && !bytes.Equal(appendFollowAnswer(nil, got), data[:n]) {
			t.Fatalf("the first %d bytes are %v", n, got)
		}
	}
	for n := range page {
		if got, err := decodePastAnswer(page[:n], 5); err == nil {
			t.Fatalf("the first %d bytes are %v", n, got)
		}
	}
	if _, err := decodePastAnswer(page, 6); err == nil {
		t.Fatal("an event below what was asked for was taken")
	}
	list[0].through = 7
	if _, err := decodeFollowAnswer(appendFollowAnswer(nil, list)); err == nil {
		t.Fatal("an event above what is complete was taken")
	}
}
