package router_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
	"braid/router"
	"braid/router/routertest"
)

func put(t *testing.T, r *router.Router, key, value string) int64 {
	t.Helper()
	resp, err := r.Put(t.Context(), &pb.PutRequest{Key: []byte(key), Value: []byte(value)})
	if err != nil {
		t.Fatal(err)
	}
	return resp.Header.Revision
}

// TestReadTxnIsTheModels compares transactions that only read with their plain execution.
func TestReadTxnIsTheModels(t *testing.T) {
	for seed := range uint64(30) {
		g := &generator{Rand: rand.New(rand.NewPCG(seed, 3)), rev: 1}
		s := routertest.New(splits(5)...)
		r := router.New(s, s, fastOptions())
		for range 40 {
			put(t, r, string(key(g.IntN(60))), string(g.value()))
		}
		if g.one(2) {
			if _, err := r.Compact(t.Context(), &pb.CompactionRequest{Revision: 20}); err != nil {
				t.Fatal(err)
			}
		}
		g.rev = int64(s.Mark().Rev)
		for step := range 100 {
			req := g.readTxn(2)
			want, wantErr := s.Txn(req)
			got, err := r.Txn(t.Context(), req)
			if fmt.Sprint(err) != fmt.Sprint(wantErr) {
				t.Fatalf("seed %d step %d: error %v, want %v for\n%v", seed, step, err, wantErr, prototext.Format(req))
			}
			if err == nil && !proto.Equal(got, want) {
				t.Fatalf("seed %d step %d: %v\ngot\n%v\nwant\n%v", seed, step, req, prototext.Format(got), prototext.Format(want))
			}
		}
	}
}

// TestCompactionEdge pins what is readable around the floor.
func TestCompactionEdge(t *testing.T) {
	s := routertest.New()
	r := router.New(s, s, router.Options{})
	get := func(rev int64) error {
		_, err := r.Range(t.Context(), &pb.RangeRequest{Key: []byte("a"), Revision: rev})
		return err
	}
	compact := func(rev int64) error {
		_, err := r.Compact(t.Context(), &pb.CompactionRequest{Revision: rev})
		return err
	}
	isCompacted, isFuture := regionpb.ErrorOf(regionpb.Compacted), regionpb.ErrorOf(regionpb.FutureRevision)
	for i := range 4 {
		put(t, r, "a", fmt.Sprint(i)) // revisions 2 to 5
	}
	for _, c := range []struct {
		name string
		got  error
		want error
	}{
		{"negative", compact(-1), isCompacted},
		{"the first compaction at 0", compact(0), nil},
		{"again", compact(0), isCompacted},
		{"at 3", compact(3), nil},
		{"below", compact(2), isCompacted},
		{"same", compact(3), isCompacted},
		{"beyond", compact(6), isFuture},
		{"read the floor", get(3), nil},
		{"read below", get(2), isCompacted},
		{"read now", get(5), nil},
		{"read 0", get(0), nil},
		{"read negative", get(-7), nil},
		{"read beyond", get(6), isFuture},
		{"compact at the current revision", compact(5), nil},
	} {
		if !errors.Is(c.got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, c.got, c.want)
		}
	}
	inner := func(rev int64) error {
		_, err := r.Txn(t.Context(), &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{
			RequestRange: &pb.RangeRequest{Key: []byte("a"), Revision: rev}}}}})
		return err
	}
	if err := inner(-1); !errors.Is(err, isCompacted) {
		t.Errorf("negative revision inside a transaction: %v", err)
	}
}

