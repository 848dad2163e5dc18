package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"braid/mvcc"
	"braid/region/regionpb"
	"braid/router"
)

func errIs(t *testing.T, what string, err, want error) {
	t.Helper()
	if err == nil || rpctypes.Error(err).Error() != rpctypes.Error(want).Error() {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}

// spread are keys in all regions of shapes.
var spread = []string{"a", "c", "e", "g", "i", "k", "m", "o", "q", "s", "u", "w", "y"}

// checkEnd looks whether a response has the deletions of these keys at one revision, in this order.
func checkEnd(t *testing.T, w clientv3.WatchResponse, rev int64, keys []string) {
	t.Helper()
	var got []string
	for _, e := range w.Events {
		if e.Type != clientv3.EventTypeDelete || e.Kv.ModRevision != rev {
			t.Errorf("event %v", e)
		}
		got = append(got, string(e.Kv.Key))
	}
	if !slices.Equal(got, keys) {
		t.Errorf("the end deleted %v, want %v", got, keys)
	}
}

// TestLeaseKeys attaches keys of all regions to leases, moves and detaches some, and ends the leases:
// each end is one revision, with one event for each key that is still attached, in the order of keys.
func TestLeaseKeys(t *testing.T) {
	t.Parallel() // it mostly waits
	shapes(t, 3, func(t *testing.T, c *testCluster) {
		ctx := within(t)
		cl := c.nodes[0].client()
		must := mustDo[*clientv3.PutResponse](t)
		grant := func(id, ttl int64) *pb.LeaseGrantResponse {
			t.Helper()
			resp, err := pb.NewLeaseClient(c.nodes[0].conn).LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: id, TTL: ttl})
			least := int64((3*c.nodes[0].cfg.ElectionMs/2 + 999) / 1000)
			if err != nil || resp.ID != id || resp.TTL != max(ttl, least) {
				t.Fatalf("grant %d: %v %v", id, resp, err)
			}
			return resp
		}
		first := grant(7, 600).Header.Revision
		if got := grant(-9, 600).Header.Revision; got != first {
			t.Errorf("a grant took a revision: %d after %d", got, first)
		}
		_, err := pb.NewLeaseClient(c.nodes[1].conn).LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: 7, TTL: 5})
		errIs(t, "a lease twice", err, rpctypes.ErrGRPCLeaseExist)
		_, err = cl.Put(ctx, "a", "", clientv3.WithLease(999))
		errIs(t, "a put with no lease", err, rpctypes.ErrGRPCLeaseNotFound)
		for i, k := range spread {
			must(c.nodes[i%3].client().Put(ctx, k, "1", clientv3.WithLease(7)))
		}
		// Over regions, in one transaction; the branch that is not taken names a lease that is not there.
		txn, err := cl.Txn(ctx).If(clientv3.Compare(clientv3.Version("a"), "=", 1), clientv3.Compare(clientv3.Version("y"), "=", 1)).
			Then(clientv3.OpPut("b", "2", clientv3.WithLease(7)), clientv3.OpPut("z", "2", clientv3.WithLease(7)), clientv3.OpDelete("c"), clientv3.OpPut("e", "3", clientv3.WithIgnoreLease())).
			Else(clientv3.OpPut("b", "2", clientv3.WithLease(999)), clientv3.OpPut("z", "2", clientv3.WithLease(998))).Commit()
		if err != nil || !txn.Succeeded {
			t.Fatal(txn, err)
		}
		_, err = cl.Txn(ctx).If(clientv3.Compare(clientv3.Version("a"), "=", 5), clientv3.Compare(clientv3.Version("y"), "=", 1)).
			Else(clientv3.OpPut("b", "2", clientv3.WithLease(999)), clientv3.OpPut("z", "2", clientv3.WithLease(7))).Commit()
		errIs(t, "a transaction with no lease", err, rpctypes.ErrGRPCLeaseNotFound)
		if _, err = cl.Txn(ctx).Then(clientv3.OpPut("m", "detached"), clientv3.OpPut("s", "kept", clientv3.WithLease(7)), clientv3.OpPut("u", "kept", clientv3.WithLease(7))).Commit(); err != nil {
			t.Fatal(err)
		}
		must(cl.Put(ctx, "g", "detached"))
		must(cl.Put(ctx, "i", "moved", clientv3.WithLease(-9)))
		must(cl.Put(ctx, "k", "moved and back", clientv3.WithLease(-9)))
		must(cl.Put(ctx, "k", "moved and back", clientv3.WithLease(7)))

		want := []string{"a", "b", "e", "k", "o", "q", "s", "u", "w", "y", "z"}
		keysOf := func(n *testNode, id int64) (ttl int64, keys []string) {
			t.Helper()
			resp, err := pb.NewLeaseClient(n.conn).LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: id, Keys: true})
			if err != nil {
				t.Fatal(err)
			}
			for _, k := range resp.Keys {
				keys = append(keys, string(k))
			}
			return resp.TTL, keys
		}
		for _, n := range c.nodes {
			if ttl, keys := keysOf(n, 7); ttl < 500 || !slices.Equal(keys, want) {
				t.Errorf("lease 7 on %s has %d s and %v, want %v", n.cfg.Name, ttl, keys, want)
			}
			if _, keys := keysOf(n, -9); !slices.Equal(keys, []string{"i"}) {
				t.Errorf("lease -9 on %s has %v", n.cfg.Name, keys)
			}
		}
		ka, err := cl.KeepAliveOnce(ctx, 7)
		if err != nil || ka.TTL != 600 {
			t.Errorf("renewal: %v %v", ka, err)
		}
		_, err = cl.KeepAliveOnce(ctx, 999)
		errIs(t, "renewal of no lease", err, rpctypes.ErrGRPCLeaseNotFound)

		c.restart(c.nodes[2])
		before := c.nodes[1].put("x", "")
		wch := c.nodes[1].client().Watch(ctx, "", clientv3.WithPrefix(), clientv3.WithRev(before+1))
		rv, err := pb.NewLeaseClient(c.nodes[2].conn).LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: 7})
		if err != nil || rv.Header.Revision != before+1 {
			t.Fatalf("revoke: %v %v, want revision %d", rv, err, before+1)
		}
		checkEnd(t, <-wch, before+1, want)
		if ttl, keys := keysOf(c.nodes[0], 7); ttl != -1 || keys != nil {
			t.Errorf("ended lease has %d s and %v", ttl, keys)
		}
		_, err = cl.Revoke(ctx, 7)
		errIs(t, "an end twice", err, rpctypes.ErrGRPCLeaseNotFound)
		for _, k := range spread {
			_, err = cl.Put(ctx, k, "", clientv3.WithLease(7))
			errIs(t, "a put with an ended lease", err, rpctypes.ErrGRPCLeaseNotFound)
		}
		// Without keys an end takes no revision; the id may be used again.
		grant(7, 60)
		if rv, err := cl.Revoke(ctx, 7); err != nil || rv.Header.Revision != before+1 {
			t.Errorf("an end without keys: %v %v", rv, err)
		}
		// Nobody renews a lease of the least time, which a slow machine may need for the put alone.
		for err = rpctypes.ErrLeaseNotFound; errors.Is(err, rpctypes.ErrLeaseNotFound); {
			grant(-10, -5)
			_, err = cl.Put(ctx, "i", "moved", clientv3.WithLease(-10))
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := cl.Revoke(ctx, -9); err != nil {
			t.Fatal(err)
		}
		ls, err := cl.Leases(ctx)
		for err == nil && len(ls.Leases) > 0 && ls.Leases[0].ID == -10 && len(ls.Leases) == 1 {
			ls, err = cl.Leases(ctx) // until it expires
		}
		if err != nil || len(ls.Leases) != 0 {
			t.Errorf("leases: %v %v", ls, err)
		}
		if c.nodes[0].get("i") != "" || c.nodes[0].get("g") != "detached" {
			t.Errorf("i is %q, g is %q", c.nodes[0].get("i"), c.nodes[0].get("g"))
		}
		h := c.nodes[0].hash(0)
		for _, n := range c.nodes[1:] {
			if o := n.hash(h.Header.Revision); o.Hash != h.Hash {
				t.Errorf("hashes differ on %s", n.cfg.Name)
			}
		}
	})
}

