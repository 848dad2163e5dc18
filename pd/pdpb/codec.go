package pdpb

import (
	"encoding/binary"
	"errors"
	"fmt"

	"braid/mvcc"
	"braid/raftstore/raftid"
)

// Every encoding here is: one version byte, then the fields in declaration order. Unsigned
// numbers are uvarints, signed ones zigzag varints, byte strings have a uvarint length in front.
// Values are self-delimiting, so they can be written one after another.
const codecVersion = 2

// ErrCorrupt says that bytes are not an encoding of what they should be. Decoders never panic
// and never allocate more than the input's own size suggests.
var ErrCorrupt = errors.New("pdpb: corrupt encoding")

// Dec is a cursor over an encoding. The first failure sticks: later calls return zeros and Err
// tells it, so that a decoder reads straight through and checks once.
type Dec struct {
	b   []byte
	err error
}

// NewDec returns a cursor at the beginning of b.
func NewDec(b []byte) *Dec { return &Dec{b: b} }

// Err is the first failure.
func (d *Dec) Err() error { return d.err }

// Rest is what was not read yet; nil after a failure.
func (d *Dec) Rest() []byte { return d.b }

// Done returns the first failure, or an error when bytes are left over.
func (d *Dec) Done() error {
	if d.err == nil && len(d.b) > 0 {
		d.Fail("%d bytes left over", len(d.b))
	}
	return d.err
}

// Fail records a failure; a decoder built on Dec uses it for values that make no sense.
func (d *Dec) Fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
	}
	d.b = nil
}

// Version reads a version byte and fails unless it is want.
func (d *Dec) Version(want byte) {
	if v := d.Byte(); d.err == nil && v != want {
		d.Fail("version %d, want %d", v, want)
	}
}

// Byte reads one byte.
func (d *Dec) Byte() byte {
	if len(d.b) == 0 {
		d.Fail("truncated")
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

// Bool reads a byte that is 0 or 1.
func (d *Dec) Bool() bool {
	v := d.Byte()
	if v > 1 {
		d.Fail("bool %d", v)
	}
	return v == 1
}

// Uvarint reads an unsigned number.
func (d *Dec) Uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.Fail("bad number")
		return 0
	}
	d.b = d.b[n:]
	return v
}

// Varint reads a signed number.
func (d *Dec) Varint() int64 {
	v, n := binary.Varint(d.b)
	if n <= 0 {
		d.Fail("bad number")
		return 0
	}
	d.b = d.b[n:]
	return v
}

// Bytes reads a byte string; it shares memory with the input and is nil when empty.
func (d *Dec) Bytes() []byte {
	n := d.Uvarint()
	if d.err != nil || n == 0 {
		return nil
	}
	if n > uint64(len(d.b)) {
		d.Fail("string of %d bytes in %d", n, len(d.b))
		return nil
	}
	v := d.b[:n:n]
	d.b = d.b[n:]
	return v
}

// Len reads the length of a list whose elements take at least elementBytesMin bytes each, so
// that a damaged length cannot make a decoder allocate more than a multiple of its input.
func (d *Dec) Len(elementBytesMin int) int {
	n := d.Uvarint()
	if d.err == nil && n > uint64(len(d.b)/elementBytesMin) {
		d.Fail("list of %d in %d bytes", n, len(d.b))
	}
	if d.err != nil {
		return 0
	}
	return int(n)
}

// AppendBytes appends a byte string as Dec.Bytes reads it.
func AppendBytes(b, s []byte) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// AppendBool appends a flag as Dec.Bool reads it.
func AppendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

// ItemBytesMin and ReportBytesMin are the least sizes of encodings, for Dec.Len.
const (
	ItemBytesMin   = 12
	ReportBytesMin = 10
)

