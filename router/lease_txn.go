package router

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// missingLease says that the region of a key has to be registered for a lease first.
type missingLease struct {
	key   []byte
	lease int64
}

func (m *missingLease) Error() string {
	return fmt.Sprintf("router: the region of %q is not registered for lease %x", m.key, uint64(m.lease))
}

// Unwrap implements errors.
func (m *missingLease) Unwrap() error { return errAgain }

// leaseAt is a lease in a region.
type leaseAt struct {
	region pdpb.RegionID
	lease  int64
}

// checkLease says whether key may be attached to a lease. The lease is locked in the key's region,
// so what is read at the point holds until the locks end.
func (e *evaluation) checkLease(ctx context.Context, key []byte, lease int64) error {
	d, ok := find(e.r.oracle.Regions(), key)
	if !ok {
		return ErrNoRegion
	}
	at := leaseAt{d.ID, lease}
	if e.attachable[at] {
		return nil
	}
	found, err := e.r.attachable(ctx, e.p, mvcc.Key(key), lease)
	switch {
	case err != nil:
		return err
	case found:
		if e.attachable == nil {
			e.attachable = map[leaseAt]bool{}
		}
		e.attachable[at] = true
		return nil
	case d.Span.Contains(regionpb.LeasePlace(lease)):
		return regionpb.ErrorOf(regionpb.LeaseNotFound)
	case slices.Contains(e.homes, lease):
		list, err := e.r.leasesIn(ctx, e.p, mvcc.Key(regionpb.LeasePlace(lease)))
		if err == nil && len(list) == 0 {
			err = regionpb.ErrorOf(regionpb.LeaseNotFound)
		}
		if err != nil {
			return err
		}
	}
	return &missingLease{key, lease}
}

// attachable asks a region whether its keys may be attached to a lease.
func (r *Router) attachable(ctx context.Context, p point, span mvcc.Span, lease int64) (found bool, err error) {
	s := r.scan(p.view(p.rev), selection{leases: true, lease: lease}, span)
	for !s.done {
		kvs, err := s.next(ctx, 0)
		if err != nil {
			return false, err
		}
		found = found || len(kvs) > 0
	}
	return found, nil
}

// revokeJob ends leases whose keys lie in several regions, all at one revision: each is locked
// exclusively where its record is and wherever keys may be attached to it, which locks its keys as
// well; then the records are looked at (L2). They had been read before, to know whom to lock, in the order
// of keys like everything else (T5), unless the caller knew; if that has changed, the attempt is repeated.
//
// Several are ended together only when their time is up: what an attempt costs hardly depends on what
// it carries, and leases often end together. What there is of them in a region comes with its grant; where
// that is too much, it is read with one question to each region.
//
// Whom it ends is settled by the first look: a lease that was granted anew since is another one, and is
// passed over like one that has ended (L7).
type revokeJob struct {
	r      *Router
	leases []regionpb.LeaseLeft
	term   uint64
	// spans, if known, are those of all their records: the first attempt takes that for granted.
	spans []mvcc.Span
}

// records reads the records of the leases that are meant; those that have ended are missing.
func (j *revokeJob) records(ctx context.Context, p point) (map[int64]*regionpb.LeaseRecord, error) {
	ids := make([]int64, len(j.leases))
	for i := range j.leases {
		ids[i] = j.leases[i].ID
	}
	records, err := j.r.records(ctx, p, ids)
	if err != nil {
		return nil, err
	}
	return j.meant(records), nil
}

// meant leaves of records those of the leases that are meant.
func (j *revokeJob) meant(records map[int64]*regionpb.LeaseRecord) map[int64]*regionpb.LeaseRecord {
	for i := range j.leases {
		if l := &j.leases[i]; l.Means(records[l.ID]) {
			l.Grant = records[l.ID].Grant
		} else {
			delete(records, l.ID)
		}
	}
	return records
}

func (j *revokeJob) participants(ctx context.Context, regions []pdpb.Descriptor) ([]participant, error) {
	records, err := j.whom(ctx)
	if err != nil {
		return nil, err
	}
	byRegion := map[pdpb.RegionID]*participant{}
	var list []*participant
	for _, l := range j.leases {
		id := l.ID
		if records[id] == nil {
			continue // it has ended
		}
		home, ok := find(regions, regionpb.LeasePlace(id))
		if !ok {
			return nil, ErrNoRegion
		}
		for _, span := range leaseSpans(home.Span, records[id]) {
			for _, d := range overlapping(regions, span) {
				p := byRegion[d.ID]
				if p == nil {
					p = &participant{region: d}
					byRegion[d.ID] = p
					list = append(list, p)
				}
				if n := len(p.locks); n == 0 || p.locks[n-1].Lease != id {
					p.locks = append(p.locks, regionpb.LockSpan{Lease: id, Exclusive: true})
				}
				if d.ID == home.ID {
					p.term = j.term
				}
			}
		}
	}
	if len(list) == 0 {
		return nil, regionpb.ErrorOf(regionpb.LeaseNotFound)
	}
	slices.SortFunc(list, func(a, b *participant) int { return bytes.Compare(a.region.Span.Start, b.region.Span.Start) })
	parts := make([]participant, len(list))
	for i, p := range list {
		parts[i] = *p
	}
	return parts, nil
}