// TestCrossRegion says which transactions are coordinated with locks.
func TestCrossRegion(t *testing.T) {
	s := routertest.New("m")
	var locked atomic.Bool // parts are prepared side by side
	s.Fail = func(op string) error {
		if op == "lock" {
			locked.Store(true)
		}
		return nil
	}
	r := router.New(s, s, router.Options{})
	op := func(r any) *pb.RequestOp {
		switch r := r.(type) {
		case *pb.PutRequest:
			return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: r}}
		case *pb.RangeRequest:
			return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: r}}
		case *pb.DeleteRangeRequest:
			return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: r}}
		case *pb.TxnRequest:
			return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: r}}
		}
		panic("unknown operation")
	}
	putA := op(&pb.PutRequest{Key: []byte("a")})
	putZ := op(&pb.PutRequest{Key: []byte("z")})
	getZ := op(&pb.RangeRequest{Key: []byte("z")})
	for _, c := range []struct {
		name  string
		req   *pb.TxnRequest
		cross bool
	}{
		{"puts", &pb.TxnRequest{Success: []*pb.RequestOp{putA, putZ}}, true},
		{"the branch not taken", &pb.TxnRequest{Success: []*pb.RequestOp{putA}, Failure: []*pb.RequestOp{getZ}}, true},
		{"a compare", &pb.TxnRequest{Compare: []*pb.Compare{{Key: []byte("z")}}, Success: []*pb.RequestOp{putA}}, true},
		{"nested", &pb.TxnRequest{Success: []*pb.RequestOp{putA, op(&pb.TxnRequest{Failure: []*pb.RequestOp{getZ}})}}, true},
		{"a range over the border", &pb.TxnRequest{Success: []*pb.RequestOp{op(&pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte("n")})}}, true},
		{"an open range", &pb.TxnRequest{Success: []*pb.RequestOp{op(&pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte{0}})}}, true},
		{"a range up to the border", &pb.TxnRequest{Success: []*pb.RequestOp{op(&pb.DeleteRangeRequest{Key: []byte("b"), RangeEnd: []byte("m")}), putA}}, false},
		{"an empty range elsewhere", &pb.TxnRequest{Success: []*pb.RequestOp{op(&pb.DeleteRangeRequest{Key: []byte("z"), RangeEnd: []byte("y")}), putA}}, false},
		{"only reads", &pb.TxnRequest{Compare: []*pb.Compare{{Key: []byte("a")}}, Success: []*pb.RequestOp{getZ}}, false},
		{"only reads, nested", &pb.TxnRequest{Compare: []*pb.Compare{{Key: []byte("a")}}, Success: []*pb.RequestOp{op(&pb.TxnRequest{Success: []*pb.RequestOp{getZ}})}}, false},
		{"an open range in the last region", &pb.TxnRequest{Success: []*pb.RequestOp{op(&pb.DeleteRangeRequest{Key: []byte("m"), RangeEnd: []byte{0}})}}, false},
	} {
		locked.Store(false)
		if _, err := r.Txn(t.Context(), c.req); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if got := locked.Load(); got != c.cross {
			t.Errorf("%s: locks were taken: %v", c.name, got)
		}
	}
	if _, err := r.DeleteRange(t.Context(), &pb.DeleteRangeRequest{Key: []byte("z"), RangeEnd: []byte("a")}); err != nil {
		t.Errorf("a deletion of nothing over an empty range: %v", err)
	}
}

// TestRetries says which failures of a write are repeated and what becomes of the others.
func TestRetries(t *testing.T) {
	broken := errors.New("connection reset")
	for _, c := range []struct {
		err   error
		again bool
		want  error
	}{
		{regionpb.ErrorOf(regionpb.NotLeader), true, nil},
		{regionpb.ErrorOf(regionpb.EpochMismatch), true, nil},
		{regionpb.ErrorOf(regionpb.RegionNotFound), true, nil},
		{regionpb.ErrorOf(regionpb.VoidByFence), true, nil},
		{regionpb.ErrorOf(regionpb.Stopped), true, nil},
		{fmt.Errorf("queue full: %w", router.ErrNotSent), true, nil},
		{regionpb.ErrorOf(regionpb.Unknown), false, regionpb.ErrorOf(regionpb.Unknown)},
		{regionpb.ErrorOf(regionpb.TooManyRequests), false, regionpb.ErrorOf(regionpb.TooManyRequests)},
		{fmt.Errorf("%w: a connection takes less", regionpb.ErrorOf(regionpb.TooLarge)), false, regionpb.ErrorOf(regionpb.TooLarge)},
		{regionpb.ErrorOf(regionpb.KeyNotFound), false, regionpb.ErrorOf(regionpb.KeyNotFound)},
		{regionpb.ErrorOf(regionpb.LeaseNotFound), false, regionpb.ErrorOf(regionpb.LeaseNotFound)},
		{broken, false, router.ErrUnknownOutcome},
	} {
		s := routertest.New()
		writes := 0
		s.Fail = func(op string) error {
			if op != "write" {
				return nil
			}
			if writes++; writes <= 3 {
				return c.err
			}
			return nil
		}
		r := router.New(s, s, fastOptions())
		_, err := r.Put(t.Context(), &pb.PutRequest{Key: []byte("a")})
		if !errors.Is(err, c.want) {
			t.Errorf("%v: got %v, want %v", c.err, err, c.want)
		}
		if again := writes > 1; again != c.again {
			t.Errorf("%v: sent %d times", c.err, writes)
		}
	}
	// A read may be repeated whatever happened to it.
	s := routertest.New()
	reads := 0
	s.Fail = func(op string) error {
		if reads++; reads <= 6 {
			return []error{broken, regionpb.ErrorOf(regionpb.Unknown)}[reads%2]
		}
		return nil
	}
	r := router.New(s, s, fastOptions())
	if _, err := r.Range(t.Context(), &pb.RangeRequest{Key: []byte("a")}); err != nil {
		t.Errorf("read after broken connections: %v", err)
	}
}

