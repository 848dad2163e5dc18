package router

import (
	"bytes"
	"context"
	"math"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/mvcc/etcdrule"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// evaluation is a transaction over several regions that may write, evaluated at one read point
// while everything it names is locked. Its own revision is not known before it is committed, so
// what the answer shows of it is filled in afterwards (fill); no effect depends on it, because a
// transaction's compares and checks look at the state before it.
type evaluation struct {
	r *Router
	p point

	puts    ahead // what the keys that are put were before
	resp    *pb.TxnResponse
	effects []regionpb.Effect     // in the order in which the transaction names them (R1)
	changed bool                  // there are some
	bytes   int                   // of them
	parts   map[pdpb.RegionID]int // the same by region, once bytes is above the limit of one
	own     map[string]*mvccpb.KeyValue
	written [][]byte // keys of own, ascending; nil in own says deleted

	homes         []int64 // leases whose records are locked
	attachable    map[leaseAt]bool
	before, after []*int64 // places for the revision before the transaction, and for its own
	late          []ownRange
}

// ownRev stands for the transaction's own revision while it is unknown: it is above every other.
const ownRev = math.MaxInt64

// ownRange is a range that saw what the transaction wrote before: its filters, order and limit
// wait for the revision.
type ownRange struct {
	resp *pb.RangeResponse
	req  *pb.RangeRequest
	kvs  []*mvccpb.KeyValue
}

// evaluate runs a transaction at a point. Errors are the answer, or those of reading.
func (r *Router) evaluate(ctx context.Context, p point, req *pb.TxnRequest, homes []int64) (*evaluation, error) {
	e := &evaluation{r: r, p: p, own: map[string]*mvccpb.KeyValue{}, homes: homes}
	way, err := r.decide(ctx, p, req)
	if err != nil {
		return nil, err
	}
	var w wanted
	w.puts(way)
	if e.puts, err = r.readAhead(ctx, p.view(p.rev), w); err != nil {
		return nil, err
	}
	if err := e.check(ctx, way); err != nil {
		return nil, err
	}
	if e.resp, err = e.execute(ctx, way); err != nil {
		return nil, err
	}
	e.resp.Header = &pb.ResponseHeader{}
	e.stamp(&e.resp.Header.Revision)
	return e, nil
}

// check looks for what makes the transaction fail as a whole; first error wins.
func (e *evaluation) check(ctx context.Context, w *path) error {
	nested := w.nested
	for _, op := range w.ops {
		var err error
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			err = e.p.checkInner(o.RequestRange.Revision)
		case *pb.RequestOp_RequestPut:
			err = e.checkPut(ctx, o.RequestPut)
		case *pb.RequestOp_RequestTxn:
			err = e.check(ctx, nested[0])
			nested = nested[1:]
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (e *evaluation) checkPut(ctx context.Context, req *pb.PutRequest) error {
	if req.Lease != 0 {
		if err := e.checkLease(ctx, req.Key, req.Lease); err != nil {
			return err
		}
	}
	if req.IgnoreValue || req.IgnoreLease {
		kv, err := e.get(ctx, req.Key)
		if err == nil && kv == nil {
			err = regionpb.ErrorOf(regionpb.KeyNotFound)
		}
		return err
	}
	return nil
}

func (e *evaluation) execute(ctx context.Context, w *path) (*pb.TxnResponse, error) {
	resp := &pb.TxnResponse{Header: &pb.ResponseHeader{}, Succeeded: w.succeeded}
	if len(w.ops) > 0 {
		resp.Responses = make([]*pb.ResponseOp, len(w.ops))
	}
	nested := w.nested
	for i, op := range w.ops {
		out := &pb.ResponseOp{}
		resp.Responses[i] = out
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			rr, err := e.rangeOp(ctx, o.RequestRange)
			if err != nil {
				return nil, err
			}
			out.Response = &pb.ResponseOp_ResponseRange{ResponseRange: rr}
		case *pb.RequestOp_RequestPut:
			pr, err := e.put(ctx, o.RequestPut)
			if err != nil {
				return nil, err
			}
			out.Response = &pb.ResponseOp_ResponsePut{ResponsePut: pr}
		case *pb.RequestOp_RequestDeleteRange:
			dr, err := e.deleteRange(ctx, o.RequestDeleteRange)
			if err != nil {
				return nil, err
			}
			out.Response = &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: dr}
		case *pb.RequestOp_RequestTxn:
			tr, err := e.execute(ctx, nested[0])
			if err != nil {
				return nil, err
			}
			nested = nested[1:]
			out.Response = &pb.ResponseOp_ResponseTxn{ResponseTxn: tr}
		}
	}
	return resp, nil
}

// stamp makes *dst the revision as of this moment of the transaction: its own once it has changed
// something, the one before it until then.
func (e *evaluation) stamp(dst *int64) {
	if e.changed {
		e.after = append(e.after, dst)
	} else {
		e.before = append(e.before, dst)
	}
}

// show returns a copy of what a key is for an answer.
func (e *evaluation) show(kv *mvccpb.KeyValue) *mvccpb.KeyValue {
	out := &mvccpb.KeyValue{Key: kv.Key, Value: kv.Value, CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision, Version: kv.Version, Lease: kv.Lease}
	if out.ModRevision == ownRev {
		e.after = append(e.after, &out.ModRevision)
	}
	if out.CreateRevision == ownRev {
		e.after = append(e.after, &out.CreateRevision)
	}
	return out
}

// get returns a key that is put as the transaction sees it, nil when there is none. Value and lease
// are there if the put needs them.
func (e *evaluation) get(ctx context.Context, key []byte) (*mvccpb.KeyValue, error) {
	if kv, ok := e.own[string(key)]; ok {
		return kv, nil
	}
	if kv, ok := e.puts[string(key)]; ok {
		return kv, nil
	}
	s := e.r.scan(e.p.view(e.p.rev), selection{}, mvcc.Key(key))
	for !s.done {
		kvs, err := s.next(ctx, 0)
		if err != nil {
			return nil, err
		}
		if len(kvs) > 0 {
			return kvs[0], nil
		}
	}
	return nil, nil
}

// write makes an effect visible to what follows; nil kv deletes. It fails when the part of the key's
// region has become larger than a region takes: it would be refused there, after all of it was read.
func (e *evaluation) write(f regionpb.Effect, kv *mvccpb.KeyValue) error {
	e.effects, e.changed = append(e.effects, f), true
	e.bytes += f.Size()
	switch {
	case e.bytes <= e.r.opts.PartBytesMax:
	case e.parts == nil:
		e.parts = map[pdpb.RegionID]int{}
		for i := range e.effects {
			if err := e.count(&e.effects[i]); err != nil {
				return err
			}
		}
	default:
		if err := e.count(&f); err != nil {
			return err
		}
	}
	if _, ok := e.own[string(f.Key)]; !ok {
		i, _ := slices.BinarySearchFunc(e.written, f.Key, bytes.Compare)
		e.written = slices.Insert(e.written, i, f.Key)
	}
	e.own[string(f.Key)] = kv
	return nil
}

// count adds an effect to the part of its region.
func (e *evaluation) count(f *regionpb.Effect) error {
	d, ok := find(e.r.oracle.Regions(), f.Key)
	if !ok {
		return ErrNoRegion
	}
	if e.parts[d.ID] += f.Size(); e.parts[d.ID] > e.r.opts.PartBytesMax {
		return regionpb.ErrorOf(regionpb.TooLarge)
	}
	return nil
}

func (e *evaluation) put(ctx context.Context, req *pb.PutRequest) (*pb.PutResponse, error) {
	resp := &pb.PutResponse{Header: &pb.ResponseHeader{}}
	prev, err := e.get(ctx, req.Key)
	if err != nil {
		return nil, err
	}
	next := &mvccpb.KeyValue{Key: req.Key, Value: req.Value, Lease: req.Lease, Version: 1, CreateRevision: ownRev, ModRevision: ownRev}
	f := regionpb.Effect{Key: req.Key, CreateKind: regionpb.CreateNew}
	if prev != nil {
		next.Version, next.CreateRevision = prev.Version+1, prev.CreateRevision
		if prev.CreateRevision != ownRev {
			f.CreateKind, f.Create = regionpb.CreateKnown, mvcc.Revision(prev.CreateRevision)
		}
		if req.IgnoreValue {
			next.Value = prev.Value
		}
		if req.IgnoreLease {
			next.Lease = prev.Lease
		}
		if req.PrevKv {
			resp.PrevKv = e.show(prev)
		}
	}
	f.Version, f.Value, f.Lease = next.Version, next.Value, next.Lease
	if prev != nil && prev.Lease != next.Lease {
		f.Detach = prev.Lease
	}
	if err := e.write(f, next); err != nil {
		return nil, err
	}
	e.stamp(&resp.Header.Revision)
	return resp, nil
}

func (e *evaluation) deleteRange(ctx context.Context, req *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	resp := &pb.DeleteRangeResponse{Header: &pb.ResponseHeader{}}
	// Values are not needed without PrevKv, but leases are.
	err := e.each(ctx, selection{noValues: !req.PrevKv}, rangeSpan(req.Key, req.RangeEnd), func(kv *mvccpb.KeyValue) error {
		if req.PrevKv {
			resp.PrevKvs = append(resp.PrevKvs, e.show(kv))
		}
		resp.Deleted++
		return e.write(regionpb.Effect{Key: kv.Key, Delete: true, Detach: kv.Lease}, nil)
	})
	if err != nil {
		return nil, err
	}
	e.stamp(&resp.Header.Revision)
	return resp, nil
}

// ownIn returns the keys of a span that the transaction wrote.
func (e *evaluation) ownIn(span mvcc.Span) [][]byte {
	i, _ := slices.BinarySearchFunc(e.written, span.Start, bytes.Compare)
	j := len(e.written)
	if span.End != nil {
		j, _ = slices.BinarySearchFunc(e.written, span.End, bytes.Compare)
	}
	return e.written[i:max(i, j)]
}

// each calls fn with the keys of a span as the transaction sees them, in order. fn may write what it
// was called with.
func (e *evaluation) each(ctx context.Context, sel selection, span mvcc.Span, fn func(*mvccpb.KeyValue) error) error {
	own := slices.Clone(e.ownIn(span))
	// before gives out what the transaction wrote up to key; nil means everything that is left.
	before := func(key []byte) error {
		for len(own) > 0 && (key == nil || bytes.Compare(own[0], key) <= 0) {
			if kv := e.own[string(own[0])]; kv != nil {
				if err := fn(kv); err != nil {
					return err
				}
			}
			own = own[1:]
		}
		return nil
	}
	s := e.r.scan(e.p.view(e.p.rev), sel, span)
	for !s.done {
		kvs, err := s.next(ctx, 0)
		if err != nil {
			return err
		}
		for _, kv := range kvs {
			if err := before(kv.Key); err != nil {
				return err
			}
			if _, hidden := e.own[string(kv.Key)]; hidden {
				continue
			}
			if err := fn(kv); err != nil {
				return err
			}
		}
	}
	return before(nil)
}

// rangeOp runs a range. Only one that meets what the transaction wrote needs more than the point.
func (e *evaluation) rangeOp(ctx context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	span := rangeSpan(req.Key, req.RangeEnd)
	if req.Revision > 0 || len(e.ownIn(span)) == 0 {
		rev, err := e.p.resolve(req.Revision)
		if err != nil {
			return nil, err
		}
		resp, err := e.r.rangeAt(ctx, req, e.p, rev)
		if err != nil {
			return nil, err
		}
		e.stamp(&resp.Header.Revision)
		return resp, nil
	}
	resp := &pb.RangeResponse{Header: &pb.ResponseHeader{}}
	e.stamp(&resp.Header.Revision)
	sel := selectionOf(req)
	var kvs []*mvccpb.KeyValue
	err := e.each(ctx, selection{keysOnly: sel.keysOnly || req.CountOnly}, span, func(kv *mvccpb.KeyValue) error {
		resp.Count++
		if req.CountOnly {
			return nil
		}
		kv = e.show(kv)
		if sel.keysOnly {
			kv.Value, kv.Lease = nil, 0
		}
		kvs = append(kvs, kv)
		return nil
	})
	if err != nil || req.CountOnly {
		return resp, err
	}
	e.late = append(e.late, ownRange{resp, req, kvs})
	return resp, nil
}

// fill completes the answer of a transaction that was committed at rev, or, having no effects,
// that reads as of rev.
func (e *evaluation) fill(rev mvcc.Revision) *pb.TxnResponse {
	before := int64(rev)
	if e.changed {
		before--
	}
	for _, dst := range e.before {
		*dst = before
	}
	for _, dst := range e.after {
		*dst = int64(rev)
	}
	for i := range e.late {
		e.late[i].finish()
	}
	return e.resp
}

// finish filters, sorts and cuts, as rangeAt does while it reads.
func (l *ownRange) finish() {
	req, kvs := l.req, l.kvs
	if etcdrule.HasRevisionFilters(req) {
		kvs = slices.DeleteFunc(kvs, func(kv *mvccpb.KeyValue) bool { return !etcdrule.Passes(req, kv.ModRevision, kv.CreateRevision) })
	}
	c := collector{order: etcdrule.OrderOf(req)}
	if req.Limit > 0 && req.Limit < math.MaxInt64 {
		c.limit = req.Limit
		// Where etcd applies the limit before sorting, one more than the limit is sorted.
		if early := etcdrule.KeyOrder(req) && (c.order.Natural() || !etcdrule.HasRevisionFilters(req)); early && int64(len(kvs)) > req.Limit+1 {
			kvs = kvs[:req.Limit+1]
		}
	}
	c.add(kvs)
	l.resp.Kvs, l.resp.More = c.result()
	if req.KeysOnly {
		dropValues(l.resp.Kvs)
	}
}
