package h2

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// rawClient speaks frames.
type rawClient struct {
	t  *testing.T
	nc net.Conn
	r  *bufio.Reader
}

func dialRaw(t *testing.T, f *fixture) *rawClient {
	nc, err := net.Dial("tcp", f.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	if err := nc.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	c := &rawClient{t, nc, bufio.NewReader(nc)}
	c.send(appendSettings([]byte(preface)))
	return c
}

func (c *rawClient) send(b []byte) {
	c.t.Helper()
	if _, err := c.nc.Write(b); err != nil {
		c.t.Logf("write: %v", err) // the server may have closed
	}
}

// next returns the next frame; ok is false at the end of the connection.
func (c *rawClient) next() (h frameHead, p []byte, ok bool) {
	b := make([]byte, frameHeadBytes)
	if _, err := io.ReadFull(c.r, b); err != nil {
		return h, nil, false
	}
	h = parseHead(b)
	p = make([]byte, h.length)
	_, err := io.ReadFull(c.r, p)
	return h, p, err == nil
}

// until returns the payload of the next frame of a kind.
func (c *rawClient) until(kind byte) []byte {
	c.t.Helper()
	for {
		h, p, ok := c.next()
		if !ok {
			c.t.Fatalf("the connection ended before a frame of kind %d", kind)
		}
		if h.kind == kind {
			return p
		}
	}
}

// goneFor waits for the end of the connection, which must name a reason.
func (c *rawClient) goneFor(code uint32) {
	c.t.Helper()
	p := c.until(frameGoAway)
	if got := binary.BigEndian.Uint32(p[4:]); got != code {
		c.t.Errorf("the connection ended with code %d %q, want %d", got, p[8:], code)
	}
	for {
		if _, _, ok := c.next(); !ok {
			return
		}
	}
}

func requestHeaders(path string) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for _, f := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", path}, {":authority", "x"}, {"content-type", "application/grpc"}, {"te", "trailers"}} {
		if err := e.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}); err != nil {
			panic(err)
		}
	}
	return b.Bytes()
}

func requestBody(n int) []byte {
	m, err := proto.Marshal(wrapperspb.Bytes(make([]byte, n)))
	if err != nil {
		panic(err)
	}
	return append(appendPrefix(nil, len(m)), m...)
}

// TestFrames: headers in pieces, padding, data byte by byte.
func TestFrames(t *testing.T) {
	f := start(t, &echo{unary: same}, Options{})
	c := dialRaw(t, f)
	block, body := requestHeaders("/test.Echo/Unary"), requestBody(3)
	b := append(appendHead(nil, 5, frameHeaders, 0, 1), block[:5]...)
	b = append(appendHead(b, 1, frameContinuation, 0, 1), block[5])
	b = append(appendHead(b, len(block)-6, frameContinuation, flagEndHeaders, 1), block[6:]...)
	for i, x := range body {
		flags := byte(flagPadded)
		if i == len(body)-1 {
			flags |= flagEndStream
		}
		b = append(appendHead(b, 5, frameData, flags, 1), 3, x, 0, 0, 0)
	}
	for _, x := range b {
		c.send([]byte{x})
	}
	if p := c.until(frameData); !bytes.Equal(p, body) {
		t.Errorf("the answer is %x, want %x", p, body)
	}
}

// TestWindows: an answer waits for the client's windows.
func TestWindows(t *testing.T) {
	f := start(t, &echo{unary: same}, Options{})
	c := dialRaw(t, f)
	c.send(appendSettings(nil, [2]uint32{settingInitialWindow, 4}))
	block, body := requestHeaders("/test.Echo/Unary"), requestBody(20)
	b := append(appendHead(nil, len(block), frameHeaders, flagEndHeaders, 1), block...)
	c.send(append(appendHead(b, len(body), frameData, flagEndStream, 1), body...))
	var got []byte
	for len(got) < len(body) {
		p := c.until(frameData)
		if len(p) > 4 {
			t.Fatalf("%d bytes into a window of 4", len(p))
		}
		got = append(got, p...)
		c.send(appendWindow(nil, 1, uint32(len(p))))
	}
	if !bytes.Equal(got, body) {
		t.Errorf("the answer is %x", got)
	}
}

