package h2

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

const (
	readBytes = 32 << 10 // of the reader's buffer; holds the largest frame
	// A client may have connWindow bytes on the way, streamWindow of them for one stream.
	connWindow   = 8 << 20
	streamWindow = 1 << 20
	// queuedBytesMax is what may wait for a stream's handler before the client must wait.
	queuedBytesMax = 64 << 10
	// outBytesMax is what may wait for the socket before handlers must wait.
	outBytesMax = 1 << 20
	// keptBytesMax is how large a buffer for the socket is kept.
	keptBytesMax = 64 << 10
	// headerBytesMax bounds the headers of a request.
	headerBytesMax = 1 << 20
	// strikesMax is how many pings that come too early are forgiven.
	strikesMax = 2
	// partingTime is what a client has to read why its connection ends.
	partingTime = time.Second
)

// conn is a connection.
type conn struct {
	s    *Server
	nc   net.Conn
	peer *peer.Peer

	// The reader's.
	r        *bufio.Reader
	dec      *hpack.Decoder
	req      request
	block    []byte // of headers that come in several frames
	lastID   uint32 // highest stream
	unacked  uint32 // received and not yet given back to the connection's window
	inWindow int64  // what the client may still send
	fields   []hpack.HeaderField
	md       metadata.MD // of fields
	lastPing time.Time
	strikes  int

	lastRead atomic.Int64 // unix nanoseconds

	mu       sync.Mutex
	wake     *sync.Cond // of the flusher
	room     *sync.Cond // of senders: window, space in out, or the end
	waiting  int        // senders
	out      []byte     // frames for the socket
	spare    []byte     // the other buffer
	writing  bool       // somebody is in Write
	closing  bool       // nothing more is to come: close when out is written
	broken   error      // the connection has ended
	draining bool
	streams  map[uint32]*stream
	window   int64 // what may be sent
	initial  int64 // window of a new stream
	frameMax int
	enc      *hpack.Encoder
	encoded  bytes.Buffer
	probing  time.Time     // since when an answer to our ping is waited for
	talked   bool          // something but an answer was sent since the last ping of the client
	flushed  chan struct{} // closed when the flusher has ended
}

func newConn(s *Server, nc net.Conn) *conn {
	c := &conn{s: s, nc: nc, inWindow: connWindow, streams: make(map[uint32]*stream),
		window: windowDefault, initial: windowDefault, frameMax: frameBytesMax, flushed: make(chan struct{})}
	c.peer = &peer.Peer{Addr: nc.RemoteAddr(), LocalAddr: nc.LocalAddr(), AuthInfo: authInfo(nc)}
	c.wake, c.room = sync.NewCond(&c.mu), sync.NewCond(&c.mu)
	c.enc = hpack.NewEncoder(&c.encoded)
	c.dec = hpack.NewDecoder(4096, c.req.add)
	c.dec.SetMaxStringLength(headerBytesMax)
	c.r = bufio.NewReaderSize(timedReader{c}, readBytes)
	c.lastRead.Store(time.Now().UnixNano())
	settings := [][2]uint32{{settingInitialWindow, streamWindow}, {settingHeaderList, headerBytesMax}}
	if s.o.StreamsMax != math.MaxUint32 {
		settings = append(settings, [2]uint32{settingStreamsMax, s.o.StreamsMax})
	}
	c.out = appendWindow(appendSettings(nil, settings...), 0, connWindow-windowDefault)
	return c
}

// timedReader notes when the client was last heard of.
type timedReader struct{ c *conn }

func (t timedReader) Read(p []byte) (int, error) {
	n, err := t.c.nc.Read(p)
	t.c.lastRead.Store(time.Now().UnixNano())
	return n, err
}

// connError ends a connection with a reason for the client.
type connError struct {
	code uint32
	text string
}

func (e *connError) Error() string { return "h2: " + e.text }

func broken(code uint32, format string, args ...any) error {
	return &connError{code, fmt.Sprintf(format, args...)}
}

// read is the reader's goroutine.
func (c *conn) read() {
	defer c.s.ended(c)
	err := c.readFrames()
	var ce *connError
	if errors.As(err, &ce) {
		// The flusher says so before the connection is closed.
		c.mu.Lock()
		c.out = appendGoAway(c.out, c.lastID, ce.code, ce.text)
		c.closing = true
		c.wake.Signal()
		c.mu.Unlock()
		if c.nc.SetWriteDeadline(time.Now().Add(partingTime)) == nil {
			<-c.flushed
		}
	}
	c.fail(err)
	<-c.flushed
}

