package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"braid/cmd/tests/etcdbin"
)

// TestBraid is the short form of the command. BRAID_BIN names a binary; without it braid is built
// from the repository, and the test is skipped while there is no cmd/braid.
func TestBraid(t *testing.T) {
	if os.Getenv("BRAID_BIN") == "" {
		if _, err := os.Stat(filepath.Join("..", "..", "braid")); err != nil {
			t.Skip("no cmd/braid here and BRAID_BIN is not set")
		}
	}
	o := options{seed: 1, n: 6000, duration: time.Minute, regions: true, audit: 250, restart: 2000,
		shrinkTime: 30 * time.Second, perSession: 6000, stopAfterDiff: 1, out: t.TempDir()}
	found, err := run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if found > 0 {
		t.Fatal("braid differs from etcd, see above")
	}
}

// TestEtcdAgainstItself shows that nothing but the stores makes a difference: three etcds.
func TestEtcdAgainstItself(t *testing.T) {
	setup := etcdSetup(t)
	setup.Splits = splitKeys
	setup.RestartEvery = 700
	stats, _, diff, err := oneSession(t.Context(), setup, 7, 1500)
	if err != nil {
		t.Fatal(err)
	}
	if diff != nil {
		t.Fatal(diff)
	}
	if stats.Spread < 20 || stats.Errors < 100 {
		t.Fatalf("the requests are not what they should be: %+v", stats)
	}
}

func etcdSetup(t *testing.T) Setup {
	t.Helper()
	etcd, err := etcdbin.Etcd()
	if err != nil {
		t.Fatal(err)
	}
	return Setup{Etcd: etcd, Braid: etcd, AuditEvery: 100}
}

// bug is a planted fault: it may change requests on their way in and answers on their way out.
type bug struct {
	name   string
	tamper func(t *Target, r Request, call func(Request) Answer) Answer
}

// onAnswer is a bug that changes answers of one type; change returns false to leave one alone.
func onAnswer[M proto.Message](name string, change func(r Request, m M) bool) bug {
	return bug{name, func(_ *Target, r Request, call func(Request) Answer) Answer {
		a := call(r)
		if m, ok := a.Msg.(M); ok && a.OK() {
			change(r, m)
		}
		return a
	}}
}

func onRange(name string, change func(req *pb.RangeRequest, m *pb.RangeResponse)) bug {
	return onAnswer(name, func(r Request, m *pb.RangeResponse) bool {
		change(r.Msg.(*pb.RangeRequest), m)
		return true
	})
}