// TestTime tells the client's deadline and cancellation from the router's own.
func TestTime(t *testing.T) {
	s := routertest.New()
	s.Fail = func(string) error { return regionpb.ErrorOf(regionpb.NotLeader) }
	hasty, patient := router.New(s, s, router.Options{RequestTimeout: 20 * time.Millisecond}), router.New(s, s, router.Options{RequestTimeout: time.Hour})
	do := map[string]func(ctx context.Context, r *router.Router) error{
		"put": func(ctx context.Context, r *router.Router) error {
			_, err := r.Put(ctx, &pb.PutRequest{Key: []byte("a")})
			return err
		},
		"range": func(ctx context.Context, r *router.Router) error {
			_, err := r.Range(ctx, &pb.RangeRequest{Key: []byte("a")})
			return err
		},
		"stream": func(ctx context.Context, r *router.Router) error {
			return r.RangeStream(ctx, &pb.RangeRequest{Key: []byte("a")}, func(*pb.RangeResponse) error { return nil })
		},
		"compact": func(ctx context.Context, r *router.Router) error {
			_, err := r.Compact(ctx, &pb.CompactionRequest{})
			return err
		},
	}
	for name, f := range do {
		if err := f(t.Context(), hasty); !errors.Is(err, router.ErrTimeout) {
			t.Errorf("%s: the router's time was up: %v", name, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		if err := f(ctx, patient); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: the client's time was up: %v", name, err)
		}
		cancel()
		if err := f(ctx, patient); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) {
			t.Errorf("%s: the client had gone: %v", name, err)
		}
	}
}

// TestSerializableWithoutOracle reads from what is applied here while no read point is to be had,
// and while the replicas lag behind the newest mark.
func TestSerializableWithoutOracle(t *testing.T) {
	s := routertest.New("m")
	r := router.New(s, s, router.Options{})
	put(t, r, "a", "1")
	last := put(t, r, "z", "2")
	s.Fail = func(op string) error {
		if op == "readpoint" {
			return errors.New("no quorum")
		}
		return nil
	}
	all := &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, Serializable: true}
	for _, oracle := range []router.Oracle{s, aheadOracle{s}} {
		r := router.New(oracle, s, router.Options{LocalWait: time.Millisecond})
		resp, err := r.Range(t.Context(), all)
		if err != nil || len(resp.Kvs) != 2 || resp.Header.Revision != last {
			t.Errorf("serializable: %v, %v", resp, err)
		}
		txn, err := r.Txn(t.Context(), &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: all}}}})
		if err != nil || txn.Header.Revision != last {
			t.Errorf("serializable transaction: %v, %v", txn, err)
		}
		if _, err := streamed(r, all); err != nil {
			t.Errorf("serializable stream: %v", err)
		}
	}
	r = router.New(s, s, router.Options{RequestTimeout: 20 * time.Millisecond})
	if _, err := r.Range(t.Context(), &pb.RangeRequest{Key: []byte("a")}); !errors.Is(err, router.ErrTimeout) {
		t.Errorf("linearizable: %v", err)
	}
}

// aheadOracle knows of a cut that no replica here has applied.
type aheadOracle struct{ *routertest.Store }

func (o aheadOracle) Mark() pdpb.Mark {
	m := o.Store.Mark()
	m.Cut, m.Rev = m.Cut+5, m.Rev+5
	return m
}

