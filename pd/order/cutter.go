package order

import (
	"slices"

	"braid/pd/pdpb"
)

// CutterOptions are the limits of a Cutter; zero means the default.
type CutterOptions struct {
	// InFlightMax is how many cuts may be proposed and not applied; default 1. The cut in
	// flight is the batch window: what is reported meanwhile goes into the next one.
	InFlightMax int
	// PartsMax bounds the regions in one cut; default 32,768 (about a megabyte). The rest waits
	// for the next one, first come first served.
	PartsMax int
	// SealsMax is how many regions with nothing but seals may wait for somebody else's cut
	// before they get one of their own; default 1,024.
	SealsMax int
}

func (o *CutterOptions) setDefaults() {
	if o.InFlightMax == 0 {
		o.InFlightMax = 1
	}
	if o.PartsMax == 0 {
		o.PartsMax = 32768
	}
	if o.SealsMax == 0 {
		o.SealsMax = 1024
	}
}

// Cutter collects reports for pd's leader and decides when the next cut is proposed: at once
// when none is in flight. It is pure; its owner calls it from one goroutine. Its memory is one
// report for each region that reported in this term.
//
// A report that only seals makes nobody wait, so it does not cause a cut: it rides in the next
// one, or in one of its own after Tick or when many have gathered.
type Cutter struct {
	opts    CutterOptions
	mutants Mutants

	leading  bool
	term     uint64
	open     uint64   // index of the entry that opened the term
	applied  uint64   // pd's applied index
	inFlight []uint64 // indexes of proposed cuts, ascending, above applied

	slots map[pdpb.RegionID]*slot
	queue []pdpb.RegionID // slots with state queued, oldest first
	seals []pdpb.RegionID // slots with state sealing (or queued since)
	hurry bool            // seals do not wait any longer
}

// slot is the newest report of one region.
type slot struct {
	report pdpb.Report
	state  slotState
	// What the newest cut that names the region said, and where that cut is.
	sentUpto, sentSealed, sentAt uint64
}

type slotState uint8

const (
	slotIdle slotState = iota
	slotSealing
	slotQueued
)

// NewCutter returns a cutter that does not lead.
func NewCutter(o CutterOptions, m Mutants) *Cutter {
	o.setDefaults()
	if m.Delta {
		o.InFlightMax = max(o.InFlightMax, 2) // the mutant needs a second cut to be wrong
	}
	return &Cutter{opts: o, mutants: m, slots: map[pdpb.RegionID]*slot{}}
}

// Role tells whether this member leads, in which term and where the term's opening entry is. A
// new role starts from nothing: stores report again (P4).
func (c *Cutter) Role(leading bool, term, open uint64) {
	if c.leading == leading && c.term == term && c.open == open {
		return
	}
	c.leading, c.term, c.open = leading, term, open
	c.inFlight = nil
	c.slots = map[pdpb.RegionID]*slot{}
	c.queue, c.seals, c.hurry = nil, nil, false
}

// Applied tells that pd's log is applied through index.
func (c *Cutter) Applied(index uint64) {
	c.applied = max(c.applied, index)
	n := 0
	for n < len(c.inFlight) && c.inFlight[n] <= index {
		n++
	}
	c.inFlight = c.inFlight[n:]
}

// Opened says whether the leader's state holds everything that was committed before its term.
func (c *Cutter) Opened() bool { return c.leading && c.applied >= c.open }

// Offer takes a report. Of one region the highest wins; seals are kept from whichever report
// knows most (all of them are facts). The verdict tells what the report was worth; Moves, Seals
// and Ahead were taken.
func (c *Cutter) Offer(core *Core, r *pdpb.Report) Verdict {
	if !c.leading {
		return Unknown
	}
	v := core.Judge(r)
	if v != Moves && v != Seals && v != Ahead {
		return v
	}
	s := c.slots[r.Region]
	if s == nil {
		s = &slot{}
		c.slots[r.Region] = s
	}
	if s.sentAt > c.applied && r.Upto <= s.sentUpto && r.Sealed <= s.sentSealed {
		return Covered // by a cut in flight
	}
	if s.state == slotIdle {
		s.report = *r
	} else {
		sealed := max(s.report.Sealed, r.Sealed)
		if r.Upto > s.report.Upto || r.Incarnation != s.report.Incarnation {
			s.report = *r
		}
		s.report.Sealed = sealed
	}
	c.enqueue(r.Region, s, v)
	return v
}

