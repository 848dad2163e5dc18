package gateway_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"braid/gateway"
	"braid/leasesvc"
	"braid/mvcc"
)

func newClient(t *testing.T, f *fixture) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{f.addr}, DialTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// TestClient drives the gateway with etcd's own client, over three regions.
func TestClient(t *testing.T) {
	f := start(t, nil, "k3", "k6")
	c := newClient(t, f)
	ctx := t.Context()
	for i := range 9 {
		resp, err := c.Put(ctx, fmt.Sprintf("k%d", i), fmt.Sprint(9-i))
		if err != nil || resp.Header.Revision != int64(i+2) {
			t.Fatalf("put %d: %v, %v", i, resp, err)
		}
	}
	got, err := c.Get(ctx, "k", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByValue, clientv3.SortAscend), clientv3.WithLimit(2))
	if err != nil || len(got.Kvs) != 2 || string(got.Kvs[0].Key) != "k8" || !got.More || got.Count != 9 || got.Header.ClusterId != 0xc1 {
		t.Errorf("sorted get: %v, %v", got, err)
	}
	if got, err := c.Get(ctx, "k2", clientv3.WithFromKey(), clientv3.WithRev(5), clientv3.WithSerializable()); err != nil || len(got.Kvs) != 2 || got.Header.Revision != 10 {
		t.Errorf("old get from a key: %v, %v", got, err)
	}
	txn, err := c.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision("k1"), "=", 3)).
		Then(clientv3.OpPut("k1", "new"), clientv3.OpGet("k1")).Else(clientv3.OpGet("k1")).Commit()
	if err != nil || !txn.Succeeded || string(txn.Responses[1].GetResponseRange().Kvs[0].Value) != "new" || txn.Header.Revision != 11 {
		t.Errorf("transaction: %v, %v", txn, err)
	}
	if del, err := c.Delete(ctx, "k6", clientv3.WithFromKey(), clientv3.WithPrevKV()); err != nil || del.Deleted != 3 || len(del.PrevKvs) != 3 {
		t.Errorf("delete: %v, %v", del, err)
	}
	if _, err := c.Compact(ctx, 5, clientv3.WithCompactPhysical()); err != nil {
		t.Errorf("compact: %v", err)
	}
	if _, err := c.Get(ctx, "k1", clientv3.WithRev(4)); !errors.Is(err, rpctypes.ErrCompacted) {
		t.Errorf("compacted get: %v", err)
	}
	if del, err := c.Delete(ctx, "k", clientv3.WithPrefix()); err != nil || del.Deleted == 0 || del.Header.Revision != 13 {
		t.Errorf("delete over regions: %v, %v", del, err)
	}
	if _, err := c.Put(ctx, "k1", "", clientv3.WithLease(5)); !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		t.Errorf("put with an unknown lease: %v", err)
	}
	st, err := c.Status(ctx, f.addr)
	if err != nil || st.Version != "3.7.3" || st.Leader != st.Header.MemberId || st.Header.Revision != 13 || len(st.Errors) != 0 {
		t.Errorf("status: %v, %v", st, err)
	}
	members, err := c.MemberList(ctx)
	if err != nil || len(members.Members) != 1 || members.Header.Revision != 0 {
		t.Errorf("members: %v, %v", members, err)
	}
	h0, err := c.HashKV(ctx, f.addr, 0)
	if err != nil || h0.HashRevision != 13 || h0.CompactRevision != 5 || h0.Header.Revision != 13 {
		t.Errorf("hash: %v, %v", h0, err)
	}
	if h, err := c.HashKV(ctx, f.addr, 13); err != nil || h.Hash != h0.Hash {
		t.Errorf("hash at the same revision: %v, %v", h, err)
	}
	if _, err := c.HashKV(ctx, f.addr, 4); !errors.Is(err, rpctypes.ErrCompacted) {
		t.Errorf("hash of a compacted revision: %v", err)
	}
	if a, err := c.AlarmList(ctx); err != nil || len(a.Alarms) != 0 {
		t.Errorf("alarms: %v, %v", a, err)
	}
	f.cluster.leader.Store(0)
	if st, err := c.Status(ctx, f.addr); err != nil || fmt.Sprint(st.Errors) != "[etcdserver: no leader]" {
		t.Errorf("status without a leader: %v, %v", st, err)
	}
}

