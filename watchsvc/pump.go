package watchsvc

import (
	"time"

	"braid/mvcc"
)

// run is the hub's goroutine: it gives the hub a turn whenever somebody wakes it, and while
// progress requests wait.
func (h *Hub) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-h.done:
			return
		case <-h.wake:
		case <-timer.C:
		}
		if h.Turn() {
			timer.Reset(demandEvery)
		}
	}
}

// Turn releases what may be released and looks after progress requests. It says whether some still
// wait, which want another turn after a while even if nobody wakes the hub. One goroutine at a time.
func (h *Hub) Turn() (waiting bool) {
	for h.pump() {
	}
	if waiting = h.resolve(h.o.Now()); waiting {
		h.o.Demand()
	}
	return waiting
}

// pump brings every group up to what its regions are complete through; true when it stopped at
// its budget.
func (h *Hub) pump() (more bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.groups) == 0 {
		return false
	}
	sources := h.scratch.sources[:0]
	h.win.Lock()
	for _, s := range h.win.m.sources {
		if s.groups > 0 {
			sources = append(sources, s)
		}
	}
	h.win.Unlock()
	h.scratch.sources = sources
	// First how far they are, then what was fed: what a source counts on was fed before.
	h.refresh(sources)
	for _, g := range h.order {
		more = h.release(g) || more
	}
	return more
}

// release gives a group's watchers what has become whole. Called with mu held.
func (h *Hub) release(g *group) (more bool) {
	h.win.Lock()
	upto := h.win.m.Through(g.sources)
	if upto <= g.frontier {
		h.win.Unlock()
		return false
	}
	events, end, ok := h.win.m.Collect(h.scratch.events[:0], g.sources, g.frontier, upto, pumpRevisions)
	h.win.Unlock()
	if !ok {
		// The window has moved on, or a snapshot came: everybody reads the history.
		next := g.frontier + 1
		g.synced.each(func(w *watcher) { h.fallBehind(w, max(w.next, next)) })
		g.synced = index{}
		g.frontier = upto
		return false
	}
	h.dispatch(g, events)
	g.frontier = end
	clear(events)
	h.scratch.events = events[:0]
	return end < upto
}

// dispatch puts events into the queues of the watchers they concern, one response for each
// revision. Called with mu held.
func (h *Hub) dispatch(g *group, events []*Event) {
	touched := h.scratch.touched[:0]
	for i := 0; i < len(events); {
		rev := events[i].Mod
		for ; i < len(events) && events[i].Mod == rev; i++ {
			e := events[i]
			g.synced.match(e.Key, func(w *watcher) {
				if rev < w.next || w.drops(&e.Version) {
					return
				}
				if len(w.batch) == 0 {
					touched = append(touched, w)
				}
				w.batch = append(w.batch, e.proto())
				w.batchBytes += e.size()
			})
		}
		for j, w := range touched {
			if w.stream.push(w.response(rev)) {
				w.stream.highest = max(w.stream.highest, rev)
			} else {
				g.synced.remove(w)
				h.fallBehind(w, rev)
			}
			w.batch, w.batchBytes = nil, 0
			touched[j] = nil
		}
		touched = touched[:0]
	}
	h.scratch.touched = touched
}

// fallBehind makes a watcher, which the caller takes off the index, read again from next. Called
// with mu held.
func (h *Hub) fallBehind(w *watcher, next mvcc.Revision) {
	w.synced, w.next = false, next
	w.stream.addBehind(w)
}

// resolve answers progress requests that can be answered now, forgets those whose time is up, and
// says whether some still wait.
func (h *Hub) resolve(now time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for s := range h.asking {
		if s.answerProgress(now); len(s.asked) == 0 {
			delete(h.asking, s)
		}
	}
	return len(h.asking) > 0
}
