package regionpb

import (
	"encoding/binary"
	"slices"

	"braid/mvcc"
	"braid/pd/pdpb"
)

// The first byte of a raft entry's payload says what it is; it is the format's version too.
const (
	kindEntry  = 0x04 // an Entry; 0x01 was one without decisions and prepares, 0x03 without leases
	kindMetaV1 = 0x02 // an opaque command of the placement machine (single-group mode)
)

// Layout of an Entry, all numbers varints:
//
//	kind, flags, term, index, fence, count, commands, effects,
//	seals { number; region, incarnation, first n; per item cut, upto, term, cum, count, base, fence,
//	decisions { number; per decision attempt, revision+1 of a commit or 0 } },
//	[prepares { number; per prepare attempt, writes, participants }], for a report's facts
//	per command { effects; per effect flags, key, [detach] [lease] [version] [create] [value]; [records] },
//	per prepare { attempt, participants, locks, effects; per effect sub and the effect; records }
//
// The header and the seals come first and hold the counts, so that a replica summarises an entry
// when it is appended (Peek) without walking its values, and sizes its slices once.
const (
	entResolves = 1 << 0 // an effect is of CreateResolve
	entPrepares = 1 << 1 // there are prepares
	entRecords  = 1 << 2 // commands have records of the system space

	effDelete   = 1 << 0
	effLease    = 1 << 1
	effKindBits = 2 // two bits of CreateKind from here
	effDetach   = 1 << 4
)

// Size is the exact length of the encoding.
func (e *Entry) Size() int {
	n := 2 + uvarintLen(e.Term) + uvarintLen(e.Index) + uvarintLen(uint64(e.Fence)) + uvarintLen(e.Count()) +
		uvarintLen(uint64(len(e.Commands))) + uvarintLen(uint64(e.effects())) + uvarintLen(uint64(len(e.Seals)))
	if len(e.Seals) > 0 {
		f := &e.Seals[0]
		n += uvarintLen(uint64(f.Region)) + uvarintLen(uint64(f.Incarnation)) + uvarintLen(f.N)
	}
	for i := range e.Seals {
		it := &e.Seals[i]
		n += uvarintLen(uint64(it.Cut)) + uvarintLen(it.Upto) + uvarintLen(it.UptoTerm) + uvarintLen(it.Cum) +
			uvarintLen(it.Count) + uvarintLen(uint64(it.Base)) + uvarintLen(uint64(it.Fence)) + uvarintLen(uint64(len(it.Decisions)))
		for _, x := range it.Decisions {
			n += uvarintLen(uint64(x.Attempt)) + uvarintLen(sealedOutcome(x))
		}
	}
	if len(e.Prepares) > 0 {
		n += uvarintLen(uint64(len(e.Prepares)))
	}
	for i := range e.Prepares {
		p := &e.Prepares[i]
		n += uvarintLen(uint64(p.Attempt)) + 1 + uvarintLen(uint64(len(p.Participants))) + len(p.Encoded())
		for _, id := range p.Participants {
			n += uvarintLen(uint64(id))
		}
	}
	records := e.records()
	for i := range e.Commands {
		n += uvarintLen(uint64(len(e.Commands[i].Effects)))
		for j := range e.Commands[i].Effects {
			n += e.Commands[i].Effects[j].Size()
		}
		if records {
			n += recordsSize(e.Commands[i].Records)
		}
	}
	return n
}

// Size is the exact length of the effect in an entry.
func (f *Effect) Size() int {
	n := 1 + bytesLen(f.Key)
	if f.Detach != 0 {
		n += uvarintLen(zig(f.Detach))
	}
	if f.Delete {
		return n
	}
	if f.Lease != 0 {
		n += uvarintLen(zig(f.Lease))
	}
	n += uvarintLen(uint64(f.Version))
	if f.CreateKind == CreateKnown {
		n += uvarintLen(uint64(f.Create))
	}
	return n + bytesLen(f.Value)
}

func (e *Entry) effects() (n int) {
	for i := range e.Commands {
		n += len(e.Commands[i].Effects)
	}
	return n
}

func (e *Entry) records() bool {
	for i := range e.Commands {
		if len(e.Commands[i].Records) > 0 {
			return true
		}
	}
	return false
}

func (e *Entry) resolves() bool {
	for i := range e.Commands {
		for j := range e.Commands[i].Effects {
			if f := &e.Commands[i].Effects[j]; f.CreateKind == CreateResolve && !f.Delete {
				return true
			}
		}
	}
	return false
}

// Encode returns the payload of the raft entry, in one allocation. Seals must be contiguous.
func (e *Entry) Encode() []byte { return e.Append(make([]byte, 0, e.Size())) }

