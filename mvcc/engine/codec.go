package engine

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"

	"braid/mvcc"
)

// Every engine key starts with a space byte. In the version spaces follows the escaped key (00
// becomes 00 FF), the terminator 00 01 and the inverted revision in eight bytes: versions of one
// key are neighbours, newest first, and keys sort as their bytes do. The other spaces have keys
// of fixed length or fixed names. Numbers are big-endian.
const (
	spaceLease    = 'l' // l lease(8) key: which keys a lease is attached to
	spaceMeta     = 'm' // the engine's own records
	spacePosition = 'p' // p group(8) -> position: applied positions, floors within them
	spaceIndex    = 'r' // r revision(8) sub(4) -> key: the revision index
	spaceSystem   = 's' // s kind escaped place, terminator, id(8): records of the system space
	spaceUser     = 'u' // versions of user keys
)

const (
	escape     = 0x00
	escaped00  = 0xFF
	terminator = 0x01 // after escape
	// terminatorNext replaces terminator to give the smallest string above all versions of a key.
	terminatorNext = 0x02

	revisionLen   = 8
	indexKeyLen   = 1 + 8 + 4
	positionKeyLn = 1 + 8
)

// Value formats: the first byte of a version's value says how the rest is laid out and whether
// the version is a tombstone, so that counting looks at one byte.
//
//	put:       uvarint(Mod-Create) uvarint(Version) uvarint(Sub) varint(Lease) value
//	tombstone: uvarint(Sub)
const (
	valuePut1       = 0x10
	valueTombstone1 = 0x11
	// plain1 precedes index records (then a key) and positions (then the position).
	plain1 = 0x10
)

var (
	errBadKey   = errors.New("engine: malformed key")
	errBadValue = errors.New("engine: malformed value")
)

// appendEscaped appends key with every 00 escaped, without terminator.
func appendEscaped(dst, key []byte) []byte {
	for {
		i := bytes.IndexByte(key, escape)
		if i < 0 {
			return append(dst, key...)
		}
		dst = append(append(dst, key[:i]...), escape, escaped00)
		key = key[i+1:]
	}
}

// appendPrefix appends what all versions of a user key start with. It is also the lower bound of
// the key and the upper bound of all smaller ones.
func appendPrefix(dst, key []byte) []byte {
	return append(appendEscaped(append(dst, spaceUser), key), escape, terminator)
}

// appendVersionKey appends the engine key of a user key's version. With mvcc.Latest it sorts
// before all versions of the key.
func appendVersionKey(dst, key []byte, rev mvcc.Revision) []byte {
	return appendRevision(appendPrefix(dst, key), rev)
}

func appendRevision(dst []byte, rev mvcc.Revision) []byte {
	return binary.BigEndian.AppendUint64(dst, ^uint64(rev))
}

// versionKeyLen is the length of appendVersionKey's result.
func versionKeyLen(key []byte) int {
	return 1 + len(key) + bytes.Count(key, []byte{escape}) + 2 + revisionLen
}

// putVersionKey encodes into dst, which has versionKeyLen bytes.
func putVersionKey(dst, key []byte, rev mvcc.Revision) {
	if out := appendVersionKey(dst[:0], key, rev); len(out) != len(dst) {
		panic("engine: version key length")
	}
}

// appendUserLower and appendUserUpper give the engine bounds of a span of user keys.
func appendUserLower(dst []byte, span mvcc.Span) []byte { return appendPrefix(dst, span.Start) }

func appendUserUpper(dst []byte, span mvcc.Span) []byte {
	if span.End == nil {
		return append(dst, spaceUser+1)
	}
	return appendPrefix(dst, span.End)
}

// keyRevision returns the revision of a version key. It does not check the rest.
func keyRevision(enc []byte) mvcc.Revision {
	return mvcc.Revision(^binary.BigEndian.Uint64(enc[len(enc)-revisionLen:]))
}

// decodeVersionKey splits a version key of the user space. The key is a part of enc, or lies in
// scratch when it had to be unescaped; grown scratch is returned.
func decodeVersionKey(enc, scratch []byte) (key []byte, rev mvcc.Revision, _ []byte, err error) {
	n := splitKey(enc)
	if n == len(enc) || enc[0] != spaceUser {
		return nil, 0, scratch, fmt.Errorf("%w: % x", errBadKey, enc)
	}
	key, scratch, err = unescape(enc[1:n-2], scratch)
	return key, keyRevision(enc), scratch, err
}

func unescape(body, scratch []byte) (key, _ []byte, err error) {
	if bytes.IndexByte(body, escape) < 0 {
		return body, scratch, nil
	}
	scratch = scratch[:0]
	for i := 0; i < len(body); i++ {
		scratch = append(scratch, body[i])
		if body[i] == escape {
			if i++; i == len(body) || body[i] != escaped00 {
				return nil, scratch, fmt.Errorf("%w: bad escape in % x", errBadKey, body)
			}
		}
	}
	return scratch, scratch, nil
}

