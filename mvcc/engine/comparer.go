package engine

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
)

// splitKey returns the length of a key's prefix: in the version spaces the part before the
// revision, elsewhere (and for bare prefixes, which serve as bounds) all of it.
//
// Inside an escaped key 00 is always followed by FF, so 00 01 ten bytes before the end can only
// be the terminator of a complete version key.
func splitKey(k []byte) int {
	n := len(k) - revisionLen
	if n < 3 || (k[0] != spaceUser && k[0] != spaceSystem) || k[n-2] != escape || k[n-1] != terminator {
		return len(k)
	}
	return n
}

// comparer orders engine keys as plain bytes. Its name is stored in every table: changing what it
// does needs a new name and a migration.
//
// ImmediateSuccessor must be above every version of the prefix. Appending 00, as for keys without
// a suffix, would sort below all of them, and NextPrefix would return keys twice or never end.
// Separator and Successor keep keys whole: a shortened key could be cut inside its terminator.
var comparer = (&pebble.Comparer{
	Name:                 "braid.mvcc.1",
	Compare:              bytes.Compare,
	Equal:                bytes.Equal,
	ComparePointSuffixes: bytes.Compare,
	CompareRangeSuffixes: bytes.Compare,
	Split:                splitKey,
	AbbreviatedKey:       abbreviate,
	Separator:            func(dst, a, _ []byte) []byte { return append(dst, a...) },
	Successor:            func(dst, a []byte) []byte { return append(dst, a...) },
	ImmediateSuccessor:   immediateSuccessor,
	FormatKey:            func(key []byte) fmt.Formatter { return prettyKey(key) },
}).EnsureDefaults()

func immediateSuccessor(dst, prefix []byte) []byte {
	n := len(prefix)
	if n >= 3 && (prefix[0] == spaceUser || prefix[0] == spaceSystem) &&
		prefix[n-2] == escape && prefix[n-1] == terminator {
		dst = append(dst, prefix...)
		dst[len(dst)-1] = terminatorNext
		return dst
	}
	return append(append(dst, prefix...), 0)
}

// abbreviate gives the first eight bytes: every space byte is the same within a table's
// neighbours, so the byte after it decides.
func abbreviate(key []byte) uint64 {
	if len(key) >= 8 {
		return binary.BigEndian.Uint64(key)
	}
	var v uint64
	for _, b := range key {
		v = v<<8 | uint64(b)
	}
	return v << (8 * (8 - len(key)))
}

// prettyKey prints an engine key for logs and test scripts.
type prettyKey []byte

func (k prettyKey) Format(s fmt.State, _ rune) {
	if len(k) == 0 {
		fmt.Fprint(s, "<empty>")
		return
	}
	if key, rev, _, err := decodeVersionKey(k, nil); err == nil {
		fmt.Fprintf(s, "u %q@%d", key, rev)
		return
	}
	if rev, sub, err := decodeIndexKey(k); err == nil {
		fmt.Fprintf(s, "r %d.%d", rev, sub)
		return
	}
	if group, err := decodePositionKey(k); err == nil {
		fmt.Fprintf(s, "p %d", group)
		return
	}
	fmt.Fprintf(s, "%c %q", k[0], []byte(k[1:]))
}

// sumMerger adds signed numbers: the engine's running totals are written as differences in the
// batches that cause them, so that they are exact after any crash without a read.
var sumMerger = &pebble.Merger{
	Name: "braid.sum.1",
	Merge: func(_, value []byte) (pebble.ValueMerger, error) {
		s := new(sum)
		return s, s.MergeNewer(value)
	},
}