func (c *Cutter) enqueue(id pdpb.RegionID, s *slot, v Verdict) {
	switch {
	case s.state == slotQueued:
	case v == Seals:
		if s.state == slotIdle {
			s.state = slotSealing
			c.seals = append(c.seals, id)
			c.hurry = c.hurry || len(c.seals) >= c.opts.SealsMax
		}
	default:
		s.state = slotQueued
		c.queue = append(c.queue, id)
	}
}

// Tick tells that the idle interval passed: seals that wait get a cut.
func (c *Cutter) Tick() { c.hurry = c.hurry || len(c.seals) > 0 }

// Pending says whether reports wait for a cut, those that wait for Tick included.
func (c *Cutter) Pending() bool { return len(c.queue) > 0 || len(c.seals) > 0 }

// InFlight is the number of cuts proposed and not applied.
func (c *Cutter) InFlight() int { return len(c.inFlight) }

// Next returns the cut to propose now, with these events in it; false when nothing is to be
// proposed. The caller proposes it and then calls Proposed, or Undo when raft dropped it.
func (c *Cutter) Next(core *Core, events []Event) (*CutProposal, bool) {
	if !c.leading || !c.Opened() || len(c.inFlight) >= c.opts.InFlightMax {
		return nil, false
	}
	if len(c.queue) == 0 && len(events) == 0 && !c.hurry {
		return nil, false
	}
	p := &CutProposal{Events: events}
	c.queue = c.take(core, p, c.queue, slotQueued)
	c.seals = c.take(core, p, c.seals, slotSealing)
	if len(c.seals) == 0 {
		c.hurry = false
	}
	if len(p.Parts) == 0 && len(events) == 0 {
		return nil, false
	}
	slices.SortFunc(p.Parts, func(a, b pdpb.Report) int {
		if a.Region < b.Region {
			return -1
		}
		return 1
	})
	return p, true
}

// take moves reports of the list into the cut and returns what found no room. Entries of the
// list whose slot went into another state since are dropped: they are in the other list.
func (c *Cutter) take(core *Core, p *CutProposal, list []pdpb.RegionID, state slotState) []pdpb.RegionID {
	for i, id := range list {
		s := c.slots[id]
		if s.state != state {
			continue
		}
		if len(p.Parts) >= c.opts.PartsMax {
			return list[i:]
		}
		s.state = slotIdle
		// Judged again: cuts were applied since. Reports from ahead of an opened leader are
		// dropped; they will be sent again, and by then the items they know are applied here.
		if v := core.Judge(&s.report); v != Moves && v != Seals {
			continue
		}
		part := s.report
		if c.mutants.Delta {
			if pos, ok := core.Position(id); ok {
				part.Cum -= min(pos.Cum, part.Cum)
				part.Runs = nil
			}
		}
		p.Parts = append(p.Parts, part)
	}
	return list[:0]
}

// Proposed tells that the cut is in the log at index.
func (c *Cutter) Proposed(p *CutProposal, index uint64) {
	c.inFlight = append(c.inFlight, index)
	for i := range p.Parts {
		s := c.slots[p.Parts[i].Region]
		s.sentUpto, s.sentSealed, s.sentAt = p.Parts[i].Upto, p.Parts[i].Sealed, index
	}
}

// Undo puts the parts of a cut that raft dropped back.
func (c *Cutter) Undo(p *CutProposal) {
	for i := range p.Parts {
		if s := c.slots[p.Parts[i].Region]; s.state == slotIdle {
			c.enqueue(p.Parts[i].Region, s, Moves)
		}
	}
}
