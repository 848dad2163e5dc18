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

type kind uint8

const (
	kindWrite      kind = iota + 1 // has only changes
	kindCompaction                 // through compact
	kindLeaseSet                   // the record of a lease was written: its grant, if there was none
	kindLeaseEnd                   // a lease ended, by request or by time; changes are the deletes of its keys
)

// request is one request as it took effect.
type request struct {
	kind kind
	// rev is the revision of the changes, of a part those of the whole transaction; without changes
	// the last one before.
	rev     mvcc.Revision
	changes []change
	compact mvcc.Revision
	lease   int64
	ttl     int64 // of the lease, in seconds
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

// effective describes what a command or a part of a transaction did; its kind is 0 if that was
// nothing. rev is as in request.
func effective(effects []regionpb.Effect, subs []int64, records []regionpb.RecordEffect, rev mvcc.Revision) (q request, err error) {
	q.rev = rev
	if len(effects) > 0 {
		q.kind, q.changes = kindWrite, changes(effects, subs)
	}
	for i := range records {
		x := &records[i]
		switch {
		case x.Key.Kind != mvcc.RecordLease:
		case len(x.Value) == 0:
			q.kind, q.lease = kindLeaseEnd, x.Key.ID
		default:
			rec, err := regionpb.DecodeLeaseRecord(x.Value)
			if err != nil {
				return q, fmt.Errorf("orderlog: record of lease %x: %w", uint64(x.Key.ID), err)
			}
			q.kind, q.lease, q.ttl = kindLeaseSet, x.Key.ID, rec.TTL
		}
	}
	return q, nil
}

// merger brings what the regions and pd recorded into the one order. It is pure.
type merger struct {
	pending []*frame      // not given out yet, in order of arrival
	last    mvcc.Revision // given out
	leases  map[int64]struct{}
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
	for len(ready) > 0 {
		f := ready[0]
		requests := f.requests
		ready = ready[1:]
		for f.at.phase == phaseCommits && len(ready) > 0 && ready[0].cut == f.cut && ready[0].at.phase == phaseCommits && ready[0].at.ord == f.at.ord {
			whole, err := join(&requests[0], &ready[0].requests[0])
			if err != nil {
				return nil, err
			}
			requests = []request{whole}
			ready = ready[1:]
		}
		for i := range requests {
			q := requests[i]
			news, err := m.take(&q)
			if err != nil {
				return nil, fmt.Errorf("region %d in cut %d: %w", f.region, f.cut, err)
			}
			if news {
				slices.SortStableFunc(q.changes, func(a, b change) int { return cmp.Compare(a.sub, b.sub) })
				out = append(out, q)
			}
		}
	}
	return out, nil
}

// join makes one request of two parts of a transaction.
func join(a, b *request) (request, error) {
	if a.rev != b.rev {
		return request{}, fmt.Errorf("%w: one transaction has revisions %d and %d", ErrHole, a.rev, b.rev)
	}
	q := *a
	q.changes = slices.Concat(a.changes, b.changes)
	if b.kind != kindWrite {
		q.kind, q.lease, q.ttl = b.kind, b.lease, b.ttl
	}
	return q, nil
}

// take advances the merger by a request and says whether an etcd would have logged it: a lease's
// record is written again by checkpoints and when a region registers, which an etcd has not.
func (m *merger) take(q *request) (news bool, err error) {
	want := m.last
	if len(q.changes) > 0 {
		want++
	}
	if q.kind != kindCompaction && q.rev != want {
		return false, fmt.Errorf("%w: revision %d follows revision %d", ErrHole, q.rev, m.last)
	}
	m.last = want
	_, known := m.leases[q.lease]
	switch q.kind {
	case kindLeaseSet:
		if m.leases == nil {
			m.leases = map[int64]struct{}{}
		}
		m.leases[q.lease] = struct{}{}
		return !known, nil
	case kindLeaseEnd:
		if !known {
			return false, fmt.Errorf("%w: lease %x ends and never began", ErrHole, uint64(q.lease))
		}
		delete(m.leases, q.lease)
	}
	return true, nil
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