// Append appends the encoding to b.
func (e *Entry) Append(b []byte) []byte {
	var flags byte
	if e.resolves() {
		flags |= entResolves
	}
	if len(e.Prepares) > 0 {
		flags |= entPrepares
	}
	records := e.records()
	if records {
		flags |= entRecords
	}
	b = append(b, kindEntry, flags)
	b = binary.AppendUvarint(b, e.Term)
	b = binary.AppendUvarint(b, e.Index)
	b = binary.AppendUvarint(b, uint64(e.Fence))
	b = binary.AppendUvarint(b, e.Count())
	b = binary.AppendUvarint(b, uint64(len(e.Commands)))
	b = binary.AppendUvarint(b, uint64(e.effects()))
	b = binary.AppendUvarint(b, uint64(len(e.Seals)))
	if len(e.Seals) > 0 {
		f := &e.Seals[0]
		b = binary.AppendUvarint(b, uint64(f.Region))
		b = binary.AppendUvarint(b, uint64(f.Incarnation))
		b = binary.AppendUvarint(b, f.N)
	}
	for i := range e.Seals {
		it := &e.Seals[i]
		b = binary.AppendUvarint(b, uint64(it.Cut))
		b = binary.AppendUvarint(b, it.Upto)
		b = binary.AppendUvarint(b, it.UptoTerm)
		b = binary.AppendUvarint(b, it.Cum)
		b = binary.AppendUvarint(b, it.Count)
		b = binary.AppendUvarint(b, uint64(it.Base))
		b = binary.AppendUvarint(b, uint64(it.Fence))
		b = binary.AppendUvarint(b, uint64(len(it.Decisions)))
		for _, x := range it.Decisions {
			b = binary.AppendUvarint(b, uint64(x.Attempt))
			b = binary.AppendUvarint(b, sealedOutcome(x))
		}
	}
	if len(e.Prepares) > 0 {
		b = binary.AppendUvarint(b, uint64(len(e.Prepares)))
	}
	for i := range e.Prepares {
		p := &e.Prepares[i]
		b = binary.AppendUvarint(b, uint64(p.Attempt))
		b = appendBool(b, len(p.Effects) > 0)
		b = appendRegions(b, p.Participants)
	}
	for i := range e.Commands {
		b = binary.AppendUvarint(b, uint64(len(e.Commands[i].Effects)))
		for j := range e.Commands[i].Effects {
			b = e.Commands[i].Effects[j].append(b)
		}
		if records {
			b = appendRecords(b, e.Commands[i].Records)
		}
	}
	for i := range e.Prepares {
		b = append(b, e.Prepares[i].Encoded()...)
	}
	return b
}

// sealedOutcome is a decision's outcome in a seal.
func sealedOutcome(x pdpb.Decision) uint64 {
	if x.Commit {
		return uint64(x.Rev) + 1
	}
	return 0
}

func (f *Effect) append(b []byte) []byte {
	flags := byte(f.CreateKind) << effKindBits
	if f.Delete {
		flags = effDelete
	} else if f.Lease != 0 {
		flags |= effLease
	}
	if f.Detach != 0 {
		flags |= effDetach
	}
	b = appendBytes(append(b, flags), f.Key)
	if f.Detach != 0 {
		b = binary.AppendUvarint(b, zig(f.Detach))
	}
	if f.Delete {
		return b
	}
	if f.Lease != 0 {
		b = binary.AppendUvarint(b, zig(f.Lease))
	}
	b = binary.AppendUvarint(b, uint64(f.Version))
	if f.CreateKind == CreateKnown {
		b = binary.AppendUvarint(b, uint64(f.Create))
	}
	return appendBytes(b, f.Value)
}

// Summary is what a replica must know of an entry before it may apply it.
type Summary struct {
	Term, Index uint64
	Fence       pdpb.Fence
	Count       uint64 // revisions it consumes unless void; recounted at apply (O3)
	Commands    int
	Meta        bool // a command of the placement machine, not of the region
	Resolves    bool // an effect is of CreateResolve
	Records     bool // commands have records of the system space
	Seals       []pdpb.Item
	Prepares    []pdpb.Fact // without index and stamp
}

// Silent says whether the entry has nothing to order (O2). An empty payload is silent.
func (s *Summary) Silent() bool { return s.Commands == 0 && len(s.Prepares) == 0 && !s.Meta }

// Peek reads the head of a payload. An empty payload (the entry that opens a term) gives an
// empty summary.
func Peek(data []byte) (Summary, error) {
	var s Summary
	if len(data) == 0 {
		return s, nil
	}
	if data[0] == kindMetaV1 {
		s.Meta = true
		return s, nil
	}
	d := decoder{b: data}
	d.head(&s)
	return s, d.err
}

