package bench

import (
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// TestExpiryWhileGranting has leases that end while others are granted: they are as late as the
// watcher says, not as late as the last grant.
func TestExpiryWhileGranting(t *testing.T) {
	const slow = 2 * time.Second
	f := &fakeStore{events: make(chan *pb.WatchResponse, 2)}
	puts := 0
	f.put = func(r *pb.PutRequest) error {
		if puts++; puts == 2 {
			<-time.After(slow)
		}
		f.events <- &pb.WatchResponse{Header: &pb.ResponseHeader{}, Events: []*mvccpb.Event{{Type: mvccpb.Event_DELETE, Kv: &mvccpb.KeyValue{Key: r.Key, ModRevision: 2}}}}
		return nil
	}
	rep, err := Expiry(t.Context(), f.start(t), Load{}, Options{Clients: 1, Connections: 1, Timeout: time.Minute}, 2, Observer{})
	if err != nil {
		t.Fatal(err)
	}
	k := rep.Kind(expiryKind)
	if k.Count != 2 || k.Distribution[0].MS > ms(int64(slow))/2 {
		t.Errorf("%d keys, the first gone %g ms late", k.Count, k.Distribution[0].MS)
	}
	var b strings.Builder
	if err := rep.Print(&b); err != nil || !strings.Contains(b.String(), "warning: granting took ") {
		t.Errorf("%v\n%s", err, b.String())
	}
}
