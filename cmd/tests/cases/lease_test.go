package cases

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc/codes"
)

// leases speaks to a node without retries.
func (s *store) leases(node int) pb.LeaseClient { return pb.NewLeaseClient(s.conns[node]) }

func (s *store) grant(id, ttl int64) {
	s.t.Helper()
	if _, err := s.leases(0).LeaseGrant(within(s.t, time.Minute), &pb.LeaseGrantRequest{ID: id, TTL: ttl}); err != nil {
		s.t.Fatalf("lease %d: %v", id, err)
	}
}

// renew renews a lease once.
func (s *store) renew(ctx context.Context, id int64) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	stream, err := s.leases(0).LeaseKeepAlive(ctx)
	if err != nil {
		return err
	}
	if err := stream.Send(&pb.LeaseKeepAliveRequest{ID: id}); err != nil {
		return err
	}
	r, err := stream.Recv()
	if err == nil && r.TTL == 0 {
		err = fmt.Errorf("lease %d has ended", id)
	}
	return err
}

// inParallel calls do for 0 to n-1 from several goroutines and returns the first error.
func inParallel(n, workers int, do func(i int) error) error {
	var next atomic.Int64
	var first atomic.Pointer[error]
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(n) && first.Load() == nil; i = next.Add(1) - 1 {
				if err := do(int(i)); err != nil {
					first.CompareAndSwap(nil, &err)
				}
			}
		})
	}
	wg.Wait()
	if err := first.Load(); err != nil {
		return *err
	}
	return nil
}

// TestLeaseOfManyKeys: the keys of a lease that expires are deleted at one revision, in order, and
// nobody sees some of them.
//
// https://github.com/etcd-io/etcd/issues/9294, https://github.com/etcd-io/etcd/pull/6559
func TestLeaseOfManyKeys(t *testing.T) {
	perLayout(t, func(t *testing.T, l layout) {
		s := start(t, 3, l)
		n := scaled(3000, 20_000)
		const id, ttl = 7, 15
		s.grant(id, ttl)
		renewing := make(chan struct{})
		var owner sync.WaitGroup
		owner.Go(func() {
			for alive := true; alive; alive = waitOr(renewing, time.Second) {
				if err := s.renew(t.Context(), id); err != nil {
					t.Error(err)
					return
				}
			}
		})
		key := func(i int) []byte { return fmt.Appendf(nil, "%s/%06d", threeKeys[i%3], i) }
		if err := inParallel(n, 64, func(i int) error {
			_, err := s.kv(i%3).Put(t.Context(), &pb.PutRequest{Key: key(i), Lease: id})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		w := s.watch(within(t, 2*time.Minute), 1, unlimited)
		w.create(&pb.WatchCreateRequest{Key: []byte{0}, RangeEnd: []byte{0}, Fragment: true})
		w.created()

		stop, bad := make(chan struct{}), make(chan string, 3)
		var reads sync.WaitGroup
		for node := range 3 {
			reads.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					r, err := s.kv(node).Range(t.Context(), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, CountOnly: true})
					if err == nil && r.Count != 0 && r.Count != int64(n) {
						bad <- fmt.Sprintf("node %d counted %d keys of %d", node, r.Count, n)
						return
					}
				}
			})
		}
		close(renewing)
		owner.Wait()
		renewed := time.Now()
		if err := s.renew(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		var last []byte
		var rev int64
		for got := 0; got < n; {
			r := w.next()
			if r.Canceled {
				t.Fatalf("watch ended: %v", r.CancelReason)
			}
			if got == 0 && time.Since(renewed) < ttl*time.Second {
				t.Errorf("the lease ended %v after it was renewed", time.Since(renewed))
			}
			got += len(r.Events)
			for _, e := range r.Events {
				if rev == 0 {
					rev = e.Kv.ModRevision
				}
				if e.Type != mvccpb.DELETE || e.Kv.ModRevision != rev || bytes.Compare(e.Kv.Key, last) <= 0 {
					t.Fatalf("after %q: %s, the first was at %d", last, event(e), rev)
				}
				last = e.Kv.Key
			}
			if r.Fragment != (got < n) {
				t.Fatalf("fragment=%v after %d of %d events", r.Fragment, got, n)
			}
		}
		close(stop)
		reads.Wait()
		select {
		case msg := <-bad:
			t.Error(msg)
		default:
		}
		info, err := s.leases(0).LeaseTimeToLive(within(t, time.Minute), &pb.LeaseTimeToLiveRequest{ID: id, Keys: true})
		if err != nil || info.TTL != -1 || len(info.Keys) != 0 {
			t.Errorf("the lease that ended: %v %v", info, err)
		}
		if c := s.get(2, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, CountOnly: true}).Count; c != 0 {
			t.Errorf("%d keys are left", c)
		}
	})
}

