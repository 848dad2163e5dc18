package watchsvc

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.uber.org/goleak"

	"braid/mvcc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// store is the other side of a hub: regions whose events come one after another, and the history
// of all of them. Any goroutine.
type store struct {
	mu      sync.Mutex
	events  []mvcc.Version // in order
	floor   mvcc.Revision
	current mvcc.Revision
	demands int
}

type storeRegion struct {
	s       *store
	feed    *Feed
	mu      sync.Mutex
	through mvcc.Revision

	leaderless, watched atomic.Bool
}

func (r *storeRegion) Led() bool { return !r.leaderless.Load() }

func (r *storeRegion) Watched(on bool) { r.watched.Store(on) }

func (r *storeRegion) CompleteThrough() mvcc.Revision {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.through
}

func (r *storeRegion) Floor() mvcc.Revision {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	return r.s.floor
}

func (r *storeRegion) complete(through mvcc.Revision) {
	r.mu.Lock()
	r.through = max(r.through, through)
	r.mu.Unlock()
}

func (s *store) Events(ctx context.Context, from, to mvcc.Revision, span mvcc.Span, fn func(*mvcc.Version) error) error {
	s.mu.Lock()
	list := slices.Clone(s.events)
	s.mu.Unlock()
	for i := range list {
		if v := list[i]; v.Mod >= from && v.Mod <= to && span.Contains(v.Key) {
			if err := ctx.Err(); err != nil {
				return err
			}
			// The bytes are valid during the call only.
			v.Key = bytes.Clone(v.Key)
			err := fn(&v)
			clear(v.Key)
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *store) Get(_ context.Context, key []byte, at mvcc.Revision) (mvcc.Version, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := len(s.events) - 1; i >= 0; i-- {
		if v := s.events[i]; v.Mod <= at && bytes.Equal(v.Key, key) {
			return v, true, nil
		}
	}
	return mvcc.Version{}, false, nil
}

var tiny = Options{WindowBytes: 12 * eventOverheadBytes, QueueMax: 3, QueueBytesMax: 4 * eventOverheadBytes, BatchRevisions: 3,
	BatchBytes: 5 * eventOverheadBytes, ScanRevisions: 7, ScanBytes: 6 * eventOverheadBytes, ProgressWait: 20 * time.Millisecond}

// lab is a hub over three regions, [.., b), [b, c), [c, ..).
type lab struct {
	t       *testing.T
	s       *store
	hub     *Hub
	regions []*storeRegion
}

func newLab(t *testing.T, o Options) *lab {
	l := &lab{t: t, s: &store{floor: -1, current: 1}}
	o.History = l.s
	o.Current = func() mvcc.Revision {
		l.s.mu.Lock()
		defer l.s.mu.Unlock()
		return l.s.current
	}
	o.Demand = func() {
		l.s.mu.Lock()
		defer l.s.mu.Unlock()
		l.s.demands++
	}
	l.hub = NewHub(o)
	t.Cleanup(l.hub.Close)
	for _, span := range []mvcc.Span{{End: []byte("b")}, {Start: []byte("b"), End: []byte("c")}, {Start: []byte("c")}} {
		r := &storeRegion{s: l.s, through: 1}
		r.feed = l.hub.Attach(span, 1, r)
		l.regions = append(l.regions, r)
	}
	return l
}

// put writes one event to a region and makes the others complete through it, unless lazy.
func (l *lab) put(region int, key string, lazy bool) mvcc.Revision {
	l.s.mu.Lock()
	l.s.current++
	rev := l.s.current
	v := mvcc.Version{Key: []byte(key), Value: fmt.Append(nil, rev), Mod: rev, Create: rev, Version: 1}
	l.s.events = append(l.s.events, v)
	l.s.mu.Unlock()
	l.regions[region].feed.Events([]mvcc.Version{v}, rev)
	l.regions[region].complete(rev)
	if !lazy {
		for _, r := range l.regions {
			r.complete(rev)
		}
		l.hub.Poke()
	}
	return rev
}

// take waits for a response.
func (l *lab) take(s *Stream) Response {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for {
		r, ok, err := s.Next(ctx)
		if err != nil {
			l.t.Fatal(err)
		}
		if ok {
			return r
		}
		select {
		case <-s.Ready():
		case <-ctx.Done():
			l.t.Fatal("no response came")
		}
	}
}

func (l *lab) watch(s *Stream, start mvcc.Revision, span mvcc.Span) Response {
	l.t.Helper()
	if err := s.Watch(context.Background(), Request{Span: span, Start: start}); err != nil {
		l.t.Fatal(err)
	}
	return l.take(s)
}

// TestHubTinyLimits: with a window of a few events, queues of three and scans of seven revisions,
// watchers that come, go, stop reading and read again get every event of their span once, in
// order, whole revisions at a time.
func TestHubTinyLimits(t *testing.T) {
	for seed := range uint64(40) {
		rnd := rand.New(rand.NewPCG(seed, 9))
		l := newLab(t, tiny)
		type client struct {
			s     *Stream
			spans map[int64]mvcc.Span
			next  map[int64]mvcc.Revision
		}
		var clients []*client
		see := func(c *client, r Response) {
			span, known := c.spans[r.ID]
			if r.Canceled || !known && len(r.Events) > 0 {
				t.Fatalf("seed %d: %+v", seed, r)
			}
			revs := map[int64]bool{}
			for _, e := range r.Events {
				// The next event of the span, from the history.
				var want mvcc.Version
				l.s.mu.Lock()
				for _, v := range l.s.events {
					if v.Mod >= c.next[r.ID] && span.Contains(v.Key) {
						want = v
						break
					}
				}
				l.s.mu.Unlock()
				if string(e.Kv.Key) != string(want.Key) || e.Kv.ModRevision != int64(want.Mod) || string(e.Kv.Value) != string(want.Value) {
					t.Fatalf("seed %d: watcher %d of %v got %v, want %s@%d", seed, r.ID, span, e.Kv, want.Key, want.Mod)
				}
				c.next[r.ID] = want.Mod + 1
				revs[e.Kv.ModRevision] = true
			}
			if len(r.Events) > 0 && (len(revs) > tiny.BatchRevisions || r.Revision < c.next[r.ID]-1) {
				t.Fatalf("seed %d: %d revisions in one response at %d", seed, len(revs), r.Revision)
			}
		}
		for range 3 {
			clients = append(clients, &client{l.hub.NewStream(), map[int64]mvcc.Span{}, map[int64]mvcc.Revision{}})
		}
		spans := []mvcc.Span{{}, {Start: []byte("a"), End: []byte("bb")}, {Start: []byte("b"), End: []byte("c")}, {Start: []byte("c")},
			mvcc.Key([]byte("a1")), {Start: []byte("b5")}}
		for step := range 400 {
			c := clients[rnd.IntN(len(clients))]
			switch rnd.IntN(12) {
			case 0:
				if len(c.spans) < 8 {
					id := int64(100 + step)
					start := mvcc.Revision(1 + rnd.IntN(int(l.s.current)+3))
					c.spans[id], c.next[id] = spans[rnd.IntN(len(spans))], start
					// Watch waits while the queue is full, and the hub fills it meanwhile: somebody has to read.
					added := make(chan error, 1)
					go func() {
						added <- c.s.Watch(context.Background(), Request{ID: id, Span: c.spans[id], Start: start})
					}()
					for adding := true; adding; {
						if r, ok, err := c.s.Next(context.Background()); err != nil {
							t.Fatal(err)
						} else if ok {
							see(c, r)
							continue
						}
						select {
						case err := <-added:
							if err != nil {
								t.Fatal(err)
							}
							adding = false
						case <-c.s.Ready():
						}
					}
				}
				fallthrough
			case 1, 2: // read for a while
				for range 20 {
					if r, ok, err := c.s.Next(context.Background()); err != nil {
						t.Fatal(err)
					} else if ok {
						see(c, r)
					}
				}
			case 3:
				r := l.regions[rnd.IntN(3)]
				r.feed.Reset(r.CompleteThrough())
			default:
				r := rnd.IntN(3)
				l.put(r, fmt.Sprintf("%c%d", 'a'+r, rnd.IntN(9)), rnd.IntN(3) == 0)
			}
		}
		end := l.put(0, "a1", false)
		for _, c := range clients {
			for id, span := range c.spans {
				for {
					left := false
					for _, v := range l.s.events {
						left = left || v.Mod >= c.next[id] && span.Contains(v.Key)
					}
					if !left {
						break
					}
					see(c, l.take(c.s))
				}
			}
			c.s.Close()
		}
		if st := l.hub.Stats(); st != (Stats{Events: st.Events}) {
			t.Fatalf("seed %d: after everything was closed at %d: %+v", seed, end, st)
		}
		l.hub.Close()
	}
}

// TestRegionsDoNotWaitForEachOther: a region that stands still holds up only who watches it.
func TestRegionsDoNotWaitForEachOther(t *testing.T) {
	l := newLab(t, Options{})
	s := l.hub.NewStream()
	defer s.Close()
	l.watch(s, 0, mvcc.Span{End: []byte("b")}) // 0: the first region
	l.watch(s, 0, mvcc.Span{End: []byte("c")}) // 1: the first two
	rev := l.put(0, "a", true)
	if r := l.take(s); r.ID != 0 || r.Revision != rev || len(r.Events) != 1 {
		t.Fatalf("%+v", r)
	}
	l.put(2, "c", true)
	rev2 := l.put(0, "a", true)
	if r := l.take(s); r.ID != 0 || r.Revision != rev2 {
		t.Fatalf("%+v", r)
	}
	// The second region is heard of: both events come, in order.
	l.regions[1].complete(rev)
	l.hub.Poke()
	if r := l.take(s); r.ID != 1 || r.Revision != rev {
		t.Fatalf("%+v", r)
	}
	l.regions[1].complete(rev2)
	l.hub.Poke()
	if r := l.take(s); r.ID != 1 || r.Revision != rev2 {
		t.Fatalf("%+v", r)
	}
}

// TestProgressWaitsForQuietRegions: a progress request asks for word of them, does not claim more
// than is known, and has no answer while a watcher is not served.
func TestProgressWaitsForQuietRegions(t *testing.T) {
	l := newLab(t, Options{ProgressWait: time.Hour})
	s := l.hub.NewStream()
	defer s.Close()
	s.RequestProgress() // nobody: no answer
	l.watch(s, 0, mvcc.Span{Start: []byte("c")})
	rev := l.put(0, "a", true)
	s.RequestProgress()
	for asked := false; !asked; {
		l.s.mu.Lock()
		asked = l.s.demands > 0
		l.s.mu.Unlock()
	}
	if r, ok, _ := s.Next(context.Background()); ok {
		t.Fatalf("%+v before the region was heard of", r)
	}
	l.regions[2].complete(rev)
	l.hub.Poke()
	if r := l.take(s); r.ID != AllWatchers || r.Revision != rev || len(r.Events) != 0 {
		t.Fatalf("%+v", r)
	}
	l.watch(s, rev+5, mvcc.Span{Start: []byte("c")})
	s.RequestProgress() // one begins in the future: no answer
	rev = l.put(2, "c", false)
	if r := l.take(s); r.ID != 0 || r.Revision != rev {
		t.Fatalf("%+v", r)
	}
}

// answered waits until no progress request waits.
func (l *lab) answered() {
	l.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; runtime.Gosched() {
		l.hub.mu.Lock()
		waiting := len(l.hub.asking)
		l.hub.mu.Unlock()
		if waiting == 0 {
			return
		}
		if time.Now().After(deadline) {
			l.t.Fatal("a progress request waits for ever")
		}
	}
}

// TestProgressNeverFalls: what one watcher was told of progress, an answer for all does not take back.
func TestProgressNeverFalls(t *testing.T) {
	l := newLab(t, Options{ProgressWait: time.Millisecond})
	s := l.hub.NewStream()
	defer s.Close()
	id := l.watch(s, 0, mvcc.Key([]byte("a1"))).ID
	l.watch(s, 0, mvcc.Key([]byte("b1")))
	rev := l.put(0, "a2", true)
	for told := mvcc.Revision(0); told < rev; { // until the hub has had its turn
		s.Progress(id)
		told = l.take(s).Revision
	}
	s.RequestProgress()
	l.answered()
	if r, ok, err := s.Next(t.Context()); ok || err != nil {
		t.Fatalf("%+v, %v after progress at %d", r, err, rev)
	}
	l.regions[1].complete(rev)
	l.hub.Poke()
	s.RequestProgress()
	if r := l.take(s); r.ID != AllWatchers || r.Revision != rev {
		t.Fatalf("%+v, want progress at %d", r, rev)
	}
}

// TestProgressIsBounded: a client that asks and does not read has a bounded number of answers.
func TestProgressIsBounded(t *testing.T) {
	l := newLab(t, tiny)
	s := l.hub.NewStream()
	defer s.Close()
	l.watch(s, 0, mvcc.Span{})
	for range 3 * (tiny.QueueMax + progressMax) {
		s.RequestProgress()
		l.answered()
	}
	if n := s.waiting(); n > tiny.QueueMax+progressMax {
		t.Errorf("%d answers wait", n)
	}
}

// TestCompactedWatchersCount: a watcher that a compaction ended is kept, and counted, until its client
// cancels it.
func TestCompactedWatchersCount(t *testing.T) {
	l := newLab(t, Options{WatchersMax: 2})
	for range 20 {
		l.put(0, "a", false)
	}
	l.s.mu.Lock()
	l.s.floor = 10
	l.s.mu.Unlock()
	s := l.hub.NewStream()
	defer s.Close()
	var id int64
	for range 2 {
		id = l.watch(s, 2, mvcc.Key([]byte("a"))).ID
		if r := l.take(s); r.ID != id || r.Compacted != 10 {
			t.Fatalf("%+v", r)
		}
	}
	if r := l.watch(s, 2, mvcc.Key([]byte("a"))); r.Refused != ErrTooMany {
		t.Fatalf("%+v", r)
	}
	if err := s.Cancel(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	l.take(s)
	if r := l.watch(s, 0, mvcc.Key([]byte("a"))); r.Refused != nil {
		t.Fatalf("%+v", r)
	}
	s.Close()
	if st := l.hub.Stats(); st.Watchers != 0 {
		t.Errorf("%+v after the end", st)
	}
}

// TestCatchUpOfManyWatchers: what one look finds for thousands of watchers of one span is bounded by
// how often it is referred to, and ends with a whole revision.
func TestCatchUpOfManyWatchers(t *testing.T) {
	o := Options{}.withDefaults()
	members := make([]*watcher, 5000)
	for i := range members {
		members[i] = &watcher{id: int64(i), span: mvcc.Key([]byte("a")), next: 2}
	}
	c := newCatchup(&o, members, 2)
	added := 0
	for rev := mvcc.Revision(2); c.add(&mvcc.Version{Key: []byte("a"), Mod: rev}, func() *mvccpb.Event { return &mvccpb.Event{} }); rev++ {
		added++
	}
	if c.refs >= catchupRefsMax+len(members) || c.refs != added*len(members) || c.whole != mvcc.Revision(added)+1 {
		t.Errorf("%d references to %d revisions, whole through %d", c.refs, added, c.whole)
	}
}

// history calls a function whenever it is looked at.
type history struct {
	*store
	look func()
}

func (h history) Events(ctx context.Context, from, to mvcc.Revision, span mvcc.Span, fn func(*mvcc.Version) error) error {
	h.look()
	return h.store.Events(ctx, from, to, span, fn)
}

// TestCatchUpRests: while others write, a watcher that reads history pauses between two looks for as
// long as the last one and the delivery of what it found took; and not when nobody writes.
func TestCatchUpRests(t *testing.T) {
	for _, writing := range []bool{false, true} {
		s := &store{floor: -1, current: 1}
		r := &storeRegion{s: s, through: 1}
		now := time.Unix(1000, 0)
		var began time.Time // of the last look
		looks, rests := 0, 0
		o := tiny
		o.Now = func() time.Time { return now }
		o.Current = func() mvcc.Revision { return s.current }
		o.Demand = func() {}
		o.Rest = func(_ context.Context, took time.Duration) error {
			if rests++; took != now.Sub(began) {
				t.Errorf("a rest of %v, %v after the last look began", took, now.Sub(began))
			}
			now = now.Add(took)
			return nil
		}
		var h *Hub
		put := func() {
			s.current++
			v := mvcc.Version{Key: []byte("a"), Value: []byte("v"), Mod: s.current, Create: 2, Version: int64(s.current) - 1}
			s.events = append(s.events, v)
			r.feed.Events([]mvcc.Version{v}, s.current)
			r.complete(s.current)
			h.Turn()
		}
		o.History = history{s, func() {
			looks++
			began = now
			now = now.Add(5 * time.Millisecond)
			if writing && looks < 20 {
				put()
			}
		}}
		h = New(o)
		r.feed = h.Attach(mvcc.Span{End: []byte("b")}, 1, r)
		for range 300 {
			put()
		}
		st := h.NewStream()
		if err := st.Watch(t.Context(), Request{Span: mvcc.Key([]byte("a")), Start: 2}); err != nil {
			t.Fatal(err)
		}
		events := 0
		for {
			resp, ok, err := st.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			events += len(resp.Events)
			now = now.Add(3 * time.Millisecond) // to the client
		}
		st.Close()
		h.Close()
		if events != len(s.events) || looks < 20 || rests != 0 && !writing || rests < 18 && writing {
			t.Errorf("writing %v: %d of %d events in %d looks with %d rests", writing, events, len(s.events), looks, rests)
		}
	}
}

// TestLed: a stream lacks a leader when a region that it watches does, and only then (W2).
func TestLed(t *testing.T) {
	l := newLab(t, tiny)
	one, all := l.hub.NewStream(), l.hub.NewStream()
	defer one.Close()
	defer all.Close()
	led := func(wantOne, wantAll bool) {
		t.Helper()
		if a, b := one.Led(), all.Led(); a != wantOne || b != wantAll {
			t.Errorf("led: %v, %v; want %v, %v", a, b, wantOne, wantAll)
		}
	}
	l.regions[2].leaderless.Store(true)
	led(true, true) // nothing is watched
	l.watch(one, 0, mvcc.Key([]byte("a")))
	id := l.watch(all, 0, mvcc.Span{}).ID
	led(true, false)
	l.regions[2].leaderless.Store(false)
	led(true, true)
	l.regions[0].leaderless.Store(true)
	led(false, false)
	if err := all.Cancel(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	led(false, true)
}

// TestOutOfReach: a watch of what has no replica here, and limits, are refused in etcd's shape.
func TestOutOfReach(t *testing.T) {
	h := NewHub(Options{WatchersMax: 1, History: &store{}})
	defer h.Close()
	h.Attach(mvcc.Span{End: []byte("m")}, 1, &storeRegion{s: &store{}, through: 1})
	s := h.NewStream()
	defer s.Close()
	for _, tc := range []struct {
		span mvcc.Span
		want error
	}{{mvcc.Span{}, ErrNotHere}, {mvcc.Key([]byte("z")), ErrNotHere}, {mvcc.Key([]byte("a")), nil}, {mvcc.Key([]byte("b")), ErrTooMany}} {
		if err := s.Watch(context.Background(), Request{Span: tc.span}); err != nil {
			t.Fatal(err)
		}
		r, ok, err := s.Next(context.Background())
		if err != nil || !ok || !r.Created || r.Refused != tc.want || (tc.want != nil) != (r.Canceled && r.ID == AllWatchers) {
			t.Errorf("%v: %+v, %v; want %v", tc.span, r, err, tc.want)
		}
	}
}

// TestSlowClientIsBounded: whoever does not read costs no more than the limits, and others nothing.
func TestSlowClientIsBounded(t *testing.T) {
	l := newLab(t, tiny)
	slow, quick := l.hub.NewStream(), l.hub.NewStream()
	defer slow.Close()
	defer quick.Close()
	l.watch(slow, 0, mvcc.Span{})
	l.watch(quick, 0, mvcc.Span{})
	for i := range 500 {
		rev := l.put(i%3, string(rune('a'+i%3)), false)
		for seen := mvcc.Revision(0); seen < rev; {
			r := l.take(quick)
			seen = mvcc.Revision(r.Events[len(r.Events)-1].Kv.ModRevision)
		}
	}
	if n := slow.waiting(); n > tiny.QueueMax {
		t.Errorf("%d responses wait in a queue of %d", n, tiny.QueueMax)
	}
	if st := l.hub.Stats(); st.Behind != 1 {
		t.Errorf("%+v: the slow watcher is not behind", st)
	}
	for next := int64(2); next <= 501; {
		for _, e := range l.take(slow).Events {
			if e.Kv.ModRevision != next {
				t.Fatalf("event %d, want %d", e.Kv.ModRevision, next)
			}
			next++
		}
	}
}

// TestSince: what a window holds of one region is given in parts that end with a revision, and where
// it does not reach back, that is said.
func TestSince(t *testing.T) {
	s := &store{floor: -1, current: 1}
	r := &storeRegion{s: s, through: 1}
	h := New(Options{History: s, WindowBytes: 8 * eventOverheadBytes})
	r.feed = h.Attach(mvcc.Span{End: []byte("b")}, 1, r)
	put := func(rev mvcc.Revision, subs ...int64) {
		var events []mvcc.Version
		for _, sub := range subs {
			events = append(events, mvcc.Version{Key: []byte{'a', byte('0' + sub)}, Mod: rev, Sub: sub, Version: 1})
		}
		r.feed.Events(events, rev)
	}
	put(3, 0, 1)
	put(5, 0, 2)
	put(6, 1)
	r.complete(9)
	for _, c := range []struct {
		after       mvcc.Revision
		revs, bytes int
		events      string
		through     mvcc.Revision
		ok          bool
	}{
		{1, 99, 1 << 20, "3.0 3.1 5.0 5.2 6.1", 9, true},
		{0, 99, 1 << 20, "", 9, false}, // before it was attached
		{3, 99, 1 << 20, "5.0 5.2 6.1", 9, true},
		{6, 99, 1 << 20, "", 9, true},
		{9, 99, 1 << 20, "", 9, true},
		{12, 99, 1 << 20, "", 9, true}, // whoever asks has heard more
		{1, 2, 1 << 20, "3.0 3.1 5.0 5.2", 5, true},
		{1, 99, 1, "3.0 3.1", 4, true},
		{1, 99, 4 * eventOverheadBytes, "3.0 3.1 5.0 5.2", 5, true},
	} {
		events, through, ok := r.feed.Since(c.after, c.revs, c.bytes)
		var got []string
		for _, e := range events {
			got = append(got, fmt.Sprintf("%d.%d", e.Mod, e.Sub))
		}
		if fmt.Sprint(got) != "["+c.events+"]" || through != c.through || ok != c.ok {
			t.Errorf("since %d, %d revisions or %d bytes: %v through %d, %v; want %q through %d, %v", c.after, c.revs, c.bytes, got, through, ok, c.events, c.through, c.ok)
		}
	}
	// A snapshot came, and then too much for the window.
	r.feed.Reset(20)
	if _, through, ok := r.feed.Since(9, 99, 1<<20); ok || through != 20 {
		t.Errorf("over a snapshot: through %d, %v", through, ok)
	}
	for rev := mvcc.Revision(21); rev < 40; rev++ {
		put(rev, 0)
	}
	if _, _, ok := r.feed.Since(20, 99, 1<<20); ok {
		t.Error("evicted events were not missed")
	}
	if events, _, ok := r.feed.Since(36, 99, 1<<20); !ok || len(events) != 3 {
		t.Errorf("%d events, %v", len(events), ok)
	}
}

// TestWatched: a source hears when it begins to be watched, by whatever group, and when it ends.
func TestWatched(t *testing.T) {
	l := newLab(t, tiny)
	st := l.hub.NewStream()
	for id, span := range map[int64]mvcc.Span{1: mvcc.Key([]byte("a")), 2: {Start: []byte("a"), End: []byte("bb")}} {
		if err := st.Watch(t.Context(), Request{ID: id, Span: span}); err != nil {
			t.Fatal(err)
		}
	}
	want := func(list ...bool) {
		t.Helper()
		for i, on := range list {
			if got := l.regions[i].watched.Load(); got != on {
				t.Errorf("region %d is watched: %v", i, got)
			}
		}
	}
	want(true, true, false)
	if err := st.Cancel(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	want(true, false, false)
	st.Close()
	want(false, false, false)
}
