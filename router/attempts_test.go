package router

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// grantingOracle and grantingStores are a store of one region that grants every lock.
type grantingOracle struct {
	Oracle
	last pdpb.AttemptID
}

func (o *grantingOracle) Regions() []pdpb.Descriptor { return []pdpb.Descriptor{{ID: 1, Epoch: 1}} }
func (o *grantingOracle) ReadPoint(context.Context) (pdpb.ReadPoint, error) {
	return pdpb.ReadPoint{Cut: 1, Rev: 1}, nil
}
func (o *grantingOracle) Attempt(context.Context, bool) (pdpb.AttemptID, error) {
	o.last++
	return o.last, nil
}

// splitOracle has a second region from "m" on.
type splitOracle struct{ grantingOracle }

func (*splitOracle) Regions() []pdpb.Descriptor {
	return []pdpb.Descriptor{{ID: 1, Epoch: 1, Span: mvcc.Span{End: []byte("m")}}, {ID: 2, Epoch: 1, Span: mvcc.Span{Start: []byte("m")}}}
}

type grantingStores struct {
	Stores
	released int
}

func (s *grantingStores) Lock(context.Context, pdpb.Descriptor, *regionpb.LockRequest) (regionpb.LockGrant, error) {
	return regionpb.LockGrant{ID: regionpb.LockID{Term: 1, Seq: 1}}, nil
}
func (s *grantingStores) Release(pdpb.Descriptor, *regionpb.ReleaseRequest) { s.released++ }

// wantingJob always finds its locks to be of too little; the first news times it finds out why.
type wantingJob struct {
	news, evaluated int
}

func (j *wantingJob) participants(_ context.Context, regions []pdpb.Descriptor) ([]participant, error) {
	return []participant{{region: regions[0], locks: []regionpb.LockSpan{{Span: mvcc.Key([]byte("a"))}}}}, nil
}

func (j *wantingJob) evaluate(context.Context, point, []participant) (outcome, error) {
	if j.evaluated++; j.evaluated > 1000 {
		return outcome{}, errors.New("a thousand attempts")
	}
	return outcome{}, fmt.Errorf("%w: still", errAgain)
}

func (j *wantingJob) between(context.Context) (bool, error) {
	j.news--
	return j.news >= 0, nil
}

// TestAttemptsPause: attempts that keep finding their locks insufficient pause in between, longer and
// longer; those that have learnt what was missing go on at once.
func TestAttemptsPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &grantingStores{}
		r := New(&grantingOracle{}, s, Options{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		j := &wantingJob{news: 50}
		if _, err := r.attempts(ctx, j); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		// 50 at once, then pauses of 1 to 100 ms in a second.
		if j.evaluated < 60 || j.evaluated > 80 || s.released != j.evaluated {
			t.Errorf("%d attempts in a second, %d released", j.evaluated, s.released)
		}
	})
}

// busyStores has another attempt in the way of everybody who would not wait for it.
type busyStores struct {
	grantingStores
	mu   sync.Mutex
	asks []string
}

func (s *busyStores) Lock(_ context.Context, d pdpb.Descriptor, req *regionpb.LockRequest) (regionpb.LockGrant, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asks = append(s.asks, fmt.Sprintf("%d/%d now=%v age=%d", d.ID, req.Attempt, req.Now, req.Age))
	if req.Now && d.ID == 2 {
		return regionpb.LockGrant{}, regionpb.ErrorOf(regionpb.LockBusy)
	}
	return regionpb.LockGrant{ID: regionpb.LockID{Term: 1, Seq: 1}}, nil
}

func (s *busyStores) Release(pdpb.Descriptor, *regionpb.ReleaseRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.released++
}

// twoParts is a job with two participants that finds nothing to do.
type twoParts struct{}

