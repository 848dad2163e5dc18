package sim

import (
	"errors"
	"fmt"
	"time"

	"braid/raftstore/raftid"
)

// Whoever waits for others must get on (T5, L4). While there are faults a client may have to wait
// for a leader, or for a lock of a coordinator that vanished, and no bound says much. So an aim may
// have a quiet end: requests come as ever, nothing fails any more, locks last as long as they do in
// the product compared with an attempt, and everything that is asked for then has to end soon.
const (
	// quietSettle is how long elections and what the faults left behind may take.
	quietSettle = 300 * time.Millisecond
	// progressMax is how long a command, a transaction with all its attempts, or an end of a lease
	// may take: far more than all that may be in front of it, and less than a lock lasts.
	progressMax = 1000 * time.Millisecond
)

var errSilent = errors.New("sim: the coordinator's store fell silent")

// beginQuiet ends the faults. Whatever was under way vanishes, and the stores notice (T6).
func (w *World) beginQuiet() {
	w.event("quiet")
	w.quiet, w.quietAt = true, w.now
	w.stopped, w.deposed = -1, deposal{}
	w.net.blocked = [storesMax][storesMax]bool{}
	for _, t := range w.check.txns.live {
		t.gone = true
	}
	for len(w.check.leases.ends) > 0 {
		w.check.ended(w.check.leases.ends[0], errSilent)
	}
	for _, s := range w.stores {
		s.doomed = 0
		if !s.up {
			w.restart(s)
		}
		for _, id := range s.ids {
			for i := range w.stores {
				if g := s.groups[id]; id != raftid.PDGroup && g.replica != nil {
					g.replica.OwnerDown(storeID(i))
				}
			}
		}
	}
}

// checkProgress wants everything to end that has begun since the faults are over.
func (c *checker) checkProgress() {
	w := c.w
	if !w.quiet || w.stats.Steps%10 != 0 && !w.calm {
		return
	}
	late := func(begun time.Duration) bool {
		took := w.now - max(begun, w.quietAt+quietSettle)
		w.stats.Slowest = max(w.stats.Slowest, int(took/time.Millisecond))
		return took > progressMax
	}
	for _, o := range c.open {
		if late(o.begun) {
			w.fail("PROGRESS: op %d waits at store %d since %v, nothing has failed since %v%s", o.id, o.store, o.begun, w.quietAt, c.lockTables())
			return
		}
	}
	for _, t := range c.txns.live {
		if late(t.begun) {
			w.fail("PROGRESS: attempt %d of the transaction that began at %v with attempt %d is still under way, nothing has failed since %v: %v%s", t.attempt, t.begun, t.age, w.quietAt, t.todo, c.lockTables())
			return
		}
	}
	for _, e := range c.leases.ends {
		if late(e.begun) {
			w.fail("PROGRESS: the end of leases %v, attempt %d, that began at %v is still under way, nothing has failed since %v%s", e.ids, e.attempt, e.begun, w.quietAt, c.lockTables())
			return
		}
	}
}

// lockTables prints who holds and who waits for what, region by region.
func (c *checker) lockTables() (out string) {
	for _, s := range c.w.stores {
		for _, id := range s.ids {
			if g := s.groups[id]; s.up && g.replica != nil && g.leading {
				out += fmt.Sprintf("\nregion %v:\n", id) + g.replica.Locks()
			}
		}
	}
	return out
}