func (c *conn) readFrames() error {
	b, err := c.r.Peek(len(preface))
	if err != nil {
		return err
	}
	if string(b) != preface {
		return broken(codeProtocol, "no preface")
	}
	if _, err := c.r.Discard(len(preface)); err != nil {
		return err
	}
	for first := true; ; first = false {
		b, err := c.r.Peek(frameHeadBytes)
		if err != nil {
			return err
		}
		h := parseHead(b)
		if h.length > frameBytesMax {
			return broken(codeFrameSize, "a frame of %d bytes", h.length)
		}
		if first && h.kind != frameSettings {
			return broken(codeProtocol, "the first frame is not settings")
		}
		if b, err = c.r.Peek(frameHeadBytes + int(h.length)); err != nil {
			return err
		}
		if err := c.frame(h, b[frameHeadBytes:]); err != nil {
			return err
		}
		if _, err := c.r.Discard(len(b)); err != nil {
			return err
		}
	}
}

func (c *conn) frame(h frameHead, p []byte) error {
	if c.block != nil && (h.kind != frameContinuation || h.stream != c.req.id) {
		return broken(codeProtocol, "headers are interrupted")
	}
	switch h.kind {
	case frameData:
		return c.data(h, p)
	case frameHeaders:
		if h.stream%2 == 0 {
			return broken(codeProtocol, "headers of stream %d", h.stream)
		}
		p, ok := unpad(h, p)
		if !ok {
			return broken(codeProtocol, "bad padding")
		}
		c.req.begin(h.stream, h.flags&flagEndStream != 0)
		if h.flags&flagEndHeaders == 0 {
			c.block = append(make([]byte, 0, 2*len(p)+1), p...)
			return nil
		}
		return c.headers(p)
	case frameContinuation:
		if c.block == nil {
			return broken(codeProtocol, "continuation of nothing")
		}
		if len(c.block)+len(p) > headerBytesMax || len(p) == 0 && h.flags&flagEndHeaders == 0 {
			return broken(codeEnhanceYourCalm, "headers are too large")
		}
		c.block = append(c.block, p...)
		if h.flags&flagEndHeaders == 0 {
			return nil
		}
		b := c.block
		c.block = nil
		return c.headers(b)
	case frameReset:
		return c.resetBy(h, p)
	case frameSettings:
		return c.settings(h, p)
	case framePing:
		return c.ping(h, p)
	case frameWindow:
		return c.windowUpdate(h, p)
	}
	return nil // priority, the client's farewell, and what later versions may bring
}

// request is what the headers of a request say.
type request struct {
	id          uint32
	end         bool
	bytes       int
	bad         string
	method      string
	path        string
	contentType string
	encoding    string
	timeout     string
	fields      []hpack.HeaderField // metadata
}

func (q *request) begin(id uint32, end bool) {
	*q = request{id: id, end: end, fields: q.fields[:0]}
}

// add takes a header from the decoder.
func (q *request) add(f hpack.HeaderField) {
	if q.bytes += len(f.Name) + len(f.Value) + 32; q.bytes > headerBytesMax {
		q.bad = "headers are too large"
		return
	}
	switch f.Name {
	case ":method":
		q.method = f.Value
	case ":path":
		q.path = f.Value
	case "grpc-timeout":
		q.timeout = f.Value
	case "grpc-encoding":
		q.encoding = f.Value
	case "content-type":
		q.contentType = f.Value
		q.fields = append(q.fields, f)
	case ":scheme", "te", "grpc-message", "grpc-status", "grpc-message-type":
	case "connection":
		q.bad = "a connection header"
	default:
		q.fields = append(q.fields, f)
	}
}

