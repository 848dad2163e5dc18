package wal

import (
	"encoding/binary"
	"fmt"
	"slices"

	"braid/raftstore/raftid"
)

// rewrite carries what a group still has in the log's oldest segment to the head. Every part is
// what is true of the group at the moment of its push: unlike a Record it replaces nothing, it
// says again what is so.
type rewrite struct {
	tombs   []tomb
	start   Position
	startAt where // as moved; the zero value: not part of this
	hard    HardState
	hardAt  where
	ckpt    *Checkpoint
	ckptAt  where
	entries []movedEntry
	raw     []byte // the entries as they are stored
	done    chan struct{}
}

type movedEntry struct {
	index uint64
	from  slot
	at    int // in raw
}

// moveBytesMax bounds what the rewriter has under way.
const moveBytesMax = 1 << 20

// rewriteLoop moves stragglers' records out of the oldest segment whenever the head changes and
// the log has become long for what it holds.
func (l *Log) rewriteLoop() {
	for {
		select {
		case <-l.moves:
		case <-l.stop:
			return
		case <-l.wrote:
			return
		}
		for num, last := l.wantMove(), uint32(0); num != 0; num, last = l.wantMove(), num {
			ok, err := false, error(nil)
			if num == last {
				err = fmt.Errorf("wal: segment %s still holds something live after it was moved out", segmentName(num))
			} else {
				ok, err = l.moveOut(num)
			}
			if err != nil {
				// What this replica has promised is no longer all there: it must stop.
				l.fail(err)
			}
			if !ok {
				return
			}
		}
	}
}

// wantMove returns the segment to move live records out of, zero if none: the oldest with any,
// when more than SegmentsKept are kept and either little in it is live, or less than half of the
// whole. So the log never takes more than about twice what is live, however unwilling a group is
// to truncate, and what is moved pays for itself in space.
func (l *Log) wantMove() uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	segs := l.segs
	for len(segs) > 1 && segs[0].live == 0 {
		segs = segs[1:]
	}
	if len(segs) <= l.o.SegmentsKept {
		return 0
	}
	room, live := l.o.SegmentBytes-blockBytes, int64(0)
	for _, s := range segs {
		live += s.live
	}
	if segs[0].live <= room/4 || live <= room*int64(len(segs))/2 {
		return segs[0].num
	}
	return 0
}

// moveOut moves what is live in segment num to the head and returns when it is durable there;
// false when the log has stopped.
func (l *Log) moveOut(num uint32) (bool, error) {
	var under []*rewrite
	size := 0
	wait := func() bool {
		for _, m := range under {
			select {
			case <-m.done:
			case <-l.wrote:
				return false
			}
		}
		under, size = under[:0], 0
		return true
	}
	for _, g := range l.allGroups() {
		for from := uint64(0); ; {
			m, next, err := g.collect(num, from)
			if err != nil {
				return false, err
			}
			if m != nil {
				under = append(under, m)
				if size += len(m.raw) + 256; size >= moveBytesMax && !wait() {
					return false, nil
				}
			}
			if from = next; from == 0 {
				break
			}
		}
	}
	return wait(), nil
}

// collect reads up to moveBytesMax of the group's entries that lie in segment num from index
// from on, and pushes what of it, and of the group's other state there, is still so. It returns
// nil when there was nothing, and the index to go on at, zero at the end.
func (g *GroupLog) collect(num uint32, from uint64) (*rewrite, uint64, error) {
	m := &rewrite{done: make(chan struct{})}
	g.mu.Lock()
	var stored []slot
	size, next := 0, uint64(0)
	for k := max(from, g.start.Index+1) - g.start.Index - 1; k < uint64(len(g.slots)); k++ {
		s := g.slots[k]
		if s.seg != num {
			continue
		}
		if size > 0 && size+int(s.len) > moveBytesMax {
			next = g.start.Index + 1 + k
			break
		}
		m.entries = append(m.entries, movedEntry{g.start.Index + 1 + k, s, size})
		stored = append(stored, s)
		size += int(s.len)
	}
	pins := g.log.pin(stored)
	g.mu.Unlock()

	m.raw = make([]byte, size)
	err := g.readRaw(pins, m)
	g.log.unpin(pins)
	if err != nil {
		return nil, 0, err
	}

	g.mu.Lock()
	defer g.mu.Unlock()
	m.entries = slices.DeleteFunc(m.entries, func(e movedEntry) bool { return !g.holds(e) })
	parts := len(m.entries)
	if g.startAt.seg == num {
		m.start, m.startAt = g.start, g.startAt
		parts++
	}
	if g.hardAt.seg == num {
		m.hard, m.hardAt = g.hard, g.hardAt
		parts++
	}
	if g.ckptAt.seg == num {
		m.ckpt, m.ckptAt = g.ckpt, g.ckptAt
		size += int(g.ckptAt.bytes)
		parts++
	}
	for _, t := range g.tombs {
		if t.at.seg == num {
			m.tombs = append(m.tombs, t)
			parts++
		}
	}
	if parts == 0 {
		return nil, next, nil
	}
	g.log.push(item{g: g, move: m, bytes: int64(size) + 256}, nil)
	return m, next, nil
}

