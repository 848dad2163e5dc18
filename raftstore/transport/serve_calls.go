package transport

import (
	"context"
	"encoding/binary"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
)

// callServer is one incoming stream of requests: those that are being handled and the replies
// that wait to be sent.
type callServer struct {
	t      *Transport
	p      *peer
	ctx    context.Context
	cancel context.CancelFunc
	some   chan struct{}

	mu      sync.Mutex
	running map[uint64]context.CancelFunc
	replies []reply
	bytes   int
}

type reply struct {
	id      uint64
	state   byte
	payload []byte
}

func (t *Transport) serveCalls(p *peer, s grpc.ServerStream) error {
	c := &callServer{t: t, p: p, some: make(chan struct{}, 1), running: make(map[uint64]context.CancelFunc)}
	c.ctx, c.cancel = context.WithCancel(s.Context())
	sender := make(chan error, 1)
	go func() { sender <- c.send(s) }()
	err := c.receive(s)
	c.cancel() // ends the handlers' contexts and the sender
	if serr := <-sender; err == nil {
		err = serr
	}
	return err
}

func (c *callServer) receive(s grpc.ServerStream) error {
	for {
		var b []byte
		if err := s.RecvMsg(&b); err != nil {
			return err
		}
		c.t.received(c.p.id, len(b))
		r := itemReader{b: b}
		r.version()
		for r.more() {
			switch kind, id := r.byte(), r.uvarint(); kind {
			case itemCall:
				method, ms, payload := Method(r.byte()), r.uvarint(), r.bytes()
				if !r.bad {
					c.handle(id, method, ms, payload)
				}
			case itemCancel:
				c.end(id)
			default:
				r.bad = true
			}
		}
		if r.bad {
			return status.Error(codes.InvalidArgument, "malformed request stream")
		}
	}
}

// handle starts one request, or refuses it when too many run.
func (c *callServer) handle(id uint64, method Method, ms uint64, payload []byte) {
	h := c.t.calls[method]
	if h == nil {
		c.reply(reply{id, replyRefused, []byte(unknownMethod(method).Error())})
		return
	}
	ctx, cancel := c.context(ms)
	c.mu.Lock()
	full := len(c.running) >= c.t.cfg.Calls
	if !full {
		c.running[id] = cancel
	}
	c.mu.Unlock()
	if full {
		cancel()
		c.reply(reply{id, replyRefused, []byte("too many requests of one store at once")})
		return
	}
	h(ctx, c.p.id, payload, func(b []byte, err error) {
		if !c.end(id) {
			return // answered, cancelled or lost already
		}
		switch {
		case err != nil:
			c.reply(reply{id, replyError, []byte(err.Error())})
		case len(b)+itemOverhead >= maxMessageBytes:
			c.reply(reply{id, replyError, []byte(ErrTooLarge.Error())})
		default:
			c.reply(reply{id, replyOK, b})
		}
	})
}

// context makes a request's context; ms is the caller's deadline from now, 0 for none.
func (c *callServer) context(ms uint64) (context.Context, context.CancelFunc) {
	if ms == 0 {
		return context.WithCancel(c.ctx)
	}
	return context.WithTimeout(c.ctx, time.Duration(min(ms, 1<<40))*time.Millisecond)
}

// end frees a request; false when that was done before.
func (c *callServer) end(id uint64) bool {
	c.mu.Lock()
	cancel, ok := c.running[id]
	delete(c.running, id)
	c.mu.Unlock()
	if ok {
		cancel()
	}
	return ok
}

// reply queues a reply. When the caller does not read and its replies pile up beyond CallBytes,
// what it gets is a short error.
func (c *callServer) reply(r reply) {
	c.mu.Lock()
	if c.bytes+len(r.payload) > c.t.cfg.CallBytes && c.bytes > 0 && r.state == replyOK {
		r.state, r.payload = replyError, []byte(ErrOverloaded.Error())
	}
	c.bytes += len(r.payload) + itemOverhead
	c.replies = append(c.replies, r)
	c.mu.Unlock()
	signal(c.some)
}

func (c *callServer) send(s grpc.ServerStream) error {
	for {
		select {
		case <-c.ctx.Done():
			return nil
		case <-c.some:
		}
		gather()
		b, n := c.take()
		if b == nil {
			continue
		}
		c.t.sent(c.p.id, n)
		if err := s.SendMsg(b); err != nil {
			return err
		}
	}
}

func (c *callServer) take() (mem.Buffer, int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	size, n := 1, 0
	for n < len(c.replies) && (n == 0 || size+len(c.replies[n].payload) <= batchBytes) {
		size += len(c.replies[n].payload) + itemOverhead
		n++
	}
	if n == 0 {
		return nil, 0
	}
	pool := mem.DefaultBufferPool()
	buf := pool.Get(size)
	b := append((*buf)[:0], callsVersion)
	for i, r := range c.replies[:n] {
		b = binary.AppendUvarint(append(b, itemReply), r.id)
		b = append(b, r.state)
		b = binary.AppendUvarint(b, uint64(len(r.payload)))
		b = append(b, r.payload...)
		c.bytes -= len(r.payload) + itemOverhead
		c.replies[i] = reply{}
	}
	if c.replies = c.replies[n:]; len(c.replies) > 0 {
		signal(c.some)
	} else {
		c.replies = nil
	}
	*buf = b
	return mem.NewBuffer(buf, pool), len(b)
}
