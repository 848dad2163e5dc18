package mvcc

import (
	"encoding/binary"
	"hash/crc32"
	"math/bits"
)

// HashRecord is what etcd's HashKV feeds into its checksum for one version: the key under which
// etcd would store it and the marshalled mvccpb.KeyValue. The slices are valid during the call
// that hands the record out.
type HashRecord struct {
	Mod Revision
	Sub int64
	// IfEmpty marks a version at or below the floor that is superseded or deleted at the hashed
	// revision. etcd's collector keeps such versions, but HashKV takes them in only when no key of
	// the whole store is alive at the hashed revision.
	IfEmpty    bool
	Key, Value []byte
	User       []byte // the key that clients know
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// HashSeed is the checksum of the bucket's name, with which HashKV begins.
func HashSeed() uint32 { return crc32.Checksum([]byte("key"), castagnoli) }

// HashUpdate continues a checksum with a record.
func HashUpdate(crc uint32, r *HashRecord) uint32 {
	return crc32.Update(crc32.Update(crc, castagnoli, r.Key), castagnoli, r.Value)
}

// HashJoiner continues a checksum with parts of which only the checksums and the lengths are known,
// so that values need not travel to whoever merges the regions (C-3). The zero value is ready; it
// belongs to one goroutine.
type HashJoiner struct {
	powers map[int]uint32 // x^(8 n) by n: versions of one store have few different lengths
}

const (
	castagnoliPoly = 0x82f63b78 // reflected
	joinPowersMax  = 1 << 14
)

// Join returns the checksum of two byte strings together from the checksum of each and the length
// of the second. The method is that of zlib's crc32_combine: to append n bytes to a message is to
// multiply its checksum with x^(8 n) modulo the polynomial.
func (j *HashJoiner) Join(first, second uint32, secondLen int) uint32 {
	p, ok := j.powers[secondLen]
	if !ok {
		p = powerOfX(8 * uint64(secondLen))
		if j.powers == nil {
			j.powers = make(map[int]uint32)
		}
		if len(j.powers) < joinPowersMax {
			j.powers[secondLen] = p
		}
	}
	return multiply(p, first) ^ second
}

// multiply is multiplication modulo the polynomial. Bit 31 is x^0: the order is reflected.
func multiply(a, b uint32) uint32 {
	var sum uint32
	for ; a != 0; a <<= 1 {
		if a&(1<<31) != 0 {
			sum ^= b
		}
		carry := b & 1
		b >>= 1
		if carry != 0 {
			b ^= castagnoliPoly
		}
	}
	return sum
}

// powerOfX returns x^n modulo the polynomial, by squaring.
func powerOfX(n uint64) uint32 {
	result := uint32(1 << 31)
	square := uint32(1 << 30) // x^1
	for i := range bits.Len64(n) {
		if n>>i&1 != 0 {
			result = multiply(square, result)
		}
		square = multiply(square, square)
	}
	return result
}

// SetVersion fills the record in for a version.
func (r *HashRecord) SetVersion(v *Version) {
	r.Mod, r.Sub, r.User = v.Mod, v.Sub, v.Key
	k := binary.BigEndian.AppendUint64(r.Key[:0], uint64(v.Mod))
	k = binary.BigEndian.AppendUint64(append(k, '_'), uint64(v.Sub))
	if v.Tombstone() {
		k = append(k, 't')
	}
	r.Key = k
	r.Value = AppendKeyValue(r.Value[:0], v)
}

// AppendKeyValue appends the version as a marshalled mvccpb.KeyValue.
func AppendKeyValue(dst []byte, v *Version) []byte {
	dst = appendField(dst, 1, v.Key)
	dst = appendNumber(dst, 2, int64(v.Create))
	if !v.Tombstone() { // etcd's tombstones carry the key alone
		dst = appendNumber(dst, 3, int64(v.Mod))
	}
	dst = appendNumber(dst, 4, v.Version)
	dst = appendField(dst, 5, v.Value)
	return appendNumber(dst, 6, v.Lease)
}

func appendField(dst []byte, field byte, b []byte) []byte {
	if len(b) == 0 {
		return dst
	}
	dst = binary.AppendUvarint(append(dst, field<<3|2), uint64(len(b)))
	return append(dst, b...)
}

func appendNumber(dst []byte, field byte, n int64) []byte {
	if n == 0 {
		return dst
	}
	return binary.AppendUvarint(append(dst, field<<3), uint64(n))
}
