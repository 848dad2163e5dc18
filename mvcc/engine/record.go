package engine

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"braid/mvcc"
)

// The index of leases says which keys are attached to a lease. It follows from the newest versions
// of keys, is written with them, and is rebuilt for a span that arrives by snapshot; so nothing has
// to read all keys at a start, and an end of a lease costs what the lease has.

const leaseKeyLen = 1 + 8 // before the user key

func appendLeaseKey(dst []byte, lease int64, key []byte) []byte {
	dst = binary.BigEndian.AppendUint64(append(dst, spaceLease), uint64(lease))
	return append(dst, key...)
}

// appendRecordKey lays a record out as the version of a key is, the id in the place of the
// revision: the comparer and its bloom filters know that form.
func appendRecordKey(dst []byte, k mvcc.RecordKey) []byte {
	return binary.BigEndian.AppendUint64(appendRecordPlace(dst, k.Kind, k.At), uint64(k.ID))
}

// appendRecordPlace appends what all records of a kind and place start with, which is also the
// bound between smaller places and this one.
func appendRecordPlace(dst []byte, kind mvcc.RecordKind, at []byte) []byte {
	return append(appendEscaped(append(dst, spaceSystem, byte(kind)), at), escape, terminator)
}

// decodeRecordKey splits a key of the system space; the place is a copy.
func decodeRecordKey(enc []byte) (k mvcc.RecordKey, err error) {
	n := splitKey(enc)
	if n == len(enc) || enc[0] != spaceSystem || n < 4 {
		return k, fmt.Errorf("%w: % x", errBadKey, enc)
	}
	at, _, err := unescape(enc[2:n-2], nil)
	return mvcc.RecordKey{Kind: mvcc.RecordKind(enc[1]), At: bytes.Clone(at), ID: int64(binary.BigEndian.Uint64(enc[n:]))}, err
}

func (b *batch) attach(lease int64, key []byte) error {
	op := b.part(partLeases).SetDeferred(leaseKeyLen+len(key), 1)
	appendLeaseKey(op.Key[:0], lease, key)
	op.Value[0] = plain1
	if err := op.Finish(); err != nil {
		return fmt.Errorf("engine: attach %q: %w", key, err)
	}
	return nil
}

// Detach implements mvcc.Batch.
func (b *batch) Detach(lease int64, key []byte) error {
	if b.done {
		return mvcc.ErrBatchDone
	}
	op := b.part(partLeases).DeleteDeferred(leaseKeyLen + len(key))
	appendLeaseKey(op.Key[:0], lease, key)
	if err := op.Finish(); err != nil {
		return fmt.Errorf("engine: detach %q: %w", key, err)
	}
	return nil
}

// SetRecord implements mvcc.Batch.
func (b *batch) SetRecord(k mvcc.RecordKey, value []byte) error {
	if b.done {
		return mvcc.ErrBatchDone
	}
	n := 2 + len(k.At) + bytes.Count(k.At, []byte{escape}) + 2 + revisionLen
	var op *pebble.DeferredBatchOp
	if value == nil {
		op = b.part(partRecords).DeleteDeferred(n)
	} else {
		op = b.part(partRecords).SetDeferred(n, 1+len(value))
		op.Value[0] = plain1
		copy(op.Value[1:], value)
	}
	if out := appendRecordKey(op.Key[:0], k); len(out) != n {
		panic("engine: record key length")
	}
	if err := op.Finish(); err != nil {
		return fmt.Errorf("engine: record %v: %w", k, err)
	}
	return nil
}

