package router

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// LeaseGrant makes a lease, at its place in the order, and returns the revision of the store there.
// ttl is in seconds.
func (r *Router) LeaseGrant(ctx context.Context, id, ttl int64) (mvcc.Revision, error) {
	grant := 1 + rand.Uint64N(math.MaxUint64) // L7; never 0
	return r.lease(ctx, &regionpb.LeaseCommand{Op: regionpb.LeaseGrant, ID: id, Grant: grant, TTL: ttl})
}

// LeaseRevoke ends a lease and deletes its keys, at one revision, which it returns.
func (r *Router) LeaseRevoke(ctx context.Context, id int64) (mvcc.Revision, error) {
	return r.lease(ctx, &regionpb.LeaseCommand{Op: regionpb.LeaseRevoke, ID: id})
}

// LeaseExpire ends leases whose records lie in one region, as leader of that region's term (L5): by one
// command if all their keys lie there as well, else by one attempt. Those that are ended together end at
// one revision, unless they have too much for that. Of what has ended already nothing is said, also when
// its id was granted anew since (L7).
//
// spans are those of other regions in which the leases may have keys, as far as the caller knows: with the
// right ones an attempt need not find out first whom to lock.
func (r *Router) LeaseExpire(ctx context.Context, list []regionpb.LeaseLeft, term uint64, spans []mvcc.Span) error {
	if len(list) == 0 {
		return nil
	}
	// What lies together is read quickest in order.
	list = slices.SortedFunc(slices.Values(list), func(a, b regionpb.LeaseLeft) int { return cmp.Compare(a.ID, b.ID) })
	switch err := r.expire(ctx, list, term, spans); {
	case codeOf(err) == regionpb.TooLarge && len(list) > 1:
		n := len(list) / 2
		return errors.Join(r.LeaseExpire(ctx, list[:n], term, spans), r.LeaseExpire(ctx, list[n:], term, spans))
	case codeOf(err) != regionpb.LeaseNotFound:
		return err
	}
	return nil
}

func (r *Router) expire(ctx context.Context, list []regionpb.LeaseLeft, term uint64, spans []mvcc.Span) error {
	home, ok := r.LeaseHome(list[0].ID)
	if !ok || !slices.ContainsFunc(spans, func(s mvcc.Span) bool { return !home.Span.Covers(s) }) {
		_, err := r.lease(ctx, regionpb.ManyLeases(regionpb.LeaseRevoke, list, term))
		return err
	}
	rctx, cancel := r.deadline(ctx)
	defer cancel()
	resp, err := r.attempts(rctx, &revokeJob{r: r, leases: list, term: term, spans: spans})
	if err != nil {
		return settle(ctx, err)
	}
	r.told.raise(resp.Header.GetRevision())
	return nil
}

// LeaseCheckpoint records what leases have left, whose records lie in one region, by one command. With
// a term, only the leader of that term does it.
func (r *Router) LeaseCheckpoint(ctx context.Context, left []regionpb.LeaseLeft, term uint64) error {
	if len(left) == 0 {
		return nil
	}
	_, err := r.lease(ctx, regionpb.ManyLeases(regionpb.LeaseCheckpoint, left, term))
	return err
}

// lease has a command executed by the leader that has the lease's record.
func (r *Router) lease(ctx context.Context, c *regionpb.LeaseCommand) (mvcc.Revision, error) {
	rctx, cancel := r.deadline(ctx)
	defer cancel()
	resp, err := r.propose(rctx, &regionpb.WriteRequest{Lease: c})
	if err != nil {
		return 0, settle(ctx, err)
	}
	return mvcc.Revision(resp.GetHeader().GetRevision()), nil
}

// LeaseHome returns the region that has a lease's record.
func (r *Router) LeaseHome(id int64) (pdpb.Descriptor, bool) {
	d, ok := find(r.oracle.Regions(), regionpb.LeasePlace(id))
	if !ok {
		return pdpb.Descriptor{}, false
	}
	return *d, true
}

