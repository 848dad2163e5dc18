package router

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// view is one snapshot: reads of any regions through it agree with each other.
type view struct {
	cut pdpb.Cut
	rev mvcc.Revision
}

func (p point) view(rev mvcc.Revision) view { return view{cut: p.cut, rev: rev} }

// selection says what a scan returns.
type selection struct {
	keysOnly                             bool // neither value nor lease
	noValues                             bool
	minMod, maxMod, minCreate, maxCreate mvcc.Revision
	wantCount                            bool  // also count keys, filters and limit ignored
	leases                               bool  // records of leases instead of keys
	lease                                int64 // keys attached to this lease, if not 0
}

// scan walks a span in key order, one reply of one region at a time. It finds the region of its
// position anew for every reply, so that a region that splits or moves meanwhile does no harm.
type scan struct {
	r    *Router
	v    view
	sel  selection
	span mvcc.Span
	pos  []byte // everything of the span below has been read
	done bool

	count   int64  // keys in [span.Start, counted)
	counted []byte // nil with anyCount: up to the end of the key space
	// anyCount says that counted has a meaning.
	anyCount bool
}

func (r *Router) scan(v view, sel selection, span mvcc.Span) *scan {
	return &scan{r: r, v: v, sel: sel, span: span, pos: span.Start, done: span.Empty()}
}

// next returns the keys of one reply, at most limit when that is not 0. It may return none
// without being done.
func (s *scan) next(ctx context.Context, limit int64) ([]*mvccpb.KeyValue, error) {
	b := s.r.backoff()
	for {
		kvs, err := s.step(ctx, limit)
		if err == nil || !readAgain(err) {
			return kvs, err
		}
		if werr := b.wait(ctx); werr != nil {
			return nil, werr
		}
	}
}

func (s *scan) step(ctx context.Context, limit int64) ([]*mvccpb.KeyValue, error) {
	d, ok := find(s.r.oracle.Regions(), s.pos)
	if !ok {
		return nil, ErrNoRegion
	}
	clip := mvcc.Span{Start: s.pos, End: s.span.End}.Intersect(d.Span)
	wantCount := s.sel.wantCount
	if wantCount && s.anyCount && (s.counted == nil || bytes.Compare(s.pos, s.counted) < 0) {
		// A later reply of a part that is counted already. Were the region to have grown
		// since, it must not reach beyond that part without being counted.
		wantCount = false
		clip = clip.Intersect(mvcc.Span{Start: clip.Start, End: s.counted})
	}
	req := &regionpb.ReadRequest{
		Region: d.ID, Epoch: d.Epoch, Cut: s.v.cut, Rev: s.v.rev, Span: clip,
		Limit: limit, KeysOnly: s.sel.keysOnly, WantCount: wantCount, MaxBytes: s.r.opts.PageBytes,
		MinMod: s.sel.minMod, MaxMod: s.sel.maxMod, MinCreate: s.sel.minCreate, MaxCreate: s.sel.maxCreate,
		NoValues: s.sel.noValues, Leases: s.sel.leases, Lease: s.sel.lease,
	}
	resp, err := s.r.stores.Read(ctx, *d, req)
	if err != nil {
		return nil, raced(err)
	}
	if wantCount {
		s.count += resp.Count
		s.counted, s.anyCount = clip.End, true
	}
	switch {
	case resp.More:
		if bytes.Compare(resp.Resume, s.pos) <= 0 {
			return nil, fmt.Errorf("%w: region %d does not advance from %q", errInvalid, d.ID, s.pos)
		}
		s.pos = resp.Resume
	case resp.LimitHit:
		if len(resp.KVs) == 0 {
			return nil, fmt.Errorf("%w: region %d reached a limit of %d with no key", errInvalid, d.ID, limit)
		}
		last := resp.KVs[len(resp.KVs)-1].Key
		s.pos = append(append(make([]byte, 0, len(last)+1), last...), 0)
	case clip.End == nil:
		s.done = true
	default:
		s.pos = clip.End
	}
	if !s.done && s.span.End != nil && bytes.Compare(s.pos, s.span.End) >= 0 {
		s.done = true
	}
	return resp.KVs, nil
}

// total returns the number of keys of the whole span, counting what the scan has not reached.
func (s *scan) total(ctx context.Context) (int64, error) {
	if s.span.Empty() {
		return 0, nil
	}
	rest := s.span
	if s.anyCount {
		if s.counted == nil {
			return s.count, nil
		}
		rest.Start = s.counted
	}
	n, err := s.r.count(ctx, s.v, rest)
	return s.count + n, err
}

// raced translates a region's "compacted": the logical floor has been checked before, so it can
// only mean that removal was faster.
func raced(err error) error {
	if codeOf(err) == regionpb.Compacted {
		return errRaced
	}
	return err
}

// count returns the number of keys of a span, over several regions at a time.
func (r *Router) count(ctx context.Context, v view, span mvcc.Span) (int64, error) {
	regions := overlapping(r.oracle.Regions(), span)
	if len(regions) <= 1 {
		return r.countSpan(ctx, v, span)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		wg    sync.WaitGroup
		claim atomic.Int64
		sum   atomic.Int64
	)
	for range min(r.opts.CountWorkers, len(regions)) {
		wg.Go(func() {
			for i := int(claim.Add(1)) - 1; i < len(regions); i = int(claim.Add(1)) - 1 {
				n, err := r.countSpan(ctx, v, span.Intersect(regions[i].Span))
				if err != nil {
					cancel(err)
					return
				}
				sum.Add(n)
			}
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	return sum.Load(), nil
}

// countSpan counts on the caller's goroutine, region after region.
func (r *Router) countSpan(ctx context.Context, v view, span mvcc.Span) (int64, error) {
	var sum int64
	b := r.backoff()
	for !span.Empty() {
		n, next, err := r.countStep(ctx, v, span)
		switch {
		case err == nil:
			sum += n
			if next == nil {
				return sum, nil
			}
			span.Start = next
		case !readAgain(err):
			return 0, err
		default:
			if werr := b.wait(ctx); werr != nil {
				return 0, werr
			}
		}
	}
	return sum, nil
}

// countStep counts what one region has of the span, and says where to go on; nil is the end.
func (r *Router) countStep(ctx context.Context, v view, span mvcc.Span) (int64, []byte, error) {
	d, ok := find(r.oracle.Regions(), span.Start)
	if !ok {
		return 0, nil, ErrNoRegion
	}
	clip := span.Intersect(d.Span)
	resp, err := r.stores.Read(ctx, *d, &regionpb.ReadRequest{
		Region: d.ID, Epoch: d.Epoch, Cut: v.cut, Rev: v.rev, Span: clip, CountOnly: true, WantCount: true,
	})
	if err != nil {
		return 0, nil, raced(err)
	}
	if resp.More && bytes.Compare(resp.Resume, clip.Start) > 0 {
		return resp.Count, resp.Resume, nil
	}
	return resp.Count, clip.End, nil
}
