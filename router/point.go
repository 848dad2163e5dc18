package router

import (
	"context"
	"errors"
	"time"

	"braid/mvcc"
	"braid/pd/pdpb"
)

// point is where a read looks: the cut through which replicas must be complete (0: whatever is
// applied there), the revision that is current for this read, and the compaction floor.
type point struct {
	cut        pdpb.Cut
	rev, floor mvcc.Revision
	// patience bounds the wait for each replica; 0 waits as long as the request may take.
	patience time.Duration
}

// errRaced says that removal of old versions overtook a read whose revision had passed the check
// against the logical floor (C2). The read is repeated at a fresh point.
var errRaced = errors.New("router: removal of old versions overtook the read")

// racesMax bounds how often one request starts over because of errRaced.
const racesMax = 4

// resolve gives the revision that a plain range of etcd reads at: rev <= 0 is the current one.
func (p point) resolve(rev int64) (mvcc.Revision, error) {
	switch {
	case rev > int64(p.rev):
		return 0, future()
	case rev <= 0:
		return p.rev, nil
	case rev < int64(p.floor):
		return 0, compacted()
	}
	return mvcc.Revision(rev), nil
}

// checkInner is etcd's check of a range inside a transaction, which takes negative revisions
// literally.
func (p point) checkInner(rev int64) error {
	switch {
	case rev == 0:
		return nil
	case rev > int64(p.rev):
		return future()
	case rev < int64(p.floor):
		return compacted()
	}
	return nil
}

// readPoint asks the oracle until the request's time is up.
func (r *Router) readPoint(ctx context.Context) (point, error) {
	p, err := r.oracle.ReadPoint(ctx)
	if err != nil {
		for b := r.backoff(); err != nil; p, err = r.oracle.ReadPoint(ctx) {
			if !readAgain(err) {
				return point{}, err
			}
			if werr := b.wait(ctx); werr != nil {
				return point{}, werr
			}
		}
	}
	return point{cut: p.Cut, rev: p.Rev, floor: p.Floor}, nil
}

// at runs a read at a point: a confirmed one, or for a serializable read one that this node can
// serve by itself. It starts over when the read loses a race against removal; fn must therefore
// not have given anything away when it returns errRaced.
func (r *Router) at(ctx context.Context, serializable bool, spans []mvcc.Span, fn func(ctx context.Context, p point) error) error {
	for i := 0; ; i++ {
		var err error
		if serializable {
			err = r.atLocal(ctx, spans, fn)
		} else {
			var p point
			if p, err = r.readPoint(ctx); err == nil {
				err = fn(ctx, p)
			}
		}
		if !errors.Is(err, errRaced) {
			return err
		}
		if i+1 == racesMax {
			return compacted()
		}
	}
}

// errImpatient says that a local replica did not come up to a mark in time.
var errImpatient = errors.New("router: local replica is not complete through the mark")

// atLocal reads at the newest mark of this node. A node that is cut off may know the mark and
// lack the entries; then the read takes what its replicas have applied, at the lowest revision
// among them, so that it is one snapshot all the same.
func (r *Router) atLocal(ctx context.Context, spans []mvcc.Span, fn func(ctx context.Context, p point) error) error {
	m := r.oracle.Mark()
	if m.Rev > 0 {
		err := fn(ctx, point{cut: m.Cut, rev: m.Rev, floor: m.Floor, patience: r.opts.LocalWait})
		if !errors.Is(err, errImpatient) {
			return err
		}
	}
	p := point{rev: m.Rev, floor: m.Floor}
	first := true
	regions := r.oracle.Regions()
	for _, span := range spans {
		for _, d := range overlapping(regions, span) {
			clip := span.Intersect(d.Span)
			resp, err := r.probe(ctx, d, clip.Start, view{})
			if err != nil {
				return err
			}
			if first || resp.Rev < p.rev {
				p.rev, first = resp.Rev, false
			}
		}
	}
	return fn(ctx, p)
}
