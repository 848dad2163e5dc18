package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"braid/raftstore/raftid"
)

// A payload is a sequence of records:
//
//	record  length 4 | kind 1 | group varint | parts
//	part    tag 1 | content
//	entry   crc 4 | type 1 | index varint | term varint | data
//
// Parts come in the order in which they take effect. Entries are each preceded by their length
// as a varint; an entry's crc covers its group too, so one can be read and verified by itself.
const (
	kindChange  = 1 // a Record
	kindRewrite = 2 // what a segment that is to be freed still held; see rewrite.go

	partDestroy    = 1
	partReset      = 2
	partCheckpoint = 3
	partEntries    = 4
	partHard       = 5
	partTruncate   = 6

	recordHeaderBytes = 4
	entryBytesMin     = 7
)

var errDecode = errors.New("wal: malformed record")

// groupSeed starts the crc of a group's entries.
func groupSeed(id raftid.GroupID) uint32 {
	return crc(binary.LittleEndian.AppendUint64(nil, uint64(id)))
}

func appendPosition(b []byte, p Position) []byte {
	b = binary.AppendUvarint(b, p.Index)
	return binary.AppendUvarint(b, p.Term)
}

func uvarintBytes(v uint64) int {
	n := 1
	for ; v >= 0x80; v >>= 7 {
		n++
	}
	return n
}

func entryBytes(e *raftpb.Entry) int {
	return 5 + uvarintBytes(e.GetIndex()) + uvarintBytes(e.GetTerm()) + len(e.GetData())
}

func appendEntry(b []byte, seed uint32, e *raftpb.Entry) []byte {
	start := len(b)
	b = append(b, 0, 0, 0, 0, byte(e.GetType()))
	b = binary.AppendUvarint(b, e.GetIndex())
	b = binary.AppendUvarint(b, e.GetTerm())
	b = append(b, e.GetData()...)
	binary.LittleEndian.PutUint32(b[start:], crc32.Update(seed, castagnoli, b[start+4:]))
	return b
}

// entryHead is a stored entry without its data.
type entryHead struct {
	typ         raftpb.EntryType
	index, term uint64
}

// decodeEntryHead verifies a stored entry and returns its head and where its data begins.
func decodeEntryHead(b []byte, seed uint32) (h entryHead, data int, err error) {
	if len(b) < entryBytesMin {
		return h, 0, errDecode
	}
	if crc32.Update(seed, castagnoli, b[4:]) != binary.LittleEndian.Uint32(b) {
		return h, 0, errors.New("entry checksum mismatch")
	}
	h.typ = raftpb.EntryType(b[4])
	d := decoder{b: b[5:]}
	h.index, h.term = d.uvarint(), d.uvarint()
	if d.bad {
		return h, 0, errDecode
	}
	return h, len(b) - len(d.b), nil
}

// decodeEntry copies nothing: the entry's data aliases b.
func decodeEntry(b []byte, seed uint32) (*raftpb.Entry, error) {
	h, at, err := decodeEntryHead(b, seed)
	if err != nil {
		return nil, err
	}
	e := &raftpb.Entry{Term: &h.term, Index: &h.index, Type: &h.typ}
	if at < len(b) {
		e.Data = b[at:len(b):len(b)]
	}
	return e, nil
}

// span is where an entry lies, first in a batch, then in a segment.
type span struct{ off, len uint32 }

// appendChange encodes a record. trunc is the resolved position of rec.Truncate. It appends to
// spans where in b each entry lies.
func appendChange(b []byte, g *GroupLog, rec *Record, trunc Position, spans []span) ([]byte, []span, error) {
	start := len(b)
	b = append(b, 0, 0, 0, 0, kindChange)
	b = binary.AppendUvarint(b, uint64(g.id))
	if rec.Destroy != 0 {
		b = append(b, partDestroy)
		b = binary.AppendUvarint(b, uint64(rec.Destroy))
	}
	if rec.Reset != nil {
		b = appendPosition(append(b, partReset), *rec.Reset)
	}
	if rec.Checkpoint != nil {
		var err error
		if b, err = appendCheckpoint(b, rec.Checkpoint); err != nil {
			return nil, nil, err
		}
	}
	if len(rec.Entries) > 0 {
		b = append(b, partEntries)
		b = binary.AppendUvarint(b, uint64(len(rec.Entries)))
		for _, e := range rec.Entries {
			n := entryBytes(e)
			b = binary.AppendUvarint(b, uint64(n))
			spans = append(spans, span{uint32(len(b)), uint32(n)})
			b = appendEntry(b, g.seed, e)
		}
	}
	if rec.Hard != nil {
		b = appendHard(b, *rec.Hard)
	}
	if trunc.Index != 0 {
		b = appendPosition(append(b, partTruncate), trunc)
	}
	binary.LittleEndian.PutUint32(b[start:], uint32(len(b)-start-recordHeaderBytes))
	return b, spans, nil
}

