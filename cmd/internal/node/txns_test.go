package node

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/client/pkg/v3/types"
	"google.golang.org/grpc/status"

	"braid/cmd/internal/config"
	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/raftstore/raftid"
	"braid/raftstore/transport/transporttest"
	"braid/region/regionpb"
)

func opPut(key, value string) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(key), Value: []byte(value)}}}
}

func opGet(key string) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte(key)}}}
}

// accounts lie in regions of their own.
var accounts = []string{"a", "e", "i", "n", "t"}

// TestTransfersOverRegions moves money between accounts in different regions from all nodes at
// once, while a node goes away and comes back. No sum may ever be wrong, and each transfer has a
// revision of its own.
func TestTransfersOverRegions(t *testing.T) {
	t.Parallel() // it mostly waits
	c := newCluster(t, 3, splitAt("d", "h", "m", "s"))
	c.start(c.nodes...)
	ctx := within(t)
	var all []*pb.RequestOp
	for _, a := range accounts {
		all = append(all, opPut(a, "100"))
	}
	first, err := c.nodes[0].kv.Txn(ctx, &pb.TxnRequest{Success: all})
	if err != nil {
		t.Fatal(err)
	}
	const transfers, workers = 15, 6
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		seen  = map[int64]bool{}
		last  = first.Header.Revision
		total int
	)
	for w := range workers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 5))
			for done := 0; done < transfers; {
				n := c.nodes[w%2] // those that stay
				from, to := accounts[rng.IntN(len(accounts))], accounts[rng.IntN(len(accounts))]
				if from == to {
					continue
				}
				rev, err := transfer(ctx, n, from, to)
				if err != nil {
					if ctx.Err() != nil {
						t.Error(err)
						return
					}
					continue // its fate is open, or the node lost its leader; the sum tells
				}
				if rev == 0 {
					continue // somebody else was faster
				}
				done++
				mu.Lock()
				if seen[rev] {
					t.Errorf("two transfers have revision %d", rev)
				}
				seen[rev], last, total = true, max(last, rev), total+1
				mu.Unlock()
			}
		})
	}
	stop := make(chan struct{})
	var checks sync.WaitGroup
	checks.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				checkSum(ctx, t, c.nodes[1], 0)
			}
		}
	})
	c.restart(c.nodes[2])
	wg.Wait()
	close(stop)
	checks.Wait()
	for rev := first.Header.Revision; rev <= last; rev++ {
		checkSum(ctx, t, c.nodes[0], rev)
	}
	t.Logf("%d transfers over revisions %d to %d", total, first.Header.Revision, last)

	// One deletion of everything, at one revision.
	del, err := c.nodes[2].kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, PrevKv: true})
	if err != nil || del.Deleted != int64(len(accounts)) || len(del.PrevKvs) != len(accounts) {
		t.Fatalf("%v %v", del, err)
	}
	checkSum(ctx, t, c.nodes[0], del.Header.Revision-1)
	h := c.nodes[0].hash(del.Header.Revision)
	for _, n := range c.nodes[1:] {
		if o := n.hash(del.Header.Revision); o.Hash != h.Hash {
			t.Errorf("hashes %v and %v", h, o)
		}
	}
}

// transfer moves 1 from one account to another if nobody interferes; revision 0 says that somebody
// did.
func transfer(ctx context.Context, n *testNode, from, to string) (int64, error) {
	read, err := n.kv.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{opGet(from), opGet(to)}})
	if err != nil {
		return 0, err
	}
	req := &pb.TxnRequest{}
	for i, key := range []string{from, to} {
		kv := read.Responses[i].GetResponseRange().Kvs[0]
		amount, err := strconv.Atoi(string(kv.Value))
		if err != nil {
			return 0, err
		}
		req.Compare = append(req.Compare, &pb.Compare{Key: []byte(key), Target: pb.Compare_MOD, TargetUnion: &pb.Compare_ModRevision{ModRevision: kv.ModRevision}})
		req.Success = append(req.Success, opPut(key, fmt.Sprint(amount-1+2*i)))
	}
	resp, err := n.kv.Txn(ctx, req)
	if err != nil || !resp.Succeeded {
		return 0, err
	}
	return resp.Header.Revision, nil
}

