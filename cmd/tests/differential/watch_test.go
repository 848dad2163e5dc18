package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"

	"braid/cmd/tests/etcdbin"
)

// watching is a watch stream of a store, with what came out of it since the last look.
type watching struct {
	*Target
	stream    pb.Watch_WatchClient
	responses chan *pb.WatchResponse
}

func watchOn(ctx context.Context, t *Target) (*watching, error) {
	stream, err := pb.NewWatchClient(t.conn).Watch(ctx, grpc.MaxCallRecvMsgSize(math.MaxInt32))
	if err != nil {
		return nil, err
	}
	w := &watching{t, stream, make(chan *pb.WatchResponse, 1<<16)}
	go func() {
		defer close(w.responses)
		for {
			r, err := stream.Recv()
			if err != nil {
				return
			}
			w.responses <- r
		}
	}()
	return w, nil
}

// settle collects what the stream says until so many control responses have come and it has
// confirmed progress, which it does only when every watcher has everything, or until it has stayed
// silent where it must not confirm. What depends on batching is left out: the seen are the events
// and their order for each watcher, the control responses whole, and the revision that progress was
// confirmed at. Progress is asked for last, because in etcd it may overtake control responses.
func (w *watching) settle(ctx context.Context, controls int, confirms bool) ([]string, error) {
	byID := map[int64][]string{}
	progress := time.NewTicker(20 * time.Millisecond)
	defer progress.Stop()
	ask := func() error {
		return w.stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}})
	}
	asked, answered := 0, false
	var extra <-chan time.Time // answers to what was asked too often
	for controls > 0 || !answered && (confirms || asked < 10) || extra != nil {
		if controls == 0 && asked == 0 {
			if err := ask(); err != nil {
				return nil, err
			}
			asked = 1
		}
		select {
		case <-extra:
			extra = nil
		case r, ok := <-w.responses:
			if !ok {
				return nil, fmt.Errorf("%s: the stream ended", w.Name)
			}
			if r.WatchId == -1 && !r.Created && !r.Canceled {
				byID[-2] = []string{fmt.Sprintf("progress at %d", r.Header.Revision)}
				if !answered && asked > 1 {
					extra = time.After(50 * time.Millisecond)
				}
				answered = true
				continue
			}
			if len(r.Events) == 0 {
				controls--
				byID[r.WatchId] = append(byID[r.WatchId], fmt.Sprintf("created=%v canceled=%v at %d compacted %d %q",
					r.Created, r.Canceled, r.Header.Revision, r.CompactRevision, r.CancelReason))
			}
			for _, e := range r.Events {
				if r.Header.Revision < e.Kv.ModRevision {
					return nil, fmt.Errorf("%s: event %v under header %d", w.Name, e, r.Header.Revision)
				}
				byID[r.WatchId] = append(byID[r.WatchId], text(e))
			}
		case <-progress.C:
			if controls > 0 || answered {
				continue
			}
			if err := ask(); err != nil {
				return nil, err
			}
			asked++
		case <-ctx.Done():
			return nil, fmt.Errorf("%s: no progress: %w", w.Name, ctx.Err())
		}
	}
	var lines []string
	for id, list := range byID {
		for i, l := range list {
			lines = append(lines, fmt.Sprintf("watcher %d, %03d: %s", id, i, l))
		}
	}
	slices.Sort(lines)
	return lines, nil
}

// TestWatchesAgainstEtcd sends the same writes, compactions, watches, cancellations and progress
// requests to etcd and to Braid with one region and with many, and compares what every watcher got.
func TestWatchesAgainstEtcd(t *testing.T) {
	if os.Getenv("BRAID_BIN") == "" {
		if _, err := os.Stat(filepath.Join("..", "..", "braid")); err != nil {
			t.Skip("no cmd/braid here and BRAID_BIN is not set")
		}
	}
	o := options{regions: true}
	setup, err := o.setup()
	if err != nil {
		t.Fatal(err)
	}
	compareWatches(t, setup, 1, 250)
}

// TestWatchesOfEtcdAgainstItself: the comparison itself makes no difference.
func TestWatchesOfEtcdAgainstItself(t *testing.T) {
	etcd, err := etcdbin.Etcd()
	if err != nil {
		t.Fatal(err)
	}
	compareWatches(t, Setup{Etcd: etcd, Braid: etcd, Splits: splitKeys}, 2, 60)
}