func (twoParts) participants(context.Context, []pdpb.Descriptor) ([]participant, error) {
	return []participant{{region: pdpb.Descriptor{ID: 1}}, {region: pdpb.Descriptor{ID: 2}}}, nil
}
func (twoParts) evaluate(context.Context, point, []participant) (outcome, error) {
	return outcome{fill: func(mvcc.Revision) *pb.TxnResponse { return &pb.TxnResponse{} }}, nil
}
func (twoParts) between(context.Context) (bool, error) { return false, nil }

// TestEagerAttempt: locks are asked for everywhere at once; with somebody in the way a second attempt
// of the same age follows at once, and waits region after region.
func TestEagerAttempt(t *testing.T) {
	s := &busyStores{}
	if _, err := New(&grantingOracle{}, s, Options{}).attempts(t.Context(), twoParts{}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(s.asks[:2]) // at the same time
	want := []string{"1/1 now=true age=1", "2/1 now=true age=1", "1/2 now=false age=1", "2/2 now=false age=1"}
	if !slices.Equal(s.asks, want) || s.released != 4 {
		t.Errorf("asked %q, released %d", s.asks, s.released)
	}
}

// leaderlessStores are two regions of which the second has no leader the first times. What the eager
// attempt does, the first one, is not written down.
type leaderlessStores struct {
	grantingStores
	mu      sync.Mutex
	without int
	events  []string
}

func (s *leaderlessStores) event(attempt pdpb.AttemptID, format string, args ...any) {
	if attempt > 1 {
		s.events = append(s.events, fmt.Sprintf(format, args...))
	}
}

func (s *leaderlessStores) Lock(_ context.Context, d pdpb.Descriptor, req *regionpb.LockRequest) (regionpb.LockGrant, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d.ID == 2 && s.without > 0 {
		s.without--
		s.event(req.Attempt, "no leader")
		return regionpb.LockGrant{}, regionpb.ErrorOf(regionpb.NotLeader)
	}
	s.event(req.Attempt, "lock %d", d.ID)
	return regionpb.LockGrant{ID: regionpb.LockID{Term: 1, Seq: 1}}, nil
}

func (s *leaderlessStores) Release(d pdpb.Descriptor, req *regionpb.ReleaseRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.event(req.Attempt, "release %d", d.ID)
}

// TestLocksWithoutLeader: while a region has no leader, an attempt does not hold the locks of others.
func TestLocksWithoutLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &leaderlessStores{without: 3}
		began := time.Now()
		if _, err := New(&grantingOracle{}, s, Options{}).attempts(t.Context(), twoParts{}); err != nil {
			t.Fatal(err)
		}
		want := []string{"lock 1", "no leader", "release 1", "release 2", "lock 1", "no leader", "release 1", "release 2",
			"lock 1", "lock 2", "release 1", "release 2"}
		if took := time.Since(began); !slices.Equal(s.events, want) || took == 0 {
			t.Errorf("in %v: %q, want %q after pauses", took, s.events, want)
		}
	})
}

// slowStores take their time over locks, and hear of their end when nobody waits any more.
type slowStores struct {
	grantingStores
	mu     sync.Mutex
	asking int
}

func (s *slowStores) Lock(ctx context.Context, _ pdpb.Descriptor, _ *regionpb.LockRequest) (regionpb.LockGrant, error) {
	s.mu.Lock()
	s.asking++
	s.mu.Unlock()
	<-ctx.Done()
	time.Sleep(time.Millisecond) // fake time: the request is on its way a moment longer
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asking--
	return regionpb.LockGrant{}, ctx.Err()
}

func (s *slowStores) Release(pdpb.Descriptor, *regionpb.ReleaseRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.released++; s.asking > 0 {
		s.released = -10
	}
}

// TestReleaseBehindRequest: when the client gives up, a release comes behind the request for the lock;
// one that overtakes it would leave the lock granted to nobody.
func TestReleaseBehindRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &slowStores{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := New(&grantingOracle{}, s, Options{}).attempts(ctx, twoParts{})
		if !errors.Is(err, context.DeadlineExceeded) || s.released != 2 {
			t.Errorf("%v, released %d", err, s.released)
		}
	})
}