// checkSum reads all accounts at one revision.
func checkSum(ctx context.Context, t *testing.T, n *testNode, rev int64) {
	resp, err := n.kv.Range(ctx, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, Revision: rev})
	if err != nil {
		if ctx.Err() != nil {
			t.Error(err)
		}
		return
	}
	sum := 0
	for _, kv := range resp.Kvs {
		amount, err := strconv.Atoi(string(kv.Value))
		if err != nil {
			t.Error(err)
		}
		sum += amount
	}
	if sum != 100*len(accounts) {
		t.Errorf("at revision %d (%d) the accounts hold %d: %v", rev, resp.Header.Revision, sum, resp.Kvs)
	}
}

// TestTooLargeForARegion: a transaction whose part in one region is larger than a region takes has
// etcd's error and no effect, and leaves nothing locked.
func TestTooLargeForARegion(t *testing.T) {
	c := newCluster(t, 1, splitAt("m"))
	limits := lockLimits(100*time.Millisecond, 7*time.Second)
	limits.PrepareBytesMax = 2000
	limits.LockTicksMax, limits.LockWaitTicksMax, limits.AbortTicks = 1<<30, 1<<30, 1<<30 // what is left locked stays so
	c.tune.limits = &limits
	c.start(c.nodes...)
	n := c.nodes[0]
	for i := range 100 {
		n.put(fmt.Sprintf("a key of some length %03d", i), "")
	}
	rev := n.put("z", "")
	ctx := within(t)
	_, err := n.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
	if want := status.Convert(rpctypes.ErrGRPCRequestTooLarge); status.Code(err) != want.Code() || status.Convert(err).Message() != want.Message() {
		t.Errorf("deleting everything: %v", err)
	}
	if got := n.put("z", "1"); got != rev+1 {
		t.Errorf("revision %d after %d", got, rev)
	}
	// In parts it is no problem.
	for _, end := range []string{"a key of some length 050", "\x00"} {
		if _, err := n.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte{0}, RangeEnd: []byte(end)}); err != nil {
			t.Errorf("deleting up to %q: %v", end, err)
		}
	}
}

// TestTooLargeLease: a lease with keys in two regions, and more of them in one than the region takes, is not
// ended, and nothing of it stays locked; with fewer it is. Of many more the region does not grant the lock, of
// a few more it refuses the prepare.
func TestTooLargeLease(t *testing.T) {
	c := newCluster(t, 1, splitAt("m"))
	limits := lockLimits(100*time.Millisecond, 7*time.Second)
	limits.PrepareBytesMax = 2000
	c.tune.limits = &limits
	c.start(c.nodes...)
	n := c.nodes[0]
	ctx := within(t)
	leases := pb.NewLeaseClient(n.conn)
	for id, keys := range map[int64]int{1: 100, 2: 60} {
		if _, err := leases.LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: id, TTL: 600}); err != nil {
			t.Fatal(err)
		}
		put := func(key string, lease int64) {
			t.Helper()
			if _, err := n.kv.Put(ctx, &pb.PutRequest{Key: []byte(key), Lease: lease}); err != nil {
				t.Fatal(err)
			}
		}
		key := func(i int) string { return fmt.Sprintf("a key of some length %03d", i) }
		for i := range keys {
			put(key(i), id)
		}
		put("z", id)
		_, err := leases.LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: id})
		if want := status.Convert(rpctypes.ErrGRPCRequestTooLarge); status.Code(err) != want.Code() || status.Convert(err).Message() != want.Message() {
			t.Errorf("the end of %d keys: %v", keys, err)
		}
		began := time.Now()
		for i := 20; i < keys; i++ {
			put(key(i), 0)
		}
		put("z", id)
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("what the end had locked was free after %v", took)
		}
		if _, err := leases.LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: id}); err != nil {
			t.Errorf("the end of fewer: %v", err)
		}
		if n.get(key(0)) != "" || n.get("z") != "" {
			t.Error("keys are left")
		}
	}
}

