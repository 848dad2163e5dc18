package router_test

import (
	"fmt"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/router"
	"braid/router/routertest"
)

// TestHashIsEtcds compares with what etcd 3.7.3's storage computes for the same history.
func TestHashIsEtcds(t *testing.T) {
	type want struct {
		rev   int64
		hash  uint32
		at    int64
		floor int64
		now   int64
	}
	for _, borders := range [][]string{nil, {"k1", "k3", "m"}} {
		s := routertest.New(borders...)
		r := router.New(s, s, router.Options{})
		expect := func(list ...want) {
			t.Helper()
			for _, w := range list {
				h, err := r.HashKV(t.Context(), w.rev)
				got := want{w.rev, h.Hash, int64(h.At), int64(h.Floor), int64(h.Revision)}
				if err != nil || got != w {
					t.Errorf("%d regions: got %+v (%v), want %+v", len(borders)+1, got, err, w)
				}
			}
		}
		expect(want{0, 0x40a4756d, 1, -1, 1})
		for i := range 5 {
			put(t, r, fmt.Sprintf("k%d", i), fmt.Sprintf("v%d", i))
		}
		if _, err := s.Txn(&pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestDeleteRange{
			RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte("k0"), RangeEnd: []byte("k2")}}}}}); err != nil {
			t.Fatal(err)
		}
		put(t, r, "k0", "again")
		put(t, r, "k3", "more")
		put(t, r, "m", "")
		expect(want{0, 0x7ac869de, 10, -1, 10}, want{4, 0xfbbba3e9, 4, -1, 10}, want{7, 0xde8c5b3a, 7, -1, 10}, want{-3, 0x40a4756d, -3, -1, 10})
		if _, err := r.Compact(t.Context(), &pb.CompactionRequest{Revision: 7}); err != nil {
			t.Fatal(err)
		}
		expect(want{0, 0x8ee48ae8, 10, 7, 10}, want{8, 0xbe4b2d22, 8, 7, 10}, want{9, 0xdc6fd0e2, 9, 7, 10})
	}
}

// TestHashOutlivesCompaction: at the revision of a physical compaction the hash stays what it was,
// with the floor of then, also when later compactions pass it by. The values are etcd's.
func TestHashOutlivesCompaction(t *testing.T) {
	for _, splits := range [][]string{nil, {"k1", "k3", "l"}} {
		s := routertest.New(splits...)
		r := router.New(s, s, router.Options{})
		for i := range 6 {
			put(t, r, fmt.Sprintf("k%d", i%4), fmt.Sprintf("v%d", i))
		}
		before := func(rev int64) router.KVHash {
			h, err := r.HashKV(t.Context(), rev)
			if err != nil {
				t.Fatal(err)
			}
			return h
		}
		at5, at6 := before(5), before(6)
		for _, c := range []*pb.CompactionRequest{{Revision: 5, Physical: true}, {Revision: 6}} {
			if _, err := r.Compact(t.Context(), c); err != nil {
				t.Fatal(err)
			}
		}
		if h := before(5); h != at5 {
			t.Errorf("%+v after the compaction, %+v before", h, at5)
		}
		if h := before(6); h.Hash == at6.Hash || h.Floor != 6 {
			t.Errorf("a compaction that nobody hashed before has %+v", h)
		}
	}
}