// Attached implements mvcc.Reader.
//
// One iterator goes from lease to lease: to make one costs more than to move it, and moving it a little
// forward, as from an id to the next one, costs least.
func (r reader) Attached(leases []int64, span mvcc.Span, fn func(lease int64, key []byte) bool) error {
	if span.Empty() || len(leases) == 0 {
		return nil
	}
	b := getBuf()
	defer b.release()
	it, err := r.src.newIter(&leaseOptions)
	if err != nil {
		return fmt.Errorf("engine: %w", err)
	}
	more := true
	for i := 0; i < len(leases) && more; i++ {
		b.seek = appendLeaseKey(b.seek[:0], leases[i], span.Start)
		for ok := it.SeekGE(b.seek); ok && more; ok = more && it.Next() {
			enc := it.Key()
			if !bytes.Equal(enc[:leaseKeyLen], b.seek[:leaseKeyLen]) {
				break
			}
			key := enc[leaseKeyLen:]
			if span.End != nil && bytes.Compare(key, span.End) >= 0 {
				break
			}
			more = fn(leases[i], key)
		}
		if err = it.Error(); err != nil {
			break
		}
	}
	if err = errors.Join(err, it.Close()); err != nil {
		return fmt.Errorf("engine: keys of leases: %w", err)
	}
	return nil
}

// leaseOptions keep an iterator within the index of leases.
var leaseOptions = pebble.IterOptions{LowerBound: []byte{spaceLease}, UpperBound: []byte{spaceLease + 1}}

// Record implements mvcc.Reader.
func (r reader) Record(k mvcc.RecordKey) (value []byte, found bool, err error) {
	err = r.Lookup([]mvcc.RecordKey{k}, func(_ int, v []byte) { value, found = v, true })
	return value, found, err
}

// Lookup implements mvcc.Reader.
func (r reader) Lookup(keys []mvcc.RecordKey, fn func(i int, value []byte)) error {
	b := getBuf()
	defer b.release()
	it, err := r.src.newIter(&getOptions)
	if err != nil {
		return fmt.Errorf("engine: %w", err)
	}
	for i := 0; i < len(keys) && err == nil; i++ {
		b.seek = appendRecordKey(b.seek[:0], keys[i])
		if !it.SeekPrefixGE(b.seek) {
			err = it.Error()
			continue
		}
		if !bytes.Equal(it.Key(), b.seek) {
			continue
		}
		var enc []byte
		if enc, err = it.ValueAndErr(); err == nil {
			if enc, err = decodePlain(enc); err == nil {
				fn(i, append([]byte{}, enc...))
			}
		}
	}
	if err = errors.Join(err, it.Close()); err != nil {
		return fmt.Errorf("engine: records: %w", err)
	}
	return nil
}

// Records implements mvcc.Reader.
func (r reader) Records(kind mvcc.RecordKind, span mvcc.Span, fn func(k mvcc.RecordKey, value []byte) bool) error {
	err := r.eachRecord(kind, span, func(enc, value []byte) (bool, error) {
		k, err := decodeRecordKey(enc)
		if err != nil {
			return false, err
		}
		value, err = decodePlain(value)
		return err == nil && fn(k, value), err
	})
	if err != nil {
		return fmt.Errorf("engine: records %c of %v: %w", kind, span, err)
	}
	return nil
}

// eachRecord calls fn with the engine's own encodings, valid during the call.
func (r reader) eachRecord(kind mvcc.RecordKind, span mvcc.Span, fn func(key, value []byte) (bool, error)) error {
	if span.Empty() {
		return nil
	}
	o := pebble.IterOptions{LowerBound: appendRecordPlace(nil, kind, span.Start), UpperBound: []byte{spaceSystem, byte(kind) + 1}}
	if span.End != nil {
		o.UpperBound = appendRecordPlace(nil, kind, span.End)
	}
	return r.each(&o, fn)
}

// each calls fn with every key between bounds until it returns false.
func (r reader) each(o *pebble.IterOptions, fn func(key, value []byte) (bool, error)) error {
	it, err := r.src.newIter(o)
	if err != nil {
		return err
	}
	for ok := it.First(); ok && err == nil; ok = ok && it.Next() {
		var value []byte
		if value, err = it.ValueAndErr(); err == nil {
			ok, err = fn(it.Key(), value)
		}
	}
	return errors.Join(err, it.Close())
}