// headers takes a complete block of headers: a new request, or the end of one.
func (c *conn) headers(block []byte) error {
	if _, err := c.dec.Write(block); err != nil {
		return broken(codeCompression, "headers: %v", err)
	}
	if err := c.dec.Close(); err != nil {
		return broken(codeCompression, "headers: %v", err)
	}
	q := &c.req
	if q.id <= c.lastID {
		c.mu.Lock()
		st := c.streams[q.id]
		c.mu.Unlock()
		if st == nil {
			return nil // answered or given up meanwhile
		}
		if !q.end {
			return broken(codeProtocol, "two headers of stream %d", q.id)
		}
		c.end(st)
		return nil
	}
	c.lastID = q.id
	st := &stream{c: c, id: q.id, inWindow: streamWindow}
	c.mu.Lock()
	refused := c.draining || uint32(min(len(c.streams), math.MaxUint32)) >= c.s.o.StreamsMax
	if refused {
		if !c.draining { // the client knows already that this one is not served
			c.out = appendReset(c.out, q.id, codeRefused)
			c.wake.Signal()
		}
	} else {
		st.window = c.initial
		c.streams[q.id] = st
	}
	c.mu.Unlock()
	if refused {
		return nil
	}
	if bad := c.accept(st); bad != nil {
		st.over = true
		c.finish(st, bad)
		return nil
	}
	if st.m.stream != nil {
		if q.end {
			c.end(st)
		}
		c.s.run(st)
	} else if q.end {
		c.end(st)
	}
	return nil
}

// accept fills st in from the request's headers, or says why not.
func (c *conn) accept(st *stream) *status.Status {
	q := &c.req
	subtype, ok := strings.CutPrefix(q.contentType, "application/grpc")
	switch {
	case q.bad != "":
		return status.New(codes.Internal, "h2: "+q.bad)
	case !ok || subtype != "" && subtype[0] != '+' && subtype[0] != ';':
		return status.Newf(codes.InvalidArgument, "invalid gRPC request content-type %q", q.contentType)
	case q.method != "POST":
		return status.Newf(codes.Internal, "http2Server.operateHeaders parsed a :method field: %v which should be POST", q.method)
	}
	if subtype != "" {
		st.subtype = subtype[1:]
	}
	if q.encoding != "identity" {
		st.encoding = q.encoding
	}
	if q.timeout != "" {
		d, err := parseTimeout(q.timeout)
		if err != nil {
			return status.Newf(codes.Internal, "malformed grpc-timeout: %v", err)
		}
		st.deadline = time.Now().Add(d)
		st.timer = time.AfterFunc(d, st.expire)
	}
	md, err := c.metadata()
	if err != nil {
		return status.Newf(codes.Internal, "%v", err)
	}
	st.md = md
	if st.m = c.s.methods[q.path]; st.m == nil {
		if st.m = c.s.unknown; st.m == nil {
			return status.Newf(codes.Unimplemented, "unknown method %s", q.path)
		}
		m := *st.m
		m.name, m.info.FullMethod = q.path, q.path
		st.m = &m
	}
	if st.m.unary != nil {
		st.room = recvBufs.Get().(*[]byte)
		st.buf = (*st.room)[:0]
	}
	return nil
}

// metadata makes the request's metadata. A connection's requests mostly have all the same, and
// whoever gets it does not change it.
func (c *conn) metadata() (metadata.MD, error) {
	fields := c.req.fields
	if c.md != nil && slices.Equal(fields, c.fields) {
		return c.md, nil
	}
	md := make(metadata.MD, len(fields))
	for _, f := range fields {
		v := f.Value
		if strings.HasSuffix(f.Name, "-bin") {
			b, err := decodeBinary(v)
			if err != nil {
				return nil, fmt.Errorf("malformed binary metadata %q in header %q: %w", v, f.Name, err)
			}
			v = string(b)
		}
		md[f.Name] = append(md[f.Name], v)
	}
	if c.req.bytes < 4<<10 {
		c.fields, c.md = append(c.fields[:0], fields...), md
	}
	return md, nil
}

func decodeBinary(v string) ([]byte, error) {
	if len(v)%4 == 0 {
		return base64.StdEncoding.DecodeString(v)
	}
	return base64.RawStdEncoding.DecodeString(v)
}

// parseTimeout reads gRPC's form of a time: up to eight digits and a unit.
func parseTimeout(s string) (time.Duration, error) {
	if len(s) < 2 || len(s) > 9 {
		return 0, fmt.Errorf("%q", s)
	}
	unit := map[byte]time.Duration{'H': time.Hour, 'M': time.Minute, 'S': time.Second,
		'm': time.Millisecond, 'u': time.Microsecond, 'n': time.Nanosecond}[s[len(s)-1]]
	n, err := strconv.ParseUint(s[:len(s)-1], 10, 32)
	if err != nil || unit == 0 {
		return 0, fmt.Errorf("%q", s)
	}
	if n > uint64(math.MaxInt64/unit) {
		return math.MaxInt64, nil
	}
	return time.Duration(n) * unit, nil
}

