package router

import (
	"encoding/binary"
	"hash/crc32"
	"math/bits"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"braid/mvcc"
)

// HashRecord stands for one version of one key in a hash of the store: its place in the order and
// the checksum of what etcd hashes for it. Values need not travel (C-3).
type HashRecord struct {
	Rev mvcc.Revision
	Sub int64
	Len int    // bytes that the checksum covers
	CRC uint32 // CRC-32C of these bytes
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Hasher computes records. It keeps a buffer, so it belongs to one goroutine.
type Hasher struct{ buf []byte }

// Record returns the record of a version. What is hashed is what etcd stores: the revision key
// (8 bytes of revision, '_', 8 bytes of position, 't' for a tombstone) and the marshalled
// KeyValue, which for a tombstone holds only the key.
func (h *Hasher) Record(rev mvcc.Revision, sub int64, tombstone bool, kv *mvccpb.KeyValue) (HashRecord, error) {
	b := binary.BigEndian.AppendUint64(h.buf[:0], uint64(rev))
	b = append(b, '_')
	b = binary.BigEndian.AppendUint64(b, uint64(sub))
	if tombstone {
		b = append(b, 't')
	}
	b, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(b, kv)
	if err != nil {
		return HashRecord{}, err
	}
	h.buf = b
	return HashRecord{Rev: rev, Sub: sub, Len: len(b), CRC: crc32.Checksum(b, castagnoli)}, nil
}

// combiner joins checksums: from the CRCs of two byte strings and the length of the second it
// gets the CRC of both together, by multiplying the first with x^(8 n) modulo the polynomial, as
// zlib's crc32_combine does. Powers for lengths seen before are remembered, up to a bound.
type combiner struct {
	powers map[int]uint32
}

const (
	castagnoliPoly = 0x82f63b78 // reflected
	powersMax      = 1 << 14
)

func (c *combiner) join(first, second uint32, secondLen int) uint32 {
	p, ok := c.powers[secondLen]
	if !ok {
		p = powerOfX(8 * uint64(secondLen))
		if c.powers == nil {
			c.powers = make(map[int]uint32)
		}
		if len(c.powers) < powersMax {
			c.powers[secondLen] = p
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
