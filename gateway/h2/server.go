// Package h2 serves gRPC over HTTP/2 connections.
//
// It takes the place of grpc-go's own server for connections that speak gRPC and nothing else,
// where two thirds of a small request's cost were that server's: a goroutine between reader and
// handler for each request, another one between handler and socket, contexts, and per-request
// bookkeeping. Services, interceptors, codecs, status and metadata are grpc-go's, so that generated
// code, and whoever registers it, sees no difference. It is not a general HTTP/2 server, has no
// client, sends no compressed answers, and has no stats handlers and no channelz.
//
// The life of a unary request: the connection's reader assembles it, on no goroutine of its own,
// and hands it to a kept worker when its last byte is there; the worker runs the handler and writes
// the answer itself, together with whatever other workers have left for the same connection in the
// meantime. A stream runs on a worker from its headers on.
//
// Ownership: a conn's reader owns the decoding state; conn.mu guards what is to be written, flow
// control and the table of streams; a stream's own lock guards it as a context. conn.mu comes before
// a stream's lock. Every goroutine is waited for by Stop.
package h2

import (
	"context"
	"errors"
	"math"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/keepalive"
)

// Options of a Server. Codec is required; zero limits mean no limit, zero times gRPC's defaults.
type Options struct {
	Codec  encoding.CodecV2
	Unary  grpc.UnaryServerInterceptor
	Stream grpc.StreamServerInterceptor
	// Unknown answers requests for methods that nobody registered, as a stream.
	Unknown grpc.StreamHandler
	// RecvBytesMax bounds one message; a larger one is answered with ResourceExhausted.
	RecvBytesMax int
	// StreamsMax bounds the requests that a connection has open at one time.
	StreamsMax uint32
	// Keepalive.Time and Timeout say when a silent client is asked and given up; the other fields
	// are not used. Enforcement says how often a client may ask.
	Keepalive   keepalive.ServerParameters
	Enforcement keepalive.EnforcementPolicy
}

// workersIdleMax is how many goroutines are kept for requests to come: a new one would grow its
// stack again each time.
const workersIdleMax = 1024

// Server serves registered services on the connections of its listener.
type Server struct {
	o       Options
	methods map[string]*method // by full name; read-only once Serve runs
	unknown *method

	work chan *stream // to idle workers
	quit chan struct{}
	wg   sync.WaitGroup // readers, flushers, workers, the keeper of keepalives

	mu struct {
		sync.Mutex
		conns    map[*conn]struct{}
		listener net.Listener
		draining bool
		stopped  bool
		idle     int        // workers waiting for work
		gone     *sync.Cond // a connection ended
	}
}

// method is a unary method or a kind of stream, with who serves it.
type method struct {
	name   string
	impl   any
	unary  func(srv any, ctx context.Context, dec func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error)
	stream grpc.StreamHandler
	info   grpc.StreamServerInfo
}

// ErrStopped is what Serve returns after Stop or GracefulStop.
var ErrStopped = errors.New("h2: the server has been stopped")

// New returns a server without services.
func New(o Options) *Server {
	if o.RecvBytesMax == 0 {
		o.RecvBytesMax = math.MaxInt32
	}
	if o.StreamsMax == 0 {
		o.StreamsMax = math.MaxUint32
	}
	if o.Keepalive.Time == 0 {
		o.Keepalive.Time = 2 * time.Hour
	}
	if o.Keepalive.Timeout == 0 {
		o.Keepalive.Timeout = 20 * time.Second
	}
	if o.Enforcement.MinTime == 0 {
		o.Enforcement.MinTime = 5 * time.Minute
	}
	s := &Server{o: o, methods: make(map[string]*method), work: make(chan *stream), quit: make(chan struct{})}
	s.mu.conns = make(map[*conn]struct{})
	s.mu.gone = sync.NewCond(&s.mu.Mutex)
	if o.Unknown != nil {
		s.unknown = &method{stream: o.Unknown, info: grpc.StreamServerInfo{IsClientStream: true, IsServerStream: true}}
	}
	return s
}

