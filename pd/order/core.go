package order

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"braid/mvcc"
	"braid/pd/pdpb"
)

// Core is the order of the whole store: the sequence of cuts folded into a state. It is a pure
// state machine; members of pd that applied the same proposals are equal. Its owner calls it
// from one goroutine.
//
// Invariants: revisions are given out densely (I1); per region, items are numbered from 1
// without holes, up-to and cumulative count never fall, and the retained items are the newest.
type Core struct {
	cut     pdpb.Cut
	rev     mvcc.Revision
	fence   pdpb.Fence
	floor   mvcc.Revision // logical compaction floor; NoFloor before the first Compact
	regions []regionOrder // by id; new ids are higher than old ones, so it grows at its end
	hint    int           // where the last region was found: cuts ask in ascending order
	held    int           // retained items, all regions
	txns    txns          // attempts over several regions
	hashes  hashes        // of the last compactions

	// Mutants is a test hook; it must not change while cuts are applied.
	Mutants Mutants
}

// NoFloor is the compaction floor of a store that was never compacted. It is etcd's own, and
// lets a first Compact(0) succeed (C3).
const NoFloor mvcc.Revision = -1

// FirstRevision is the revision of a fresh store.
const FirstRevision mvcc.Revision = 1

// regionOrder is one region's place in the order.
type regionOrder struct {
	id          pdpb.RegionID
	incarnation uint32
	upto        uint64 // every entry through it has its place
	uptoTerm    uint64
	cum         uint64      // cumulative count through upto (P1)
	newest      uint64      // number of the newest item
	items       []pdpb.Item // not known to be sealed, ascending to newest (P4)
}

// NewCore returns the order of a fresh store: no regions, no cut, revision 1.
func NewCore() *Core {
	return &Core{rev: FirstRevision, floor: NoFloor}
}

// find returns a region; the pointer is valid until the next AddRegion. It looks near the last
// one first: with many regions a cut is bound by memory, and this touches little of it.
func (c *Core) find(id pdpb.RegionID) *regionOrder {
	lo, hi := 0, len(c.regions)
	if c.hint < hi && c.regions[c.hint].id <= id {
		lo = c.hint
		for step := 1; lo+step < hi; step *= 2 {
			if c.regions[lo+step].id > id {
				hi = lo + step
				break
			}
			lo += step
		}
	}
	i, ok := slices.BinarySearchFunc(c.regions[lo:hi], id, regionCompare)
	if !ok {
		return nil
	}
	c.hint = lo + i
	return &c.regions[lo+i]
}

func regionCompare(g regionOrder, id pdpb.RegionID) int { return cmp.Compare(g.id, id) }

// AddRegion lets a region take part, from its start index on. It panics on a region that is
// there: region ids are never reused.
func (c *Core) AddRegion(d *pdpb.Descriptor) {
	i, ok := slices.BinarySearchFunc(c.regions, d.ID, regionCompare)
	if ok {
		panic(fmt.Sprintf("order: region %d added twice", d.ID))
	}
	c.hint = 0
	c.regions = slices.Insert(c.regions, i, regionOrder{id: d.ID, incarnation: d.Incarnation, upto: d.StartIndex, uptoTerm: d.StartTerm})
}

// Mark is the position after the last cut.
func (c *Core) Mark() pdpb.Mark {
	return pdpb.Mark{Cut: c.cut, Rev: c.rev, Floor: c.floor, Fence: c.fence}
}

// Verdict is what a report is worth against a state.
type Verdict uint8

const (
	// Moves: the report moves the region's up-to.
	Moves Verdict = iota
	// Seals: up-to stays, but retained items are sealed now.
	Seals
	// Covered: nothing new.
	Covered
	// Ahead: the reporter knows items that are not applied here; what lies between would be
	// missing, so the report cannot be used now (P2).
	Ahead
	// Unknown: no such region.
	Unknown
	// Stale: another incarnation of the region (P1, A15).
	Stale
	// Conflict: it contradicts what was ordered, or itself. A bug or damage on the reporter's
	// side; it must not reach the order.
	Conflict
)

var verdictNames = [...]string{"moves", "seals", "covered", "ahead", "unknown", "stale", "conflict"}

func (v Verdict) String() string {
	if int(v) < len(verdictNames) {
		return verdictNames[v]
	}
	return fmt.Sprintf("verdict(%d)", uint8(v))
}

// Judge says what a report is worth in the present state.
func (c *Core) Judge(r *pdpb.Report) Verdict {
	return c.judge(c.find(r.Region), r)
}