// TestLocksOfALostCoordinator: a lock request that nobody waits for any more is not granted later,
// and what a store that went away had locked is free at once, not only when its locks run out.
func TestLocksOfALostCoordinator(t *testing.T) {
	c := newCluster(t, 3, splitAt("m"))
	limits := lockLimits(50*time.Millisecond, 7*time.Second)
	limits.LockTicksMax, limits.LockWaitTicksMax = 1<<30, 1<<30
	c.tune.limits = &limits
	c.start(c.nodes...)
	c.nodes[0].put("k", "0")
	d := c.nodes[0].n.oracle.Regions()[0]
	var leader, owner *testNode
	for _, n := range c.nodes {
		if n.n.regions.get(d.ID).Leading() {
			leader = n
		} else {
			owner = n
		}
	}
	if leader == nil || owner == nil {
		t.Fatal("no leader")
	}
	st := owner.n.stores
	lock := func(ctx context.Context) (pdpb.AttemptID, error) {
		id, err := owner.n.oracle.Attempt(ctx, false)
		if err != nil {
			t.Fatal(err)
		}
		_, err = st.Lock(ctx, d, &regionpb.LockRequest{Region: d.ID, Epoch: d.Epoch, Attempt: id, Age: id,
			Locks: []regionpb.LockSpan{{Span: mvcc.Key([]byte("k")), Exclusive: true}}})
		return id, err
	}
	first, err := lock(within(t))
	if err != nil {
		t.Fatal(err)
	}
	locks := func(n int) func() bool {
		return func() bool { return leader.n.regions.get(d.ID).Stats().Locks == n }
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := lock(ctx)
		done <- err
	}()
	c.eventually("the second waits", locks(2))
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("a request that was cancelled: %v", err)
	}
	c.eventually("the second is gone", locks(1))
	st.Release(d, &regionpb.ReleaseRequest{Region: d.ID, Attempt: first})
	c.eventually("the first is gone", locks(0))
	leader.put("k", "1")

	if _, err := lock(within(t)); err != nil {
		t.Fatal(err)
	}
	c.stop(owner)
	leader.put("k", "2")
	c.eventually("the lost one is gone", locks(0))
}

// faultyLinks is a cluster in which nobody is missed and nothing locked runs out, with a proxy before each node.
func faultyLinks(t *testing.T) (*testCluster, map[string]*transporttest.Proxy) {
	ways := map[string]*transporttest.Proxy{}
	c := newCluster(t, 3, splitAt("m"), func(cfg *config.Config) {
		cfg.ElectionMs = 5000
		way := transporttest.NewProxy(t, cfg.ListenPeerURLs[0].Host)
		ways[cfg.Name] = way
		cfg.InitialAdvertisePeerURLs = []url.URL{{Scheme: "http", Host: way.Addr()}}
		cfg.InitialCluster[cfg.Name] = types.URLs(cfg.InitialAdvertisePeerURLs)
	})
	limits := lockLimits(50*time.Millisecond, 7*time.Second)
	limits.LockTicksMax, limits.AbortTicks = 1<<30, 1<<30
	c.tune.limits = &limits
	c.start(c.nodes...)
	c.nodes[0].put("k", "0")
	return c, ways
}

// TestReleaseOverAFaultyLink: a release that a link loses is sent again, when that comes back too soon for
// its other end to be missed.
func TestReleaseOverAFaultyLink(t *testing.T) {
	t.Parallel() // it mostly waits
	c, ways := faultyLinks(t)
	d := c.nodes[0].n.oracle.Regions()[0]
	// once says whether one node led from the lock to its end: what is granted in a term ends with it.
	once := func() bool {
		i := slices.IndexFunc(c.nodes, func(n *testNode) bool { return n.n.regions.get(d.ID).Leading() })
		if i < 0 {
			return false
		}
		leader, owner := c.nodes[i], c.nodes[(i+1)%3]
		hosted := leader.n.regions.get(d.ID)
		id, err := owner.n.oracle.Attempt(within(t), false)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := owner.n.stores.Lock(within(t), d, &regionpb.LockRequest{Region: d.ID, Epoch: d.Epoch, Attempt: id, Age: id,
			Locks: []regionpb.LockSpan{{Span: mvcc.Key([]byte("k")), Exclusive: true}}}); err != nil {
			return false
		}
		way := ways[leader.n.cfg.Name]
		way.Block()
		owner.n.stores.Release(d, &regionpb.ReleaseRequest{Region: d.ID, Attempt: id})
		time.Sleep(200 * time.Millisecond) // over a link that works it would have come by then
		held := hosted.Stats().Locks
		way.Unblock()
		c.eventually("the lock is free", func() bool { return hosted.Stats().Locks == 0 })
		if !hosted.Leading() {
			return false
		}
		if held != 1 {
			t.Errorf("%d locks behind a link that loses everything", held)
		}
		return true
	}
	c.eventually("one node leads all the while", once)
}