// data takes a frame of messages.
func (c *conn) data(h frameHead, p []byte) error {
	if h.stream == 0 || h.stream > c.lastID {
		return broken(codeProtocol, "data of stream %d", h.stream)
	}
	p, ok := unpad(h, p)
	if !ok {
		return broken(codeProtocol, "bad padding")
	}
	if c.inWindow -= int64(h.length); c.inWindow < 0 {
		return broken(codeFlowControl, "more data than the window")
	}
	// The connection's window is given back at once: one stream must not hold up the others.
	if c.unacked += h.length; c.unacked >= connWindow/4 {
		c.inWindow += int64(c.unacked)
		c.control(appendWindow(nil, 0, c.unacked))
		c.unacked = 0
	}
	st, fits := c.received(h)
	if !fits {
		return broken(codeFlowControl, "more data than the window of stream %d", h.stream)
	}
	if st == nil || st.over {
		return nil
	}
	for len(p) > 0 {
		p = st.take(p)
		size, complete := st.message()
		if size > c.s.o.RecvBytesMax {
			c.refuse(st, tooLarge(size, c.s.o.RecvBytesMax))
			return nil
		}
		if !complete {
			break
		}
		if st.m.stream == nil {
			if len(p) > 0 {
				c.refuse(st, status.New(codes.Internal, "grpc: a unary request of several messages"))
				return nil
			}
			break
		}
		c.mu.Lock()
		st.queue = append(st.queue, st.buf)
		st.queued += len(st.buf)
		c.room.Broadcast()
		c.mu.Unlock()
		st.buf = nil
	}
	if h.flags&flagEndStream != 0 {
		c.end(st)
	}
	return nil
}

// refuse answers a stream whose messages cannot be taken; its handler, if it runs, finds it cancelled.
func (c *conn) refuse(st *stream, why *status.Status) {
	st.over = true
	c.finish(st, why)
	st.cancel(context.Canceled)
}

// received counts data against its stream's window; nil when the stream is gone.
func (c *conn) received(h frameHead) (st *stream, fits bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if st = c.streams[h.stream]; st == nil {
		return nil, true
	}
	if st.inWindow -= int64(h.length); st.inWindow < 0 {
		return st, false
	}
	st.held += h.length
	c.giveBack(st)
	return st, true
}

// giveBack lets the client send as much again as it has sent, unless too much waits for the stream's
// handler already; under the lock. A message that is not complete does not wait for anybody, so a
// large one is never held up by itself.
func (c *conn) giveBack(st *stream) {
	if st.held >= streamWindow/4 && st.queued < queuedBytesMax && !st.ended && !st.reset {
		st.inWindow += int64(st.held)
		c.out = appendWindow(c.out, st.id, st.held)
		st.held = 0
		c.wake.Signal()
	}
}

// end notes that the client has sent everything; a unary request can run now.
func (c *conn) end(st *stream) {
	c.mu.Lock()
	again := st.ended
	st.ended = true
	c.room.Broadcast()
	c.mu.Unlock()
	if again || st.over {
		return
	}
	_, complete := st.message()
	switch {
	case st.m.stream == nil && complete:
		c.s.run(st)
	case st.m.stream == nil:
		c.refuse(st, status.New(codes.Internal, "grpc: the request is not complete"))
	case len(st.buf) > 0:
		c.refuse(st, status.New(codes.Internal, io.ErrUnexpectedEOF.Error()))
	}
}

func (c *conn) resetBy(h frameHead, p []byte) error {
	if len(p) != 4 {
		return broken(codeFrameSize, "a reset of %d bytes", len(p))
	}
	if h.stream == 0 || h.stream > c.lastID {
		return broken(codeProtocol, "reset of stream %d", h.stream)
	}
	c.mu.Lock()
	st := c.streams[h.stream]
	if st != nil {
		st.reset = true
		c.forget(st)
		c.room.Broadcast()
	}
	c.mu.Unlock()
	if st != nil {
		st.over = true
		st.cancel(context.Canceled)
	}
	return nil
}

