package cases

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// TestRangeStream is https://github.com/etcd-io/etcd/issues/12342: case 11. A stream is the range, cut
// into chunks, and its memory is that of the chunks.
func TestRangeStream(t *testing.T) {
	perLayout(t, func(t *testing.T, l layout) {
		s := start(t, 1, l)
		keys := scaled(1_000, 10_000)
		value := make([]byte, 100<<10)
		rng := rand.New(rand.NewPCG(11, 11))
		for i := range value {
			value[i] = byte(rng.Uint32())
		}
		s.fill(keys, func(i int) (string, string) {
			return fmt.Sprintf("%s/%05d", threeKeys[i%3], i), fmt.Sprint(i) + string(value)
		})
		all := &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z")}

		w := s.write(4, "v")
		// What reading leaves in the state engine's cache, which is bounded, is not the streams'.
		if _, _, err := s.stream(all, func(*mvccpb.KeyValue) error { return nil }); err != nil {
			t.Fatal(err)
		}
		before := s.rss(0)
		stop, highest := make(chan struct{}), make(chan int64, 1)
		go func() {
			top := int64(0)
			for waitOr(stop, 50*time.Millisecond) {
				if b, err := s.Nodes[0].RSS(); err == nil {
					top = max(top, b>>20)
				}
			}
			highest <- top
		}()
		began := time.Now()
		err := each(5, func(int) error {
			n := 0
			header, count, err := s.stream(all, func(*mvccpb.KeyValue) error { n++; return nil })
			if err != nil {
				return err
			}
			if n < keys || int64(n) != count || header == nil {
				return fmt.Errorf("%d keys were streamed, count %d, header %v", n, count, header)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		took := time.Since(began)
		close(stop)
		top := <-highest
		t.Logf("5 streams of %d MiB in %v; memory %d MiB before, at most %d", keys*100/1024, took, before, top)
		// Five whole answers are 500 MiB in small size; how much garbage there is at a time varies.
		if top-before > int64(scaled(300, 200)) {
			t.Errorf("memory grew by %d MiB", top-before)
		}

		// Merged chunks are one Range at the revision of the last chunk's header.
		few := &pb.RangeRequest{Key: []byte("b/"), RangeEnd: fmt.Appendf(nil, "t/%05d", min(keys, 150))}
		for _, r := range []*pb.RangeRequest{
			few,
			{Key: few.Key, RangeEnd: few.RangeEnd, Limit: 37},
			{Key: []byte("k"), RangeEnd: []byte("\x00"), Limit: 1},
			{Key: few.Key, RangeEnd: few.RangeEnd, KeysOnly: true},
			{Key: few.Key, RangeEnd: few.RangeEnd, CountOnly: true},
			{Key: []byte("x"), RangeEnd: []byte("z")},
			{Key: []byte("b/00000")},
		} {
			if *full && r == few {
				r.Limit = 300
			}
			merged, err := s.merged(r)
			if err != nil {
				t.Fatalf("%v: %v", r, err)
			}
			unary := proto.CloneOf(r)
			unary.Revision = merged.Header.Revision
			whole := s.get(0, unary)
			whole.Header, merged.Header = nil, nil
			if !proto.Equal(merged, whole) {
				t.Errorf("%v: %d keys, count %d, more %v streamed; %d, %d, %v at once", r, len(merged.Kvs), merged.Count, merged.More, len(whole.Kvs), whole.Count, whole.More)
			}
		}
		w.end()
		w.check(t)

		for text, r := range map[string]*pb.RangeRequest{
			"RangeStream does not support custom sort orders": {Key: all.Key, RangeEnd: all.RangeEnd, SortTarget: pb.RangeRequest_VALUE, SortOrder: pb.RangeRequest_ASCEND},
			"RangeStream does not support revision filters":   {Key: all.Key, RangeEnd: all.RangeEnd, MinModRevision: 3},
		} {
			if _, err := s.merged(r); !refused(err, codes.Unimplemented, text) {
				t.Errorf("%v: %v", r, err)
			}
		}

		// A compaction past the stream's revision, while the client is slow to read: it may be told
		// so, or get what was at that revision; never anything else.
		rev := s.revision()
		got, compactedAt := 0, int64(0)
		var last []byte
		header, count, err := s.stream(all, func(kv *mvccpb.KeyValue) error {
			if got++; got == 30 {
				for _, k := range threeKeys { // nothing of the old state may be missing, nothing new be there
					s.txn(opDelete(k+"/00", k+"/01"), opPut(k+"/new", "x"))
				}
				compactedAt = s.revision()
				if _, err := s.kv(0).Compact(within(t, time.Minute), &pb.CompactionRequest{Revision: compactedAt, Physical: true}); err != nil {
					return err
				}
			}
			if kv.ModRevision > rev || bytes.Compare(kv.Key, last) <= 0 {
				return fmt.Errorf("%s of revision %d in a stream at %d", kv.Key, kv.ModRevision, rev)
			}
			last = append(last[:0], kv.Key...)
			return nil
		})
		switch {
		case refused(err, codes.OutOfRange, textCompacted):
			t.Logf("compacted after %d keys", got)
		case err != nil:
			t.Errorf("compaction at %d: after %d keys: %v", compactedAt, got, err)
		case header.Revision != rev || int64(got) != count:
			t.Errorf("compaction at %d: %d keys, count %d at %d, want %d", compactedAt, got, count, header.Revision, rev)
		default:
			t.Logf("all %d keys in spite of the compaction", got)
		}
	})
}

// stream hands out the keys of a RangeStream as they come, and returns what the last chunk says.
func (s *store) stream(r *pb.RangeRequest, fn func(*mvccpb.KeyValue) error) (*pb.ResponseHeader, int64, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), 5*time.Minute)
	defer cancel()
	st, err := s.kv(0).RangeStream(ctx, r, unlimited)
	if err != nil {
		return nil, 0, err
	}
	var header *pb.ResponseHeader
	var count int64
	for {
		chunk, err := st.Recv()
		if errors.Is(err, io.EOF) {
			return header, count, nil
		}
		if err != nil {
			return nil, 0, err
		}
		if header != nil {
			return nil, 0, errors.New("a chunk came after the one with the header")
		}
		header, count = chunk.RangeResponse.Header, chunk.RangeResponse.Count
		for _, kv := range chunk.RangeResponse.Kvs {
			if err := fn(kv); err != nil {
				return nil, 0, err
			}
		}
	}
}

// merged puts the chunks together as clients do.
func (s *store) merged(r *pb.RangeRequest) (*pb.RangeResponse, error) {
	st, err := s.kv(0).RangeStream(within(s.t, time.Minute), r, unlimited)
	if err != nil {
		return nil, err
	}
	all := &pb.RangeResponse{}
	for {
		chunk, err := st.Recv()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		proto.Merge(all, chunk.RangeResponse)
	}
}
