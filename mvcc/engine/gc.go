package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"braid/mvcc"
)

// A collection goes in chunks: each has its own iterators, so that a long one pins nothing, and
// one batch.
const (
	gcVisitsMax  = 2048
	gcRemovesMax = 1024
)

// gcLimits bound a chunk; tests make them tiny.
type gcLimits struct{ visits, removes int }

// GC removes the versions of span that a compaction at `to` makes unreachable, with their index
// records (R3). For each key it keeps the newest version <= to, unless that is a tombstone below
// `to`; a tombstone exactly at `to` stays, as in etcd.
//
// It walks the revision index over [from, to], so the cost follows what changed. `from` is the
// `to` of the last collection of this span that completed, or the floor that the span's snapshot
// came with; 0 walks everything. The record at `from` itself is visited again because a tombstone
// kept there falls now. A key is handled at its newest record <= to, which supersedes all its
// others; versions superseded only by records below `from` do not exist by the premise.
//
// The caller has written the new floor into the region's state before (C1), and no read below it
// may be running but on a Snapshot. A collection that was cut short (by an error, by pace, by a
// crash) is repeated with the same `from`; what it removed stays removed. pace is called after
// each chunk, outside all locks, with the number of records visited and versions removed; it may
// sleep, and its error ends the collection.
func (e *Engine) GC(ctx context.Context, span mvcc.Span, from, to mvcc.Revision, pace func(n int) error) (st mvcc.GCStats, err error) {
	if span.Empty() || to < from {
		return mvcc.GCStats{Complete: true}, nil
	}
	run, err := e.installs.beginGC(span)
	if err != nil {
		return st, err
	}
	defer e.installs.endGC(run)
	c := &gcChunk{e: e, span: span, to: to, next: appendIndexKey(nil, from, 0)}
	for !st.Complete {
		if err := ctx.Err(); err != nil {
			return st, err
		}
		if err := c.collect(run); err != nil {
			return st, fmt.Errorf("engine: collect %v up to %d: %w", span, to, err)
		}
		st.Visited += int64(c.visited)
		st.Removed += int64(c.removed)
		st.Bytes += c.bytes
		st.Complete = c.next == nil
		if pace != nil {
			if err := pace(c.visited + c.removed); err != nil {
				return st, err
			}
		}
	}
	return st, nil
}

// gcChunk is one step of a collection.
type gcChunk struct {
	e    *Engine
	span mvcc.Span
	to   mvcc.Revision
	next []byte // index key from which to go on; nil at the end

	visited, removed int
	bytes            int64
	b                *pebble.Batch
	key, slot        []byte
	pending          mvcc.Version // a tombstone to remove once all it hides is gone
}

// collect handles the next chunk and commits its removals.
func (c *gcChunk) collect(run *gcRun) (err error) {
	c.visited, c.removed, c.bytes = 0, 0, 0
	c.b = c.e.db.NewBatch()
	defer func() { err = errors.Join(err, c.b.Close()) }()
	upper := appendIndexKey(nil, c.to+1, 0)
	index, err := c.e.db.NewIter(&pebble.IterOptions{LowerBound: c.next, UpperBound: upper})
	if err != nil {
		return err
	}
	next, err := c.walk(index)
	if err = errors.Join(err, index.Close()); err != nil {
		return err
	}
	c.next = next
	if c.b.Empty() {
		return nil
	}
	c.e.installs.mu.Lock()
	defer c.e.installs.mu.Unlock()
	if run.void {
		return ErrSpanReplaced
	}
	return c.e.commit(c.b, totals{bytes: -c.bytes}, 0)
}

// walk goes over index records until the chunk is full; it returns where to go on.
func (c *gcChunk) walk(index *pebble.Iterator) (next []byte, err error) {
	// Both iterators see one state: a version written between them would look like damage.
	versions, err := index.Clone(pebble.CloneOptions{IterOptions: new(pebble.IterOptions)})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, versions.Close()) }()
	for ok := index.First(); ok; ok = index.Next() {
		enc, err := index.ValueAndErr()
		if err != nil {
			return nil, err
		}
		key, err := decodePlain(enc)
		if err != nil {
			return nil, err
		}
		c.visited++
		if c.span.Contains(key) {
			rev, _, err := decodeIndexKey(index.Key())
			if err != nil {
				return nil, err
			}
			done, err := c.removeSuperseded(versions, key, rev)
			if err != nil {
				return nil, err
			}
			if !done {
				return append([]byte{}, index.Key()...), nil // the same record again
			}
		}
		if c.visited >= c.e.gc.visits || c.removed >= c.e.gc.removes {
			return append(append([]byte{}, index.Key()...), 0), nil
		}
	}
	return nil, index.Error()
}

// removeSuperseded removes what the version of key at rev supersedes, if it is the key's newest
// version <= to. It returns false when the chunk is full before the key is done. A tombstone goes
// last: a crash between two chunks must not bring back what it hides.
func (c *gcChunk) removeSuperseded(it *pebble.Iterator, key []byte, rev mvcc.Revision) (done bool, err error) {
	c.key = appendVersionKey(c.key[:0], key, c.to)
	if !it.SeekPrefixGE(c.key) || keyRevision(it.Key()) != rev {
		return true, it.Error()
	}
	var v mvcc.Version
	if err := readVersion(it, &v); err != nil {
		return false, err
	}
	v.Key = key
	c.pending = v
	for it.Next() {
		if c.removed >= c.e.gc.removes {
			return false, nil
		}
		if err := readVersion(it, &v); err != nil {
			return false, err
		}
		if err := c.remove(it.Key(), &v); err != nil {
			return false, err
		}
	}
	if err := it.Error(); err != nil {
		return false, err
	}
	if c.pending.Tombstone() && rev < c.to {
		c.key = appendVersionKey(c.key[:0], key, rev)
		return true, c.remove(c.key, &c.pending)
	}
	return true, nil
}

func (c *gcChunk) remove(enc []byte, v *mvcc.Version) error {
	c.removed++
	c.bytes += v.LogicalSize()
	c.slot = appendIndexKey(c.slot[:0], v.Mod, v.Sub)
	return errors.Join(c.b.Delete(enc, nil), c.b.Delete(c.slot, nil))
}