// TestReattach: a key belongs to the lease of its last put.
//
// https://github.com/etcd-io/etcd/issues/8185
func TestReattach(t *testing.T) {
	perLayout(t, func(t *testing.T, l layout) {
		s := start(t, 3, l)
		s.grant(1, 2)
		s.grant(2, 60)
		put := func(key string, lease int64) {
			t.Helper()
			if _, err := s.kv(1).Put(within(t, time.Minute), &pb.PutRequest{Key: []byte(key), Lease: lease}); err != nil {
				t.Fatal(err)
			}
		}
		lives := func(when string) {
			t.Helper()
			for i := range threeKeys {
				if s.get(i, &pb.RangeRequest{Key: []byte(threeKeys[i])}).Count != 1 {
					t.Errorf("%s is gone %s", threeKeys[i], when)
				}
			}
		}
		for _, k := range threeKeys {
			put(k, 1)
			put(k, 2)
		}
		for end := time.Now().Add(time.Minute); ; pause(t, 100*time.Millisecond) {
			r, err := s.leases(0).LeaseTimeToLive(within(t, time.Minute), &pb.LeaseTimeToLiveRequest{ID: 1})
			if err != nil {
				t.Fatal(err)
			}
			if r.TTL == -1 {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("a lease of 2 s has %d s left", r.TTL)
			}
		}
		lives("with its first lease")
		info, err := s.leases(2).LeaseTimeToLive(within(t, time.Minute), &pb.LeaseTimeToLiveRequest{ID: 2, Keys: true})
		if err != nil || len(info.Keys) != len(threeKeys) {
			t.Fatalf("the second lease has %q: %v", info.GetKeys(), err)
		}
		for i, k := range info.Keys {
			if string(k) != threeKeys[i] {
				t.Errorf("key %d of the lease is %q", i, k)
			}
		}
		for _, k := range threeKeys {
			put(k, 0)
		}
		if _, err := s.leases(1).LeaseRevoke(within(t, time.Minute), &pb.LeaseRevokeRequest{ID: 2}); err != nil {
			t.Fatal(err)
		}
		lives("with a lease it had left")
		for _, k := range threeKeys {
			_, err := s.kv(0).Put(within(t, time.Minute), &pb.PutRequest{Key: []byte(k), Lease: 999})
			if !refused(err, codes.NotFound, "etcdserver: requested lease not found") {
				t.Errorf("put %s with no lease: %v", k, err)
			}
			_, err = s.kv(0).Put(within(t, time.Minute), &pb.PutRequest{Key: []byte(k + "2"), IgnoreLease: true})
			if !refused(err, codes.InvalidArgument, "etcdserver: key not found") {
				t.Errorf("put %s2 with the lease it has: %v", k, err)
			}
		}
	})
}

// TestLeaseStorm: many leases whose time is up together end soon, none early, and writers hardly
// notice.
//
// https://github.com/etcd-io/etcd/issues/9360, https://github.com/etcd-io/etcd/issues/12105,
// https://github.com/etcd-io/etcd/issues/9496
func TestLeaseStorm(t *testing.T) {
	perLayout(t, func(t *testing.T, l layout) { leaseStorm(t, l, false) })
}

// TestLeaseStormMoves is the same with leaders that move just before the time is up. Every lease has all
// of its time again then.
func TestLeaseStormMoves(t *testing.T) {
	perLayout(t, func(t *testing.T, l layout) { leaseStorm(t, l, true) })
}

