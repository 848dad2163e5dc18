// Package transporttest has faults of the network between stores, for tests.
package transporttest

import (
	"net"
	"sync"
	"testing"
)

// Proxy stands before a store's listener. While it is blocked, connections to the store stand and lose
// everything, in both directions, as behind a cut cable; those that the store itself has dialed do not
// go through it, so that the store is heard and cannot be reached. All methods may be called from any
// goroutine.
type Proxy struct {
	l    net.Listener
	done sync.WaitGroup

	mu      sync.Mutex
	conns   []net.Conn
	blocked bool
	closed  bool
}

// NewProxy returns a proxy to an address, which ends with the test.
func NewProxy(t testing.TB, to string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{l: l}
	p.done.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				_ = in.Close() // the store is down
				continue
			}
			if !p.add(in, out) {
				return
			}
			p.done.Go(func() { p.copy(in, out) })
			p.done.Go(func() { p.copy(out, in) })
		}
	})
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Errorf("closing the proxy: %v", err)
		}
		p.mu.Lock()
		p.closed = true
		p.mu.Unlock()
		p.Unblock()
		p.done.Wait()
	})
	return p
}

// Addr is where to connect to instead of the store.
func (p *Proxy) Addr() string { return p.l.Addr().String() }

// Block begins to lose what comes.
func (p *Proxy) Block() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.blocked = true
}

// Unblock ends a block, and the connections that may have lost something.
func (p *Proxy) Unblock() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.blocked = false
	for _, c := range p.conns {
		_ = c.Close() // the other end may have been first
	}
	p.conns = nil
}

func (p *Proxy) add(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		for _, c := range conns {
			_ = c.Close()
		}
		return false
	}
	p.conns = append(p.conns, conns...)
	return true
}

func (p *Proxy) copy(dst, src net.Conn) {
	defer func() { _, _ = dst.Close(), src.Close() }()
	b := make([]byte, 64<<10)
	for {
		n, err := src.Read(b)
		if err != nil {
			return
		}
		p.mu.Lock()
		blocked := p.blocked
		p.mu.Unlock()
		if blocked {
			continue
		}
		if _, err := dst.Write(b[:n]); err != nil {
			return
		}
	}
}
