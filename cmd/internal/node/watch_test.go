package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"braid/cmd/internal/config"
)

// client is etcd's client at a node.
func (n *testNode) client() *clientv3.Client {
	n.t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{n.cfg.AdvertiseClientURLs[0].Host}, Logger: zap.NewNop(), DialTimeout: patience})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { c.Close() })
	return c
}

// shapes runs a test over one region, over seven, and in single-group mode: the answers must be the same.
func shapes(t *testing.T, size int, fn func(t *testing.T, c *testCluster)) {
	for name, change := range map[string]func(*config.Config){
		"one": splitAt(), "seven": splitAt("b", "d", "h", "k", "p", "t"), "single-group": singleGroupMode,
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, size, change, func(c *config.Config) { c.WatchProgressNotifyInterval = 100 * time.Millisecond })
			c.start(c.nodes...)
			fn(t, c)
			c.stop(c.nodes...)
		})
	}
}

// raw is a watch stream without a client's help.
type raw struct {
	t *testing.T
	pb.Watch_WatchClient
	cancel context.CancelFunc
}

func (n *testNode) watch(md ...string) *raw {
	n.t.Helper()
	ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(within(n.t), md...))
	s, err := pb.NewWatchClient(n.conn).Watch(ctx, grpc.MaxCallRecvMsgSize(4<<20))
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(cancel)
	return &raw{n.t, s, cancel}
}

func (r *raw) create(c *pb.WatchCreateRequest) {
	r.t.Helper()
	if err := r.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: c}}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *raw) progress() {
	r.t.Helper()
	if err := r.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *raw) next() *pb.WatchResponse {
	r.t.Helper()
	resp, err := r.Recv()
	if err != nil {
		r.t.Fatal(err)
	}
	return resp
}

// show prints a response in one line, without what differs between stores.
func show(r *pb.WatchResponse) string {
	var b strings.Builder
	fmt.Fprintf(&b, "id=%d rev=%d", r.WatchId, r.Header.GetRevision())
	for _, f := range []struct {
		set  bool
		name string
	}{{r.Created, "created"}, {r.Canceled, "canceled"}, {r.Fragment, "fragment"}} {
		if f.set {
			b.WriteString(" " + f.name)
		}
	}
	if r.CompactRevision != 0 {
		fmt.Fprintf(&b, " compact=%d", r.CompactRevision)
	}
	if r.CancelReason != "" {
		fmt.Fprintf(&b, " %q", r.CancelReason)
	}
	for _, e := range r.Events {
		fmt.Fprintf(&b, " %s(%s=%.8s@%d c%d v%d)", e.Type, e.Kv.Key, e.Kv.Value, e.Kv.ModRevision, e.Kv.CreateRevision, e.Kv.Version)
		if e.PrevKv != nil {
			fmt.Fprintf(&b, "<-%.8s@%d", e.PrevKv.Value, e.PrevKv.ModRevision)
		}
	}
	return b.String()
}

func (r *raw) want(lines ...string) {
	r.t.Helper()
	for _, want := range lines {
		if got := show(r.next()); got != want {
			r.t.Fatalf("got  %s\nwant %s", got, want)
		}
	}
}

