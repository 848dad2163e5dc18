package engine

import (
	"bytes"
	"math"
	"slices"
	"testing"

	"braid/mvcc"
)

func FuzzVersionKey(f *testing.F) {
	f.Add([]byte(""), int64(1), []byte("a"), int64(2))
	f.Add([]byte{0}, int64(1), []byte{0, 1}, int64(1))
	f.Add([]byte{0, 0xff}, int64(7), []byte{0, 0xff, 0}, int64(math.MaxInt64))
	f.Add([]byte("a\x00\x01bcdefgh"), int64(1), []byte("a"), int64(1))
	f.Add([]byte{0xff, 0xff}, int64(256), []byte{0xff}, int64(255))
	f.Fuzz(func(t *testing.T, a []byte, ra int64, b []byte, rb int64) {
		ra, rb = max(ra&math.MaxInt64, 1), max(rb&math.MaxInt64, 1)
		ea := appendVersionKey(nil, a, mvcc.Revision(ra))
		eb := appendVersionKey(nil, b, mvcc.Revision(rb))
		want := bytes.Compare(a, b)
		if want == 0 {
			want = -cmpInt(ra, rb) // newest first
		}
		if got := comparer.Compare(ea, eb); got != want {
			t.Fatalf("%q@%d against %q@%d: %d, want %d", a, ra, b, rb, got, want)
		}
		key, rev, _, err := decodeVersionKey(ea, nil)
		if err != nil || !bytes.Equal(key, a) || int64(rev) != ra {
			t.Fatalf("%q@%d decodes to %q@%d, %v", a, ra, key, rev, err)
		}
		if len(ea) != versionKeyLen(a) {
			t.Fatalf("length %d, not %d", len(ea), versionKeyLen(a))
		}
		prefix := ea[:splitKey(ea)]
		if !bytes.Equal(prefix, appendPrefix(nil, a)) || splitKey(prefix) != len(prefix) {
			t.Fatalf("split of %x: %x", ea, prefix)
		}
		// Bounds: [a, ...) holds all versions of b >= a, and none of smaller keys.
		if (comparer.Compare(eb, prefix) >= 0) != (bytes.Compare(b, a) >= 0) {
			t.Fatalf("bound %q does not part %q", a, b)
		}
		// The immediate successor lies above every version of a and below every other larger key.
		next := immediateSuccessor(nil, prefix)
		if (comparer.Compare(eb, next) >= 0) != (bytes.Compare(b, a) > 0) {
			t.Fatalf("successor of %q does not part %q@%d", a, b, rb)
		}
	})
}

func cmpInt(a, b int64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func FuzzVersionValue(f *testing.F) {
	f.Add(int64(9), int64(3), int64(4), int64(2), int64(-7), []byte("v"))
	f.Add(int64(1), int64(1), int64(1), int64(0), int64(math.MinInt64), []byte{})
	f.Add(int64(5), int64(0), int64(0), int64(math.MaxUint32), int64(0), []byte(nil))
	f.Fuzz(func(t *testing.T, mod, create, version, sub, lease int64, value []byte) {
		v := mvcc.Version{Mod: mvcc.Revision(mod), Create: mvcc.Revision(create), Version: version, Sub: sub, Lease: lease, Value: value}
		if v.Check() != nil {
			t.Skip()
		}
		enc := appendValue(nil, &v)
		if len(enc) != valueLen(&v) {
			t.Fatalf("length %d, not %d", len(enc), valueLen(&v))
		}
		got := mvcc.Version{Mod: v.Mod}
		if err := decodeValue(enc, &got); err != nil {
			t.Fatal(err)
		}
		if got.String() != v.String() || isTombstone(enc) != v.Tombstone() {
			t.Fatalf("%v decodes to %v", &v, &got)
		}
	})
}

func FuzzDecodeValue(f *testing.F) {
	f.Add([]byte{valuePut1, 0, 1, 0, 0, 'x'})
	f.Add([]byte{valueTombstone1, 0})
	f.Add([]byte{0x20})
	f.Fuzz(func(t *testing.T, enc []byte) {
		v := mvcc.Version{Mod: 1 << 40}
		if decodeValue(enc, &v) == nil && len(enc) < 2 {
			t.Fatalf("%x is no value", enc)
		}
		key, _, _, err := decodeVersionKey(enc, nil)
		if err == nil && !bytes.Equal(appendPrefix(nil, key), enc[:splitKey(enc)]) {
			t.Fatalf("%x decodes to %q", enc, key)
		}
	})
}

// TestSpacesApart checks that keys of all spaces, and the bounds made of them, keep Split and
// Compare consistent.
func TestSpacesApart(t *testing.T) {
	keys := [][]byte{
		keyTotals, appendPositionKey(nil, 0), appendPositionKey(nil, 1<<40|1),
		appendIndexKey(nil, 1, 0), appendIndexKey(nil, 1, 1), appendIndexKey(nil, 0x0001, 0x0100),
		appendIndexKey(nil, 256, 0), {spaceUser}, appendPrefix(nil, nil), appendVersionKey(nil, nil, 1),
		appendVersionKey(nil, []byte{0}, 1), appendVersionKey(nil, []byte("a"), 1), {spaceUser + 1},
	}
	if !slices.IsSortedFunc(keys, comparer.Compare) {
		t.Error("not sorted")
	}
	for _, a := range keys {
		for _, b := range keys {
			pa, pb := a[:splitKey(a)], b[:splitKey(b)]
			if c := bytes.Compare(pa, pb); c != 0 && c != comparer.Compare(a, b) {
				t.Errorf("prefixes of %x and %x sort differently", a, b)
			}
		}
		if s := immediateSuccessor(nil, a[:splitKey(a)]); comparer.Compare(s, a) <= 0 {
			t.Errorf("successor of %x is not above it", a)
		}
	}
}
