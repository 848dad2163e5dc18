package dbfile

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.etcd.io/bbolt"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"
)

var testMeta = Meta{Index: 77, Term: 5, Version: "3.7.0", Members: []*pb.Member{
	{ID: 0xb2, Name: "two", PeerURLs: []string{"http://p2:2380"}, ClientURLs: []string{"http://c2:2379"}},
	{ID: 0xa1, PeerURLs: []string{"http://p1:2380"}},
}}

// contents prints all buckets of a finished file.
func contents(t *testing.T, w *Writer) map[string][]string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "copy")
	var b bytes.Buffer
	if n, err := w.WriteTo(&b); err != nil || n != w.Size() || n%512 != 0 {
		t.Fatalf("%d of %d bytes, %v", n, w.Size(), err)
	}
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	out := map[string][]string{}
	if err := db.View(func(tx *bbolt.Tx) error {
		for err := range tx.Check() {
			t.Error(err)
		}
		return tx.ForEach(func(name []byte, bucket *bbolt.Bucket) error {
			out[string(name)] = []string{}
			return bucket.ForEach(func(k, v []byte) error {
				key, value := string(k), hex.EncodeToString(v)
				switch string(name) {
				case "key", "lease":
					key = hex.EncodeToString(k)
				case "members", "meta", "cluster":
					if v[0] != 0 {
						value = string(v)
					}
				}
				out[string(name)] = append(out[string(name)], key+" = "+value)
				return nil
			})
		})
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

func newWriter(t *testing.T) (*Writer, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "snapshots")
	w, err := New(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	return w, dir
}

// closed checks that nothing is left.
func closed(t *testing.T, w *Writer, dir string) {
	t.Helper()
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestBuckets compares a small file with what etcd 3.7.3 writes.
func TestBuckets(t *testing.T) {
	w, dir := newWriter(t)
	if err := errors.Join(
		w.Begin(4),
		w.Keys([]*mvccpb.KeyValue{{Key: []byte("void"), ModRevision: 3, CreateRevision: 3, Version: 1}}),
		w.Lease(9, 9, 9),
		w.Begin(6), // what came before is void
		w.Lease(-1, 100, 0),
		w.Lease(0x73ab, 60, 45),
		w.Keys([]*mvccpb.KeyValue{
			{Key: []byte("a"), Value: []byte("1"), CreateRevision: 2, ModRevision: 5, Version: 3, Lease: 0x73ab},
			{Key: []byte("b"), Value: []byte("2"), CreateRevision: 2, ModRevision: 2, Version: 1},
		}),
		w.Keys([]*mvccpb.KeyValue{{Key: []byte("c"), CreateRevision: 5, ModRevision: 5, Version: 1}}),
		w.Finish(t.Context(), testMeta),
	); err != nil {
		t.Fatal(err)
	}
	defer closed(t, w, dir)
	value := func(kv *mvccpb.KeyValue) string {
		b, err := proto.Marshal(kv)
		if err != nil {
			t.Fatal(err)
		}
		return hex.EncodeToString(b)
	}
	want := map[string][]string{
		"alarm": {}, "authRoles": {}, "authUsers": {}, "members_removed": {},
		"auth":    {"authRevision = 0000000000000001"},
		"cluster": {"clusterVersion = 3.7.0"},
		"key": {
			"00000000000000025f0000000000000000 = " + value(&mvccpb.KeyValue{Key: []byte("b"), Value: []byte("2"), CreateRevision: 2, ModRevision: 2, Version: 1}),
			"00000000000000055f0000000000000000 = " + value(&mvccpb.KeyValue{Key: []byte("a"), Value: []byte("1"), CreateRevision: 2, ModRevision: 5, Version: 3, Lease: 0x73ab}),
			"00000000000000055f0000000000000001 = " + value(&mvccpb.KeyValue{Key: []byte("c"), CreateRevision: 5, ModRevision: 5, Version: 1}),
		},
		"lease": {
			"00000000000073ab = 08abe701" + "103c" + "182d",
			"ffffffffffffffff = 08ffffffffffffffffff01" + "1064",
		},
		"members": {
			`a1 = {"id":161,"peerURLs":["http://p1:2380"]}`,
			`b2 = {"id":178,"peerURLs":["http://p2:2380"],"name":"two","clientURLs":["http://c2:2379"]}`,
		},
		"meta": {
			`confState = {"voters":[161,178],"auto_leave":false}`,
			"consistent_index = 000000000000004d",
			"finishedCompactRev = 00000000000000065f0000000000000000",
			"scheduledCompactRev = 00000000000000065f0000000000000000",
			"storageVersion = 3.7.0",
			"term = 0000000000000005",
		},
	}
	got := contents(t, w)
	for name := range want {
		if !slices.Equal(got[name], want[name]) {
			t.Errorf("%s:\n%s\nwant\n%s", name, strings.Join(got[name], "\n"), strings.Join(want[name], "\n"))
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d buckets, want %d", len(got), len(want))
	}
}

// TestManyRuns writes more than one run and more than one batch, with keys that share revisions across
// runs, and compares with sorting in memory.
func TestManyRuns(t *testing.T) {
	w, dir := newWriter(t)
	w.runBytes = 1 << 20
	if err := w.Begin(500); err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	var all []*mvccpb.KeyValue
	for i := range 20_000 {
		kv := &mvccpb.KeyValue{Key: fmt.Appendf(nil, "k%05d", i), Value: make([]byte, rng.IntN(1500)),
			CreateRevision: 2, ModRevision: 2 + rng.Int64N(400), Version: 1}
		all = append(all, kv)
		if err := w.Keys(all[i:]); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(w.runs.ends); n < 5 {
		t.Errorf("only %d runs", n)
	}
	if err := w.Finish(t.Context(), testMeta); err != nil {
		t.Fatal(err)
	}
	defer closed(t, w, dir)
	slices.SortStableFunc(all, func(a, b *mvccpb.KeyValue) int { return int(a.ModRevision - b.ModRevision) })
	var want []string
	var main, sub int64
	for _, kv := range all {
		if sub++; kv.ModRevision != main {
			main, sub = kv.ModRevision, 0
		}
		b, err := proto.Marshal(kv)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, fmt.Sprintf("%016x5f%016x = %x", main, sub, b))
	}
	if !slices.Equal(contents(t, w)["key"], want) {
		t.Error("the keys differ")
	}
}

// TestEmpty is a store that never had a key.
func TestEmpty(t *testing.T) {
	w, dir := newWriter(t)
	if err := errors.Join(w.Begin(1), w.Finish(t.Context(), testMeta)); err != nil {
		t.Fatal(err)
	}
	defer closed(t, w, dir)
	if got := contents(t, w); len(got["key"]) != 0 || len(got["meta"]) != 6 {
		t.Error(got)
	}
}

// TestStops ends the work for both reasons at each place where it can end, after which nothing is left.
func TestStops(t *testing.T) {
	for rooms := range 4 {
		for _, cancels := range []bool{false, true} {
			w, dir := newWriter(t)
			ctx, cancel := context.WithCancel(t.Context())
			w.runBytes = 2048
			n := 0
			w.free = func() (uint64, error) {
				if n++; n > rooms {
					if !cancels {
						return reserveBytes - 1, nil
					}
					cancel()
				}
				return reserveBytes, nil
			}
			err := w.Begin(9)
			for i := 0; i < 2 && err == nil; i++ {
				err = w.Keys([]*mvccpb.KeyValue{{Key: []byte{byte(i)}, Value: make([]byte, 2048), ModRevision: 3}})
			}
			if err == nil {
				err = w.Lease(1, 1, 1)
			}
			if err == nil {
				err = w.Finish(ctx, testMeta)
			}
			want := ErrNoSpace
			if cancels {
				want = context.Canceled
			}
			// The last batch asks for room when nothing is left that could be canceled.
			if last := cancels && rooms == 3; !errors.Is(err, want) && !last {
				t.Errorf("after %d times of room: %v, want %v", rooms, err, want)
			}
			closed(t, w, dir)
			cancel()
		}
	}
}
