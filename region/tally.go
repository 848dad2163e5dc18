package region

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	lru "github.com/hashicorp/golang-lru/v2"

	"braid/mvcc"
	"braid/pd/pdpb"
)

// Tallies make the number of keys of a span cheap to tell where it is asked for again and again: a
// count would otherwise walk over every key, and a list in pages counts what is left at each page.
// All replicas of a store share one, so that its memory does not grow with their number.
//
// A tally divides the keys of a region into buckets and knows how many keys each had at one
// revision. A count adds up buckets, walks over the two at the ends of its span, and takes in what was
// created and deleted between the tally's revision and its own, which the revision index tells. The
// past does not change, so there is nothing to keep in step with what is applied: whoever counts at a
// later revision moves the tally there. Only removal takes from the past; a tally from before the
// compaction floor is of no use, and none survives a floor that passed it while it was worked on (C1).
type Tallies struct {
	o     TallyOptions
	cache *lru.Cache[pdpb.RegionID, *tally]
}

// TallyOptions configure Tallies; zero fields mean the defaults.
type TallyOptions struct {
	// Regions bounds the regions that have a tally. Default 1024.
	Regions int
	// Worth is how many keys a count must have walked over, twice, before it is worth a tally. Default
	// 4096.
	Worth int64
	// BucketKeys is what a bucket has when a tally is made, unless there would be more than BucketsMax.
	// Defaults 1024 and 512.
	BucketKeys int64
	BucketsMax int
}

func (o TallyOptions) withDefaults() TallyOptions {
	o.Regions, o.Worth = cmp.Or(o.Regions, 1024), cmp.Or(o.Worth, 4096)
	o.BucketKeys, o.BucketsMax = cmp.Or(o.BucketKeys, 1024), cmp.Or(o.BucketsMax, 512)
	return o
}

const (
	// tallyAfter is how many counts must have been worth a tally before there is one.
	tallyAfter = 2
	// bucketGrowth is by how much a bucket may grow before it is divided.
	bucketGrowth = 4
	// bucketKeyMax bounds the keys at which a bucket may begin, so that their number bounds the memory.
	bucketKeyMax = 256
	// eventsMin and eventsShare bound the revisions that a tally is moved over: beyond them, and a
	// share of its keys, counting anew is cheaper.
	eventsMin   = 1024
	eventsShare = 4
)

// NewTallies returns the tallies of a store. One has up to a thousand buckets, each with its first key, of
// at most 256 bytes, and about fifty bytes.
func NewTallies(o TallyOptions) *Tallies {
	o = o.withDefaults()
	cache, err := lru.New[pdpb.RegionID, *tally](o.Regions)
	if err != nil {
		panic(fmt.Sprintf("region: a cache of %d tallies: %v", o.Regions, err))
	}
	return &Tallies{o, cache}
}

// of returns the tally of a region.
func (t *Tallies) of(id pdpb.RegionID) *tally {
	if known, ok := t.cache.Get(id); ok {
		return known
	}
	fresh := &tally{o: t.o}
	if before, ok, _ := t.cache.PeekOrAdd(id, fresh); ok {
		return before
	}
	return fresh
}

// tally is what is known of one region.
type tally struct {
	o TallyOptions
	// mu is held while the buckets are moved to a later revision, which reads the engine: who waits for it
	// counts in the same region and would read the same.
	mu       sync.Mutex
	large    int  // counts that walked over many keys
	building bool // somebody makes it; it is made and read by one goroutine at a time, without the lock
	buckets
}

// buckets are the numbers of keys of a span at a revision.
type buckets struct {
	at     mvcc.Revision // 0: nothing is known
	span   mvcc.Span
	size   int64    // of a bucket when it was made
	most   int      // buckets when they were made
	starts [][]byte // of each bucket; it ends where the next begins
	keys   []int64
	total  int64
}

// tallied is a region's state as a count sees it.
type tallied struct {
	mvcc.Reader
	whole mvcc.Span // of the region
	floor func() mvcc.Revision
}

// count returns the number of keys of a span that are alive at rev. Like every read, it is of use only if
// the floor is not above rev when it has returned.
func (t *tally) count(s tallied, span mvcc.Span, rev mvcc.Revision) (int64, error) {
	t.mu.Lock()
	if t.building || !t.covers(s, rev) && (t.large < tallyAfter || rev < t.at) {
		t.mu.Unlock()
		return t.walk(s, span, rev)
	}
	if !t.covers(s, rev) {
		t.building = true
		t.mu.Unlock()
		made, err := makeBuckets(s, rev, t.o)
		t.mu.Lock()
		t.building = false
		t.buckets = made
		if err != nil || s.floor() > rev {
			t.buckets = buckets{}
			t.mu.Unlock()
			if err != nil {
				return 0, err
			}
			return t.walk(s, span, rev)
		}
	} else if from := t.at; rev > from {
		if err := t.advance(s, rev); err != nil || s.floor() > from {
			t.buckets = buckets{}
			t.mu.Unlock()
			if err != nil {
				return 0, err
			}
			return t.walk(s, span, rev)
		}
	}
	at := t.at
	n, rest := t.sum(span)
	t.mu.Unlock()
	for _, r := range rest {
		m, err := s.Count(r, at)
		if err != nil {
			return 0, err
		}
		n += m
	}
	if rev < at {
		err := s.changes(rev, at, span, func(_ []byte, d int64) { n -= d })
		return n, err
	}
	return n, nil
}

// walk counts key by key, and remembers how many those were.
func (t *tally) walk(s tallied, span mvcc.Span, rev mvcc.Revision) (int64, error) {
	n, err := s.Count(span, rev)
	if n >= t.o.Worth {
		t.mu.Lock()
		t.large++
		t.mu.Unlock()
	}
	return n, err
}

