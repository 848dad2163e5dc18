package watchsvc

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
)

// Refusals of a watch, with etcd's texts where etcd has them.
var (
	ErrEmptyRange  = errors.New("mvcc: watcher range is empty")
	ErrDuplicateID = errors.New("mvcc: duplicate watch ID provided on the WatchStream")
	ErrTooMany     = errors.New("etcdserver: too many requests")
	// ErrNotHere: some of the span belongs to no region that was attached. A node attaches all regions,
	// those of other stores too, before it serves.
	ErrNotHere = errors.New("braid: a watch of regions that this node does not know is not available")
)

// AllWatchers is the id of a progress response that speaks for every watcher of the stream, and of
// a watcher that was refused.
const AllWatchers = -1

// Request asks for a watch.
type Request struct {
	ID    int64 // 0: the stream chooses
	Span  mvcc.Span
	Start mvcc.Revision // first revision wanted; 0: after the current one

	NoPut, NoDelete bool
	// Tag is whatever the caller wants to find again in the responses.
	Tag any
}

// Response is what goes to the client. Events are shared and must not be changed.
type Response struct {
	ID       int64
	Revision mvcc.Revision // of the header; 0 in a cancellation by compaction, as in etcd
	Events   []*mvccpb.Event

	Created, Canceled bool
	Compacted         mvcc.Revision // the floor, when that is why it was canceled
	Refused           error         // why it was canceled at once
	Tag               any

	bytes int
}

// watcher is one watch. Guarded by Hub.mu.
type watcher struct {
	id      int64
	span    mvcc.Span
	start   mvcc.Revision // as requested
	noPut   bool
	noDel   bool
	tag     any
	stream  *Stream
	group   *group // nil once it is over
	next    mvcc.Revision
	synced  bool // in group.synced: has everything in [next, frontier]
	waiting bool // behind
	at      int  // in the set of its span that holds it

	batch      []*mvccpb.Event // of the revision being dispatched
	batchBytes int
}

func (w *watcher) drops(v *mvcc.Version) bool {
	if v.Tombstone() {
		return w.noDel
	}
	return w.noPut
}

func (w *watcher) response(rev mvcc.Revision) Response {
	return Response{ID: w.id, Revision: rev, Events: w.batch, Tag: w.tag, bytes: w.batchBytes}
}

// progress is a request that waits.
type progress struct {
	target mvcc.Revision
	until  time.Time
}

// progressMax bounds the requests of a stream that wait; more get no answer, nor does one that finds
// the queue full, as in etcd: who has not read so much asks again.
const progressMax = 128

// Stream is some watchers of one client, with one queue of responses. One goroutine calls Watch,
// Cancel and the progress methods, one (it may be the same) calls Next. Close ends it.
type Stream struct {
	hub *Hub

	// Guarded by Hub.mu.
	watchers map[int64]*watcher
	late     map[*watcher]struct{} // behind
	asked    []progress
	nextID   int64
	highest  mvcc.Revision // of all that was queued, progress of single watchers too
	over     bool

	behind atomic.Int32 // len(late)
	taken  int          // responses since the last look at the history; of Next's goroutine
	// looked is when the last look at the history began, if others wrote meanwhile, else zero; of
	// Next's goroutine.
	looked time.Time

	mu     sync.Mutex // guards below
	queue  []Response
	head   int
	bytes  int
	ready  chan struct{}
	room   chan struct{}
	closed bool
}

// NewStream returns a stream without watchers.
func (h *Hub) NewStream() *Stream {
	h.streams.Add(1)
	return &Stream{
		hub: h, watchers: map[int64]*watcher{}, late: map[*watcher]struct{}{},
		ready: make(chan struct{}, 1), room: make(chan struct{}, 1),
	}
}

// Ready signals that Next may have something.
func (s *Stream) Ready() <-chan struct{} { return s.ready }

func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// push queues a live response; false when there is no room.
func (s *Stream) push(r Response) bool {
	o := &s.hub.o
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return true
	}
	if n := len(s.queue) - s.head; n >= o.QueueMax || (n > 0 && s.bytes+r.bytes > o.QueueBytesMax) {
		return false
	}
	s.put(r)
	return true
}

// control queues a response that nobody can read again from history. Its kinds are bounded by who
// makes them: awaitRoom, progressMax and the number of watchers.
func (s *Stream) control(r Response) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.put(r)
	}
}

func (s *Stream) put(r Response) {
	if s.head > 0 && len(s.queue) == cap(s.queue) {
		n := copy(s.queue, s.queue[s.head:])
		clear(s.queue[n:])
		s.queue, s.head = s.queue[:n], 0
	}
	s.queue = append(s.queue, r)
	s.bytes += r.bytes
	s.hub.pending.Add(int64(len(r.Events)))
	signal(s.ready)
}

