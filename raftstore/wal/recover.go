package wal

import (
	"fmt"
	"slices"

	"go.uber.org/zap"
)

// recover reads the log once from its first segment to its end, rebuilds every group, and makes
// the writer go on where the log ends.
func (l *Log) recover() error {
	run, err := l.openSegments()
	if err != nil {
		return err
	}
	if len(run) == 0 {
		return l.begin()
	}
	r := &replay{l: l, segs: run, first: run[0].num}
	if err := r.scan(); err != nil {
		return err
	}
	if err := r.checkEnd(); err != nil {
		return err
	}
	if end := (place{l.segs[r.at].num, uint32(r.off)}); !r.torn.less(end) {
		l.o.Logger.Warn("the log's last batch is incomplete and cut off: it was being written when the process or the machine stopped, or is damaged",
			zap.String("file", l.path(segmentName(r.torn.seg))), zap.Uint32("offset", r.torn.off))
	}
	// Where the log ends, the writer goes on; what lies behind is for recycling.
	l.w.head, l.w.off, l.w.prev, l.w.oldest = l.segs[r.at], r.off, r.prev, r.oldest
	l.w.synced = place{l.w.head.num, uint32(r.off)}
	l.w.plan.oldest = r.oldest
	l.w.unmarked = r.any && !r.clean
	l.spares = append(l.spares, l.segs[r.at+1:]...)
	l.segs = l.segs[:r.at+1]
	for l.segs[0].num < r.oldest {
		l.spares = append(l.spares, l.segs[0])
		l.segs = l.segs[1:]
	}
	if err := l.finishGroups(); err != nil {
		return err
	}
	return r.secureLast()
}