// covers says whether the buckets are good for a count at rev: of the region as it is now, with the
// history between, and not too much of it.
func (b *buckets) covers(s tallied, rev mvcc.Revision) bool {
	if b.at == 0 || b.at < s.floor() || !bytes.Equal(b.span.Start, s.whole.Start) ||
		!bytes.Equal(b.span.End, s.whole.End) || (b.span.End == nil) != (s.whole.End == nil) {
		return false
	}
	return max(rev-b.at, b.at-rev) <= mvcc.Revision(max(eventsMin, b.total/eventsShare))
}

// makeBuckets counts the keys of a region at rev.
func makeBuckets(s tallied, rev mvcc.Revision, o TallyOptions) (buckets, error) {
	b := buckets{at: rev, span: s.whole, size: o.BucketKeys, most: o.BucketsMax, starts: [][]byte{s.whole.Start}, keys: []int64{0}}
	err := s.Scan(s.whole, rev, mvcc.ScanOptions{KeysOnly: true}, func(v *mvcc.Version) bool {
		last := len(b.keys) - 1
		if b.keys[last] >= b.size {
			if len(b.keys) >= b.most {
				b.coarsen()
				last = len(b.keys) - 1
			}
			if b.keys[last] >= b.size && len(v.Key) <= bucketKeyMax {
				b.starts, b.keys = append(b.starts, bytes.Clone(v.Key)), append(b.keys, 0)
				last++
			}
		}
		b.keys[last]++
		b.total++
		return true
	})
	return b, err
}

// coarsen makes one bucket of every two.
func (b *buckets) coarsen() {
	n := 0
	for i := 0; i < len(b.keys); i += 2 {
		b.starts[n], b.keys[n] = b.starts[i], b.keys[i]
		if i+1 < len(b.keys) {
			b.keys[n] += b.keys[i+1]
		}
		n++
	}
	clear(b.starts[n:])
	b.starts, b.keys, b.size = b.starts[:n], b.keys[:n], 2*b.size
}

// of returns the bucket in which a key lies.
func (b *buckets) of(key []byte) int {
	i, found := slices.BinarySearchFunc(b.starts, key, bytes.Compare)
	if !found {
		i--
	}
	return i
}

// bucket is the span of a bucket.
func (b *buckets) bucket(i int) mvcc.Span {
	if i+1 < len(b.starts) {
		return mvcc.Span{Start: b.starts[i], End: b.starts[i+1]}
	}
	return mvcc.Span{Start: b.starts[i], End: b.span.End}
}

// advance moves the buckets to a later revision. After an error they are of no use.
func (b *buckets) advance(s tallied, rev mvcc.Revision) error {
	grown := false
	err := s.changes(b.at, rev, b.span, func(key []byte, d int64) {
		i := b.of(key)
		b.keys[i] += d
		b.total += d
		grown = grown || b.keys[i] > bucketGrowth*b.size
	})
	if err != nil {
		return err
	}
	b.at = rev
	for i := 0; grown && i < len(b.keys); i++ {
		if b.keys[i] > bucketGrowth*b.size {
			if err := b.divide(s, i); err != nil {
				return err
			}
		}
	}
	return nil
}

// divide makes buckets of the usual size of one that has grown.
func (b *buckets) divide(s tallied, i int) error {
	parts, err := makeBuckets(tallied{Reader: s.Reader, whole: b.bucket(i)}, b.at, TallyOptions{BucketKeys: b.size, BucketsMax: b.most})
	if err != nil {
		return err
	}
	b.starts, b.keys = slices.Replace(b.starts, i, i+1, parts.starts...), slices.Replace(b.keys, i, i+1, parts.keys...)
	if len(b.keys) > 2*b.most {
		b.coarsen()
	}
	return nil
}

// sum adds up the buckets that lie in a span, and returns the parts of it that lie in others.
func (b *buckets) sum(span mvcc.Span) (n int64, rest []mvcc.Span) {
	if span.Empty() {
		return 0, nil
	}
	for i := max(b.of(span.Start), 0); i < len(b.keys); i++ {
		whole := b.bucket(i)
		part := whole.Intersect(span)
		switch {
		case part.Empty():
			return n, rest
		case part.Covers(whole):
			n += b.keys[i]
		default:
			rest = append(rest, part)
		}
	}
	return n, rest
}

// changes calls fn for every key of a span that was created (1) or deleted (-1) after one revision and not
// after another. A key that its transaction deleted and created again is neither.
func (s *tallied) changes(after, through mvcc.Revision, span mvcc.Span, fn func(key []byte, d int64)) error {
	return s.Events(context.Background(), after+1, through, span, func(v *mvcc.Version) error {
		if v.Version > 1 {
			return nil
		}
		before, found, err := s.Get(v.Key, v.Mod-1)
		if err != nil {
			return err
		}
		alive := found && !before.Tombstone()
		switch {
		case alive && v.Tombstone():
			fn(v.Key, -1)
		case !alive && !v.Tombstone():
			fn(v.Key, 1)
		}
		return nil
	})
}

// countAt counts the keys of a span of the region, whose own span is whole.
func (r *Replica) countAt(whole, span mvcc.Span, rev mvcc.Revision) (n int64, err error) {
	if r.cfg.Tallies == nil {
		n, err = r.cfg.Engine.Count(span, rev)
	} else {
		floor := func() mvcc.Revision { return r.Applied().Floor }
		n, err = r.cfg.Tallies.of(r.id).count(tallied{r.cfg.Engine, whole, floor}, span, rev)
	}
	if err != nil {
		return 0, fmt.Errorf("region %d: counting: %w", r.id, err)
	}
	return n, nil
}
