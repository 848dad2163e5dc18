package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
)

// shape is a step of a script: what is sent, and how many responses belong to it. Where less than
// that must come, nothing may: silence is an answer too.
type shape struct {
	name string
	send func(w *watching) error
	want int
}

func create(c *pb.WatchCreateRequest) func(w *watching) error {
	return func(w *watching) error {
		return w.stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: c}})
	}
}

func cancelWatch(id int64) func(w *watching) error {
	return func(w *watching) error {
		return w.stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: id}}})
	}
}

func askProgress(w *watching) error {
	return w.stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}})
}

// does sends requests to the store, one after another.
func does(list ...Request) func(w *watching) error {
	return func(w *watching) error {
		for _, r := range list {
			if a := w.Do(context.Background(), r); !a.OK() {
				return fmt.Errorf("%s: %s", r.Text(), a)
			}
		}
		return nil
	}
}

func puts(value string, keys ...string) Request {
	t := &pb.TxnRequest{}
	for _, k := range keys {
		t.Success = append(t.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(k), Value: []byte(value)}}})
	}
	return Request{"Txn", t}
}

var everyKey = []byte{0}

// watchShapes go through the rules of a watch stream one by one. Revisions are those of a fresh store.
func watchShapes() []shape {
	return []shape{
		{"no watcher, no progress", askProgress, 0},
		{"created at the current revision", create(&pb.WatchCreateRequest{Key: []byte("b")}), 1},
		{"the next id", create(&pb.WatchCreateRequest{Key: []byte("x"), RangeEnd: everyKey}), 1},
		{"an id of its own", create(&pb.WatchCreateRequest{Key: []byte("c"), WatchId: 7}), 1},
		{"an id that is taken", create(&pb.WatchCreateRequest{Key: []byte("d"), WatchId: 7}), 1},
		{"an empty range", create(&pb.WatchCreateRequest{Key: []byte("d"), RangeEnd: []byte("c")}), 1},
		{"a range of one key that is empty", create(&pb.WatchCreateRequest{Key: []byte("d"), RangeEnd: []byte("d")}), 1},
		{"a negative revision", create(&pb.WatchCreateRequest{Key: []byte("d"), StartRevision: -3}), 1},
		{"an event", does(puts("1", "b")), 1},
		{"progress after it", askProgress, 1},
		{"one revision for three watchers", does(puts("2", "z", "b", "c")), 3},
		{"canceled", cancelWatch(0), 1},
		{"canceled twice", cancelWatch(0), 0},
		{"never there", cancelWatch(99), 0},
		{"its events are over", does(puts("3", "b")), 0},
		{"the lowest free id", create(&pb.WatchCreateRequest{Key: []byte("b"), PrevKv: true}), 1},
		{"a previous value", does(puts("4", "b")), 1},
		{"a deletion with it", does(Request{"DeleteRange", &pb.DeleteRangeRequest{Key: []byte("b")}}), 1},
		{"created again", does(puts("5", "b")), 1},
		{"no puts wanted", create(&pb.WatchCreateRequest{Key: []byte("f"), WatchId: 20, Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT}}), 1},
		{"no deletions wanted", create(&pb.WatchCreateRequest{Key: []byte("f"), WatchId: 21, Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NODELETE}}), 1},
		{"a put for one", does(puts("1", "f")), 1},
		{"a deletion for the other", does(Request{"DeleteRange", &pb.DeleteRangeRequest{Key: []byte("f")}}), 1},
		{"nothing wanted", create(&pb.WatchCreateRequest{Key: []byte("f"), WatchId: 22, Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT, pb.WatchCreateRequest_NODELETE}}), 1},
		{"history", create(&pb.WatchCreateRequest{Key: []byte("b"), WatchId: 30, StartRevision: 2}), 2},
		{"history of everything from the empty key", create(&pb.WatchCreateRequest{RangeEnd: everyKey, WatchId: 31, StartRevision: 3}), 2},
		{"history is canceled", cancelWatch(31), 1},
		{"the future", create(&pb.WatchCreateRequest{Key: []byte("g"), WatchId: 40, StartRevision: 12}), 1},
		{"no progress while one waits for the future", askProgress, 0},
		{"the future has not come", does(puts("1", "g")), 0},
		{"nor here", does(puts("2", "g")), 0},
		{"it comes", does(puts("3", "g"), puts("4", "g")), 2},
		{"progress again", askProgress, 1},
		{"compacted at", does(Request{"Compact", &pb.CompactionRequest{Revision: 6}}), 0},
		{"below it", create(&pb.WatchCreateRequest{Key: []byte("b"), WatchId: 50, StartRevision: 5}), 2},
		{"its id is given back", cancelWatch(50), 1},
		{"at it, a deletion", create(&pb.WatchCreateRequest{Key: []byte("b"), WatchId: 51, StartRevision: 6}), 2},
		{"the caught up survive a compaction", does(Request{"Compact", &pb.CompactionRequest{Revision: 13}}, puts("6", "b")), 3},
		{"no client request ends the stream", func(w *watching) error { return w.stream.CloseSend() }, 0},
		{"it goes on", does(puts("7", "b")), 3},
	}
}

// TestWatchShapesAgainstEtcd plays the same script on a stream of etcd and of braid with one region
// and with many, and compares whole responses.
func TestWatchShapesAgainstEtcd(t *testing.T) {
	play(t, nil, func(ctx context.Context, w *watching) ([]string, error) {
		var said []string
		for _, step := range watchShapes() {
			if err := step.send(w); err != nil {
				return nil, fmt.Errorf("%s: %w", step.name, err)
			}
			got, err := w.take(ctx, step.want)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", step.name, err)
			}
			// Which watcher's response comes first is nobody's promise.
			slices.Sort(got)
			said = append(said, step.name+":\n  "+strings.Join(got, "\n  "))
		}
		return said, nil
	})
}