// TestClientWithPassword uses a store without users with a name and a password, as etcd's clients may.
func TestClientWithPassword(t *testing.T) {
	f := start(t, nil)
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{f.addr}, Username: "u", Password: "p"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Put(t.Context(), "k", "v"); err != nil {
		t.Error(err)
	}
	_, err = c.Authenticate(t.Context(), "u", "p")
	if !errors.Is(err, rpctypes.ErrAuthNotEnabled) {
		t.Errorf("authenticate: %v", err)
	}
	if st, err := c.AuthStatus(t.Context()); err != nil || st.Enabled || st.AuthRevision != 1 || st.Header.Revision != 2 || st.Header.MemberId == 0 {
		t.Errorf("status of authentication: %v, %v", st, err)
	}
}

// TestStreamEqualsRange merges the chunks of random streams and compares them with ranges.
func TestStreamEqualsRange(t *testing.T) {
	f := start(t, nil, "10", "40", "77")
	kv := pb.NewKVClient(f.conn)
	rng := rand.New(rand.NewPCG(5, 5))
	for range 300 {
		k := fmt.Appendf(nil, "%02d", rng.IntN(100))
		if _, err := kv.Put(t.Context(), &pb.PutRequest{Key: k, Value: bytes.Repeat(k, rng.IntN(50))}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 200 {
		req := &pb.RangeRequest{
			Key: fmt.Appendf(nil, "%02d", rng.IntN(100)), RangeEnd: fmt.Appendf(nil, "%02d", rng.IntN(100)),
			Limit: rng.Int64N(60) - 5, KeysOnly: rng.IntN(3) == 0, CountOnly: rng.IntN(5) == 0, Serializable: rng.IntN(3) == 0,
			Revision: []int64{0, 0, rng.Int64N(320)}[rng.IntN(3)],
		}
		if rng.IntN(3) == 0 {
			req.RangeEnd = []byte{0}
		}
		if rng.IntN(3) == 0 {
			req.SortTarget = pb.RangeRequest_SortTarget(rng.IntN(5)) // without an order
		}
		want, wantErr := kv.Range(t.Context(), req)
		stream, err := kv.RangeStream(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		got := &pb.RangeResponse{}
		for {
			var m *pb.RangeStreamResponse
			if m, err = stream.Recv(); err != nil {
				break
			}
			proto.Merge(got, m.RangeResponse)
		}
		if err == io.EOF {
			err = nil
		}
		if status.Convert(err).String() != status.Convert(wantErr).String() {
			t.Fatalf("case %d: %v: %v, range says %v", i, req, err, wantErr)
		}
		if err == nil && !proto.Equal(got, want) {
			t.Fatalf("case %d: %v\nstream %v\nrange %v", i, req, got, want)
		}
	}
}

// TestEdges sends what is refused before anything is executed.
func TestEdges(t *testing.T) {
	f := start(t, func(c *gateway.Config) { c.MaxRequestBytes = 10_000 })
	kv := pb.NewKVClient(f.conn)
	size := func(n int) error {
		_, err := kv.Put(t.Context(), &pb.PutRequest{Key: []byte("k"), Value: make([]byte, n)})
		return err
	}
	// 3 bytes of key, 3 of the value's head, 3 of the put's, 14 of the internal header.
	fits := 0
	for n := 9_950; size(n) == nil; n++ {
		fits = n
	}
	internal := func(n int) int {
		return proto.Size(&pb.InternalRaftRequest{Header: &pb.RequestHeader{ID: 0xb2<<48 | 1<<47},
			Put: &pb.PutRequest{Key: []byte("k"), Value: make([]byte, n)}})
	}
	if internal(fits) != 10_000 {
		t.Errorf("the largest value that fits makes a request of %d bytes", internal(fits))
	}
	ctx := func(pairs ...string) context.Context { return metadata.AppendToOutgoingContext(t.Context(), pairs...) }
	put := func(ctx context.Context) error {
		_, err := kv.Put(ctx, &pb.PutRequest{Key: []byte("k")})
		return err
	}
	leaderless := func(ctx context.Context) error {
		f.cluster.leader.Store(0)
		defer f.cluster.leader.Store(1)
		return put(ctx)
	}
	stream := func(r *pb.RangeRequest) error {
		s, err := kv.RangeStream(t.Context(), r)
		if err != nil {
			return err
		}
		_, err = s.Recv()
		return err
	}
	readTxn := &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: make([]byte, 20_000)}}}}}
	_, big := kv.Txn(t.Context(), readTxn)
	for name, c := range map[string]struct {
		err  error
		code codes.Code
		text string
	}{
		"too large":                  {size(fits + 1), codes.InvalidArgument, "etcdserver: request is too large"},
		"too large for gRPC":         {size(600_000), codes.ResourceExhausted, "grpc: received message larger than max"},
		"a read may be large":        {big, codes.OK, ""},
		"API version":                {put(ctx(rpctypes.MetadataClientAPIVersionKey, "3.5")), codes.OK, ""},
		"has leader":                 {put(ctx(rpctypes.MetadataRequireLeaderKey, rpctypes.MetadataHasLeader)), codes.OK, ""},
		"no leader":                  {leaderless(ctx(rpctypes.MetadataRequireLeaderKey, rpctypes.MetadataHasLeader)), codes.Unavailable, "etcdserver: no leader"},
		"no leader, but none wanted": {leaderless(ctx()), codes.OK, ""},
		"sorted stream":              {stream(&pb.RangeRequest{Key: []byte("k"), SortOrder: pb.RangeRequest_DESCEND}), codes.Unimplemented, "RangeStream does not support custom sort orders"},
		"filtered stream":            {stream(&pb.RangeRequest{Key: []byte("k"), MinModRevision: 1}), codes.Unimplemented, "RangeStream does not support revision filters"},
		"stream without a key":       {stream(&pb.RangeRequest{}), codes.InvalidArgument, "etcdserver: key is not provided"},
		"stream of the future":       {stream(&pb.RangeRequest{Key: []byte("k"), Revision: 1 << 40}), codes.OutOfRange, "etcdserver: mvcc: required revision is a future revision"},
		"lock":                       {f.conn.Invoke(t.Context(), "/v3lockpb.Lock/Lock", &pb.PutRequest{}, &pb.PutResponse{}), codes.Unimplemented, "braid: there is no method /v3lockpb.Lock/Lock"},
		"nothing":                    {f.conn.Invoke(t.Context(), "/no.Service/Method", &pb.PutRequest{}, &pb.PutResponse{}), codes.Unimplemented, "braid: there is no method /no.Service/Method"},
	} {
		if st := status.Convert(c.err); st.Code() != c.code || !strings.HasPrefix(st.Message(), c.text) {
			t.Errorf("%s: %v", name, c.err)
		}
	}
	watch, err := pb.NewWatchClient(f.conn).Watch(t.Context())
	if err == nil {
		_, err = watch.Recv()
	}
	if st := status.Convert(err); st.Code() != codes.Unimplemented || st.Message() != "braid: Watch is not available yet" {
		t.Errorf("watch: %v", err)
	}
	h, err := healthpb.NewHealthClient(f.conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
	if err != nil || h.Status != healthpb.HealthCheckResponse_SERVING {
		t.Errorf("gRPC health: %v, %v", h, err)
	}
}