// RegisterService implements grpc.ServiceRegistrar; it must be called before Serve.
func (s *Server) RegisterService(desc *grpc.ServiceDesc, impl any) {
	for i := range desc.Methods {
		d := &desc.Methods[i]
		name := "/" + desc.ServiceName + "/" + d.MethodName
		s.methods[name] = &method{name: name, impl: impl, unary: d.Handler}
	}
	for i := range desc.Streams {
		d := &desc.Streams[i]
		name := "/" + desc.ServiceName + "/" + d.StreamName
		s.methods[name] = &method{name: name, impl: impl, stream: d.Handler,
			info: grpc.StreamServerInfo{FullMethod: name, IsClientStream: d.ClientStreams, IsServerStream: d.ServerStreams}}
	}
}

// Serve takes connections until the listener is closed, which it does itself in the end. The
// connections are authenticated and have sent nothing but what Read still gives.
func (s *Server) Serve(l net.Listener) error {
	defer l.Close()
	s.mu.Lock()
	if s.mu.stopped || s.mu.draining {
		s.mu.Unlock()
		return ErrStopped
	}
	s.mu.listener = l
	s.wg.Go(s.keepAlive)
	s.mu.Unlock()
	for {
		nc, err := l.Accept()
		if err != nil {
			s.mu.Lock()
			ended := s.mu.stopped || s.mu.draining
			s.mu.Unlock()
			if ended {
				return ErrStopped
			}
			return err
		}
		s.mu.Lock()
		if s.mu.stopped || s.mu.draining {
			s.mu.Unlock()
			nc.Close()
			return ErrStopped
		}
		c := newConn(s, nc)
		s.mu.conns[c] = struct{}{}
		s.wg.Go(c.read)
		s.wg.Go(c.flusher)
		s.mu.Unlock()
	}
}

// GracefulStop tells the clients to go elsewhere and waits until what they have asked is answered.
func (s *Server) GracefulStop() {
	s.mu.Lock()
	s.mu.draining = true
	conns := s.list()
	s.mu.Unlock()
	for _, c := range conns {
		c.drain()
	}
	s.mu.Lock()
	for len(s.mu.conns) > 0 {
		s.mu.gone.Wait()
	}
	s.mu.Unlock()
	s.Stop()
}

// Stop ends all connections and waits for everything that the server started. Handlers find their
// contexts cancelled.
func (s *Server) Stop() {
	s.mu.Lock()
	first := !s.mu.stopped
	s.mu.stopped = true
	conns := s.list()
	s.mu.Unlock()
	if first {
		close(s.quit)
	}
	for _, c := range conns {
		c.fail(ErrStopped)
	}
	s.wg.Wait()
}

// list returns the connections; under the lock.
func (s *Server) list() []*conn {
	if l := s.mu.listener; l != nil && (s.mu.draining || s.mu.stopped) {
		l.Close()
	}
	out := make([]*conn, 0, len(s.mu.conns))
	for c := range s.mu.conns {
		out = append(out, c)
	}
	return out
}

// ended forgets a connection.
func (s *Server) ended(c *conn) {
	s.mu.Lock()
	delete(s.mu.conns, c)
	s.mu.gone.Broadcast()
	s.mu.Unlock()
}

// run has a worker serve st: an idle one, or a new one. It is called by a connection's reader, which
// the server waits for, so the count of goroutines cannot have reached zero.
func (s *Server) run(st *stream) {
	select {
	case s.work <- st:
	default:
		s.wg.Go(func() { s.worker(st) })
	}
}

// worker serves one request after another.
func (s *Server) worker(st *stream) {
	for {
		st.serve()
		s.mu.Lock()
		keep := s.mu.idle < workersIdleMax
		if keep {
			s.mu.idle++
		}
		s.mu.Unlock()
		if !keep {
			return
		}
		select {
		case st = <-s.work:
		case <-s.quit:
			st = nil
		}
		s.mu.Lock()
		s.mu.idle--
		s.mu.Unlock()
		if st == nil {
			return
		}
	}
}

// keepAlive asks silent clients whether they are there.
func (s *Server) keepAlive() {
	every := max(min(s.o.Keepalive.Time, s.o.Keepalive.Timeout)/4, 10*time.Millisecond)
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		select {
		case <-s.quit:
			return
		case now := <-t.C:
			s.mu.Lock()
			conns := s.list()
			s.mu.Unlock()
			for _, c := range conns {
				c.probe(now)
			}
		}
	}
}
