package region

import (
	"bytes"
	"cmp"
	"slices"

	"braid/mvcc"
	"braid/region/regionpb"
)

// spanSet is what an attempt locks, arranged for the question that every command asks of it: single
// keys are found by search, because the end of a lease locks each of its keys, of which there may be
// many. Ranges are few: a transaction has at most as many as it has operations. It never changes.
type spanSet struct {
	leases []regionpb.LockSpan // ascending
	keys   []regionpb.LockSpan // single keys, ascending
	ranges []regionpb.LockSpan
}

func newSpanSet(spans []regionpb.LockSpan) spanSet {
	var s spanSet
	for _, l := range spans {
		switch {
		case l.Lease != 0:
			s.leases = append(s.leases, l)
		case singleKey(l.Span):
			s.keys = append(s.keys, l)
		default:
			s.ranges = append(s.ranges, l)
		}
	}
	byLease := func(a, b regionpb.LockSpan) int { return cmp.Compare(a.Lease, b.Lease) }
	if !slices.IsSortedFunc(s.leases, byLease) {
		slices.SortFunc(s.leases, byLease)
	}
	byKey := func(a, b regionpb.LockSpan) int { return bytes.Compare(a.Span.Start, b.Span.Start) }
	if !slices.IsSortedFunc(s.keys, byKey) {
		slices.SortFunc(s.keys, byKey)
	}
	return s
}

// singleKey says whether a span is that of one key.
func singleKey(s mvcc.Span) bool {
	n := len(s.Start)
	return len(s.End) == n+1 && s.End[n] == 0 && bytes.Equal(s.End[:n], s.Start)
}

// conflicts says whether somebody else must not lock spans.
func (s *spanSet) conflicts(spans []regionpb.LockSpan) bool {
	return slices.ContainsFunc(spans, s.conflict)
}

func (s *spanSet) conflict(l regionpb.LockSpan) bool {
	if l.Lease != 0 {
		i, _ := slices.BinarySearchFunc(s.leases, l.Lease, func(o regionpb.LockSpan, id int64) int { return cmp.Compare(o.Lease, id) })
		for ; i < len(s.leases) && s.leases[i].Lease == l.Lease; i++ {
			if l.Exclusive || s.leases[i].Exclusive {
				return true
			}
		}
		return false
	}
	i, _ := slices.BinarySearchFunc(s.keys, l.Span.Start, func(k regionpb.LockSpan, key []byte) int { return bytes.Compare(k.Span.Start, key) })
	for ; i < len(s.keys) && (l.Span.End == nil || bytes.Compare(s.keys[i].Span.Start, l.Span.End) < 0); i++ {
		if l.Exclusive || s.keys[i].Exclusive {
			return true
		}
	}
	return slices.ContainsFunc(s.ranges, func(r regionpb.LockSpan) bool {
		return (l.Exclusive || r.Exclusive) && spansOverlap(r.Span, l.Span)
	})
}

func spansOverlap(a, b mvcc.Span) bool {
	return (a.End == nil || bytes.Compare(b.Start, a.End) < 0) && (b.End == nil || bytes.Compare(a.Start, b.End) < 0)
}