// appendValue appends a version's value.
func appendValue(dst []byte, v *mvcc.Version) []byte {
	if v.Tombstone() {
		return binary.AppendUvarint(append(dst, valueTombstone1), uint64(v.Sub))
	}
	dst = binary.AppendUvarint(append(dst, valuePut1), uint64(v.Mod-v.Create))
	dst = binary.AppendUvarint(dst, uint64(v.Version))
	dst = binary.AppendUvarint(dst, uint64(v.Sub))
	dst = binary.AppendVarint(dst, v.Lease)
	return append(dst, v.Value...)
}

// isTombstone looks at a value's first byte only.
func isTombstone(enc []byte) bool { return len(enc) > 0 && enc[0] == valueTombstone1 }

// decodeValue fills in everything of v but Key; v.Mod must be set. v.Value is a part of enc.
func decodeValue(enc []byte, v *mvcc.Version) error {
	v.Create, v.Version, v.Sub, v.Lease, v.Value = 0, 0, 0, 0, nil
	if len(enc) == 0 {
		return fmt.Errorf("%w: empty", errBadValue)
	}
	r := varints{b: enc[1:]}
	switch enc[0] {
	case valueTombstone1:
		v.Sub = int64(r.uvarint())
		if len(r.b) != 0 {
			r.bad = true
		}
	case valuePut1:
		v.Create = v.Mod - mvcc.Revision(r.uvarint())
		v.Version = int64(r.uvarint())
		v.Sub = int64(r.uvarint())
		v.Lease = r.varint()
		v.Value = r.b
	default:
		return fmt.Errorf("%w: unknown format %#x", errBadValue, enc[0])
	}
	if r.bad {
		return fmt.Errorf("%w: % x", errBadValue, enc[:min(len(enc), 24)])
	}
	return nil
}

// varints reads variable-length numbers from the front of b; bad is sticky.
type varints struct {
	b   []byte
	bad bool
}

func (r *varints) uvarint() uint64 {
	x, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.bad = true
		return 0
	}
	r.b = r.b[n:]
	return x
}

func (r *varints) varint() int64 {
	x, n := binary.Varint(r.b)
	if n <= 0 {
		r.bad = true
		return 0
	}
	r.b = r.b[n:]
	return x
}

// bytes reads a length and as many bytes.
func (r *varints) bytes() []byte {
	n := r.uvarint()
	if r.bad || n > uint64(len(r.b)) {
		r.bad = true
		return nil
	}
	b := r.b[:n:n]
	r.b = r.b[n:]
	return b
}

func appendIndexKey(dst []byte, rev mvcc.Revision, sub int64) []byte {
	dst = binary.BigEndian.AppendUint64(append(dst, spaceIndex), uint64(rev))
	return binary.BigEndian.AppendUint32(dst, uint32(sub))
}

func decodeIndexKey(enc []byte) (rev mvcc.Revision, sub int64, err error) {
	if len(enc) != indexKeyLen || enc[0] != spaceIndex {
		return 0, 0, fmt.Errorf("%w: % x", errBadKey, enc)
	}
	return mvcc.Revision(binary.BigEndian.Uint64(enc[1:])), int64(binary.BigEndian.Uint32(enc[9:])), nil
}

func appendPositionKey(dst []byte, group uint64) []byte {
	return binary.BigEndian.AppendUint64(append(dst, spacePosition), group)
}

func decodePositionKey(enc []byte) (group uint64, err error) {
	if len(enc) != positionKeyLn || enc[0] != spacePosition {
		return 0, fmt.Errorf("%w: % x", errBadKey, enc)
	}
	return binary.BigEndian.Uint64(enc[1:]), nil
}

// decodePlain strips the format byte of an index record or a position.
func decodePlain(enc []byte) ([]byte, error) {
	if len(enc) == 0 || enc[0] != plain1 {
		return nil, fmt.Errorf("%w: unknown format in % x", errBadValue, enc[:min(len(enc), 24)])
	}
	return enc[1:], nil
}

// valueLen is the length of a version's value.
func valueLen(v *mvcc.Version) int {
	if v.Tombstone() {
		return 1 + uvarintLen(uint64(v.Sub))
	}
	return 1 + uvarintLen(uint64(v.Mod-v.Create)) + uvarintLen(uint64(v.Version)) + uvarintLen(uint64(v.Sub)) +
		uvarintLen(uint64(v.Lease)<<1^uint64(v.Lease>>63)) + len(v.Value)
}

// putValue encodes into dst, which has valueLen bytes.
func putValue(dst []byte, v *mvcc.Version) {
	if out := appendValue(dst[:0], v); len(out) != len(dst) {
		panic("engine: value length")
	}
}

func uvarintLen(x uint64) int { return (bits.Len64(x|1) + 6) / 7 }