func mustDo[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// TestWatchShapes is etcd's contract of requests and answers, line by line.
func TestWatchShapes(t *testing.T) {
	shapes(t, 1, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		cl := n.client()
		w := n.watch()
		w.create(&pb.WatchCreateRequest{Key: []byte("a"), StartRevision: -1})
		w.create(&pb.WatchCreateRequest{Key: []byte("b"), RangeEnd: []byte("a")})
		w.create(&pb.WatchCreateRequest{Key: []byte("a"), RangeEnd: []byte("a")})
		w.create(&pb.WatchCreateRequest{RangeEnd: []byte{0}, PrevKv: true}) // everything: id 0
		w.create(&pb.WatchCreateRequest{Key: []byte("a"), WatchId: 5, Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT}})
		w.create(&pb.WatchCreateRequest{Key: []byte("a"), WatchId: 5})
		w.create(&pb.WatchCreateRequest{Key: []byte("z"), RangeEnd: []byte{0}, StartRevision: 4}) // the future: id 1
		w.want(
			`id=-1 rev=1 created canceled "etcdserver: mvcc: required revision has been compacted"`,
			`id=-1 rev=1 created canceled "mvcc: watcher range is empty"`,
			`id=-1 rev=1 created canceled "mvcc: watcher range is empty"`,
			`id=0 rev=1 created`,
			`id=5 rev=1 created`,
			`id=-1 rev=1 created canceled "mvcc: duplicate watch ID provided on the WatchStream"`,
			`id=1 rev=1 created`,
		)
		n.put("a", "1")
		n.put("z", "2")
		w.want(`id=0 rev=2 PUT(a=1@2 c2 v1)`, `id=0 rev=3 PUT(z=2@3 c3 v1)`)
		w.progress() // one watcher begins in the future: no answer
		w.create(&pb.WatchCreateRequest{Key: []byte("unused"), WatchId: 6})
		w.want(`id=6 rev=3 created`)
		n.put("zz", "3")
		got := []string{show(w.next()), show(w.next())}
		slices.Sort(got)
		if want := []string{`id=0 rev=4 PUT(zz=3@4 c4 v1)`, `id=1 rev=4 PUT(zz=3@4 c4 v1)`}; !slices.Equal(got, want) {
			t.Fatalf("%q, want %q", got, want)
		}
		mustDo[*clientv3.DeleteResponse](t)(cl.Delete(within(t), "a"))
		got = []string{show(w.next()), show(w.next())}
		slices.Sort(got)
		if want := []string{`id=0 rev=5 DELETE(a=@5 c0 v0)<-1@2`, `id=5 rev=5 DELETE(a=@5 c0 v0)`}; !slices.Equal(got, want) {
			t.Fatalf("%q, want %q", got, want)
		}
		// A put and a delete in one transaction: one response, in the order of execution.
		mustDo[*clientv3.TxnResponse](t)(cl.Txn(within(t)).Then(clientv3.OpPut("a", "4"), clientv3.OpPut("a1", "5")).Commit())
		w.want(`id=0 rev=6 PUT(a=4@6 c6 v1) PUT(a1=5@6 c6 v1)`)
		mustDo[*clientv3.TxnResponse](t)(cl.Txn(within(t)).Then(clientv3.OpDelete("a"), clientv3.OpPut("a1", "6")).Commit())
		got = []string{show(w.next()), show(w.next())}
		slices.Sort(got)
		if want := []string{`id=0 rev=7 DELETE(a=@7 c0 v0)<-4@6 PUT(a1=6@7 c6 v2)<-5@6`, `id=5 rev=7 DELETE(a=@7 c0 v0)`}; !slices.Equal(got, want) {
			t.Fatalf("%q, want %q", got, want)
		}
		// Unknown ids have no answer; a canceled watcher gets nothing more.
		for _, id := range []int64{99, 0, 0, 5} {
			if err := w.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: id}}}); err != nil {
				t.Fatal(err)
			}
		}
		w.want(`id=0 rev=7 canceled`, `id=5 rev=7 canceled`)
		n.put("a", "7")
		w.progress()
		w.want(`id=-1 rev=8`)
		// CloseSend does not end the stream.
		if err := w.CloseSend(); err != nil {
			t.Fatal(err)
		}
		n.put("zz", "8")
		w.want(`id=1 rev=9 PUT(zz=8@9 c4 v2)`)
		w.cancel()
		if _, err := w.Recv(); status.Code(err) != codes.Canceled {
			t.Fatalf("after a cancel: %v", err)
		}
	})
}

