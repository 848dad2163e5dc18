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

type grantingStores struct {
	Stores
	released int
}

func (s *grantingStores) Lock(context.Context, pdpb.Descriptor, *regionpb.LockRequest) (regionpb.LockID, error) {
	return regionpb.LockID{Term: 1, Seq: 1}, nil
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

func (s *busyStores) Lock(_ context.Context, d pdpb.Descriptor, req *regionpb.LockRequest) (regionpb.LockID, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asks = append(s.asks, fmt.Sprintf("%d/%d now=%v age=%d", d.ID, req.Attempt, req.Now, req.Age))
	if req.Now && d.ID == 2 {
		return regionpb.LockID{}, regionpb.ErrorOf(regionpb.LockBusy)
	}
	return regionpb.LockID{Term: 1, Seq: 1}, nil
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
