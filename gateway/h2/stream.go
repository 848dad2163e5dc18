package h2

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// prefixBytes is the head of a gRPC message: a byte that says whether it is compressed, and four
// with its length.
const prefixBytes = 5

// stream is one request. It is the context of its handler too, which saves the chain of them.
type stream struct {
	c        *conn
	id       uint32
	m        *method
	md       metadata.MD
	subtype  string // of the content type, for the answer
	encoding string // of its messages, empty for identity

	// The reader's: the message that is being received, prefix included.
	buf  []byte
	room *[]byte // where buf came from
	over bool    // answered already: what comes is thrown away

	// Guarded by conn.mu.
	inWindow int64    // what the client may still send
	window   int64    // what may be sent
	held     uint32   // received, and given back to the client's window only when queue is short
	queue    [][]byte // messages, of a stream that is served as one
	queued   int      // bytes of them
	ended    bool     // the client has sent everything
	reset    bool     // nothing may be sent any more
	headed   bool     // the header is sent
	header   metadata.MD
	trailer  metadata.MD

	// As a context.
	deadline time.Time
	timer    *time.Timer
	life     struct {
		sync.Mutex
		err  error
		done chan struct{}
		// What is to be called at the end: mostly there is one, and more are rare.
		one   func()
		oneID int
		more  map[int]func()
		next  int
	}
}

var (
	_ context.Context            = (*stream)(nil)
	_ grpc.ServerTransportStream = (*stream)(nil)
	_ grpc.ServerStream          = (*serverStream)(nil)
)

// Deadline implements context.Context.
func (st *stream) Deadline() (time.Time, bool) { return st.deadline, !st.deadline.IsZero() }

// Done implements context.Context.
func (st *stream) Done() <-chan struct{} {
	st.life.Lock()
	defer st.life.Unlock()
	if st.life.done == nil {
		st.life.done = make(chan struct{})
		if st.life.err != nil {
			close(st.life.done)
		}
	}
	return st.life.done
}

// Err implements context.Context.
func (st *stream) Err() error {
	st.life.Lock()
	defer st.life.Unlock()
	return st.life.err
}

// Value implements context.Context.
func (st *stream) Value(key any) any {
	switch key {
	case mdKey:
		return st.md
	case peerKey:
		return st.c.peer
	case transportKey:
		return grpc.ServerTransportStream(st)
	}
	return nil
}

// AfterFunc lets package context follow this context without a goroutine.
func (st *stream) AfterFunc(f func()) (stop func() bool) {
	st.life.Lock()
	defer st.life.Unlock()
	if st.life.err != nil {
		go f() // as package context has it: the caller may hold a lock that f takes
		return func() bool { return false }
	}
	st.life.next++
	n := st.life.next
	if st.life.one == nil {
		st.life.one, st.life.oneID = f, n
	} else {
		if st.life.more == nil {
			st.life.more = make(map[int]func())
		}
		st.life.more[n] = f
	}
	return func() bool {
		st.life.Lock()
		defer st.life.Unlock()
		if st.life.oneID == n {
			st.life.one, st.life.oneID = nil, 0
			return true
		}
		_, there := st.life.more[n]
		delete(st.life.more, n)
		return there
	}
}

// cancel ends the context.
func (st *stream) cancel(err error) {
	st.life.Lock()
	if st.life.err != nil {
		st.life.Unlock()
		return
	}
	st.life.err = err
	if st.life.done != nil {
		close(st.life.done)
	}
	one, more := st.life.one, st.life.more
	st.life.one, st.life.oneID, st.life.more = nil, 0, nil
	st.life.Unlock()
	if one != nil {
		go one()
	}
	for _, f := range more {
		go f()
	}
}

// expire ends the context at its deadline, and whoever waits for the client.
func (st *stream) expire() {
	st.cancel(context.DeadlineExceeded)
	st.c.mu.Lock()
	st.c.room.Broadcast()
	st.c.mu.Unlock()
}

// Keys under which gRPC's packages look for what they keep in a context; they do not export them.
var (
	mdKey        = keyOf(func(ctx context.Context) { metadata.FromIncomingContext(ctx) })
	peerKey      = keyOf(func(ctx context.Context) { peer.FromContext(ctx) })
	transportKey = keyOf(func(ctx context.Context) { grpc.ServerTransportStreamFromContext(ctx) })
)

// keyOf finds the key that look asks a context for.
func keyOf(look func(context.Context)) (key any) {
	look(&spy{Context: context.Background(), key: &key})
	if key == nil {
		panic("h2: gRPC does not look into the context")
	}
	return key
}

type spy struct {
	context.Context
	key *any
}

func (s *spy) Value(key any) any {
	*s.key = key
	return nil
}

// serve runs the handler and ends the stream.
func (st *stream) serve() {
	defer st.cancel(context.Canceled)
	if st.timer != nil {
		defer st.timer.Stop()
	}
	if st.m.unary != nil {
		st.serveUnary()
		return
	}
	ss := &serverStream{st: st}
	var err error
	if in := st.c.s.o.Stream; in != nil {
		err = in(st.m.impl, ss, &st.m.info, st.m.stream)
	} else {
		err = st.m.stream(st.m.impl, ss)
	}
	st.c.finish(st, statusOf(err))
}

func (st *stream) serveUnary() {
	resp, err := st.m.unary(st.m.impl, st, st.decode, st.c.s.o.Unary)
	if err != nil {
		st.c.finish(st, statusOf(err))
		return
	}
	data, err := st.c.s.o.Codec.Marshal(resp)
	if err != nil {
		st.c.finish(st, status.Newf(codes.Internal, "grpc: error while marshaling: %v", err))
		return
	}
	st.c.answer(st, data)
	data.Free()
}

