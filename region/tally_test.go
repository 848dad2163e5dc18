package region

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"braid/mvcc"
)

// counted is a region's history that grows, is compacted and counted.
type counted struct {
	*testing.T
	rng   *rand.Rand
	store *mvcc.MemStore
	alive map[string]mvcc.Version
	rev   mvcc.Revision
	floor mvcc.Revision
	whole mvcc.Span
}

func newCounted(t *testing.T, seed uint64) *counted {
	return &counted{T: t, rng: rand.New(rand.NewPCG(seed, 1)), store: mvcc.NewMemStore(), alive: map[string]mvcc.Version{},
		rev: 1, floor: -1, whole: mvcc.Span{Start: []byte("b"), End: []byte("y")}}
}

func (c *counted) key() string { return fmt.Sprintf("%c%02d", 'a'+c.rng.IntN(26), c.rng.IntN(4)) }

// write is a transaction of a few keys: created, changed, deleted, or deleted and created again.
func (c *counted) write() {
	c.rev++
	b := c.store.NewBatch()
	defer b.Close()
	sub, seen := int64(0), map[string]bool{}
	for range 1 + c.rng.IntN(3) {
		key := c.key()
		if seen[key] {
			continue
		}
		seen[key] = true
		v, known := c.alive[key]
		next := mvcc.Version{Key: []byte(key), Mod: c.rev, Sub: sub}
		switch n := c.rng.IntN(8); {
		case known && n < 3:
		case known && n < 6:
			next.Create, next.Version = v.Create, v.Version+1
		default:
			next.Create, next.Version = c.rev, 1
		}
		if sub++; !known && c.rng.IntN(8) == 0 {
			next.Create, next.Version = 0, 0 // created and deleted
		}
		if err := b.Put(&next); err != nil {
			c.Fatal(err)
		}
		if next.Tombstone() {
			delete(c.alive, key)
		} else {
			c.alive[key] = next
		}
	}
	if err := b.Commit(); err != nil {
		c.Fatal(err)
	}
}

func (c *counted) tallied() tallied {
	return tallied{c.store, c.whole, func() mvcc.Revision { return c.floor }}
}

// span is one within the region.
func (c *counted) span() mvcc.Span {
	if c.rng.IntN(3) == 0 {
		return c.whole
	}
	return mvcc.Span{Start: []byte(c.key()), End: []byte(c.key())}.Intersect(c.whole)
}

// TestTally: whatever is written, compacted and counted in whatever order, a tally and a walk over the
// keys agree.
func TestTally(t *testing.T) {
	var moved, back, divided int
	for seed := range uint64(60) {
		c := newCounted(t, seed)
		tally := NewTallies(TallyOptions{Worth: 2, BucketKeys: int64(1 + seed%4), BucketsMax: 4 + int(seed%9)}).of(7)
		for range 400 {
			switch n := c.rng.IntN(20); {
			case n < 12:
				c.write()
			case n == 12:
				if to := c.rev - mvcc.Revision(c.rng.IntN(30)); to > c.floor {
					from := c.floor
					c.floor = to
					c.store.GC(c.whole, from, to)
				}
			case n == 13:
				c.whole.End = []byte{"pwyz"[c.rng.IntN(4)]} // a region that was divided, say
			default:
				rev := max(c.rev-mvcc.Revision(c.rng.IntN(20)), c.floor, 1)
				if c.rng.IntN(2) == 0 {
					rev = c.rev
				}
				span, before, n := c.span(), tally.at, len(tally.keys)
				got, err := tally.count(c.tallied(), span, rev)
				if err != nil {
					t.Fatal(err)
				}
				if want, err := c.store.Count(span, rev); err != nil || got != want {
					t.Fatalf("seed %d: %v at %d has %d keys, a tally of %d says %d (%v)", seed, span, rev, want, tally.at, got, err)
				}
				if before != 0 && tally.at == before && rev < before {
					back++
				}
				if before != 0 && tally.at > before {
					if moved++; len(tally.keys) > n {
						divided++
					}
				}
				sum := int64(0)
				for _, n := range tally.keys {
					sum += n
				}
				if sum != tally.total || len(tally.keys) > 2*tally.o.BucketsMax {
					t.Fatalf("seed %d: %d buckets with %d keys, in all %d", seed, len(tally.keys), sum, tally.total)
				}
			}
		}
	}
	if moved < 1000 || back < 500 || divided < 100 {
		t.Errorf("tallies were moved %d times, used for earlier revisions %d times, divided %d times", moved, back, divided)
	}
}