// TestOverload holds requests inside and counts the one too many.
func TestOverload(t *testing.T) {
	f := start(t, func(c *gateway.Config) { c.MaxInFlight = 3 })
	inside, release := make(chan struct{}), make(chan struct{})
	f.store.Fail = func(op string) error {
		if op == "write" {
			inside <- struct{}{}
			<-release
		}
		return nil
	}
	kv := pb.NewKVClient(f.conn)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if _, err := kv.Put(t.Context(), &pb.PutRequest{Key: []byte("k")}); err != nil {
				t.Error(err)
			}
		})
		<-inside
	}
	if _, err := kv.Put(t.Context(), &pb.PutRequest{Key: []byte("k")}); status.Convert(err).Message() != "etcdserver: too many requests" {
		t.Errorf("one too many: %v", err)
	}
	close(release)
	wg.Wait()
	f.store.Fail = nil
	if _, err := kv.Put(t.Context(), &pb.PutRequest{Key: []byte("k")}); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// sleepyLeases never answers a renewal.
type sleepyLeases struct{ gateway.Leases }

func (sleepyLeases) Renew(ctx context.Context, _ int64) (int64, error) {
	<-ctx.Done()
	return 0, ctx.Err()
}

// TestStreamsRequireLeader: running streams whose clients require a leader end when there has been none
// for three election timeouts; others go on.
func TestStreamsRequireLeader(t *testing.T) {
	const election = 20 * time.Millisecond
	f := start(t, func(c *gateway.Config) {
		c.Leases, c.ElectionTimeout = sleepyLeases{}, election
	})
	open := func(ctx context.Context, busy bool) pb.Lease_LeaseKeepAliveClient {
		t.Helper()
		s, err := pb.NewLeaseClient(f.conn).LeaseKeepAlive(ctx)
		if err == nil && busy {
			err = s.Send(&pb.LeaseKeepAliveRequest{ID: 1})
		}
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	requires := metadata.AppendToOutgoingContext(t.Context(), rpctypes.MetadataRequireLeaderKey, rpctypes.MetadataHasLeader)
	other, cancel := context.WithCancel(t.Context())
	defer cancel()
	idle, busy, patient := open(requires, false), open(requires, true), open(other, true)
	// The streams run once the server has seen them; a request on the same connection comes after.
	if _, err := pb.NewKVClient(f.conn).Range(requires, &pb.RangeRequest{Key: []byte("k")}); err != nil {
		t.Fatal(err)
	}
	f.cluster.leader.Store(0)
	for name, s := range map[string]pb.Lease_LeaseKeepAliveClient{"idle": idle, "busy": busy} {
		if _, err := s.Recv(); status.Code(err) != codes.Unavailable || status.Convert(err).Message() != "etcdserver: no leader" {
			t.Errorf("%s: %v", name, err)
		}
	}
	cancel()
	if _, err := patient.Recv(); status.Code(err) != codes.Canceled {
		t.Errorf("a stream that requires no leader: %v", err)
	}
}

// cutOffLeases know of no leader.
type cutOffLeases struct{ gateway.Leases }

func (cutOffLeases) TimeToLive(ctx context.Context, _ int64, _ bool) (leasesvc.Info, mvcc.Revision, error) {
	<-ctx.Done()
	return leasesvc.Info{}, 0, ctx.Err()
}

func (cutOffLeases) Renew(ctx context.Context, _ int64) (int64, error) {
	<-ctx.Done()
	return 0, ctx.Err()
}

// TestLeaseTimeouts: requests on leases that wait for a leader end by etcd's error, which says that
// they may be tried again, and by the client's own when that gave up.
func TestLeaseTimeouts(t *testing.T) {
	cutOff := func(timeout time.Duration) pb.LeaseClient {
		return pb.NewLeaseClient(start(t, func(c *gateway.Config) { c.Leases, c.RequestTimeout = cutOffLeases{}, timeout }).conn)
	}
	c := cutOff(50 * time.Millisecond)
	_, err := c.LeaseTimeToLive(t.Context(), &pb.LeaseTimeToLiveRequest{ID: 7})
	if status.Code(err) != codes.Unavailable || rpctypes.ErrorDesc(err) != rpctypes.ErrTimeout.Error() {
		t.Errorf("time to live: %v", err)
	}
	stream, err := c.LeaseKeepAlive(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&pb.LeaseKeepAliveRequest{ID: 7}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable || rpctypes.ErrorDesc(err) != rpctypes.ErrTimeout.Error() {
		t.Errorf("renewal: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := cutOff(time.Hour).LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: 7}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("time to live of a client that gave up: %v", err)
	}
}
