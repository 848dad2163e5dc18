package wal

import (
	"errors"
	"fmt"
	"time"
)

// writer is the state of the writer's goroutine, and of Open before it starts.
type writer struct {
	head   *segment
	off    int64  // where the next batch goes
	prev   uint32 // crc of the last batch's header
	synced place  // everything below is durable
	// oldest is what the last durable batch said; plan is what to say once every record up to
	// the planned order is in the log.
	oldest uint32
	plan   struct {
		oldest uint32
		order  uint64
	}
	batch []item
	buf   []byte
	spans []span
	ring  []*GroupLog // of the groups whose caches are still to be looked at
	// unmarked: the log holds records and does not end with the mark of a clean stop.
	unmarked bool
}

// bufBytesMax is how large a buffer is kept between batches.
const bufBytesMax = 16 << 20

var zeroBlock [blockBytes]byte

// writeLoop is the writer's goroutine: each turn takes everything that is queued, writes and
// syncs it once, and acknowledges it. It ends with closing, when nothing is queued any more, or
// with the first failure.
func (l *Log) writeLoop() {
	for {
		l.mu.Lock()
		for !l.due && !l.closing && l.failed == nil {
			l.wake.Wait()
		}
		if l.failed != nil {
			l.mu.Unlock()
			return
		}
		l.w.batch = l.take(l.w.batch[:0])
		oldest := l.planOldest()
		l.writing = len(l.w.batch) > 0
		l.mu.Unlock()
		if len(l.w.batch) > 0 {
			if err := l.turn(oldest); err != nil {
				l.fail(err)
				return
			}
			l.turnEnded()
			continue
		}
		l.mu.Lock()
		closing := l.closing
		l.mu.Unlock()
		if closing {
			// An empty batch says that everything before it was synced: after a clean stop
			// damage in the last records is not taken for a torn tail.
			if l.w.unmarked {
				if err := l.turn(oldest); err != nil {
					l.fail(err)
				}
			}
			return
		}
	}
}

// planOldest returns the oldest segment that the next batch may name. A segment's last live
// record was made dead by a record that is in the log only when everything that was queued at the
// time of looking is. Called with mu held, after take.
func (l *Log) planOldest() uint32 {
	w := &l.w
	if w.plan.oldest == w.oldest {
		for _, s := range l.segs {
			if s.live != 0 || s == w.head {
				w.plan.oldest, w.plan.order = s.num, l.seq
				break
			}
		}
	}
	if w.plan.oldest > w.oldest && l.firstQueued() > w.plan.order {
		return w.plan.oldest
	}
	return w.oldest
}

// turn writes w.batch as one batch.
func (l *Log) turn(oldest uint32) error {
	w := &l.w
	if err := l.encode(); err != nil {
		return err
	}
	size := alignUp(int64(len(w.buf)), alignBytes)
	if size > batchBytesMax {
		return fmt.Errorf("wal: a record of %d bytes is too large", size)
	}
	if w.off > blockBytes && w.off+size > l.o.SegmentBytes {
		if err := l.rotate(); err != nil {
			return err
		}
	}
	h := batchHeader{
		payloadBytes: len(w.buf) - batchHeaderBytes,
		logID:        l.logID,
		run:          l.run,
		at:           place{w.head.num, uint32(w.off)},
		synced:       w.synced,
		oldest:       oldest,
		records:      uint32(len(w.batch)),
		prev:         w.prev,
		payloadCRC:   crc(w.buf[batchHeaderBytes:]),
	}
	headerCRC := h.put(w.buf)
	end := w.off + int64(len(w.buf))
	w.buf = append(w.buf, zeroBlock[:alignUp(end, blockBytes)-end]...)

	began := time.Now()
	if _, err := w.head.file.WriteAt(w.buf, w.off); err != nil {
		return fmt.Errorf("wal: writing %s at %d: %w", l.path(segmentName(w.head.num)), w.off, err)
	}
	if err := w.head.file.Sync(); err != nil {
		return fmt.Errorf("wal: syncing %s: %w", l.path(segmentName(w.head.num)), err)
	}
	took := time.Since(began)

	base := w.off
	w.off += size
	w.prev, w.synced, w.oldest = headerCRC, place{w.head.num, uint32(w.off)}, oldest
	w.unmarked = len(w.batch) > 0
	if !l.settle(uint64(base), took) {
		return nil // stopped by the rewriter meanwhile
	}
	l.o.OnSync(took, len(w.batch), len(w.buf))
	l.acknowledge()
	if l.cacheBytes.Load() > l.o.CacheBytes {
		l.shrinkCache()
	}
	if cap(w.buf) > bufBytesMax {
		w.buf = nil
	}
	return nil
}

