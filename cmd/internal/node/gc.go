package node

import (
	"context"
	"encoding/binary"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"

	"braid/mvcc"
	"braid/pd/pdpb"
)

// progressBit marks position records that hold how far a region's collection came. They lie
// beside the positions because they must be durable in the same order.
const progressBit = uint64(1) << 63

func isProgress(group uint64) bool { return group&progressBit != 0 }

// collector removes what compactions superseded, region by region, in the background.
type collector struct {
	regions *regions
	kick    chan struct{}
	mu      struct {
		sync.Mutex
		done    map[pdpb.RegionID]mvcc.Revision // collected through
		states  map[pdpb.RegionID]int           // how often a region's state was replaced
		held    map[pdpb.RegionID]bool          // it is being replaced: do not collect
		floor   mvcc.Revision                   // newest floor seen
		next    mvcc.Revision                   // the floor whose grace runs
		since   time.Time                       // when it began to
		ripe    mvcc.Revision                   // the floor to collect, below which nobody reads any more
		urgent  mvcc.Revision                   // somebody waits for this one
		changed chan struct{}                   // closed when done moves
	}
}

func (c *collector) init(r *regions) {
	c.regions = r
	c.kick = make(chan struct{}, 1)
	c.mu.done, c.mu.states = map[pdpb.RegionID]mvcc.Revision{}, map[pdpb.RegionID]int{}
	c.mu.held = map[pdpb.RegionID]bool{}
	c.mu.floor, c.mu.next, c.mu.ripe, c.mu.urgent = -1, -1, -1, -1
	c.mu.changed = make(chan struct{})
}

// collectLoop is the node's garbage collector and its timed flush.
func (r *regions) collectLoop() {
	c := &r.gc
	n := r.node
	tick := time.NewTicker(n.tuning.collectEvery)
	defer tick.Stop()
	lastFlush := time.Now()
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-tick.C:
		case <-c.kick:
		}
		if floor, due := c.due(n.oracle.Mark().Floor, time.Now()); due {
			if err := c.collect(n.ctx, floor); err != nil && n.ctx.Err() == nil {
				n.log.Warn("collection of superseded versions was cut short; it is repeated", zap.Int64("floor", int64(floor)), zap.Error(err))
			}
		}
		if time.Since(lastFlush) > n.tuning.idleFlush {
			lastFlush = time.Now()
			if n.wal.Stats().Segments > n.tuning.idleSegments {
				if err := n.engine.Flush(); err != nil {
					n.log.Warn("flush", zap.Error(err))
				}
			}
		}
	}
}

// due says whether something is to be collected, and up to which floor: one that has been there for
// the grace time (C2), or that somebody waits for. While one floor's grace runs, those that come take
// their turn together when it is over, so that compactions that follow each other faster than that do
// not put removal off for ever.
func (c *collector) due(floor mvcc.Revision, now time.Time) (mvcc.Revision, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.floor = max(c.mu.floor, floor)
	if c.mu.next > c.mu.ripe && now.Sub(c.mu.since) >= c.regions.node.tuning.gcGrace {
		c.mu.ripe = c.mu.next
	}
	if c.mu.next <= c.mu.ripe && c.mu.floor > c.mu.ripe {
		c.mu.next, c.mu.since = c.mu.floor, now
	}
	c.mu.ripe = max(c.mu.ripe, min(c.mu.urgent, c.mu.floor))
	return c.mu.ripe, c.mu.ripe > 0
}

// collect brings every region here to the floor.
func (c *collector) collect(ctx context.Context, floor mvcc.Revision) error {
	began := time.Now()
	var total mvcc.GCStats
	var errs []error
	for _, h := range sorted(c.regions.all()) {
		from, state, known, err := c.progress(h.id)
		if err != nil {
			return err
		}
		if known && from >= floor || c.beingReplaced(h.id) {
			continue
		}
		rctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		to, err := h.RaiseFloor(rctx, floor)
		cancel()
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if to <= from {
			continue // not complete through more than that yet
		}
		mark := time.Now()
		st, err := c.regions.node.engine.GC(ctx, h.Descriptor().Span, from, to, func(int) error {
			pause := time.NewTimer(min(time.Since(mark), c.regions.node.tuning.gcChunkPause))
			defer pause.Stop()
			select {
			case <-pause.C:
				mark = time.Now()
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		total.Visited += st.Visited
		total.Removed += st.Removed
		total.Bytes += st.Bytes
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if err := c.record(h.id, state, to); err != nil {
			return err
		}
	}
	if total.Visited > 0 {
		c.regions.node.log.Info("finished scheduled compaction", zap.Int64("compact-revision", int64(floor)),
			zap.Duration("took", time.Since(began)), zap.Int64("removed-versions", total.Removed), zap.Int64("removed-bytes", total.Bytes))
	}
	return errors.Join(errs...)
}

// progress is the revision through which a region was collected, and which state of the region
// that is about.
func (c *collector) progress(id pdpb.RegionID) (rev mvcc.Revision, state int, known bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	state = c.mu.states[id]
	if rev, known = c.mu.done[id]; known {
		return rev, state, true, nil
	}
	b, ok, err := c.regions.node.engine.Position(uint64(id) | progressBit)
	if err != nil || !ok || len(b) != 8 {
		return 0, state, false, err
	}
	rev = mvcc.Revision(binary.BigEndian.Uint64(b))
	c.mu.done[id] = rev
	return rev, state, true, nil
}

func (c *collector) beingReplaced(id pdpb.RegionID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.held[id]
}

// record notes that a region is collected through rev, unless its state was replaced since.
func (c *collector) record(id pdpb.RegionID, state int, rev mvcc.Revision) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.states[id] != state {
		return nil
	}
	return c.write(id, rev)
}

// replacing says that a region's state is about to be replaced, and replaced that it was: the next
// collection walks everything, and one that runs meanwhile does not count.
func (c *collector) replacing(id pdpb.RegionID) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.states[id]++
	c.mu.held[id] = true
	return c.write(id, 0)
}

func (c *collector) replaced(id pdpb.RegionID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.held, id)
}

// write is called with mu held, so that what is in memory and in the engine agree.
func (c *collector) write(id pdpb.RegionID, rev mvcc.Revision) error {
	b := c.regions.node.engine.NewBatch()
	defer b.Close()
	if err := b.SetPosition(uint64(id)|progressBit, binary.BigEndian.AppendUint64(nil, uint64(rev))); err != nil {
		return err
	}
	if err := b.Commit(); err != nil {
		return err
	}
	c.mu.done[id] = rev
	close(c.mu.changed)
	c.mu.changed = make(chan struct{})
	return nil
}

// scrubbed waits until everything here is collected through rev: what a physical compaction
// waits for.
func (r *regions) scrubbed(ctx context.Context, rev mvcc.Revision) error {
	c := &r.gc
	if rev <= 0 {
		return nil
	}
	for {
		c.mu.Lock()
		c.mu.urgent = max(c.mu.urgent, rev)
		changed := c.mu.changed
		behind := false
		for _, h := range r.all() {
			if c.mu.done[h.id] < rev {
				behind = true
			}
		}
		c.mu.Unlock()
		if !behind {
			return nil
		}
		select {
		case c.kick <- struct{}{}:
		default:
		}
		select {
		case <-changed:
		case <-time.After(100 * time.Millisecond): // the mark may not have come here yet
		case <-ctx.Done():
			return ctx.Err()
		case <-r.node.ctx.Done():
			return r.node.ctx.Err()
		}
	}
}