// head reads everything before the commands and returns the total number of effects.
func (d *decoder) head(s *Summary) (effects int) {
	d.version(kindEntry, "entry")
	flags := d.byte()
	if flags&^(entResolves|entPrepares|entRecords) != 0 {
		d.fail("entry flags")
	}
	s.Resolves, s.Records = flags&entResolves != 0, flags&entRecords != 0
	s.Term, s.Index, s.Fence, s.Count = d.uvarint(), d.uvarint(), pdpb.Fence(d.uvarint()), d.uvarint()
	s.Commands, effects = d.count(1), d.count(2)
	if n := d.count(8); n > 0 {
		region, inc, first := RegionID(d.uvarint()), uint32(d.uvarint()), d.uvarint()
		s.Seals = make([]pdpb.Item, n)
		for i := range s.Seals {
			s.Seals[i] = pdpb.Item{Region: region, Incarnation: inc, N: first + uint64(i),
				Cut: pdpb.Cut(d.uvarint()), Upto: d.uvarint(), UptoTerm: d.uvarint(), Cum: d.uvarint(),
				Count: d.uvarint(), Base: mvcc.Revision(d.uvarint()), Fence: pdpb.Fence(d.uvarint())}
			for m := d.count(2); m > 0; m-- {
				x := pdpb.Decision{Attempt: pdpb.AttemptID(d.uvarint())}
				if outcome := d.uvarint(); outcome > 0 {
					x.Commit, x.Rev = true, mvcc.Revision(outcome-1)
				}
				s.Seals[i].Decisions = append(s.Seals[i].Decisions, x)
			}
		}
	}
	if flags&entPrepares != 0 {
		n := d.count(3)
		if n == 0 {
			d.fail("prepares")
		}
		for range n {
			s.Prepares = append(s.Prepares, pdpb.Fact{Attempt: pdpb.AttemptID(d.uvarint()), Writes: d.bool(), Participants: d.regions()})
		}
	}
	return effects
}

// DecodeEntry reads a payload made by Encode into e, whose slices it reuses. Keys and values
// alias data, which must not change while they are in use.
func DecodeEntry(data []byte, e *Entry) error {
	d := decoder{b: data}
	var s Summary
	total := d.head(&s)
	if d.err != nil {
		return d.err
	}
	e.Term, e.Index, e.Fence, e.Seals = s.Term, s.Index, s.Fence, s.Seals
	if cap(e.Commands) < s.Commands {
		e.Commands = make([]Command, s.Commands)
	}
	e.Commands = e.Commands[:s.Commands]
	if cap(e.arena) < total {
		e.arena = make([]Effect, total)
	}
	free := e.arena[:total]
	for i := range e.Commands {
		n := d.count(2)
		if n > len(free) {
			d.fail("effects")
		}
		if d.err != nil {
			return d.err
		}
		e.Commands[i].Effects = free[:n:n]
		for j := range n {
			free[j] = d.effect()
		}
		free = free[n:]
		e.Commands[i].Records = nil
		if s.Records {
			e.Commands[i].Records = d.records()
		}
	}
	if len(free) != 0 {
		d.fail("effects")
	}
	e.Prepares = nil // what is prepared outlives the entry
	for i := range s.Prepares {
		p := d.prepared()
		if p.Attempt != s.Prepares[i].Attempt || (len(p.Effects) > 0) != s.Prepares[i].Writes || !slices.Equal(p.Participants, s.Prepares[i].Participants) {
			d.fail("prepare")
		}
		e.Prepares = append(e.Prepares, p)
	}
	if err := d.done(); err != nil {
		return err
	}
	if e.Count() != s.Count {
		return corrupt("count")
	}
	return nil
}

func (d *decoder) effect() (f Effect) {
	flags := d.byte()
	f.Key = d.bytes()
	if flags&effDetach != 0 {
		if f.Detach = d.varint(); f.Detach == 0 {
			d.fail("detach")
		}
		flags &^= effDetach
	}
	if flags&effDelete != 0 {
		f.Delete = true
		if flags != effDelete {
			d.fail("effect flags")
		}
		return f
	}
	f.CreateKind = CreateKind(flags >> effKindBits)
	if f.CreateKind > CreateResolve {
		d.fail("create kind")
	}
	if flags&effLease != 0 {
		f.Lease = d.varint()
	}
	f.Version = int64(d.uvarint())
	if f.CreateKind == CreateKnown {
		f.Create = mvcc.Revision(d.uvarint())
	}
	f.Value = d.bytes()
	return f
}

// EncodeMeta wraps a command of the placement machine for the log of a single-group store.
func EncodeMeta(payload []byte) []byte {
	return append(append(make([]byte, 0, 1+len(payload)), kindMetaV1), payload...)
}

// DecodeMeta returns the command, aliasing data; false when data is not one.
func DecodeMeta(data []byte) ([]byte, bool) {
	if len(data) == 0 || data[0] != kindMetaV1 {
		return nil, false
	}
	return data[1:], true
}
