package mvcc

import (
	"encoding/binary"
	"hash/crc32"
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
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// HashSeed is the checksum of the bucket's name, with which HashKV begins.
func HashSeed() uint32 { return crc32.Checksum([]byte("key"), castagnoli) }

// HashUpdate continues a checksum with a record.
func HashUpdate(crc uint32, r *HashRecord) uint32 {
	return crc32.Update(crc32.Update(crc, castagnoli, r.Key), castagnoli, r.Value)
}

// HashAppend continues the checksum a, of some prefix, with a part of which only its checksum b
// and its length are known, so that values need not travel to whoever merges the regions (C-3).
// The method is zlib's crc32_combine: appending n zero bytes to a message is a linear map over
// GF(2) of its checksum, applied here by repeated squaring.
func HashAppend(a, b uint32, bLen int64) uint32 {
	if bLen <= 0 {
		return a
	}
	var even, odd [32]uint32
	odd[0] = crc32.Castagnoli // one zero bit
	for i := 1; i < 32; i++ {
		odd[i] = 1 << (i - 1)
	}
	squareGF2(&even, &odd) // two zero bits
	squareGF2(&odd, &even) // four
	for {
		squareGF2(&even, &odd)
		if bLen&1 != 0 {
			a = timesGF2(&even, a)
		}
		if bLen >>= 1; bLen == 0 {
			break
		}
		squareGF2(&odd, &even)
		if bLen&1 != 0 {
			a = timesGF2(&odd, a)
		}
		if bLen >>= 1; bLen == 0 {
			break
		}
	}
	return a ^ b
}

func timesGF2(m *[32]uint32, v uint32) (sum uint32) {
	for i := 0; v != 0; i, v = i+1, v>>1 {
		if v&1 != 0 {
			sum ^= m[i]
		}
	}
	return sum
}

func squareGF2(dst, m *[32]uint32) {
	for i := range m {
		dst[i] = timesGF2(m, m[i])
	}
}

// SetVersion fills the record in for a version.
func (r *HashRecord) SetVersion(v *Version) {
	r.Mod, r.Sub = v.Mod, v.Sub
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
