package cases

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
)

// TestAnswers runs the cases that only ask, one after another on one cluster of each layout.
func TestAnswers(t *testing.T) {
	perLayout(t, func(t *testing.T, l layout) {
		s := start(t, 3, l)
		for _, c := range []struct {
			name string
			run  func(*store)
		}{
			{"1 delete at the compaction revision", deleteAtCompaction},
			{"2 progress never passes an event", progressNeverPasses},
			{"6 catch-up reply size", catchUpReplySize},
			{"8 from-key delete plus put", fromKeyDeletePlusPut},
			{"9 count and more", countAndMore},
			{"10 historical read header", historicalHeader},
		} {
			t.Run(c.name, func(t *testing.T) { c.run(&store{s.Cluster, t, s.conns}) })
		}
	})
}

var threeKeys = []string{"b", "k", "t"}

// deleteAtCompaction is https://github.com/etcd-io/etcd/issues/18089: a watch that begins at the
// compaction revision must still deliver a deletion that happened there.
func deleteAtCompaction(s *store) {
	t := s.t
	key := func(k string) string { return k + "/1" }
	for _, value := range []string{"2", "3", "4"} {
		for _, k := range threeKeys {
			s.put(key(k), value)
		}
	}
	var deletes, puts []*pb.RequestOp
	for _, k := range threeKeys {
		deletes = append(deletes, opDelete(key(k), ""))
		puts = append(puts, opPut(key(k), "6"))
	}
	gone := s.txn(deletes...)
	back := s.txn(puts...)
	s.compact(gone)

	for node := range s.Nodes {
		for _, k := range threeKeys {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			w := s.watch(ctx, node)
			w.create(&pb.WatchCreateRequest{Key: []byte(key(k)), StartRevision: gone})
			w.created()
			var got []string
			for len(got) < 2 {
				for _, e := range w.next().Events {
					got = append(got, event(e))
				}
			}
			want := []string{fmt.Sprintf("DELETE %s@%d", key(k), gone), fmt.Sprintf("PUT %s@%d", key(k), back)}
			if !slices.Equal(got, want) {
				t.Errorf("node %d, %s: %v, want %v", node, k, got, want)
			}
			w.create(&pb.WatchCreateRequest{Key: []byte(key(k)), StartRevision: gone - 1})
			w.created()
			if r := w.next(); !r.Canceled || r.CompactRevision != gone || r.CancelReason != "" || r.Header.Revision != 0 {
				t.Errorf("node %d, %s: a watch below the compaction got %v", node, k, r)
			}
			cancel()
			if r := s.get(node, &pb.RangeRequest{Key: []byte(key(k)), Revision: gone}); r.Count != 0 || len(r.Kvs) != 0 {
				t.Errorf("node %d: %s exists at %d: %v", node, k, gone, r)
			}
			_, err := s.kv(node).Range(within(t, time.Minute), &pb.RangeRequest{Key: []byte(key(k)), Revision: gone - 1})
			if !refused(err, codes.OutOfRange, textCompacted) {
				t.Errorf("node %d: %s below the compaction: %v", node, k, err)
			}
		}
		_, err := s.kv(node).Compact(within(t, time.Minute), &pb.CompactionRequest{Revision: gone})
		if !refused(err, codes.OutOfRange, textCompacted) {
			t.Errorf("node %d: compacted again: %v", node, err)
		}
		_, err = s.kv(node).Compact(within(t, time.Minute), &pb.CompactionRequest{Revision: back + 10})
		if !refused(err, codes.OutOfRange, textFuture) {
			t.Errorf("node %d: compaction of the future: %v", node, err)
		}
	}
}

