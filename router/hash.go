package router

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"io"

	"braid/mvcc"
	"braid/pd/pdpb"
)

// HashRequest says what is to be hashed: every version with a revision above Floor and up to At,
// except a tombstone exactly at Floor, and of those at or below Floor the ones that are the
// newest of their key at At and no tombstones. In a store without a living key at At it is those
// that are the newest at Floor instead: a peculiarity of etcd that equal numbers depend on.
type HashRequest struct {
	Cut       pdpb.Cut // replicas must be complete through it
	At, Floor mvcc.Revision
	// Alive skips the peculiarity, as etcd does when it hashes in a compaction.
	Alive bool
}

// HashStream yields records in order of (Rev, Sub). Next returns a block at a time, which is valid
// until the next call, and io.EOF after the last. Close may be called at any time, once.
type HashStream interface {
	Next(ctx context.Context) ([]HashRecord, error)
	Close() error
}

// KVHash is a hash of the store as etcd computes it.
type KVHash struct {
	Hash     uint32
	At       mvcc.Revision // what was hashed
	Floor    mvcc.Revision // the compaction floor at that time
	Revision mvcc.Revision // the store's revision
}

// HashKV hashes the store at a revision; 0 is the current one. Equal histories give equal hashes,
// whatever the regions are. A negative revision hashes nothing, as in etcd. At the revision of one of
// the last physical compactions it is the hash of what there was before it, as in etcd.
func (r *Router) HashKV(ctx context.Context, rev int64) (KVHash, error) {
	// No deadline of its own: the work grows with the data.
	var h KVHash
	err := r.at(ctx, false, nil, func(ctx context.Context, p point) error {
		h = KVHash{At: mvcc.Revision(rev), Floor: p.floor, Revision: p.rev}
		if rev > 0 && rev <= int64(p.floor) {
			known, err := r.compactHash(ctx, h.At)
			if err != nil {
				return err
			}
			if known.Rev != 0 {
				h.Hash, h.Floor = known.Hash, known.Floor
				return nil
			}
		}
		switch {
		case rev > int64(p.rev):
			return future()
		case rev > 0 && rev < int64(p.floor):
			return compacted()
		case rev == 0:
			h.At = p.rev
		}
		sum := mvcc.HashSeed()
		if h.At < 0 {
			h.Hash = sum
			return nil
		}
		var err error
		h.Hash, err = r.hash(ctx, sum, HashRequest{Cut: p.cut, At: h.At, Floor: p.floor})
		return err
	})
	if err != nil {
		return KVHash{}, settle(ctx, err)
	}
	return h, nil
}

// compactHash asks the oracle until it answers.
func (r *Router) compactHash(ctx context.Context, rev mvcc.Revision) (pdpb.CompactHash, error) {
	for b := r.backoff(); ; {
		h, err := r.oracle.CompactHash(ctx, rev)
		if err == nil || !readAgain(err) {
			return h, err
		}
		if werr := b.wait(ctx); werr != nil {
			return h, werr
		}
	}
}

// hash repeats what fails for reasons that pass, a few times: each attempt costs a walk over
// everything.
func (r *Router) hash(ctx context.Context, sum uint32, req HashRequest) (uint32, error) {
	const attemptsMax = 5
	b := r.backoff()
	for i := 1; ; i++ {
		h, err := r.hashOnce(ctx, sum, req)
		if err == nil || i == attemptsMax || !readAgain(err) {
			return h, err
		}
		if werr := b.wait(ctx); werr != nil {
			return 0, werr
		}
	}
}

func (r *Router) hashOnce(ctx context.Context, sum uint32, req HashRequest) (h uint32, err error) {
	regions := r.oracle.Regions()
	if len(regions) == 0 {
		return 0, ErrNoRegion
	}
	streams, err := r.stores.Hash(ctx, regions, req)
	defer func() {
		for _, s := range streams {
			err = errors.Join(err, s.Close())
		}
	}()
	if err != nil {
		return 0, raced(err)
	}
	m := make(merge, 0, len(streams))
	for _, s := range streams {
		c := &cursor{stream: s}
		if err := c.fill(ctx); err == io.EOF {
			continue
		} else if err != nil {
			return 0, raced(err)
		}
		m = append(m, c)
	}
	heap.Init(&m)
	var join mvcc.HashJoiner
	for len(m) > 0 {
		c := m[0]
		rec := c.block[0]
		sum = join.Join(sum, rec.CRC, rec.Len)
		switch err := c.advance(ctx); err {
		case nil:
			heap.Fix(&m, 0)
		case io.EOF:
			heap.Pop(&m)
		default:
			return 0, raced(err)
		}
	}
	return sum, nil
}

// cursor is a place in a stream.
type cursor struct {
	stream HashStream
	block  []HashRecord // never empty while the cursor is in the merge
}

func (c *cursor) advance(ctx context.Context) error {
	last := c.block[0]
	if c.block = c.block[1:]; len(c.block) == 0 {
		if err := c.fill(ctx); err != nil {
			return err
		}
	}
	if compareRecords(c.block[0], last) <= 0 {
		return fmt.Errorf("%w: hash records out of order", errInvalid)
	}
	return nil
}

func (c *cursor) fill(ctx context.Context) error {
	for {
		var err error
		if c.block, err = c.stream.Next(ctx); err != nil || len(c.block) > 0 {
			return err
		}
	}
}

func compareRecords(a, b HashRecord) int {
	return cmp.Or(cmp.Compare(a.Rev, b.Rev), cmp.Compare(a.Sub, b.Sub))
}

// merge is a heap of cursors by their next record.
type merge []*cursor

func (m merge) Len() int           { return len(m) }
func (m merge) Swap(i, j int)      { m[i], m[j] = m[j], m[i] }
func (m merge) Less(i, j int) bool { return compareRecords(m[i].block[0], m[j].block[0]) < 0 }
func (m *merge) Push(x any)        { *m = append(*m, x.(*cursor)) }
func (m *merge) Pop() any {
	old := *m
	x := old[len(old)-1]
	*m = old[:len(old)-1]
	return x
}
