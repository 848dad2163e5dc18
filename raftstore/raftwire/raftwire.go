// Package raftwire is the encoding of raft's messages between stores: batches that carry the
// messages of many groups, written and read by hand because protobuf's reflection costs more
// than raft's own work on a heartbeat.
//
// A batch is a version byte and then items: uvarint group, kind byte, uvarint length, body. A
// message keeps which of its fields are set, so that decoding gives back what was encoded;
// Responses are local to a replica and never travel. Numbers are uvarints, fields in the order of
// the bits below.
//
// It is a leaf: it knows raftpb and ids and holds no state.
package raftwire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
)

// Version is the first byte of every batch and snapshot header.
const Version = 1

// Kind says what an item of a batch is.
type Kind uint8

// The kinds of items.
const (
	KindMessage Kind = 1
	KindControl Kind = 2
)

// ErrMalformed is wrapped by every decoding error.
var ErrMalformed = errors.New("raftwire: malformed")

// AppendBatchHeader begins a batch.
func AppendBatchHeader(b []byte) []byte { return append(b, Version) }

// AppendItem adds one message of a group to a batch.
func AppendItem(b []byte, group raftid.GroupID, m *raftpb.Message) []byte {
	b = binary.AppendUvarint(b, uint64(group))
	b = append(b, byte(KindMessage))
	// The length comes first and is known last: room for the usual, moved when more is needed.
	at := len(b)
	b = append(b, 0, 0, 0)
	b = AppendMessage(b, m)
	return putLength(b, at)
}

// AppendControl adds a message that raft does not know; its fields are the caller's.
func AppendControl(b []byte, group raftid.GroupID, fields ...uint64) []byte {
	b = binary.AppendUvarint(b, uint64(group))
	b = append(b, byte(KindControl))
	at := len(b)
	b = append(b, 0, 0, 0)
	for _, f := range fields {
		b = binary.AppendUvarint(b, f)
	}
	return putLength(b, at)
}

// putLength writes the length of b[at+3:] into the three bytes at at, as a padded uvarint when it
// fits, else after making room.
func putLength(b []byte, at int) []byte {
	n := uint64(len(b) - at - 3)
	if n < 1<<21 {
		b[at], b[at+1], b[at+2] = byte(n)|0x80, byte(n>>7)|0x80, byte(n>>14)
		return b
	}
	var l [binary.MaxVarintLen64]byte
	w := binary.PutUvarint(l[:], n)
	b = slices.Insert(b, at+3, make([]byte, w-3)...)
	copy(b[at:], l[:w])
	return b
}

// Batch reads the items of a batch in order.
type Batch struct {
	r   reader
	err error
}

// Item is one item of a batch. Body is valid as long as the batch's bytes are.
type Item struct {
	Group raftid.GroupID
	Kind  Kind
	Body  []byte
}

// NewBatch begins to read a batch.
func NewBatch(b []byte) (*Batch, error) {
	if len(b) == 0 || b[0] != Version {
		return nil, fmt.Errorf("%w: batch version", ErrMalformed)
	}
	return &Batch{r: reader{b: b[1:]}}, nil
}

// Next returns the next item; ok is false at the end and on damage, which Err tells apart.
func (b *Batch) Next() (it Item, ok bool) {
	if b.err != nil || len(b.r.b) == 0 {
		return Item{}, false
	}
	it.Group = raftid.GroupID(b.r.uvarint())
	it.Kind = Kind(b.r.byte())
	it.Body = b.r.bytes()
	if b.r.bad {
		b.err = fmt.Errorf("%w: batch item", ErrMalformed)
		return Item{}, false
	}
	return it, true
}

// Err is what stopped Next, nil at the proper end.
func (b *Batch) Err() error { return b.err }

// Fields decodes a control's fields into out, which must all be there.
func Fields(body []byte, out ...*uint64) error {
	r := reader{b: body}
	for _, p := range out {
		*p = r.uvarint()
	}
	if r.bad || len(r.b) > 0 {
		return fmt.Errorf("%w: control", ErrMalformed)
	}
	return nil
}

// The bits say which fields a message has; their order is that of the fields.
const (
	bitType = 1 << iota
	bitTo
	bitFrom
	bitTerm
	bitLogTerm
	bitIndex
	bitCommit
	bitVote
	bitRejectHint
	bitReject
	bitRejectTrue
	bitContext
	bitEntries
	bitSnapshot
	bitsAll = 1<<iota - 1
)

