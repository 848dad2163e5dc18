package engine

import (
	"bufio"
	"context"
	"hash/crc32"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"braid/mvcc"
)

// TestHashKVEqualsEtcd replays histories that were run on etcd 3.7.3's own store, and compares
// HashKV at many revisions and floors. The file holds, line by line: "txn" with its puts (key,
// value or -, lease) and deletes, "delall", "rev" after it, "compact R", and "hash R floor crc".
// Two regions share the key space and only send checksums, as HashKV over regions does.
func TestHashKVEqualsEtcd(t *testing.T) {
	f, err := os.Open("testdata/etcd-hashkv.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var e *Engine
	var h *replay
	checked := 0
	defer func() {
		if e != nil {
			e.Close()
		}
	}()
	for s := bufio.NewScanner(f); s.Scan(); {
		w := strings.Fields(s.Text())
		switch w[0] {
		case "history":
			if e != nil {
				if err := e.Close(); err != nil {
					t.Fatal(err)
				}
			}
			e = openMem(t, vfs.NewMem())
			h = &replay{t: t, e: e, rev: 1, newest: map[string]mvcc.Version{}, gc: num(t, w[1])%3 != 0}
		case "txn", "delall":
			h.txn(w)
		case "rev":
			if int64(h.rev) != num(t, w[1]) {
				t.Fatalf("at revision %d, etcd at %s", h.rev, w[1])
			}
		case "compact":
			h.compact(mvcc.Revision(num(t, w[1])))
		case "hash":
			at, floor := mvcc.Revision(num(t, w[1])), mvcc.Revision(num(t, w[2]))
			if got, want := h.hash(at, floor), uint32(num(t, w[3])); got != want {
				t.Fatalf("hash at %d with floor %d: %d, etcd's is %d", at, floor, got, want)
			}
			checked++
		}
	}
	if checked < 100 {
		t.Errorf("only %d checksums", checked)
	}
}

func num(t *testing.T, s string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

type replay struct {
	t      *testing.T
	e      *Engine
	rev    mvcc.Revision
	newest map[string]mvcc.Version
	gc     bool // collect at once, or leave it
	floor  mvcc.Revision
}

func (r *replay) txn(w []string) {
	var events []mvcc.Version
	add := func(v mvcc.Version) {
		v.Mod, v.Sub = r.rev+1, int64(len(events))
		events = append(events, v)
		r.newest[string(v.Key)] = v
	}
	del := func(key string) {
		if old, ok := r.newest[key]; ok && !old.Tombstone() {
			add(mvcc.Version{Key: []byte(key)})
		}
	}
	if w[0] == "delall" {
		var keys []string
		for k := range r.newest {
			keys = append(keys, k)
		}
		slices.Sort(keys)
		for _, k := range keys {
			del(k)
		}
	}
	for w = w[1:]; len(w) > 0; {
		if w[0] == "del" {
			del(w[1])
			w = w[2:]
			continue
		}
		v := mvcc.Version{Key: []byte(w[1]), Create: r.rev + 1, Version: 1, Lease: num(r.t, w[3])}
		if w[2] != "-" {
			v.Value = []byte(w[2])
		}
		if old, ok := r.newest[w[1]]; ok && !old.Tombstone() {
			v.Create, v.Version = old.Create, old.Version+1
		}
		add(v)
		w = w[4:]
	}
	if len(events) > 0 {
		commit(r.t, r.e, 1, events, nil)
		r.rev++
	}
}

func (r *replay) compact(to mvcc.Revision) {
	if r.gc {
		if _, err := r.e.GC(context.Background(), mvcc.Span{}, r.floor, to, nil); err != nil {
			r.t.Fatal(err)
		}
	}
	r.floor = to
}

// hash merges two regions' streams of (revision, sub, length, checksum).
func (r *replay) hash(at, floor mvcc.Revision) uint32 {
	type part struct {
		mod     mvcc.Revision
		sub     int64
		len     int
		crc     uint32
		ifEmpty bool
	}
	var parts []part
	anyAlive := false
	for _, span := range []mvcc.Span{{End: []byte("k3")}, {Start: []byte("k3")}} {
		alive, err := r.e.HashSpan(context.Background(), span, 0, at, floor, func(h *mvcc.HashRecord) error {
			parts = append(parts, part{h.Mod, h.Sub, len(h.Key) + len(h.Value), mvcc.HashUpdate(0, h), h.IfEmpty})
			return nil
		})
		if err != nil {
			r.t.Fatal(err)
		}
		anyAlive = anyAlive || alive
	}
	slices.SortFunc(parts, func(a, b part) int {
		if a.mod != b.mod {
			return int(a.mod - b.mod)
		}
		return int(a.sub - b.sub)
	})
	crc := mvcc.HashSeed()
	var join mvcc.HashJoiner
	for _, p := range parts {
		if !p.ifEmpty || !anyAlive {
			crc = join.Join(crc, p.crc, p.len)
		}
	}
	return crc
}

func TestKeyValueEncoding(t *testing.T) {
	h := newHistory(1)
	for range 200 {
		for _, v := range h.txn(1) {
			kv := &mvccpb.KeyValue{Key: v.Key, Value: v.Value, CreateRevision: int64(v.Create),
				ModRevision: int64(v.Mod), Version: v.Version, Lease: v.Lease}
			if v.Tombstone() {
				kv = &mvccpb.KeyValue{Key: v.Key}
			}
			want, err := proto.Marshal(kv)
			if err != nil {
				t.Fatal(err)
			}
			if got := mvcc.AppendKeyValue(nil, &v); string(got) != string(want) {
				t.Fatalf("%v: %x, protobuf %x", &v, got, want)
			}
		}
	}
}

func TestHashJoiner(t *testing.T) {
	table := crc32.MakeTable(crc32.Castagnoli)
	h := newHistory(2)
	for range 200 {
		a, b := make([]byte, h.rng.IntN(50)), make([]byte, h.rng.IntN(300))
		for i := range a {
			a[i] = byte(h.rng.Uint32())
		}
		for i := range b {
			b[i] = byte(h.rng.Uint32())
		}
		want := crc32.Checksum(append(slices.Clone(a), b...), table)
		got := new(mvcc.HashJoiner).Join(crc32.Checksum(a, table), crc32.Checksum(b, table), len(b))
		if got != want {
			t.Fatalf("%d+%d bytes: %x, want %x", len(a), len(b), got, want)
		}
	}
}
