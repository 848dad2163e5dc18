package transport

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"braid/raftstore/raftid"
)

// The stream window lets a message of frames travel without waiting for the receiver; the
// connection's is wider, so that one stream cannot fill it.
const (
	streamWindowBytes = 4 << 20
	connWindowBytes   = 8 << 20
)

// connectTimeout bounds one attempt to connect. A connection that nobody answers, as to a process that
// is just being started, must not keep a peer away for longer than others would miss it.
const connectTimeout = 2 * time.Second

// peer is another store: where it is, what is to be sent to it, and whether it lives.
type peer struct {
	t      *Transport
	id     raftid.StoreID
	addrs  []address
	frames *sendQueue
	calls  *callQueue

	alive atomic.Bool
	life  struct {
		sync.Mutex
		// silence and unanswered count looks of watch: since the peer was heard, and since it answered
		// a ping of ours; unanswered only once it has answered one. A look that is late counts once: a
		// process that was starved must not take that for the silence of others.
		silence, unanswered int
		answered            bool
		incarnation         uint64 // zero before the first handshake
		stream              uint64 // counts its streams of frames
	}
}

type address struct {
	target string
	secure bool
	unix   bool
}

func newPeer(t *Transport, id raftid.StoreID, urls []string) (*peer, error) {
	p := &peer{t: t, id: id, frames: newSendQueue(t.cfg.QueueBytes), calls: newCallQueue(t.cfg.CallBytes)}
	for _, u := range urls {
		a, err := parseAddress(u)
		if err == nil && a.secure && t.cfg.TLS == nil {
			err = errors.New("no TLS configuration for peers")
		}
		if err != nil {
			return nil, fmt.Errorf("transport: peer URL %q of store %s: %w", u, id, err)
		}
		p.addrs = append(p.addrs, a)
	}
	if len(p.addrs) == 0 {
		return nil, fmt.Errorf("transport: store %s has no peer URL", id)
	}
	return p, nil
}

// parseAddress understands etcd's peer URLs.
func parseAddress(s string) (address, error) {
	u, err := url.Parse(s)
	if err != nil {
		return address{}, err
	}
	switch u.Scheme {
	case "http", "https":
		if u.Host == "" {
			return address{}, errors.New("no host")
		}
		return address{target: "passthrough:///" + u.Host, secure: u.Scheme == "https"}, nil
	case "unix", "unixs":
		if u.Host+u.Path == "" {
			return address{}, errors.New("no path")
		}
		return address{target: "unix:" + u.Host + u.Path, secure: u.Scheme == "unixs", unix: true}, nil
	}
	return address{}, fmt.Errorf("unknown scheme %q", u.Scheme)
}

// met notes a handshake: another incarnation is another process, so what the last one knew is
// gone.
func (p *peer) met(incarnation uint64) {
	p.life.Lock()
	restarted := p.life.incarnation != 0 && p.life.incarnation != incarnation && p.alive.Load()
	if p.life.incarnation != incarnation {
		p.life.unanswered, p.life.answered = 0, false // it has yet to be reached
	}
	p.life.incarnation = incarnation
	p.life.Unlock()
	if restarted {
		p.t.notifyDown(p.id)
	}
	p.heard()
}

// heard notes a sign of life.
func (p *peer) heard() {
	p.life.Lock()
	defer p.life.Unlock()
	p.life.silence = 0
	p.revive()
}

// reached notes that the peer answered a ping.
func (p *peer) reached() {
	p.life.Lock()
	defer p.life.Unlock()
	p.life.unanswered, p.life.answered = 0, true
	p.revive()
}

// revive makes a peer alive that is heard and reached; under life's lock.
func (p *peer) revive() {
	if !p.missed() && !p.alive.Swap(true) {
		p.calls.setSilent(false)
	}
}

// missed says that the peer was not heard for too long, or not reached; under life's lock. One that
// is heard and cannot be reached is as good as silent: as the leader of a group it would go on
// telling its followers that it leads and hear none of them, so that nothing is committed and nobody
// elects another.
func (p *peer) missed() bool {
	return p.life.silence > p.t.looksMax || p.life.unanswered > p.t.looksMax
}

// joined notes that the peer has opened a stream of frames, and returns its number for lost.
func (p *peer) joined() uint64 {
	p.life.Lock()
	defer p.life.Unlock()
	p.life.stream++
	return p.life.stream
}

// lost notes that a stream of the peer broke: it has an interval to come back. It is back already if the
// end of a stream that went dead is noticed after the peer has opened another.
func (p *peer) lost(stream uint64) {
	p.life.Lock()
	defer p.life.Unlock()
	if stream == p.life.stream {
		p.life.silence = max(p.life.silence, p.t.looksMax-looksPerPing)
	}
}

// look is called at regular intervals. It says, once, that the peer is down, and ends the calls to it.
func (p *peer) look() (down bool) {
	p.life.Lock()
	defer p.life.Unlock()
	p.life.silence++
	if p.life.answered {
		p.life.unanswered++
	}
	if !p.missed() || !p.alive.CompareAndSwap(true, false) {
		return false
	}
	p.calls.setSilent(true)
	return true
}