// statusOf is what gRPC makes of a handler's error.
func statusOf(err error) *status.Status {
	if err == nil {
		return nil
	}
	if s, ok := status.FromError(err); ok {
		return s
	}
	return status.FromContextError(err)
}

// decode gives a unary handler its request.
func (st *stream) decode(v any) error {
	err := st.unmarshal(st.buf, v)
	if cap(st.buf) <= recvBufBytesMax {
		*st.room = st.buf[:0]
		recvBufs.Put(st.room)
	}
	st.buf, st.room = nil, nil
	return err
}

// recvBufBytesMax is how large a buffer is kept.
const recvBufBytesMax = 64 << 10

// recvBufs are buffers of requests; messages keep nothing of them.
var recvBufs = sync.Pool{New: func() any { return new([]byte) }}

// unmarshal decodes a message with its prefix.
func (st *stream) unmarshal(b []byte, v any) error {
	payload := b[prefixBytes:]
	if b[0] == 1 {
		if st.encoding == "" {
			return status.Error(codes.Internal, "grpc: compressed flag set with identity or empty encoding")
		}
		var err error
		if payload, err = decompress(st.encoding, payload, st.c.s.o.RecvBytesMax); err != nil {
			return err
		}
	}
	if err := st.c.s.o.Codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(payload)}, v); err != nil {
		return status.Errorf(codes.Internal, "grpc: error unmarshalling request: %v", err)
	}
	return nil
}

func decompress(name string, payload []byte, max int) ([]byte, error) {
	z := encoding.GetCompressor(name)
	if z == nil {
		return nil, status.Errorf(codes.Unimplemented, "grpc: Decompressor is not installed for grpc-encoding %q", name)
	}
	r, err := z.Decompress(mem.BufferSlice{mem.SliceBuffer(payload)}.Reader())
	if err != nil {
		return nil, status.Errorf(codes.Internal, "grpc: failed to decompress the received message: %v", err)
	}
	out, err := io.ReadAll(io.LimitReader(r, int64(max)+1))
	if err != nil {
		return nil, status.Errorf(codes.Internal, "grpc: failed to decompress the received message: %v", err)
	}
	if len(out) > max {
		return nil, status.Errorf(codes.ResourceExhausted, "grpc: message after decompression larger than max (%d vs. %d)", len(out), max)
	}
	return out, nil
}

// message is how far the message that is being received is: its size once the prefix is there, and
// whether it is complete.
func (st *stream) message() (size int, complete bool) {
	if len(st.buf) < prefixBytes {
		return 0, false
	}
	size = int(binary.BigEndian.Uint32(st.buf[1:]))
	return size, len(st.buf) == prefixBytes+size
}

// take appends data up to the end of the message and returns the rest.
func (st *stream) take(p []byte) (rest []byte) {
	if n := prefixBytes - len(st.buf); n > 0 {
		n = min(n, len(p))
		st.buf, p = append(st.buf, p[:n]...), p[n:]
		if len(st.buf) < prefixBytes {
			return p
		}
	}
	size, _ := st.message()
	n := min(prefixBytes+size-len(st.buf), len(p))
	st.buf = append(st.buf, p[:n]...)
	return p[n:]
}

// Method implements grpc.ServerTransportStream.
func (st *stream) Method() string { return st.m.name }

// SetHeader implements grpc.ServerTransportStream.
func (st *stream) SetHeader(md metadata.MD) error {
	st.c.mu.Lock()
	defer st.c.mu.Unlock()
	if st.headed {
		return errors.New("h2: the header is sent already")
	}
	st.header = metadata.Join(st.header, md)
	return nil
}

// SendHeader implements grpc.ServerTransportStream.
func (st *stream) SendHeader(md metadata.MD) error {
	if err := st.SetHeader(md); err != nil {
		return err
	}
	return st.c.sendHeader(st)
}

// SetTrailer implements grpc.ServerTransportStream.
func (st *stream) SetTrailer(md metadata.MD) error {
	st.c.mu.Lock()
	defer st.c.mu.Unlock()
	st.trailer = metadata.Join(st.trailer, md)
	return nil
}

// serverStream is a stream as its handler sees it.
type serverStream struct {
	st *stream
}

func (ss *serverStream) Context() context.Context { return ss.st }

// SetHeader implements grpc.ServerStream.
func (ss *serverStream) SetHeader(md metadata.MD) error { return ss.st.SetHeader(md) }

// SendHeader implements grpc.ServerStream.
func (ss *serverStream) SendHeader(md metadata.MD) error { return ss.st.SendHeader(md) }

// SetTrailer implements grpc.ServerStream.
func (ss *serverStream) SetTrailer(md metadata.MD) {
	_ = ss.st.SetTrailer(md) // has no error
}

// SendMsg implements grpc.ServerStream. It waits for room, not for the network.
func (ss *serverStream) SendMsg(m any) error {
	data, err := ss.st.c.s.o.Codec.Marshal(m)
	if err != nil {
		return status.Errorf(codes.Internal, "grpc: error while marshaling: %v", err)
	}
	defer data.Free()
	return ss.st.c.sendMessage(ss.st, data)
}

// RecvMsg implements grpc.ServerStream: io.EOF when the client has sent everything.
func (ss *serverStream) RecvMsg(m any) error {
	b, err := ss.st.c.nextMessage(ss.st)
	if err != nil {
		return err
	}
	return ss.st.unmarshal(b, m)
}

// tooLarge is gRPC's answer to a message over the limit.
func tooLarge(size, max int) *status.Status {
	return status.New(codes.ResourceExhausted, fmt.Sprintf("grpc: received message larger than max (%d vs. %d)", size, max))
}