// TestWatchFragmentsAgainstEtcd compares where responses are cut.
func TestWatchFragmentsAgainstEtcd(t *testing.T) {
	play(t, []string{"--max-request-bytes=100000"}, func(ctx context.Context, w *watching) ([]string, error) {
		// A revision of two megabytes cannot be written; a deletion with previous values can be read.
		value := strings.Repeat("v", 90_000)
		for i := range 12 {
			if err := does(puts(value, fmt.Sprintf("%c/%02d", 'a'+2*i, i)))(w); err != nil {
				return nil, err
			}
		}
		var said []string
		for id, c := range []*pb.WatchCreateRequest{
			{RangeEnd: everyKey, PrevKv: true, Fragment: true}, {RangeEnd: everyKey, PrevKv: true}, {RangeEnd: everyKey, Fragment: true},
		} {
			c.WatchId = int64(id + 1)
			if err := create(c)(w); err != nil {
				return nil, err
			}
			if _, err := w.take(ctx, 1); err != nil {
				return nil, err
			}
		}
		if err := does(Request{"DeleteRange", &pb.DeleteRangeRequest{Key: everyKey, RangeEnd: everyKey}})(w); err != nil {
			return nil, err
		}
		for events := 0; events < 3*12; {
			select {
			case r, ok := <-w.responses:
				if !ok {
					return nil, errors.New("the stream ended")
				}
				events += len(r.Events)
				keys := ""
				for _, e := range r.Events {
					keys += fmt.Sprintf(" %s(%d)", e.Kv.Key, len(e.GetPrevKv().GetValue()))
				}
				said = append(said, fmt.Sprintf("watcher %d, fragment %v, at %d:%s", r.WatchId, r.Fragment, r.Header.Revision, keys))
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		slices.SortStableFunc(said, func(a, b string) int { return strings.Compare(a[:9], b[:9]) })
		return said, nil
	})
}

// TestWatchProgressByTimerAgainstEtcd compares what a watcher that asks for notifications is told.
func TestWatchProgressByTimerAgainstEtcd(t *testing.T) {
	play(t, []string{"--watch-progress-notify-interval=100ms"}, func(ctx context.Context, w *watching) ([]string, error) {
		if err := does(puts("1", "b"), puts("2", "t"))(w); err != nil {
			return nil, err
		}
		for id, c := range []*pb.WatchCreateRequest{{Key: []byte("k")}, {Key: []byte("k"), ProgressNotify: true}, {Key: []byte("k"), ProgressNotify: true, StartRevision: 100}} {
			c.WatchId = int64(id + 5)
			if err := create(c)(w); err != nil {
				return nil, err
			}
		}
		if _, err := w.take(ctx, 3); err != nil {
			return nil, err
		}
		said, err := w.take(ctx, 3)
		if err != nil {
			return nil, err
		}
		if err := does(puts("3", "b"))(w); err != nil { // not an event of k: the revision moves
			return nil, err
		}
		for {
			more, err := w.take(ctx, 1)
			if err != nil {
				return nil, err
			}
			if said = append(said, more...); strings.Contains(more[0], "revision:4") {
				return slices.Compact(said), nil
			}
		}
	})
}

// take waits for n responses; for none, it waits a while that there is none.
func (w *watching) take(ctx context.Context, n int) ([]string, error) {
	var got []string
	quiet := time.NewTimer(150 * time.Millisecond)
	defer quiet.Stop()
	for n == 0 || len(got) < n {
		var over <-chan time.Time
		if n == 0 {
			over = quiet.C
		}
		select {
		case r, ok := <-w.responses:
			if !ok {
				return nil, fmt.Errorf("the stream ended after %q", got)
			}
			r = proto.CloneOf(r)
			normalizeHeader(r.Header)
			got = append(got, strings.Join(strings.Fields(text(r)), " "))
		case <-over:
			return got, nil
		case <-ctx.Done():
			return nil, fmt.Errorf("%d of %d responses: %q", len(got), n, got)
		}
	}
	return got, nil
}

// play runs a script on each store and compares what it says, line by line.
func play(t *testing.T, args []string, script func(context.Context, *watching) ([]string, error)) {
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
	var want []string
	for _, store := range []struct {
		name, bin string
		args      []string
	}{{"etcd", setup.Etcd, nil}, {"one", setup.Braid, nil}, {"many", setup.Braid, splitArgs(setup)}} {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		target, err := startTarget(ctx, store.name, store.bin, t.TempDir(), append(slices.Clone(args), store.args...)...)
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := target.close(); err != nil {
				t.Error(err)
			}
		}()
		w, err := watchOn(ctx, target)
		if err != nil {
			t.Fatal(err)
		}
		got, err := script(ctx, w)
		if err != nil {
			t.Fatalf("%s: %v", store.name, err)
		}
		if want == nil {
			want = got
			continue
		}
		for i := range max(len(want), len(got)) {
			line := func(list []string) string {
				if i < len(list) {
					return list[i]
				}
				return "nothing"
			}
			if line(want) != line(got) {
				t.Errorf("%s differs\n etcd: %s\n %s: %s", store.name, line(want), store.name, line(got))
			}
		}
	}
}
