package transport

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"

	"braid/raftstore/raftid"
)

// A message of the request stream is a version byte and then items: kind byte, uvarint id, then
// for a call: method byte, uvarint deadline in milliseconds from now (0: none), payload; for a
// reply: status byte, payload; for a cancellation nothing. A payload is a uvarint length and
// bytes.
const (
	callsVersion = 1

	itemCall   = 1
	itemCancel = 2
	itemReply  = 3

	replyOK      = 0
	replyError   = 1 // the payload is the handler's error text
	replyRefused = 2 // the handler was not called; the payload says why
)

// itemOverhead is the most an item takes beside its payload.
const itemOverhead = 3 + 3*binary.MaxVarintLen64

// CallError says why a call has no answer.
type CallError struct {
	// Sent says that the request may have reached its handler. When it is false the request
	// was certainly not executed and may be sent again.
	Sent bool
	// Remote: the handler itself answered with an error, whose text Err has.
	Remote bool
	Err    error
}

// Error implements error.
func (e *CallError) Error() string { return e.Err.Error() }

// Unwrap gives the cause: a context's error, or one of this package's.
func (e *CallError) Unwrap() error { return e.Err }

// Causes of a CallError.
var (
	ErrUnavailable = errors.New("transport: the store cannot be reached")
	ErrLost        = errors.New("transport: the connection broke before the answer came")
	ErrOverloaded  = errors.New("transport: too many requests")
	ErrRefused     = errors.New("transport: the store refused the request")
	// ErrTooLarge is final: the message will not fit into a later connection either.
	ErrTooLarge = errors.New("transport: the message is too large")
)

// Call sends a request and waits for its reply, the context's end or the connection's. The error
// is a *CallError.
func (t *Transport) Call(ctx context.Context, to raftid.StoreID, method Method, payload []byte) ([]byte, error) {
	return t.CallUntil(ctx, nil, to, method, payload)
}

// CallUntil is Call for callers that share a timer: its wait also ends when expired is closed, as if that
// were the context's deadline. The handler hears of that only then.
func (t *Transport) CallUntil(ctx context.Context, expired <-chan struct{}, to raftid.StoreID, method Method, payload []byte) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, &CallError{Err: err}
	}
	if to == t.cfg.Self {
		return t.callLocal(ctx, expired, method, payload)
	}
	p := t.peers[to]
	if p == nil {
		return nil, &CallError{Err: fmt.Errorf("%w: %w %s", ErrUnavailable, errUnknownStore, to)}
	}
	c := &call{method: method, payload: payload, done: make(chan struct{})}
	if d, ok := ctx.Deadline(); ok {
		c.deadline = d
	}
	if err := p.calls.start(c); err != nil {
		return nil, &CallError{Err: err}
	}
	select {
	case <-c.done:
	case <-ctx.Done():
		p.calls.cancel(c, ctx.Err())
		<-c.done
	case <-expired:
		p.calls.cancel(c, context.DeadlineExceeded)
		<-c.done
	}
	if c.err != nil {
		return nil, c.err
	}
	return c.reply, nil
}

// callLocal calls our own handler without a network.
func (t *Transport) callLocal(ctx context.Context, expired <-chan struct{}, method Method, payload []byte) ([]byte, error) {
	h := t.calls[method]
	if h == nil {
		return nil, &CallError{Err: unknownMethod(method)}
	}
	type answer struct {
		b   []byte
		err error
	}
	done := make(chan answer, 1)
	var once sync.Once
	h(ctx, t.cfg.Self, payload, func(b []byte, err error) { once.Do(func() { done <- answer{b, err} }) })
	select {
	case a := <-done:
		if a.err != nil {
			return nil, &CallError{Sent: true, Remote: true, Err: a.err}
		}
		return a.b, nil
	case <-ctx.Done():
		return nil, &CallError{Sent: true, Err: ctx.Err()}
	case <-expired:
		return nil, &CallError{Sent: true, Err: context.DeadlineExceeded}
	}
}

// call is a request on its way. Its fields belong to the queue's lock until done is closed.
type call struct {
	id       uint64
	method   Method
	deadline time.Time
	payload  []byte
	sent     bool

	done  chan struct{}
	reply []byte
	err   *CallError
}

// callQueue holds the requests to one peer: those not yet sent, in order, and all unanswered.
type callQueue struct {
	some chan struct{}

	mu      sync.Mutex
	up      bool
	silent  bool // up, but the peer was not heard of for a while
	next    uint64
	queued  []*call
	cancels []uint64 // ids of sent calls that nobody waits for any more
	open    map[uint64]*call
	bytes   int // of queued
	limit   int
}

func newCallQueue(limit int) *callQueue {
	return &callQueue{some: make(chan struct{}, 1), open: make(map[uint64]*call), limit: limit}
}

// start queues a call. It fails at once when the peer is away: waiting is the caller's decision.
func (q *callQueue) start(c *call) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := len(c.payload) + itemOverhead
	switch {
	case n >= maxMessageBytes:
		return ErrTooLarge // now and whenever it is tried
	case !q.up || q.silent:
		return ErrUnavailable
	case q.bytes+n > q.limit && q.bytes > 0:
		return ErrOverloaded
	}
	q.next++
	c.id = q.next
	q.bytes += n
	q.queued = append(q.queued, c)
	q.open[c.id] = c
	signal(q.some)
	return nil
}