// bugs are mistakes an implementation could make, among them each kind of thing that is compared.
func bugs() []bug {
	s := newSplits(splitKeys)
	applied := 0
	return []bug{
		onAnswer("write header one behind", func(_ Request, m *pb.PutResponse) bool { m.Header.Revision--; return true }),
		onRange("old read's header is the old revision", func(req *pb.RangeRequest, m *pb.RangeResponse) {
			if req.Revision > 0 {
				m.Header.Revision = req.Revision
			}
		}),
		onRange("no cluster id", func(_ *pb.RangeRequest, m *pb.RangeResponse) { m.Header.ClusterId = 0 }),
		onRange("count bound by limit", func(req *pb.RangeRequest, m *pb.RangeResponse) {
			if req.Limit > 0 && m.Count > req.Limit {
				m.Count = req.Limit
			}
		}),
		onRange("count after filters", func(req *pb.RangeRequest, m *pb.RangeResponse) {
			if req.MaxModRevision > 0 && req.Limit == 0 && !req.CountOnly {
				m.Count = int64(len(m.Kvs))
			}
		}),
		onRange("more never set", func(_ *pb.RangeRequest, m *pb.RangeResponse) { m.More = false }),
		onRange("keys_only keeps values", func(req *pb.RangeRequest, m *pb.RangeResponse) {
			if req.KeysOnly {
				for _, kv := range m.Kvs {
					kv.Value = []byte("v")
				}
			}
		}),
		onRange("sort order ignored", func(req *pb.RangeRequest, m *pb.RangeResponse) {
			if req.SortOrder == pb.RangeRequest_DESCEND && req.SortTarget == pb.RangeRequest_KEY {
				slices.Reverse(m.Kvs)
			}
		}),
		onRange("last key of a range lost", func(req *pb.RangeRequest, m *pb.RangeResponse) {
			if len(m.Kvs) > 8 {
				m.Kvs = m.Kvs[:len(m.Kvs)-1]
			}
		}),
		onAnswer("prev_kv lost", func(_ Request, m *pb.PutResponse) bool { m.PrevKv = nil; return true }),
		onAnswer("deleted counts one", func(_ Request, m *pb.DeleteRangeResponse) bool {
			m.Deleted = min(m.Deleted, 1)
			return true
		}),
		onAnswer("header inside a txn", func(_ Request, m *pb.TxnResponse) bool {
			for _, op := range m.Responses {
				if p := op.GetResponsePut(); p != nil {
					p.Header = nil
				}
			}
			return true
		}),
		onAnswer("hash off", func(r Request, m *pb.HashKVResponse) bool { m.Hash ^= 1; return true }),
		onAnswer("status names no leader", func(_ Request, m *pb.StatusResponse) bool { m.Leader = 0; return true }),
		onAnswer("members nameless", func(_ Request, m *pb.MemberListResponse) bool { m.Members[0].Name = ""; return true }),
		onAnswer("the first key of a lease lost", func(_ Request, m *pb.LeaseTimeToLiveResponse) bool {
			m.Keys = m.Keys[min(1, len(m.Keys)):]
			return true
		}),
		onAnswer("a lease lists as another", func(_ Request, m *pb.LeaseLeasesResponse) bool {
			if len(m.Leases) > 0 {
				m.Leases[0].ID++
			}
			return true
		}),
		onAnswer("a renewal of half the time", func(_ Request, m *pb.LeaseKeepAliveResponse) bool { m.TTL /= 2; return true }),
		onRange("keys of no lease", func(_ *pb.RangeRequest, m *pb.RangeResponse) {
			for _, kv := range m.Kvs {
				kv.Lease = 0
			}
		}),
		{"an end acknowledged, not done", func(_ *Target, r Request, call func(Request) Answer) Answer {
			m, ok := r.Msg.(*pb.LeaseRevokeRequest)
			if !ok {
				return call(r)
			}
			a := call(Request{"LeaseTimeToLive", &pb.LeaseTimeToLiveRequest{ID: m.ID}})
			if ttl, ok := a.Msg.(*pb.LeaseTimeToLiveResponse); ok && ttl.TTL > 0 {
				return Answer{Msg: &pb.LeaseRevokeResponse{Header: ttl.Header}}
			}
			return call(r)
		}},
		{"error code", func(_ *Target, r Request, call func(Request) Answer) Answer {
			a := call(r)
			if a.Code == codes.OutOfRange {
				a.Code = codes.InvalidArgument
			}
			return a
		}},
		{"error text", func(_ *Target, r Request, call func(Request) Answer) Answer {
			a := call(r)
			a.Text = strings.TrimPrefix(a.Text, "etcdserver: ")
			return a
		}},
		{"future compaction accepted", func(_ *Target, r Request, call func(Request) Answer) Answer {
			a := call(r)
			if _, ok := r.Msg.(*pb.CompactionRequest); ok && strings.Contains(a.Text, "future") {
				return Answer{Msg: &pb.CompactionResponse{Header: &pb.ResponseHeader{ClusterId: 1, MemberId: 1, RaftTerm: 1}}}
			}
			return a
		}},
		{"stream header on an early chunk", func(_ *Target, r Request, call func(Request) Answer) Answer {
			a := call(r)
			if r.Method == "RangeStream" && a.OK() && len(a.Msg.(*pb.RangeResponse).Kvs) > 10 {
				a.Shape = "chunk 0, not the last, has header, more or count"
			}
			return a
		}},
		{"one put in fifty acknowledged, not done", func(_ *Target, r Request, call func(Request) Answer) Answer {
			m, ok := r.Msg.(*pb.PutRequest)
			if !ok || m.IgnoreValue || m.IgnoreLease || m.PrevKv || m.Lease != 0 || len(m.Key) == 0 || len(m.Value) > 1000 {
				return call(r)
			}
			if applied++; applied%50 != 0 {
				return call(r)
			}
			a := call(Request{"Range", &pb.RangeRequest{Key: m.Key}})
			header := a.Msg.(*pb.RangeResponse).Header
			header.Revision++
			return Answer{Msg: &pb.PutResponse{Header: header}}
		}},
		{"write over regions refused", func(_ *Target, r Request, call func(Request) Answer) Answer {
			if s.writeSpread(r) == manyRegions {
				return Answer{Code: codes.Unimplemented, Text: "not yet"}
			}
			return call(r)
		}},
		{"write over regions done twice", func(_ *Target, r Request, call func(Request) Answer) Answer {
			a := call(r)
			if s.writeSpread(r) == manyRegions && a.OK() {
				return call(r)
			}
			return a
		}},
		{"write in one region refused", func(_ *Target, r Request, call func(Request) Answer) Answer {
			if _, ok := r.Msg.(*pb.TxnRequest); ok {
				return Answer{Code: codes.Unimplemented, Text: "not yet"}
			}
			return call(r)
		}},
	}
}

