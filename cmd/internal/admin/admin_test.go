package admin

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"reflect"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
)

// fake is a cluster of n regions, split at 4-byte keys.
type fake struct {
	n     int
	pages int
	moved []uint64
}

func key(i int) []byte { return []byte{byte(i >> 24), byte(i >> 16), byte(i >> 8), byte(i), 1} }

func (f *fake) Regions(_ context.Context, from []byte, limit int) ([]Region, bool, error) {
	f.pages++
	var rs []Region
	for i := range f.n {
		r := Region{ID: uint64(i + 2), Epoch: 3, Incarnation: 1, Peers: []Peer{{1, 0xa}, {2, 0xb}}, LeaderStore: 0xb, Term: 7, AppliedIndex: 9, Revision: 11, ItemsRetained: 1}
		if i > 0 {
			r.Start = key(i)
		}
		if i < f.n-1 {
			r.End = key(i + 1)
			if bytes.Compare(r.End, from) <= 0 {
				continue
			}
		}
		if len(rs) == limit {
			return rs, true, nil
		}
		rs = append(rs, r)
	}
	return rs, false, nil
}

func (f *fake) TransferRegion(_ context.Context, region, store uint64) error {
	switch {
	case region > uint64(f.n)+1:
		return fmt.Errorf("region %d: %w", region, ErrNotFound)
	case store == 0xc:
		return fmt.Errorf("store c has no replica: %w", ErrRefused)
	}
	f.moved = append(f.moved, region, store)
	return nil
}

func (f *fake) PD(context.Context) (PD, error) {
	return PD{ClusterID: 1, LeaderStore: 0xa, Term: 2, AppliedIndex: 3, Cut: 4, Revision: 5, CompactRevision: -1, Fence: 6, Regions: uint64(f.n), ItemsRetained: 7,
		SingleGroup: true, Stores: []Store{{ID: 0xa, Name: "n1", PeerURLs: []string{"p"}, ClientURLs: []string{"c"}, PDVoter: true, Alive: true}}}, nil
}

func (f *fake) TransferPD(context.Context, uint64) error {
	return fmt.Errorf("no leader: %w", ErrUnavailable)
}

func dial(t *testing.T, b Backend) *Client {
	t.Helper()
	lis := bufconn.Listen(1 << 20)
	s := grpc.NewServer()
	Register(s, b)
	done := make(chan error, 1)
	go func() { done <- s.Serve(lis) }()
	conn, err := grpc.NewClient("passthrough:///buf", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return lis.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		s.Stop()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return NewClient(conn)
}

func TestEveryFieldArrives(t *testing.T) {
	f := &fake{n: 2}
	c, ctx := dial(t, f), context.Background()
	want, _, _ := f.Regions(ctx, nil, 10)
	got, more, err := c.Regions(ctx, nil, 10)
	if err != nil || more || !reflect.DeepEqual(got, want) {
		t.Errorf("regions %+v %v %v, want %+v", got, more, err, want)
	}
	wantPD, _ := f.PD(ctx)
	gotPD, err := c.PD(ctx)
	if err != nil || !reflect.DeepEqual(gotPD, wantPD) {
		t.Errorf("pd %+v %v, want %+v", gotPD, err, wantPD)
	}
}

func TestPaging(t *testing.T) {
	f := &fake{n: 2*pageMax + 5}
	var n int
	err := dial(t, f).EachRegion(context.Background(), func(r *Region) error {
		if r.ID != uint64(n+2) {
			return fmt.Errorf("region %d came as number %d", r.ID, n)
		}
		n++
		return nil
	})
	if err != nil || n != f.n || f.pages != 3 {
		t.Errorf("%d regions of %d in %d pages, %v", n, f.n, f.pages, err)
	}
}

func TestErrorsHaveCodes(t *testing.T) {
	f := &fake{n: 1}
	c, ctx := dial(t, f), context.Background()
	for _, tc := range []struct {
		name string
		err  error
		want codes.Code
	}{
		{"done", c.TransferRegion(ctx, 2, 0xb), codes.OK},
		{"no region", c.TransferRegion(ctx, 99, 0xb), codes.NotFound},
		{"no replica", c.TransferRegion(ctx, 2, 0xc), codes.FailedPrecondition},
		{"no store given", c.TransferRegion(ctx, 2, 0), codes.InvalidArgument},
		{"no leader", c.TransferPD(ctx, 0xb), codes.Unavailable},
		{"no store", c.TransferPD(ctx, 0), codes.InvalidArgument},
	} {
		if got := status.Code(tc.err); got != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, tc.err, tc.want)
		}
	}
	if !reflect.DeepEqual(f.moved, []uint64{2, 0xb}) {
		t.Errorf("moved %v", f.moved)
	}
}