const (
	entryType = 1 << iota
	entryTerm
	entryIndex
	entryData
	entryBits = 1<<iota - 1
)

const (
	snapData = 1 << iota
	snapMeta
	snapIndex
	snapTerm
	snapConf
	snapAutoLeave
	snapAutoLeaveTrue
	snapBits = 1<<iota - 1
)

// AppendMessage encodes a message.
func AppendMessage(b []byte, m *raftpb.Message) []byte {
	var bits uint64
	set := func(have bool, bit uint64) {
		if have {
			bits |= bit
		}
	}
	set(m.Type != nil, bitType)
	set(m.To != nil, bitTo)
	set(m.From != nil, bitFrom)
	set(m.Term != nil, bitTerm)
	set(m.LogTerm != nil, bitLogTerm)
	set(m.Index != nil, bitIndex)
	set(m.Commit != nil, bitCommit)
	set(m.Vote != nil, bitVote)
	set(m.RejectHint != nil, bitRejectHint)
	set(m.Reject != nil, bitReject)
	set(m.GetReject(), bitRejectTrue)
	set(m.Context != nil, bitContext)
	set(len(m.Entries) > 0, bitEntries)
	set(m.Snapshot != nil, bitSnapshot)
	b = binary.AppendUvarint(b, bits)
	if m.Type != nil {
		b = binary.AppendUvarint(b, uint64(m.GetType()))
	}
	for _, p := range [...]*uint64{m.To, m.From, m.Term, m.LogTerm, m.Index, m.Commit, m.Vote, m.RejectHint} {
		if p != nil {
			b = binary.AppendUvarint(b, *p)
		}
	}
	if m.Context != nil {
		b = appendBytes(b, m.Context)
	}
	if len(m.Entries) > 0 {
		b = binary.AppendUvarint(b, uint64(len(m.Entries)))
		for _, e := range m.Entries {
			b = appendEntry(b, e)
		}
	}
	if m.Snapshot != nil {
		b = appendSnapshot(b, m.Snapshot)
	}
	return b
}

func appendEntry(b []byte, e *raftpb.Entry) []byte {
	var bits byte
	if e.Type != nil {
		bits |= entryType
	}
	if e.Term != nil {
		bits |= entryTerm
	}
	if e.Index != nil {
		bits |= entryIndex
	}
	if e.Data != nil {
		bits |= entryData
	}
	b = append(b, bits)
	if e.Type != nil {
		b = binary.AppendUvarint(b, uint64(e.GetType()))
	}
	if e.Term != nil {
		b = binary.AppendUvarint(b, *e.Term)
	}
	if e.Index != nil {
		b = binary.AppendUvarint(b, *e.Index)
	}
	if e.Data != nil {
		b = appendBytes(b, e.Data)
	}
	return b
}

func appendSnapshot(b []byte, s *raftpb.Snapshot) []byte {
	var bits uint64
	md := s.Metadata
	cs := md.GetConfState()
	if s.Data != nil {
		bits |= snapData
	}
	if md != nil {
		bits |= snapMeta
		if md.Index != nil {
			bits |= snapIndex
		}
		if md.Term != nil {
			bits |= snapTerm
		}
	}
	if cs != nil {
		bits |= snapConf
		if cs.AutoLeave != nil {
			bits |= snapAutoLeave
		}
		if cs.GetAutoLeave() {
			bits |= snapAutoLeaveTrue
		}
	}
	b = binary.AppendUvarint(b, bits)
	if s.Data != nil {
		b = appendBytes(b, s.Data)
	}
	if md != nil && md.Index != nil {
		b = binary.AppendUvarint(b, *md.Index)
	}
	if md != nil && md.Term != nil {
		b = binary.AppendUvarint(b, *md.Term)
	}
	if cs != nil {
		for _, ids := range [...][]uint64{cs.Voters, cs.Learners, cs.VotersOutgoing, cs.LearnersNext} {
			b = binary.AppendUvarint(b, uint64(len(ids)))
			for _, id := range ids {
				b = binary.AppendUvarint(b, id)
			}
		}
	}
	return b
}

func appendBytes(b, v []byte) []byte {
	return append(binary.AppendUvarint(b, uint64(len(v))), v...)
}
