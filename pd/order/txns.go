package order

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"

	"braid/pd/pdpb"
)

// txns is what the order knows of attempts over several regions (T2, T3, T4): those of which some
// participant is prepared, and the most recent decisions.
//
// Nobody asks for a commit: the cut that makes the last participant prepared is the commit (T3).
// What was decided is remembered for a while, so that a prepare that comes late gets the same
// decision and a coordinator that lost its answer can ask. The memory is bounded: of forgotten
// attempts only the highest id remains, and whatever appears at or below it is aborted. That is
// always safe, because nobody was told that it is committed, and it is why a coordinator is told
// "aborted" only of what is aborted for ever (A4).
type txns struct {
	open    []openTxn // by attempt
	decided decisions
	// forgotten is the highest attempt that was dropped from decided.
	forgotten pdpb.AttemptID

	// Within one Apply: prepares of attempts that cannot commit any more, and how many items the
	// parts made, which are in order.
	late  []lateTxn
	parts int
}

// openTxn is an attempt that is not decided.
type openTxn struct {
	attempt      pdpb.AttemptID
	participants []pdpb.RegionID // ascending
	prepared     []pdpb.RegionID // ascending
	writes       bool
}

func (t *openTxn) complete() bool { return slices.Equal(t.prepared, t.participants) }

type lateTxn struct {
	attempt pdpb.AttemptID
	region  pdpb.RegionID
}

// decidedMax is how many decisions are remembered. An attempt must be prepared before that many
// younger ones are decided, else it is aborted and tried anew: a few seconds' worth, as long as an
// attempt may wait for its locks.
const decidedMax = 16384

func openCompare(t openTxn, id pdpb.AttemptID) int { return cmp.Compare(t.attempt, id) }

// decisions are the last ones, found by attempt.
type decisions struct {
	ring   []pdpb.Decision
	oldest int // in ring, once it is full
	at     map[pdpb.AttemptID]int
}

func (d *decisions) get(id pdpb.AttemptID) (pdpb.Decision, bool) {
	if i, ok := d.at[id]; ok {
		return d.ring[i], true
	}
	return pdpb.Decision{}, false
}

// add remembers one more, and returns the one that is forgotten for it when there are most already.
func (d *decisions) add(x pdpb.Decision, most int) (forgotten pdpb.Decision, ok bool) {
	if d.at == nil {
		d.at = map[pdpb.AttemptID]int{}
	}
	if len(d.ring) < most {
		d.at[x.Attempt] = len(d.ring)
		d.ring = append(d.ring, x)
		return forgotten, false
	}
	i := d.oldest
	forgotten = d.ring[i]
	delete(d.at, forgotten.Attempt)
	d.ring[i], d.at[x.Attempt] = x, i
	d.oldest = (i + 1) % len(d.ring)
	return forgotten, true
}

// all are the decisions, oldest first.
func (d *decisions) all() []pdpb.Decision {
	return append(append(make([]pdpb.Decision, 0, len(d.ring)), d.ring[d.oldest:]...), d.ring[:d.oldest]...)
}

// enter takes the facts of the interval that a report moves a region over, each exactly once (P2),
// void ones excepted (F2).
func (c *Core) enter(g *regionOrder, r *pdpb.Report) {
	for i := range r.Facts {
		f := &r.Facts[i]
		if (f.Index <= g.upto && !c.Mutants.FactsAsLevel) || (f.Stamp < c.fence && !c.Mutants.NoFence) {
			continue
		}
		c.txns.prepare(r.Region, f)
	}
}

func (x *txns) prepare(region pdpb.RegionID, f *pdpb.Fact) {
	i, ok := slices.BinarySearchFunc(x.open, f.Attempt, openCompare)
	if !ok {
		if _, decided := x.decided.get(f.Attempt); decided || f.Attempt <= x.forgotten {
			x.late = append(x.late, lateTxn{f.Attempt, region})
			return
		}
		x.open = slices.Insert(x.open, i, openTxn{attempt: f.Attempt, participants: slices.Clone(f.Participants)})
	}
	t := &x.open[i]
	if j, ok := slices.BinarySearch(t.prepared, region); !ok {
		t.prepared = slices.Insert(t.prepared, j, region)
	}
	t.writes = t.writes || f.Writes
}