// TestWatchCompaction is the first case of the field: the edge of a compaction, a delete on it.
func TestWatchCompaction(t *testing.T) {
	shapes(t, 1, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		cl := n.client()
		for _, v := range []string{"2", "3", "4"} {
			n.put("k", v)
		}
		live := n.watch()
		live.create(&pb.WatchCreateRequest{Key: []byte("k")})
		live.want(`id=0 rev=4 created`)
		mustDo[*clientv3.DeleteResponse](t)(cl.Delete(within(t), "k"))
		n.put("k", "6")
		mustDo[*clientv3.CompactResponse](t)(cl.Compact(within(t), 5, clientv3.WithCompactPhysical()))
		w := n.watch()
		w.create(&pb.WatchCreateRequest{Key: []byte("k"), StartRevision: 5, PrevKv: true})
		w.want(`id=0 rev=6 created`, `id=0 rev=6 DELETE(k=@5 c0 v0) PUT(k=6@6 c6 v1)`)
		w.create(&pb.WatchCreateRequest{Key: []byte("k"), StartRevision: 4})
		w.want(`id=1 rev=6 created`, `id=1 rev=0 canceled compact=5`)
		w.progress()
		w.want(`id=-1 rev=6`)
		live.want(`id=0 rev=5 DELETE(k=@5 c0 v0)`, `id=0 rev=6 PUT(k=6@6 c6 v1)`)

		if _, err := cl.Get(within(t), "k", clientv3.WithRev(4)); !errors.Is(err, rpctypes.ErrCompacted) {
			t.Errorf("reading below the compaction: %v", err)
		}
		if got := mustDo[*clientv3.GetResponse](t)(cl.Get(within(t), "k", clientv3.WithRev(5))); len(got.Kvs) != 0 || got.Header.Revision != 6 {
			t.Errorf("reading at the compaction: %v", got)
		}
		if _, err := cl.Compact(within(t), 5); !errors.Is(err, rpctypes.ErrCompacted) {
			t.Errorf("compacting again: %v", err)
		}
		if _, err := cl.Compact(within(t), 100); !errors.Is(err, rpctypes.ErrFutureRev) {
			t.Errorf("compacting the future: %v", err)
		}
		// etcd's client goes on from the compaction by itself when told to.
		ch := cl.Watch(within(t), "k", clientv3.WithRev(2))
		if r := <-ch; r.CompactRevision != 5 || !errors.Is(r.Err(), rpctypes.ErrCompacted) {
			t.Fatalf("a watch from below the compaction: %+v", r)
		}
		ch = cl.Watch(within(t), "k", clientv3.WithRev(5))
		if r := <-ch; len(r.Events) != 2 {
			t.Fatalf("resumed at the compaction: %+v", r)
		}
		// The same out of the engine, after a restart emptied the window.
		c.restart(n)
		w = n.watch()
		w.create(&pb.WatchCreateRequest{Key: []byte("k"), StartRevision: 5})
		w.create(&pb.WatchCreateRequest{Key: []byte("k"), StartRevision: 4})
		w.want(`id=0 rev=6 created`)
		got := []string{show(w.next()), show(w.next()), show(w.next())}
		slices.Sort(got)
		if want := []string{`id=0 rev=6 DELETE(k=@5 c0 v0) PUT(k=6@6 c6 v1)`, `id=1 rev=0 canceled compact=5`, `id=1 rev=6 created`}; !slices.Equal(got, want) {
			t.Fatalf("%q, want %q", got, want)
		}
	})
}

