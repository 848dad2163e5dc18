package node

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"braid/cmd/internal/config"
)

// TestModesDoNotMix starts one node of three with another mode: the others form the cluster, and the
// odd one says why it cannot be part of it (A16).
func TestModesDoNotMix(t *testing.T) {
	t.Parallel() // it mostly waits
	c := newCluster(t, 3)
	c.nodes[2].cfg.SingleGroup = true
	var wg sync.WaitGroup
	var odd error
	wg.Go(func() { odd = c.nodes[2].tryStart(within(t)) })
	c.start(c.nodes[:2]...)
	wg.Wait()
	if odd == nil || !strings.Contains(odd.Error(), "2 of 3 members refuse this node") || !strings.Contains(odd.Error(), "was started in single-group mode") {
		t.Errorf("the node with another mode: %v", odd)
	}
	if got := c.nodes[0].put("a", "1"); got != 2 {
		t.Errorf("the first revision is %d", got)
	}
}

// TestWipedMember refuses a member that lost its data directory, however often it is started: it may
// have voted.
func TestWipedMember(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, change := range []func(*config.Config){splitAt("m"), singleGroupMode} {
		c := newCluster(t, 3, change)
		c.start(c.nodes...)
		c.nodes[0].put("a", "1")
		lost := c.nodes[1]
		c.stop(lost)
		if err := os.RemoveAll(lost.cfg.DataDir); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			err := lost.tryStart(within(t))
			if err == nil || !strings.Contains(err.Error(), "has already been bootstrapped") {
				t.Errorf("an empty member: %v", err)
			}
		}
		if got := c.nodes[2].put("a", "2"); got != 3 {
			t.Errorf("the next revision is %d", got)
		}
		c.stop(c.nodes...)
	}
}

// TestLostLog refuses a member whose log is gone, also when nobody is there to refuse it.
func TestLostLog(t *testing.T) {
	for _, change := range []func(*config.Config){splitAt("m"), singleGroupMode} {
		c := newCluster(t, 1, change)
		c.start(c.nodes...)
		c.nodes[0].put("a", "1")
		c.stop(c.nodes...)
		if err := os.RemoveAll(filepath.Join(c.nodes[0].cfg.DataDir, "wal")); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := c.nodes[0].tryStart(within(t)); err == nil || !strings.Contains(err.Error(), "is gone, and with it this member's votes") {
				t.Errorf("without its log: %v", err)
			}
		}
	}
}

// TestLostState: a lone node whose state is gone says so; nobody can give it back. One of three is
// filled by the others.
func TestLostState(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, change := range []func(*config.Config){splitAt("m"), singleGroupMode} {
		for _, size := range []int{1, 3} {
			c := newCluster(t, size, change)
			c.start(c.nodes...)
			c.nodes[0].put("a", "1")
			last := c.nodes[size-1]
			c.stop(last)
			if err := os.RemoveAll(filepath.Join(last.cfg.DataDir, "state")); err != nil {
				t.Fatal(err)
			}
			if size == 1 {
				for range 2 {
					if err := last.tryStart(within(t)); err == nil || !strings.Contains(err.Error(), "is gone, and nobody else has") {
						t.Errorf("without its state: %v", err)
					}
				}
				continue
			}
			c.start(last)
			c.stop(c.nodes[0])
			if last.put("a", "2"); last.get("a") != "2" {
				t.Errorf("a is %q", last.get("a"))
			}
			c.stop(c.nodes...)
		}
	}
}

// TestSplitKeysOfOne gives nodes different pre-split points: one list counts, the others are warned
// of.
func TestSplitKeysOfOne(t *testing.T) {
	t.Parallel() // it mostly waits
	c := newCluster(t, 3)
	for i, keys := range []string{"a,b", "c", "d,e,f"} {
		var err error
		if c.nodes[i].cfg.SplitKeys, err = config.ParseSplitKeys(keys); err != nil {
			t.Fatal(err)
		}
	}
	c.start(c.nodes...)
	warned := 0
	for _, n := range c.nodes {
		warned += n.logs.FilterMessageSnippet("other --region-split-keys").Len()
	}
	if warned != 2 {
		t.Errorf("%d nodes warned, want 2", warned)
	}
	want := len(c.nodes[0].n.oracle.Regions())
	for _, n := range c.nodes {
		if got := len(n.n.oracle.Regions()); got != want || want < 2 {
			t.Errorf("%s knows %d regions, n0 %d", n.cfg.Name, got, want)
		}
	}
	// Later the flag means nothing, so it is not worth a word.
	c.restart(c.nodes...)
	for _, n := range c.nodes {
		warned -= n.logs.FilterMessageSnippet("other --region-split-keys").Len()
	}
	if warned != 0 {
		t.Error("warned again after a restart")
	}
}

// TestReplacedStateIsCollectedAnew: a collection that ran while a region's state was replaced does
// not count (R3).
func TestReplacedStateIsCollectedAnew(t *testing.T) {
	c := newCluster(t, 1)
	c.start(c.nodes...)
	n := c.nodes[0]
	n.put("a", "1")
	last := n.put("a", "2")
	n.compact(last, true)
	gc, id := &n.n.regions.gc, n.n.regions.all()[0].id
	rev, state, known, err := gc.progress(id)
	if err != nil || !known || int64(rev) != last {
		t.Fatalf("collected through %d (%v, %v), want %d", rev, known, err, last)
	}
	if err := gc.replacing(id); err != nil {
		t.Fatal(err)
	}
	if err := gc.record(id, state, rev); err != nil { // the end of a collection that began before
		t.Fatal(err)
	}
	if rev, _, _, err := gc.progress(id); rev != 0 || err != nil {
		t.Errorf("while its state is replaced a region is collected through %d (%v)", rev, err)
	}
	if err := gc.collect(context.Background(), 0); err != nil {
		t.Fatal(err)
	}
	gc.replaced(id)
	n.compact(n.put("a", "3"), true)
	if got := n.versions(); got != 1 {
		t.Errorf("%d versions are left, want 1", got)
	}
}
