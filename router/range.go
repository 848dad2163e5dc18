package router

import (
	"context"
	"math"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/mvcc/etcdrule"
)

// Range answers a range over any number of regions, at one revision. The response's header holds
// only the revision.
func (r *Router) Range(ctx context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	rctx, cancel := r.deadline(ctx)
	defer cancel()
	span := rangeSpan(req.Key, req.RangeEnd)
	var resp *pb.RangeResponse
	err := r.at(rctx, req.Serializable, []mvcc.Span{span}, func(ctx context.Context, p point) error {
		rev, err := p.resolve(req.Revision)
		if err != nil {
			return err
		}
		resp, err = r.rangeAt(ctx, req, p, rev)
		return err
	})
	if err != nil {
		return nil, settle(ctx, err)
	}
	return resp, nil
}

func selectionOf(req *pb.RangeRequest) selection {
	return selection{
		keysOnly:  etcdrule.KeysFromIndex(req),
		minMod:    mvcc.Revision(req.MinModRevision),
		maxMod:    mvcc.Revision(req.MaxModRevision),
		minCreate: mvcc.Revision(req.MinCreateRevision),
		maxCreate: mvcc.Revision(req.MaxCreateRevision),
	}
}

// rangeAt evaluates a range that has passed the checks of its revision.
func (r *Router) rangeAt(ctx context.Context, req *pb.RangeRequest, p point, rev mvcc.Revision) (*pb.RangeResponse, error) {
	resp := &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: int64(p.rev)}}
	span := rangeSpan(req.Key, req.RangeEnd)
	v := p.view(rev)
	if req.CountOnly {
		var err error
		resp.Count, err = r.count(ctx, v, span)
		return resp, err
	}
	sel := selectionOf(req)
	c := collector{order: etcdrule.OrderOf(req)}
	limited := req.Limit > 0 && req.Limit < math.MaxInt64
	if limited {
		c.limit = req.Limit
	}
	// Where nothing is left out, what was read is the count.
	sel.wantCount = limited || etcdrule.HasRevisionFilters(req)
	// The limit ends the walk only where etcd applies it before sorting.
	early := limited && etcdrule.KeyOrder(req) && (c.order.Natural() || !etcdrule.HasRevisionFilters(req))
	// A serializable read may be of a state that is not quite that of its revision.
	paged := early && c.order.Natural() && !etcdrule.HasRevisionFilters(req) && !req.Serializable
	counted := false
	if paged {
		if resp.Count, counted = r.counts.get(span, rev); counted {
			sel.wantCount = false
		}
	}
	s := r.scan(v, sel, span)
	for !s.done {
		var stop int64 // at most so many more keys; one beyond the limit shows that there is more
		if early {
			if stop = req.Limit + 1 - int64(len(c.kvs)); stop <= 0 {
				break
			}
		}
		kvs, err := s.next(ctx, stop)
		if err != nil {
			return nil, err
		}
		c.add(kvs)
	}
	var err error
	switch {
	case counted:
	case sel.wantCount:
		if resp.Count, err = s.total(ctx); err != nil {
			return nil, err
		}
	default:
		resp.Count = c.seen
	}
	resp.Kvs, resp.More = c.result()
	if n := len(resp.Kvs); paged && resp.More {
		last := resp.Kvs[n-1].Key
		rest := mvcc.Span{Start: append(append(make([]byte, 0, len(last)+1), last...), 0), End: span.End}
		r.counts.put(rest, rev, resp.Count-int64(n))
	}
	if req.KeysOnly {
		dropValues(resp.Kvs)
	}
	return resp, nil
}

func dropValues(kvs []*mvccpb.KeyValue) {
	for _, kv := range kvs {
		kv.Value = nil
	}
}