// TestWatchProgress: a progress response never passes an event, and quiet ranges answer.
func TestWatchProgress(t *testing.T) {
	shapes(t, 1, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		w := n.watch()
		w.create(&pb.WatchCreateRequest{Key: []byte("a"), RangeEnd: []byte("z")})
		w.want(`id=0 rev=1 created`)
		const rounds = 600
		failed := make(chan error, 1)
		go func() {
			for i := range rounds {
				if err := w.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}}); err != nil {
					failed <- err
					return
				}
				if _, err := n.kv.Put(within(t), &pb.PutRequest{Key: []byte{"abit"[i%4]}, Value: []byte("x")}); err != nil {
					failed <- err
					return
				}
			}
			failed <- nil
		}()
		var seen, progress, answers int64 = 1, 1, 0
		for seen < rounds+1 {
			r := w.next()
			switch {
			case len(r.Events) == 0 && r.WatchId == -1:
				if r.Header.Revision < seen || r.Header.Revision < progress {
					t.Fatalf("progress %d after event %d and progress %d", r.Header.Revision, seen, progress)
				}
				progress = r.Header.Revision
				answers++
			default:
				for _, e := range r.Events {
					if e.Kv.ModRevision != seen+1 || e.Kv.ModRevision <= progress || r.Header.Revision < e.Kv.ModRevision {
						t.Fatalf("%s after event %d and progress %d", show(r), seen, progress)
					}
					seen++
				}
			}
		}
		if err := <-failed; err != nil {
			t.Fatal(err)
		}
		if answers < rounds/10 {
			t.Errorf("%d of %d progress requests were answered", answers, rounds)
		}

		quiet := n.watch()
		quiet.create(&pb.WatchCreateRequest{Key: []byte("y"), RangeEnd: []byte("z")})
		quiet.want(fmt.Sprintf("id=0 rev=%d created", seen))
		var took []time.Duration
		for range 20 {
			rev := n.put("b", "quiet")
			began := time.Now()
			quiet.progress()
			if r := quiet.next(); r.WatchId != -1 || r.Header.Revision != rev {
				t.Fatalf("%s, want progress through %d", show(r), rev)
			}
			took = append(took, time.Since(began))
		}
		// A machine that stands still now and then is slow sometimes, a store that waits for something always.
		slices.Sort(took)
		if took[len(took)/2] > 200*time.Millisecond {
			t.Errorf("quiet ranges answered after %v", took)
		}
	})
}

// TestWatchProgressNotify: watchers that ask for it hear by themselves how far they are.
func TestWatchProgressNotify(t *testing.T) {
	shapes(t, 1, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		w := n.watch()
		w.create(&pb.WatchCreateRequest{Key: []byte("a"), ProgressNotify: true, WatchId: 7})
		w.create(&pb.WatchCreateRequest{Key: []byte("a"), ProgressNotify: true, StartRevision: 1000})
		w.create(&pb.WatchCreateRequest{Key: []byte("a")})
		w.want(`id=7 rev=1 created`, `id=0 rev=1 created`, `id=1 rev=1 created`, `id=7 rev=1`)
		rev := n.put("t", "1")
		for {
			if r := w.next(); r.WatchId != 7 || len(r.Events) != 0 || r.Header.Revision > rev {
				t.Fatalf("%s", show(r))
			} else if r.Header.Revision == rev {
				break
			}
		}
	})
}

// TestWatchFragments: a revision that is too large for one message is split only for those who
// ask, and catch-up puts no more into one message than a client can take.
func TestWatchFragments(t *testing.T) {
	shapes(t, 1, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		cl := n.client()
		value := strings.Repeat("v", 100<<10)
		first := int64(0)
		for i := range 4 {
			var ops []clientv3.Op
			for j := range 12 {
				ops = append(ops, clientv3.OpPut(fmt.Sprintf("k%02d", j), value))
			}
			r := mustDo[*clientv3.TxnResponse](t)(cl.Txn(within(t)).Then(ops...).Commit())
			if i == 0 {
				first = r.Header.Revision
			}
		}
		for range 2 {
			w := n.watch()
			w.create(&pb.WatchCreateRequest{Key: []byte("a"), RangeEnd: []byte("z"), StartRevision: first})
			w.next()
			for i := range 4 {
				r := w.next()
				if len(r.Events) != 12 || r.Fragment || r.Events[0].Kv.ModRevision != first+int64(i) || r.Events[11].Kv.ModRevision != first+int64(i) {
					t.Fatalf("reply %d: %s", i, show(r))
				}
			}
			c.restart(n) // and the same out of the engine
			cl = n.client()
		}
		// Below the limit of the server nothing is split; a delete with large previous values is.
		w := n.watch()
		w.create(&pb.WatchCreateRequest{Key: []byte("a"), RangeEnd: []byte("z"), Fragment: true, PrevKv: true})
		w.next()
		var ops []clientv3.Op
		for j := range 12 {
			ops = append(ops, clientv3.OpPut(fmt.Sprintf("k%02d", j), value))
		}
		mustDo[*clientv3.TxnResponse](t)(cl.Txn(within(t)).Then(ops...).Commit())
		var keys []string
		for parts := 1; ; parts++ {
			r := w.next()
			for _, e := range r.Events {
				keys = append(keys, string(e.Kv.Key))
			}
			if !r.Fragment {
				if parts < 2 {
					t.Errorf("2.4 MB came in one part")
				}
				break
			}
		}
		if len(keys) != 12 || !slices.IsSorted(keys) {
			t.Errorf("the parts hold %q", keys)
		}
	})
}

