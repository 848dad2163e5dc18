package cases

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// acked is one put that was acknowledged.
type acked struct {
	client     int
	rev        int64
	begin, end time.Time
}

// writers are clients that put keys of their own, one request at a time, over all regions, until
// they are stopped. A client whose node does not answer goes to the next one.
type writers struct {
	s     *store
	stop  chan struct{}
	wg    sync.WaitGroup
	mu    sync.Mutex
	acks  []acked // guarded by mu
	count atomic.Int64
	bad   atomic.Pointer[error] // the first refusal that is not one of availability
}

// write starts n writers; value is what they put.
func (s *store) write(n int, value string) *writers {
	w := &writers{s: s, stop: make(chan struct{})}
	for i := range n {
		w.wg.Go(func() { w.run(i, value) })
	}
	s.t.Cleanup(w.end)
	return w
}

func (w *writers) run(client int, value string) {
	node := client % len(w.s.Nodes)
	for i := 0; ; i++ {
		select {
		case <-w.stop:
			return
		case <-w.s.t.Context().Done():
			return
		default:
		}
		key := fmt.Sprintf("%s/w%02d/%d", threeKeys[i%3], client, i%50)
		ctx, cancel := context.WithTimeout(w.s.t.Context(), 3*time.Second)
		begin := time.Now()
		r, err := w.s.kv(node).Put(ctx, &pb.PutRequest{Key: []byte(key), Value: []byte(value)})
		cancel()
		if err == nil {
			w.count.Add(1)
			w.mu.Lock()
			w.acks = append(w.acks, acked{client, r.Header.Revision, begin, time.Now()})
			w.mu.Unlock()
			continue
		}
		if c := status.Code(err); c != codes.Unavailable && c != codes.DeadlineExceeded && c != codes.Canceled {
			w.bad.CompareAndSwap(nil, &err)
			return
		}
		node = (node + 1) % len(w.s.Nodes)
	}
}

// end stops the writers and waits for them. It may be called more than once.
func (w *writers) end() {
	select {
	case <-w.stop:
	default:
		close(w.stop)
	}
	w.wg.Wait()
}

// between lists what was acknowledged in a span of time.
func (w *writers) between(from, to time.Time) []acked {
	w.mu.Lock()
	defer w.mu.Unlock()
	var list []acked
	for _, a := range w.acks {
		if !a.end.Before(from) && a.end.Before(to) {
			list = append(list, a)
		}
	}
	return list
}

// gap is the longest time without an acknowledgement.
func (w *writers) gap(from, to time.Time) time.Duration {
	list := w.between(from, to)
	slices.SortFunc(list, func(a, b acked) int { return a.end.Compare(b.end) })
	longest, last := time.Duration(0), from
	for _, a := range list {
		longest, last = max(longest, a.end.Sub(last)), a.end
	}
	return max(longest, to.Sub(last))
}

// took is the quantile of the time that a put took which bounds are held against.
func (w *writers) took(from, to time.Time) time.Duration {
	var d []time.Duration
	for _, a := range w.between(from, to) {
		d = append(d, a.end.Sub(a.begin))
	}
	return quantile(d, worst())
}

// check holds the acknowledgements against what revisions promise: unique, rising for each client,
// and a put that began after another was acknowledged has the larger one.
func (w *writers) check(t *testing.T) {
	t.Helper()
	if bad := w.bad.Load(); bad != nil {
		t.Fatalf("a put was refused: %v", *bad)
	}
	acks := w.between(time.Time{}, time.Now())
	seen := map[int64]bool{}
	last := map[int]int64{}
	for _, a := range acks { // of one client in its order
		if seen[a.rev] {
			t.Fatalf("two puts at revision %d", a.rev)
		}
		seen[a.rev] = true
		if a.rev <= last[a.client] {
			t.Fatalf("client %d: revision %d after %d", a.client, a.rev, last[a.client])
		}
		last[a.client] = a.rev
	}
	byEnd := slices.SortedFunc(slices.Values(acks), func(a, b acked) int { return a.end.Compare(b.end) })
	byBegin := slices.SortedFunc(slices.Values(acks), func(a, b acked) int { return a.begin.Compare(b.begin) })
	i, highest := 0, int64(0)
	for _, a := range byBegin {
		for ; i < len(byEnd) && byEnd[i].end.Before(a.begin); i++ {
			highest = max(highest, byEnd[i].rev)
		}
		if a.rev < highest {
			t.Fatalf("a put got revision %d after %d was acknowledged", a.rev, highest)
		}
	}
}

