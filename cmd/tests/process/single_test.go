package process

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"braid/cmd/tests/proc"
)

// TestSingleGroupKilled kills single-group nodes in the middle of writes, one after another and
// then all of them: what was acknowledged is there, at its revision, on every node, and no revision
// is missing or used twice.
func TestSingleGroupKilled(t *testing.T) {
	if !isBraid(t) {
		t.Skip("etcd has no other mode")
	}
	c, err := proc.NewCluster(binary(t), t.TempDir(), 3, "--single-group")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Kill(); err != nil {
			t.Error(err)
		}
	})
	start(t, c.Start)
	rounds := [][]*proc.Node{{c.Nodes[0]}, {c.Nodes[1]}, {c.Nodes[2]}, c.Nodes, {c.Nodes[0], c.Nodes[1]}}
	acked := map[string]int64{}
	var mu sync.Mutex
	for round, victims := range rounds {
		before := len(acked)
		cl := client(t, c.Endpoints()...)
		ctx, stop := context.WithCancel(t.Context())
		enough := make(chan struct{})
		var writers sync.WaitGroup
		var once sync.Once
		for w := range 8 {
			writers.Go(func() {
				for i := 0; ctx.Err() == nil; i++ {
					key := fmt.Sprintf("%d-%d-%d", round, w, i)
					pctx, cancel := context.WithTimeout(ctx, 2*time.Second)
					resp, err := cl.Put(pctx, key, "v"+key)
					cancel()
					if err != nil {
						continue // whatever it was, the next one is another key
					}
					mu.Lock()
					acked[key] = resp.Header.Revision
					if len(acked)-before >= 200 {
						once.Do(func() { close(enough) })
					}
					mu.Unlock()
				}
			})
		}
		select {
		case <-enough:
		case <-time.After(30 * time.Second):
			t.Fatal("no 200 writes in 30 s")
		}
		for _, n := range victims {
			if err := n.Kill(); err != nil {
				t.Fatal(err)
			}
		}
		stop()
		writers.Wait()
		start(t, func(ctx context.Context) error {
			errs := make([]error, len(victims))
			var wg sync.WaitGroup
			for i, n := range victims {
				wg.Go(func() { errs[i] = n.Start(ctx) })
			}
			wg.Wait()
			return errors.Join(errs...)
		})
		for _, n := range c.Nodes {
			checkAcked(t, n, acked)
		}
	}
}

// checkAcked reads everything through one node.
func checkAcked(t *testing.T, n *proc.Node, acked map[string]int64) {
	t.Helper()
	cl := client(t, n.Endpoint())
	var resp *clientv3.GetResponse
	if err := proc.Poll(within(t, 20*time.Second), 100*time.Millisecond, func() (ok bool, _ error) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		var err error
		resp, err = cl.Get(ctx, "\x00", clientv3.WithFromKey())
		return err == nil, nil
	}); err != nil {
		t.Fatalf("%s does not answer: %v", n.Name, err)
	}
	found := map[string]int64{}
	revs := map[int64]string{}
	for _, kv := range resp.Kvs {
		if other, twice := revs[kv.ModRevision]; twice {
			t.Fatalf("%s: revision %d is of %s and of %s", n.Name, kv.ModRevision, other, kv.Key)
		}
		found[string(kv.Key)], revs[kv.ModRevision] = kv.ModRevision, string(kv.Key)
		if string(kv.Value) != "v"+string(kv.Key) {
			t.Fatalf("%s: %s has the value %q", n.Name, kv.Key, kv.Value)
		}
	}
	// Keys are never overwritten here, so every revision is one key: dense means as many.
	if int64(len(resp.Kvs)) != resp.Header.Revision-1 {
		t.Fatalf("%s: %d keys by revision %d", n.Name, len(resp.Kvs), resp.Header.Revision)
	}
	for key, rev := range acked {
		if found[key] != rev {
			t.Fatalf("%s: %s was acknowledged at revision %d, found at %d", n.Name, key, rev, found[key])
		}
	}
}