// TestWatchHistory: watchers from anywhere in the past, while others write, see every event of
// their range once and in order, through restarts of the node.
func TestWatchHistory(t *testing.T) {
	shapes(t, 1, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		cl := n.client()
		rnd := rand.New(rand.NewPCG(3, 3))
		const total = 3000
		model := map[int64]string{} // by revision
		write := func(from, to int) {
			for range to - from {
				key := fmt.Sprintf("%c%d", "acfjmqx"[rnd.IntN(7)], rnd.IntN(20))
				rev := n.put(key, fmt.Sprint(rnd.IntN(1000)))
				model[rev] = key
			}
		}
		type reader struct {
			name, from, end string
			start           int64
			ch              clientv3.WatchChan
			got             []string
		}
		var readers []*reader
		open := func(start int64) {
			for _, r := range [][2]string{{"a", "\x00"}, {"a", "g"}, {"f", "z"}, {"j", "k"}} {
				readers = append(readers, &reader{fmt.Sprintf("[%s,%q) from %d", r[0], r[1], start), r[0], r[1], start,
					cl.Watch(within(t), r[0], clientv3.WithRange(r[1]), clientv3.WithRev(start)), nil})
			}
		}
		write(0, 1200)
		open(2)
		open(1000)
		write(1200, 2000)
		c.restart(n)
		open(2)
		open(700)
		write(2000, total)
		last := int64(total + 1)
		for _, r := range readers {
			var want []string
			for _, rev := range slices.Sorted(maps.Keys(model)) {
				if k := model[rev]; rev >= r.start && k >= r.from && (r.end == "\x00" || k < r.end) {
					want = append(want, fmt.Sprintf("%d %s", rev, k))
				}
			}
			for len(r.got) < len(want) {
				resp, ok := <-r.ch
				if !ok || resp.Err() != nil {
					t.Fatalf("%s: %v after %d events of %d", r.name, resp.Err(), len(r.got), len(want))
				}
				revs := map[int64]bool{}
				for _, e := range resp.Events {
					revs[e.Kv.ModRevision] = true
					r.got = append(r.got, fmt.Sprintf("%d %s", e.Kv.ModRevision, e.Kv.Key))
				}
				if len(revs) > 1000 || resp.Header.Revision > last {
					t.Fatalf("%s: a response with %d revisions at %d", r.name, len(revs), resp.Header.Revision)
				}
			}
			if !slices.Equal(r.got, want) {
				t.Fatalf("%s: %d events, want %d: %.300q\n%.300q", r.name, len(r.got), len(want), r.got, want)
			}
		}
	})
}

// TestWatchersOfOneStream: 800 watchers with previous values on one stream whose client is slow,
// while compactions go on: every one gets all of its range, or is canceled by a compaction.
func TestWatchersOfOneStream(t *testing.T) {
	if testing.Short() {
		t.Skip("writes 6,000 values")
	}
	for _, slow := range []bool{false, true} {
		t.Run(fmt.Sprintf("slow=%v", slow), func(t *testing.T) { watchersOfOneStream(t, slow) })
	}
}