// whom returns the records by which is known whom to lock.
func (j *revokeJob) whom(ctx context.Context) (records map[int64]*regionpb.LeaseRecord, err error) {
	if len(j.spans) > 0 {
		rec := &regionpb.LeaseRecord{Spans: j.spans}
		records = make(map[int64]*regionpb.LeaseRecord, len(j.leases))
		for i := range j.leases {
			records[j.leases[i].ID] = rec
		}
		return records, nil
	}
	err = j.r.at(ctx, false, nil, func(ctx context.Context, p point) (err error) {
		records, err = j.records(ctx, p)
		return err
	})
	return records, err
}

func (j *revokeJob) evaluate(ctx context.Context, p point, parts []participant) (outcome, error) {
	records, err := j.records(ctx, p)
	if err != nil {
		return outcome{}, err
	}
	out, ids, err := j.end(parts, records)
	if err != nil {
		return outcome{}, err
	}
	out.rev = p.rev
	for i := range parts {
		// As of now, not of the point: the keys are locked, so it is the same, and nobody has to walk
		// through what others have written since.
		size := 0
		if err := j.r.attached(ctx, p, parts[i].region.Span, ids[i], func(lease int64, key []byte) error {
			if size += out.detach(lease, key); size > j.r.opts.PartBytesMax {
				return regionpb.ErrorOf(regionpb.TooLarge) // there is no use in reading the rest
			}
			return nil
		}); err != nil {
			return outcome{}, err
		}
	}
	out.inOrder()
	return out, nil
}

// granted does the same with what the grants say, so that nothing is read again.
func (j *revokeJob) granted(parts []participant, grants []regionpb.LockGrant) (outcome, bool, error) {
	found := make(map[int64]*regionpb.LeaseRecord, len(j.leases))
	for i := range grants {
		if !grants[i].Whole {
			return outcome{}, false, nil
		}
		for _, l := range grants[i].Records {
			found[l.ID] = l.Record
		}
	}
	records := j.meant(found)
	out, _, err := j.end(parts, records)
	if err != nil {
		return outcome{}, true, err
	}
	for i := range grants {
		for _, k := range grants[i].Attached {
			if records[k.Lease] != nil {
				out.detach(k.Lease, k.Key)
			}
		}
	}
	out.inOrder()
	return out, true, nil
}

// detach adds the deletion of a key of a lease, and returns its size.
func (o *outcome) detach(lease int64, key []byte) int {
	f := regionpb.Effect{Key: key, Delete: true, Detach: lease}
	o.effects = append(o.effects, f)
	return f.Size()
}

// inOrder makes deletions the events of their revision in the order of keys.
func (o *outcome) inOrder() {
	slices.SortFunc(o.effects, func(a, b regionpb.Effect) int { return bytes.Compare(a.Key, b.Key) })
}

// end is the outcome but for the keys, and by participant the leases whose keys go.
func (j *revokeJob) end(parts []participant, records map[int64]*regionpb.LeaseRecord) (out outcome, ids [][]int64, err error) {
	locked := make([]map[int64]bool, len(parts))
	for i := range parts {
		locked[i] = make(map[int64]bool, len(parts[i].locks))
		for _, l := range parts[i].locks {
			locked[i][l.Lease] = true
		}
	}
	for _, l := range j.leases {
		if records[l.ID] != nil {
			if err := coversLease(parts, locked, l.ID, records[l.ID]); err != nil {
				return outcome{}, nil, err
			}
		}
	}
	if len(records) == 0 {
		return outcome{}, nil, regionpb.ErrorOf(regionpb.LeaseNotFound)
	}
	out = outcome{records: make([][]regionpb.RecordEffect, len(parts)), fill: func(rev mvcc.Revision) *pb.TxnResponse {
		return &pb.TxnResponse{Header: &pb.ResponseHeader{Revision: int64(rev)}}
	}}
	ids = make([][]int64, len(parts))
	for i := range parts {
		d := &parts[i].region
		for _, l := range parts[i].locks {
			if records[l.Lease] == nil {
				continue // it has ended
			}
			ids[i] = append(ids[i], l.Lease)
			k := regionpb.RegisteredKey(d.Span.Start, l.Lease)
			if d.Span.Contains(regionpb.LeasePlace(l.Lease)) {
				k = regionpb.LeaseKey(l.Lease)
			}
			out.records[i] = append(out.records[i], regionpb.RecordEffect{Key: k})
		}
		// Neighbours one after the other, which is the quickest way to write them.
		slices.SortFunc(out.records[i], func(a, b regionpb.RecordEffect) int { return a.Key.Compare(b.Key) })
	}
	return out, ids, nil
}

// coversLease says whether a lease is locked wherever its keys may be.
func coversLease(parts []participant, locked []map[int64]bool, id int64, rec *regionpb.LeaseRecord) error {
	at := func(key []byte) int {
		i := slices.IndexFunc(parts, func(p participant) bool { return p.region.Span.Contains(key) })
		if i >= 0 && !locked[i][id] {
			return -1
		}
		return i
	}
	home := at(regionpb.LeasePlace(id))
	if home < 0 {
		return fmt.Errorf("%w: the record of a lease has moved", errAgain)
	}
	for _, span := range leaseSpans(parts[home].region.Span, rec) {
		for !span.Empty() {
			i := at(span.Start)
			if i < 0 {
				return fmt.Errorf("%w: a region registered meanwhile", errAgain)
			}
			if parts[i].region.Span.End == nil {
				break
			}
			span.Start = parts[i].region.Span.End
		}
	}
	return nil
}

// between: the record is read anew by each attempt but one that took it for known, and has changed only if
// others change it.
func (j *revokeJob) between(context.Context) (news bool, err error) {
	news, j.spans = len(j.spans) > 0, nil
	return news, nil
}