// passed is a store that is compacted above everything just when a tally has read it.
type passed struct {
	mvcc.Reader
	floor mvcc.Revision
}

func (p *passed) Scan(span mvcc.Span, at mvcc.Revision, o mvcc.ScanOptions, fn func(*mvcc.Version) bool) error {
	defer func() { p.floor = at + 1 }()
	return p.Reader.Scan(span, at, o, fn)
}

func (p *passed) Events(ctx context.Context, from, to mvcc.Revision, span mvcc.Span, fn func(*mvcc.Version) error) error {
	defer func() { p.floor = from }()
	return p.Reader.Events(ctx, from, to, span, fn)
}

// TestTallyFloor: a tally that a compaction passed while it was made or moved is not kept.
func TestTallyFloor(t *testing.T) {
	c := newCounted(t, 1)
	for range 50 {
		c.write()
	}
	tally := NewTallies(TallyOptions{Worth: 1, BucketKeys: 2}).of(7)
	count := func(s tallied) {
		t.Helper()
		got, err := tally.count(s, c.whole, c.rev)
		if want, werr := c.store.Count(c.whole, c.rev); err != nil || werr != nil || got != want {
			t.Fatalf("%d, %v, want %d, %v", got, err, want, werr)
		}
	}
	for range tallyAfter + 2 {
		p := &passed{Reader: c.store, floor: -1}
		count(tallied{p, c.whole, func() mvcc.Revision { return p.floor }})
		if tally.at != 0 {
			t.Fatalf("made at %d under a floor of %d, and kept", tally.at, p.floor)
		}
	}
	count(c.tallied())
	if tally.at != c.rev {
		t.Fatalf("the tally is of %d, not of %d", tally.at, c.rev)
	}
	c.write()
	p := &passed{Reader: c.store, floor: -1}
	count(tallied{p, c.whole, func() mvcc.Revision { return p.floor }})
	if tally.at != 0 {
		t.Fatalf("moved to %d under a floor of %d, and kept", tally.at, p.floor)
	}
}

// TestTallyTogether: counts of many goroutines at many revisions, while others are written, under the
// race detector.
func TestTallyTogether(t *testing.T) {
	c := newCounted(t, 3)
	for range 300 {
		c.write()
	}
	s, whole, last := c.tallied(), c.whole, c.rev
	want := map[mvcc.Revision]int64{}
	for rev := last - 100; rev <= last; rev++ {
		n, err := c.store.Count(whole, rev)
		if err != nil {
			t.Fatal(err)
		}
		want[rev] = n
	}
	tally := NewTallies(TallyOptions{Worth: 1, BucketKeys: 4}).of(7)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 200 {
				rev := last - mvcc.Revision((i*7+g*13)%100)
				if n, err := tally.count(s, whole, rev); err != nil || n != want[rev] {
					t.Errorf("at %d: %d, %v, want %d", rev, n, err, want[rev])
				}
			}
		})
	}
	for range 200 {
		c.write()
	}
	wg.Wait()
}

// TestTallyLongKeys: buckets begin at short keys only, and the count is right all the same.
func TestTallyLongKeys(t *testing.T) {
	c := newCounted(t, 5)
	b := c.store.NewBatch()
	defer b.Close()
	for i := range 100 {
		key := fmt.Sprintf("c%03d", i)
		if i%10 != 0 {
			key += string(make([]byte, bucketKeyMax))
		}
		if err := b.Put(&mvcc.Version{Key: []byte(key), Mod: 2, Sub: int64(i), Create: 2, Version: 1}); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Commit(); err != nil {
		t.Fatal(err)
	}
	tally := NewTallies(TallyOptions{Worth: 1, BucketKeys: 1}).of(7)
	for range tallyAfter + 1 {
		if n, err := tally.count(c.tallied(), c.whole, 2); err != nil || n != 100 {
			t.Fatalf("%d keys, %v", n, err)
		}
	}
	if len(tally.keys) != 10 {
		t.Errorf("%d buckets", len(tally.keys))
	}
	for _, start := range tally.starts {
		if len(start) > bucketKeyMax {
			t.Errorf("a bucket begins at a key of %d bytes", len(start))
		}
	}
}
