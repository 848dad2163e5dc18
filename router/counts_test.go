package router_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/pd/pdpb"
	"braid/region/regionpb"
	"braid/router"
	"braid/router/routertest"
)

// countedStores notes how often keys are counted.
type countedStores struct {
	router.Stores
	counts atomic.Int64 // regions are read side by side
}

func (s *countedStores) Read(ctx context.Context, d pdpb.Descriptor, req *regionpb.ReadRequest) (*regionpb.ReadResponse, error) {
	if req.WantCount {
		s.counts.Add(1)
	}
	return s.Stores.Read(ctx, d, req)
}

// TestPagesCountOnce pages through a pinned revision while the store changes: every page's count is
// exact, and only the first one costs a count. More pagers than are remembered pay again and are
// right as well.
func TestPagesCountOnce(t *testing.T) {
	store := routertest.New("k3", "k6")
	s := &countedStores{Stores: store}
	r := router.New(store, s, router.Options{})
	ctx := t.Context()
	put := func(key string) {
		if _, err := r.Put(ctx, &pb.PutRequest{Key: []byte(key)}); err != nil {
			t.Fatal(err)
		}
	}
	const keys, limit = 100, 7
	for i := range keys {
		put(fmt.Sprintf("k%02d", i))
	}
	page := func(start, end []byte, rev int64) *pb.RangeResponse {
		resp, err := r.Range(ctx, &pb.RangeRequest{Key: start, RangeEnd: end, Limit: limit, Revision: rev})
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	for _, end := range []string{"l", "\x00"} {
		start, rev, left := []byte("k"), int64(0), int64(-1)
		for more := true; more; {
			before := s.counts.Load()
			resp := page(start, []byte(end), rev)
			if left < 0 {
				left = resp.Count
			} else if s.counts.Load() != before {
				t.Fatalf("the page from %q was counted", start)
			}
			if resp.Count != left {
				t.Fatalf("the page from %q has the count %d, want %d", start, resp.Count, left)
			}
			if rev == 0 {
				rev = resp.Header.Revision
			}
			left -= int64(len(resp.Kvs))
			start = append(resp.Kvs[len(resp.Kvs)-1].Key, 0)
			more = resp.More
			put("k50/" + string(start[:3])) // not at rev
		}
		if left != 0 {
			t.Fatalf("%d keys were never returned", left)
		}
	}
	// Another revision, another end and another start are other questions.
	put("k60/new")
	now := page([]byte("k"), []byte("l"), 0)
	next := append(now.Kvs[limit-1].Key, 0)
	if other := page(next, []byte("l"), now.Header.Revision-1); other.Count == now.Count-limit {
		t.Errorf("%d keys also one revision earlier", other.Count)
	}
	if shorter := page(next, []byte("k9"), now.Header.Revision); shorter.Count >= now.Count-limit {
		t.Errorf("%d keys also in a shorter range", shorter.Count)
	}
	// Far more pagers than are remembered.
	for rev := now.Header.Revision - 20; rev <= now.Header.Revision; rev++ {
		for i := range 95 {
			start := fmt.Appendf(nil, "k%02d", i)
			first := page(start, []byte("k99~"), rev)
			second := page(append(first.Kvs[limit-1].Key, 0), []byte("k99~"), rev)
			if i < 80 && second.Count != first.Count-limit {
				t.Fatalf("%d keys after %d at %d", second.Count, first.Count, rev)
			}
			if !first.More {
				break
			}
		}
	}
}