func (c *Core) judge(g *regionOrder, r *pdpb.Report) Verdict {
	if g == nil {
		return Unknown
	}
	if r.Incarnation != g.incarnation {
		return Stale
	}
	if r.Check() != nil {
		return Conflict
	}
	if r.From > g.upto || r.Sealed > g.newest {
		return Ahead
	}
	switch {
	case r.Upto > g.upto:
		if r.UptoTerm < g.uptoTerm || r.Cum < g.cum {
			return Conflict
		}
		if _, ok := g.count(r, c.fence); !ok {
			return Conflict
		}
		return Moves
	case r.Upto == g.upto && (r.UptoTerm != g.uptoTerm || r.Cum != g.cum):
		return Conflict
	case len(g.items) > 0 && r.Sealed >= g.items[0].N:
		return Seals
	}
	return Covered
}

// count is the number of revisions that entries of (g.upto, r.Upto] consume with this fence in
// force: entries with a lower stamp are void (F2). Its base is what pd counted before, never
// what the reporter did, so that repeated and overlapping reports count once (P1).
func (g *regionOrder) count(r *pdpb.Report, fence pdpb.Fence) (n uint64, ok bool) {
	base := g.cum
	for _, x := range r.Runs {
		if x.Index <= g.upto {
			continue
		}
		if x.Cum < base {
			return 0, false
		}
		if x.Stamp >= fence {
			n += x.Cum - base
		}
		base = x.Cum
	}
	return n, true
}

// Rejection is a part of a cut that was not used. Covered parts are not worth one.
type Rejection struct {
	Region  pdpb.RegionID
	Verdict Verdict
}

// CutResult is what a cut did. The owner of Core may keep it.
type CutResult struct {
	Mark      pdpb.Mark     // the position after this cut
	Items     []pdpb.Item   // by ascending region, at most one of each
	Events    []EventResult // one for each event
	Revisions uint64        // given out by this cut
	Forgotten int           // items
	Decided   []pdpb.Decision
	Rejected  []Rejection
}

// String prints the result, a line for each thing that happened.
func (r *CutResult) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "cut %v", r.Mark)
	if r.Forgotten > 0 {
		fmt.Fprintf(&b, " forgot=%d", r.Forgotten)
	}
	b.WriteByte('\n')
	for i := range r.Items {
		fmt.Fprintf(&b, "  item %v\n", &r.Items[i])
	}
	for _, d := range r.Decided {
		fmt.Fprintf(&b, "  decided %v\n", d)
	}
	for i := range r.Events {
		fmt.Fprintf(&b, "  event %v\n", &r.Events[i])
	}
	for _, x := range r.Rejected {
		fmt.Fprintf(&b, "  rejected r%d: %v\n", x.Region, x.Verdict)
	}
	return b.String()
}

// Apply appends a cut to the order. Its cost follows the parts, not the regions. Events that
// Core does not know (ids, stores) get a result with the mark, for the machine above to fill in.
func (c *Core) Apply(p *CutProposal) CutResult {
	c.cut++
	before := c.rev
	res := CutResult{}
	if len(p.Parts) > 0 {
		res.Items = make([]pdpb.Item, 0, len(p.Parts))
	}
	var last pdpb.RegionID
	early := map[pdpb.RegionID][]pdpb.Decision(nil)
	if c.Mutants.DecisionsFirst {
		early = c.decideEarly(p, &res)
	}
	for i := range p.Parts {
		r := &p.Parts[i]
		if r.Region <= last && i > 0 {
			panic(fmt.Sprintf("order: cut parts out of order: r%d after r%d", r.Region, last))
		}
		last = r.Region
		g := c.find(r.Region)
		v := c.judge(g, r)
		if c.Mutants.Delta && v != Unknown && v != Stale {
			v = Moves
		}
		switch v {
		case Moves:
			res.Forgotten += c.forget(g, r.Sealed) // first: the new item takes the freed place
			if !c.Mutants.DecisionsFirst {
				c.enter(g, r)
			}
			res.Items = append(res.Items, c.move(g, r))
		case Seals:
			res.Forgotten += c.forget(g, r.Sealed)
		case Covered:
		default:
			res.Rejected = append(res.Rejected, Rejection{r.Region, v})
		}
	}
	if len(p.Events) > 0 {
		res.Events = make([]EventResult, len(p.Events))
	}
	// After the entries: a participant's prepare in this cut is applied before its decision, and
	// whoever was ordered in this cut did not see what it decides (P3).
	if c.Mutants.DecisionsFirst {
		c.attach(&res, early)
	} else {
		c.decide(p, &res)
	}
	for i := range p.Events {
		if p.Events[i].Kind != EventAbort {
			res.Events[i] = c.event(&p.Events[i])
		}
	}
	if c.rev < before {
		panic(fmt.Sprintf("order: revision fell from %d to %d in cut %d (I1)", before, c.rev, c.cut))
	}
	res.Revisions = uint64(c.rev - before)
	res.Mark = c.Mark()
	return res
}