// open dials one of the peer's addresses and opens a stream on a connection of its own. Cancel
// the context to end it; the returned function then frees the connection.
func (p *peer) open(ctx context.Context, method string, attempt int) (grpc.ClientStream, func(), error) {
	a := p.addrs[attempt%len(p.addrs)]
	creds := insecure.NewCredentials()
	if a.secure {
		creds = credentials.NewTLS(p.t.cfg.TLS)
	}
	opts := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithDisableRetry(), // it would keep a copy of what is sent
		grpc.WithNoProxy(),
		grpc.WithInitialWindowSize(streamWindowBytes), grpc.WithInitialConnWindowSize(connWindowBytes),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: p.t.cfg.BackoffMin, Multiplier: 1.6, Jitter: 0.2, MaxDelay: p.t.cfg.BackoffMax},
			MinConnectTimeout: connectTimeout,
		}),
		grpc.WithDefaultCallOptions(grpc.CallContentSubtype(codecName),
			grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)),
	}
	if local := p.t.cfg.LocalAddr; local.IsValid() && !a.unix {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(local, 0))}
		opts = append(opts, grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return d.DialContext(ctx, "tcp", addr)
		}))
	}
	conn, err := grpc.NewClient(a.target, opts...)
	if err != nil {
		return nil, nil, err
	}
	free := func() {
		if err := conn.Close(); err != nil {
			p.t.log.Debug("closing a connection", zap.Stringer("store", p.id), zap.Error(err))
		}
	}
	s, err := p.handshake(ctx, conn, method)
	if err != nil {
		free()
		return nil, nil, err
	}
	return s, free, nil
}

func (p *peer) handshake(ctx context.Context, conn *grpc.ClientConn, method string) (grpc.ClientStream, error) {
	s, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
	if err != nil {
		return nil, err
	}
	if err := s.SendMsg(p.t.hello(p.id)); err != nil {
		// The reason is in what the server sent.
		var b []byte
		if rerr := s.RecvMsg(&b); rerr != nil {
			err = rerr
		}
		return nil, err
	}
	var b []byte
	if err := s.RecvMsg(&b); err != nil {
		return nil, err
	}
	if err := p.checkReply(b); err != nil {
		return nil, err
	}
	return s, nil
}

// keep opens a stream again and again, with a pause after each failure, and lets use have it.
func (p *peer) keep(method string, use func(ctx context.Context, cancel context.CancelFunc, s grpc.ClientStream) error) {
	pause := p.t.cfg.BackoffMin
	said := "" // the failure that was logged last
	for attempt := 0; p.t.ctx.Err() == nil; attempt++ {
		ctx, cancel := context.WithCancel(p.t.ctx)
		began := time.Now()
		// A peer that accepts the connection and says nothing must not hold the loop.
		patience := time.AfterFunc(p.t.cfg.DownAfter+5*time.Second, cancel)
		s, free, err := p.open(ctx, method, attempt)
		patience.Stop()
		if err == nil {
			said = p.say(method, said, nil)
			err = use(ctx, cancel, s)
			cancel()
			free()
		}
		cancel()
		if p.t.ctx.Err() != nil {
			return
		}
		said = p.say(method, said, err)
		if p.t.cfg.Metrics.Failed != nil {
			p.t.cfg.Metrics.Failed(p.id)
		}
		if time.Since(began) > p.t.cfg.BackoffMax {
			pause = p.t.cfg.BackoffMin
		}
		wait := time.NewTimer(pause/2 + rand.N(pause))
		select {
		case <-p.t.ctx.Done():
			wait.Stop()
			return
		case <-wait.C:
		}
		pause = min(2*pause, p.t.cfg.BackoffMax)
	}
}

// say logs why there is no stream, once as long as the reason is the same, and returns the reason.
// Only the stream of frames speaks: the other fails with it. A refusal is an error of the
// configuration, everything else passes.
func (p *peer) say(method, said string, err error) string {
	what := ""
	if err != nil {
		what = status.Convert(err).Message()
	}
	if method != methodFrames {
		return what
	}
	refused := err != nil && status.Code(err) == codes.FailedPrecondition
	if f := p.t.cfg.Refused; f != nil {
		switch {
		case refused:
			f(p.id, what)
		case err == nil:
			f(p.id, "")
		}
	}
	if what == said {
		return what
	}
	switch {
	case err == nil:
		p.t.log.Info("connected to a peer", zap.Stringer("store", p.id))
	case refused:
		p.t.log.Error("a peer refuses this node", zap.Stringer("store", p.id), zap.String("reason", what))
	default:
		p.t.log.Warn("a peer cannot be reached", zap.Stringer("store", p.id), zap.Error(err))
	}
	return what
}

// sendFrames keeps the stream of frames.
func (p *peer) sendFrames() {
	p.keep(methodFrames, func(ctx context.Context, cancel context.CancelFunc, s grpc.ClientStream) error {
		// The peer answers each ping; silence means that the connection is dead, which a TCP
		// socket alone would notice after minutes.
		dead := time.AfterFunc(p.t.cfg.DownAfter+5*time.Second, cancel)
		defer dead.Stop()
		answers := make(chan error, 1)
		go func() {
			for {
				var b []byte
				if err := s.RecvMsg(&b); err != nil {
					answers <- err
					cancel()
					return
				}
				p.reached()
				dead.Reset(p.t.cfg.DownAfter + 5*time.Second)
			}
		}()
		p.frames.setUp(true)
		err := p.pump(ctx, s)
		p.frames.setUp(false)
		cancel()
		return errors.Join(err, <-answers)
	})
}

func (p *peer) pump(ctx context.Context, s grpc.ClientStream) error {
	ping := time.NewTicker(p.t.cfg.PingInterval)
	defer ping.Stop()
	beat := []byte{framesVersion, byte(kindPing), 0}
	if err := s.SendMsg(beat); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ping.C:
			if err := s.SendMsg(beat); err != nil {
				return err
			}
		case <-p.frames.some:
			gather()
			b, n := p.frames.take()
			if b == nil {
				continue
			}
			p.t.sent(p.id, n)
			if err := s.SendMsg(b); err != nil {
				return err
			}
		}
	}
}
