package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// gRPC and HTTP share a port. Each keeps its own server, because gRPC inside net/http costs about
// twice as much as gRPC on its own transport; so the connection decides:
//
//   - without TLS, the HTTP/2 preface means gRPC and anything else HTTP, as in etcd;
//   - with TLS, a client that offers HTTP/2 and nothing else in its hello is a gRPC client (curl,
//     browsers and Go's http client all offer HTTP/1.1 too); everybody else goes to the HTTP
//     server, which passes on requests with gRPC's content type, the slower way that etcd takes
//     for all TLS connections;
//   - where both are allowed, TLS begins with a byte that nothing else begins with.
//
// A port for one of the two only skips the second question.
//
// Both ways need no guess about a connection that says nothing: nothing is decided before the
// client has spoken, and a client that does not is dropped after sniffTimeout.

// sniffTimeout bounds the handshake and the wait for a connection's first bytes.
const sniffTimeout = time.Minute

var http2Preface = []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")

// Port says what may be spoken over a listener's connections.
type Port struct {
	TLS      *tls.Config // nil: no TLS
	Plain    bool        // also without TLS; meant always when TLS is nil
	OnlyGRPC bool
	OnlyHTTP bool
}

// Serve accepts connections until Stop, or until the listener fails. It closes the listener.
// Several Serve calls may run at a time.
func (s *Server) Serve(l net.Listener, port Port) error {
	s.mu.Lock()
	if s.mu.stopped {
		s.mu.Unlock()
		l.Close()
		return errStopped
	}
	s.accepting.Add(1)
	s.mu.listeners[l] = struct{}{}
	s.mu.Unlock()
	defer s.accepting.Done()
	defer func() {
		l.Close()
		s.mu.Lock()
		delete(s.mu.listeners, l)
		s.mu.Unlock()
	}()
	if port.TLS != nil {
		port.TLS = sniffingConfig(port.TLS)
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			s.mu.Lock()
			stopped := s.mu.stopped
			s.mu.Unlock()
			if stopped {
				return nil
			}
			var temporary interface{ Temporary() bool }
			if errors.As(err, &temporary) && temporary.Temporary() && !errors.Is(err, net.ErrClosed) {
				// Out of file descriptors, most likely: wait for some to come back.
				t := time.NewTimer(50 * time.Millisecond)
				<-t.C
				continue
			}
			return err
		}
		s.mu.Lock()
		if s.mu.stopped {
			s.mu.Unlock()
			conn.Close()
			return nil
		}
		s.mu.sniffing[conn] = struct{}{}
		s.accepting.Add(1)
		s.mu.Unlock()
		go func() {
			defer s.accepting.Done()
			s.dispatch(conn, &port)
		}()
	}
}

var errStopped = errors.New("gateway: stopped")

// dispatch finds out what a connection speaks and hands it to the server for that.
func (s *Server) dispatch(conn net.Conn, port *Port) {
	to, ready, err := s.sniff(conn, port)
	s.mu.Lock()
	delete(s.mu.sniffing, conn)
	stopped := s.mu.stopped
	s.mu.Unlock()
	if err == nil && !stopped && to.deliver(ready) {
		return
	}
	conn.Close()
	if err != nil && !stopped && !errors.Is(err, io.EOF) {
		s.cfg.Logger.Warn("rejected connection on client endpoint",
			zap.String("remote-addr", conn.RemoteAddr().String()), zap.Error(err))
	}
}

// tlsRecord begins every TLS connection: the type of a handshake record. No HTTP begins with it.
var tlsRecord = []byte{22}

func (s *Server) sniff(conn net.Conn, port *Port) (to *connListener, ready net.Conn, err error) {
	if err := conn.SetDeadline(time.Now().Add(sniffTimeout)); err != nil {
		return nil, nil, err
	}
	secure := port.TLS != nil
	if secure && port.Plain {
		p := &peekedConn{Conn: conn}
		if secure, err = p.peek(tlsRecord); err != nil {
			return nil, nil, err
		}
		conn = p
	}
	var isGRPC bool
	if secure {
		hello := &helloConn{Conn: conn}
		tc := tls.Server(hello, port.TLS)
		if err := tc.HandshakeContext(context.Background()); err != nil {
			return nil, nil, err
		}
		ready, isGRPC = tc, hello.onlyHTTP2
	} else {
		p := &peekedConn{Conn: conn}
		if isGRPC, err = p.peek(http2Preface); err != nil {
			return nil, nil, err
		}
		ready = p
	}
	to = s.httpConns
	if port.OnlyGRPC || isGRPC && !port.OnlyHTTP {
		to = s.grpcConns
	}
	return to, ready, conn.SetDeadline(time.Time{})
}

// helloConn remembers what a client offered in its TLS hello.
type helloConn struct {
	net.Conn
	onlyHTTP2 bool
}

// sniffingConfig makes a server's configuration note in helloConn what the client offers.
func sniffingConfig(config *tls.Config) *tls.Config {
	c := config.Clone()
	for _, proto := range []string{"h2", "http/1.1"} {
		if !slices.Contains(c.NextProtos, proto) {
			c.NextProtos = append(slices.Clip(c.NextProtos), proto)
		}
	}
	inner := c.GetConfigForClient
	c.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if h, ok := hello.Conn.(*helloConn); ok {
			h.onlyHTTP2 = slices.Contains(hello.SupportedProtos, "h2") &&
				!slices.Contains(hello.SupportedProtos, "http/1.1")
		}
		if inner != nil {
			return inner(hello)
		}
		return nil, nil
	}
	return c
}

// peekedConn is a connection whose first bytes have been looked at.
type peekedConn struct {
	net.Conn
	head []byte // read from Conn, not yet from here
}

// peek says whether the connection starts with want, reading no more than it has to.
func (c *peekedConn) peek(want []byte) (bool, error) {
	buf := make([]byte, 0, len(want))
	for {
		n, err := c.Conn.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		c.head = buf
		switch {
		case !bytes.HasPrefix(want, buf):
			return false, nil
		case len(buf) == len(want):
			return true, nil
		case err != nil:
			return false, err
		}
	}
}

func (c *peekedConn) Read(p []byte) (int, error) {
	if len(c.head) > 0 {
		n := copy(p, c.head)
		if c.head = c.head[n:]; len(c.head) == 0 {
			c.head = nil
		}
		return n, nil
	}
	return c.Conn.Read(p)
}

// connListener is a listener for connections that were accepted elsewhere.
type connListener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newConnListener() *connListener {
	return &connListener{conns: make(chan net.Conn), closed: make(chan struct{})}
}

// deliver waits until the server takes the connection, false when it takes no more.
func (l *connListener) deliver(c net.Conn) bool {
	select {
	case l.conns <- c:
		return true
	case <-l.closed:
		return false
	}
}

func (l *connListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *connListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *connListener) Addr() net.Addr { return localAddr{} }

type localAddr struct{}

func (localAddr) Network() string { return "local" }
func (localAddr) String() string  { return "gateway" }

// connCredentials tells gRPC about TLS that has been negotiated already.
type connCredentials struct{}

func (connCredentials) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if tc, ok := c.(*tls.Conn); ok {
		return c, credentials.TLSInfo{
			State:          tc.ConnectionState(),
			CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
		}, nil
	}
	return insecure.NewCredentials().ServerHandshake(c)
}

func (connCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("gateway: server credentials cannot dial")
}

func (connCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}
func (c connCredentials) Clone() credentials.TransportCredentials { return c }
func (connCredentials) OverrideServerName(string) error           { return nil }
