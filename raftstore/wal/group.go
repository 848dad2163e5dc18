package wal

import (
	"fmt"
	"slices"
	"sync"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
)

// GroupLog is one group's logical write-ahead log inside a Log. Append and the reading methods
// are called by the group's owner, one at a time; what was appended is visible to them at once.
// The log's writer and rewriter work on the same group beside the owner, under mu.
type GroupLog struct {
	id   raftid.GroupID
	seed uint32 // starts the crc of the group's entries
	log  *Log

	mu      sync.Mutex
	seq     uint64 // of the last Append; tells apart two values of one slot
	start   Position
	startAt where
	hard    HardState
	hardAt  where
	ckpt    *Checkpoint
	ckptAt  where
	tombs   []tomb
	slots   []slot          // slots[k] is entry start.Index+1+k
	cached  []*raftpb.Entry // the last len(cached) entries, at least all that are not yet written
	durable uint64
	// The Append that last dropped everything, and the index after which the log then began.
	resetSeq, resetIndex uint64
}

// slot says where an entry is. 24 bytes for each entry the log holds.
type slot struct {
	term uint64
	// at is the entry's offset in segment seg, or, when seg is zero, the seq of the Append that
	// is still to be written.
	at  uint64
	seg uint32
	len uint32
}

// where is the same for a group's other state. The zero value: there is none.
type where struct {
	seq   uint64
	seg   uint32 // zero: not yet written
	bytes uint32
}

type tomb struct {
	replica raftid.ReplicaID
	at      where
}

// metaBytes is what a hard state, a start or a tombstone counts as live in its segment: about
// what rewriting one costs.
const metaBytes = 32

// liveDelta is a change in what a segment holds of live state.
type liveDelta struct {
	seg   uint32
	bytes int64
}

// deltas sums changes by segment; it is nearly always one or two long.
type deltas []liveDelta

func (d *deltas) add(seg uint32, bytes int64) {
	if seg == 0 {
		return // never written, so never counted
	}
	for i := range *d {
		if (*d)[i].seg == seg {
			(*d)[i].bytes += bytes
			return
		}
	}
	*d = append(*d, liveDelta{seg, bytes})
}

func (d *deltas) kill(w where) { d.add(w.seg, -int64(w.bytes)) }

// ID returns the group's id.
func (g *GroupLog) ID() raftid.GroupID { return g.id }

// last returns the last index. Called with mu held.
func (g *GroupLog) last() uint64 { return g.start.Index + uint64(len(g.slots)) }

// Append changes the group's log. It never waits for the disk: rec is visible to reads when it
// returns, and rec.Done is called after it is durable. The log keeps rec and what it points to,
// which must not change any more. A record that only truncates and has no Done does not cause a
// write; it goes with the next one.
//
// After the log has failed or was closed, Append still changes what is read and Done is never
// called. A record that leaves a hole is a fault of the caller: Append panics.
func (g *GroupLog) Append(rec *Record) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seq++
	it := item{g: g, rec: rec, seq: g.seq}
	var room [4]liveDelta
	dead := deltas(room[:0])
	cacheDelta := int64(0)

	if rec.Destroy != 0 {
		cacheDelta -= g.destroy(rec.Destroy, where{seq: g.seq, bytes: metaBytes}, &dead)
	}
	if rec.Reset != nil {
		cacheDelta -= g.reset(*rec.Reset, &dead)
	}
	if c := rec.Checkpoint; c != nil {
		dead.kill(g.ckptAt)
		g.ckpt = c
		g.ckptAt = where{seq: g.seq, bytes: uint32(metaBytes + len(c.Data))}
		if c.Index > g.last() {
			cacheDelta -= g.reset(c.Position, &dead)
		} else {
			cacheDelta -= g.truncate(c.Position, &dead)
		}
	}
	if len(rec.Entries) > 0 {
		cacheDelta += g.entries(rec.Entries, &dead)
	}
	if rec.Hard != nil {
		dead.kill(g.hardAt)
		g.hard, g.hardAt = *rec.Hard, where{seq: g.seq, bytes: metaBytes}
	}
	if i := min(rec.Truncate, g.last()); i > g.start.Index {
		it.trunc = Position{Index: i, Term: g.slots[i-g.start.Index-1].term}
		cacheDelta -= g.truncate(it.trunc, &dead)
	}

	it.bytes = int64(recordBytes(rec))
	it.lazy = rec.Done == nil && rec.Destroy == 0 && rec.Reset == nil && rec.Checkpoint == nil &&
		len(rec.Entries) == 0 && rec.Hard == nil
	g.log.cacheBytes.Add(cacheDelta)
	g.log.push(it, dead)
}

