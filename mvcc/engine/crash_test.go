package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"braid/mvcc"
)

// states remembers what a group may look like at every position, as dumped text. A collection
// does not move the position, so there may be several.
type states map[uint64]map[string][]string

func (s states) note(t testing.TB, m *mvcc.MemStore, group uint64) {
	if s[group] == nil {
		s[group] = map[string][]string{"": {""}}
	}
	p, _ := m.Position(group)
	s[group][string(p)] = append(s[group][string(p)], groupDump(t, m, group))
}

// check compares a group with what it was at the position.
func (s states) check(t testing.TB, e *Engine, group uint64, position []byte) {
	t.Helper()
	want, ok := s[group][string(position)]
	if !ok {
		t.Fatalf("group %d: unknown position %x", group, position)
	}
	if got := groupDump(t, e, group); !slices.Contains(want, got) {
		t.Fatalf("group %d at %x:\n%s\nmodel:\n%s", group, position, got, want)
	}
}

func groupDump(t testing.TB, r mvcc.Reader, group uint64) string {
	return dump(t, r, groupSpan(group))
}

// TestCrash checks the prefix property: after a crash at any moment, the state of every group is
// exactly what it was when the recovered position was written, and the durable position that was
// read before the crash is not below.
func TestCrash(t *testing.T) {
	seeds := uint64(12)
	if testing.Short() {
		seeds = 4
	}
	lost, kept := 0, 0
	for seed := range seeds {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			l, k := crashLives(t, seed)
			lost, kept = lost+l, kept+k
		})
	}
	if lost == 0 || kept == 0 {
		t.Errorf("groups that lost a tail: %d, that kept something: %d: the test proves nothing", lost, kept)
	}
}

func crashLives(t *testing.T, seed uint64) (lost, kept int) {
	h := newHistory(seed)
	fs := vfs.NewCrashableMem()
	m := mvcc.NewMemStore()
	known := states{}
	for g := uint64(1); g <= 4; g++ {
		known.note(t, m, g)
	}
	base := h.clone() // the history at the positions the engine is at
	for life := range 4 {
		e := openMem(t, fs)
		e.gc = gcLimits{visits: 1 << 20, removes: 1 << 20} // one chunk: states stay countable
		floor := [5]mvcc.Revision{}
		durable := map[uint64][]byte{}
		for range 60 + h.rng.IntN(100) {
			g := uint64(1 + h.rng.IntN(4))
			switch p := h.rng.IntN(100); {
			case p < 90:
				events, _ := h.batch(g)
				// Positions are unique over all lives: the lost tail is written anew, differently.
				h.index[g] = h.index[g]&0xffffffff | uint64(life+1)<<32
				position := binary.BigEndian.AppendUint64(nil, h.index[g])
				for i := range events { // large values, so that memtables fill and flush
					if !events[i].Tombstone() && h.rng.IntN(3) == 0 {
						events[i].Value = make([]byte, 1000+h.rng.IntN(8000))
					}
				}
				commit(t, e, g, events, position)
				commit(t, m, g, events, position)
				known.note(t, m, g)
			case p < 94:
				to := h.rev - mvcc.Revision(h.rng.Int64N(4))
				if to > floor[g] {
					if _, err := e.GC(context.Background(), groupSpan(g), floor[g], to, nil); err != nil {
						t.Fatal(err)
					}
					m.GC(groupSpan(g), floor[g], to)
					known.note(t, m, g)
					floor[g] = to
				}
			case p < 96:
				if err := e.Flush(); err != nil {
					t.Fatal(err)
				}
			default:
				d, err := e.DurablePositions()
				if err != nil {
					t.Fatal(err)
				}
				durable = d
			}
		}
		crashed := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: []int{0, 50, 100}[h.rng.IntN(3)],
			RNG: rand.New(rand.NewPCG(seed, uint64(life)))})
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		fs = crashed
		e = openMem(t, fs)
		got, err := e.Positions()
		if err != nil {
			t.Fatal(err)
		}
		for g := uint64(1); g <= 4; g++ {
			known.check(t, e, g, got[g])
			if string(got[g]) < string(durable[g]) {
				t.Fatalf("group %d: at %x, below the durable position %x", g, got[g], durable[g])
			}
			if latest, _ := m.Position(g); string(latest) != string(got[g]) {
				lost++
			}
			if len(got[g]) > 0 {
				kept++
			}
		}
		checkIndex(t, e)
		m, h = rebuild(t, e, h, base)
		if e.LogicalBytes() != m.LogicalBytes() {
			t.Fatalf("%d logical bytes, model %d", e.LogicalBytes(), m.LogicalBytes())
		}
		for g := uint64(1); g <= 4; g++ {
			known.note(t, m, g)
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return lost, kept
}

// rebuild makes a model and a history from what a recovered engine holds.
func rebuild(t *testing.T, e *Engine, h, base *history) (*mvcc.MemStore, *history) {
	m := mvcc.NewMemStore()
	n := base.clone()
	n.rng, n.rev = h.rng, h.rev
	b := m.NewBatch()
	defer b.Close()
	err := e.Events(context.Background(), 0, mvcc.Latest, mvcc.Span{}, func(v *mvcc.Version) error {
		c := *v
		c.Key, c.Value = append([]byte{}, v.Key...), append([]byte{}, v.Value...)
		n.newest[string(c.Key)] = c
		return b.Put(&c)
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range mvcc.RecordKinds {
		if err := e.Records(kind, mvcc.Span{}, func(k mvcc.RecordKey, value []byte) bool { return b.SetRecord(k, value) == nil }); err != nil {
			t.Fatal(err)
		}
	}
	pos, err := e.Positions()
	if err != nil {
		t.Fatal(err)
	}
	for g, p := range pos {
		n.index[g] = binary.BigEndian.Uint64(p)
		if err := b.SetPosition(g, p); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Commit(); err != nil {
		t.Fatal(err)
	}
	return m, n
}
