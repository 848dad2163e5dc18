package raftwire

import (
	"encoding/binary"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"
)

// messageBox holds a message with the values that its pointers name, so that decoding a message
// without entries is one allocation.
type messageBox struct {
	m      raftpb.Message
	typ    raftpb.MessageType
	v      [8]uint64
	reject bool
}

type entryBox struct {
	e           raftpb.Entry
	typ         raftpb.EntryType
	term, index uint64
}

// DecodeMessage decodes a message. What it returns does not refer to b.
func DecodeMessage(b []byte) (*raftpb.Message, error) {
	r := reader{b: b}
	box := new(messageBox)
	m := &box.m
	bits := r.uvarint()
	if bits&^bitsAll != 0 {
		return nil, fmt.Errorf("%w: message fields %x", ErrMalformed, bits)
	}
	if bits&bitType != 0 {
		box.typ = raftpb.MessageType(r.uint31())
		m.Type = &box.typ
	}
	for i, p := range [...]**uint64{&m.To, &m.From, &m.Term, &m.LogTerm, &m.Index, &m.Commit, &m.Vote, &m.RejectHint} {
		if bits&(bitTo<<i) != 0 {
			box.v[i] = r.uvarint()
			*p = &box.v[i]
		}
	}
	if bits&bitReject != 0 {
		box.reject = bits&bitRejectTrue != 0
		m.Reject = &box.reject
	}
	if bits&bitContext != 0 {
		m.Context = clone(r.bytes())
	}
	if bits&bitEntries != 0 {
		m.Entries = r.entries()
	}
	if bits&bitSnapshot != 0 {
		m.Snapshot = r.snapshot()
	}
	if r.bad || len(r.b) > 0 {
		return nil, fmt.Errorf("%w: message", ErrMalformed)
	}
	return m, nil
}

// reader takes values from the front of b; after the first that is not there it is bad and gives
// zeros.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) uint31() int32 {
	v := r.uvarint()
	if v > 1<<31-1 {
		r.fail()
		return 0
	}
	return int32(v)
}

func (r *reader) byte() byte {
	if len(r.b) == 0 {
		r.fail()
		return 0
	}
	v := r.b[0]
	r.b = r.b[1:]
	return v
}

func (r *reader) bytes() []byte {
	n := r.uvarint()
	if n > uint64(len(r.b)) {
		r.fail()
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

func (r *reader) fail() { r.b, r.bad = nil, true }

// count reads the number of things that take at least one byte each.
func (r *reader) count() int {
	n := r.uvarint()
	if n > uint64(len(r.b)) {
		r.fail()
		return 0
	}
	return int(n)
}

func (r *reader) entries() []*raftpb.Entry {
	n := r.count()
	if n == 0 {
		r.fail() // an empty list has no bit
		return nil
	}
	boxes := make([]entryBox, n)
	out := make([]*raftpb.Entry, n)
	// One copy holds all data: a log's cache must not keep a whole frame for a short entry, nor
	// one allocation for each.
	size := 0
	for i := range boxes {
		x := &boxes[i]
		bits := r.byte()
		if bits&^entryBits != 0 {
			r.fail()
			return nil
		}
		if bits&entryType != 0 {
			x.typ = raftpb.EntryType(r.uint31())
			x.e.Type = &x.typ
		}
		if bits&entryTerm != 0 {
			x.term = r.uvarint()
			x.e.Term = &x.term
		}
		if bits&entryIndex != 0 {
			x.index = r.uvarint()
			x.e.Index = &x.index
		}
		if bits&entryData != 0 {
			x.e.Data = r.bytes()
			size += len(x.e.Data)
		}
		out[i] = &x.e
	}
	if r.bad {
		return nil
	}
	data := make([]byte, 0, size)
	for _, e := range out {
		if e.Data != nil {
			at := len(data)
			data = append(data, e.Data...)
			e.Data = data[at:len(data):len(data)]
		}
	}
	return out
}

func (r *reader) snapshot() *raftpb.Snapshot {
	s := new(raftpb.Snapshot)
	bits := r.uvarint()
	if bits&^snapBits != 0 || bits&snapMeta == 0 && bits&(snapIndex|snapTerm|snapConf) != 0 {
		r.fail()
		return nil
	}
	if bits&snapData != 0 {
		s.Data = clone(r.bytes())
	}
	if bits&snapMeta == 0 {
		return s
	}
	s.Metadata = new(raftpb.SnapshotMetadata)
	if bits&snapIndex != 0 {
		s.Metadata.Index = new(r.uvarint())
	}
	if bits&snapTerm != 0 {
		s.Metadata.Term = new(r.uvarint())
	}
	if bits&snapConf != 0 {
		cs := new(raftpb.ConfState)
		for _, p := range [...]*[]uint64{&cs.Voters, &cs.Learners, &cs.VotersOutgoing, &cs.LearnersNext} {
			for n := r.count(); n > 0; n-- {
				*p = append(*p, r.uvarint())
			}
		}
		if bits&snapAutoLeave != 0 {
			cs.AutoLeave = new(bits&snapAutoLeaveTrue != 0)
		}
		s.Metadata.ConfState = cs
	}
	return s
}

func clone(b []byte) []byte {
	return append(make([]byte, 0, len(b)), b...)
}
