package node

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/region"
)

// versions counts what the node's engine holds, by its revision index.
func (n *testNode) versions() (count int) {
	n.t.Helper()
	view, err := n.n.engine.Snapshot()
	if err != nil {
		n.t.Fatal(err)
	}
	defer view.Close()
	err = view.Events(context.Background(), 0, mvcc.Latest, mvcc.Span{}, func(*mvcc.Version) error {
		count++
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return count
}

func (n *testNode) compact(rev int64, physical bool) {
	n.t.Helper()
	if _, err := n.kv.Compact(within(n.t), &pb.CompactionRequest{Revision: rev, Physical: physical}); err != nil {
		n.t.Fatalf("compact %d on %s: %v", rev, n.cfg.Name, err)
	}
}

// collected is the revision through which all regions here were collected.
func (n *testNode) collected() mvcc.Revision {
	n.t.Helper()
	least := mvcc.Latest
	for _, h := range n.n.regions.all() {
		rev, _, _, err := n.n.regions.gc.progress(h.id)
		if err != nil {
			n.t.Fatal(err)
		}
		least = min(least, rev)
	}
	return least
}

// progress is through which revision each region here was collected, as it would be found after a
// crash of this very moment or later.
func (n *testNode) progress() string {
	n.t.Helper()
	var b strings.Builder
	for _, h := range sorted(n.n.regions.all()) {
		p, ok, err := n.n.engine.Position(uint64(h.id) | progressBit)
		if err != nil {
			n.t.Fatal(err)
		}
		fmt.Fprintf(&b, "%d:%x %v ", h.id, p, ok)
	}
	return b.String()
}

// TestCollection removes what compactions superseded, on every node, once and for all.
func TestCollection(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, shape := range []func(int) *testCluster{
		func(size int) *testCluster { return newCluster(t, size, splitAt("b", "c")) },
		func(size int) *testCluster { return newCluster(t, size, singleGroupMode) },
	} {
		c := shape(3)
		c.start(c.nodes...)
		const rounds = 20
		var last int64
		for i := range rounds {
			for _, k := range []string{"a", "b", "c"} {
				last = c.nodes[i%3].put(k, fmt.Sprint(i))
			}
		}
		// A physical compaction has removed when it answers, where it was asked; elsewhere soon.
		c.nodes[1].compact(last, true)
		if got := c.nodes[1].versions(); got != 3 {
			t.Errorf("after a physical compaction the node holds %d versions, want 3", got)
		}
		for _, n := range c.nodes {
			// A moment passes between the removal and the note of it.
			c.eventually("every node collected", func() bool { return n.versions() == 3 && int64(n.collected()) == last })
		}
		want := c.nodes[0].hash(0).Hash
		for _, n := range c.nodes {
			if got := n.hash(0).Hash; got != want {
				t.Errorf("%s hashes otherwise after collection", n.cfg.Name)
			}
			if _, err := n.kv.Range(within(t), &pb.RangeRequest{Key: []byte("a"), Revision: last - 1}); err == nil || !strings.Contains(err.Error(), "required revision has been compacted") {
				t.Errorf("a read below the floor: %v", err)
			}
		}
		// How far it came survives a restart, and so does what was removed.
		before := c.nodes[0].progress()
		c.restart(c.nodes...)
		if got := c.nodes[0].progress(); got != before {
			t.Errorf("progress after a restart: %s, before %s", got, before)
		}
		next := c.nodes[0].put("a", "new")
		c.nodes[2].compact(next, true)
		if got := c.nodes[2].versions(); got != 3 {
			t.Errorf("after the second compaction the node holds %d versions, want 3", got)
		}
		c.stop(c.nodes...)
	}
}

// TestCollectionIsDue: removal lags behind each floor by the grace time, also behind floors that come
// faster than that, and not at all where somebody waits for it.
func TestCollectionIsDue(t *testing.T) {
	const grace = 5 * time.Second
	c := &collector{}
	c.init(&regions{node: &Node{tuning: tuning{gcGrace: grace}}})
	start := time.Now()
	for s := range 100 { // a compaction each second, at revision 10, 20, 30 ...
		now := start.Add(time.Duration(s) * time.Second)
		ripe, ok := c.due(mvcc.Revision(10*(s+1)), now)
		if !ok {
			ripe = 0
		}
		if age := s + 1 - int(ripe)/10; age < 5 && ripe > 0 || age > 10 {
			t.Fatalf("after %d seconds the floor of %d seconds ago is collected", s, age)
		}
	}
	last := start.Add(200 * time.Second)
	c.due(1000, last)
	if ripe, _ := c.due(1000, last.Add(grace)); ripe != 1000 {
		t.Errorf("%d is collected when all is quiet, want 1000", ripe)
	}
	c.mu.urgent = 2000
	if ripe, _ := c.due(2500, last); ripe != 2000 {
		t.Errorf("somebody waits for 2000, and %d is collected", ripe)
	}
	if ripe, _ := c.due(2500, last); ripe != 2000 {
		t.Errorf("nobody waits for more than 2000, and %d is collected", ripe)
	}
}

// churn writes until enough is called; it returns how many writes each key has seen at the least.
func (c *testCluster) churn(n *testNode, key string, rounds int) {
	c.t.Helper()
	value := strings.Repeat("x", 1024)
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for w := range errs {
		wg.Go(func() {
			for i := range rounds / len(errs) {
				_, err := n.kv.Put(context.Background(), &pb.PutRequest{Key: fmt.Appendf(nil, "%s%d", key, w), Value: fmt.Appendf(nil, "%s%d", value, i)})
				if err != nil {
					errs[w] = err
					return
				}
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			c.t.Fatalf("churn on %s: %v", n.cfg.Name, err)
		}
	}
}

// tiny makes a few megabytes of writes fill segments and memtables many times over.
func (c *testCluster) tiny() {
	c.tune.segmentBytes, c.tune.memTableBytes = 256<<10, 256<<10
	c.tune.idleFlush, c.tune.idleSegments = 0, 2
	limits := region.DefaultLimits
	c.tune.limits = &limits
}

// TestLogIsBounded loads one region while another is idle: the idle one's log must not pin the
// segments, and they must not grow with what was written.
func TestLogIsBounded(t *testing.T) {
	for _, change := range []func(*testCluster){nil} {
		c := newCluster(t, 1, splitAt("m"))
		c.tiny()
		if change != nil {
			change(c)
		}
		c.start(c.nodes...)
		n := c.nodes[0]
		n.put("z", "idle")
		c.churn(n, "a", 4800) // 5 MB and more: 19 segments
		c.eventually("old segments are free", func() bool { return n.n.wal.Stats().Segments <= 8 })
		c.restart(n)
		if got := n.get("z"); got != "idle" {
			t.Errorf("z is %q", got)
		}
		c.stop(n)
	}
}

// TestFollowerCatchesUpBySnapshot stops a node until the others' logs begin above what it has, and
// starts it again while writes go on.
func TestFollowerCatchesUpBySnapshot(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, shape := range []string{"regions", "single-group"} {
		t.Run(shape, func(t *testing.T) {
			change := splitAt("m")
			if shape == "single-group" {
				change = singleGroupMode
			}
			c := newCluster(t, 3, change)
			c.tiny()
			c.start(c.nodes...)
			c.nodes[0].put("z", "1")
			c.churn(c.nodes[0], "a", 160)
			down := c.nodes[2]
			id, has := down.n.regions.byKey("a").id, uint64(0)
			for _, n := range c.nodes {
				st, _ := n.n.store.Status(id)
				has = max(has, st.Last)
			}
			c.stop(down)
			c.churn(c.nodes[0], "a", 1440)
			// For a while a leader keeps what a follower lacks that it heard of a moment ago.
			c.eventually("the others' logs begin above what it has", func() bool {
				c.churn(c.nodes[0], "a", 160)
				for _, n := range c.nodes[:2] {
					if st, ok := n.n.store.Status(id); !ok || st.First <= has {
						return false
					}
				}
				return true
			})
			// What was superseded meanwhile is removed; the snapshot's receiver must come to the same.
			rev := c.nodes[0].put("z", "2")
			c.nodes[0].compact(rev, true)
			stop := make(chan struct{})
			var wg sync.WaitGroup
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						c.churn(c.nodes[1], "b", 16)
					}
				}
			})
			c.start(down)
			installed := func() bool { return down.n.store.Stats().SnapshotsInstalled > 0 }
			c.eventually("a snapshot is installed", installed)
			close(stop)
			wg.Wait()
			if got := down.get("z"); got != "2" {
				t.Errorf("z is %q", got)
			}
			want := c.nodes[0].all()
			if got := down.all(); got != want {
				t.Errorf("the store that was away reads %.200s, others %.200s", got, want)
			}
			last := c.nodes[0].put("z", "3")
			down.compact(last, true)
			for _, n := range c.nodes {
				c.eventually("all nodes hold the same", func() bool { return n.versions() == down.versions() })
				if n.hash(0).Hash != down.hash(0).Hash {
					t.Errorf("%s hashes otherwise", n.cfg.Name)
				}
			}
			c.restart(down)
			if got := down.get("z"); got != "3" {
				t.Errorf("z is %q after another restart", got)
			}
		})
	}
}
