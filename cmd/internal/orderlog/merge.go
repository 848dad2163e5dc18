package orderlog

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// phase is the order within a cut (P3): the regions' entries, then decisions, then pd's events.
// Of the decisions, those that abort come first and record nothing.
type phase uint8

const (
	phaseEntries phase = iota + 1
	phaseDecisions
	phaseCommits
	phaseEvents
)

// request is one request as it took effect: what it changed, or a compaction.
type request struct {
	rev        mvcc.Revision // that it consumed; 0 for none
	changes    []change
	compact    mvcc.Revision
	compaction bool
}

// change is one put or delete. sub is its place among those of its revision.
type change struct {
	sub        int64
	key, value []byte
	lease      int64
	delete     bool
}

// changes describes effects; the result aliases them.
func changes(effects []regionpb.Effect, subs []int64) []change {
	list := make([]change, len(effects))
	for i := range effects {
		e := &effects[i]
		list[i] = change{sub: int64(i), key: e.Key, value: e.Value, lease: e.Lease, delete: e.Delete}
		if subs != nil {
			list[i].sub = subs[i]
		}
	}
	return list
}

// merger brings what the regions and pd recorded into the one order. It is pure.
type merger struct {
	pending []*frame      // not given out yet, in order of arrival
	last    mvcc.Revision // given out
}

func (m *merger) add(f *frame) {
	if len(f.requests) > 0 {
		m.pending = append(m.pending, f)
	}
}

// through gives out, once and in order, what is pending at or below a cut. The parts that regions
// recorded of one transaction become one request. Revisions must come out dense (I1): ErrHole.
func (m *merger) through(cut pdpb.Cut) ([]request, error) {
	var ready, rest []*frame
	for _, f := range m.pending {
		if f.cut <= cut {
			ready = append(ready, f)
		} else {
			rest = append(rest, f)
		}
	}
	m.pending = rest
	slices.SortFunc(ready, func(a, b *frame) int {
		if c := cmp.Or(cmp.Compare(a.cut, b.cut), cmp.Compare(a.at.phase, b.at.phase)); c != 0 {
			return c
		}
		if a.at.phase == phaseEntries {
			return cmp.Or(cmp.Compare(a.region, b.region), cmp.Compare(a.at.ord, b.at.ord))
		}
		return cmp.Or(cmp.Compare(a.at.ord, b.at.ord), cmp.Compare(a.region, b.region))
	})
	var out []request
	for _, f := range ready {
		for i := range f.requests {
			q := &f.requests[i]
			switch {
			case q.rev == 0:
				out = append(out, *q)
			case q.rev == m.last+1:
				m.last++
				out = append(out, *q)
			case q.rev == m.last && f.at.phase == phaseCommits && len(out) > 0 && out[len(out)-1].rev == q.rev:
				t := &out[len(out)-1]
				t.changes = append(slices.Clip(t.changes), q.changes...)
			default:
				return nil, fmt.Errorf("%w: revision %d of region %d in cut %d follows revision %d", ErrHole, q.rev, f.region, f.cut, m.last)
			}
		}
	}
	for i := range out {
		slices.SortStableFunc(out[i].changes, func(a, b change) int { return cmp.Compare(a.sub, b.sub) })
	}
	return out, nil
}

// own replaces what a frame aliases by copies: entries are decoded into buffers that are reused.
func (f *frame) own() {
	for i := range f.requests {
		for j := range f.requests[i].changes {
			c := &f.requests[i].changes[j]
			c.key, c.value = bytes.Clone(c.key), bytes.Clone(c.value)
		}
	}
}
