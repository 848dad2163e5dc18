package engine

import (
	"bytes"
	"errors"
	"fmt"
	"sync"

	"github.com/cockroachdb/pebble/v2"

	"braid/mvcc"
)

// source opens iterators over one state: the latest (the database) or a pinned one (a snapshot).
type source interface {
	newIter(o *pebble.IterOptions) (*pebble.Iterator, error)
}

type dbSource struct{ db *pebble.DB }

func (s dbSource) newIter(o *pebble.IterOptions) (*pebble.Iterator, error) { return s.db.NewIter(o) }

// reader implements mvcc.Reader, and the other reads, over a source.
type reader struct{ src source }

// readBuf holds the buffers of one read, pooled.
type readBuf struct {
	lower, upper []byte // bounds
	seek         []byte // target of a seek
	prefix       []byte // of the key that the iterator is on
	unescaped    []byte
	iterOpts     pebble.IterOptions
}

var readBufs = sync.Pool{New: func() any { return new(readBuf) }}

func getBuf() *readBuf { return readBufs.Get().(*readBuf) }

// release keeps the buffers unless a huge key made them huge.
func (b *readBuf) release() {
	const keepMax = 64 << 10
	if cap(b.lower)+cap(b.upper)+cap(b.seek)+cap(b.prefix)+cap(b.unescaped) > keepMax {
		return
	}
	b.iterOpts = pebble.IterOptions{}
	readBufs.Put(b)
}

// spanIter opens an iterator over the versions of a span; b keeps the bounds, so it must outlive
// the iterator.
func (r reader) spanIter(b *readBuf, span mvcc.Span) (*pebble.Iterator, error) {
	b.lower = appendUserLower(b.lower[:0], span)
	b.upper = appendUserUpper(b.upper[:0], span)
	b.iterOpts = pebble.IterOptions{LowerBound: b.lower, UpperBound: b.upper}
	it, err := r.src.newIter(&b.iterOpts)
	if err != nil {
		return nil, fmt.Errorf("engine: %w", err)
	}
	return it, nil
}

// getOptions make a get ask the last level's bloom filters too: a put of a new key is evaluated
// with a get, and without them unpacks a data block to find nothing.
var getOptions = pebble.IterOptions{UseL6Filters: true}

// Get implements mvcc.Reader: one prefix seek, which bloom filters can answer for absent keys.
func (r reader) Get(key []byte, at mvcc.Revision) (v mvcc.Version, found bool, err error) {
	b := getBuf()
	defer b.release()
	it, found, err := r.find(b, key, at, &v)
	if found {
		buf := make([]byte, 0, len(key)+len(v.Value))
		buf = append(append(buf, key...), v.Value...)
		v.Key = buf[:len(key):len(key)]
		if !v.Tombstone() {
			v.Value = buf[len(key):]
		}
	}
	if err = closeFound(it, err); err != nil {
		return mvcc.Version{}, false, fmt.Errorf("engine: get %q: %w", key, err)
	}
	return v, found, nil
}

// find looks for the newest version of a key that is not newer than at. What v refers to is key and the
// iterator's own, valid until that is closed, which is the caller's part (closeFound).
func (r reader) find(b *readBuf, key []byte, at mvcc.Revision, v *mvcc.Version) (it *pebble.Iterator, found bool, err error) {
	if it, err = r.src.newIter(&getOptions); err != nil {
		return nil, false, err
	}
	b.seek = appendVersionKey(b.seek[:0], key, at)
	if !it.SeekPrefixGE(b.seek) {
		return it, false, nil // closing says why
	}
	v.Key = key
	err = readVersion(it, v)
	return it, err == nil, err
}

func closeFound(it *pebble.Iterator, err error) error {
	if it == nil {
		return err
	}
	return errors.Join(err, it.Close())
}

// scanOne is a scan of a span that can hold one key only.
func (r reader) scanOne(key []byte, at mvcc.Revision, opts mvcc.ScanOptions, fn func(v *mvcc.Version) bool) error {
	b := getBuf()
	defer b.release()
	var v mvcc.Version
	it, found, err := r.find(b, key, at, &v)
	if found && !v.Tombstone() {
		if opts.KeysOnly {
			v.Value = nil
		}
		fn(&v)
	}
	if err = closeFound(it, err); err != nil {
		return fmt.Errorf("engine: scan of %q: %w", key, err)
	}
	return nil
}

// readVersion decodes the version that the iterator is on, except for its key.
func readVersion(it *pebble.Iterator, v *mvcc.Version) error {
	v.Mod = keyRevision(it.Key())
	enc, err := it.ValueAndErr()
	if err != nil {
		return err
	}
	return decodeValue(enc, v)
}

