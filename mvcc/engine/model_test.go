package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"braid/mvcc"
)

// history makes valid versions: it knows each key's newest one. Keys of a group share a first
// byte, so that groups are spans; all groups share one revision counter.
type history struct {
	rng    *rand.Rand
	newest map[string]mvcc.Version
	rev    mvcc.Revision
	index  map[uint64]uint64 // applied entries per group
}

func newHistory(seed uint64) *history {
	return &history{rng: rand.New(rand.NewPCG(seed, 1)), newest: map[string]mvcc.Version{}, rev: 1, index: map[uint64]uint64{}}
}

func groupSpan(group uint64) mvcc.Span {
	return mvcc.Span{Start: []byte{byte(group)}, End: []byte{byte(group) + 1}}
}

// key returns one of a few keys, with bytes that need escaping among them.
func (h *history) key(group uint64) []byte {
	k := []byte{byte(group)}
	for range h.rng.IntN(3) {
		k = append(k, []byte{0, 1, 0xff, 'a'}[h.rng.IntN(4)])
	}
	return k
}

// txn returns the events of one transaction of a group.
func (h *history) txn(group uint64) []mvcc.Version {
	h.rev++
	var events []mvcc.Version
	for range 1 + h.rng.IntN(4) {
		k := h.key(group)
		old, had := h.newest[string(k)]
		if had && old.Mod == h.rev {
			continue
		}
		v := mvcc.Version{Key: k, Mod: h.rev, Sub: int64(len(events))}
		if h.rng.IntN(4) == 0 {
			if !had || old.Tombstone() {
				continue
			}
		} else {
			v.Create, v.Version = h.rev, 1
			if had && !old.Tombstone() {
				v.Create, v.Version = old.Create, old.Version+1
			}
			v.Lease = int64(h.rng.IntN(3) - 1)
			v.Value = make([]byte, h.rng.IntN(40))
			for i := range v.Value {
				v.Value[i] = byte(h.rng.Uint32())
			}
		}
		events = append(events, v)
		h.newest[string(k)] = v
	}
	return events
}

// batch returns some transactions of one group and the position after them.
func (h *history) batch(group uint64) (events []mvcc.Version, position []byte) {
	for range 1 + h.rng.IntN(3) {
		events = append(events, h.txn(group)...)
	}
	h.index[group]++
	return events, binary.BigEndian.AppendUint64(nil, h.index[group])
}