// secureLast makes the last batch durable. It may have been read from the page cache only: the
// process was killed before its sync, or the sync failed, after which the kernel takes the pages
// for clean although they never reached the disk. So it is written once more.
func (r *replay) secureLast() error {
	if !r.any {
		return nil
	}
	f := r.segs[r.at].file
	b, err := r.win.bytes(f, r.last, int(r.off-r.last))
	if err != nil {
		return fmt.Errorf("wal: reading %s at %d: %w", r.file(r.at), r.last, err)
	}
	if _, err := f.WriteAt(b, r.last); err != nil {
		return fmt.Errorf("wal: writing %s at %d: %w", r.file(r.at), r.last, err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("wal: syncing %s: %w", r.file(r.at), err)
	}
	return nil
}

// openSegments opens all segment files and returns the run of consecutive ones at the end of the
// numbers. Files before a gap had been freed; if not, checkEnd will miss them.
func (l *Log) openSegments() ([]*segment, error) {
	names, err := l.o.FS.List(l.dir)
	if err != nil {
		return nil, fmt.Errorf("wal: %w", err)
	}
	var all []*segment
	for _, name := range names {
		num, ok := parseSegmentName(name)
		if !ok {
			if name == tmpName {
				if err := l.o.FS.Remove(l.path(name)); err != nil {
					return nil, fmt.Errorf("wal: %w", err)
				}
			}
			continue
		}
		f, err := l.o.FS.Open(l.path(name))
		if err != nil {
			return nil, fmt.Errorf("wal: %w", err)
		}
		all = append(all, &segment{num: num, file: f})
		l.spares = all // for closeFiles, until it is known which are live
	}
	slices.SortFunc(all, func(a, b *segment) int { return int(int64(a.num) - int64(b.num)) })
	i := len(all)
	for i > 0 && (i == len(all) || all[i-1].num+1 == all[i].num) {
		i--
	}
	l.spares, l.segs = all[:i:i], all[i:]
	return l.segs, nil
}

// begin creates the first segment. It is not filled with zeros, so that a new store is ready at
// once; the ones after it are.
func (l *Log) begin() error {
	l.logID = randomUint64()
	l.waits.Store(true)
	s, err := l.create(1)
	l.waits.Store(false)
	if err != nil {
		return err
	}
	l.segs = []*segment{s}
	l.w.head, l.w.off, l.w.synced = s, blockBytes, place{s.num, blockBytes}
	l.w.oldest, l.w.plan.oldest = s.num, s.num
	return nil
}

// replay reads a log.
type replay struct {
	l      *Log
	segs   []*segment
	first  uint32
	known  []bool
	win    window
	at     int    // the segment that holds the end of what was read
	off    int64  // the end
	last   int64  // the last batch's offset
	prev   uint32 // crc of the last batch's header
	any    bool   // there was one
	torn   place  // of the last batch that is not whole
	clean  bool   // and it was the mark of a clean stop
	oldest uint32
	rec    change
}

// window reads a file through a buffer.
type window struct {
	f    File
	off  int64
	buf  []byte
	room []byte
}

const windowBytes = 1 << 20

// bytes returns n bytes at off, fewer at the end of the file; valid until the next call.
func (w *window) bytes(f File, off int64, n int) ([]byte, error) {
	if f != w.f || off < w.off || off+int64(n) > w.off+int64(len(w.buf)) {
		size, err := f.Size()
		if err != nil {
			return nil, err
		}
		want := int(max(0, min(int64(max(n, windowBytes)), size-off)))
		if want > cap(w.room) {
			w.room = make([]byte, want)
		}
		w.f, w.off, w.buf = f, off, w.room[:want]
		if err := readFull(f, w.buf, off); err != nil {
			w.f = nil
			return nil, err
		}
	}
	b := w.buf[off-w.off:]
	return b[:min(n, len(b))], nil
}

func (r *replay) file(i int) string { return r.l.path(segmentName(r.segs[i].num)) }

// headers reads every segment's header. A file that was about to be recycled may still have its
// former one.
func (r *replay) headers() error {
	found := false
	for i, s := range r.segs {
		b, err := r.win.bytes(s.file, 0, segmentHeaderBytes)
		if err != nil {
			return fmt.Errorf("wal: reading %s: %w", r.file(i), err)
		}
		id, num, ok, err := decodeSegmentHeader(b)
		if err != nil {
			return fmt.Errorf("%s: %w", r.file(i), err)
		}
		if ok && found && id != r.l.logID {
			return &CorruptError{r.file(i), 0, "the file belongs to another log"}
		}
		if ok {
			r.l.logID, found = id, true
		}
		r.known = append(r.known, ok && num == uint64(s.num))
	}
	if !found {
		return &CorruptError{r.file(0), 0, "no segment has a readable header"}
	}
	return nil
}

// scan applies every batch up to the first place where none follows.
func (r *replay) scan() error {
	if err := r.headers(); err != nil {
		return err
	}
	r.oldest, r.off = 1, blockBytes
	for {
		n, err := r.batch(r.at, r.off)
		if err != nil {
			return err
		}
		if n > 0 {
			r.last, r.off = r.off, r.off+n
			continue
		}
		// Does the log go on in the next segment? Its first batch says what it follows.
		if r.at+1 == len(r.segs) || !r.any {
			return nil
		}
		n, err = r.batch(r.at+1, blockBytes)
		if err != nil || n == 0 {
			return err
		}
		r.at, r.last, r.off = r.at+1, blockBytes, blockBytes+n
	}
}

// batch applies the batch at off of segment i if there is one that continues the log, and
// returns the space it takes, zero if there is none.
func (r *replay) batch(i int, off int64) (int64, error) {
	s := r.segs[i]
	at := place{s.num, uint32(off)}
	b, err := r.win.bytes(s.file, off, batchHeaderBytes)
	if err != nil {
		return 0, fmt.Errorf("wal: reading %s at %d: %w", r.file(i), off, err)
	}
	h, headerCRC, ok := decodeBatchHeader(b, r.l.logID, at)
	if !ok && writtenFor(b, r.l.logID, at) {
		r.torn = at
	}
	if !ok || r.any && h.prev != r.prev {
		return 0, nil
	}
	b, err = r.win.bytes(s.file, off, batchHeaderBytes+h.payloadBytes)
	if err != nil {
		return 0, fmt.Errorf("wal: reading %s at %d: %w", r.file(i), off, err)
	}
	if len(b) < batchHeaderBytes+h.payloadBytes || crc(b[batchHeaderBytes:]) != h.payloadCRC {
		r.torn = at
		return 0, nil
	}
	if !r.known[i] {
		return 0, &CorruptError{r.file(i), 0, "the segment's header is unreadable, its contents are not"}
	}
	if err := r.apply(&h, b[batchHeaderBytes:]); err != nil {
		// The checksums are right, so this was written: by a newer program, or a fault.
		return 0, &CorruptError{r.file(i), off, err.Error()}
	}
	r.prev, r.any, r.clean = headerCRC, true, h.records == 0
	r.oldest = max(r.oldest, h.oldest)
	return alignUp(int64(len(b)), alignBytes), nil
}

func (r *replay) apply(h *batchHeader, payload []byte) error {
	off := 0
	for range h.records {
		next, err := decodeRecord(payload, off, &r.rec)
		if err != nil {
			return err
		}
		g := r.l.Group(r.rec.group)
		if err := g.replay(&r.rec, h.at.seg, uint64(h.at.off)+batchHeaderBytes); err != nil {
			return err
		}
		off = next
	}
	if off != len(payload) {
		return errDecode
	}
	return nil
}

// checkEnd decides whether the end of what was read is a torn tail or damage (B10): it is damage
// if any batch behind it, however it got there, was written when this place was already synced.
func (r *replay) checkEnd() error {
	end := place{r.segs[r.at].num, uint32(r.off)}
	for i := r.at; i < len(r.segs); i++ {
		s := r.segs[i]
		size, err := s.file.Size()
		if err != nil {
			return fmt.Errorf("wal: %w", err)
		}
		off := int64(blockBytes)
		if i == r.at {
			off = r.off
		}
		for ; off+batchHeaderBytes <= size; off += alignBytes {
			b, err := r.win.bytes(s.file, off, batchHeaderBytes)
			if err != nil {
				return fmt.Errorf("wal: reading %s at %d: %w", r.file(i), off, err)
			}
			h, _, ok := decodeBatchHeader(b, r.l.logID, place{s.num, uint32(off)})
			if ok && end.less(h.synced) {
				return &CorruptError{r.file(r.at), r.off, fmt.Sprintf("unreadable, though the log was synced through %s, offset %d",
					segmentName(h.synced.seg), h.synced.off)}
			}
		}
	}
	// The first segment may be gone only when a batch has said that nothing in it is live.
	if r.first > r.oldest {
		return fmt.Errorf("wal: segment %s of the log is missing", r.l.path(segmentName(r.first-1)))
	}
	return nil
}

// replay applies a record. Entries may arrive with a hole below them, when the segment that had
// those was freed: a rewrite further on has them. finish checks that none is left.
func (g *GroupLog) replay(c *change, seg uint32, base uint64) error {
	at := where{seg: seg, bytes: metaBytes}
	var dead deltas // liveness is counted at the end
	rewritten := c.kind == kindRewrite
	for _, replica := range c.destroy {
		if !rewritten {
			g.destroy(replica, at, &dead)
			continue
		}
		i := slices.IndexFunc(g.tombs, func(t tomb) bool { return t.replica == replica })
		if i < 0 {
			g.tombs = append(g.tombs, tomb{replica, at})
		} else {
			g.tombs[i].at = at
		}
	}
	if c.reset != nil {
		g.reset(*c.reset, &dead)
		g.startAt = at
	}
	if c.checkpoint != nil {
		g.ckpt, g.ckptAt = c.checkpoint, where{seg: seg, bytes: metaBytes + uint32(len(c.checkpoint.Data))}
		if !rewritten {
			if err := g.replayStart(c.checkpoint.Position, at); err != nil {
				return err
			}
		}
	}
	if rewritten && c.truncate != nil {
		if err := g.replayStart(*c.truncate, at); err != nil {
			return err
		}
	}
	if len(c.entries) > 0 && !rewritten {
		if first := c.entries[0].index; first > g.start.Index {
			g.cut(int(min(first-g.start.Index-1, uint64(len(g.slots)))), &dead)
		} else if g.startOpen() {
			g.cut(0, &dead)
		}
	}
	for _, e := range c.entries {
		if err := g.replayEntry(e, slot{term: e.term, at: base + uint64(e.off), seg: seg, len: e.len}); err != nil {
			return err
		}
	}
	if c.hard != nil {
		g.hard, g.hardAt = *c.hard, at
	}
	if !rewritten && c.truncate != nil {
		if err := g.replayStart(*c.truncate, at); err != nil {
			return err
		}
	}
	return nil
}

// startOpen says whether the record that holds the group's start has not been met yet, because
// it was in a segment that is gone. Until then start is below the lowest entry met, its term
// unknown.
func (g *GroupLog) startOpen() bool { return g.startAt == where{} }

// replayStart forgets entries through p and takes p for the start.
func (g *GroupLog) replayStart(p Position, at where) error {
	var dead deltas
	switch {
	case p.Index > g.last():
		g.reset(p, &dead)
	case p.Index > g.start.Index:
		g.truncate(p, &dead)
	case p.Index < g.start.Index && !g.startOpen():
		return nil // a checkpoint of what was truncated already
	default:
		if err := g.lower(p.Index); err != nil {
			return err
		}
		g.start = p
	}
	g.startAt = at
	return nil
}

// holeMax bounds what a hole may claim in memory before recovery says that it is none.
const holeMax = 1 << 26

// lower makes room for entries from index start+1 on.
func (g *GroupLog) lower(start uint64) error {
	n := g.start.Index - start
	if n > holeMax {
		return fmt.Errorf("group %d begins after %d, and its entries not before %d", g.id, start, g.start.Index)
	}
	if n > 0 {
		g.slots = append(make([]slot, n, n+uint64(len(g.slots))), g.slots...)
		g.start.Index = start
	}
	return nil
}

func (g *GroupLog) replayEntry(e storedEntry, s slot) error {
	switch {
	case e.index == 0 || e.index <= g.start.Index && !g.startOpen():
		return fmt.Errorf("entry %d of group %d is not above its start, %d", e.index, g.id, g.start.Index)
	case g.startOpen() && len(g.slots) == 0:
		g.start.Index = e.index - 1
	case e.index <= g.start.Index:
		if err := g.lower(e.index - 1); err != nil {
			return err
		}
	case e.index > g.last()+holeMax:
		return fmt.Errorf("entry %d of group %d is far above the last one, %d", e.index, g.id, g.last())
	}
	k := e.index - g.start.Index - 1
	for uint64(len(g.slots)) <= k {
		g.slots = append(g.slots, slot{})
	}
	g.slots[k] = s
	return nil
}

// finishGroups checks every group and counts what is live in each segment.
func (l *Log) finishGroups() error {
	oldest := l.segs[0].num
	count := func(seg, bytes uint32) error {
		if seg == 0 {
			return nil
		}
		if seg < oldest {
			return fmt.Errorf("wal: segment %s, which the log says is free, is still needed", l.path(segmentName(seg)))
		}
		l.segs[seg-oldest].live += int64(bytes)
		return nil
	}
	for _, g := range l.allGroups() {
		if g.startOpen() && g.start.Index > 0 {
			return fmt.Errorf("wal: %s: where group %d begins is missing; its first entry is %d", l.dir, g.id, g.start.Index+1)
		}
		for k, s := range g.slots {
			if s.seg == 0 {
				return fmt.Errorf("wal: %s: entry %d of group %d is missing from a log of (%d, %d]",
					l.dir, g.start.Index+1+uint64(k), g.id, g.start.Index, g.last())
			}
			if err := count(s.seg, s.len); err != nil {
				return err
			}
		}
		for _, w := range []where{g.startAt, g.hardAt, g.ckptAt} {
			if err := count(w.seg, w.bytes); err != nil {
				return err
			}
		}
		for _, t := range g.tombs {
			if err := count(t.at.seg, t.at.bytes); err != nil {
				return err
			}
		}
		g.durable = g.last()
	}
	return nil
}