// readRaw fills m.raw, a run of neighbours at a time, and verifies every entry.
func (g *GroupLog) readRaw(pins []*segment, m *rewrite) error {
	for i := 0; i < len(m.entries); {
		first := m.entries[i]
		end := first.from.at
		j := i
		// Neighbours are separated by a length; anything further apart is read by itself.
		for ; j < len(m.entries) && m.entries[j].from.at >= end && m.entries[j].from.at-end <= alignBytes; j++ {
			end = m.entries[j].from.at + uint64(m.entries[j].from.len)
		}
		buf := make([]byte, end-first.from.at)
		if err := readFull(pins[0].file, buf, int64(first.from.at)); err != nil {
			return fmt.Errorf("wal: rewriting entry %d of group %d: %w", first.index, g.id, err)
		}
		for ; i < j; i++ {
			e := m.entries[i]
			b := buf[e.from.at-first.from.at:][:e.from.len]
			h, _, err := decodeEntryHead(b, g.seed)
			if err == nil && (h.index != e.index || h.term != e.from.term) {
				err = fmt.Errorf("entry %d of term %d found", h.index, h.term)
			}
			if err != nil {
				return &CorruptError{g.log.path(segmentName(e.from.seg)), int64(e.from.at),
					fmt.Sprintf("entry %d of group %d: %v", e.index, g.id, err)}
			}
			copy(m.raw[e.at:], b)
		}
	}
	return nil
}

// holds says whether the entry is still the log's and still where it was. Called with mu held.
func (g *GroupLog) holds(e movedEntry) bool {
	return e.index > g.start.Index && e.index <= g.last() && g.slots[e.index-g.start.Index-1] == e.from
}

// append encodes the rewrite as a record, as appendChange does a Record.
func (m *rewrite) append(b []byte, g *GroupLog, spans []span) ([]byte, []span, error) {
	begin := len(b)
	b = append(b, 0, 0, 0, 0, kindRewrite)
	b = binary.AppendUvarint(b, uint64(g.id))
	for _, t := range m.tombs {
		b = append(b, partDestroy)
		b = binary.AppendUvarint(b, uint64(t.replica))
	}
	if m.ckptAt != (where{}) {
		var err error
		if b, err = appendCheckpoint(b, m.ckpt); err != nil {
			return nil, nil, err
		}
	}
	if len(m.entries) > 0 {
		b = append(b, partEntries)
		b = binary.AppendUvarint(b, uint64(len(m.entries)))
		for _, e := range m.entries {
			b = binary.AppendUvarint(b, uint64(e.from.len))
			spans = append(spans, span{uint32(len(b)), e.from.len})
			b = append(b, m.raw[e.at:][:e.from.len]...)
		}
	}
	if m.hardAt != (where{}) {
		b = appendHard(b, m.hard)
	}
	if m.startAt != (where{}) {
		b = appendPosition(append(b, partTruncate), m.start)
	}
	binary.LittleEndian.PutUint32(b[begin:], uint32(len(b)-begin-recordHeaderBytes))
	return b, spans, nil
}

// written lets what is still so point to its new place, durable in segment seg, and the old one
// go. Called by the writer.
func (m *rewrite) written(g *GroupLog, seg uint32, base uint64, spans []span, old *deltas) (live int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	shift := func(w *where, from where) {
		if from != (where{}) && *w == from {
			old.kill(from)
			w.seg = seg
			live += int64(from.bytes)
		}
	}
	shift(&g.startAt, m.startAt)
	shift(&g.hardAt, m.hardAt)
	shift(&g.ckptAt, m.ckptAt)
	for _, t := range m.tombs {
		for i := range g.tombs {
			if g.tombs[i].replica == t.replica {
				shift(&g.tombs[i].at, t.at)
			}
		}
	}
	for k, e := range m.entries {
		if !g.holds(e) {
			continue
		}
		old.add(e.from.seg, -int64(e.from.len))
		live += int64(e.from.len)
		s := &g.slots[e.index-g.start.Index-1]
		s.seg, s.at = seg, base+uint64(spans[k].off)
	}
	return live
}

// tombsOf returns a group's destroyed replicas in order of id. Called with mu held.
func tombsOf(g *GroupLog) (out []raftid.ReplicaID) {
	for _, t := range g.tombs {
		out = append(out, t.replica)
	}
	slices.Sort(out)
	return out
}