// TestAbandonOverAFaultyLink: what asks pd for an abort comes there too when a link loses it at first; without
// it the prepared part of an attempt that is prepared nowhere else would stay locked.
func TestAbandonOverAFaultyLink(t *testing.T) {
	t.Parallel() // it mostly waits
	c, ways := faultyLinks(t)
	regions := c.nodes[0].n.oracle.Regions()
	d := regions[0]
	pd := slices.IndexFunc(c.nodes, func(n *testNode) bool {
		return slices.ContainsFunc(n.n.store.Statuses(), func(st raftstore.GroupStatus) bool { return st.ID == raftid.PDGroup && st.Leading })
	})
	if pd < 0 {
		t.Fatal("pd has no leader")
	}
	owner := c.nodes[(pd+1)%3]
	id, err := owner.n.oracle.Attempt(within(t), false)
	if err != nil {
		t.Fatal(err)
	}
	var grant regionpb.LockGrant
	c.eventually("the lock is granted", func() bool {
		grant, err = owner.n.stores.Lock(within(t), d, &regionpb.LockRequest{Region: d.ID, Epoch: d.Epoch, Attempt: id, Age: id,
			Locks: []regionpb.LockSpan{{Span: mvcc.Key([]byte("k")), Exclusive: true}}})
		return err == nil
	})
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := owner.n.stores.Prepare(ctx, d, &regionpb.PrepareRequest{Region: d.ID, Attempt: id, Lock: grant.ID, Participants: []pdpb.RegionID{d.ID, regions[1].ID}})
		ended <- err
	}()
	prepared := func(n int) func() bool {
		return func() bool {
			return slices.ContainsFunc(c.nodes, func(tn *testNode) bool {
				h := tn.n.regions.get(d.ID)
				return h.Leading() && h.Stats().Prepared == n
			})
		}
	}
	c.eventually("a part is prepared", prepared(1))
	way := ways[c.nodes[pd].n.cfg.Name]
	way.Block()
	owner.n.oracle.Abandon(id)
	time.Sleep(200 * time.Millisecond) // over a link that works it would have come by then
	if !prepared(1)() {
		t.Error("pd heard it over a link that loses everything")
	}
	way.Unblock()
	c.eventually("the part is given up", prepared(0))
}

// TestLargeTransactionIsNotStarved: while clients of all nodes write the same keys, one by one, a few
// at a time over regions and in every order of naming them, a transaction over all of them gets
// through again and again.
func TestLargeTransactionIsNotStarved(t *testing.T) {
	c := newCluster(t, 3, splitAt("d", "h", "m", "s"))
	c.start(c.nodes...)
	ctx, stop := context.WithCancel(within(t))
	defer stop()
	var keys []string
	for _, a := range accounts {
		for i := range 12 {
			keys = append(keys, fmt.Sprint(a, i))
		}
	}
	var wg sync.WaitGroup
	for w := range 9 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 8))
			n := c.nodes[w%3]
			for ctx.Err() == nil {
				txn := &pb.TxnRequest{}
				for _, i := range rng.Perm(len(keys))[:1+w%4] {
					txn.Success = append(txn.Success, opPut(keys[i], "small"))
				}
				if _, err := n.kv.Txn(ctx, txn); err != nil && ctx.Err() == nil {
					t.Errorf("a small transaction: %v", err)
					return
				}
			}
		})
	}
	for i := range 10 {
		txn := &pb.TxnRequest{}
		for _, k := range keys {
			txn.Success = append(txn.Success, opPut(k, fmt.Sprint("large", i)))
		}
		began := time.Now()
		resp, err := c.nodes[i%3].kv.Txn(ctx, txn)
		if err != nil {
			t.Fatalf("large transaction %d: %v", i, err)
		}
		t.Logf("large transaction %d took %v", i, time.Since(began).Round(time.Millisecond))
		read, err := c.nodes[i%3].kv.Range(ctx, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, Revision: resp.Header.Revision})
		if err != nil {
			t.Fatal(err)
		}
		for _, kv := range read.Kvs {
			if string(kv.Value) != fmt.Sprint("large", i) {
				t.Fatalf("revision %d: %v", resp.Header.Revision, kv)
			}
		}
	}
	stop()
	wg.Wait()
}