func watchersOfOneStream(t *testing.T, slow bool) {
	c := newCluster(t, 1, splitAt("/registry/pods/2", "/registry/pods/5"))
	c.start(c.nodes...)
	n := c.nodes[0]
	cl := n.client()
	const watchers, writes = 800, 6000
	w := n.watch()
	for i := range watchers {
		key := fmt.Appendf(nil, "/registry/pods/%03d/", i)
		w.create(&pb.WatchCreateRequest{Key: key, RangeEnd: append(bytes.Clone(key[:len(key)-1]), '0'), PrevKv: true, StartRevision: 1})
	}
	done := make(chan error, 1)
	perWatcher := make([][]int64, watchers)
	go func() {
		rnd := rand.New(rand.NewPCG(1, 1))
		value := strings.Repeat("v", 1<<10)
		slots := make(chan struct{}, 32)
		revs := make(chan [2]int64, writes)
		for i := range writes {
			slots <- struct{}{}
			p := rnd.IntN(watchers)
			del := i%5 == 4
			go func() {
				defer func() { <-slots }()
				key := fmt.Sprintf("/registry/pods/%03d/x", p)
				rev := int64(0)
				if del {
					if r, err := cl.Delete(context.Background(), key); err == nil && r.Deleted > 0 {
						rev = r.Header.Revision
					}
				} else if r, err := cl.Put(context.Background(), key, value); err == nil {
					rev = r.Header.Revision
				}
				revs <- [2]int64{int64(p), rev}
			}()
			if i%1500 == 1499 {
				if r, err := cl.Get(context.Background(), "x"); err == nil {
					_, err = cl.Compact(context.Background(), r.Header.Revision-1000)
					if err != nil {
						done <- err
						return
					}
				}
			}
		}
		for range writes {
			if r := <-revs; r[1] != 0 {
				perWatcher[r[0]] = append(perWatcher[r[0]], r[1])
			}
		}
		done <- nil
	}()
	got := make([][]int64, watchers)
	canceled := make([]bool, watchers)
	total := 0
	take := func(r *pb.WatchResponse) {
		switch {
		case r.Canceled && r.CompactRevision != 0:
			canceled[r.WatchId] = true
		case r.Canceled:
			t.Errorf("%s", show(r))
		}
		for _, e := range r.Events {
			key := string(e.Kv.Key)
			total++
			if !strings.HasPrefix(key, fmt.Sprintf("/registry/pods/%03d/", r.WatchId)) {
				t.Fatalf("watcher %d got %s", r.WatchId, key)
			}
			got[r.WatchId] = append(got[r.WatchId], e.Kv.ModRevision)
			if e.Type == mvccpb.Event_DELETE && e.PrevKv != nil && e.PrevKv.ModRevision >= e.Kv.ModRevision {
				t.Errorf("%s", show(r))
			}
		}
	}
	for range watchers {
		take(w.next())
	}
	if slow { // it does not read until the writers are through
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	responses, ended := make(chan *pb.WatchResponse), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			r, err := w.Recv()
			if err != nil {
				return // the test is over, or notices that nothing comes
			}
			select {
			case responses <- r:
			case <-w.Context().Done():
				return
			}
		}
	}()
	defer func() {
		w.cancel()
		<-ended
	}()
	receive := func() {
		select {
		case r := <-responses:
			take(r)
		case <-ended:
			t.Fatalf("the stream ended after %d events", total)
		}
	}
	for through := slow; !through; {
		select {
		case r := <-responses:
			take(r)
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			through = true
		case <-ended:
			t.Fatalf("the stream ended after %d events", total)
		}
	}
	want := 0
	for i := range perWatcher {
		slices.Sort(perWatcher[i])
		want += len(perWatcher[i])
	}
	complete := func() bool {
		for i := range perWatcher {
			if !canceled[i] && len(got[i]) < len(perWatcher[i]) {
				return false
			}
		}
		return true
	}
	for !complete() {
		receive()
	}
	gone := 0
	for i := range perWatcher {
		if canceled[i] {
			gone++
			if len(got[i]) > 0 && !slices.Equal(got[i], perWatcher[i][:len(got[i])]) {
				t.Errorf("watcher %d was canceled after a gap: %v of %v", i, got[i], perWatcher[i])
			}
		} else if !slices.Equal(got[i], perWatcher[i]) {
			t.Errorf("watcher %d got %v, want %v", i, got[i], perWatcher[i])
		}
	}
	t.Logf("%d of %d events, %d watchers canceled by compaction", total, want, gone)
	if !slow && gone > watchers/2 {
		t.Errorf("%d watchers of a client that reads were canceled", gone)
	}
	c.stop(c.nodes...)
}

