package raftstore

import (
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
	"braid/raftstore/wal"
)

// MemDisk is the physical log of a simulated store: the records of all its groups in one order.
// What is appended is visible at once; Flush makes a prefix of the order durable, Crash keeps
// only that. It is not safe for concurrent use.
type MemDisk struct {
	logs  map[raftid.GroupID]*MemLog
	queue []memRecord // appended, not durable, oldest first
}

type memRecord struct {
	log *MemLog
	rec *wal.Record
}

// NewMemDisk returns an empty disk.
func NewMemDisk() *MemDisk { return &MemDisk{logs: make(map[raftid.GroupID]*MemLog)} }

// Log returns a group's log, empty when new.
func (d *MemDisk) Log(id raftid.GroupID) *MemLog {
	l := d.logs[id]
	if l == nil {
		l = &MemLog{disk: d}
		d.logs[id] = l
	}
	return l
}

// Groups returns the groups that have a log, in no particular order.
func (d *MemDisk) Groups() []raftid.GroupID {
	ids := make([]raftid.GroupID, 0, len(d.logs))
	for id := range d.logs {
		ids = append(ids, id)
	}
	return ids
}

// Pending is the number of records that are not durable.
func (d *MemDisk) Pending() int { return len(d.queue) }

// Flush makes the n oldest records durable (all when n is negative) and then calls their Done in
// order.
func (d *MemDisk) Flush(n int) {
	if n < 0 || n > len(d.queue) {
		n = len(d.queue)
	}
	batch := d.queue[:n:n]
	d.queue = d.queue[n:]
	for _, q := range batch {
		q.log.durable.apply(q.rec)
	}
	for _, q := range batch {
		if q.rec.Done != nil {
			q.rec.Done()
		}
	}
}

// Crash returns the disk as a restart would find it: what was flushed. The old disk must not be
// used any more.
func (d *MemDisk) Crash() *MemDisk {
	n := NewMemDisk()
	for id, l := range d.logs {
		n.logs[id] = &MemLog{disk: n, visible: l.durable.clone(), durable: l.durable.clone()}
	}
	return n
}

// MemLog is one group's log on a MemDisk.
type MemLog struct {
	disk             *MemDisk
	visible, durable memState
}

// NewMemLog returns an empty log on a disk of its own.
func NewMemLog() *MemLog { return NewMemDisk().Log(0) }

// Flush makes the n oldest records of the log's disk durable, see MemDisk.Flush.
func (l *MemLog) Flush(n int) { l.disk.Flush(n) }

// Crash returns the log as a restart would find it. Only for a log on a disk of its own.
func (l *MemLog) Crash() *MemLog {
	n := NewMemDisk()
	for id, old := range l.disk.logs {
		if old == l {
			n.logs[id] = &MemLog{disk: n, visible: l.durable.clone(), durable: l.durable.clone()}
			return n.logs[id]
		}
	}
	panic("raftstore: log is not on its disk")
}

// Append implements LogStore.
func (l *MemLog) Append(rec *wal.Record) {
	l.visible.apply(rec)
	l.disk.queue = append(l.disk.queue, memRecord{log: l, rec: rec})
}

// Hard implements LogStore.
func (l *MemLog) Hard() wal.HardState { return l.visible.hard }

// FirstIndex implements LogStore.
func (l *MemLog) FirstIndex() uint64 { return l.visible.start.Index + 1 }

// LastIndex implements LogStore.
func (l *MemLog) LastIndex() uint64 { return l.visible.last() }

// TermAt implements LogStore.
func (l *MemLog) TermAt(i uint64) (uint64, bool) { return l.visible.termAt(i) }

// Checkpoint implements LogStore.
func (l *MemLog) Checkpoint() *wal.Checkpoint { return l.visible.checkpoint }

// Start implements LogStore.
func (l *MemLog) Start() wal.Position { return l.visible.start }

// DurableIndex implements LogStore.
func (l *MemLog) DurableIndex() uint64 { return l.durable.last() }

// Destroyed returns the replicas that left a tombstone.
func (l *MemLog) Destroyed() []raftid.ReplicaID { return l.visible.destroyed }

// Entries implements LogStore.
func (l *MemLog) Entries(lo, hi, maxBytes uint64) ([]*raftpb.Entry, error) {
	s := &l.visible
	if lo > hi || lo <= s.start.Index || hi > s.last()+1 {
		return nil, fmt.Errorf("raftstore: entries [%d, %d) are outside the log (%d, %d]", lo, hi, s.start.Index, s.last())
	}
	var size uint64
	end := lo
	for end < hi {
		size += uint64(len(s.entry(end).GetData())) + entryOverheadBytes
		if size > maxBytes && end > lo {
			break
		}
		end++
	}
	out := make([]*raftpb.Entry, 0, end-lo)
	for i := lo; i < end; i++ {
		out = append(out, s.entry(i))
	}
	return out, nil
}

// entryOverheadBytes is what an entry counts beside its data where sizes are estimated.
const entryOverheadBytes = 16

// memState is a log's content; entries[i] has index start.Index+1+i.
type memState struct {
	start      wal.Position
	entries    []*raftpb.Entry
	hard       wal.HardState
	checkpoint *wal.Checkpoint
	destroyed  []raftid.ReplicaID
}

func (s *memState) last() uint64 { return s.start.Index + uint64(len(s.entries)) }

func (s *memState) entry(i uint64) *raftpb.Entry { return s.entries[i-s.start.Index-1] }

func (s *memState) termAt(i uint64) (uint64, bool) {
	switch {
	case i == s.start.Index:
		return s.start.Term, true
	case i < s.start.Index || i > s.last():
		return 0, false
	}
	return s.entry(i).GetTerm(), true
}

func (s *memState) clone() memState {
	c := *s
	c.entries = append([]*raftpb.Entry(nil), s.entries...)
	c.destroyed = append([]raftid.ReplicaID(nil), s.destroyed...)
	return c
}

// apply performs one record, its parts in the order of the fields.
func (s *memState) apply(rec *wal.Record) {
	if rec.Destroy != 0 {
		s.destroyed = append(s.destroyed, rec.Destroy)
		s.start, s.entries, s.hard, s.checkpoint = wal.Position{}, nil, wal.HardState{}, nil
	}
	if rec.Reset != nil {
		s.start, s.entries = *rec.Reset, nil
	}
	if c := rec.Checkpoint; c != nil {
		s.checkpoint = c
		s.truncate(c.Position)
	}
	if len(rec.Entries) > 0 {
		first := rec.Entries[0].GetIndex()
		if first <= s.start.Index || first > s.last()+1 {
			panic(fmt.Sprintf("raftstore: append at %d leaves a hole in the log (%d, %d]", first, s.start.Index, s.last()))
		}
		keep := first - s.start.Index - 1
		s.entries = append(s.entries[:keep], rec.Entries...)
	}
	if rec.Hard != nil {
		s.hard = *rec.Hard
	}
	if rec.Truncate > s.start.Index {
		term, ok := s.termAt(rec.Truncate)
		if !ok {
			panic(fmt.Sprintf("raftstore: truncation at %d is outside the log (%d, %d]", rec.Truncate, s.start.Index, s.last()))
		}
		s.truncate(wal.Position{Index: rec.Truncate, Term: term})
	}
}

func (s *memState) truncate(at wal.Position) {
	switch {
	case at.Index <= s.start.Index:
	case at.Index > s.last():
		s.start, s.entries = at, nil
	default:
		s.entries = append([]*raftpb.Entry(nil), s.entries[at.Index-s.start.Index:]...)
		s.start = at
	}
}
