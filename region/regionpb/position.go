package regionpb

import (
	"encoding/binary"
	"fmt"

	"braid/mvcc"
	"braid/pd/pdpb"
)

const positionV3 = 3

// Position says how far a replica's state has come and what that state is of (D1). It is written
// in one batch with the data it speaks of and travels in every snapshot; what a replica knows
// beyond it is rebuilt from the log and from pd. Leases are records of the engine, in the same batch and
// in the snapshot's own part.
type Position struct {
	// Index, Term: the last raft entry that was applied or, being silent, passed.
	Index, Term uint64
	// Item is the last applied item, Upto and UptoTerm where it reached, Cut the cut that made it.
	Item           uint64
	Upto, UptoTerm uint64
	Cut            pdpb.Cut
	// Revision is the last number given out by that cut through this region's entries: every
	// entry of this region that is not applied will get a higher one.
	Revision mvcc.Revision
	// Cum counts the revisions that entries through Upto asked for since the region began,
	// voided ones included (P1).
	Cum uint64
	// Fence is the one in force at Item (F2).
	Fence pdpb.Fence
	// Sealed is the highest item sealed in the applied log (P4).
	Sealed uint64
	// ConfState is the marshalled raft configuration; entries through ConfIndex are in it, so
	// replay and snapshots skip their conf changes (D5).
	ConfIndex uint64
	ConfState []byte
	// Floor is how far history may have been removed: reads below it fail (C1).
	Floor      mvcc.Revision
	Descriptor pdpb.Descriptor // holds the incarnation too
	// Prepared are the attempts that are prepared here and not decided, ascending. The slice is
	// replaced, never changed: copies of a position share it.
	Prepared []Prepared
	// Meta is the placement machine's state in single-group mode, else nil.
	Meta []byte
}

// Append appends the encoding to b.
func (p *Position) Append(b []byte) []byte {
	b = append(b, positionV3)
	for _, v := range [...]uint64{p.Index, p.Term, p.Item, p.Upto, p.UptoTerm, uint64(p.Cut), uint64(p.Revision), p.Cum,
		uint64(p.Fence), p.Sealed, p.ConfIndex} {
		b = binary.AppendUvarint(b, v)
	}
	b = appendBytes(b, p.ConfState)
	b = binary.AppendUvarint(b, zig(int64(p.Floor)))
	b = appendDescriptor(b, &p.Descriptor)
	b = binary.AppendUvarint(b, uint64(len(p.Prepared)))
	for i := range p.Prepared {
		b = append(b, p.Prepared[i].Encoded()...)
	}
	return appendBytes(b, p.Meta)
}

// DecodePosition reads what Append wrote. The result does not alias data.
func DecodePosition(data []byte) (Position, error) {
	var p Position
	d := decoder{b: append([]byte(nil), data...)}
	d.version(positionV3, "position")
	for _, v := range [...]*uint64{&p.Index, &p.Term, &p.Item, &p.Upto, &p.UptoTerm, (*uint64)(&p.Cut)} {
		*v = d.uvarint()
	}
	p.Revision = mvcc.Revision(d.uvarint())
	for _, v := range [...]*uint64{&p.Cum, (*uint64)(&p.Fence), &p.Sealed, &p.ConfIndex} {
		*v = d.uvarint()
	}
	p.ConfState = d.bytes()
	p.Floor = mvcc.Revision(d.varint())
	p.Descriptor = d.descriptor()
	for n := d.count(3); n > 0; n-- {
		p.Prepared = append(p.Prepared, d.prepared())
	}
	p.Meta = d.bytes()
	return p, d.done()
}

// String prints the position in one stable line.
func (p *Position) String() string {
	s := fmt.Sprintf("index %d/%d item %d upto %d/%d cut %d rev %d cum %d fence %d sealed %d floor %d",
		p.Index, p.Term, p.Item, p.Upto, p.UptoTerm, p.Cut, p.Revision, p.Cum, p.Fence, p.Sealed, p.Floor)
	for i := range p.Prepared {
		s += fmt.Sprintf(" prepared [%v]", &p.Prepared[i])
	}
	return s
}