// finish ends a call, once; under the lock.
func (q *callQueue) finish(c *call, reply []byte, err *CallError) {
	delete(q.open, c.id)
	c.reply, c.err = reply, err
	close(c.done)
}

// cancel ends a call that its caller gave up, unless it has just been answered.
func (q *callQueue) cancel(c *call, why error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.open[c.id] != c {
		return
	}
	if c.sent {
		q.cancels = append(q.cancels, c.id)
		signal(q.some)
	}
	q.finish(c, nil, &CallError{Sent: c.sent, Err: why})
}

// setUp opens the queue; closing it fails everything that is in it.
func (q *callQueue) setUp(up bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.up = up
	if !up {
		q.failAll()
	}
}

// setSilent says whether the peer has fallen silent on connections that still stand, as behind a cut
// cable or in a process that hangs. Nobody should wait for what may never come: what is open fails,
// and new calls are refused until the peer is heard again.
func (q *callQueue) setSilent(silent bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.silent = silent
	if silent {
		q.failAll()
	}
}

// failAll ends everything that is in the queue; under the lock.
func (q *callQueue) failAll() {
	for _, c := range q.open {
		err := ErrUnavailable
		if c.sent {
			err = ErrLost
		}
		q.finish(c, nil, &CallError{Sent: c.sent, Err: err})
	}
	q.queued, q.cancels, q.bytes = nil, nil, 0
}

// take encodes waiting calls into one message; nil when there are none. They count as sent.
func (q *callQueue) take() (mem.Buffer, int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	size, n := 1+len(q.cancels)*itemOverhead, 0
	for n < len(q.queued) && (n == 0 || size+len(q.queued[n].payload) <= batchBytes) {
		size += len(q.queued[n].payload) + itemOverhead
		n++
	}
	if n == 0 && len(q.cancels) == 0 {
		return nil, 0
	}
	now := time.Now()
	pool := mem.DefaultBufferPool()
	buf := pool.Get(size)
	b := append((*buf)[:0], callsVersion)
	for _, id := range q.cancels {
		b = binary.AppendUvarint(append(b, itemCancel), id)
	}
	for i, c := range q.queued[:n] {
		q.queued[i] = nil
		q.bytes -= len(c.payload) + itemOverhead
		if q.open[c.id] != c {
			continue // cancelled while it waited
		}
		c.sent = true
		b = binary.AppendUvarint(append(b, itemCall), c.id)
		b = append(b, byte(c.method))
		var ms uint64
		if !c.deadline.IsZero() {
			ms = uint64(max(c.deadline.Sub(now)/time.Millisecond, 1))
		}
		b = binary.AppendUvarint(b, ms)
		b = binary.AppendUvarint(b, uint64(len(c.payload)))
		b = append(b, c.payload...)
		c.payload = nil
	}
	q.cancels = q.cancels[:0]
	if q.queued = q.queued[n:]; len(q.queued) > 0 {
		signal(q.some)
	}
	*buf = b
	return mem.NewBuffer(buf, pool), len(b)
}

// answer gives a reply to the call that waits for it.
func (q *callQueue) answer(id uint64, state byte, payload []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	c := q.open[id]
	switch {
	case c == nil: // cancelled
	case state == replyOK:
		q.finish(c, payload, nil)
	case state == replyRefused:
		q.finish(c, nil, &CallError{Err: fmt.Errorf("%w: %s", ErrRefused, payload)})
	default:
		q.finish(c, nil, &CallError{Sent: true, Remote: true, Err: errors.New(string(payload))})
	}
}

// sendCalls keeps the stream of requests.
func (p *peer) sendCalls() {
	p.keep(methodCalls, func(ctx context.Context, cancel context.CancelFunc, s grpc.ClientStream) error {
		answers := make(chan error, 1)
		go func() {
			answers <- p.takeReplies(s)
			cancel()
		}()
		p.calls.setUp(true)
		var err error
		for err == nil && ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-p.calls.some:
				gather()
				if b, n := p.calls.take(); b != nil {
					p.t.sent(p.id, n)
					err = s.SendMsg(b)
				}
			}
		}
		cancel()
		rerr := <-answers
		p.calls.setUp(false)
		return errors.Join(err, rerr)
	})
}

func (p *peer) takeReplies(s grpc.ClientStream) error {
	for {
		var b []byte
		if err := s.RecvMsg(&b); err != nil {
			return err
		}
		p.t.received(p.id, len(b))
		r := itemReader{b: b}
		r.version()
		for r.more() {
			kind, id := r.byte(), r.uvarint()
			state, payload := r.byte(), r.bytes()
			if kind != itemReply {
				r.bad = true
			}
			if !r.bad {
				p.calls.answer(id, state, payload)
			}
		}
		if r.bad {
			return errors.New("transport: malformed reply")
		}
	}
}

// itemReader takes values from the front of b; after the first that is not there it is bad.
type itemReader struct {
	b   []byte
	bad bool
}

func (r *itemReader) more() bool { return !r.bad && len(r.b) > 0 }

func (r *itemReader) version() {
	if r.byte() != callsVersion {
		r.bad = true
	}
}

func (r *itemReader) byte() byte {
	if len(r.b) == 0 {
		r.bad = true
		return 0
	}
	v := r.b[0]
	r.b = r.b[1:]
	return v
}

func (r *itemReader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.bad, r.b = true, nil
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *itemReader) bytes() []byte {
	n := r.uvarint()
	if n > uint64(len(r.b)) {
		r.bad, r.b = true, nil
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}
