package router_test

import (
	"errors"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/region/regionpb"
	"braid/router"
	"braid/router/routertest"
)

// received is what an export gave, and how often it began.
type received struct {
	begun  int
	rev    mvcc.Revision
	kvs    []*mvccpb.KeyValue
	leases map[int64]int64 // to what is left
}

func (r *received) Begin(rev mvcc.Revision) error {
	*r = received{begun: r.begun + 1, rev: rev, leases: map[int64]int64{}}
	return nil
}

func (r *received) Keys(page []*mvccpb.KeyValue) error {
	r.kvs = append(r.kvs, page...)
	return nil
}

var errTwice = errors.New("a lease came twice")

func (r *received) Lease(id, ttl, remaining int64) error {
	if _, ok := r.leases[id]; ok || ttl != 60 {
		return errTwice
	}
	r.leases[id] = remaining
	return nil
}

// TestExportLeases reads records of leases, which change between the two readings, around keys that are
// attached to some.
func TestExportLeases(t *testing.T) {
	for _, tc := range []struct {
		name     string
		readings [][]int64 // leases that there are, the last one for all later readings
		begun    int
		want     []int64
	}{
		{"no change", [][]int64{{1, 2}}, 1, []int64{1, 2}},
		{"granted after the point", [][]int64{{1}, {1, 2}}, 1, []int64{1, 2}},
		{"ended after the point with a key", [][]int64{{1, 2}, {2}}, 1, []int64{1, 2}},
		{"ended after the point without a key", [][]int64{{1, 2}, {1}}, 1, []int64{1}},
		{"never seen", [][]int64{{}, {}, {1}}, 2, []int64{1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := routertest.New("m")
			n := 0
			s.Leases = func() []regionpb.Lease {
				var list []regionpb.Lease
				for _, id := range tc.readings[min(n, len(tc.readings)-1)] {
					list = append(list, regionpb.Lease{ID: id, Record: &regionpb.LeaseRecord{TTL: 60, Remaining: 10 * id}})
				}
				n++
				return list
			}
			r := router.New(s, s, router.Options{})
			for _, key := range []string{"a", "z"} {
				if _, err := r.Put(t.Context(), &pb.PutRequest{Key: []byte(key)}); err != nil {
					t.Fatal(err)
				}
			}
			s.Attach("z", 1)
			got := &received{}
			if err := r.Export(t.Context(), got); err != nil {
				t.Fatal(err)
			}
			if got.begun != tc.begun || got.rev != 3 || len(got.kvs) != 2 || len(got.leases) != len(tc.want) {
				t.Errorf("%+v", got)
			}
			for _, id := range tc.want {
				if got.leases[id] != 10*id {
					t.Errorf("lease %d: %v", id, got.leases)
				}
			}
		})
	}
}

// TestExportOfNobodysLease ends: the leases are never what the keys say.
func TestExportOfNobodysLease(t *testing.T) {
	s := routertest.New()
	r := router.New(s, s, router.Options{})
	if _, err := r.Put(t.Context(), &pb.PutRequest{Key: []byte("a")}); err != nil {
		t.Fatal(err)
	}
	s.Attach("a", 1)
	if err := r.Export(t.Context(), &received{}); !errors.Is(err, router.ErrOvertaken) {
		t.Error(err)
	}
}

// TestExportEndsWithItsReceiver passes the receiver's error on.
func TestExportEndsWithItsReceiver(t *testing.T) {
	s := routertest.New()
	s.Leases = func() []regionpb.Lease {
		return []regionpb.Lease{{ID: 1, Record: &regionpb.LeaseRecord{TTL: 1}}}
	}
	r := router.New(s, s, router.Options{})
	if err := r.Export(t.Context(), &received{}); !errors.Is(err, errTwice) {
		t.Error(err)
	}
}