// Append appends the encoding of the item.
func (it *Item) Append(b []byte) []byte {
	b = append(b, codecVersion)
	b = binary.AppendUvarint(b, uint64(it.Region))
	b = binary.AppendUvarint(b, uint64(it.Incarnation))
	b = binary.AppendUvarint(b, it.N)
	b = binary.AppendUvarint(b, uint64(it.Cut))
	b = binary.AppendUvarint(b, it.Upto)
	b = binary.AppendUvarint(b, it.UptoTerm)
	b = binary.AppendUvarint(b, it.Cum)
	b = binary.AppendUvarint(b, it.Count)
	b = binary.AppendVarint(b, int64(it.Base))
	b = binary.AppendUvarint(b, uint64(it.Fence))
	return AppendDecisions(b, it.Decisions)
}

// AppendDecisions appends the encoding of decisions, without a version: they are always part of
// something that has one.
func AppendDecisions(b []byte, list []Decision) []byte {
	b = binary.AppendUvarint(b, uint64(len(list)))
	for _, x := range list {
		b = binary.AppendUvarint(b, uint64(x.Attempt))
		if b = AppendBool(b, x.Commit); x.Commit {
			b = binary.AppendUvarint(b, uint64(x.Rev))
		}
	}
	return b
}

// Decisions reads what AppendDecisions wrote; nil for none.
func (d *Dec) Decisions() []Decision {
	n := d.Len(2)
	if n == 0 {
		return nil
	}
	list := make([]Decision, n)
	for i := range list {
		x := &list[i]
		if x.Attempt, x.Commit = AttemptID(d.Uvarint()), d.Bool(); x.Commit {
			x.Rev = mvcc.Revision(d.Uvarint())
		}
	}
	return list
}

// append appends the encoding of the fact, without a version.
func (f *Fact) append(b []byte) []byte {
	b = binary.AppendUvarint(b, f.Index)
	b = binary.AppendUvarint(b, uint64(f.Stamp))
	b = binary.AppendUvarint(b, uint64(f.Attempt))
	b = AppendBool(b, f.Writes)
	b = binary.AppendUvarint(b, uint64(len(f.Participants)))
	for _, id := range f.Participants {
		b = binary.AppendUvarint(b, uint64(id))
	}
	return b
}

func (d *Dec) fact() (f Fact) {
	f.Index, f.Stamp, f.Attempt, f.Writes = d.Uvarint(), Fence(d.Uvarint()), AttemptID(d.Uvarint()), d.Bool()
	if n := d.Len(1); n > 0 {
		f.Participants = make([]RegionID, n)
		for i := range f.Participants {
			f.Participants[i] = RegionID(d.Uvarint())
		}
	}
	return f
}

// Item reads an item.
func (d *Dec) Item() (it Item) {
	d.Version(codecVersion)
	it.Region = RegionID(d.Uvarint())
	it.Incarnation = d.uint32()
	it.N = d.Uvarint()
	it.Cut = Cut(d.Uvarint())
	it.Upto = d.Uvarint()
	it.UptoTerm = d.Uvarint()
	it.Cum = d.Uvarint()
	it.Count = d.Uvarint()
	it.Base = mvcc.Revision(d.Varint())
	it.Fence = Fence(d.Uvarint())
	it.Decisions = d.Decisions()
	return it
}

// DecodeItem decodes one item and returns the bytes behind it.
func DecodeItem(b []byte) (it Item, rest []byte, err error) {
	d := Dec{b: b}
	it = d.Item()
	return it, d.b, d.err
}

// Append appends the encoding of the report.
func (r *Report) Append(b []byte) []byte {
	b = append(b, codecVersion)
	b = binary.AppendUvarint(b, uint64(r.Region))
	b = binary.AppendUvarint(b, uint64(r.Incarnation))
	b = binary.AppendUvarint(b, r.From)
	b = binary.AppendUvarint(b, r.Upto)
	b = binary.AppendUvarint(b, r.UptoTerm)
	b = binary.AppendUvarint(b, r.Cum)
	b = binary.AppendUvarint(b, uint64(len(r.Runs)))
	for _, x := range r.Runs {
		b = binary.AppendUvarint(b, x.Index)
		b = binary.AppendUvarint(b, uint64(x.Stamp))
		b = binary.AppendUvarint(b, x.Cum)
	}
	b = binary.AppendUvarint(b, r.Sealed)
	b = binary.AppendUvarint(b, uint64(len(r.Facts)))
	for i := range r.Facts {
		b = r.Facts[i].append(b)
	}
	return b
}