// register has a region's span added to the record of a lease, as the region's leader asked for
// (L1, L3), and returns the write with the leader's token.
func (r *Router) register(ctx context.Context, w *regionpb.WriteRequest, t regionpb.LeaseToken) (*regionpb.WriteRequest, error) {
	next := *w
	next.Tokens = append(slices.DeleteFunc(slices.Clone(w.Tokens), func(o regionpb.LeaseToken) bool { return o.Lease == t.Lease }), t)
	for _, d := range r.oracle.Regions() {
		if d.ID == w.Region {
			_, err := r.propose(ctx, &regionpb.WriteRequest{Lease: &regionpb.LeaseCommand{Op: regionpb.LeaseRegister, ID: t.Lease, Span: d.Span}})
			return &next, err
		}
	}
	return &next, nil // the region is gone; the write will find its successor
}

// notRegistered returns the token of an error by which a leader asks to be registered for a lease.
func notRegistered(err error) (regionpb.LeaseToken, bool) {
	var re *regionpb.Error
	if errors.As(err, &re) && re.Code == regionpb.LeaseNotRegistered {
		return re.Token, true
	}
	return regionpb.LeaseToken{}, false
}

// Leases lists the leases of the store.
func (r *Router) Leases(ctx context.Context) ([]regionpb.Lease, mvcc.Revision, error) {
	rctx, cancel := r.deadline(ctx)
	defer cancel()
	var list []regionpb.Lease
	var rev mvcc.Revision
	err := r.at(rctx, false, nil, func(ctx context.Context, p point) (err error) {
		list, err = r.leasesIn(ctx, p, mvcc.Span{})
		rev = p.rev
		return err
	})
	return list, rev, settle(ctx, err)
}

// LeaseLook returns what is recorded of a lease, nil when there is none, and with keys what is
// attached to it, in order.
func (r *Router) LeaseLook(ctx context.Context, id int64, keys bool) (rec *regionpb.LeaseRecord, attached [][]byte, rev mvcc.Revision, err error) {
	rctx, cancel := r.deadline(ctx)
	defer cancel()
	err = r.at(rctx, false, nil, func(ctx context.Context, p point) error {
		rec, attached, rev = nil, nil, p.rev
		list, err := r.leasesIn(ctx, p, mvcc.Key(regionpb.LeasePlace(id)))
		if err != nil || len(list) == 0 {
			return err
		}
		rec = list[0].Record
		if !keys {
			return nil
		}
		home, ok := r.LeaseHome(id)
		if !ok {
			return ErrNoRegion
		}
		for _, span := range leaseSpans(home.Span, rec) {
			sel := selection{lease: id}
			s := r.scan(p.view(p.rev), sel, span)
			for !s.done {
				kvs, err := s.next(ctx, 0)
				if err != nil {
					return err
				}
				for _, kv := range kvs {
					attached = append(attached, kv.Key)
				}
			}
		}
		return nil
	})
	return rec, attached, rev, settle(ctx, err)
}

// leaseSpans returns where keys of a lease may lie, in order and without overlaps: in its own
// region and in what is registered (L1).
func leaseSpans(home mvcc.Span, rec *regionpb.LeaseRecord) []mvcc.Span {
	spans := append([]mvcc.Span{home}, rec.Spans...)
	slices.SortFunc(spans, func(a, b mvcc.Span) int { return slices.Compare(a.Start, b.Start) })
	out := spans[:1]
	for _, s := range spans[1:] {
		last := &out[len(out)-1]
		switch {
		case last.End != nil && slices.Compare(s.Start, last.End) > 0:
			out = append(out, s)
		case last.End != nil && (s.End == nil || slices.Compare(s.End, last.End) > 0):
			last.End = s.End
		}
	}
	return out
}

// leasesIn reads the records of leases that lie in a span.
func (r *Router) leasesIn(ctx context.Context, p point, span mvcc.Span) ([]regionpb.Lease, error) {
	var list []regionpb.Lease
	s := r.scan(p.view(p.rev), selection{leases: true}, span)
	for !s.done {
		kvs, err := s.next(ctx, 0)
		if err != nil {
			return nil, err
		}
		for _, kv := range kvs {
			l, err := leaseOf(kv)
			if err != nil {
				return nil, err
			}
			list = append(list, l)
		}
	}
	return list, nil
}

// leaseOf reads a lease from a reply.
func leaseOf(kv *mvccpb.KeyValue) (regionpb.Lease, error) {
	rec, err := regionpb.DecodeLeaseRecord(kv.Value)
	if err != nil || len(kv.Key) != 8 {
		return regionpb.Lease{}, errors.Join(errInvalid, err)
	}
	return regionpb.Lease{ID: int64(binary.BigEndian.Uint64(kv.Key)), Record: rec}, nil
}