func TestOffences(t *testing.T) {
	f := start(t, &echo{unary: same, stream: nil}, Options{})
	block := requestHeaders("/test.Echo/Unary")
	headers := func(id uint32, flags byte) []byte {
		return append(appendHead(nil, len(block), frameHeaders, flags, id), block...)
	}
	for _, o := range []struct {
		name string
		code uint32
		b    []byte
	}{
		{"even stream", codeProtocol, headers(2, flagEndHeaders)},
		{"data of no stream", codeProtocol, appendHead(nil, 0, frameData, 0, 5)},
		{"reset of no stream", codeProtocol, appendReset(nil, 7, codeCancel)},
		{"interrupted headers", codeProtocol, append(headers(1, 0), appendPing(nil, 0, make([]byte, 8))...)},
		{"continuation of nothing", codeProtocol, appendHead(nil, 0, frameContinuation, flagEndHeaders, 1)},
		{"large frame", codeFrameSize, appendHead(nil, frameBytesMax+1, frameData, 0, 1)},
		{"no block", codeCompression, append(appendHead(nil, 2, frameHeaders, flagEndHeaders, 1), 0xff, 0xff)},
		{"padding", codeProtocol, append(appendHead(headers(1, flagEndHeaders), 1, frameData, flagPadded, 1), 9)},
		{"large window", codeFlowControl, appendWindow(nil, 0, windowMax)},
		{"empty continuations", codeEnhanceYourCalm, appendHead(headers(1, 0), 0, frameContinuation, 0, 1)},
		{"pings", codeEnhanceYourCalm, bytes.Repeat(appendPing(nil, 0, make([]byte, 8)), 8)},
	} {
		t.Run(o.name, func(t *testing.T) {
			c := dialRaw(t, f)
			c.send(o.b)
			c.goneFor(o.code)
		})
	}
	t.Run("beyond the stream's window", func(t *testing.T) {
		c := dialRaw(t, f)
		b := append(appendHead(nil, len(block), frameHeaders, flagEndHeaders, 1), block...)
		b = append(appendHead(b, prefixBytes, frameData, 0, 1), 0, 0, 0xff, 0xff, 0xff)
		frame := append(appendHead(nil, frameBytesMax, frameData, 0, 1), make([]byte, frameBytesMax)...)
		for range connWindow/frameBytesMax + 1 {
			b = append(b, frame...) // without looking at window updates
		}
		go c.send(b)
		p := c.until(frameWindow) // they come all the same
		if len(p) != 4 {
			t.Errorf("a window update of %d bytes", len(p))
		}
	})
	if _, err := f.call(t.Context(), []byte("still there")); err != nil {
		t.Error(err)
	}
}

// FuzzFrames: whatever a client sends, the server neither panics nor hangs.
func FuzzFrames(f *testing.F) {
	block, body := requestHeaders("/test.Echo/Unary"), requestBody(9)
	good := append(appendHead(appendSettings(nil), len(block), frameHeaders, flagEndHeaders, 1), block...)
	good = append(appendHead(good, len(body), frameData, flagEndStream, 1), body...)
	f.Add(good)
	f.Add(append(appendPing(good, 0, make([]byte, 8)), appendReset(nil, 1, codeCancel)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := New(Options{Codec: encoding.GetCodecV2("proto"), RecvBytesMax: 1 << 16})
		s.RegisterService(&echoDesc, &echo{unary: func(_ context.Context, m *message) (*message, error) { return m, nil }})
		client, server := net.Pipe()
		c := newConn(s, server)
		s.mu.conns[c] = struct{}{}
		s.wg.Go(c.read)
		s.wg.Go(c.flusher)
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = io.Copy(io.Discard, client) // until it is closed
		}()
		_, _ = client.Write(append([]byte(preface), b...)) // the server may close first
		client.Close()
		<-done
		s.Stop()
	})
}
