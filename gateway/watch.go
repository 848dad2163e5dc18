package gateway

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"braid/mvcc"
	"braid/watchsvc"
)

const (
	// progressIntervalDefault and progressIntervalMin are etcd's.
	progressIntervalDefault = 10 * time.Minute
	progressIntervalMin     = 100 * time.Millisecond
)

// watchServer is etcd's Watch service over the hub of this node.
type watchServer struct {
	s *Server
	pb.UnsafeWatchServer
}

// watchTag is what a watcher's responses need to know of its request.
type watchTag struct{ prevKV, fragment, progress bool }

// watchStream is one Watch call. The handler's goroutine sends, one other receives; they share
// nothing but the watchsvc.Stream, so the order of what is sent is that of its queue.
type watchStream struct {
	s    *Server
	grpc pb.Watch_WatchServer
	out  *watchsvc.Stream
	// due holds the watchers that asked for progress notifications; false skips the next, because
	// events were sent meanwhile.
	due    map[int64]bool
	shared sharedEvents
}

// Watch serves one stream until the client goes, the node stops, or a leader is required and
// missing.
func (w *watchServer) Watch(stream pb.Watch_WatchServer) error {
	if w.s.cfg.Watches == nil {
		return unavailable("Watch")
	}
	ws := &watchStream{s: w.s, grpc: stream, out: w.s.cfg.Watches.NewStream(), due: map[int64]bool{}}
	defer ws.out.Close()
	// gRPC ends Recv when this handler has returned, so the receiver outlives it by a moment; Stop
	// waits for it.
	received := make(chan error, 1)
	w.s.receivers.Go(func() { received <- ws.receive() })
	return ws.send(received)
}

// receive takes the client's requests, until it has no more (nil) or the stream ends.
func (ws *watchStream) receive() error {
	ctx := ws.grpc.Context()
	for {
		req, err := ws.grpc.Recv()
		if errors.Is(err, io.EOF) {
			return nil // the client may go on listening
		}
		if err != nil {
			return err
		}
		switch r := req.RequestUnion.(type) {
		case *pb.WatchRequest_CreateRequest:
			if r.CreateRequest != nil {
				err = ws.create(ctx, r.CreateRequest)
			}
		case *pb.WatchRequest_CancelRequest:
			if r.CancelRequest != nil {
				err = ws.out.Cancel(ctx, r.CancelRequest.WatchId)
			}
		case *pb.WatchRequest_ProgressRequest:
			if r.ProgressRequest != nil {
				ws.out.RequestProgress()
			}
		}
		if err != nil {
			return err
		}
	}
}

func (ws *watchStream) create(ctx context.Context, r *pb.WatchCreateRequest) error {
	if r.StartRevision < 0 {
		return ws.out.Refuse(ctx, rpctypes.ErrCompacted)
	}
	req := watchsvc.Request{
		ID: r.WatchId, Span: watchSpan(r.Key, r.RangeEnd), Start: mvcc.Revision(r.StartRevision),
		Tag: watchTag{prevKV: r.PrevKv, fragment: r.Fragment, progress: r.ProgressNotify},
	}
	for _, f := range r.Filters {
		switch f {
		case pb.WatchCreateRequest_NOPUT:
			req.NoPut = true
		case pb.WatchCreateRequest_NODELETE:
			req.NoDelete = true
		}
	}
	return ws.out.Watch(ctx, req)
}

// watchSpan is what etcd's key and range_end mean in a watch: an empty key is the smallest one, an
// end of one zero byte means everything from the key on.
func watchSpan(key, end []byte) mvcc.Span {
	if len(key) == 0 {
		key = []byte{0}
	}
	switch {
	case len(end) == 0:
		return mvcc.Key(key)
	case len(end) == 1 && end[0] == 0:
		return mvcc.Span{Start: key}
	}
	return mvcc.Span{Start: key, End: end}
}

// send sends what the stream holds, and looks at its clocks.
func (ws *watchStream) send(received <-chan error) error {
	ctx := ws.grpc.Context()
	interval := ws.s.cfg.ProgressNotifyInterval
	// As in etcd, streams that began together do not all report together.
	progress := time.NewTicker(interval + rand.N(interval/10))
	defer progress.Stop()
	leaderless, done := ws.s.leaderless.channel(ctx, ws.out.Led)
	defer done()
	for {
		more, err := ws.sendNext(ctx)
		if err != nil {
			return ws.ended(err)
		}
		ready := ws.out.Ready()
		if more {
			ready = alwaysReady
		}
		select {
		case <-ctx.Done():
			return ws.ended(ctx.Err())
		case <-ws.s.stopping:
			return rpctypes.ErrGRPCStopped
		default:
		}
		select {
		case <-ready:
		case <-ctx.Done():
			return ws.ended(ctx.Err())
		case <-ws.s.stopping:
			return rpctypes.ErrGRPCStopped
		case err := <-received:
			if err != nil {
				return ws.ended(err)
			}
			received = nil
		case <-progress.C:
			for id, due := range ws.due {
				if due {
					ws.out.Progress(id)
				}
				ws.due[id] = true
			}
		case <-leaderless:
			return rpctypes.ErrGRPCNoLeader
		}
	}
}

