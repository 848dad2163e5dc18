package router

import (
	"context"
	"errors"
	"math"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"braid/mvcc"
)

// chunkKeys is the number of keys in the first chunk of a stream, as in etcd.
const chunkKeys = 10

// RangeStream answers a range in chunks, read as they are sent, so that memory is bounded by the
// chunks and not by the answer. Only the last chunk has header, more and count. The request must
// neither sort nor filter by revision. send must have done with its argument when it returns.
func (r *Router) RangeStream(ctx context.Context, req *pb.RangeRequest, send func(*pb.RangeResponse) error) error {
	if req.CountOnly {
		resp, err := r.Range(ctx, req)
		if err != nil {
			return err
		}
		return send(resp)
	}
	if req.SortTarget != pb.RangeRequest_KEY {
		resp, err := r.Range(ctx, req)
		if err != nil {
			return err
		}
		return r.sendSorted(resp, send)
	}
	span := rangeSpan(req.Key, req.RangeEnd)
	started := false
	pctx, cancel := r.deadline(ctx)
	defer cancel()
	err := r.at(pctx, req.Serializable, []mvcc.Span{span}, func(_ context.Context, p point) error {
		rev, err := p.resolve(req.Revision)
		if err != nil {
			return err
		}
		st := stream{r: r, req: req, at: p, rev: rev, send: func(resp *pb.RangeResponse) error {
			started = true
			return send(resp)
		}}
		// The request's time bounds each chunk, not the stream: a slow client may take as
		// long as it likes.
		err = st.run(ctx, span)
		if started && errors.Is(err, errRaced) {
			return compacted() // what was sent cannot be taken back
		}
		return err
	})
	return settle(ctx, err)
}

type stream struct {
	r    *Router
	req  *pb.RangeRequest
	at   point
	rev  mvcc.Revision
	send func(*pb.RangeResponse) error
}

func (st *stream) run(ctx context.Context, span mvcc.Span) error {
	total := int64(math.MaxInt64)
	if st.req.Limit > 0 {
		total = st.req.Limit
	}
	s := st.r.scan(st.at.view(st.rev), selectionOf(st.req), span)
	chunk := min(chunkKeys, total)
	var sent int64
	var pending []*mvccpb.KeyValue
	for {
		var err error
		if pending, chunk, err = st.fill(ctx, s, pending, chunk); err != nil {
			return err
		}
		n := min(int64(len(pending)), chunk)
		out := &pb.RangeResponse{Kvs: pending[:n]}
		sent += n
		more := int64(len(pending)) > n
		if !more || sent == total {
			out.Header = &pb.ResponseHeader{Revision: int64(st.at.rev)}
			out.Count, out.More = sent, more
			if more {
				rest := mvcc.Span{Start: pending[n].Key, End: span.End}
				left, err := st.count(ctx, s.v, rest)
				if err != nil {
					return err
				}
				out.Count += left
			}
			return st.send(out)
		}
		chunk = min(nextChunk(chunk, proto.Size(out), st.r.opts.ChunkBytes), total-sent)
		if err := st.send(out); err != nil {
			return err
		}
		pending = append(pending[:0:0], pending[n:]...)
	}
}

// fill reads until there is one key more than the chunk takes, which shows that the chunk is not
// the last one. Where values turn out much larger than those before, it makes the chunk smaller.
func (st *stream) fill(ctx context.Context, s *scan, pending []*mvccpb.KeyValue, chunk int64) ([]*mvccpb.KeyValue, int64, error) {
	ctx, cancel := st.r.deadline(ctx)
	defer cancel()
	bytes := 0
	for _, kv := range pending {
		bytes += len(kv.Key) + len(kv.Value)
	}
	for !s.done && int64(len(pending)) <= chunk {
		kvs, err := s.next(ctx, chunk+1-int64(len(pending)))
		if err != nil {
			return nil, 0, err
		}
		if st.req.KeysOnly {
			dropValues(kvs)
		}
		for _, kv := range kvs {
			bytes += len(kv.Key) + len(kv.Value)
		}
		pending = append(pending, kvs...)
		if n := int64(len(pending)); !s.done && bytes > 2*st.r.opts.ChunkBytes && n > 1 && n <= chunk {
			return pending, n - 1, nil
		}
	}
	return pending, chunk, nil
}

func (st *stream) count(ctx context.Context, v view, span mvcc.Span) (int64, error) {
	ctx, cancel := st.r.deadline(ctx)
	defer cancel()
	return st.r.count(ctx, v, span)
}

// sendSorted sends an answer that is complete already in chunks of the usual sizes.
func (r *Router) sendSorted(resp *pb.RangeResponse, send func(*pb.RangeResponse) error) error {
	kvs := resp.Kvs
	for chunk := int64(chunkKeys); int64(len(kvs)) > chunk; {
		out := &pb.RangeResponse{Kvs: kvs[:chunk]}
		kvs = kvs[chunk:]
		chunk = nextChunk(chunk, proto.Size(out), r.opts.ChunkBytes)
		if err := send(out); err != nil {
			return err
		}
	}
	resp.Kvs = kvs
	return send(resp)
}

// nextChunk steers the number of keys of a chunk towards the wanted size, leaving it alone
// within half and twice that size, so that it does not swing.
func nextChunk(keys int64, size, want int) int64 {
	switch {
	case size < want/2 && keys < math.MaxInt64/4:
		return keys * 2
	case size > 2*want:
		return max(keys/2, 1)
	}
	return keys
}
