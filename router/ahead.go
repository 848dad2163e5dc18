package router

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/region/regionpb"
)

// ahead are single keys of one snapshot that a transaction will look at, read with one request for
// each region instead of one for each key. Nil says that a key does not exist.
type ahead map[string]*mvccpb.KeyValue

// wanted collects the keys to read ahead: whole, or without their values.
type wanted struct{ whole, bare [][]byte }

// compares adds the single keys that a transaction compares, inner ones too.
func (w *wanted) compares(req *pb.TxnRequest) {
	for _, c := range req.Compare {
		if len(c.RangeEnd) > 0 {
			continue
		}
		if bareCompare(c) {
			w.bare = append(w.bare, c.Key)
		} else {
			w.whole = append(w.whole, c.Key)
		}
	}
	for _, branch := range [...][]*pb.RequestOp{req.Success, req.Failure} {
		for _, op := range branch {
			if t := op.GetRequestTxn(); t != nil {
				w.compares(t)
			}
		}
	}
}

// puts adds the keys that are put on a way.
func (w *wanted) puts(way *path) {
	nested := way.nested
	for _, op := range way.ops {
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestPut:
			if p := o.RequestPut; p.PrevKv || p.IgnoreValue || p.IgnoreLease {
				w.whole = append(w.whole, p.Key)
			} else {
				w.bare = append(w.bare, p.Key)
			}
		case *pb.RequestOp_RequestTxn:
			w.puts(nested[0])
			nested = nested[1:]
		}
	}
}

// readAhead reads what is wanted; a key that is wanted both ways is read whole. Nothing is read for
// the sake of a single key.
func (r *Router) readAhead(ctx context.Context, v view, w wanted) (ahead, error) {
	if len(w.whole)+len(w.bare) < 2 {
		return nil, nil
	}
	a := ahead{}
	for _, part := range [...]struct {
		keys     [][]byte
		noValues bool
	}{{w.whole, false}, {w.bare, true}} {
		keys := slices.DeleteFunc(part.keys, func(k []byte) bool { _, ok := a[string(k)]; return ok })
		slices.SortFunc(keys, bytes.Compare)
		keys = slices.CompactFunc(keys, bytes.Equal)
		if err := r.readKeys(ctx, v, part.noValues, keys, a); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// readKeys reads ascending keys, several regions at a time.
func (r *Router) readKeys(ctx context.Context, v view, noValues bool, keys [][]byte, into ahead) error {
	regions := r.oracle.Regions()
	var groups [][][]byte
	for rest := keys; len(rest) > 0; {
		n := len(rest)
		if d, ok := find(regions, rest[0]); ok {
			n = keysOf(d.Span, rest)
		}
		groups = append(groups, rest[:n])
		rest = rest[n:]
	}
	found := make([][]*mvccpb.KeyValue, len(groups))
	if len(groups) == 1 {
		var err error
		if found[0], err = r.readGroup(ctx, v, noValues, groups[0]); err != nil {
			return err
		}
	} else if len(groups) > 1 {
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		var wg sync.WaitGroup
		var claim atomic.Int64
		for range min(r.opts.CountWorkers, len(groups)) {
			wg.Go(func() {
				for i := int(claim.Add(1)) - 1; i < len(groups); i = int(claim.Add(1)) - 1 {
					var err error
					if found[i], err = r.readGroup(ctx, v, noValues, groups[i]); err != nil {
						cancel(err)
						return
					}
				}
			})
		}
		wg.Wait()
		if err := context.Cause(ctx); err != nil {
			return err
		}
	}
	for _, k := range keys {
		into[string(k)] = nil
	}
	for _, kvs := range found {
		for _, kv := range kvs {
			into[string(kv.Key)] = kv
		}
	}
	return nil
}

// keysOf is how many of some ascending keys, of which the first is in the span, are in it.
func keysOf(s mvcc.Span, keys [][]byte) int {
	n := 1
	for n < len(keys) && s.Contains(keys[n]) {
		n++
	}
	return n
}

// readGroup reads keys that lie in one region, as far as is known: it looks for the region anew for
// every reply.
func (r *Router) readGroup(ctx context.Context, v view, noValues bool, keys [][]byte) (out []*mvccpb.KeyValue, err error) {
	for b := r.backoff(); len(keys) > 0; {
		kvs, rest, err := r.readKeysOnce(ctx, v, noValues, keys)
		switch {
		case err == nil:
			out, keys = append(out, kvs...), rest
		case !readAgain(err):
			return nil, err
		default:
			if werr := b.wait(ctx); werr != nil {
				return nil, werr
			}
		}
	}
	return out, nil
}

func (r *Router) readKeysOnce(ctx context.Context, v view, noValues bool, keys [][]byte) (kvs []*mvccpb.KeyValue, rest [][]byte, err error) {
	d, ok := find(r.oracle.Regions(), keys[0])
	if !ok {
		return nil, nil, ErrNoRegion
	}
	n := keysOf(d.Span, keys)
	last := keys[n-1]
	resp, err := r.stores.Read(ctx, *d, &regionpb.ReadRequest{
		Region: d.ID, Epoch: d.Epoch, Cut: v.cut, Rev: v.rev, Keys: keys[:n], NoValues: noValues, MaxBytes: r.opts.PageBytes,
		Span: mvcc.Span{Start: keys[0], End: append(append(make([]byte, 0, len(last)+1), last...), 0)},
	})
	if err != nil {
		return nil, nil, raced(err)
	}
	if resp.More {
		i, _ := slices.BinarySearchFunc(keys[:n], resp.Resume, bytes.Compare)
		if i == 0 {
			return nil, nil, fmt.Errorf("%w: region %d does not advance from %q", errInvalid, d.ID, keys[0])
		}
		n = i
	}
	return resp.KVs, keys[n:], nil
}
