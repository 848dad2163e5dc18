package engine

import (
	"encoding/binary"
	"fmt"
	"io"

	"braid/mvcc"
)

// totals are what the store as a whole adds up to, kept as running sums: a batch or an import
// merges its change into one record, which is therefore as durable as what it counts.
type totals struct {
	bytes int64 // sum of LogicalSize over all versions
	keys  int64 // keys whose newest version is no tombstone
}

// put counts a version that is written as the newest of its key: transactions delete only what
// exists, so a first version adds a key and a tombstone takes one away.
func (t *totals) put(v *mvcc.Version) {
	t.bytes += v.LogicalSize()
	switch {
	case v.Tombstone():
		t.keys--
	case v.Version == 1:
		t.keys++
	}
}

func (t *totals) add(u totals) { t.bytes, t.keys = t.bytes+u.bytes, t.keys+u.keys }

func (t *totals) subtract(u totals) { t.bytes, t.keys = t.bytes-u.bytes, t.keys-u.keys }

// spanTotals adds up versions that come in the engine's order, the newest of each key first.
type spanTotals struct {
	totals
	key  []byte
	some bool
}

func (t *spanTotals) add(v *mvcc.Version) {
	t.bytes += v.LogicalSize()
	if t.some && string(t.key) == string(v.Key) {
		return
	}
	t.key, t.some = append(t.key[:0], v.Key...), true
	if !v.Tombstone() {
		t.keys++
	}
}

// appendSum appends a change of the totals: two varints, of which the second is left out when 0.
func appendSum(dst []byte, t totals) []byte {
	dst = binary.AppendVarint(dst, t.bytes)
	if t.keys != 0 {
		dst = binary.AppendVarint(dst, t.keys)
	}
	return dst
}

func decodeSum(enc []byte) (t totals, err error) {
	rest := enc
	for _, x := range []*int64{&t.bytes, &t.keys} {
		if len(rest) == 0 && x == &t.keys {
			break
		}
		v, n := binary.Varint(rest)
		if n <= 0 {
			return totals{}, fmt.Errorf("%w: sum % x", errBadValue, enc)
		}
		*x, rest = v, rest[n:]
	}
	if len(rest) > 0 {
		return totals{}, fmt.Errorf("%w: sum % x", errBadValue, enc)
	}
	return t, nil
}

// sum is the state of one merge of running totals.
type sum totals

func (s *sum) MergeNewer(value []byte) error {
	t, err := decodeSum(value)
	(*totals)(s).add(t)
	return err
}

func (s *sum) MergeOlder(value []byte) error { return s.MergeNewer(value) }

func (s *sum) Finish(bool) ([]byte, io.Closer, error) { return appendSum(nil, totals(*s)), nil, nil }
