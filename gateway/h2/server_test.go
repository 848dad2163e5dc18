package h2

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/gzip"
	_ "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

type message = wrapperspb.BytesValue

// echo is a service whose methods are given by the test.
type echo struct {
	unary  func(context.Context, *message) (*message, error)
	stream func(grpc.ServerStream) error
}

var echoDesc = grpc.ServiceDesc{
	ServiceName: "test.Echo",
	HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{MethodName: "Unary", Handler: func(srv any, ctx context.Context, dec func(any) error, in grpc.UnaryServerInterceptor) (any, error) {
		m := new(message)
		if err := dec(m); err != nil {
			return nil, err
		}
		call := func(ctx context.Context, req any) (any, error) { return srv.(*echo).unary(ctx, req.(*message)) }
		if in == nil {
			return call(ctx, m)
		}
		return in(ctx, m, &grpc.UnaryServerInfo{Server: srv, FullMethod: "/test.Echo/Unary"}, call)
	}}},
	Streams: []grpc.StreamDesc{{StreamName: "Stream", ServerStreams: true, ClientStreams: true,
		Handler: func(srv any, ss grpc.ServerStream) error { return srv.(*echo).stream(ss) }}},
}

// fixture is a server with a client of grpc-go's.
type fixture struct {
	*Server
	addr   string
	client *grpc.ClientConn
	served chan error
}

func start(t *testing.T, e *echo, o Options) *fixture {
	t.Helper()
	o.Codec = encoding.GetCodecV2("proto")
	f := &fixture{Server: New(o), served: make(chan error, 1)}
	f.RegisterService(&echoDesc, e)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f.addr = l.Addr().String()
	go func() { f.served <- f.Serve(l) }()
	if f.client, err = grpc.NewClient(f.addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20))); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		f.client.Close()
		f.Stop()
		if err := <-f.served; !errors.Is(err, ErrStopped) {
			t.Errorf("Serve: %v", err)
		}
	})
	return f
}

func (f *fixture) call(ctx context.Context, in []byte, opts ...grpc.CallOption) ([]byte, error) {
	out := new(message)
	err := f.client.Invoke(ctx, "/test.Echo/Unary", wrapperspb.Bytes(in), out, opts...)
	return out.Value, err
}

func same(_ context.Context, m *message) (*message, error) { return m, nil }