func (c *conn) settings(h frameHead, p []byte) error {
	if h.flags&flagAck != 0 {
		return nil
	}
	if len(p)%6 != 0 || h.stream != 0 {
		return broken(codeFrameSize, "settings of %d bytes", len(p))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for ; len(p) > 0; p = p[6:] {
		v := binary.BigEndian.Uint32(p[2:])
		switch binary.BigEndian.Uint16(p) {
		case settingTableSize:
			c.enc.SetMaxDynamicTableSizeLimit(v)
		case settingInitialWindow:
			if v > windowMax {
				return broken(codeFlowControl, "an initial window of %d", v)
			}
			for _, st := range c.streams {
				st.window += int64(v) - c.initial
			}
			c.initial = int64(v)
			c.room.Broadcast()
		case settingFrameSize:
			if v < frameBytesMax || v > 1<<24-1 {
				return broken(codeProtocol, "a frame size of %d", v)
			}
		}
	}
	return c.controlLocked(appendHead(nil, 0, frameSettings, flagAck, 0))
}

func (c *conn) ping(h frameHead, p []byte) error {
	if len(p) != 8 || h.stream != 0 {
		return broken(codeFrameSize, "a ping of %d bytes", len(p))
	}
	if h.flags&flagAck != 0 {
		return nil
	}
	now := time.Now()
	c.mu.Lock()
	least := c.s.o.Enforcement.MinTime
	if len(c.streams) == 0 && !c.s.o.Enforcement.PermitWithoutStream {
		least = 2 * time.Hour
	}
	if c.talked {
		c.talked, c.strikes = false, 0
	} else if !c.lastPing.IsZero() && now.Sub(c.lastPing) < least {
		c.strikes++
	}
	c.lastPing = now
	c.mu.Unlock()
	if c.strikes > strikesMax {
		return broken(codeEnhanceYourCalm, "too_many_pings")
	}
	return c.control(appendPing(nil, flagAck, p))
}

func (c *conn) windowUpdate(h frameHead, p []byte) error {
	if len(p) != 4 {
		return broken(codeFrameSize, "a window update of %d bytes", len(p))
	}
	n := int64(binary.BigEndian.Uint32(p) & windowMax)
	c.mu.Lock()
	defer c.mu.Unlock()
	if h.stream == 0 {
		if c.window += n; n == 0 || c.window > windowMax {
			return broken(codeFlowControl, "a window of %d", c.window)
		}
	} else if st := c.streams[h.stream]; st != nil {
		if st.window += n; n == 0 || st.window > windowMax {
			st.reset, st.over = true, true
			c.forget(st)
			c.out = appendReset(c.out, st.id, codeFlowControl)
			c.wake.Signal()
			go st.cancel(context.Canceled) // what follows its context may want our lock
		}
	}
	c.room.Broadcast()
	return nil
}

// control queues a frame that answers the client. A client that makes more work than it reads
// answers is not read any more.
func (c *conn) control(frame []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.controlLocked(frame)
}

func (c *conn) controlLocked(frame []byte) error {
	for len(c.out) > outBytesMax && c.broken == nil {
		c.waitRoom()
	}
	if c.broken != nil {
		return c.broken
	}
	c.out = append(c.out, frame...)
	c.wake.Signal()
	return nil
}

func (c *conn) waitRoom() {
	c.waiting++
	c.room.Wait()
	c.waiting--
}

// flusher writes what readers and streams leave in out. Answers of unary requests are mostly
// written by who made them.
func (c *conn) flusher() {
	defer close(c.flushed)
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.broken != nil:
			return
		case c.writing || len(c.out) == 0 && !c.closing:
			c.wake.Wait()
		case len(c.out) > 0:
			c.writeOut()
		default:
			c.nc.Close()
			return
		}
	}
}

// writeOut writes until nothing is left; under the lock, which it gives up meanwhile. The caller has
// seen that nobody else writes.
func (c *conn) writeOut() {
	c.writing = true
	for len(c.out) > 0 && c.broken == nil {
		if len(c.out) < keptBytesMax/4 {
			// Others that are ready to run may have something to add: a write costs much more
			// than waiting for them.
			c.mu.Unlock()
			runtime.Gosched()
			c.mu.Lock()
		}
		b := c.out
		c.out, c.spare = c.spare[:0], nil
		c.mu.Unlock()
		_, err := c.nc.Write(b)
		c.mu.Lock()
		if cap(b) <= keptBytesMax {
			c.spare = b[:0]
		}
		if err != nil {
			c.failLocked(err)
		}
		if c.waiting > 0 {
			c.room.Broadcast()
		}
	}
	c.writing = false
	if c.closing || c.broken != nil || len(c.out) > 0 {
		c.wake.Signal()
	}
}