// progressNeverPasses is https://github.com/etcd-io/etcd/issues/15220: a progress notification that
// overtakes an event makes a client that resumes from it lose the event.
func progressNeverPasses(s *store) {
	t := s.t
	puts := scaled(1500, 10_000)
	ctx := within(t, 2*time.Minute)
	base := s.revision()
	busy := s.watch(ctx, 0)
	busy.create(&pb.WatchCreateRequest{Key: []byte("a"), RangeEnd: []byte("z"), StartRevision: base + 1})
	busy.created()

	// Every revision above base is an event of the range, so progress at R needs R-base events.
	read := make(chan error, 1)
	var confirmed int
	go func() {
		last, progress := base, base
		for last < base+int64(puts) {
			r, err := busy.stream.Recv()
			if err != nil {
				read <- err
				return
			}
			if r.Canceled {
				read <- fmt.Errorf("canceled: %v", r)
				return
			}
			if len(r.Events) == 0 {
				confirmed++
				if r.Header.Revision > last || r.Header.Revision < progress {
					read <- fmt.Errorf("progress at %d, events through %d, progress before %d", r.Header.Revision, last, progress)
					return
				}
				progress = r.Header.Revision
			}
			for _, e := range r.Events {
				if e.Kv.ModRevision != last+1 || e.Kv.ModRevision <= progress {
					read <- fmt.Errorf("event %s after %d, progress at %d", event(e), last, progress)
					return
				}
				last = e.Kv.ModRevision
			}
		}
		read <- nil
	}()

	// Meanwhile a range without events is asked every 100 ms.
	quiet := s.watch(ctx, 1)
	quiet.create(&pb.WatchCreateRequest{Key: []byte("y"), RangeEnd: []byte("z")})
	created := quiet.created().Header.Revision
	stop, polled := make(chan struct{}), make(chan error, 1)
	var waits []time.Duration
	go func() { polled <- pollQuiet(ctx, quiet, created, stop, &waits) }()

	for i := range puts {
		k := threeKeys[i%len(threeKeys)]
		if _, err := s.kv(0).Put(ctx, &pb.PutRequest{Key: []byte(k), Value: fmt.Append(nil, i)}); err != nil {
			t.Fatal(err)
		}
		if err := busy.askProgress(); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-read; err != nil {
		t.Fatal(err)
	}
	if confirmed == 0 {
		t.Error("progress was never confirmed")
	}
	close(stop)
	if err := <-polled; err != nil {
		t.Fatal(err)
	}
	median, longest := quantile(waits, .5), quantile(waits, 1)
	t.Logf("%d progress responses among %d events; %d requests on the quiet range: median %v, longest %v", confirmed, puts, len(waits), median, longest)
	if median > bound(100*time.Millisecond) || *full && longest > bound(100*time.Millisecond) {
		t.Errorf("a quiet range was told of progress after %v, at worst %v", median, longest)
	}

	// The quiet range reaches a revision that was current a moment ago.
	target := s.put("b", "last")
	began := time.Now()
	for {
		if err := quiet.askProgress(); err != nil {
			t.Fatal(err)
		}
		if quiet.next().Header.Revision >= target {
			break
		}
		if time.Since(began) > bound(time.Second) {
			t.Fatalf("%d was not reached after %v", target, time.Since(began))
		}
		if err := waitFor(ctx, 100*time.Millisecond); err != nil {
			t.Fatal(err)
		}
	}
}

// pollQuiet asks for progress every 100 ms until stop and notes how long the answers take.
func pollQuiet(ctx context.Context, w *watching, last int64, stop <-chan struct{}, waits *[]time.Duration) error {
	for {
		began := time.Now()
		if err := w.askProgress(); err != nil {
			return err
		}
		r, err := w.stream.Recv()
		if err != nil {
			return err
		}
		*waits = append(*waits, time.Since(began))
		if len(r.Events) > 0 || r.WatchId != -1 || r.Header.Revision < last {
			return fmt.Errorf("after progress at %d came %v", last, r)
		}
		last = r.Header.Revision
		select {
		case <-stop:
			return nil
		default:
		}
		if err := waitFor(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

// catchUpReplySize is https://github.com/etcd-io/etcd/issues/19441: history is cut into replies that
// a client can receive, and never within a revision.
func catchUpReplySize(s *store) {
	t := s.t
	value := strings.Repeat("v", 100<<10)
	const txns, keys = 4, 12
	revs := map[int64]bool{}
	var first int64
	for i := range txns {
		var ops []*pb.RequestOp
		for j := range keys {
			ops = append(ops, opPut(fmt.Sprintf("%s/6/%02d", threeKeys[j%3], j), value))
		}
		rev := s.txn(ops...)
		revs[rev] = true
		if i == 0 {
			first = rev
		}
	}
	for _, prev := range []bool{false, true} {
		w := s.watch(within(t, time.Minute), 2) // the 4 MiB that gRPC accepts unless told otherwise
		w.create(&pb.WatchCreateRequest{Key: []byte("a"), RangeEnd: []byte("z"), StartRevision: first, PrevKv: prev})
		w.created()
		for range txns {
			r := w.next()
			seen := map[int64]bool{}
			for _, e := range r.Events {
				seen[e.Kv.ModRevision] = true
			}
			if len(r.Events) != keys || len(seen) != 1 || !revs[r.Events[0].Kv.ModRevision] || r.Fragment {
				t.Fatalf("prev_kv %v: a reply has %d events of %d revisions", prev, len(r.Events), len(seen))
			}
		}
	}
	// Many revisions share a reply, which previous values make twice as large.
	const singles = 60
	from := s.put("b/6/00", value)
	for i := 1; i < singles; i++ {
		s.put(fmt.Sprintf("%s/6/%02d", threeKeys[i%3], i%keys), value)
	}
	w := s.watch(within(t, time.Minute), 1)
	w.create(&pb.WatchCreateRequest{Key: []byte("a"), RangeEnd: []byte("z"), StartRevision: from, PrevKv: true})
	w.created()
	for next := from; next < from+singles; {
		for _, e := range w.next().Events {
			if e.Kv.ModRevision != next || e.PrevKv == nil {
				t.Fatalf("event %s instead of one of %d; previous value %v", event(e), next, e.PrevKv != nil)
			}
			next++
		}
	}
}

// fromKeyDeletePlusPut is https://github.com/etcd-io/etcd/issues/22445: a key may not be put and
// lie in a deleted range, whatever form the range has.
func fromKeyDeletePlusPut(s *store) {
	before := s.revision()
	for _, c := range []struct {
		name, end, put string
	}{
		{"from key", "\x00", "t"}, {"to the end", "z", "t"}, {"prefix", "c", "b1"},
		{"from key, itself", "\x00", "b"}, {"to the end, itself", "z", "b"}, {"prefix, itself", "c", "b"},
	} {
		for _, ops := range [][]*pb.RequestOp{
			{opDelete("b", c.end), opPut(c.put, "x")},
			{opPut(c.put, "x"), opDelete("b", c.end)},
		} {
			for node := range s.Nodes {
				_, err := s.kv(node).Txn(within(s.t, time.Minute), &pb.TxnRequest{Success: ops})
				if !refused(err, codes.InvalidArgument, textDuplicate) {
					s.t.Errorf("%s on node %d: %v", c.name, node, err)
				}
			}
		}
	}
	if after := s.revision(); after != before {
		s.t.Errorf("refused transactions moved the revision from %d to %d", before, after)
	}
}

// countAndMore is https://github.com/etcd-io/etcd/issues/6145: the limit cuts the list and not the
// count.
func countAndMore(s *store) {
	for i := 1; i <= 5; i++ {
		s.put(fmt.Sprintf("key%d", i), "x")
	}
	// The same over the borders of regions.
	for _, k := range []string{"b9", "g9", "k9", "p9", "t9"} {
		s.put(k, "x")
	}
	for node := range s.Nodes {
		r := s.get(node, &pb.RangeRequest{Key: []byte("key1"), RangeEnd: []byte("key5"), Limit: 2})
		if len(r.Kvs) != 2 || r.Count != 4 || !r.More {
			s.t.Errorf("node %d: %d keys, count %d, more %v", node, len(r.Kvs), r.Count, r.More)
		}
		all := s.get(node, &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z"), KeysOnly: true})
		for limit := int64(1); limit <= int64(len(all.Kvs))+1; limit++ {
			r := s.get(node, &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z"), Limit: limit})
			if want := min(limit, all.Count); int64(len(r.Kvs)) != want || r.Count != all.Count || r.More != (limit < all.Count) {
				s.t.Errorf("node %d, limit %d: %d keys, count %d, more %v", node, limit, len(r.Kvs), r.Count, r.More)
			}
		}
	}
}

// historicalHeader is https://github.com/k3s-io/kine/pull/771: a read of the past answers with the
// store's revision of now.
func historicalHeader(s *store) {
	first := s.put("b/10", "1")
	s.put("t/10", "2")
	third := s.put("t/10", "3")
	for node := range s.Nodes {
		r := s.get(node, &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z"), Revision: first})
		var found bool
		for _, kv := range r.Kvs {
			found = found || string(kv.Key) == "b/10"
			if kv.ModRevision > first {
				s.t.Errorf("node %d: %s of revision %d at %d", node, kv.Key, kv.ModRevision, first)
			}
		}
		if !found || r.Header.Revision < third {
			s.t.Errorf("node %d: header %d, want at least %d; found b: %v", node, r.Header.Revision, third, found)
		}
		_, err := s.kv(node).Range(within(s.t, time.Minute), &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z"), Revision: third + 100})
		if !refused(err, codes.OutOfRange, textFuture) {
			s.t.Errorf("node %d: a read of the future: %v", node, err)
		}
	}
}

// waitFor lets time pass.
func waitFor(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// each runs fn on n goroutines and waits for all; the first error counts.
func each(n int, fn func(i int) error) error {
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() { errs[i] = fn(i) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