// TestOracleMoves is https://github.com/tikv/pd/issues/9188: case 3. The revision oracle's leader is
// moved under load, and later its process is killed.
func TestOracleMoves(t *testing.T) {
	perLayout(t, func(t *testing.T, l layout) {
		s := start(t, 3, l)
		watched := s.client()
		events := watched.Watch(within(t, 3*time.Minute), "a", watchRange(1)...)
		w := s.write(64, "v")
		lead := s.settled(0)
		waitPuts(t, w, 500)

		began := time.Now()
		to := (lead.oracle + 1) % 3
		if err := s.braid(0, nil, "pd", "transfer", s.Nodes[to].Name); err != nil {
			t.Fatal(err)
		}
		pause(t, time.Duration(scaled(2, 30))*time.Second)
		waitPuts(t, w, w.count.Load()+100)
		moved := w.gap(began, time.Now())

		killed := time.Now()
		if err := s.Nodes[to].Kill(); err != nil {
			t.Fatal(err)
		}
		pause(t, time.Duration(scaled(5, 20))*time.Second)
		waitPuts(t, w, w.count.Load()+100)
		lost := w.gap(killed, time.Now())
		w.end()
		w.check(t)
		t.Logf("%d puts; longest gap %v at the transfer, %v at the kill", w.count.Load(), moved, lost)
		if moved > bound(time.Second) || lost > bound(2*time.Second) {
			t.Errorf("no put was acknowledged for %v after the transfer, %v after the kill", moved, lost)
		}

		// The watch has every revision once, in order, through the last acknowledged one.
		highest := int64(0)
		for _, a := range w.between(time.Time{}, time.Now()) {
			highest = max(highest, a.rev)
		}
		for next := int64(2); next <= highest; {
			resp, ok := <-events
			if !ok || resp.Err() != nil {
				t.Fatalf("the watch ended before %d: %v", next, resp.Err())
			}
			for _, e := range resp.Events {
				if e.Kv.ModRevision != next {
					t.Fatalf("event at %d instead of %d", e.Kv.ModRevision, next)
				}
				next++
			}
		}
	})
}

// pause lets the load run for a while.
func pause(t *testing.T, d time.Duration) {
	t.Helper()
	if err := waitFor(t.Context(), d); err != nil {
		t.Fatal(err)
	}
}

// waitPuts waits until the writers have been acknowledged so often.
func waitPuts(t *testing.T, w *writers, n int64) {
	t.Helper()
	ctx := within(t, time.Minute)
	for w.count.Load() < n {
		if err := waitFor(ctx, 10*time.Millisecond); err != nil {
			t.Fatalf("only %d puts were acknowledged: %v", w.count.Load(), err)
		}
	}
}