func appendHard(b []byte, h HardState) []byte {
	b = append(b, partHard)
	b = binary.AppendUvarint(b, h.Term)
	b = binary.AppendUvarint(b, uint64(h.Vote))
	return binary.AppendUvarint(b, h.Commit)
}

func appendCheckpoint(b []byte, c *Checkpoint) ([]byte, error) {
	var conf []byte
	if c.ConfState != nil {
		var err error
		if conf, err = proto.Marshal(c.ConfState); err != nil {
			return nil, fmt.Errorf("wal: conf state of a checkpoint: %w", err)
		}
	}
	b = appendPosition(append(b, partCheckpoint), c.Position)
	b = binary.AppendUvarint(b, uint64(len(conf)))
	b = append(b, conf...)
	b = binary.AppendUvarint(b, uint64(len(c.Data)))
	return append(b, c.Data...), nil
}

// change is a decoded record. Slices alias the payload.
type change struct {
	kind       byte
	group      raftid.GroupID
	destroy    []raftid.ReplicaID // more than one only in a rewrite
	reset      *Position
	checkpoint *Checkpoint
	ckptBytes  uint32
	entries    []storedEntry
	hard       *HardState
	truncate   *Position
}

// storedEntry is an entry's head and where it lies in the payload.
type storedEntry struct {
	entryHead
	span
}

type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.bad, d.b = true, nil
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) bytes(n uint64) []byte {
	if d.bad || n > uint64(len(d.b)) {
		d.bad, d.b = true, nil
		return nil
	}
	out := d.b[:n:n]
	d.b = d.b[n:]
	return out
}

func (d *decoder) position() Position {
	i := d.uvarint()
	return Position{Index: i, Term: d.uvarint()}
}

// decodeRecord decodes the record at off of a payload into c, whose slices it reuses, and
// returns where the next one begins. Every entry's checksum is verified.
func decodeRecord(payload []byte, off int, c *change) (int, error) {
	*c = change{destroy: c.destroy[:0], entries: c.entries[:0]}
	if len(payload)-off < recordHeaderBytes {
		return 0, errDecode
	}
	n := int(binary.LittleEndian.Uint32(payload[off:]))
	off += recordHeaderBytes
	if n < 2 || n > len(payload)-off {
		return 0, errDecode
	}
	end := off + n
	c.kind = payload[off]
	if c.kind != kindChange && c.kind != kindRewrite {
		return 0, fmt.Errorf("wal: record kind %d is not known", c.kind)
	}
	d := decoder{b: payload[off+1 : end]}
	c.group = raftid.GroupID(d.uvarint())
	seed := groupSeed(c.group)
	last := 0
	for len(d.b) > 0 {
		tag := int(d.b[0])
		d.b = d.b[1:]
		// Only a rewrite repeats a part: its tombstones.
		if tag < last || tag == last && !(tag == partDestroy && c.kind == kindRewrite) {
			return 0, errDecode
		}
		last = tag
		switch tag {
		case partDestroy:
			c.destroy = append(c.destroy, raftid.ReplicaID(d.uvarint()))
		case partReset:
			p := d.position()
			c.reset = &p
		case partCheckpoint:
			if err := d.checkpoint(c); err != nil {
				return 0, err
			}
		case partEntries:
			if err := d.entries(c, payload, end, seed); err != nil {
				return 0, err
			}
		case partHard:
			h := HardState{Term: d.uvarint(), Vote: raftid.ReplicaID(d.uvarint()), Commit: d.uvarint()}
			c.hard = &h
		case partTruncate:
			p := d.position()
			c.truncate = &p
		default:
			return 0, fmt.Errorf("wal: record part %d is not known", tag)
		}
	}
	if d.bad {
		return 0, errDecode
	}
	return end, nil
}

func (d *decoder) checkpoint(c *change) error {
	before := len(d.b)
	ck := &Checkpoint{Position: d.position()}
	conf := d.bytes(d.uvarint())
	ck.Data = append([]byte(nil), d.bytes(d.uvarint())...)
	if d.bad {
		return errDecode
	}
	if len(conf) > 0 {
		ck.ConfState = new(raftpb.ConfState)
		if err := proto.Unmarshal(conf, ck.ConfState); err != nil {
			return fmt.Errorf("wal: conf state of a checkpoint: %w", err)
		}
	}
	c.checkpoint, c.ckptBytes = ck, uint32(before-len(d.b))
	return nil
}

func (d *decoder) entries(c *change, payload []byte, end int, seed uint32) error {
	count := d.uvarint()
	if d.bad || count == 0 || count > uint64(len(d.b))/entryBytesMin {
		return errDecode
	}
	for range count {
		b := d.bytes(d.uvarint())
		if d.bad {
			return errDecode
		}
		h, _, err := decodeEntryHead(b, seed)
		if err != nil {
			return err
		}
		if n := len(c.entries); n > 0 && c.kind == kindChange && h.index != c.entries[n-1].index+1 {
			return errDecode
		}
		at := end - len(d.b) - len(b)
		c.entries = append(c.entries, storedEntry{h, span{uint32(at), uint32(len(b))}})
	}
	return nil
}