// pop takes the oldest response.
func (s *Stream) pop() (Response, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.head == len(s.queue) {
		return Response{}, false
	}
	r := s.queue[s.head]
	s.queue[s.head] = Response{}
	if s.head++; s.head == len(s.queue) {
		s.queue, s.head = s.queue[:0], 0
	}
	s.bytes -= r.bytes
	s.hub.pending.Add(-int64(len(r.Events)))
	s.hub.sent.Add(uint64(len(r.Events)))
	signal(s.room)
	return r, true
}

func (s *Stream) waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.queue) - s.head
}

// awaitRoom makes whoever reads the client's requests wait for the client to read its answers.
func (s *Stream) awaitRoom(ctx context.Context) error {
	for s.waiting() >= s.hub.o.QueueMax {
		select {
		case <-s.room:
		case <-ctx.Done():
			return ctx.Err()
		case <-s.hub.done:
			return ErrClosed
		}
	}
	return nil
}

// livePerScan is how many queued responses go out before watchers that are behind have a turn,
// unless the queue is rather full: what history brings comes on top of it.
const livePerScan = 16

// Next returns the next response; false when there is none, and then Ready signals the next. For
// watchers that are behind it reads history, which takes as long as it takes.
func (s *Stream) Next(ctx context.Context) (Response, bool, error) {
	for {
		behind := s.behind.Load() > 0
		if !behind || s.taken < livePerScan || s.waiting() > s.hub.o.QueueMax/2 {
			if r, ok := s.pop(); ok {
				s.taken++
				return r, true, nil
			}
		}
		if !behind {
			return Response{}, false, nil
		}
		s.taken = 0
		if err := s.catchUp(ctx); err != nil {
			return Response{}, false, err
		}
	}
}

// Watch adds a watcher. What becomes of it is in the responses: created, or created and refused.
// An error means that ctx or the hub has ended.
func (s *Stream) Watch(ctx context.Context, req Request) error {
	if err := s.awaitRoom(ctx); err != nil {
		return err
	}
	h := s.hub
	current := h.Current()
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.over {
		return ErrClosed
	}
	w, err := s.addLocked(&req, current)
	if err != nil {
		s.control(Response{ID: AllWatchers, Revision: current, Created: true, Canceled: true, Refused: err, Tag: req.Tag})
		return nil
	}
	s.control(Response{ID: w.id, Revision: current, Created: true, Tag: req.Tag})
	s.highest = max(s.highest, current)
	if w.next <= w.group.frontier || req.Start > 0 && req.Start < h.floorLocked(w.group.sources) {
		s.addBehind(w)
	} else {
		w.synced = true
		w.group.synced.add(w)
	}
	// What was fed since the group was made may have found nobody to wake the hub for.
	signal(h.wake)
	return nil
}

// addLocked checks a request and makes its watcher. Called with Hub.mu held.
func (s *Stream) addLocked(req *Request, current mvcc.Revision) (*watcher, error) {
	h := s.hub
	if req.Span.Empty() {
		return nil, ErrEmptyRange
	}
	id := req.ID
	if id == 0 {
		for id = s.nextID; s.watchers[id] != nil; id++ {
		}
	} else if s.watchers[id] != nil {
		return nil, ErrDuplicateID
	}
	if h.watchers.Load() >= int64(h.o.WatchersMax) {
		return nil, ErrTooMany
	}
	w := &watcher{id: id, span: req.Span, start: req.Start, noPut: req.NoPut, noDel: req.NoDelete, tag: req.Tag, stream: s, next: req.Start}
	// Whatever is current now, the regions of this span may not be complete through it; then the
	// watcher is silent until they are (C-6).
	if w.start == 0 {
		w.next = current + 1
	}
	if !h.joinLocked(w) {
		return nil, ErrNotHere
	}
	if req.ID == 0 {
		s.nextID = id + 1
	}
	s.watchers[id] = w
	h.watchers.Add(1)
	return w, nil
}

// Refuse queues the answer to a watch that the caller refuses.
func (s *Stream) Refuse(ctx context.Context, err error) error {
	if err := s.awaitRoom(ctx); err != nil {
		return err
	}
	s.control(Response{ID: AllWatchers, Revision: s.hub.Current(), Created: true, Canceled: true, Refused: err})
	return nil
}