// decide ends attempts: aborts that were asked for, in the order of asking, then what is complete,
// by attempt. Participants that are prepared hear it in an item of this cut.
func (c *Core) decide(p *CutProposal, res *CutResult) {
	c.txns.parts = len(res.Items)
	for i := range p.Events {
		if e := &p.Events[i]; e.Kind == EventAbort {
			res.Events[i] = c.abort(e.Attempt, res)
		}
	}
	late := c.txns.late
	c.txns.late = nil
	for _, l := range late {
		// An attempt that is committed has all its participants, so a late one is aborted.
		d := pdpb.Decision{Attempt: l.attempt}
		c.tell(res, l.region, d)
	}
	kept := c.txns.open[:0]
	for i := range c.txns.open {
		t := c.txns.open[i]
		if !t.complete() {
			kept = append(kept, t)
			continue
		}
		if t.writes {
			c.rev++
		}
		c.settle(&t, pdpb.Decision{Attempt: t.attempt, Commit: true, Rev: c.rev}, res)
	}
	clear(c.txns.open[len(kept):])
	c.txns.open = kept
	if len(res.Items) > c.txns.parts {
		slices.SortFunc(res.Items, func(a, b pdpb.Item) int { return cmp.Compare(a.Region, b.Region) })
	}
}

func (c *Core) abort(id pdpb.AttemptID, res *CutResult) (r EventResult) {
	r.Mark = c.Mark()
	if d, ok := c.txns.decided.get(id); ok {
		r.Outcome = Aborted
		if d.Commit {
			r.Outcome, r.Rev = Committed, d.Rev
		}
		return r
	}
	i, open := slices.BinarySearchFunc(c.txns.open, id, openCompare)
	if !open && id <= c.txns.forgotten {
		r.Outcome = Forgotten
		return r
	}
	r.Outcome = Aborted
	t := openTxn{attempt: id}
	if open {
		t = c.txns.open[i]
		c.txns.open = slices.Delete(c.txns.open, i, i+1)
	}
	c.settle(&t, pdpb.Decision{Attempt: id}, res)
	return r
}

// settle records a decision and tells those who are prepared.
func (c *Core) settle(t *openTxn, d pdpb.Decision, res *CutResult) {
	x := &c.txns
	most := decidedMax
	if c.Mutants.DecidedMax > 0 {
		most = c.Mutants.DecidedMax
	}
	if old, ok := x.decided.add(d, most); ok {
		x.forgotten = max(x.forgotten, old.Attempt)
	}
	res.Decided = append(res.Decided, d)
	for _, region := range t.prepared {
		c.tell(res, region, d)
	}
}

// tell puts a decision into the region's item of this cut, a new one if its up-to did not move.
func (c *Core) tell(res *CutResult, region pdpb.RegionID, d pdpb.Decision) {
	g := c.find(region)
	i, ok := slices.BinarySearchFunc(res.Items[:c.txns.parts], region, func(it pdpb.Item, id pdpb.RegionID) int { return cmp.Compare(it.Region, id) })
	for j := c.txns.parts; !ok && j < len(res.Items); j++ {
		if res.Items[j].Region == region {
			i, ok = j, true
		}
	}
	if !ok {
		g.newest++
		i = len(res.Items)
		res.Items = append(res.Items, pdpb.Item{
			Region: g.id, Incarnation: g.incarnation, N: g.newest, Cut: c.cut,
			Upto: g.upto, UptoTerm: g.uptoTerm, Cum: g.cum, Base: c.rev, Fence: c.fence,
		})
		if !c.Mutants.ForgetAll {
			g.items = append(g.items, res.Items[i])
			c.held++
		}
	}
	it := &res.Items[i]
	it.Decisions = append(it.Decisions, d)
	if n := len(g.items); n > 0 && g.items[n-1].N == it.N {
		g.items[n-1].Decisions = slices.Clone(it.Decisions)
	}
}

