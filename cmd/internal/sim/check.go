package sim

import (
	"bytes"
	"fmt"
	"slices"

	"braid/mvcc"
	"braid/pd"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// checker holds what happens against the invariants:
//
//	I1  revisions are consecutive: replay() over what was applied, and every cut
//	I2  real time: an answer's place is after everything that was acknowledged before the request
//	I3  what a revision, an item, a cut means is the same on every replica and member, for ever
//	I4  a read at a revision returns exactly the state after it; and replicas serve it only when
//	    they are complete through its cut (S3)
//	I5  nothing is applied before a member of pd has applied its cut, and with exactly its item
//	I6  replicas of a region apply the same entries in the same order under the same items
//	I7  a watch gets every event of its span in revision order, once, whole revisions, until it is
//	    told that what it needs is compacted; a progress response precedes no event that it covers
//	I8  what is acknowledged is durable on a quorum of its region, and its cut on one of pd
//
// and, beyond them: answers equal those of a sequential store (strict serializability), requests
// that were refused have no effect, fences void what was evaluated before them, and after healing
// everything that waits gets an answer, everything is applied and sealed, and the cluster falls
// silent.
type checker struct {
	w *World

	entries map[place]*appliedEntry
	items   map[itemKey]pdpb.Item // as pd's members made them
	newest  map[pdpb.RegionID][]pdpb.Item
	cuts    map[pdpb.Cut]cutRecord
	mark    pdpb.Mark                       // of the newest applied cut
	writes  map[mvcc.Revision]*appliedEntry // the entry that consumed a revision
	effects map[mvcc.Revision][]regionpb.Effect

	ops       []*op
	open      []*op // not answered
	reads     []*read
	pending   []*read // not served whole
	locals    []*local
	events    []*eventCall
	maxAcked  mvcc.Revision
	maxCut    pdpb.Cut              // of an acknowledged write
	ackFence  pdpb.Fence            // acknowledged to an administrator
	ackFloor  mvcc.Revision         // likewise
	lastRev   map[int]mvcc.Revision // newest acknowledged revision of a key
	seen      map[sight]mvcc.Revision
	nextValue int
	txns      txnState
	watches   watchState
	leases    leaseState
}

type place struct {
	region pdpb.RegionID
	index  uint64
}

type itemKey struct {
	region pdpb.RegionID
	n      uint64
}

type appliedEntry struct {
	place
	term  uint64
	item  uint64
	cut   pdpb.Cut
	base  mvcc.Revision
	void  bool
	fence pdpb.Fence // stamp
	print string
}

type cutRecord struct {
	index, term uint64
	print       string
	mark        pdpb.Mark
}

func newChecker(w *World) *checker {
	return &checker{w: w, entries: map[place]*appliedEntry{}, items: map[itemKey]pdpb.Item{}, newest: map[pdpb.RegionID][]pdpb.Item{},
		cuts: map[pdpb.Cut]cutRecord{}, writes: map[mvcc.Revision]*appliedEntry{}, effects: map[mvcc.Revision][]regionpb.Effect{},
		lastRev: map[int]mvcc.Revision{}, seen: map[sight]mvcc.Revision{}, txns: newTxnState(), leases: leaseState{byID: map[int64]*lease{}}, ackFloor: order.NoFloor, mark: pdpb.Mark{Rev: 1, Floor: order.NoFloor}}
}

// cutApplied is told each entry of pd's log by each member.
func (c *checker) cutApplied(s *store, index, term uint64, e *pd.Entry, res pd.Result) {
	if res.Cut == nil {
		return
	}
	m := res.Cut.Mark
	print := res.Cut.String()
	if old, ok := c.cuts[m.Cut]; ok {
		if old.print != print || old.index != index || old.term != term {
			c.w.fail("I3: member %d applied cut %d at %d/%d as\n%s others at %d/%d as\n%s", s.i, m.Cut, index, term, print, old.index, old.term, old.print)
		}
		return
	}
	if m.Cut != c.mark.Cut+1 {
		c.w.fail("I1: cut %d follows cut %d", m.Cut, c.mark.Cut)
	}
	given := mvcc.Revision(0)
	for _, it := range res.Cut.Items {
		if it.Base != c.mark.Rev+given && it.Count > 0 {
			c.w.fail("I1: item %v begins at %d, the revisions before it end at %d", &it, it.Base, c.mark.Rev+given)
		}
		given += mvcc.Revision(it.Count)
		k := itemKey{it.Region, it.N}
		if old, ok := c.items[k]; ok && !old.Equal(&it) {
			c.w.fail("I3: item %v was %v", &it, &old)
		}
		c.items[k] = it
		c.newest[it.Region] = append(c.newest[it.Region], it)
		c.w.stats.Items++
	}
	given += c.cutDecided(m.Cut, index, term, res.Cut.Decided, c.mark.Rev+given)
	if m.Rev != c.mark.Rev+given {
		c.w.fail("I1: cut %d ends at revision %d, its items at %d", m.Cut, m.Rev, c.mark.Rev+given)
	}
	c.checkEvents(m, e.Cut.Events, res.Cut.Events)
	c.mark = m
	c.cuts[m.Cut] = cutRecord{index, term, print, m}
	c.w.stats.Cuts++
	c.w.event("cut %v", m)
	if len(res.Cut.Items) > 0 && !c.w.calm && !c.w.quiet && c.w.chance(c.w.aim.deaf) {
		hears := c.w.rng.IntN(len(c.w.stores))
		for i := range c.w.stores {
			if i != hears {
				c.w.net.holes[i] += 1 + c.w.rng.IntN(6)
			}
		}
	}
	if res.Cut.Forgotten > 0 && !c.w.calm && !c.w.quiet && c.w.chance(c.w.aim.hole) {
		// A frame that is lost now makes a store subscribe anew when pd has forgotten items.
		c.w.net.holes[c.w.rng.IntN(len(c.w.stores))]++
		c.w.stats.Holes++
	}
}

// applied is told each entry by each replica.
func (c *checker) applied(s *store, id pdpb.RegionID, index, term uint64, it *pdpb.Item, e *regionpb.Entry, rev mvcc.Revision, void bool) {
	a := &appliedEntry{place: place{id, index}, term: term, item: it.N, cut: it.Cut, base: rev, void: void, fence: e.Fence, print: fmt.Sprintf("%v", e.Commands)}
	for i := range e.Prepares {
		a.print += fmt.Sprintf(" %v", &e.Prepares[i])
	}
	if known, ok := c.items[itemKey{id, it.N}]; !ok || !known.Equal(it) {
		c.w.fail("I5: store %d applied item %v, which no member of pd has made (known: %v)", s.i, it, &known)
		return
	}
	if e.Fence < c.fenceOf(it) && !void {
		c.w.fail("F2: store %d region %d index %d of stamp %d took effect at cut %d, after fence %d was raised", s.i, id, index, e.Fence, it.Cut, c.fenceOf(it))
		return
	}
	if old, ok := c.entries[a.place]; ok {
		if old.term != a.term || old.item != a.item || old.base != a.base || old.void != a.void || old.print != a.print {
			c.w.fail("I6: store %d applied region %d index %d as %+v, others as %+v", s.i, id, index, a, old)
		}
		return
	}
	c.entries[a.place] = a
	if void {
		c.w.stats.Void += len(e.Commands)
		return
	}
	for i := range e.Prepares {
		c.txns.prepared[partKey{e.Prepares[i].Attempt, id}] = a
	}
	for i := range e.Commands {
		fx := e.Commands[i].Effects
		if len(fx) == 0 {
			c.leaseRecorded(e.Commands[i].Records, rev, false)
			continue
		}
		rev++
		if old, ok := c.writes[rev]; ok {
			c.w.fail("I3: revision %d is region %d index %d and region %d index %d", rev, old.region, old.index, id, index)
			return
		}
		c.writes[rev] = a
		c.effects[rev] = cloneEffects(fx)
		c.leaseRecorded(e.Commands[i].Records, rev, true)
	}
}

// fenceOf is the fence in force for entries of an item: the one that the cut before left.
func (c *checker) fenceOf(it *pdpb.Item) pdpb.Fence { return c.cuts[it.Cut-1].mark.Fence }

func cloneEffects(fx []regionpb.Effect) []regionpb.Effect {
	out := slices.Clone(fx)
	for i := range out {
		out[i].Key, out[i].Value = bytes.Clone(out[i].Key), bytes.Clone(out[i].Value)
	}
	return out
}

// crashed gives up what waits at a store that is gone.
func (c *checker) crashed(s *store) {
	c.crashedTxns(s)
	c.crashedWatches(s)
	c.open = slices.DeleteFunc(c.open, func(o *op) bool { return o.store == s.i })
	c.pending = slices.DeleteFunc(c.pending, func(r *read) bool { return r.store == s.i && !r.pointed })
}