func leaseStorm(t *testing.T, l layout, moves bool) {
	s := start(t, 3, l)
	n := scaled(3000, 100_000)
	ttl := time.Duration(scaled(8, 20)) * time.Second
	// Granting takes longer than a lease may live: each is granted for as long as is missing to the
	// same moment, so that all are due within a second of it.
	longest := ttl + time.Duration(scaled(3, 100))*time.Second
	due := time.Now().Add(longest)
	until := make([]time.Time, n) // at least; the moment before the grant was asked for, and its time
	key := func(i int) []byte { return fmt.Appendf(nil, "%s/lease/%06d", threeKeys[i%3], i) }
	if err := inParallel(n, 128, func(i int) error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		now := time.Now()
		left := due.Sub(now).Round(time.Second) + time.Second
		if left < 5*time.Second {
			return fmt.Errorf("only %d leases were granted in time", i)
		}
		until[i] = now.Add(left)
		id := int64(i + 1)
		if _, err := s.leases(i%3).LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: id, TTL: int64(left / time.Second)}); err != nil {
			return err
		}
		_, err := s.kv((i/3)%3).Put(ctx, &pb.PutRequest{Key: key(i), Lease: id})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d leases were made in time, %v before they are due", n, time.Until(due).Round(time.Second))
	w := s.watch(within(t, 6*time.Minute), 1, unlimited)
	for _, k := range threeKeys {
		w.create(&pb.WatchCreateRequest{Key: []byte(k + "/lease/"), RangeEnd: []byte(k + "/lease0")})
		w.created()
	}
	load := s.write(64, "value")
	pause(t, max(0, time.Until(due)-3*time.Second))
	quietTo := time.Now()
	last := due.Add(time.Second) // the last lease is due
	if moves {
		took := s.moveRegions()
		t.Logf("all regions were moved in %v", took)
		if took > bound(5*time.Second) {
			t.Errorf("moving the regions took %v", took)
		}
		last = time.Now().Add(longest + 2*time.Second) // and what a new leader adds
	}
	revs := map[int64]bool{}
	var end time.Time
	for got := 0; got < n; {
		r := w.next()
		if r.Canceled {
			t.Fatalf("watch ended: %v", r.CancelReason)
		}
		end = time.Now()
		got += len(r.Events)
		for _, e := range r.Events {
			var i int
			if _, err := fmt.Sscanf(string(e.Kv.Key[len("b/lease/"):]), "%d", &i); err != nil || e.Type != mvccpb.DELETE {
				t.Fatalf("%s: %v", event(e), err)
			}
			if end.Before(until[i]) {
				t.Errorf("%s ended %v early", e.Kv.Key, until[i].Sub(end))
			}
			revs[e.Kv.ModRevision] = true
		}
	}
	late := end.Sub(last)
	pause(t, time.Second)
	load.end()
	load.check(t)
	quiet := load.took(quietTo.Add(-time.Duration(scaled(2, 5))*time.Second), quietTo)
	storm := load.took(due, end)
	t.Logf("the last key was gone %v after its time, %d revisions; puts took %v, before %v", late, len(revs), storm, quiet)
	if late > bound(5*time.Second) {
		t.Errorf("the last key was gone %v after its time", late)
	}
	if storm > bound(2*max(quiet, 5*time.Millisecond)) {
		t.Errorf("puts take %v, it was %v", storm, quiet)
	}
	r, err := s.leases(2).LeaseLeases(within(t, time.Minute), &pb.LeaseLeasesRequest{})
	if err != nil || len(r.Leases) != 0 {
		t.Errorf("%d leases are left: %v", len(r.GetLeases()), err)
	}
}

// moveRegions moves the leader of every region to the next node and returns how long that took.
func (s *store) moveRegions() time.Duration {
	s.t.Helper()
	before := s.settled(0)
	began := time.Now()
	for _, r := range before.regions {
		if err := s.braid(r.node, nil, "region", "transfer", fmt.Sprint(r.id), s.Nodes[(r.node+1)%len(s.Nodes)].Name); err != nil {
			s.t.Fatal(err)
		}
	}
	for after := s.settled(0); slices.Equal(after.regions, before.regions); after = s.settled(0) {
		pause(s.t, 50*time.Millisecond)
	}
	return time.Since(began)
}
