package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"braid/mvcc"
)

// ErrDamaged says that the store contradicts itself: an index record names a version that is not
// there, although records live exactly as long as versions (R3).
var ErrDamaged = errors.New("engine: revision index and versions disagree")

// indexPollEvery is how many records are read between two looks at the context.
const indexPollEvery = 256

// walkIndex calls fn with the index records of [from, to] whose keys lie in span, in (rev, sub)
// order, and an iterator over the versions of the same state. key is valid during the call.
func (r reader) walkIndex(ctx context.Context, from, to mvcc.Revision, span mvcc.Span,
	fn func(versions *pebble.Iterator, rev mvcc.Revision, sub int64, key []byte) error) (err error) {
	if span.Empty() || to < from {
		return nil
	}
	upper := []byte{spaceIndex + 1}
	if to < mvcc.Latest {
		upper = appendIndexKey(nil, to+1, 0)
	}
	index, err := r.src.newIter(&pebble.IterOptions{
		LowerBound: appendIndexKey(nil, max(from, 0), 0), UpperBound: upper})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, index.Close()) }()
	versions, err := index.Clone(pebble.CloneOptions{IterOptions: new(pebble.IterOptions)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, versions.Close()) }()
	n := 0
	for ok := index.First(); ok; ok = index.Next() {
		if n++; n%indexPollEvery == 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
		}
		enc, err := index.ValueAndErr()
		if err != nil {
			return err
		}
		key, err := decodePlain(enc)
		if err != nil {
			return err
		}
		if !span.Contains(key) {
			continue
		}
		rev, sub, err := decodeIndexKey(index.Key())
		if err != nil {
			return err
		}
		if err := fn(versions, rev, sub, key); err != nil {
			return err
		}
	}
	return index.Error()
}

// versionAt reads the version of key at exactly rev, into v. Its slices are valid until the next
// move of the iterator.
func versionAt(it *pebble.Iterator, b *readBuf, key []byte, rev mvcc.Revision, v *mvcc.Version) error {
	b.seek = appendVersionKey(b.seek[:0], key, rev)
	if !it.SeekPrefixGE(b.seek) || keyRevision(it.Key()) != rev {
		if err := it.Error(); err != nil {
			return err
		}
		return fmt.Errorf("%w: no version of %q at %d", ErrDamaged, key, rev)
	}
	v.Key = key
	return readVersion(it, v)
}

// Events implements mvcc.Reader.
func (r reader) Events(ctx context.Context, from, to mvcc.Revision, span mvcc.Span, fn func(v *mvcc.Version) error) error {
	b := getBuf()
	defer b.release()
	var v mvcc.Version
	err := r.walkIndex(ctx, from, to, span, func(versions *pebble.Iterator, rev mvcc.Revision, sub int64, key []byte) error {
		if err := versionAt(versions, b, key, rev, &v); err != nil {
			return err
		}
		if v.Sub != sub {
			return nil // its transaction wrote the key again: the last write is the version
		}
		return fn(&v)
	})
	if err != nil {
		return fmt.Errorf("engine: events %d..%d of %v: %w", from, to, span, err)
	}
	return nil
}

// HashSpan calls fn, in (revision, sub) order, with what etcd's HashKV at revision `at` takes in
// of span when the store was compacted at floor (0 or -1: never), beginning at revision from; 0
// is the beginning. It does not matter whether GC has
// reached the floor yet, as long as it has not passed it. alive says whether a key of the span is
// alive at `at` by what was walked; records marked IfEmpty count only when none is in the whole store.
//
// etcd skips a version at or below the floor unless it is its key's value at `at`; and a tombstone
// exactly at the floor, which some of its versions kept and others did not.
func (r reader) HashSpan(ctx context.Context, span mvcc.Span, from, at, floor mvcc.Revision, fn func(*mvcc.HashRecord) error) (alive bool, err error) {
	b := getBuf()
	defer b.release()
	var v mvcc.Version
	var rec mvcc.HashRecord
	err = r.walkIndex(ctx, from, at, span, func(versions *pebble.Iterator, rev mvcc.Revision, sub int64, key []byte) error {
		newest, err := newestAt(versions, b, key, at)
		if err != nil {
			return err
		}
		rec.IfEmpty = false
		if rev <= floor && newest != rev {
			if newest, err = newestAt(versions, b, key, floor); err != nil {
				return err
			}
			if newest != rev {
				return nil // a compaction at the floor removes it
			}
			rec.IfEmpty = true
			newest = 0
		}
		if err := versionAt(versions, b, key, rev, &v); err != nil {
			return err
		}
		if v.Sub != sub {
			return nil // its transaction wrote the key again: the last write is the version
		}
		if v.Tombstone() {
			if rev <= floor {
				return nil
			}
		} else if newest == rev {
			alive = true
		}
		rec.SetVersion(&v)
		return fn(&rec)
	})
	if err != nil {
		return false, fmt.Errorf("engine: hash %v at %d: %w", span, at, err)
	}
	return alive, nil
}

// newestAt returns the revision of key's newest version <= at, 0 when there is none.
func newestAt(it *pebble.Iterator, b *readBuf, key []byte, at mvcc.Revision) (mvcc.Revision, error) {
	b.seek = appendVersionKey(b.seek[:0], key, at)
	if it.SeekPrefixGE(b.seek) {
		return keyRevision(it.Key()), nil
	}
	return 0, it.Error()
}