func compareWatches(t *testing.T, setup Setup, seed uint64, steps int) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s, err := NewSession(ctx, setup)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	g := newGenerator(seed)
	rnd := rand.New(rand.NewPCG(seed, 77))
	var streams []*watching
	for _, target := range s.all() {
		w, err := watchOn(ctx, target)
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, w)
	}
	current, floor := int64(1), int64(-1)
	events, spread := 0, 0
	alive := 0 // watchers; without any there is no progress to confirm
	open := map[int64]bool{}
	for step := range steps {
		var did []string
		controls := 0
		watch := func(req *pb.WatchRequest) {
			for _, w := range streams {
				if err := w.stream.Send(req); err != nil {
					t.Fatal(err)
				}
			}
			did = append(did, text(req))
		}
		for range 1 + rnd.IntN(6) {
			var r Request
			switch rnd.IntN(6) {
			case 0:
				r = Request{"DeleteRange", &pb.DeleteRangeRequest{Key: g.key()}}
			case 2:
				d := &pb.DeleteRangeRequest{Key: g.key()}
				d.RangeEnd = g.rangeEnd(d.Key)
				r = Request{"DeleteRange", d}
			case 3: // keys of any region, in any order, which is the order of the events
				t := &pb.TxnRequest{}
				for _, i := range rnd.Perm(len(letters))[:2+rnd.IntN(3)] {
					t.Success = append(t.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte{letters[i], 'x'}, Value: g.value()}}})
				}
				r = Request{"Txn", t}
			case 1:
				k := g.key()
				r = Request{"Txn", &pb.TxnRequest{Success: []*pb.RequestOp{
					{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: k}}},
					{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: append(slices.Clone(k), 'x'), Value: g.value()}}},
				}}}
			default:
				r = Request{"Put", &pb.PutRequest{Key: g.key(), Value: g.value()}}
			}
			if s.splits.writeSpread(r) == manyRegions {
				spread++
			}
			want := s.etcd.Do(ctx, r)
			for _, target := range s.tested {
				if got := target.Do(ctx, r); got.OK() != want.OK() || !equal(want, got) {
					t.Fatalf("step %d: %s: %s answers %s, etcd %s", step, r.Text(), target.Name, got, want)
				}
			}
			if h, ok := want.Msg.(interface{ GetHeader() *pb.ResponseHeader }); ok && want.OK() {
				current = max(current, h.GetHeader().GetRevision())
			}
			did = append(did, r.Text())
		}
		if rnd.IntN(6) == 0 {
			// What is behind is canceled by it; nothing is, after settling.
			floor = max(floor, current-int64(rnd.IntN(10)))
			r := Request{"Compact", &pb.CompactionRequest{Revision: floor}}
			for _, target := range s.all() {
				target.Do(ctx, r)
			}
			did = append(did, r.Text())
		}
		lines := make([][]string, len(streams))
		settle := func() {
			for i, w := range streams {
				got, err := w.settle(ctx, controls, alive > 0)
				if err != nil {
					t.Fatalf("step %d, after %s: %v", step, strings.Join(did, "; "), err)
				}
				lines[i] = got
			}
			for i := range lines[1:] {
				if !slices.Equal(lines[0], lines[i+1]) {
					t.Fatalf("step %d, after\n%s\netcd:\n%s\n%s:\n%s", step, strings.Join(did, "\n"),
						strings.Join(lines[0], "\n"), streams[i+1].Name, strings.Join(lines[i+1], "\n"))
				}
			}
			events += len(lines[0])
			controls = 0
		}
		settle()
		did = nil
		for range rnd.IntN(3) {
			id := int64(rnd.IntN(30) + 1)
			if open[id] && rnd.IntN(2) == 0 {
				watch(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: id}}})
				delete(open, id)
				alive--
				controls++
				continue
			}
			c := &pb.WatchCreateRequest{WatchId: id, Key: g.key(), PrevKv: rnd.IntN(2) == 0, Fragment: rnd.IntN(4) == 0, ProgressNotify: rnd.IntN(4) == 0}
			c.RangeEnd = g.rangeEnd(c.Key)
			switch rnd.IntN(8) {
			case 0:
				c.Filters = []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT}
			case 1:
				c.Filters = []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NODELETE}
			}
			switch rnd.IntN(6) {
			case 0:
				c.StartRevision = -1
			case 1, 2, 3: // sometimes at or below the floor, never in the future, which confirms nothing
				if c.StartRevision = current - int64(rnd.IntN(30)); c.StartRevision < floor {
					c.StartRevision = floor
				}
				c.StartRevision = max(c.StartRevision, 1)
			}
			if empty := len(c.RangeEnd) > 0 && !(len(c.RangeEnd) == 1 && c.RangeEnd[0] == 0) && string(c.Key) >= string(c.RangeEnd); !empty && !open[id] && c.StartRevision >= 0 {
				open[id] = true
				alive++
			}
			watch(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: c}})
			controls++
		}
		settle()
		if floor > 1 && rnd.IntN(3) == 0 {
			// Below the floor: created, then canceled. Its id is given back at once.
			watch(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{
				WatchId: 99, Key: []byte{0}, RangeEnd: []byte{0}, StartRevision: 1 + rnd.Int64N(floor-1)}}})
			for i, w := range streams {
				for n := 0; n < 2; {
					r, ok := <-w.responses
					if !ok {
						t.Fatalf("%s: the stream ended", w.Name)
					}
					if r.WatchId == 99 {
						n++
						normalizeHeader(r.Header)
						lines[i] = append(lines[i], text(r))
					}
				}
				if !slices.Equal(lines[i], lines[0]) {
					t.Fatalf("step %d: below the floor %s says %q, etcd %q", step, w.Name, lines[i], lines[0])
				}
			}
			watch(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: 99}}})
			controls++
			settle()
		}
	}
	t.Logf("%d lines compared in %d steps, %d writes over several regions", events, steps, spread)
	if events < steps || spread < steps/4 {
		t.Errorf("only %d lines and %d writes over several regions in %d steps: this compares nothing", events, spread, steps)
	}
}