// TestReadsAhead: what a transaction compares and puts costs a request or two of each region, however
// many keys it names, and replies are bounded there as well.
func TestReadsAhead(t *testing.T) {
	for name, bytesMax := range map[string]int64{"whole replies": 0, "short replies": 40} {
		t.Run(name, func(t *testing.T) {
			s := routertest.New("b", "c")
			s.ReplyBytesMax = bytesMax
			r := router.New(s, s, fastOptions())
			req := &pb.TxnRequest{}
			for i := range 30 {
				key := fmt.Sprintf("%c%02d", "abc"[i%3], i)
				if i < 20 {
					put(t, r, key, "old")
				}
				version := int64(0)
				if i < 20 {
					version = 1
				}
				req.Compare = append(req.Compare, &pb.Compare{Key: []byte(key), Target: pb.Compare_VERSION, TargetUnion: &pb.Compare_Version{Version: version}})
				if i == 4 {
					req.Compare = append(req.Compare, &pb.Compare{Key: []byte(key), Target: pb.Compare_VALUE, TargetUnion: &pb.Compare_Value{Value: []byte("old")}})
				}
				op := putOp(key, "new")
				op.GetRequestPut().PrevKv = i == 7
				req.Success = append(req.Success, op)
			}
			before, _ := s.Reads()
			resp, err := r.Txn(t.Context(), req)
			if err != nil || !resp.Succeeded {
				t.Fatalf("%v %v", resp, err)
			}
			if after, _ := s.Reads(); bytesMax == 0 && after-before > 8 { // 3 regions twice, and two keys whole
				t.Errorf("%d reads", after-before)
			}
			if prev := resp.Responses[7].GetResponsePut().PrevKv; string(prev.GetValue()) != "old" {
				t.Errorf("prev_kv %v", prev)
			}
			for _, v := range s.Alive([]byte{0}, []byte{0}, mvcc.Revision(resp.Header.Revision)) {
				if old := v.Key[1] < '2'; (v.Version == 2) != old || string(v.Value) != "new" {
					t.Errorf("%s: %v", v.Key, v)
				}
			}
		})
	}
}

func putOp(key, value string) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(key), Value: []byte(value)}}}
}

// behindOracle's marks come late.
type behindOracle struct {
	*routertest.Store
	mu    sync.Mutex
	mark  pdpb.Mark
	waits int
	cut   bool // the stream has stopped
}

func (o *behindOracle) Mark() pdpb.Mark {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.mark
}

func (o *behindOracle) WaitRevision(ctx context.Context, rev mvcc.Revision) error {
	if o.cut {
		<-ctx.Done()
		return ctx.Err()
	}
	m := o.Store.Mark()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waits++
	if m.Rev < rev {
		return fmt.Errorf("revision %d was told, the store is at %d", rev, m.Rev)
	}
	o.mark = m
	return nil
}

// TestSerializableAfterAnswer: a node whose newest mark lags behind what it answered waits for the
// mark; a serializable read never is before an answer of the same node.
func TestSerializableAfterAnswer(t *testing.T) {
	s := routertest.New("m")
	o := &behindOracle{Store: s, mark: s.Mark()}
	r := router.New(o, s, fastOptions())
	read := func(want int64) {
		t.Helper()
		resp, err := r.Range(t.Context(), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, Serializable: true})
		if err != nil || resp.Header.Revision != want {
			t.Errorf("%v %v, want revision %d", resp, err, want)
		}
	}
	read(1)
	if o.waits != 0 {
		t.Error("waited without a reason")
	}
	read(put(t, r, "a", "1"))
	resp, err := r.Txn(t.Context(), &pb.TxnRequest{Success: []*pb.RequestOp{putOp("b", "2"), putOp("x", "2")}}) // two regions
	if err != nil {
		t.Fatal(err)
	}
	read(resp.Header.Revision)
	other := router.New(s, s, fastOptions())
	rev := put(t, other, "z", "3")
	read(resp.Header.Revision) // what another node answered binds nobody here
	if _, err := r.Range(t.Context(), &pb.RangeRequest{Key: []byte("z")}); err != nil {
		t.Fatal(err)
	}
	read(rev)
	if o.waits != 3 {
		t.Errorf("waited %d times", o.waits)
	}
	put(t, r, "a", "4")
	o.cut = true
	if _, err := r.Range(t.Context(), &pb.RangeRequest{Key: []byte("a"), Serializable: true}); err != nil {
		t.Errorf("a node that is cut off answers with what it has: %v", err)
	}
}

