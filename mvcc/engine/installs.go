package engine

import (
	"errors"
	"slices"
	"sync"

	"braid/mvcc"
)

// ErrSpanReplaced says that a collection met an import of its span. What it was asked to remove
// was decided on a state, and against a floor, that no longer exists (A11): the caller reads the
// floor that came with the import and starts again.
var ErrSpanReplaced = errors.New("engine: span was replaced by a snapshot")

// installs keeps collections and imports of overlapping spans apart: an import voids collections
// that run, and none may start while it runs.
type installs struct {
	mu      sync.Mutex // held over each commit of a collection
	running []mvcc.Span
	gcs     []*gcRun
}

// gcRun is a collection that is under way.
type gcRun struct {
	span mvcc.Span
	void bool // guarded by installs.mu
}

func overlaps(a, b mvcc.Span) bool { return !a.Intersect(b).Empty() }

func (i *installs) begin(span mvcc.Span) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.running = append(i.running, span)
	for _, g := range i.gcs {
		if overlaps(g.span, span) {
			g.void = true
		}
	}
}

func (i *installs) end(span mvcc.Span) {
	i.mu.Lock()
	defer i.mu.Unlock()
	n := slices.IndexFunc(i.running, func(s mvcc.Span) bool { return s.String() == span.String() })
	i.running = slices.Delete(i.running, n, n+1)
}

func (i *installs) beginGC(span mvcc.Span) (*gcRun, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, s := range i.running {
		if overlaps(s, span) {
			return nil, ErrSpanReplaced
		}
	}
	g := &gcRun{span: span}
	i.gcs = append(i.gcs, g)
	return g, nil
}

func (i *installs) endGC(g *gcRun) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.gcs = slices.DeleteFunc(i.gcs, func(x *gcRun) bool { return x == g })
}