// records reads the records of leases; those that there are not are missing from the result.
func (r *Router) records(ctx context.Context, p point, ids []int64) (map[int64]*regionpb.LeaseRecord, error) {
	out := make(map[int64]*regionpb.LeaseRecord, len(ids))
	for len(ids) > 0 {
		var here, others []int64
		resp, err := r.ask(ctx, regionpb.LeasePlace(ids[0]), func(d *pdpb.Descriptor) *regionpb.ReadRequest {
			here, others = nil, nil
			for _, id := range ids {
				if d.Span.Contains(regionpb.LeasePlace(id)) {
					here = append(here, id)
				} else {
					others = append(others, id)
				}
			}
			return &regionpb.ReadRequest{Cut: p.cut, Rev: p.rev, Span: d.Span, Leases: true, Of: here}
		})
		if err != nil {
			return nil, err
		}
		if resp.Count < 1 || resp.Count > int64(len(here)) {
			return nil, fmt.Errorf("%w: %d of %d leases", errInvalid, resp.Count, len(here))
		}
		for _, kv := range resp.KVs {
			l, err := leaseOf(kv)
			if err != nil {
				return nil, err
			}
			out[l.ID] = l.Record
		}
		ids = append(here[resp.Count:], others...)
	}
	return out, nil
}

// attached calls fn with the keys of a span that are attached to leases now, which is at the point or
// later, until it returns an error.
func (r *Router) attached(ctx context.Context, p point, span mvcc.Span, ids []int64, fn func(lease int64, key []byte) error) error {
	for len(ids) > 0 && !span.Empty() {
		var clip mvcc.Span // what one region has of the span
		resp, err := r.ask(ctx, span.Start, func(d *pdpb.Descriptor) *regionpb.ReadRequest {
			clip = span.Intersect(d.Span)
			return &regionpb.ReadRequest{Cut: p.cut, Span: clip, Of: ids, MaxBytes: r.opts.PageBytes}
		})
		if err != nil {
			return err
		}
		n := int(resp.Count)
		if n < 0 || n > len(ids) {
			return fmt.Errorf("%w: keys of %d of %d leases", errInvalid, n, len(ids))
		}
		for _, kv := range resp.KVs {
			if kv.Lease == 0 {
				return fmt.Errorf("%w: a key of no lease", errInvalid)
			}
			if err := fn(kv.Lease, kv.Key); err != nil {
				return err
			}
		}
		if n == 0 { // it has more keys than one reply holds
			for s := r.scan(p.view(0), selection{lease: ids[0]}, clip); !s.done; {
				kvs, err := s.next(ctx, 0)
				if err != nil {
					return err
				}
				for _, kv := range kvs {
					if err := fn(ids[0], kv.Key); err != nil {
						return err
					}
				}
			}
			n = 1
		}
		if err := r.attached(ctx, p, clip, ids[n:], fn); err != nil {
			return err
		}
		if clip.End == nil {
			return nil
		}
		span.Start = clip.End
	}
	return nil
}

// ask reads once from the region that owns a key, of which req is told, and again while nothing was read.
func (r *Router) ask(ctx context.Context, key []byte, req func(d *pdpb.Descriptor) *regionpb.ReadRequest) (*regionpb.ReadResponse, error) {
	for b := r.backoff(); ; {
		err := error(ErrNoRegion)
		if d, ok := find(r.oracle.Regions(), key); ok {
			q := req(d)
			q.Region, q.Epoch = d.ID, d.Epoch
			var resp *regionpb.ReadResponse
			if resp, err = r.stores.Read(ctx, *d, q); err == nil {
				return resp, nil
			}
			err = raced(err)
		}
		if !readAgain(err) {
			return nil, err
		}
		if werr := b.wait(ctx); werr != nil {
			return nil, werr
		}
	}
}

// leaseWrite is where a write with a command on a lease goes.
func leaseWrite(regions []pdpb.Descriptor, c *regionpb.LeaseCommand) (*pdpb.Descriptor, error) {
	place := regionpb.LeasePlace(c.ID)
	if c.Op == regionpb.LeaseAttach {
		place = c.Span.Start
	}
	d, ok := find(regions, place)
	if !ok {
		return nil, ErrNoRegion
	}
	return d, nil
}