func commit(t testing.TB, s mvcc.Store, group uint64, events []mvcc.Version, position []byte) {
	t.Helper()
	b := s.NewBatch()
	leases := map[string]int64{} // of keys met in this batch
	for i := range events {
		v := &events[i]
		if err := b.Put(v); err != nil {
			t.Fatal(err)
		}
		lease, met := leases[string(v.Key)]
		if !met {
			old, _, err := s.Get(v.Key, mvcc.Latest)
			if err != nil {
				t.Fatal(err)
			}
			lease = old.Lease
		}
		if leases[string(v.Key)] = v.Lease; lease != 0 && lease != v.Lease {
			if err := b.Detach(lease, v.Key); err != nil {
				t.Fatal(err)
			}
		}
		// A record that comes and goes with the key's versions.
		var value []byte
		if !v.Tombstone() && v.Mod%3 != 0 {
			value = fmt.Append(nil, v.Mod)
		}
		if err := b.SetRecord(mvcc.RecordKey{Kind: mvcc.RecordKinds[v.Mod%2], At: v.Key, ID: v.Lease}, value); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.SetPosition(group, position); err != nil {
		t.Fatal(err)
	}
	if err := b.Commit(); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
}

func openMem(t testing.TB, fs vfs.FS) *Engine {
	t.Helper()
	e, err := Open(Options{Dir: "db", FS: fs, MemTableBytes: 64 << 10, CacheBytes: 1 << 20,
		OnFatal: func(err error) { panic(err) }})
	if err != nil {
		t.Fatal(err)
	}
	e.gc = gcLimits{visits: 7, removes: 3}
	return e
}

// dump prints everything a reader can see of a span: all events, then reads at a revision.
func dump(t testing.TB, r mvcc.Reader, span mvcc.Span, ats ...mvcc.Revision) string {
	t.Helper()
	var out []byte
	line := func(v *mvcc.Version) {
		c := *v
		if len(c.Value) > 40 {
			c.Value = fmt.Appendf(nil, "%d bytes, crc %x", len(c.Value), crc32.Checksum(c.Value, castagnoli))
		}
		out = fmt.Appendln(out, &c)
	}
	if err := r.Events(context.Background(), 0, mvcc.Latest, span, func(v *mvcc.Version) error { line(v); return nil }); err != nil {
		t.Fatal(err)
	}
	for _, leases := range [][]int64{{1, 2}, {-1}, {2, 1, 7}} {
		if err := r.Attached(leases, span, func(lease int64, key []byte) bool {
			out = fmt.Appendf(out, "lease %d: %q\n", lease, key)
			return len(out)%5 > 0 // sometimes no more
		}); err != nil {
			t.Fatal(err)
		}
	}
	for _, kind := range mvcc.RecordKinds {
		if err := r.Records(kind, span, func(k mvcc.RecordKey, value []byte) bool {
			out = fmt.Appendf(out, "%v: %s\n", k, value)
			if got, ok, err := r.Record(k); err != nil || !ok || string(got) != string(value) {
				t.Fatalf("record %v: %q %v %v", k, got, ok, err)
			}
			return true
		}); err != nil {
			t.Fatal(err)
		}
	}
	for _, at := range ats {
		out = fmt.Appendln(out, "at", at)
		n := int64(0)
		var keys [][]byte
		if err := r.Scan(span, at, mvcc.ScanOptions{}, func(v *mvcc.Version) bool {
			line(v)
			keys = append(keys, slices.Clone(v.Key))
			n++
			return true
		}); err != nil {
			t.Fatal(err)
		}
		for _, opts := range []mvcc.ScanOptions{{KeysOnly: true}} {
			if err := r.Scan(span, at, opts, func(v *mvcc.Version) bool {
				if v.Value != nil {
					t.Fatalf("keys only: %v", v)
				}
				v.Value = []byte("-")
				line(v)
				return true
			}); err != nil {
				t.Fatal(err)
			}
		}
		count, err := r.Count(span, at)
		if err != nil || count != n {
			t.Fatalf("count at %d: %d, scanned %d, %v", at, count, n, err)
		}
		for _, k := range keys {
			v, ok, err := r.Get(k, at)
			if err != nil || !ok {
				t.Fatalf("get %q at %d: %v %v", k, at, ok, err)
			}
			line(&v)
		}
	}
	return string(out)
}

// liveKeys counts what LiveKeys should say.
func liveKeys(t testing.TB, e *Engine) (n int64) {
	t.Helper()
	if err := e.Scan(mvcc.Span{}, mvcc.Latest, mvcc.ScanOptions{KeysOnly: true}, func(*mvcc.Version) bool {
		n++
		return true
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// checkEqual compares the engine with the model: everything readable, positions and sizes.
func checkEqual(t testing.TB, e *Engine, m *mvcc.MemStore, h *history) {
	t.Helper()
	ats := []mvcc.Revision{mvcc.Latest, 0, 1}
	for range 3 {
		ats = append(ats, mvcc.Revision(h.rng.Int64N(int64(h.rev)+2)))
	}
	span := h.span()
	compare(t, dump(t, e, span, ats...), dump(t, m, span, ats...))
	one := mvcc.Key(h.key(uint64(1 + h.rng.IntN(4))))
	compare(t, dump(t, e, one, ats...), dump(t, m, one, ats...))
	for range 4 {
		k, at := h.key(uint64(1+h.rng.IntN(4))), ats[h.rng.IntN(len(ats))]
		v, ok, err := e.Get(k, at)
		w, wok, _ := m.Get(k, at)
		if err != nil || ok != wok || (ok && v.String() != w.String()) {
			t.Fatalf("get %q at %d: %v %v %v, model %v %v", k, at, &v, ok, err, &w, wok)
		}
	}
	pos, err := e.Positions()
	if err != nil || fmt.Sprint(pos) != fmt.Sprint(m.Positions()) {
		t.Fatalf("positions %v (%v), model %v", pos, err, m.Positions())
	}
	if e.LogicalBytes() != m.LogicalBytes() {
		t.Fatalf("%d logical bytes, model %d", e.LogicalBytes(), m.LogicalBytes())
	}
	if n := liveKeys(t, e); e.LiveKeys() != n {
		t.Fatalf("%d keys counted, %d are alive", e.LiveKeys(), n)
	}
	checkCount(t, e, span)
	checkIndex(t, e)
	if err := m.CheckIndex(); err != nil {
		t.Fatal(err)
	}
}

// span returns a random span of user keys, the whole space most often.
func (h *history) span() mvcc.Span {
	switch h.rng.IntN(4) {
	case 0:
		return groupSpan(uint64(1 + h.rng.IntN(4)))
	case 1:
		return mvcc.Span{Start: h.key(1), End: h.key(3)}
	}
	return mvcc.Span{}
}

func compare(t testing.TB, got, want string) {
	t.Helper()
	if got != want {
		t.Fatalf("engine:\n%s\nmodel:\n%s", got, want)
	}
}

// checkCount compares what NextPrefix finds with what Next finds: a wrong immediate successor
// shows here.
func checkCount(t testing.TB, e *Engine, span mvcc.Span) {
	t.Helper()
	want := int64(0)
	last := []byte(nil)
	err := e.eachVersion(span, func(key, value []byte) error {
		if p := key[:splitKey(key)]; last == nil || string(p) != string(last) {
			last = slices.Clone(p)
			if !isTombstone(value) {
				want++
			}
		}
		return nil
	})
	got, err2 := e.Count(span, mvcc.Latest)
	if err != nil || err2 != nil || got != want {
		t.Fatalf("NextPrefix counts %d, Next %d (%v, %v)", got, want, err, err2)
	}
}

// checkIndex verifies R3 over the whole store: as many records as versions, each with its version.
func checkIndex(t testing.TB, e *Engine) {
	t.Helper()
	versions, records := 0, 0
	if err := e.eachVersion(mvcc.Span{}, func(_, _ []byte) error { versions++; return nil }); err != nil {
		t.Fatal(err)
	}
	if err := e.Events(context.Background(), 0, mvcc.Latest, mvcc.Span{}, func(*mvcc.Version) error { records++; return nil }); err != nil {
		t.Fatal(err)
	}
	if versions != records {
		t.Fatalf("%d versions, %d index records", versions, records)
	}
}

// clone copies the history; the random source is shared.
func (h *history) clone() *history {
	c := *h
	c.newest, c.index = maps.Clone(h.newest), maps.Clone(h.index)
	return &c
}