// recordBytes is about what a record takes in the log; an upper bound for all but big terms.
func recordBytes(rec *Record) int {
	n := 96
	if rec.Checkpoint != nil {
		n += 256 + len(rec.Checkpoint.Data)
	}
	for _, e := range rec.Entries {
		n += 28 + len(e.GetData())
	}
	return n
}

// destroy drops everything and leaves a tombstone. It returns how many cached bytes went. Called
// with mu held, as are the functions below.
func (g *GroupLog) destroy(replica raftid.ReplicaID, at where, dead *deltas) int64 {
	freed := g.cut(0, dead)
	dead.kill(g.startAt)
	dead.kill(g.hardAt)
	dead.kill(g.ckptAt)
	g.start, g.startAt = Position{}, where{}
	g.hard, g.hardAt = HardState{}, where{}
	g.ckpt, g.ckptAt = nil, where{}
	g.durable, g.resetSeq, g.resetIndex = 0, g.seq, 0
	if !slices.ContainsFunc(g.tombs, func(t tomb) bool { return t.replica == replica }) {
		g.tombs = append(g.tombs, tomb{replica, at})
	}
	return freed
}

// reset drops all entries; the log goes on after p.
func (g *GroupLog) reset(p Position, dead *deltas) int64 {
	freed := g.cut(0, dead)
	dead.kill(g.startAt)
	g.start, g.startAt = p, where{seq: g.seq, bytes: metaBytes}
	g.durable, g.resetSeq, g.resetIndex = 0, g.seq, p.Index
	return freed
}

// cut keeps the first n slots.
func (g *GroupLog) cut(n int, dead *deltas) (freed int64) {
	for _, s := range g.slots[n:] {
		dead.add(s.seg, -int64(s.len))
	}
	gone := min(len(g.slots)-n, len(g.cached))
	tail := g.cached[len(g.cached)-gone:]
	for _, e := range tail {
		freed += cacheCost(e)
	}
	clear(tail)
	g.cached = g.cached[:len(g.cached)-gone]
	g.slots = g.slots[:n]
	g.durable = min(g.durable, g.last())
	return freed
}

// truncate forgets entries through p, which is not above the last one.
func (g *GroupLog) truncate(p Position, dead *deltas) (freed int64) {
	if p.Index <= g.start.Index {
		return 0
	}
	n := int(p.Index - g.start.Index)
	for _, s := range g.slots[:n] {
		dead.add(s.seg, -int64(s.len))
	}
	keep := len(g.slots) - n
	if len(g.cached) > keep {
		freed = g.uncache(len(g.cached) - keep)
	}
	if n > keep {
		g.slots = append(make([]slot, 0, keep+keep/4), g.slots[n:]...)
	} else {
		g.slots = g.slots[n:]
	}
	dead.kill(g.startAt)
	g.start, g.startAt = p, where{seq: g.seq, bytes: metaBytes}
	return freed
}