// TestManyWatchersOnOneStream is https://github.com/etcd-io/etcd/issues/17529: case 4. A stream with
// hundreds of watchers and a slow reader, under writes and compactions, loses nothing silently.
func TestManyWatchersOnOneStream(t *testing.T) {
	perLayout(t, func(t *testing.T, l layout) {
		if l.splits != "" {
			l.splits = "/registry/pods/300,/registry/pods/600"
		}
		s := start(t, 1, l)
		watchers, writes := 800, scaled(12_000, 200_000)
		pod := func(n int) string { return fmt.Sprintf("/registry/pods/%03d/", n) }
		ctx := within(t, 10*time.Minute)
		w := s.watch(ctx, 0, unlimited)
		from := s.revision() + 1
		go func() {
			for n := range watchers {
				err := w.stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{
					Key: []byte(pod(n)), RangeEnd: []byte(pod(n)[:len(pod(n))-1] + "0"), StartRevision: from, PrevKv: true, WatchId: int64(n + 1)}}})
				if err != nil {
					return // the receiving side tells
				}
			}
		}()
		for range watchers {
			w.created()
		}
		before := s.rss(0)

		// What is written, by range: the revisions of its events in order.
		var mu sync.Mutex
		expected := make([][]int64, watchers)
		var written atomic.Int64
		writing := make(chan error, 1)
		go func() {
			value := []byte(strings.Repeat("x", 1<<10))
			const clients = 32
			writing <- each(clients, func(client int) error {
				rng := rand.New(rand.NewPCG(uint64(client), 4))
				for i := 0; i < writes/clients; i++ {
					n := client + clients*rng.IntN(watchers/clients) // ranges of its own: their order is its order
					key := fmt.Appendf(nil, "%s%d", pod(n), i%4)
					var rev int64
					if i%5 == 4 {
						r, err := s.kv(0).DeleteRange(ctx, &pb.DeleteRangeRequest{Key: key})
						if err != nil {
							return err
						}
						if r.Deleted == 0 {
							continue
						}
						rev = r.Header.Revision
					} else {
						r, err := s.kv(0).Put(ctx, &pb.PutRequest{Key: key, Value: value})
						if err != nil {
							return err
						}
						rev = r.Header.Revision
					}
					written.Add(1)
					mu.Lock()
					expected[n] = append(expected[n], rev)
					mu.Unlock()
				}
				return nil
			})
		}()
		compacting := make(chan struct{})
		compacted := make(chan struct{})
		go func() {
			defer close(compacted)
			for waitOr(compacting, time.Duration(scaled(300, 2000))*time.Millisecond) {
				// Refusals are fine: little may have been written since the last time.
				_, _ = s.kv(0).Compact(ctx, &pb.CompactionRequest{Revision: from + written.Load() - 1000})
			}
		}()

		got := make([][]int64, watchers)
		lost := make([]bool, watchers)
		read := make(chan error, 1)
		var received atomic.Int64
		go func() {
			for {
				r, err := w.stream.Recv()
				if err != nil {
					read <- err
					return
				}
				n := int(r.WatchId) - 1
				switch {
				case r.Canceled && r.CompactRevision != 0:
					lost[n] = true
				case r.Canceled:
					read <- fmt.Errorf("watcher %d was canceled: %v", n, r)
					return
				case len(r.Events) == 1 && string(r.Events[0].Kv.Value) == "end":
					read <- nil
					return
				}
				for _, e := range r.Events {
					if !strings.HasPrefix(string(e.Kv.Key), pod(n)) {
						read <- fmt.Errorf("watcher %d got %s", n, event(e))
						return
					}
					got[n] = append(got[n], e.Kv.ModRevision)
				}
				received.Add(int64(len(r.Events)))
				// For the first half it is slow, and falls behind compactions.
				for w := written.Load(); w < int64(writes)/2 && received.Load() > w/2; w = written.Load() {
					if err := waitFor(ctx, 5*time.Millisecond); err != nil {
						read <- err
						return
					}
				}
			}
		}()
		highest := int64(0)
		for done := false; !done; {
			select {
			case err := <-writing:
				if err != nil {
					t.Fatal(err)
				}
				done = true
			case <-time.After(100 * time.Millisecond):
				highest = max(highest, s.rss(0))
			}
		}
		close(compacting)
		<-compacted
		// A watcher of its own marks the end: its event is the last of all.
		last := s.put("/registry/pods/end", "end")
		w.create(&pb.WatchCreateRequest{Key: []byte("/registry/pods/end"), StartRevision: last, WatchId: int64(watchers) + 1})
		if err := <-read; err != nil {
			t.Fatal(err)
		}
		canceled, events := 0, 0
		for n := range watchers {
			if lost[n] {
				canceled++
				expected[n] = expected[n][:min(len(expected[n]), len(got[n]))]
			}
			events += len(got[n])
			if !slices.Equal(got[n], expected[n]) {
				t.Fatalf("watcher %d (canceled: %v): %d events, want %d", n, lost[n], len(got[n]), len(expected[n]))
			}
		}
		t.Logf("%d writes, %d events, %d watchers canceled by compactions; memory %d MiB before, at most %d", written.Load(), events, canceled, before, highest)
		// On a fast machine all may be: what each got before is compared all the same.
		if canceled == 0 || int64(events) < written.Load()/100 {
			t.Errorf("%d of %d watchers were canceled after %d events: the reader was not slow, or there is nothing to compare", canceled, watchers, events)
		}
		// The window of recent events, memtables (four of 64 MiB), the cache of blocks and the log's of entries
		// fill with any writes: in full size all of them are full, 250 MiB of versions or not.
		if highest-before > int64(scaled(300, 900)) {
			t.Errorf("memory grew by %d MiB", highest-before)
		}
	})
}

