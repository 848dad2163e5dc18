package process

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"braid/cmd/tests/proc"
)

// accounts lie in regions of their own, given regionArgs.
var accounts = []string{"a1", "b1", "d1", "f1", "h1", "j1", "l1"}

// freeAfter bounds how long what a killed node had locked stays locked once every region is led again
// (which takes an election). It ends when the node's silence is noticed; left alone it would run out
// after eight seconds, and requests that the dead node had made would get their turn one by one.
const freeAfter = 2500 * time.Millisecond

// TestKilledInTransactions kills each node in turn while clients of all nodes run transactions over
// several regions. Each node is coordinator of its clients' transactions, leads some regions that
// take part in them, and one leads the oracle. However far they were, soon after the kill one
// transaction over everything gets through, and at no revision is anything half done.
func TestKilledInTransactions(t *testing.T) {
	if !isBraid(t) {
		t.Skip("of one region nothing is half done")
	}
	c := cluster(t, 3)
	cli := client(t, c.Endpoints()...)
	ctx := within(t, 3*time.Minute)
	first, err := cli.Txn(ctx).Then(putAll(accounts, func(int) string { return "100" })...).Commit()
	if err != nil {
		t.Fatal(err)
	}
	traffic, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	var commits atomic.Int64
	for w := range 9 {
		own := client(t, c.Nodes[w%3].Endpoint())
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 3))
			for traffic.Err() == nil {
				callCtx, cancel := context.WithTimeout(traffic, 2*time.Second)
				if transfer(callCtx, own, rng) {
					commits.Add(1)
				}
				cancel()
			}
		})
	}
	for _, victim := range c.Nodes {
		before := commits.Load()
		err := proc.Poll(ctx, 20*time.Millisecond, func() (bool, error) { return commits.Load() >= before+40, nil })
		if err != nil {
			t.Fatalf("%d transfers: %v", commits.Load()-before, err)
		}
		if err := victim.Kill(); err != nil {
			t.Fatal(err)
		}
		killed := time.Now()
		var others []string
		for _, n := range c.Nodes {
			if n != victim {
				others = append(others, n.Endpoint())
			}
		}
		survivor := client(t, others...)
		var led time.Duration // when every region took writes again, locks aside
		for _, k := range accounts {
			if err := proc.Poll(ctx, 10*time.Millisecond, func() (bool, error) {
				callCtx, cancel := context.WithTimeout(ctx, time.Second)
				defer cancel()
				_, err := survivor.Put(callCtx, k[:1]+"0", "0")
				return err == nil, nil
			}); err != nil {
				t.Fatal(err)
			}
			led = time.Since(killed)
		}
		err = proc.Poll(ctx, 10*time.Millisecond, func() (bool, error) {
			callCtx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			return readAndPutAll(callCtx, survivor), nil
		})
		if free := time.Since(killed); err != nil || free-led > freeAfter {
			t.Errorf("%s was killed; every region was led again after %v, everything free after %v, %v", victim.Name, led, free, err)
		} else {
			t.Logf("%s was killed after %d transfers; every region was led again after %v, everything free after %v", victim.Name, commits.Load(), led.Round(time.Millisecond), free.Round(time.Millisecond))
		}
		start(t, victim.Start)
	}
	stop()
	wg.Wait()

	last, err := cli.Get(ctx, "a1")
	if err != nil {
		t.Fatal(err)
	}
	for rev := first.Header.Revision; rev <= last.Header.Revision; rev++ {
		resp, err := cli.Get(ctx, "a", clientv3.WithRange("z"), clientv3.WithRev(rev))
		if err != nil {
			t.Fatal(err)
		}
		sum := 0
		for _, kv := range resp.Kvs {
			n, err := strconv.Atoi(string(kv.Value))
			if err != nil {
				t.Fatal(err)
			}
			sum += n
		}
		if sum != 100*len(accounts) {
			t.Fatalf("revision %d has a sum of %d: %v", rev, sum, resp.Kvs)
		}
	}
	t.Logf("%d transfers known, %d revisions", commits.Load(), last.Header.Revision-first.Header.Revision)
}

func putAll(keys []string, value func(i int) string) (ops []clientv3.Op) {
	for i, k := range keys {
		ops = append(ops, clientv3.OpPut(k, value(i)))
	}
	return ops
}

// snapshot reads all accounts.
func snapshot(ctx context.Context, c *clientv3.Client) (amounts []int, cmps []clientv3.Cmp, ok bool) {
	resp, err := c.Get(ctx, "a", clientv3.WithRange("z"))
	if err != nil || len(resp.Kvs) < len(accounts) {
		return nil, nil, false
	}
	for _, kv := range resp.Kvs {
		if !slices.Contains(accounts, string(kv.Key)) {
			continue
		}
		n, err := strconv.Atoi(string(kv.Value))
		if err != nil {
			return nil, nil, false
		}
		amounts = append(amounts, n)
		cmps = append(cmps, clientv3.Compare(clientv3.ModRevision(string(kv.Key)), "=", kv.ModRevision))
	}
	return amounts, cmps, true
}

// transfer moves 1 from one account to two others if nobody interferes.
func transfer(ctx context.Context, c *clientv3.Client, rng *rand.Rand) bool {
	amounts, cmps, ok := snapshot(ctx, c)
	if !ok {
		return false
	}
	var ops []clientv3.Op
	var conds []clientv3.Cmp
	for i, at := range rng.Perm(len(accounts))[:3] {
		ops = append(ops, clientv3.OpPut(accounts[at], fmt.Sprint(amounts[at]+[]int{-2, 1, 1}[i])))
		conds = append(conds, cmps[at])
	}
	resp, err := c.Txn(ctx).If(conds...).Then(ops...).Commit()
	return err == nil && resp.Succeeded
}

// readAndPutAll locks everything: it says whether the transaction came to an end, either way. Failed
// compares are an end, too: they were evaluated under all locks.
func readAndPutAll(ctx context.Context, c *clientv3.Client) bool {
	amounts, cmps, ok := snapshot(ctx, c)
	if !ok {
		return false
	}
	_, err := c.Txn(ctx).If(cmps...).Then(putAll(accounts, func(i int) string { return fmt.Sprint(amounts[i]) })...).Commit()
	return err == nil
}
