package engine

import (
	"fmt"
	"sync"

	"github.com/cockroachdb/pebble/v2"

	"braid/mvcc"
)

// Snapshot is the engine's visible state at one moment. It stays as it is while batches, GC and
// imports go on. It keeps memtables and tables alive: close it soon.
//
// It pins an iterator rather than a Pebble snapshot. Those read the current tables at an old
// sequence number, and an import that excises their span takes the data away under them.
type Snapshot struct {
	reader
	pin *pinned
}

// pinned hands out iterators over the state of one that is never moved.
type pinned struct {
	mu sync.Mutex // guards base against a use after Close
	it *pebble.Iterator
}

func (p *pinned) newIter(o *pebble.IterOptions) (*pebble.Iterator, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.it == nil {
		return nil, fmt.Errorf("engine: snapshot is closed")
	}
	if o == nil {
		o = new(pebble.IterOptions)
	}
	return p.it.Clone(pebble.CloneOptions{IterOptions: o})
}

// Snapshot pins the visible state. The caller must Close it, before the Engine.
func (e *Engine) Snapshot() (*Snapshot, error) {
	it, err := e.db.NewIter(nil)
	if err != nil {
		return nil, fmt.Errorf("engine: snapshot: %w", err)
	}
	p := &pinned{it: it}
	return &Snapshot{reader: reader{src: p}, pin: p}, nil
}

var _ mvcc.Reader = (*Snapshot)(nil)

// Close releases the state. Reads that are under way finish.
func (s *Snapshot) Close() error {
	s.pin.mu.Lock()
	defer s.pin.mu.Unlock()
	if s.pin.it == nil {
		return nil
	}
	err := s.pin.it.Close()
	s.pin.it = nil
	return err
}