// waitOr waits and says true, or false when stop is closed first.
func waitOr(stop <-chan struct{}, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-stop:
		return false
	}
}

// TestWatcherFarBehind is https://github.com/etcd-io/etcd/issues/22264: case 5. A watch that begins
// hundreds of thousands of revisions ago catches up while others write, and does not slow them.
func TestWatcherFarBehind(t *testing.T) {
	perLayout(t, func(t *testing.T, l layout) {
		s := start(t, 1, l)
		puts := scaled(20_000, 500_000)
		s.fill(puts, func(i int) (string, string) { return fmt.Sprintf("%s/%d", threeKeys[i%3], i%10_000), "value" })
		w := s.write(64, "v")
		quietFrom := time.Now()
		pause(t, time.Duration(scaled(2, 15))*time.Second)
		quiet := w.took(quietFrom, time.Now())

		ctx := within(t, 10*time.Minute)
		began := time.Now()
		stream := s.watch(ctx, 0, unlimited)
		stream.create(&pb.WatchCreateRequest{Key: []byte("a"), RangeEnd: []byte("z"), StartRevision: 2})
		stream.created()
		next := int64(2)
		var caught time.Duration // when the events of before were all there
		tip := int64(puts) + 1 + w.count.Load()
		stopAfter := time.Time{}
		for stopAfter.IsZero() || time.Now().Before(stopAfter) {
			for _, e := range stream.next().Events {
				if e.Kv.ModRevision != next {
					t.Fatalf("event at %d instead of %d", e.Kv.ModRevision, next)
				}
				next++
			}
			// The tip is where the writers are, within what 64 of them have in flight.
			if reached := int64(puts) + 1 + w.count.Load() - next; caught == 0 && next > tip && reached <= 1000 {
				caught = time.Since(began)
				stopAfter = time.Now().Add(time.Second)
			}
		}
		loaded := w.took(began, began.Add(caught))
		w.end()
		w.check(t)
		t.Logf("%d revisions in %v, then live; 64 writers' puts took %v without and %v with the watcher", tip, caught, quiet, loaded)
		// In small size it catches up within a moment, which any pause of the machine fills.
		if loaded > 2*quiet && (*full || loaded > bound(100*time.Millisecond)) {
			t.Errorf("puts took %v, with the watcher that catches up %v", quiet, loaded)
		}
	})
}

// fill puts keys over many connections, each a revision.
func (s *store) fill(puts int, key func(i int) (string, string)) {
	s.t.Helper()
	const clients = 128
	var next atomic.Int64
	ctx := within(s.t, 15*time.Minute)
	err := each(clients, func(client int) error {
		kv := s.kv(client % len(s.Nodes))
		for {
			i := int(next.Add(1)) - 1
			if i >= puts {
				return nil
			}
			k, v := key(i)
			if _, err := kv.Put(ctx, &pb.PutRequest{Key: []byte(k), Value: []byte(v)}, grpc.WaitForReady(true)); err != nil {
				return err
			}
		}
	})
	if err != nil {
		s.t.Fatal(err)
	}
}