// TestPlantedBugs plants each bug in front of an etcd that stands in for braid: each must be found,
// and found within the requests of a short run.
func TestPlantedBugs(t *testing.T) {
	setup := etcdSetup(t)
	setup.Splits = splitKeys
	for _, b := range bugs() {
		t.Run(strings.ReplaceAll(b.name, " ", "_"), func(t *testing.T) {
			setup := setup
			setup.Tamper = b.tamper
			stats, _, diff, err := oneSession(t.Context(), setup, 11, 3000)
			if err != nil {
				t.Fatal(err)
			}
			if diff == nil {
				t.Fatalf("not found in %d requests", stats.Requests)
			}
			t.Logf("found at request %d: %s", stats.Requests, diff)
		})
	}
}

// TestShrink: a bug that needs two requests to show is brought down to about these.
func TestShrink(t *testing.T) {
	setup := etcdSetup(t)
	setup.Tamper = bugs()[0].tamper // the header of a put
	stats, sequence, diff, err := oneSession(t.Context(), setup, 3, 500)
	if err != nil || diff == nil {
		t.Fatalf("nothing to shrink: %v after %+v", err, stats)
	}
	small, smallDiff, err := shrink(t.Context(), setup, sequence, diff, 40*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if len(small) != 1 || small[0].Method != "Put" || smallDiff == nil {
		t.Fatalf("shrunk %d requests to %d: %v", len(sequence), len(small), small)
	}
}

// TestReplayFile: what is written for a replay is read back as the same requests.
func TestReplayFile(t *testing.T) {
	gen := newGenerator(5)
	var want []Request
	var file strings.Builder
	for range 500 {
		r := gen.next()
		want = append(want, r)
		fmt.Fprintln(&file, r.Text())
	}
	got, err := parseRequests(strings.NewReader(file.String()))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want) {
		t.Fatalf("%d requests became %d", len(want), len(got))
	}
	for i := range want {
		if got[i].Method != want[i].Method || !proto.Equal(got[i].Msg, want[i].Msg) {
			t.Fatalf("request %d\n%s\nbecame\n%s", i, want[i].Text(), got[i].Text())
		}
	}
}

func TestWriteSpread(t *testing.T) {
	s := newSplits([]string{"b", "d"})
	put := func(key string) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(key)}}}
	}
	for _, c := range []struct {
		msg  proto.Message
		want spread
	}{
		{&pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte("b")}, oneRegion},
		{&pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte("b\x00")}, manyRegions},
		{&pb.DeleteRangeRequest{Key: []byte("d"), RangeEnd: []byte{0}}, oneRegion},
		{&pb.DeleteRangeRequest{Key: []byte("c"), RangeEnd: []byte{0}}, manyRegions},
		{&pb.DeleteRangeRequest{Key: []byte("e"), RangeEnd: []byte("a")}, oneRegion},
		{&pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z")}, oneRegion},
		{&pb.TxnRequest{Success: []*pb.RequestOp{put("a"), put("a1")}}, oneRegion},
		{&pb.TxnRequest{Success: []*pb.RequestOp{put("a")}, Failure: []*pb.RequestOp{put("b")}}, manyRegions},
		{&pb.TxnRequest{Compare: []*pb.Compare{{Key: []byte("z")}}, Success: []*pb.RequestOp{put("a")}}, manyRegions},
		{&pb.TxnRequest{Compare: []*pb.Compare{{Key: []byte("z"), RangeEnd: []byte("y")}}, Success: []*pb.RequestOp{put("a")}}, arguable},
	} {
		if got := s.writeSpread(Request{Msg: c.msg}); got != c.want {
			t.Errorf("%s: %d, want %d", text(c.msg), got, c.want)
		}
	}
}

// TestMain keeps a failing start from hanging a build for ever.
func TestMain(m *testing.M) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
	context.AfterFunc(ctx, func() {
		if ctx.Err() == context.DeadlineExceeded {
			panic("differential tests hang")
		}
	})
	code := m.Run()
	cancel()
	os.Exit(code)
}