// encode fills w.buf with room for the header and the batch's records, and w.spans with the
// places of their entries.
func (l *Log) encode() error {
	w := &l.w
	var header [batchHeaderBytes]byte
	w.buf = append(w.buf[:0], header[:]...)
	w.spans = w.spans[:0]
	for i := range w.batch {
		it := &w.batch[i]
		var err error
		if it.move != nil {
			w.buf, w.spans, err = it.move.append(w.buf, it.g, w.spans)
		} else {
			w.buf, w.spans, err = appendChange(w.buf, it.g, it.rec, it.trunc, w.spans)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// settle makes the index point at what is durable now and frees what that made free. It returns
// whether the batch may be acknowledged.
func (l *Log) settle(base uint64, took time.Duration) bool {
	w := &l.w
	spans, live, bytes := w.spans, int64(0), int64(0)
	var moved deltas
	rewritten := int64(0)
	for i := range w.batch {
		it := &w.batch[i]
		bytes += it.bytes
		if it.move != nil {
			n := it.move.written(it.g, w.head.num, base, spans, &moved)
			spans = spans[len(it.move.entries):]
			live += n
			rewritten += n
			continue
		}
		live += it.g.written(it, w.head.num, base, spans)
		spans = spans[len(it.rec.Entries):]
	}
	l.queuedBytes.Add(-bytes)
	l.mu.Lock()
	defer l.mu.Unlock()
	w.head.live += live
	l.applyLive(moved)
	l.release(w.oldest)
	l.stats.Syncs++
	l.stats.SyncTime += took
	l.stats.Records += uint64(len(w.batch))
	l.stats.Bytes += uint64(len(w.buf))
	l.stats.Rewritten += uint64(rewritten)
	return l.failed == nil
}

// acknowledge calls Done of the batch's records in order.
func (l *Log) acknowledge() {
	for i := range l.w.batch {
		it := &l.w.batch[i]
		if it.move != nil {
			close(it.move.done)
		} else if it.rec.Done != nil {
			it.rec.Done()
		}
	}
	clear(l.w.batch)
}

// rotate makes the prepared segment the head.
func (l *Log) rotate() error {
	l.waits.Store(true)
	p := <-l.next
	if noRoom(p.err) {
		// Made before it was asked for: what came free since then counts.
		p = <-l.next
	}
	l.waits.Store(false)
	if p.err != nil {
		return p.err
	}
	l.w.head, l.w.off = p.seg, blockBytes
	l.mu.Lock()
	defer l.mu.Unlock()
	l.segs = append(l.segs, p.seg)
	if p.recycled {
		l.stats.Recycled++
	} else {
		l.stats.Created++
	}
	signal(l.moves)
	return nil
}

// shrinkCache makes groups in turn drop the older half of their caches until there is room.
func (l *Log) shrinkCache() {
	w := &l.w
	want := l.o.CacheBytes - l.o.CacheBytes/10
	for pass := 0; pass < 2; {
		if len(w.ring) == 0 {
			w.ring = l.allGroups()
			pass++
		}
		for len(w.ring) > 0 {
			if l.cacheBytes.Load() <= want {
				return
			}
			w.ring[0].evict()
			w.ring = w.ring[1:]
		}
	}
}

// fail stops the log: nothing is acknowledged from here on.
func (l *Log) fail(err error) {
	l.mu.Lock()
	first := l.failed == nil
	if first {
		l.failed = err
	}
	l.urgent, l.ordinary, l.due = nil, nil, false
	l.hold.Stop()
	l.wake.Signal()
	l.mu.Unlock()
	if first && !errors.Is(err, ErrClosed) {
		l.o.OnFatal(err)
	}
}