// fillBatched puts keys in transactions of 100.
func (s *store) fillBatched(keys int, key func(i int) (string, string)) {
	s.t.Helper()
	const clients, batch = 16, 100
	var next atomic.Int64
	ctx := within(s.t, 15*time.Minute)
	err := each(clients, func(client int) error {
		for {
			from := int(next.Add(batch)) - batch
			if from >= keys {
				return nil
			}
			var ops []*pb.RequestOp
			for i := from; i < min(from+batch, keys); i++ {
				ops = append(ops, opPut(key(i)))
			}
			if _, err := s.kv(client%len(s.Nodes)).Txn(ctx, &pb.TxnRequest{Success: ops}); err != nil {
				return err
			}
		}
	})
	if err != nil {
		s.t.Fatal(err)
	}
}

// TestPaging is https://github.com/etcd-io/etcd/issues/11057 and its like: case 9. Pages of a pinned
// revision hold every key once, count what is left, and cost the same from the first to the last.
func TestPaging(t *testing.T) {
	perLayout(t, func(t *testing.T, l layout) {
		if l.splits != "" {
			l.splits = "key25,key5,key75"
		}
		s := start(t, 1, l)
		keys := scaled(40_000, 2_000_000)
		name := func(i int) string { return fmt.Sprintf("key%07d", int64(i)*9_999_999/int64(keys)) }
		s.fillBatched(keys, func(i int) (string, string) { return name(i), "v" })
		w := s.write(4, "v") // below and beside the keys
		hot := make(chan struct{})
		done := make(chan struct{})
		go func() { // keys appear, change and vanish among them
			defer close(done)
			for i := 0; ; i++ {
				select {
				case <-hot:
					return
				default:
				}
				k := []byte(name(i*7919%keys) + "x")
				_, _ = s.kv(0).Put(t.Context(), &pb.PutRequest{Key: k})
				_, _ = s.kv(0).DeleteRange(t.Context(), &pb.DeleteRangeRequest{Key: k})
			}
		}()
		defer func() { close(hot); <-done }()

		const limit = 500
		page := func(start []byte, rev int64) *pb.RangeResponse {
			return s.get(0, &pb.RangeRequest{Key: start, RangeEnd: []byte("kez"), Limit: limit, Revision: rev})
		}
		var rev, total int64
		var starts [][]byte
		var last string
		start := []byte("key")
		began := time.Now()
		for n, more := int64(0), true; more; {
			r := page(start, rev)
			starts = append(starts, start)
			if rev == 0 {
				rev, total = r.Header.Revision, r.Count
			}
			if r.Count != total-n {
				t.Fatalf("after %d of %d keys the count is %d", n, total, r.Count)
			}
			for _, kv := range r.Kvs {
				if string(kv.Key) <= last || kv.ModRevision > rev {
					t.Fatalf("key %s@%d after %s in pages of %d", kv.Key, kv.ModRevision, last, rev)
				}
				last = string(kv.Key)
				n++
			}
			more = r.More
			if !more && n != total || more && len(r.Kvs) != limit {
				t.Fatalf("a page of %d keys, more %v, %d of %d", len(r.Kvs), more, n, total)
			}
			start = append(r.Kvs[len(r.Kvs)-1].Key, 0)
		}
		all := time.Since(began)
		// Early and late pages in turn, so that both have the same machine.
		var early, late []time.Duration
		quarter := len(starts) / 4
		for i := range quarter {
			for _, m := range []struct {
				start []byte
				took  *[]time.Duration
			}{{starts[i], &early}, {starts[len(starts)-1-i], &late}} {
				asked := time.Now()
				page(m.start, rev)
				*m.took = append(*m.took, time.Since(asked))
			}
		}
		w.end()
		w.check(t)
		a, b := quantile(early, .5), quantile(late, .5)
		t.Logf("%d keys in %d pages, %v; median page %v in the first quarter, %v in the last", total, len(starts), all, a, b)
		if quarter == 0 || b > 4*a {
			t.Errorf("%d late pages take %v, early ones %v", quarter, b, a)
		}
	})
}

// watchRange are the options of a watch of everything up to z that survives elections.
func watchRange(from int64) []clientv3.OpOption {
	return []clientv3.OpOption{clientv3.WithRange("z"), clientv3.WithRev(from)}
}
