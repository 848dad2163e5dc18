package sim

import (
	"slices"

	"braid/mvcc"
)

// lag is when a watch's store was found behind another one, and what the other had.
type lag struct {
	st    *watchStream
	rev   mvcc.Revision // 0: it is not behind
	since int           // step
}

// leaveLagging ends the streams of clients that require a leader, as a gateway does, at stores that
// hear of no leader of pd, or know none of a region that is watched.
func (c *checker) leaveLagging() {
	for _, st := range slices.Clone(c.watches.streams) {
		if _, still := st.store.oracle.StandsStillSince(); !still && st.s.Led() || c.w.mut.noReplace {
			st.still = 0
			continue
		}
		if st.still++; st.still > 3*electionSteps {
			c.endStream(st)
		}
	}
}

// electionSteps is how long ten ticks of a store take on average.
const electionSteps = 40

// completeAt is what all of a watch's regions are complete through at a store.
func (c *checker) completeAt(s *store, a *watch) mvcc.Revision {
	rev := mvcc.Revision(-1)
	for i := a.from / keysPerRegion; i <= (a.to-1)/keysPerRegion; i++ {
		g := c.readable(s, i)
		if g == nil {
			return 0
		}
		if r := g.replica.CompleteThrough(); rev < 0 || r < rev {
			rev = r
		}
	}
	return rev
}

// checkLag looks for watches that stay with a store that lags while another one does not (W2). Where a
// link is cut in one direction a store may hear its leaders and nothing else; no connection of the
// product is like that.
func (c *checker) checkLag() {
	w := c.w
	oneWay := w.oneWay()
	for _, a := range c.watches.open {
		if oneWay || a.st == nil || a.st.idle || !a.created {
			a.lag.rev = 0
			continue
		}
		here := c.completeAt(a.st.store, a)
		if a.lag.st != a.st || here >= a.lag.rev {
			a.lag = lag{st: a.st}
		}
		if a.lag.rev > 0 {
			if w.stats.Steps-a.lag.since > w.aim.lag {
				w.fail("W2: for %d steps watch %d has been at store %d, which is complete through %d, and another store through %d", w.stats.Steps-a.lag.since, a.id, a.st.store.i, here, a.lag.rev)
			}
			continue
		}
		for _, s := range w.stores {
			if s != a.st.store {
				if rev := c.completeAt(s, a); rev > here {
					a.lag = lag{a.st, max(a.lag.rev, rev), w.stats.Steps}
				}
			}
		}
	}
}

// oneWay says whether a link is cut in one direction only.
func (w *World) oneWay() bool {
	for i := range w.net.blocked {
		for j := range i {
			if w.net.blocked[i][j] != w.net.blocked[j][i] {
				return true
			}
		}
	}
	return false
}
