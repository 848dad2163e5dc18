package router

import (
	"context"
	"errors"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
)

// ErrOvertaken says that an export could not be finished at any of the revisions at which it was begun,
// because old versions that it had not read yet were removed each time.
var ErrOvertaken = errors.New("router: compactions overtook the export each time it was begun")

// Export receives the store as it is at one revision: the living keys in the order of their keys, a
// page at a time, and the leases in no order. An error that it returns ends the export.
type Export interface {
	// Begin comes first. It comes again when removal of old versions overtook the export; then all
	// that came before is void.
	Begin(rev mvcc.Revision) error
	// Keys may keep what it is given.
	Keys(page []*mvccpb.KeyValue) error
	// Lease says what a lease was granted and what of it was left at its last checkpoint, 0 for all,
	// in seconds.
	Lease(id, ttl, remaining int64) error
}

// Export reads the whole store at one revision, that of a read point taken at the beginning, in pages.
// It has no deadline but for each page: it takes as long as there is data, and as its receiver takes.
func (r *Router) Export(ctx context.Context, to Export) error {
	for range racesMax {
		if err := r.export(ctx, to); !errors.Is(err, errRaced) {
			return settle(ctx, err)
		}
	}
	return ErrOvertaken
}

// exportedLease is what an export must know of a lease.
type exportedLease struct {
	ttl, remaining int64
	given          bool
}

func (r *Router) export(ctx context.Context, to Export) error {
	// Records of leases have no versions, so they are read as they are now. One that ended between the
	// read point and its reading is still on keys at that point, hence the reading before. What was
	// granted after that, and ended before the second one, costs a new beginning.
	p, err := r.exportPoint(ctx)
	if err != nil {
		return err
	}
	before, err := r.exportLeases(ctx, p)
	if err != nil {
		return err
	}
	if p, err = r.exportPoint(ctx); err != nil {
		return err
	}
	if err := to.Begin(p.rev); err != nil {
		return err
	}
	leases, err := r.exportLeases(ctx, p)
	if err != nil {
		return err
	}
	give := func(id int64, l *exportedLease) error {
		if l.given {
			return nil
		}
		l.given = true
		return to.Lease(id, l.ttl, l.remaining)
	}
	for id, l := range leases {
		if err := give(id, l); err != nil {
			return err
		}
	}
	for s := r.scan(p.view(p.rev), selection{}, mvcc.Span{}); !s.done; {
		page, err := r.exportPage(ctx, s)
		if err != nil {
			return err
		}
		for _, kv := range page {
			if kv.Lease == 0 || leases[kv.Lease] != nil {
				continue
			}
			l := before[kv.Lease]
			if l == nil {
				return errRaced
			}
			if err := give(kv.Lease, l); err != nil {
				return err
			}
		}
		if len(page) == 0 {
			continue
		}
		if err := to.Keys(page); err != nil {
			return err
		}
	}
	return nil
}

func (r *Router) exportPoint(ctx context.Context) (point, error) {
	ctx, cancel := r.deadline(ctx)
	defer cancel()
	return r.readPoint(ctx)
}

// exportPage is one reply of a scan.
func (r *Router) exportPage(ctx context.Context, s *scan) ([]*mvccpb.KeyValue, error) {
	ctx, cancel := r.deadline(ctx)
	defer cancel()
	return s.next(ctx, 0)
}

// exportLeases reads the leases that there are at a point or later.
func (r *Router) exportLeases(ctx context.Context, p point) (map[int64]*exportedLease, error) {
	leases := map[int64]*exportedLease{}
	for s := r.scan(p.view(p.rev), selection{leases: true}, mvcc.Span{}); !s.done; {
		page, err := r.exportPage(ctx, s)
		if err != nil {
			return nil, err
		}
		for _, kv := range page {
			l, err := leaseOf(kv)
			if err != nil {
				return nil, err
			}
			leases[l.ID] = &exportedLease{ttl: l.Record.TTL, remaining: l.Record.Remaining}
		}
	}
	return leases, nil
}