// Cancel ends a watcher; an unknown id has no answer. An error means that ctx or the hub has ended.
func (s *Stream) Cancel(ctx context.Context, id int64) error {
	if err := s.awaitRoom(ctx); err != nil {
		return err
	}
	current := s.hub.Current()
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	w := s.watchers[id]
	if w == nil {
		return nil
	}
	s.end(w)
	s.remove(w)
	s.control(Response{ID: id, Revision: current, Canceled: true, Tag: w.tag})
	return nil
}

// Led says whether every region that the stream watches has a leader as far as is known here. Who
// requires one is better served elsewhere when that has not been so for a while (W2). Any goroutine.
func (s *Stream) Led() bool {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	looked := map[*group]bool{nil: true} // watchers that are over have none, and many share one
	for _, w := range s.watchers {
		if looked[w.group] {
			continue
		}
		looked[w.group] = true
		for _, src := range w.group.sources {
			if !src.live.Led() {
				return false
			}
		}
	}
	return true
}

// end takes a watcher out of everything but the stream's list, where it still counts. Called with
// Hub.mu held.
func (s *Stream) end(w *watcher) {
	if w.group == nil {
		return // its history was compacted
	}
	s.dropBehind(w)
	s.hub.leaveLocked(w)
}

// remove takes a watcher that has ended off the list. Called with Hub.mu held.
func (s *Stream) remove(w *watcher) {
	delete(s.watchers, w.id)
	s.hub.watchers.Add(-1)
}

// addBehind and dropBehind keep the list of watchers that read history. Called with Hub.mu held.
func (s *Stream) addBehind(w *watcher) {
	if !w.waiting {
		w.waiting = true
		s.late[w] = struct{}{}
		s.behind.Add(1)
		s.hub.behind.Add(1)
		signal(s.ready)
	}
}

func (s *Stream) dropBehind(w *watcher) {
	if w.waiting {
		w.waiting = false
		delete(s.late, w)
		s.behind.Add(-1)
		s.hub.behind.Add(-1)
	}
}

// Progress queues a progress response of one watcher if it has everything there is.
func (s *Stream) Progress(id int64) {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	w := s.watchers[id]
	if w == nil || !w.synced || !w.started() {
		return
	}
	if rev := w.group.frontier; s.push(Response{ID: id, Revision: rev, Tag: w.tag}) {
		s.highest = max(s.highest, rev) // an answer for all watchers must not be below it
	}
}

// started says whether the store has come to where the watcher begins.
func (w *watcher) started() bool {
	if w.start == 0 {
		return w.group.frontier >= w.next-1
	}
	return w.group.frontier >= w.start
}

// RequestProgress asks for one progress response that speaks for all watchers. As in etcd there is
// none while a watcher is behind or begins in the future, and none without watchers. It waits a
// little for regions that were not heard of since the newest revision.
func (s *Stream) RequestProgress() {
	h := s.hub
	target := h.Current()
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(s.watchers) == 0 || len(s.late) > 0 || len(s.asked) >= progressMax || s.waiting() >= h.o.QueueMax || s.over {
		return
	}
	for _, w := range s.watchers {
		if w.group != nil && w.start > target {
			return
		}
	}
	s.asked = append(s.asked, progress{target, h.o.Now().Add(h.o.ProgressWait)})
	h.asking[s] = struct{}{}
	signal(h.wake)
}

// answerProgress answers what can be answered. Called with Hub.mu held.
func (s *Stream) answerProgress(now time.Time) {
	least, any, ready := mvcc.Latest, false, len(s.late) == 0
	for _, w := range s.watchers {
		if w.group == nil {
			continue
		}
		any = true
		least = min(least, w.group.frontier)
		ready = ready && w.started()
	}
	if !any || len(s.late) > 0 {
		s.asked = nil
		return
	}
	kept := s.asked[:0]
	for _, p := range s.asked {
		expired := !now.Before(p.until)
		switch {
		// Below what the stream has already sent it would be a step back.
		case ready && least >= s.highest && (least >= p.target || expired):
			s.control(Response{ID: AllWatchers, Revision: least})
			s.highest = max(s.highest, least)
		case !expired:
			kept = append(kept, p)
		}
	}
	s.asked = kept
}

// Close ends the stream's watchers. Next returns nothing any more.
func (s *Stream) Close() {
	h := s.hub
	h.mu.Lock()
	if s.over {
		h.mu.Unlock()
		return
	}
	s.over = true
	// In this order, because groups that end leave the hub's list in another one.
	for _, id := range slices.Sorted(maps.Keys(s.watchers)) {
		w := s.watchers[id]
		s.end(w)
		s.remove(w)
	}
	delete(h.asking, s)
	h.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, r := range s.queue[s.head:] {
		h.pending.Add(-int64(len(r.Events)))
	}
	s.queue, s.head, s.bytes = nil, 0, 0
	h.streams.Add(-1)
}