// nextsBeforeSeek is how many versions that are too new are stepped over before seeking: a step
// costs a tenth of a seek, and most keys have few versions above a recent revision.
const nextsBeforeSeek = 6

// settle moves an iterator, which is on the newest version of some key, to the newest version
// <= at of this key, or of the first key after it that has one. b.prefix is overwritten.
func settle(it *pebble.Iterator, b *readBuf, at mvcc.Revision) bool {
	valid := it.Valid()
	for valid {
		k := it.Key()
		if keyRevision(k) <= at {
			return true
		}
		b.prefix = append(b.prefix[:0], k[:len(k)-revisionLen]...)
		same := true
		for i := 0; i < nextsBeforeSeek && same; i++ {
			if !it.Next() {
				return false
			}
			k = it.Key()
			if same = hasPrefix(k, b.prefix); same && keyRevision(k) <= at {
				return true
			}
		}
		if same {
			b.seek = appendRevision(append(b.seek[:0], b.prefix...), at)
			valid = it.SeekGE(b.seek) // this key at `at`, or the newest version of a later key
		}
	}
	return false
}

// hasPrefix says whether a version key has exactly this prefix.
func hasPrefix(k, prefix []byte) bool {
	return len(k) == len(prefix)+revisionLen && bytes.HasPrefix(k, prefix)
}

// Scan implements mvcc.Reader.
func (r reader) Scan(span mvcc.Span, at mvcc.Revision, opts mvcc.ScanOptions, fn func(v *mvcc.Version) bool) error {
	if span.Empty() {
		return nil
	}
	if key, ok := span.Single(); ok {
		return r.scanOne(key, at, opts, fn)
	}
	b := getBuf()
	defer b.release()
	it, err := r.spanIter(b, span)
	if err != nil {
		return err
	}
	var v mvcc.Version
	it.First()
	for settle(it, b, at) {
		var enc []byte
		if enc, err = it.ValueAndErr(); err != nil {
			break
		}
		if !isTombstone(enc) {
			if v.Key, v.Mod, b.unescaped, err = decodeVersionKey(it.Key(), b.unescaped); err != nil {
				break
			}
			if err = decodeValue(enc, &v); err != nil {
				break
			}
			if opts.KeysOnly {
				v.Value = nil
			}
			if !fn(&v) {
				break
			}
		}
		it.NextPrefix()
	}
	if err = errors.Join(err, it.Close()); err != nil {
		return fmt.Errorf("engine: scan %v: %w", span, err)
	}
	return nil
}

// Short attributes are what Pebble keeps beside a key whose value lies elsewhere: enough to count
// without fetching.
const (
	attributeAlive     pebble.ShortAttribute = 1
	attributeTombstone pebble.ShortAttribute = 2
)

func valueAttribute(_ []byte, _ int, value []byte) (pebble.ShortAttribute, error) {
	if isTombstone(value) {
		return attributeTombstone, nil
	}
	return attributeAlive, nil
}

// alive looks at a version's tombstone mark without fetching its value.
func alive(it *pebble.Iterator) (bool, error) {
	lazy := it.LazyValue()
	switch a, _ := lazy.TryGetShortAttribute(); a {
	case attributeAlive:
		return true, nil
	case attributeTombstone:
		return false, nil
	}
	enc, err := it.ValueAndErr()
	return !isTombstone(enc), err
}

// Count implements mvcc.Reader.
func (r reader) Count(span mvcc.Span, at mvcc.Revision) (n int64, err error) {
	if span.Empty() {
		return 0, nil
	}
	b := getBuf()
	defer b.release()
	it, err := r.spanIter(b, span)
	if err != nil {
		return 0, err
	}
	it.First()
	for settle(it, b, at) {
		var ok bool
		if ok, err = alive(it); err != nil {
			break
		}
		if ok {
			n++
		}
		it.NextPrefix()
	}
	if err = errors.Join(err, it.Close()); err != nil {
		return 0, fmt.Errorf("engine: count %v: %w", span, err)
	}
	return n, nil
}

// eachVersion calls fn with every version of span, by key and newest first. fn gets the engine's
// own encodings, valid during the call.
func (r reader) eachVersion(span mvcc.Span, fn func(key, value []byte) error) (err error) {
	if span.Empty() {
		return nil
	}
	b := getBuf()
	defer b.release()
	it, err := r.spanIter(b, span)
	if err != nil {
		return err
	}
	for ok := it.First(); ok && err == nil; ok = it.Next() {
		var enc []byte
		if enc, err = it.ValueAndErr(); err == nil {
			err = fn(it.Key(), enc)
		}
	}
	return errors.Join(err, it.Close())
}