// TestLeaseKeysAtOneRevision moves a key in each of two regions from lease to lease, both at once, and
// asks meanwhile for what is attached: both keys are, or none.
func TestLeaseKeysAtOneRevision(t *testing.T) {
	shapes(t, 3, func(t *testing.T, c *testCluster) {
		ctx := within(t)
		for id := range int64(2) {
			if _, err := pb.NewLeaseClient(c.nodes[0].conn).LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: 1 + id, TTL: 600}); err != nil {
				t.Fatal(err)
			}
		}
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				lease := clientv3.WithLease(clientv3.LeaseID(1 + i%2))
				if _, err := c.nodes[0].client().Txn(ctx).Then(clientv3.OpPut("a", "", lease), clientv3.OpPut("y", "", lease)).Commit(); err != nil {
					t.Error(err)
					return
				}
			}
		})
		full, empty := 0, 0
		for i := 0; i < 200 || (full == 0 || empty == 0) && ctx.Err() == nil; i++ {
			resp, err := pb.NewLeaseClient(c.nodes[i%3].conn).LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: 1, Keys: true})
			if err != nil {
				t.Fatal(err)
			}
			switch len(resp.Keys) {
			case 0:
				empty++
			case 2:
				full++
			default:
				t.Fatalf("attached: %q", resp.Keys)
			}
		}
		close(stop)
		wg.Wait()
	})
}

