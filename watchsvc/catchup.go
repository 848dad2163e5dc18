package watchsvc

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
)

// Catch-up: a watcher that is behind gets the events of [next, frontier of its group] from the
// window where that reaches back far enough, and else from the state engine, on the goroutine
// that serves its stream. All watchers of the stream in one group share the look. Once a watcher
// has everything up to the frontier it is put into the group's index, under the lock under which
// the frontier moves: nothing is lost or repeated at that seam.

// catchUp makes one step for the watcher that is furthest behind, and those in its group.
func (s *Stream) catchUp(ctx context.Context) error {
	h := s.hub
	h.mu.Lock()
	g := s.mostBehind()
	if g == nil {
		h.mu.Unlock()
		return nil
	}
	s.endCompacted(g)
	from, members := s.members(g)
	if len(members) == 0 {
		h.mu.Unlock()
		return nil
	}
	c := newCatchup(&h.o, members, from)
	to := g.frontier
	h.win.Lock()
	events, end, inWindow := h.win.m.Collect(nil, g.sources, from-1, to, h.o.BatchRevisions)
	h.win.Unlock()
	if inWindow {
		for _, e := range events {
			if !c.add(&e.Version, e.proto) {
				end = c.whole
				break
			}
		}
		s.finish(c, g, end)
		h.mu.Unlock()
		return nil
	}
	h.mu.Unlock()

	if !s.looked.IsZero() && h.o.Rest != nil {
		if err := h.o.Rest(ctx, h.o.Now().Sub(s.looked)); err != nil {
			return err
		}
	}
	began := h.o.Now()
	end = min(to, from+mvcc.Revision(h.o.ScanRevisions)-1)
	err := h.o.History.Events(ctx, from, end, c.hull, func(v *mvcc.Version) error {
		if !c.add(v, func() *mvccpb.Event { return toProto(cloneVersion(v)) }) {
			return errEnough
		}
		return nil
	})
	switch {
	case errors.Is(err, errEnough):
		end = c.whole
	case err != nil:
		// Records and versions that disagree at a floor that has just risen are no damage, and what
		// needs them ends here, or was canceled meanwhile.
		h.mu.Lock()
		ended := s.endCompacted(g) || from < h.floorLocked(g.sources)
		h.mu.Unlock()
		if ended {
			return nil
		}
		return fmt.Errorf("watchsvc: reading history %d..%d: %w", from, end, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	// The floor is looked at again after the read: it rises before the first removal (C1).
	s.endCompacted(g)
	s.finish(c, g, end)
	if s.looked = (time.Time{}); g.frontier > to { // somebody writes
		s.looked = began
	}
	return nil
}

var errEnough = errors.New("enough")

func cloneVersion(v *mvcc.Version) *mvcc.Version {
	c := *v
	both := make([]byte, 0, len(v.Key)+len(v.Value))
	both = append(append(both, v.Key...), v.Value...)
	c.Key, c.Value = both[:len(v.Key):len(v.Key)], both[len(v.Key):]
	if len(v.Value) == 0 {
		c.Value = nil
	}
	return &c
}

// mostBehind returns the group of the watcher with the lowest next. Called with Hub.mu held.
func (s *Stream) mostBehind() *group {
	var g *group
	var next mvcc.Revision
	var id int64 // a tie must not depend on chance
	for w := range s.late {
		if g == nil || w.next < next || w.next == next && w.id < id {
			g, next, id = w.group, w.next, w.id
		}
	}
	return g
}

// endCompacted cancels the group's watchers whose history is compacted, and says whether there
// were any. Only watchers that are behind are concerned: one that has everything survives any
// compaction. Called with Hub.mu held.
func (s *Stream) endCompacted(g *group) bool {
	floor := s.hub.floorLocked(g.sources)
	var over []*watcher
	for w := range s.late {
		if w.group == g && w.next < floor {
			over = append(over, w)
		}
	}
	sortByID(over)
	for _, w := range over {
		// Its id stays taken until the client cancels it, as in etcd.
		s.end(w)
		s.control(Response{ID: w.id, Canceled: true, Compacted: floor, Tag: w.tag})
	}
	return len(over) > 0
}

// members returns the group's watchers that have something to read, and where that begins; those
// that have nothing go live. Called with Hub.mu held.
func (s *Stream) members(g *group) (from mvcc.Revision, members []*watcher) {
	for w := range s.late {
		switch {
		case w.group != g:
		case w.next > g.frontier:
			s.goLive(w)
		default:
			if len(members) == 0 || w.next < from {
				from = w.next
			}
			members = append(members, w)
		}
	}
	sortByID(members)
	return from, members
}

// sortByID makes what follows independent of the order in which a map gives its keys.
func sortByID(list []*watcher) {
	slices.SortFunc(list, func(a, b *watcher) int { return cmp.Compare(a.id, b.id) })
}

// goLive puts a watcher that has everything up to its group's frontier into the index. Called with
// Hub.mu held.
func (s *Stream) goLive(w *watcher) {
	s.dropBehind(w)
	w.synced = true
	w.group.synced.add(w)
}

// finish queues what was found for the watchers that still want it, which is whole through end.
// Called with Hub.mu held.
func (s *Stream) finish(c *catchup, g *group, end mvcc.Revision) {
	for _, w := range c.members {
		if w.group != g || !w.waiting || w.next > end {
			continue
		}
		if b := c.found[w]; b != nil {
			b.close(&s.hub.o)
			for _, r := range b.done {
				r.ID, r.Tag, r.Revision = w.id, w.tag, g.frontier
				s.control(r)
				s.highest = max(s.highest, mvcc.Revision(r.Events[len(r.Events)-1].Kv.ModRevision))
			}
		}
		if w.next = end + 1; w.next > g.frontier {
			s.goLive(w)
		}
	}
}

// catchup sorts events of the past into responses. It is pure.
type catchup struct {
	o       *Options
	members []*watcher
	wants   index
	hull    mvcc.Span // of all members
	found   map[*watcher]*backlog
	rev     mvcc.Revision // being added
	whole   mvcc.Revision // everything at or below was added
	full    bool          // no further revision
	bytes   int           // of events, each once
	refs    int           // to them
}

// catchupRefsMax bounds how often one look refers to the events that it found: they are shared, but
// thousands of watchers of one span each have a list of them.
const catchupRefsMax = 1 << 19

// backlog is what was found for one watcher: finished responses, and the revision being added,
// which must not be torn.
type backlog struct {
	done  []Response
	revs  int
	rev   mvcc.Revision
	open  []*mvccpb.Event
	bytes int
}

func newCatchup(o *Options, members []*watcher, from mvcc.Revision) *catchup {
	c := &catchup{o: o, members: members, found: map[*watcher]*backlog{}, rev: from - 1, whole: from - 1}
	c.hull = members[0].span
	for _, w := range members {
		c.wants.add(w)
		if bytes.Compare(w.span.Start, c.hull.Start) < 0 {
			c.hull.Start = w.span.Start
		}
		if compareEnd(w.span.End, c.hull.End) > 0 {
			c.hull.End = w.span.End
		}
	}
	return c
}

// add takes the next event in order; false when a limit is reached and it was not taken.
func (c *catchup) add(v *mvcc.Version, event func() *mvccpb.Event) bool {
	if v.Mod != c.rev {
		c.whole = v.Mod - 1
		if c.full {
			return false
		}
		c.rev = v.Mod
	}
	var pb *mvccpb.Event
	c.wants.match(v.Key, func(w *watcher) {
		if v.Mod < w.next || w.drops(v) {
			return
		}
		if pb == nil {
			pb = event()
			c.bytes += len(v.Key) + len(v.Value) + eventOverheadBytes
		}
		b := c.found[w]
		if b == nil {
			b = &backlog{}
			c.found[w] = b
		}
		if b.rev != v.Mod {
			b.close(c.o)
			b.rev = v.Mod
			b.revs++
		}
		b.open = append(b.open, pb)
		b.bytes += len(v.Key) + len(v.Value) + eventOverheadBytes
		c.refs++
		c.full = c.full || b.revs >= c.o.BatchRevisions
	})
	c.full = c.full || c.bytes >= c.o.ScanBytes || c.refs >= catchupRefsMax
	return true
}

// close puts the revision that is whole now into the last response, or into a new one when it
// would become too large: a client must be able to receive it (etcd makes one of any size).
func (b *backlog) close(o *Options) {
	if len(b.open) == 0 {
		return
	}
	if n := len(b.done); n == 0 || b.done[n-1].bytes+b.bytes > o.BatchBytes {
		b.done = append(b.done, Response{})
	}
	r := &b.done[len(b.done)-1]
	r.Events = append(r.Events, b.open...)
	r.bytes += b.bytes
	b.open, b.bytes = b.open[:0], 0
}
