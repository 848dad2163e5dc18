package regionpb

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// ErrCorrupt says that bytes are not what this package writes: damage, or a newer version's.
var ErrCorrupt = errors.New("regionpb: corrupt encoding")

func corrupt(what string) error { return fmt.Errorf("%w: %s", ErrCorrupt, what) }

// Everything here is written by hand: fixed order of fields, unsigned varints, byte strings with
// their length before them. A decoder never copies a byte string; what it returns aliases its
// input. A count read from the input is checked against the bytes that are left before anything
// is allocated for it, so a damaged length cannot ask for memory.

func uvarintLen(v uint64) int { return (bits.Len64(v|1) + 6) / 7 }

func bytesLen(b []byte) int { return uvarintLen(uint64(len(b))) + len(b) }

func appendBytes(b, v []byte) []byte {
	b = binary.AppendUvarint(b, uint64(len(v)))
	return append(b, v...)
}

// zig maps small negative numbers to small unsigned ones; leases and floors may be negative.
func zig(v int64) uint64   { return uint64(v<<1) ^ uint64(v>>63) }
func unzig(v uint64) int64 { return int64(v>>1) ^ -int64(v&1) }

// decoder reads one encoding; after the first error every read returns zero and err stays.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) fail(what string) {
	if d.err == nil {
		d.err = corrupt(what)
	}
	d.b = nil
}

func (d *decoder) byte() byte {
	if len(d.b) == 0 {
		d.fail("short")
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

func (d *decoder) uvarint() uint64 {
	if len(d.b) > 0 && d.b[0] < 0x80 {
		v := uint64(d.b[0])
		d.b = d.b[1:]
		return v
	}
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.fail("varint")
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) varint() int64 { return unzig(d.uvarint()) }

// bytes returns the next byte string, capped so that an append by the caller cannot reach what
// follows; nil when empty.
func (d *decoder) bytes() []byte {
	n := d.uvarint()
	if n == 0 {
		return nil
	}
	if n > uint64(len(d.b)) {
		d.fail("length")
		return nil
	}
	v := d.b[:n:n]
	d.b = d.b[n:]
	return v
}

// count reads a number of elements of which each takes at least unit bytes.
func (d *decoder) count(unit int) int {
	n := d.uvarint()
	if n > uint64(len(d.b)/unit) {
		d.fail("count")
		return 0
	}
	return int(n)
}

func (d *decoder) bool() bool {
	switch d.byte() {
	case 0:
		return false
	case 1:
		return true
	}
	d.fail("bool")
	return false
}

func (d *decoder) version(want byte, what string) {
	if v := d.byte(); d.err == nil && v != want {
		d.fail(fmt.Sprintf("%s version %d", what, v))
	}
}

func (d *decoder) done() error {
	if d.err == nil && len(d.b) != 0 {
		d.fail("trailing bytes")
	}
	return d.err
}

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

// appendSpan keeps the difference between "no upper bound" and an empty end.
func appendSpan(b []byte, s mvcc.Span) []byte {
	b = appendBytes(b, s.Start)
	if s.End == nil {
		return append(b, 0)
	}
	return appendBytes(append(b, 1), s.End)
}

func (d *decoder) span() mvcc.Span {
	s := mvcc.Span{Start: d.bytes()}
	if d.bool() {
		if s.End = d.bytes(); s.End == nil {
			s.End = []byte{}
		}
	}
	return s
}

func appendDescriptor(b []byte, x *pdpb.Descriptor) []byte {
	b = binary.AppendUvarint(b, uint64(x.ID))
	b = appendSpan(b, x.Span)
	b = binary.AppendUvarint(b, x.Epoch)
	b = binary.AppendUvarint(b, uint64(x.Incarnation))
	b = binary.AppendUvarint(b, uint64(len(x.Peers)))
	for _, p := range x.Peers {
		b = binary.AppendUvarint(b, uint64(p.Replica))
		b = binary.AppendUvarint(b, uint64(p.Store))
	}
	b = binary.AppendUvarint(b, x.StartIndex)
	return binary.AppendUvarint(b, x.StartTerm)
}

func (d *decoder) descriptor() pdpb.Descriptor {
	x := pdpb.Descriptor{ID: RegionID(d.uvarint()), Span: d.span(), Epoch: d.uvarint(), Incarnation: uint32(d.uvarint())}
	n := d.count(2)
	for range n {
		x.Peers = append(x.Peers, pdpb.Peer{Replica: raftid.ReplicaID(d.uvarint()), Store: raftid.StoreID(d.uvarint())})
	}
	x.StartIndex, x.StartTerm = d.uvarint(), d.uvarint()
	return x
}