// TestLeasesExpireTogether ends many leases of one region at once, with keys in all regions: at one
// revision, in the order of keys, and only as the leader of the term.
func TestLeasesExpireTogether(t *testing.T) {
	c := newCluster(t, 3, splitAt("d", "h", "m", "s"))
	c.start(c.nodes...)
	ctx := within(t)
	n := c.nodes[0]
	r := n.n.router.Load()
	home, ok := r.LeaseHome(1)
	if !ok {
		t.Fatal("no region")
	}
	var ids []int64
	var want []string
	for id := int64(1); len(ids) < 20; id++ {
		if d, ok := r.LeaseHome(id); !ok || d.ID != home.ID {
			continue
		}
		ids = append(ids, id)
		if _, err := pb.NewLeaseClient(n.conn).LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: id, TTL: 600}); err != nil {
			t.Fatal(err)
		}
		for i := range 3 {
			k := fmt.Sprintf("%s/%d", spread[(len(ids)*5+i*4)%len(spread)], id)
			if _, err := n.kv.Put(ctx, &pb.PutRequest{Key: []byte(k), Lease: id}); err != nil {
				t.Fatal(err)
			}
			want = append(want, k)
		}
	}
	slices.Sort(want)
	before := n.put("x", "")
	status, ok := n.n.store.Status(home.ID)
	if !ok {
		t.Fatal("no replica of the leases' region")
	}
	var list []regionpb.LeaseLeft
	for _, id := range ids {
		list = append(list, leaseNow(ctx, t, r, id))
	}
	if err := r.LeaseExpire(ctx, list, status.Term+1, nil); err == nil {
		t.Error("leases were ended for the leader of another term")
	}
	// What the caller knows may be too little.
	if err := r.LeaseExpire(ctx, list[:2], status.Term, []mvcc.Span{mvcc.Key([]byte("zz"))}); err != nil {
		t.Fatal(err)
	}
	first, rest := []string{}, []string{}
	for _, k := range want {
		if strings.HasSuffix(k, fmt.Sprintf("/%d", ids[0])) || strings.HasSuffix(k, fmt.Sprintf("/%d", ids[1])) {
			first = append(first, k)
		} else {
			rest = append(rest, k)
		}
	}
	checkEnd(t, <-n.client().Watch(ctx, "", clientv3.WithPrefix(), clientv3.WithRev(before+1)), before+1, first)
	before, ids, list, want = before+1, ids[2:], list[2:], rest
	// One of them has ended meanwhile.
	if _, err := n.client().Revoke(ctx, clientv3.LeaseID(ids[3])); err != nil {
		t.Fatal(err)
	}
	want = slices.DeleteFunc(want, func(k string) bool { return strings.HasSuffix(k, fmt.Sprintf("/%d", ids[3])) })
	if err := r.LeaseExpire(ctx, list, status.Term, nil); err != nil {
		t.Fatal(err)
	}
	checkEnd(t, <-n.client().Watch(ctx, "", clientv3.WithPrefix(), clientv3.WithRev(before+2)), before+2, want)
	if ls, err := n.client().Leases(ctx); err != nil || len(ls.Leases) != 0 {
		t.Errorf("leases: %v %v", ls, err)
	}
	if err := r.LeaseExpire(ctx, list, status.Term, []mvcc.Span{home.Span}); err != nil {
		t.Errorf("what has ended: %v", err)
	}
}