// TestStreamIsBounded streams a range of many regions and looks at what was held meanwhile.
func TestStreamIsBounded(t *testing.T) {
	var borders []string
	for i := 1; i < 16; i++ {
		borders = append(borders, fmt.Sprintf("%04d", i*100))
	}
	s := routertest.New(borders...)
	r := router.New(s, s, router.Options{ChunkBytes: 1000, PageBytes: 2000})
	value := make([]byte, 30)
	for i := range 1600 {
		put(t, r, fmt.Sprintf("%04d", i), string(value))
	}
	chunks, keys, largest := 0, 0, 0
	err := r.RangeStream(t.Context(), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}, func(resp *pb.RangeResponse) error {
		chunks++
		keys += len(resp.Kvs)
		largest = max(largest, proto.Size(resp))
		return nil
	})
	if err != nil || keys != 1600 {
		t.Fatalf("%d keys, %v", keys, err)
	}
	if _, reply := s.Reads(); largest > 2500 || reply > 2000 || chunks < 40 {
		t.Errorf("%d chunks, the largest of %d bytes; the largest reply had %d", chunks, largest, reply)
	}
}

// TestRaceWithRemoval starts over when removal overtakes a read, but does not for ever, and tells a
// stream that has begun.
func TestRaceWithRemoval(t *testing.T) {
	s := routertest.New("m")
	r := router.New(s, s, fastOptions())
	for i := range 40 {
		put(t, r, fmt.Sprintf("k%02d", i), "v")
	}
	s.Overtake()
	if _, err := r.Range(t.Context(), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}); err != nil {
		t.Errorf("one race lost: %v", err)
	}
	s.Fail = func(op string) error {
		if op == "read" {
			return regionpb.ErrorOf(regionpb.Compacted)
		}
		return nil
	}
	if _, err := r.Range(t.Context(), &pb.RangeRequest{Key: []byte("a")}); !errors.Is(err, regionpb.ErrorOf(regionpb.Compacted)) {
		t.Errorf("all races lost: %v", err)
	}
	s.Fail = nil
	err := r.RangeStream(t.Context(), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}, func(*pb.RangeResponse) error {
		s.Overtake()
		return nil
	})
	if !errors.Is(err, regionpb.ErrorOf(regionpb.Compacted)) {
		t.Errorf("race lost by a stream: %v", err)
	}
}

// TestPhysical waits for removal, also before the refusal.
func TestPhysical(t *testing.T) {
	s := routertest.New()
	var waited []mvcc.Revision
	r := router.New(s, s, router.Options{Scrubbed: func(_ context.Context, rev mvcc.Revision) error {
		waited = append(waited, rev)
		return nil
	}})
	for _, c := range []*pb.CompactionRequest{{Revision: 1}, {Revision: 1, Physical: true}, {Revision: 9, Physical: true}} {
		r.Compact(t.Context(), c)
	}
	put(t, r, "a", "")
	if _, err := r.Compact(t.Context(), &pb.CompactionRequest{Revision: 2, Physical: true}); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(waited) != "[1 2]" {
		t.Errorf("waited for %v", waited)
	}
}

// TestTooLargePart: a transaction over several regions ends as soon as its part in one of them is larger
// than a region takes, however much there is to be read; what is large only as a whole is none.
func TestTooLargePart(t *testing.T) {
	s := routertest.New("k20", "k40")
	o := fastOptions()
	o.PartBytesMax = 60 // of deletions of keys of three bytes: 12
	r := router.New(s, s, o)
	for i := range 60 {
		if _, err := r.Put(t.Context(), &pb.PutRequest{Key: key(i)}); err != nil {
			t.Fatal(err)
		}
	}
	all := &pb.DeleteRangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}
	before, _ := s.Reads()
	_, err := r.DeleteRange(t.Context(), all)
	var re *regionpb.Error
	if !errors.As(err, &re) || re.Code != regionpb.TooLarge {
		t.Errorf("a deletion of everything: %v", err)
	}
	stopped, _ := s.Reads()
	if n := len(s.Alive([]byte{0}, []byte{0}, mvcc.Latest)); n != 60 {
		t.Errorf("%d keys are left of 60", n)
	}
	if resp, err := r.DeleteRange(t.Context(), &pb.DeleteRangeRequest{Key: key(10), RangeEnd: key(30)}); err != nil || resp.Deleted != 20 {
		t.Errorf("ten keys of each of two regions: %v, %v", resp, err)
	}
	if read, _ := s.Reads(); stopped-before >= read-stopped {
		t.Errorf("%d reads for what is too large, %d for what is not", stopped-before, read-stopped)
	}
}