// TestWatchThreeNodes: every node serves watches of everything, and a stream whose node stops is
// told so and goes on elsewhere without a gap.
func TestWatchThreeNodes(t *testing.T) {
	t.Parallel() // it mostly waits
	c := newCluster(t, 3, splitAt("b", "d", "h", "k", "p", "t"))
	c.start(c.nodes...)
	cl := mustDo[*clientv3.Client](t)(clientv3.New(clientv3.Config{Logger: zap.NewNop(), DialTimeout: patience, Endpoints: []string{
		c.nodes[0].cfg.AdvertiseClientURLs[0].Host, c.nodes[1].cfg.AdvertiseClientURLs[0].Host, c.nodes[2].cfg.AdvertiseClientURLs[0].Host}}))
	t.Cleanup(func() { cl.Close() })
	var chans []clientv3.WatchChan
	for _, n := range c.nodes {
		chans = append(chans, n.client().Watch(within(t), "a", clientv3.WithFromKey(), clientv3.WithRev(2)))
	}
	watchFrom := func(rev int64) clientv3.WatchChan {
		return cl.Watch(clientv3.WithRequireLeader(t.Context()), "a", clientv3.WithFromKey(), clientv3.WithRev(rev))
	}
	moving := watchFrom(2)
	next := int64(2)
	write := func(n *testNode, count int) {
		for range count {
			if got := n.put(fmt.Sprintf("%c", "acfjmqx"[next%7]), "v"); got != next {
				t.Fatalf("put at %d, want %d", got, next)
			}
			next++
		}
	}
	expect := func(ch clientv3.WatchChan, from, to int64) {
		t.Helper()
		for from < to {
			r, ok := <-ch
			if ch == moving && errors.Is(r.Err(), rpctypes.ErrNoLeader) {
				// A region had no leader for long, on a slow machine: told so, one begins again.
				moving = watchFrom(from)
				ch = moving
				continue
			}
			if !ok || r.Err() != nil {
				t.Fatalf("watch ended at %d: %v", from, r.Err())
			}
			for _, e := range r.Events {
				if e.Kv.ModRevision != from {
					t.Fatalf("event %d, want %d", e.Kv.ModRevision, from)
				}
				from++
			}
		}
	}
	write(c.nodes[0], 70)
	write(c.nodes[1], 70)
	for _, ch := range chans {
		expect(ch, 2, next)
	}
	expect(moving, 2, next)
	for i := range c.nodes {
		began := next
		c.stop(c.nodes[i])
		write(c.nodes[(i+1)%3], 30)
		c.start(c.nodes[i])
		write(c.nodes[i], 30)
		expect(moving, began, next)
	}
	// A node that lost the others tells those who require a leader.
	w := c.nodes[0].watch(rpctypes.MetadataRequireLeaderKey, rpctypes.MetadataHasLeader)
	w.create(&pb.WatchCreateRequest{Key: []byte("a")})
	w.next()
	c.stop(c.nodes[1], c.nodes[2])
	if _, err := w.Recv(); errors.Is(err, io.EOF) || status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "no leader") {
		t.Fatalf("without a quorum: %v", err)
	}
	c.stop(c.nodes...)
}

// TestWatchAfterAnswer: a watch that begins now does not bring what its client was told of before, by the
// same node, wherever the region is led.
func TestWatchAfterAnswer(t *testing.T) {
	t.Parallel() // it mostly waits
	c := newCluster(t, 3, splitAt("b", "d", "h", "k", "p", "t"))
	c.start(c.nodes...)
	keys := []string{"a", "c", "f", "j", "m", "q", "x"}
	for _, n := range c.nodes {
		w := n.watch()
		for i := range 100 {
			key := keys[i%len(keys)]
			rev := n.put(key, "before")
			w.create(&pb.WatchCreateRequest{Key: []byte(key), WatchId: int64(i + 1)})
			if r := w.next(); !r.Created || r.Header.Revision < rev {
				t.Fatalf("%s, after a put at %d: %s", n.cfg.Name, rev, show(r))
			}
			if err := w.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: int64(i + 1)}}}); err != nil {
				t.Fatal(err)
			}
			if r := w.next(); !r.Canceled {
				t.Fatalf("%s, a watch that began after a put at %d: %s", n.cfg.Name, rev, show(r))
			}
		}
	}
	c.stop(c.nodes...)
}