// leaseNow names the lease that has an id.
func leaseNow(ctx context.Context, t *testing.T, r *router.Router, id int64) regionpb.LeaseLeft {
	t.Helper()
	rec, _, _, err := r.LeaseLook(ctx, id, false)
	if err != nil || rec == nil || rec.Grant == 0 {
		t.Fatalf("lease %d: %v, %v", id, rec, err)
	}
	return regionpb.LeaseLeft{ID: id, Grant: rec.Grant}
}

// TestLeaseGrantedAnew ends leases, and records what they have left, that a client has ended and granted
// anew meanwhile, by one command or by an attempt, alone or with others: the new ones live (L7).
func TestLeaseGrantedAnew(t *testing.T) {
	c := newCluster(t, 3, splitAt("d", "h", "m", "s"))
	c.start(c.nodes...)
	ctx := within(t)
	n := c.nodes[0]
	r := n.n.router.Load()
	leases := pb.NewLeaseClient(n.conn)
	home, ok := r.LeaseHome(1)
	if !ok {
		t.Fatal("no region")
	}
	var ids []int64
	for id := int64(1); len(ids) < 6; id++ {
		if d, ok := r.LeaseHome(id); ok && d.ID == home.ID {
			ids = append(ids, id)
		}
	}
	grant := func(id, ttl int64, keys ...string) {
		t.Helper()
		if _, err := leases.LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: id, TTL: ttl}); err != nil {
			t.Fatal(err)
		}
		for _, k := range keys {
			if _, err := n.kv.Put(ctx, &pb.PutRequest{Key: fmt.Appendf(nil, "%s/%d", k, id), Lease: id}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, keys := range map[string][]string{"no keys": nil, "everywhere": spread[:]} {
		var old []regionpb.LeaseLeft
		for _, id := range ids {
			grant(id, 600, keys...)
			old = append(old, leaseNow(ctx, t, r, id))
			old[len(old)-1].Remaining = 5
		}
		for _, id := range ids[:4] {
			if _, err := leases.LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: id}); err != nil {
				t.Fatal(err)
			}
			grant(id, 700, keys...)
		}
		if err := r.LeaseCheckpoint(ctx, old, 0); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, list := range [...][]regionpb.LeaseLeft{old[:1], old[1:3], old[3:5]} {
			if err := r.LeaseExpire(ctx, list, 0, nil); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		for i, id := range ids {
			rec, attached, _, err := r.LeaseLook(ctx, id, true)
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case i == 4: // it was ended, together with one that had been granted anew
				if rec != nil || len(attached) != 0 {
					t.Errorf("%s: %v, with %q, has not ended", name, rec, attached)
				}
				continue
			case i == 5: // the old one still
				if rec == nil || rec.TTL != 600 || rec.Remaining != 5 {
					t.Errorf("%s: %v", name, rec)
				}
			case rec == nil || rec.TTL != 700 || rec.Remaining != 0 || rec.Grant == old[i].Grant:
				t.Errorf("%s: lease %d, granted anew, is %v", name, id, rec)
			}
			if len(attached) != len(keys) {
				t.Errorf("%s: lease %d has %q", name, id, attached)
			}
			if _, err := leases.LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: id}); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestLeaseEndRaces ends leases while keys are attached to them from everywhere: whatever was
// acknowledged before the end is gone, and nothing is attached after it.
func TestLeaseEndRaces(t *testing.T) {
	c := newCluster(t, 3, splitAt("d", "h", "m", "s"))
	c.start(c.nodes...)
	ctx := within(t)
	for round := range 6 {
		id := clientv3.LeaseID(100 + round)
		if _, err := pb.NewLeaseClient(c.nodes[0].conn).LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: int64(id), TTL: 600}); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		begun := make(chan struct{}, 100)
		for w := range 6 {
			wg.Go(func() {
				for i := 0; ; i++ {
					k := fmt.Sprintf("%c%d/%d", "aejnt"[(i+w)%5], round, i)
					_, err := c.nodes[w%3].kv.Put(ctx, &pb.PutRequest{Key: []byte(k), Lease: int64(id)})
					if err == nil {
						select {
						case begun <- struct{}{}:
						default:
						}
						continue
					}
					errIs(t, "put", err, rpctypes.ErrGRPCLeaseNotFound)
					return
				}
			})
		}
		for range 20 {
			<-begun
		}
		if _, err := pb.NewLeaseClient(c.nodes[round%3].conn).LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: int64(id)}); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		resp, err := c.nodes[1].kv.Range(ctx, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
		if err != nil || resp.Count != 0 {
			t.Fatalf("round %d: %d keys are left: %v %v", round, resp.GetCount(), resp.GetKvs(), err)
		}
	}
}