// move gives the entries of (g.upto, r.Upto] their place and makes the item that says so.
func (c *Core) move(g *regionOrder, r *pdpb.Report) pdpb.Item {
	fence := c.fence
	if c.Mutants.NoFence {
		fence = 0
	}
	n, ok := g.count(r, fence)
	upto, term, cum := r.Upto, r.UptoTerm, r.Cum
	if c.Mutants.Delta {
		n, ok, cum = r.Cum, true, g.cum+r.Cum
		upto, term = max(upto, g.upto), max(term, g.uptoTerm)
	}
	if !ok || upto < g.upto || cum < g.cum || n > cum-g.cum {
		panic(fmt.Sprintf("order: cut %d moves region %d back: %v (P1)", c.cut, g.id, r))
	}
	g.newest++
	it := pdpb.Item{
		Region: g.id, Incarnation: g.incarnation, N: g.newest, Cut: c.cut,
		Upto: upto, UptoTerm: term, Cum: cum, Count: n, Base: c.rev, Fence: fence,
	}
	g.upto, g.uptoTerm, g.cum = upto, term, cum
	c.rev += mvcc.Revision(n)
	if !c.Mutants.ForgetAll {
		g.items = append(g.items, it)
		c.held++
	}
	return it
}

// forget drops the items through sealed: the region's committed log holds them (P4).
func (c *Core) forget(g *regionOrder, sealed uint64) int {
	n := 0
	for n < len(g.items) && g.items[n].N <= sealed {
		n++
	}
	if n > 0 {
		// Moved down rather than sliced off: the array is then reused by the next item.
		g.items = g.items[:copy(g.items, g.items[n:])]
		c.held -= n
	}
	return n
}

func (c *Core) event(e *Event) (r EventResult) {
	switch e.Kind {
	case EventCompact:
		switch {
		case e.Rev <= c.floor:
			r.Outcome = Compacted
		case e.Rev > c.rev:
			r.Outcome = Future
		default:
			c.hashes.remember(e.Hash, c.floor)
			c.floor = e.Rev
		}
	case EventCompactHash:
		var known bool
		if r.Hash, known = c.hashes.find(e.Rev); !known {
			r.Outcome = Forgotten
		}
	case EventRaiseFence:
		c.fence++
	}
	r.Mark = c.Mark()
	return r
}

// Position is a region's place in the order.
type Position struct {
	Incarnation uint32
	Upto        uint64 // every entry through it has its place
	UptoTerm    uint64
	Cum         uint64
	Newest      uint64 // number of the newest item; 0 before the first
	Oldest      uint64 // number of the oldest retained item; Newest+1 when there is none
}

// Position returns a region's place; false when there is no such region.
func (c *Core) Position(id pdpb.RegionID) (Position, bool) {
	g := c.find(id)
	if g == nil {
		return Position{}, false
	}
	return Position{
		Incarnation: g.incarnation, Upto: g.upto, UptoTerm: g.uptoTerm, Cum: g.cum,
		Newest: g.newest, Oldest: g.newest + 1 - uint64(len(g.items)),
	}, true
}

// AppendItems appends the retained items of a region above have.
func (c *Core) AppendItems(dst []pdpb.Item, id pdpb.RegionID, have uint64) []pdpb.Item {
	g := c.find(id)
	if g == nil {
		return dst
	}
	i, _ := slices.BinarySearchFunc(g.items, have+1, func(it pdpb.Item, n uint64) int {
		return int(int64(it.N - n))
	})
	return append(dst, g.items[i:]...)
}

// Regions is the number of regions; Held the number of retained items.
func (c *Core) Regions() int { return len(c.regions) }

// Held is the number of items that no report has shown to be sealed.
func (c *Core) Held() int { return c.held }

// String prints the whole state, regions in id order.
func (c *Core) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v held=%d\n", c.Mark(), c.held)
	for i := range c.regions {
		g := &c.regions[i]
		fmt.Fprintf(&b, "  r%d/%d upto=%d@%d cum=%d newest=%d", g.id, g.incarnation, g.upto, g.uptoTerm, g.cum, g.newest)
		if len(g.items) > 0 {
			fmt.Fprintf(&b, " holds=%d..%d", g.items[0].N, g.items[len(g.items)-1].N)
		}
		b.WriteByte('\n')
	}
	c.txns.print(&b)
	return b.String()
}