// decideEarly and attach are the mutant DecisionsFirst: decisions take their revisions before the
// entries of their cut do.
func (c *Core) decideEarly(p *CutProposal, res *CutResult) map[pdpb.RegionID][]pdpb.Decision {
	for i := range p.Parts {
		if g := c.find(p.Parts[i].Region); g != nil && c.judge(g, &p.Parts[i]) == Moves {
			c.enter(g, &p.Parts[i])
		}
	}
	told := map[pdpb.RegionID][]pdpb.Decision{}
	kept := c.txns.open[:0]
	for _, t := range c.txns.open {
		if !t.complete() {
			kept = append(kept, t)
			continue
		}
		if t.writes {
			c.rev++
		}
		d := pdpb.Decision{Attempt: t.attempt, Commit: true, Rev: c.rev}
		for _, region := range t.prepared {
			told[region] = append(told[region], d)
		}
		t.prepared = nil
		c.settle(&t, d, res)
	}
	c.txns.open = kept
	return told
}

func (c *Core) attach(res *CutResult, told map[pdpb.RegionID][]pdpb.Decision) {
	c.txns.parts = len(res.Items)
	for i := range c.regions {
		for _, d := range told[c.regions[i].id] {
			c.tell(res, c.regions[i].id, d)
		}
	}
	slices.SortFunc(res.Items, func(a, b pdpb.Item) int { return cmp.Compare(a.Region, b.Region) })
}

// OpenTxns is the number of attempts that are prepared somewhere and not decided.
func (c *Core) OpenTxns() int { return len(c.txns.open) }

func (x *txns) append(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(x.forgotten))
	b = pdpb.AppendDecisions(b, x.decided.all())
	b = binary.AppendUvarint(b, uint64(len(x.open)))
	for i := range x.open {
		t := &x.open[i]
		b = binary.AppendUvarint(b, uint64(t.attempt))
		b = pdpb.AppendBool(b, t.writes)
		for _, list := range [2][]pdpb.RegionID{t.participants, t.prepared} {
			b = binary.AppendUvarint(b, uint64(len(list)))
			for _, id := range list {
				b = binary.AppendUvarint(b, uint64(id))
			}
		}
	}
	return b
}

func readTxns(d *pdpb.Dec) txns {
	x := txns{forgotten: pdpb.AttemptID(d.Uvarint())}
	for _, dec := range d.Decisions() {
		x.decided.add(dec, math.MaxInt)
	}
	last := pdpb.AttemptID(0)
	for n := d.Len(4); n > 0 && d.Err() == nil; n-- {
		t := openTxn{attempt: pdpb.AttemptID(d.Uvarint()), writes: d.Bool()}
		for _, list := range [2]*[]pdpb.RegionID{&t.participants, &t.prepared} {
			for m := d.Len(1); m > 0; m-- {
				*list = append(*list, pdpb.RegionID(d.Uvarint()))
			}
		}
		if d.Err() == nil && (t.attempt <= last && len(x.open) > 0 || !slices.IsSorted(t.participants) || !slices.IsSorted(t.prepared)) {
			d.Fail("attempt %d after %d, %v of %v prepared", t.attempt, last, t.prepared, t.participants)
		}
		last = t.attempt
		x.open = append(x.open, t)
	}
	return x
}

func (x *txns) print(b *strings.Builder) {
	for i := range x.open {
		t := &x.open[i]
		fmt.Fprintf(b, "  t%d writes=%v %v of %v\n", t.attempt, t.writes, t.prepared, t.participants)
	}
	if list := x.decided.all(); len(list) > 0 {
		fmt.Fprintf(b, "  decided")
		for _, d := range list {
			fmt.Fprintf(b, " %v", d)
		}
		fmt.Fprintf(b, " forgotten=t%d\n", x.forgotten)
	}
}