// Report reads a report.
func (d *Dec) Report() (r Report) {
	d.Version(codecVersion)
	r.Region = RegionID(d.Uvarint())
	r.Incarnation = d.uint32()
	r.From = d.Uvarint()
	r.Upto = d.Uvarint()
	r.UptoTerm = d.Uvarint()
	r.Cum = d.Uvarint()
	if n := d.Len(3); n > 0 {
		r.Runs = make([]Run, n)
		for i := range r.Runs {
			r.Runs[i] = Run{Index: d.Uvarint(), Stamp: Fence(d.Uvarint()), Cum: d.Uvarint()}
		}
	}
	r.Sealed = d.Uvarint()
	if n := d.Len(5); n > 0 {
		r.Facts = make([]Fact, n)
		for i := range r.Facts {
			r.Facts[i] = d.fact()
		}
	}
	return r
}

// DecodeReport decodes one report and returns the bytes behind it.
func DecodeReport(b []byte) (r Report, rest []byte, err error) {
	d := Dec{b: b}
	r = d.Report()
	return r, d.b, d.err
}

// Append appends the encoding of the mark.
func (m *Mark) Append(b []byte) []byte {
	b = append(b, codecVersion)
	b = binary.AppendUvarint(b, uint64(m.Cut))
	b = binary.AppendVarint(b, int64(m.Rev))
	b = binary.AppendVarint(b, int64(m.Floor))
	return binary.AppendUvarint(b, uint64(m.Fence))
}

// Mark reads a mark.
func (d *Dec) Mark() (m Mark) {
	d.Version(codecVersion)
	m.Cut = Cut(d.Uvarint())
	m.Rev = mvcc.Revision(d.Varint())
	m.Floor = mvcc.Revision(d.Varint())
	m.Fence = Fence(d.Uvarint())
	return m
}

// DecodeMark decodes one mark and returns the bytes behind it.
func DecodeMark(b []byte) (m Mark, rest []byte, err error) {
	d := Dec{b: b}
	m = d.Mark()
	return m, d.b, d.err
}

// Append appends the encoding of the read point.
func (p *ReadPoint) Append(b []byte) []byte {
	b = append(b, codecVersion)
	b = binary.AppendUvarint(b, uint64(p.Cut))
	b = binary.AppendVarint(b, int64(p.Rev))
	return binary.AppendVarint(b, int64(p.Floor))
}

// ReadPoint reads a read point.
func (d *Dec) ReadPoint() (p ReadPoint) {
	d.Version(codecVersion)
	p.Cut = Cut(d.Uvarint())
	p.Rev = mvcc.Revision(d.Varint())
	p.Floor = mvcc.Revision(d.Varint())
	return p
}

// DecodeReadPoint decodes one read point and returns the bytes behind it.
func DecodeReadPoint(b []byte) (p ReadPoint, rest []byte, err error) {
	d := Dec{b: b}
	p = d.ReadPoint()
	return p, d.b, d.err
}

// AppendSpan appends the encoding of a span. A nil End ("no upper bound") and an empty one
// ("empty span") are different spans and stay different.
func AppendSpan(b []byte, s mvcc.Span) []byte {
	b = AppendBytes(b, s.Start)
	b = AppendBool(b, s.End != nil)
	if s.End != nil {
		b = AppendBytes(b, s.End)
	}
	return b
}

// Span reads a span; its slices share memory with the input.
func (d *Dec) Span() (s mvcc.Span) {
	s.Start = d.Bytes()
	if d.Bool() {
		if s.End = d.Bytes(); s.End == nil {
			s.End = []byte{}
		}
	}
	return s
}