var alwaysReady = func() <-chan struct{} {
	ch := make(chan struct{})
	close(ch)
	return ch
}()

// ended is how a stream's end is told to the client.
func (ws *watchStream) ended(err error) error {
	switch {
	case errors.Is(err, watchsvc.ErrClosed):
		return rpctypes.ErrGRPCStopped
	case errors.Is(err, context.Canceled), status.Code(err) == codes.Canceled:
		return rpctypes.ErrGRPCWatchCanceled
	}
	return toStatus(err)
}

// sendNext sends the next response, and says whether there was one.
func (ws *watchStream) sendNext(ctx context.Context) (bool, error) {
	r, ok, err := ws.out.Next(ctx)
	if err != nil || !ok {
		return false, err
	}
	tag, _ := r.Tag.(watchTag)
	switch {
	case r.Canceled:
		delete(ws.due, r.ID)
	case r.Created && tag.progress:
		ws.due[r.ID] = true
	case len(r.Events) > 0 && tag.progress:
		ws.due[r.ID] = false
	}
	wr, err := ws.response(ctx, &r, tag)
	if err != nil {
		return false, err
	}
	if tag.fragment {
		return true, sendFragments(wr, ws.s.cfg.MaxRequestBytes+grpcOverheadBytes, ws.sendEvents)
	}
	return true, ws.sendEvents(wr)
}

func (ws *watchStream) response(ctx context.Context, r *watchsvc.Response, tag watchTag) (*pb.WatchResponse, error) {
	wr := &pb.WatchResponse{
		Header: &pb.ResponseHeader{Revision: int64(r.Revision)}, WatchId: r.ID, Events: r.Events,
		Created: r.Created, Canceled: r.Canceled, CompactRevision: int64(r.Compacted),
	}
	ws.s.header.fill(wr.Header)
	if r.Refused != nil {
		wr.CancelReason = r.Refused.Error()
		if errors.Is(r.Refused, watchsvc.ErrNotHere) {
			// As etcd words what only gRPC has a code for.
			wr.CancelReason = status.Error(codes.Unimplemented, wr.CancelReason).Error()
		}
	}
	if !tag.prevKV {
		return wr, nil
	}
	for i, e := range r.Events {
		if e.Type == mvccpb.Event_PUT && e.Kv.CreateRevision == e.Kv.ModRevision {
			continue
		}
		v, ok, err := ws.s.cfg.Watches.Previous(ctx, e.Kv.Key, mvcc.Revision(e.Kv.ModRevision))
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		if &wr.Events[0] == &r.Events[0] { // shared with other watchers
			wr.Events = append([]*mvccpb.Event(nil), r.Events...)
		}
		wr.Events[i] = &mvccpb.Event{Type: e.Type, Kv: e.Kv, PrevKv: &mvccpb.KeyValue{
			Key: v.Key, Value: v.Value, Lease: v.Lease,
			CreateRevision: int64(v.Create), ModRevision: int64(v.Mod), Version: v.Version,
		}}
	}
	return wr, nil
}

// sendFragments sends a response in parts that stay below a size, as far as single events do; all
// but the last are marked.
func sendFragments(wr *pb.WatchResponse, bytesMax int, send func(*pb.WatchResponse) error) error {
	if len(wr.Events) < 2 || proto.Size(wr) < bytesMax {
		return send(wr)
	}
	base := proto.Size(&pb.WatchResponse{Header: wr.Header, WatchId: wr.WatchId, Fragment: true})
	for rest := wr.Events; len(rest) > 0; {
		size, n := base, 0
		for n < len(rest) {
			body := proto.Size(rest[n])
			size += body + 1 + varintLen(body)
			if n > 0 && size >= bytesMax {
				break
			}
			n++
		}
		part := &pb.WatchResponse{Header: wr.Header, WatchId: wr.WatchId, Events: rest[:n:n]}
		rest = rest[n:]
		part.Fragment = len(rest) > 0
		if err := send(part); err != nil {
			return err
		}
	}
	return nil
}

func varintLen(n int) int {
	l := 1
	for ; n >= 0x80; n >>= 7 {
		l++
	}
	return l
}