func TestUnary(t *testing.T) {
	f := start(t, &echo{unary: same}, Options{})
	for _, n := range []int{0, 1, 300, 16 << 10, 70 << 10, 3 << 20} { // beyond frames and windows
		in := bytes.Repeat([]byte{byte(n), 7}, n/2)
		out, err := f.call(t.Context(), in)
		if err != nil || !bytes.Equal(in, out) {
			t.Fatalf("%d bytes: %d bytes, %v", len(in), len(out), err)
		}
		if out, err = f.call(t.Context(), in, grpc.UseCompressor(gzip.Name)); err != nil || !bytes.Equal(in, out) {
			t.Fatalf("%d bytes, compressed: %d bytes, %v", len(in), len(out), err)
		}
	}
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			for j := range 50 {
				in := bytes.Repeat([]byte{byte(i), byte(j)}, 500*(i%8))
				if out, err := f.call(t.Context(), in); err != nil || !bytes.Equal(in, out) {
					t.Errorf("%d bytes: %d bytes, %v", len(in), len(out), err)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestErrors(t *testing.T) {
	detailed, err := status.New(codes.FailedPrecondition, "100% ünusual\n").WithDetails(wrapperspb.Int64(7))
	if err != nil {
		t.Fatal(err)
	}
	var fail error
	f := start(t, &echo{unary: func(context.Context, *message) (*message, error) { return nil, fail }}, Options{RecvBytesMax: 1 << 20})
	for _, c := range []struct {
		err  error
		code codes.Code
		text string
	}{
		{detailed.Err(), codes.FailedPrecondition, "100% ünusual\n"},
		{errors.New("plain"), codes.Unknown, "plain"},
		{context.DeadlineExceeded, codes.DeadlineExceeded, "context deadline exceeded"},
		{status.Error(codes.Aborted, strings.Repeat("long ", 8<<10)), codes.Aborted, strings.Repeat("long ", 8<<10)},
	} {
		fail = c.err
		_, err := f.call(t.Context(), []byte("x"))
		if s := status.Convert(err); s.Code() != c.code || s.Message() != c.text {
			t.Errorf("%v came as %v", c.err, err)
		} else if c.err == detailed.Err() && len(s.Details()) != 1 {
			t.Errorf("details: %v", s.Details())
		}
	}
	fail = nil
	_, err = f.call(t.Context(), make([]byte, 2<<20))
	if s := status.Convert(err); s.Code() != codes.ResourceExhausted || !strings.Contains(s.Message(), "received message larger than max") {
		t.Errorf("too large: %v", err)
	}
	err = f.client.Invoke(t.Context(), "/test.Echo/Nothing", new(message), new(message))
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("unknown method: %v", err)
	}
}

func TestMetadata(t *testing.T) {
	f := start(t, &echo{unary: func(ctx context.Context, m *message) (*message, error) {
		md, ok := metadata.FromIncomingContext(ctx)
		if !ok || md.Get("who-bin")[0] != "\x00\xff" || len(md.Get("many")) != 2 || md.Get(":authority")[0] == "" {
			return nil, status.Errorf(codes.Internal, "metadata %v", md)
		}
		if p, ok := peer.FromContext(ctx); !ok || p.Addr == nil {
			return nil, status.Error(codes.Internal, "no peer")
		}
		if name, _ := grpc.Method(ctx); name != "/test.Echo/Unary" {
			return nil, status.Errorf(codes.Internal, "method %q", name)
		}
		if err := grpc.SetHeader(ctx, metadata.Pairs("h", "1")); err != nil {
			return nil, err
		}
		return m, grpc.SetTrailer(ctx, metadata.Pairs("t-bin", "\x01"))
	}}, Options{})
	for range 3 { // the second time from what is remembered
		ctx := metadata.AppendToOutgoingContext(t.Context(), "who-bin", "\x00\xff", "many", "a", "many", "b")
		var header, trailer metadata.MD
		if _, err := f.call(ctx, nil, grpc.Header(&header), grpc.Trailer(&trailer)); err != nil {
			t.Fatal(err)
		}
		if header.Get("h")[0] != "1" || trailer.Get("t-bin")[0] != "\x01" {
			t.Errorf("header %v, trailer %v", header, trailer)
		}
	}
}

// TestEnds: deadlines, cancellations and lost connections reach the handler's context, and contexts
// made of it.
func TestEnds(t *testing.T) {
	causes := make(chan error, 1)
	running := make(chan struct{}, 1)
	f := start(t, &echo{unary: func(ctx context.Context, m *message) (*message, error) {
		child, cancel := context.WithTimeout(ctx, time.Hour)
		defer cancel()
		running <- struct{}{}
		<-child.Done()
		<-ctx.Done()
		causes <- ctx.Err()
		return m, ctx.Err()
	}}, Options{})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-running; cancel() }()
	if _, err := f.call(ctx, nil); status.Code(err) != codes.Canceled {
		t.Errorf("cancelled: %v", err)
	}
	if err := <-causes; !errors.Is(err, context.Canceled) {
		t.Errorf("the handler saw %v", err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := f.call(ctx, nil); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("late: %v", err)
	}
	if err := <-causes; err == nil { // whichever of deadline and reset came first
		t.Error("the handler saw nothing")
	}
	<-running
	go func() { <-running; f.client.Close() }()
	if _, err := f.call(t.Context(), nil); err == nil {
		t.Error("no error of a closed connection")
	}
	if err := <-causes; !errors.Is(err, context.Canceled) {
		t.Errorf("the handler saw %v", err)
	}
}

func (f *fixture) open(t *testing.T, ctx context.Context) grpc.ClientStream {
	t.Helper()
	cs, err := f.client.NewStream(ctx, &echoDesc.Streams[0], "/test.Echo/Stream")
	if err != nil {
		t.Fatal(err)
	}
	return cs
}

func TestStream(t *testing.T) {
	f := start(t, &echo{stream: func(ss grpc.ServerStream) error {
		for {
			m := new(message)
			err := ss.RecvMsg(m)
			if errors.Is(err, io.EOF) {
				return status.Error(codes.DataLoss, "bye")
			}
			if err != nil {
				return err
			}
			if err := ss.SendMsg(m); err != nil {
				return err
			}
		}
	}}, Options{})
	cs := f.open(t, t.Context())
	const n = 400
	go func() {
		for i := range n {
			size := i
			if i%50 == 0 {
				size = 2 << 20 // larger than the stream's window
			}
			if err := cs.SendMsg(wrapperspb.Bytes(make([]byte, size))); err != nil {
				t.Errorf("send: %v", err)
			}
		}
		cs.CloseSend()
	}()
	for i := range n {
		m := new(message)
		if err := cs.RecvMsg(m); err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
		if want := i; i%50 != 0 && len(m.Value) != want {
			t.Fatalf("message %d has %d bytes", i, len(m.Value))
		}
	}
	if err := cs.RecvMsg(new(message)); status.Code(err) != codes.DataLoss {
		t.Errorf("end: %v", err)
	}
}

// TestSlowHandler: a client cannot make the server keep more than the window of a stream whose
// handler does not read.
func TestSlowHandler(t *testing.T) {
	read := make(chan struct{})
	f := start(t, &echo{stream: func(ss grpc.ServerStream) error {
		<-read
		for {
			if err := ss.RecvMsg(new(message)); err != nil {
				if errors.Is(err, io.EOF) {
					return nil
				}
				return err
			}
		}
	}}, Options{})
	cs := f.open(t, t.Context())
	sent := make(chan int, 1)
	const n = 1000
	go func() {
		for range n {
			if err := cs.SendMsg(wrapperspb.Bytes(make([]byte, 16<<10))); err != nil {
				t.Errorf("send: %v", err)
			}
		}
		cs.CloseSend()
		sent <- n
	}()
	select {
	case <-sent:
		t.Fatal("16 MB went to a handler that does not read")
	case <-time.After(200 * time.Millisecond):
	}
	close(read)
	if err := cs.RecvMsg(new(message)); !errors.Is(err, io.EOF) {
		t.Errorf("end: %v", err)
	}
	<-sent
}

// TestGracefulStop: what runs is answered, what comes later is refused.
func TestGracefulStop(t *testing.T) {
	running, release := make(chan struct{}), make(chan struct{})
	f := start(t, &echo{unary: func(_ context.Context, m *message) (*message, error) {
		running <- struct{}{}
		<-release
		return m, nil
	}}, Options{})
	answered := make(chan error, 1)
	go func() {
		_, err := f.call(t.Context(), []byte("x"))
		answered <- err
	}()
	<-running
	stopped := make(chan struct{})
	go func() {
		f.GracefulStop()
		close(stopped)
	}()
	for { // until the listener is closed
		nc, err := net.Dial("tcp", f.addr)
		if err != nil {
			break
		}
		nc.Close()
	}
	close(release)
	if err := <-answered; err != nil {
		t.Errorf("the running request: %v", err)
	}
	<-stopped
	if _, err := f.call(t.Context(), nil); status.Code(err) != codes.Unavailable {
		t.Errorf("after the stop: %v", err)
	}
}

func TestStopEndsHandlers(t *testing.T) {
	running := make(chan struct{})
	f := start(t, &echo{stream: func(ss grpc.ServerStream) error {
		close(running)
		return ss.RecvMsg(new(message))
	}}, Options{})
	cs := f.open(t, t.Context())
	<-running
	f.Stop()
	if err := cs.RecvMsg(new(message)); err == nil {
		t.Error("the stream goes on")
	}
}

func TestKeepalive(t *testing.T) {
	f := start(t, &echo{unary: same}, Options{Keepalive: keepalive.ServerParameters{Time: 50 * time.Millisecond, Timeout: 50 * time.Millisecond}})
	nc, err := net.Dial("tcp", f.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if _, err := nc.Write(appendSettings([]byte(preface))); err != nil {
		t.Fatal(err)
	}
	// It never answers the server's ping, so it is given up.
	if _, err := io.Copy(io.Discard, nc); err != nil {
		t.Logf("closed with %v", err)
	}
	if _, err := f.call(t.Context(), nil); err != nil {
		t.Errorf("a client that answers: %v", err)
	}
}