// TestLeaseLeaders lets nodes go away while leases are renewed: none ends, and those that nobody
// renews end.
func TestLeaseLeaders(t *testing.T) {
	t.Parallel() // it mostly waits
	shapes(t, 3, func(t *testing.T, c *testCluster) {
		ctx := within(t)
		cl := c.nodes[2].client()
		var kept, left []clientv3.LeaseID
		for i := range 10 {
			g, err := cl.Grant(ctx, 6)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := cl.Put(ctx, spread[i], "", clientv3.WithLease(g.ID)); err != nil {
				t.Fatal(err)
			}
			if i%2 == 0 {
				kept = append(kept, g.ID)
				ch, err := cl.KeepAlive(ctx, g.ID)
				if err != nil {
					t.Fatal(err)
				}
				go func() {
					for range ch {
					}
				}()
			} else {
				left = append(left, g.ID)
			}
		}
		c.restart(c.nodes[0])
		c.restart(c.nodes[1])
		c.eventually("leases that nobody renews end", func() bool {
			for _, id := range left {
				if resp, err := cl.TimeToLive(ctx, id); err != nil || resp.TTL != -1 {
					return false
				}
			}
			return true
		})
		for _, id := range kept {
			if resp, err := cl.TimeToLive(ctx, id); err != nil || resp.TTL < 0 {
				t.Errorf("lease %x: %v %v", id, resp, err)
			}
		}
		for i := range 10 {
			resp, err := cl.Get(ctx, spread[i])
			if err != nil || len(resp.Kvs) != (i+1)%2 {
				t.Errorf("%s: %v %v", spread[i], resp, err)
			}
		}
	})
}

// TestSessions runs clientv3's mutexes and elections, which are sessions with leases and watches.
func TestSessions(t *testing.T) {
	t.Parallel() // it mostly waits
	shapes(t, 3, func(t *testing.T, c *testCluster) {
		ctx := within(t)
		var wg sync.WaitGroup
		inside, total := 0, 0
		for w := range 6 {
			wg.Go(func() {
				s, err := concurrency.NewSession(c.nodes[w%3].client(), concurrency.WithTTL(60), concurrency.WithContext(ctx))
				if err != nil {
					t.Error(err)
					return
				}
				m := concurrency.NewMutex(s, "/lock")
				for range 3 {
					if err := m.Lock(ctx); err != nil {
						t.Error(err)
						return
					}
					if inside++; inside != 1 {
						t.Errorf("%d holders", inside)
					}
					total++
					inside--
					if err := m.Unlock(ctx); err != nil {
						t.Error(err)
						return
					}
				}
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if total != 18 {
			t.Errorf("%d turns", total)
		}
		s1, err1 := concurrency.NewSession(c.nodes[0].client(), concurrency.WithTTL(5))
		s2, err2 := concurrency.NewSession(c.nodes[1].client(), concurrency.WithTTL(60))
		if err1 != nil || err2 != nil {
			t.Fatal(err1, err2)
		}
		e1, e2 := concurrency.NewElection(s1, "/e"), concurrency.NewElection(s2, "/e")
		if err := e1.Campaign(ctx, "one"); err != nil {
			t.Fatal(err)
		}
		won := make(chan error, 1)
		go func() { won <- e2.Campaign(ctx, "two") }()
		s1.Orphan() // its lease ends by itself
		began := time.Now()
		left, err := c.nodes[1].client().TimeToLive(ctx, s1.Lease())
		if err != nil {
			t.Fatal(err)
		}
		if err := <-won; err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < time.Duration(left.TTL)*time.Second {
			t.Errorf("the second won after %v, and the first's lease had %d s", took, left.TTL)
		}
		if l, err := e2.Leader(ctx); err != nil || string(l.Kvs[0].Value) != "two" {
			t.Errorf("leader %v %v", l, err)
		}
		if err := s2.Close(); err != nil {
			t.Error(err)
		}
	})
}
