package router

import (
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

// revokeJob ends a lease whose keys lie in several regions: the lease is locked exclusively where
// its record is and wherever keys may be attached to it, which locks its keys as well; then the
// record is read (L2). It had been read before, to know whom to lock, in the order of keys like
// everything else (T5); if that has changed, the attempt is repeated.
type revokeJob struct {
	r    *Router
	id   int64
	term uint64
}

func (j *revokeJob) participants(ctx context.Context, regions []pdpb.Descriptor) ([]participant, error) {
	rec, _, _, err := j.r.LeaseLook(ctx, j.id, false)
	if err != nil {
		return nil, err
	}
	home, ok := find(regions, regionpb.LeasePlace(j.id))
	switch {
	case rec == nil:
		return nil, regionpb.ErrorOf(regionpb.LeaseNotFound)
	case !ok:
		return nil, ErrNoRegion
	}
	var parts []participant
	for _, span := range leaseSpans(home.Span, rec) {
		for _, d := range overlapping(regions, span) {
			if n := len(parts); n > 0 && parts[n-1].region.ID == d.ID {
				continue
			}
			p := participant{region: d, locks: []regionpb.LockSpan{{Lease: j.id, Exclusive: true}}}
			if d.ID == home.ID {
				p.term = j.term
			}
			parts = append(parts, p)
		}
	}
	return parts, nil
}

func (j *revokeJob) evaluate(ctx context.Context, p point, parts []participant) (outcome, error) {
	list, err := j.r.leasesIn(ctx, p, mvcc.Key(regionpb.LeasePlace(j.id)))
	if err == nil && len(list) == 0 {
		err = regionpb.ErrorOf(regionpb.LeaseNotFound)
	}
	if err != nil {
		return outcome{}, err
	}
	home := slices.IndexFunc(parts, func(p participant) bool { return p.region.Span.Contains(regionpb.LeasePlace(j.id)) })
	for _, span := range leaseSpans(parts[home].region.Span, list[0].Record) {
		for !span.Empty() {
			i := slices.IndexFunc(parts, func(p participant) bool { return p.region.Span.Contains(span.Start) })
			if i < 0 {
				return outcome{}, fmt.Errorf("%w: a region registered meanwhile", errAgain)
			}
			if parts[i].region.Span.End == nil {
				break
			}
			span.Start = parts[i].region.Span.End
		}
	}
	out := outcome{rev: p.rev, records: make([][]regionpb.RecordEffect, len(parts)), fill: func(rev mvcc.Revision) *pb.TxnResponse {
		return &pb.TxnResponse{Header: &pb.ResponseHeader{Revision: int64(rev)}}
	}}
	for i := range parts {
		d := &parts[i].region
		s := j.r.scan(p.view(p.rev), selection{lease: j.id}, d.Span)
		for !s.done {
			kvs, err := s.next(ctx, 0)
			if err != nil {
				return outcome{}, err
			}
			for _, kv := range kvs {
				out.effects = append(out.effects, regionpb.Effect{Key: kv.Key, Delete: true, Detach: j.id})
			}
		}
		k := regionpb.RegisteredKey(d.Span.Start, j.id)
		if i == home {
			k = regionpb.LeaseKey(j.id)
		}
		out.records[i] = []regionpb.RecordEffect{{Key: k}}
	}
	return out, nil
}

func (j *revokeJob) between(context.Context) error { return nil }