// hangingStores grant locks and never answer a prepare.
type hangingStores struct{ grantingStores }

func (*hangingStores) Prepare(ctx context.Context, _ pdpb.Descriptor, _ *regionpb.PrepareRequest) (mvcc.Revision, error) {
	<-ctx.Done()
	return 0, ctx.Err()
}

// abandonedOracle notes what is abandoned.
type abandonedOracle struct {
	splitOracle
	abandoned []pdpb.AttemptID
}

func (o *abandonedOracle) Abandon(id pdpb.AttemptID) { o.abandoned = append(o.abandoned, id) }

// writingJob puts a key in each of two regions.
type writingJob struct{ twoParts }

func (writingJob) evaluate(context.Context, point, []participant) (outcome, error) {
	return outcome{effects: []regionpb.Effect{{Key: []byte("a")}, {Key: []byte("z")}}}, nil
}

// TestAbandoned: what a client left behind that gave up after the prepares does not stay locked until a
// region misses the decision.
func TestAbandoned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &abandonedOracle{}
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		_, err := New(o, &hangingStores{}, Options{}).attempts(ctx, writingJob{})
		if !errors.Is(err, context.DeadlineExceeded) || !slices.Equal(o.abandoned, []pdpb.AttemptID{1}) {
			t.Errorf("%v, abandoned %v", err, o.abandoned)
		}
	})
}

// decidingStores are two regions: the second asks to be registered for a lease that does not exist.
type decidingStores struct {
	grantingStores
	asked int
}

func (s *decidingStores) Write(_ context.Context, _ <-chan struct{}, _ pdpb.Descriptor, w *regionpb.WriteRequest) (*pb.TxnResponse, error) {
	if w.Lease != nil {
		return nil, regionpb.ErrorOf(regionpb.LeaseNotFound)
	}
	s.asked++
	return nil, regionpb.NotRegistered(regionpb.LeaseToken{Lease: 7, Grant: regionpb.LockID{Term: 1, Seq: 1}})
}

func (s *decidingStores) Read(_ context.Context, _ pdpb.Descriptor, req *regionpb.ReadRequest) (*regionpb.ReadResponse, error) {
	return &regionpb.ReadResponse{}, nil
}

// TestMissingLeaseOfOtherBranch: a region asks to be registered for a lease on the way that a
// transaction takes; by the time at which the lease is found not to exist it may take the other.
func TestMissingLeaseOfOtherBranch(t *testing.T) {
	put := &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("z"), Lease: 7}}}
	is := &pb.Compare{Key: []byte("z"), Target: pb.Compare_VERSION, Result: pb.Compare_EQUAL, TargetUnion: &pb.Compare_Version{Version: 1}}
	none := &pb.Compare{Key: []byte("z"), Target: pb.Compare_VERSION, Result: pb.Compare_EQUAL, TargetUnion: &pb.Compare_Version{}}
	for _, c := range []struct {
		name     string
		req      *pb.TxnRequest
		notFound bool
	}{
		{"the other branch", &pb.TxnRequest{Compare: []*pb.Compare{is}, Success: []*pb.RequestOp{put}}, false},
		{"the other inner branch", &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{
			Compare: []*pb.Compare{is}, Success: []*pb.RequestOp{put}}}}}}, false},
		{"this branch", &pb.TxnRequest{Compare: []*pb.Compare{none}, Success: []*pb.RequestOp{put}}, true},
		{"no branch", &pb.TxnRequest{Success: []*pb.RequestOp{put}}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &decidingStores{}
			resp, err := New(&splitOracle{}, s, Options{}).Txn(t.Context(), c.req)
			if found := codeOf(err) != regionpb.LeaseNotFound; found == c.notFound || found && (err != nil || resp.Header.Revision != 1) || s.asked != 1 {
				t.Errorf("%v, %v, asked %d times", resp, err, s.asked)
			}
		})
	}
}