// fail ends the connection.
func (c *conn) fail(err error) {
	c.mu.Lock()
	c.failLocked(err)
	c.mu.Unlock()
}

func (c *conn) failLocked(err error) {
	if c.broken != nil {
		return
	}
	c.broken = err
	c.nc.Close()
	for _, st := range c.streams {
		st.reset = true
		st.cancel(context.Canceled)
	}
	clear(c.streams)
	c.wake.Broadcast()
	c.room.Broadcast()
}

// drain sends the client elsewhere; the connection ends with its last stream.
func (c *conn) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining || c.broken != nil {
		return
	}
	c.draining = true
	last := uint32(0)
	for id := range c.streams {
		last = max(last, id)
	}
	c.out = appendGoAway(c.out, last, codeNone, "graceful_stop")
	c.closing = len(c.streams) == 0
	c.wake.Signal()
}

// probe asks a silent client whether it is there, and gives it up when it does not answer.
func (c *conn) probe(now time.Time) {
	heard := time.Unix(0, c.lastRead.Load())
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case now.Sub(heard) < c.s.o.Keepalive.Time || c.broken != nil:
		c.probing = time.Time{}
	case c.probing.IsZero() || heard.After(c.probing):
		c.probing = now
		c.out = appendPing(c.out, 0, make([]byte, 8))
		c.wake.Signal()
	case now.Sub(c.probing) >= c.s.o.Keepalive.Timeout:
		c.failLocked(errors.New("h2: the client does not answer"))
	}
}

// forget takes a stream out of the table; under the lock.
func (c *conn) forget(st *stream) {
	delete(c.streams, st.id)
	if c.draining && len(c.streams) == 0 {
		c.closing = true
		c.wake.Signal()
	}
}

// appendHeader puts the block that was encoded into frames.
func (c *conn) appendHeader(st *stream, end bool) {
	b := c.encoded.Bytes()
	kind, flags := byte(frameHeaders), byte(0)
	if end {
		flags |= flagEndStream
	}
	for {
		n := min(len(b), c.frameMax)
		if n == len(b) {
			flags |= flagEndHeaders
		}
		c.out = append(appendHead(c.out, n, kind, flags, st.id), b[:n]...)
		if b = b[n:]; len(b) == 0 {
			break
		}
		kind, flags = frameContinuation, 0
	}
	c.encoded.Reset()
}

func (c *conn) encode(name, value string) {
	// The encoder's only error is the buffer's, which has none.
	_ = c.enc.WriteField(hpack.HeaderField{Name: name, Value: value})
}

func (c *conn) encodeMD(md metadata.MD) {
	for name, values := range md {
		name = strings.ToLower(name)
		if strings.HasPrefix(name, ":") || strings.HasPrefix(name, "grpc-") || name == "content-type" {
			continue // reserved
		}
		for _, v := range values {
			if strings.HasSuffix(name, "-bin") {
				v = base64.RawStdEncoding.EncodeToString([]byte(v))
			}
			c.encode(name, v)
		}
	}
}

// encodeHead encodes the header that opens an answer.
func (c *conn) encodeHead(st *stream) {
	st.headed = true
	c.encode(":status", "200")
	contentType := "application/grpc"
	if st.subtype != "" {
		contentType += "+" + st.subtype
	}
	c.encode("content-type", contentType)
	c.encodeMD(st.header)
}

func (c *conn) encodeStatus(st *stream, s *status.Status) {
	if s == nil || s.Code() == codes.OK {
		c.encode("grpc-status", "0")
	} else {
		c.encode("grpc-status", strconv.Itoa(int(s.Code())))
		c.encode("grpc-message", escapeMessage(s.Message()))
		if p := s.Proto(); len(p.GetDetails()) > 0 {
			if b, err := proto.Marshal(p); err == nil {
				c.encode("grpc-status-details-bin", base64.RawStdEncoding.EncodeToString(b))
			}
		}
	}
	c.encodeMD(st.trailer)
}