// uncache drops the n oldest entries from the cache.
func (g *GroupLog) uncache(n int) (freed int64) {
	for _, e := range g.cached[:n] {
		freed += cacheCost(e)
	}
	if keep := len(g.cached) - n; n > keep {
		g.cached = append(make([]*raftpb.Entry, 0, keep+keep/4), g.cached[n:]...)
	} else {
		clear(g.cached[:n])
		g.cached = g.cached[n:]
	}
	return freed
}

// evict drops up to half of the group's cache, oldest first, never what is not yet written.
func (g *GroupLog) evict() {
	g.mu.Lock()
	defer g.mu.Unlock()
	first := len(g.slots) - len(g.cached)
	n := 0
	for n < (len(g.cached)+1)/2 && g.slots[first+n].seg != 0 {
		n++
	}
	if n > 0 {
		g.log.cacheBytes.Add(-g.uncache(n))
	}
}

// cacheCost is what a cached entry counts against Options.CacheBytes.
func cacheCost(e *raftpb.Entry) int64 { return int64(len(e.GetData())) + 96 }

// entries puts ents into the log, replacing everything at or above the first.
func (g *GroupLog) entries(ents []*raftpb.Entry, dead *deltas) (grew int64) {
	first := ents[0].GetIndex()
	if first <= g.start.Index || first > g.last()+1 {
		panic(fmt.Sprintf("wal: group %d: entries from %d appended to a log of (%d, %d]",
			g.id, first, g.start.Index, g.last()))
	}
	grew = -g.cut(int(first-g.start.Index-1), dead)
	for k, e := range ents {
		if e.GetIndex() != first+uint64(k) {
			panic(fmt.Sprintf("wal: group %d: entry %d follows %d", g.id, e.GetIndex(), first+uint64(k)-1))
		}
		g.slots = append(g.slots, slot{term: e.GetTerm(), at: g.seq, len: uint32(entryBytes(e))})
		g.cached = append(g.cached, e)
		grew += cacheCost(e)
	}
	return grew
}

// Hard returns the hard state, zero when there is none.
func (g *GroupLog) Hard() HardState {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.hard
}

// Start returns the position before FirstIndex: where the log was last truncated or reset.
func (g *GroupLog) Start() Position {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.start
}

// FirstIndex is the index of the first entry held, LastIndex()+1 when there is none.
func (g *GroupLog) FirstIndex() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.start.Index + 1
}

// LastIndex is the index of the last entry, durable or not; Start().Index when there is none.
func (g *GroupLog) LastIndex() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.last()
}

// DurableIndex is the highest index such that the log through it, as it is now, is durable.
func (g *GroupLog) DurableIndex() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.durable
}

// Checkpoint returns the last checkpoint, nil when there is none. It is read-only.
func (g *GroupLog) Checkpoint() *Checkpoint {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.ckpt
}

// TermAt returns the term of the entry at i, also of Start; false when the log does not hold it.
func (g *GroupLog) TermAt(i uint64) (uint64, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case i == g.start.Index:
		return g.start.Term, true
	case i < g.start.Index || i > g.last():
		return 0, false
	}
	return g.slots[i-g.start.Index-1].term, true
}

// Entries returns entries [lo, hi) up to about maxBytes of data, at least one when lo < hi. They
// are shared and read-only. Errors: raft.ErrCompacted when lo is not above Start,
// raft.ErrUnavailable when hi is above LastIndex()+1, *CorruptError when the disk does not give
// back what was written, or the error of reading it.
func (g *GroupLog) Entries(lo, hi, maxBytes uint64) ([]*raftpb.Entry, error) {
	g.mu.Lock()
	switch {
	case lo <= g.start.Index:
		g.mu.Unlock()
		return nil, raft.ErrCompacted
	case hi > g.last()+1:
		g.mu.Unlock()
		return nil, raft.ErrUnavailable
	case lo >= hi:
		g.mu.Unlock()
		return nil, nil
	}
	from := int(lo - g.start.Index - 1)
	to, size := from, uint64(0)
	for to < int(hi-g.start.Index-1) {
		size += uint64(g.slots[to].len) + 16
		if size > maxBytes && to > from {
			break
		}
		to++
	}
	firstCached := len(g.slots) - len(g.cached)
	split := min(max(from, firstCached), to)
	out := make([]*raftpb.Entry, to-from)
	if split < to {
		copy(out[split-from:], g.cached[split-firstCached:to-firstCached])
	}
	if split == from {
		g.mu.Unlock()
		return out, nil
	}
	// The rest is read without the lock, which the writer needs; the segments stay until unpin.
	stored := slices.Clone(g.slots[from:split])
	pins := g.log.pin(stored)
	g.mu.Unlock()
	defer g.log.unpin(pins)
	return out, g.read(lo, stored, pins, out)
}

