package router

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// Txn executes a transaction. One that cannot write is evaluated at a read point, over any number
// of regions, without locks. Headers hold only revisions.
func (r *Router) Txn(ctx context.Context, req *pb.TxnRequest) (*pb.TxnResponse, error) {
	reads := onlyReads(req)
	if !reads && !namesRevision(req) {
		return r.write(ctx, &regionpb.WriteRequest{Txn: req, IfWrites: compares(req)})
	}
	rctx, cancel := r.deadline(ctx)
	defer cancel()
	var resp *pb.TxnResponse
	var err error
	if reads {
		resp, err = r.readTxn(rctx, req)
	} else {
		resp, err = r.writeAtPoint(rctx, req)
	}
	if err != nil {
		return nil, settle(ctx, err)
	}
	return resp, nil
}

// Put stores one key. The response's header holds only the revision.
func (r *Router) Put(ctx context.Context, req *pb.PutRequest) (*pb.PutResponse, error) {
	tresp, err := r.write(ctx, regionpb.NewPut(req))
	if err != nil {
		return nil, err
	}
	resp := only(tresp).GetResponsePut()
	if resp == nil {
		return nil, fmt.Errorf("%w: a put was answered by something else", errInvalid)
	}
	resp.Header = tresp.Header
	return resp, nil
}

// DeleteRange deletes the keys of a range, at one revision. The response's header holds only the
// revision.
func (r *Router) DeleteRange(ctx context.Context, req *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	tresp, err := r.write(ctx, &regionpb.WriteRequest{Txn: &pb.TxnRequest{Success: []*pb.RequestOp{
		{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: req}},
	}}})
	if err != nil {
		return nil, err
	}
	resp := only(tresp).GetResponseDeleteRange()
	if resp == nil {
		return nil, fmt.Errorf("%w: a range deletion was answered by something else", errInvalid)
	}
	resp.Header = tresp.Header
	return resp, nil
}

// only returns the one response of a transaction of one operation, nil if it is not one.
func only(resp *pb.TxnResponse) *pb.ResponseOp {
	if len(resp.Responses) != 1 {
		return nil
	}
	return resp.Responses[0]
}

// write executes a write within the time of a request. Nearly all succeed at the first try, for which
// there is no timer.
func (r *Router) write(ctx context.Context, w *regionpb.WriteRequest) (*pb.TxnResponse, error) {
	began := time.Now()
	resp, err := r.proposeOnce(ctx, r.expiries.of(began), w)
	if err == nil {
		r.told.raise(resp.Header.GetRevision())
		return resp, nil
	}
	rctx, cancel := context.WithDeadline(ctx, began.Add(r.opts.RequestTimeout))
	defer cancel()
	if resp, err = r.conclude(rctx, w, resp, err); err != nil {
		return nil, settle(ctx, err)
	}
	return resp, nil
}

// writeAtPoint executes a transaction that writes, and reads at a revision in between: it needs a
// leader that knows of every revision the client can know of (C-1).
func (r *Router) writeAtPoint(ctx context.Context, req *pb.TxnRequest) (*pb.TxnResponse, error) {
	p, err := r.readPoint(ctx)
	if err != nil {
		return nil, err
	}
	return r.propose(ctx, &regionpb.WriteRequest{Txn: req, Cut: p.cut})
}

// propose hands a write to the leader of its region, again and again as long as the answer says
// that it was not executed and the request's time lasts.
func (r *Router) propose(ctx context.Context, w *regionpb.WriteRequest) (*pb.TxnResponse, error) {
	resp, err := r.proposeOnce(ctx, nil, w)
	return r.conclude(ctx, w, resp, err)
}

// conclude takes the outcome of the first try of a write, and tries again as propose does.
func (r *Router) conclude(ctx context.Context, w *regionpb.WriteRequest, resp *pb.TxnResponse, err error) (*pb.TxnResponse, error) {
	tries := 0 // tokens that the last try had
	for b := r.backoff(); ; resp, err = r.proposeOnce(ctx, nil, w) {
		if codeOf(err) == regionpb.WritesNothing {
			// What its leader found is a moment of this request, and so is the point: if the branch that
			// is taken there reads only, that is the answer.
			if resp, err = r.readTxn(ctx, w.Txn); errors.Is(err, errWrites) {
				next := *w
				next.IfWrites = false
				w = &next
				continue
			}
		} else if errors.Is(err, errSeveral) {
			resp, err = r.attempts(ctx, &txnJob{r: r, req: w.Txn})
		} else if codeOf(err) == regionpb.LeaseSpread {
			resp, err = r.attempts(ctx, &revokeJob{r: r, leases: w.Lease.Leases(), term: w.Lease.Term})
		} else if t, ok := notRegistered(err); ok {
			txn := w.Txn
			if w, err = r.register(ctx, w, t); codeOf(err) == regionpb.LeaseNotFound && txn != nil && compares(txn) {
				// Whether that matters depends on the branch that is taken, which must be decided at the
				// point at which the lease does not exist.
				return r.decideWithLease(ctx, txn, t.Lease)
			} else if err != nil {
				return nil, err
			}
			if len(w.Tokens) == tries {
				// Somebody ends the lease, or there is a new leader.
				if werr := b.wait(ctx); werr != nil {
					return nil, werr
				}
			}
			tries = len(w.Tokens)
			continue
		} else if err != nil && notExecuted(err) {
			if werr := b.wait(ctx); werr != nil {
				return nil, werr
			}
			// What was handed over may still be in somebody's hands.
			next := *w
			w = &next
			continue
		}
		if err == nil {
			r.told.raise(resp.Header.GetRevision())
		}
		return resp, err
	}
}