// answer sends the whole answer of a unary request.
func (c *conn) answer(st *stream, data mem.BufferSlice) {
	size := data.Len()
	n := int64(prefixBytes + size)
	c.mu.Lock()
	if n > c.window || n > st.window || int(n) > c.frameMax || len(c.out) > outBytesMax {
		c.mu.Unlock()
		if c.sendMessage(st, data) == nil {
			c.finish(st, nil)
		}
		return
	}
	defer c.mu.Unlock()
	if st.reset || c.broken != nil {
		return
	}
	if !st.headed {
		c.encodeHead(st)
		c.appendHeader(st, false)
	}
	c.window -= n
	c.out = appendPrefix(appendHead(c.out, int(n), frameData, 0, st.id), size)
	for _, b := range data {
		c.out = append(c.out, b.ReadOnlyData()...)
	}
	c.encodeStatus(st, nil)
	c.appendHeader(st, true)
	st.reset, c.talked = true, true
	c.forget(st)
	if !c.writing {
		c.writeOut()
	}
}

func appendPrefix(b []byte, size int) []byte {
	return binary.BigEndian.AppendUint32(append(b, 0), uint32(size))
}

// finish ends a stream with a status.
func (c *conn) finish(st *stream, s *status.Status) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if st.reset || c.broken != nil {
		return
	}
	if !st.headed {
		c.encodeHead(st)
	}
	c.encodeStatus(st, s)
	c.appendHeader(st, true)
	if !st.ended {
		// It need not send the rest.
		c.out = appendReset(c.out, st.id, codeNone)
	}
	st.reset, c.talked = true, true
	c.forget(st)
	c.wake.Signal()
	c.room.Broadcast()
}

// sendHeader opens a stream's answer.
func (c *conn) sendHeader(st *stream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.sendable(st); err != nil {
		return err
	}
	c.encodeHead(st)
	c.appendHeader(st, false)
	c.talked = true
	c.wake.Signal()
	return nil
}

// sendable says whether anything may be sent; under the lock.
func (c *conn) sendable(st *stream) error {
	if st.reset || c.broken != nil {
		return status.Error(codes.Canceled, "h2: the stream has ended")
	}
	return nil
}

// sendMessage puts a message into out, as the windows allow; it waits while they do not.
func (c *conn) sendMessage(st *stream, data mem.BufferSlice) error {
	size := data.Len()
	prefix := appendPrefix(make([]byte, 0, prefixBytes), size)
	parts := append(make([][]byte, 0, 1+len(data)), prefix)
	for _, b := range data {
		parts = append(parts, b.ReadOnlyData())
	}
	left := prefixBytes + size
	c.mu.Lock()
	defer c.mu.Unlock()
	if !st.headed {
		if err := c.sendable(st); err != nil {
			return err
		}
		c.encodeHead(st)
		c.appendHeader(st, false)
	}
	for left > 0 {
		if err := c.sendable(st); err != nil {
			return err
		}
		n := int(min(int64(left), int64(c.frameMax), c.window, st.window))
		if n <= 0 || len(c.out) > outBytesMax {
			c.waitRoom()
			continue
		}
		c.window -= int64(n)
		st.window -= int64(n)
		left -= n
		c.out = appendHead(c.out, n, frameData, 0, st.id)
		for n > 0 {
			k := min(n, len(parts[0]))
			c.out = append(c.out, parts[0][:k]...)
			n -= k
			if parts[0] = parts[0][k:]; len(parts[0]) == 0 {
				parts = parts[1:]
			}
		}
		c.talked = true
		c.wake.Signal()
	}
	return nil
}

// nextMessage waits for a stream's next message, or its end.
func (c *conn) nextMessage(st *stream) ([]byte, error) {
	c.mu.Lock()
	for len(st.queue) == 0 && !st.ended && !st.reset && c.broken == nil && st.Err() == nil {
		c.waitRoom()
	}
	if len(st.queue) == 0 {
		defer c.mu.Unlock()
		if st.ended && !st.reset {
			return nil, io.EOF
		}
		err := st.Err()
		if err == nil {
			err = context.Canceled
		}
		return nil, status.FromContextError(err).Err()
	}
	b := st.queue[0]
	st.queue[0] = nil
	st.queue = st.queue[1:]
	st.queued -= len(b)
	c.giveBack(st)
	c.mu.Unlock()
	return b, nil
}
