package router

import (
	"context"
	"errors"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// point is where a read looks: the cut through which replicas must be complete (0: whatever is
// applied there), the revision that is current for this read, and the compaction floor.
type point struct {
	cut        pdpb.Cut
	rev, floor mvcc.Revision
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
				r.told.raise(int64(p.rev))
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

// atLocal reads at the newest mark of this node, once that has come up to what the node has told and
// the replicas are complete through it; what is complete stays so, and the read itself needs no
// further care. A node that is cut off may know
// the mark and lack the entries; then, after some patience, the read takes what its replicas have
// applied, at the lowest revision among them, so that it is one snapshot all the same.
func (r *Router) atLocal(ctx context.Context, spans []mvcc.Span, fn func(ctx context.Context, p point) error) error {
	m := r.oracle.Mark()
	if told := mvcc.Revision(r.told.rev.Load()); m.Rev < told {
		wctx, cancel := context.WithTimeout(ctx, r.opts.LocalWait)
		err := r.oracle.WaitRevision(wctx, told)
		late := wctx.Err() != nil && ctx.Err() == nil
		cancel()
		if err != nil && !late {
			return err
		}
		m = r.oracle.Mark()
	}
	if m.Rev > 0 {
		wctx, cancel := context.WithTimeout(ctx, r.opts.LocalWait)
		_, _, err := r.visit(wctx, spans, view{cut: m.Cut, rev: m.Rev})
		late := wctx.Err() != nil && ctx.Err() == nil
		cancel()
		if err == nil {
			return fn(ctx, point{cut: m.Cut, rev: m.Rev, floor: m.Floor})
		}
		if !late {
			return err
		}
	}
	p := point{rev: m.Rev, floor: m.Floor}
	rev, any, err := r.visit(ctx, spans, view{})
	if err != nil {
		return err
	}
	if any {
		p.rev = rev
	}
	return fn(ctx, p)
}

// visit asks every region of some spans for next to nothing in a view, which waits until its
// replica can serve the view, and returns the lowest revision that an answer carried.
func (r *Router) visit(ctx context.Context, spans []mvcc.Span, v view) (rev mvcc.Revision, any bool, err error) {
	for _, span := range spans {
		for !span.Empty() {
			at, next, err := r.touch(ctx, span.Start, v)
			if err != nil {
				return 0, false, err
			}
			if !any || at < rev {
				rev, any = at, true
			}
			if next == nil {
				break
			}
			span.Start = next
		}
	}
	return rev, any, nil
}

// touch reads one key without its value, the cheapest read there is. It returns the revision that
// was read and where the next region starts, nil at the end of the key space.
func (r *Router) touch(ctx context.Context, key []byte, v view) (mvcc.Revision, []byte, error) {
	for b := r.backoff(); ; {
		err := error(ErrNoRegion)
		if d, ok := find(r.oracle.Regions(), key); ok {
			var resp *regionpb.ReadResponse
			resp, err = r.stores.Read(ctx, *d, &regionpb.ReadRequest{
				Region: d.ID, Epoch: d.Epoch, Cut: v.cut, Rev: v.rev, Span: mvcc.Key(key), KeysOnly: true,
			})
			if err == nil {
				return resp.Rev, d.Span.End, nil
			}
			err = raced(err)
		}
		if !readAgain(err) {
			return 0, nil, err
		}
		if werr := b.wait(ctx); werr != nil {
			return 0, nil, werr
		}
	}
}