// decideWithLease executes a transaction of one region with the record of a lease locked beside.
func (r *Router) decideWithLease(ctx context.Context, req *pb.TxnRequest, lease int64) (*pb.TxnResponse, error) {
	resp, err := r.attempts(ctx, &txnJob{r: r, req: req, homes: []int64{lease}})
	if err == nil {
		r.told.raise(resp.Header.GetRevision())
	}
	return resp, err
}

func (r *Router) proposeOnce(ctx context.Context, expired <-chan struct{}, w *regionpb.WriteRequest) (*pb.TxnResponse, error) {
	var d *pdpb.Descriptor
	var err error
	if w.Lease != nil {
		d, err = leaseWrite(r.oracle.Regions(), w.Lease)
	} else {
		d, err = place(r.oracle.Regions(), w.Txn)
	}
	if err != nil {
		return nil, err
	}
	w.Region, w.Epoch = d.ID, d.Epoch
	resp, err := r.stores.Write(ctx, expired, *d, w)
	if err != nil {
		return nil, unknown(err)
	}
	return resp, nil
}

// errWrites says that a transaction takes a branch that may write.
var errWrites = errors.New("router: the transaction writes")

// readTxn evaluates a transaction at one read point; with errWrites when it takes a branch that may write.
func (r *Router) readTxn(ctx context.Context, req *pb.TxnRequest) (*pb.TxnResponse, error) {
	serializable := serializableTxn(req)
	var resp *pb.TxnResponse
	err := r.at(ctx, serializable, spans(nil, req), func(ctx context.Context, p point) error {
		path, err := r.decide(ctx, p, req)
		if err != nil {
			return err
		}
		if path.writes() {
			return errWrites
		}
		if err := path.check(p); err != nil {
			return err
		}
		if resp, err = r.execute(ctx, p, path); err != nil {
			return err
		}
		resp.Header.Revision = int64(p.rev)
		return nil
	})
	return resp, err
}

// path is the way a transaction takes: all compares, nested ones too, are decided on the state
// before it, so it is known before the first operation runs.
type path struct {
	succeeded bool
	ops       []*pb.RequestOp
	nested    []*path // one for each operation of ops that is a transaction, in order
}

func (r *Router) decide(ctx context.Context, p point, req *pb.TxnRequest) (*path, error) {
	var w wanted
	w.compares(req)
	a, err := r.readAhead(ctx, p.view(p.rev), w)
	if err != nil {
		return nil, err
	}
	return r.follow(ctx, p, a, req)
}

func (r *Router) follow(ctx context.Context, p point, a ahead, req *pb.TxnRequest) (*path, error) {
	ok, err := r.compares(ctx, p.view(p.rev), a, req.Compare)
	if err != nil {
		return nil, err
	}
	way := &path{succeeded: ok, ops: req.Failure}
	if ok {
		way.ops = req.Success
	}
	for _, op := range way.ops {
		if o, is := op.Request.(*pb.RequestOp_RequestTxn); is {
			n, err := r.follow(ctx, p, a, o.RequestTxn)
			if err != nil {
				return nil, err
			}
			way.nested = append(way.nested, n)
		}
	}
	return way, nil
}

// writes says whether anything on the way taken may write.
func (w *path) writes() bool {
	for _, op := range w.ops {
		switch op.Request.(type) {
		case *pb.RequestOp_RequestPut, *pb.RequestOp_RequestDeleteRange:
			return true
		}
	}
	return slices.ContainsFunc(w.nested, (*path).writes)
}

// check looks at the revisions on the way taken before anything is read.
func (w *path) check(p point) error {
	nested := w.nested
	for _, op := range w.ops {
		var err error
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			err = p.checkInner(o.RequestRange.Revision)
		case *pb.RequestOp_RequestTxn:
			err = nested[0].check(p)
			nested = nested[1:]
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *Router) execute(ctx context.Context, p point, w *path) (*pb.TxnResponse, error) {
	resp := &pb.TxnResponse{
		Header:    &pb.ResponseHeader{},
		Succeeded: w.succeeded,
		Responses: make([]*pb.ResponseOp, len(w.ops)),
	}
	nested := w.nested
	for i, op := range w.ops {
		out := &pb.ResponseOp{}
		resp.Responses[i] = out
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			rev, err := p.resolve(o.RequestRange.Revision)
			if err != nil {
				return nil, err
			}
			rr, err := r.rangeAt(ctx, o.RequestRange, p, rev)
			if err != nil {
				return nil, err
			}
			out.Response = &pb.ResponseOp_ResponseRange{ResponseRange: rr}
		case *pb.RequestOp_RequestTxn:
			tr, err := r.execute(ctx, p, nested[0])
			if err != nil {
				return nil, err
			}
			nested = nested[1:]
			out.Response = &pb.ResponseOp_ResponseTxn{ResponseTxn: tr}
		}
	}
	return resp, nil
}