// Append appends the encoding of the descriptor.
func (r *Descriptor) Append(b []byte) []byte {
	b = append(b, codecVersion)
	b = binary.AppendUvarint(b, uint64(r.ID))
	b = AppendSpan(b, r.Span)
	b = binary.AppendUvarint(b, r.Epoch)
	b = binary.AppendUvarint(b, uint64(r.Incarnation))
	b = binary.AppendUvarint(b, uint64(len(r.Peers)))
	for _, p := range r.Peers {
		b = binary.AppendUvarint(b, uint64(p.Replica))
		b = binary.AppendUvarint(b, uint64(p.Store))
	}
	b = binary.AppendUvarint(b, r.StartIndex)
	return binary.AppendUvarint(b, r.StartTerm)
}

// Descriptor reads a descriptor. Its span is copied: descriptors outlive what they came in.
func (d *Dec) Descriptor() (r Descriptor) {
	d.Version(codecVersion)
	r.ID = RegionID(d.Uvarint())
	s := d.Span()
	r.Span.Start = append([]byte(nil), s.Start...)
	if s.End != nil {
		r.Span.End = append([]byte{}, s.End...)
	}
	r.Epoch = d.Uvarint()
	r.Incarnation = d.uint32()
	if n := d.Len(2); n > 0 {
		r.Peers = make([]Peer, n)
		for i := range r.Peers {
			r.Peers[i] = Peer{Replica: raftid.ReplicaID(d.Uvarint()), Store: raftid.StoreID(d.Uvarint())}
		}
	}
	r.StartIndex = d.Uvarint()
	r.StartTerm = d.Uvarint()
	return r
}

// DecodeDescriptor decodes one descriptor and returns the bytes behind it.
func DecodeDescriptor(b []byte) (r Descriptor, rest []byte, err error) {
	d := Dec{b: b}
	r = d.Descriptor()
	return r, d.b, d.err
}

// Append appends the encoding of the store.
func (s *Store) Append(b []byte) []byte {
	b = append(b, codecVersion)
	b = binary.AppendUvarint(b, uint64(s.ID))
	b = AppendBytes(b, []byte(s.Name))
	for _, urls := range [2][]string{s.PeerURLs, s.ClientURLs} {
		b = binary.AppendUvarint(b, uint64(len(urls)))
		for _, u := range urls {
			b = AppendBytes(b, []byte(u))
		}
	}
	return b
}

// Store reads a store.
func (d *Dec) Store() (s Store) {
	d.Version(codecVersion)
	s.ID = raftid.StoreID(d.Uvarint())
	s.Name = string(d.Bytes())
	for _, urls := range [2]*[]string{&s.PeerURLs, &s.ClientURLs} {
		for n := d.Len(1); n > 0; n-- {
			*urls = append(*urls, string(d.Bytes()))
		}
	}
	return s
}

// DecodeStore decodes one store and returns the bytes behind it.
func DecodeStore(b []byte) (s Store, rest []byte, err error) {
	d := Dec{b: b}
	s = d.Store()
	return s, d.b, d.err
}

func (d *Dec) uint32() uint32 {
	v := d.Uvarint()
	if v > 1<<32-1 {
		d.Fail("%d does not fit in 32 bits", v)
	}
	return uint32(v)
}

// Append appends the encoding, which has no version of its own.
func (h *CompactHash) Append(b []byte) []byte {
	b = binary.AppendVarint(b, int64(h.Rev))
	b = binary.AppendVarint(b, int64(h.Floor))
	return binary.AppendUvarint(b, uint64(h.Hash))
}

// CompactHash reads one.
func (d *Dec) CompactHash() CompactHash {
	h := CompactHash{Rev: mvcc.Revision(d.Varint()), Floor: mvcc.Revision(d.Varint())}
	hash := d.Uvarint()
	if hash > 1<<32-1 {
		d.Fail("hash %d", hash)
	}
	h.Hash = uint32(hash)
	return h
}