// readBytesMax bounds one read of neighbouring entries.
const readBytesMax = 1 << 20

// read fills out with the stored entries from index lo on.
func (g *GroupLog) read(lo uint64, stored []slot, pins []*segment, out []*raftpb.Entry) error {
	for i := 0; i < len(stored); {
		// Entries that were written together lie together: one read for as many as possible.
		j, begin := i, stored[i].at
		end := begin
		for j < len(stored) && stored[j].seg == stored[i].seg && stored[j].at >= end &&
			stored[j].at-end <= blockBytes && (j == i || stored[j].at+uint64(stored[j].len)-begin <= readBytesMax) {
			end = stored[j].at + uint64(stored[j].len)
			j++
		}
		seg := pins[slices.IndexFunc(pins, func(s *segment) bool { return s.num == stored[i].seg })]
		buf := make([]byte, end-begin)
		if err := readFull(seg.file, buf, int64(begin)); err != nil {
			return fmt.Errorf("wal: reading entry %d of group %d: %w", lo+uint64(i), g.id, err)
		}
		for ; i < j; i++ {
			s := stored[i]
			e, err := decodeEntry(buf[s.at-begin:s.at-begin+uint64(s.len)], g.seed)
			if err == nil && (e.GetIndex() != lo+uint64(i) || e.GetTerm() != s.term) {
				err = fmt.Errorf("entry %d of term %d found", e.GetIndex(), e.GetTerm())
			}
			if err != nil {
				return &CorruptError{g.log.path(segmentName(s.seg)), int64(s.at),
					fmt.Sprintf("entry %d of group %d: %v", lo+uint64(i), g.id, err)}
			}
			out[i] = e
		}
	}
	return nil
}

// written notes that the record it, which lies in segment seg with its entries at spans, is
// durable. Called by the writer. It returns what became live in the segment.
func (g *GroupLog) written(it *item, seg uint32, base uint64, spans []span) (live int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	mark := func(w *where) {
		if w.seg == 0 && w.seq == it.seq {
			w.seg = seg
			live += int64(w.bytes)
		}
	}
	mark(&g.startAt)
	mark(&g.hardAt)
	mark(&g.ckptAt)
	if it.rec.Destroy != 0 {
		for i := range g.tombs {
			mark(&g.tombs[i].at)
		}
	}
	if it.seq < g.resetSeq {
		return live
	}
	// A reset log is durable through its start as soon as the reset is.
	g.durable = max(g.durable, g.resetIndex)
	for k, e := range it.rec.Entries {
		i := e.GetIndex()
		if i <= g.start.Index {
			g.durable = max(g.durable, i) // truncated since
			continue
		}
		if i > g.last() {
			break
		}
		if s := &g.slots[i-g.start.Index-1]; s.seg == 0 && s.at == it.seq {
			s.seg, s.at = seg, base+uint64(spans[k].off)
			live += int64(s.len)
			g.durable = max(g.durable, i)
		}
	}
	return live
}

// empty says whether the group holds nothing but tombstones. Called with mu held.
func (g *GroupLog) empty() bool {
	return len(g.slots) == 0 && g.startAt == where{} && g.hardAt == where{} && g.ckpt == nil
}
