package gateway

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// sentWire encodes what a stream sends as gRPC would.
type sentWire struct {
	grpc.ServerStream
	codec   countingCodec
	sent    [][]byte
	encoded int
}

func (w *sentWire) Send(r *pb.WatchResponse) error { return w.SendMsg(r) }
func (w *sentWire) Recv() (*pb.WatchRequest, error) {
	return nil, fmt.Errorf("nothing is received here")
}

func (w *sentWire) SendMsg(v any) error {
	if _, ok := v.(*encodedWatch); ok {
		w.encoded++
	}
	data, err := w.codec.Marshal(v)
	if err == nil {
		w.sent = append(w.sent, data.Materialize())
		data.Free()
	}
	return err
}

func events(n, valueBytes int) []*mvccpb.Event {
	var out []*mvccpb.Event
	for i := range n {
		out = append(out, &mvccpb.Event{Type: mvccpb.Event_EventType(i % 2), Kv: &mvccpb.KeyValue{
			Key: fmt.Appendf(nil, "key%d", i), Value: bytes.Repeat([]byte{'v'}, valueBytes), ModRevision: 7, CreateRevision: int64(i), Version: 3,
		}})
	}
	return out
}

// TestSharedEvents: however often the same events come, and whatever comes in between, a response is
// what protobuf makes of it.
func TestSharedEvents(t *testing.T) {
	one, two, large := events(1, 256), events(2, 0), events(3, sharedBytesMax/2)
	other := events(2, 0) // equal to two, but not the same
	w := &sentWire{codec: newCountingCodec(&metrics{sentBytes: prometheus.NewCounter(prometheus.CounterOpts{Name: "sent"})})}
	ws := &watchStream{grpc: w}
	want := [][]byte{}
	id := int64(0)
	for _, evs := range [][]*mvccpb.Event{one, one, one, two, one, one, nil, nil, nil, two, two, other, other, large, large, large, two[:1], two, two} {
		id++
		wr := &pb.WatchResponse{
			Header: &pb.ResponseHeader{ClusterId: 1 << 63, MemberId: 5, Revision: 9, RaftTerm: 2}, WatchId: id, Events: evs, Fragment: id%3 == 0,
		}
		b, err := proto.Marshal(wr)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, b)
		if err := ws.sendEvents(wr); err != nil {
			t.Fatal(err)
		}
	}
	for i := range want {
		if !bytes.Equal(w.sent[i], want[i]) {
			t.Errorf("response %d:\n got %x\nwant %x", i+1, w.sent[i], want[i])
		}
	}
	// The second and third of one, the second of one after two, and each second of two, other, two.
	if w.encoded != 6 {
		t.Errorf("%d responses shared their events' encoding, want 6", w.encoded)
	}
}

// TestSharedEventsAreFew: a stream does not hold on to what it has sent, but for a little.
func TestSharedEventsAreFew(t *testing.T) {
	var s sharedEvents
	for _, evs := range [][]*mvccpb.Event{events(100, 8), events(1, 8), events(3, sharedBytesMax/2), events(2, 8), nil} {
		if _, err := s.of(evs); err != nil {
			t.Fatal(err)
		}
		size := 0
		for _, e := range s.last[:cap(s.last)] {
			if e != nil && !slices.Contains(evs, e) {
				t.Fatalf("after %d events an older one is held", len(evs))
			}
			size += proto.Size(e)
		}
		if size > sharedBytesMax {
			t.Errorf("%d bytes of events are held", size)
		}
	}
}

// BenchmarkSharedEvents: the same event for a thousand watchers of one stream.
func BenchmarkSharedEvents(b *testing.B) {
	codec := newCountingCodec(&metrics{sentBytes: prometheus.NewCounter(prometheus.CounterOpts{Name: "sent"})})
	for _, shared := range []bool{false, true} {
		b.Run(fmt.Sprint("shared=", shared), func(b *testing.B) {
			b.ReportAllocs()
			evs := events(1, 256)
			var s sharedEvents
			for i := 0; b.Loop(); i++ {
				wr := &pb.WatchResponse{Header: &pb.ResponseHeader{ClusterId: 1 << 63, MemberId: 5, Revision: 9, RaftTerm: 2}, WatchId: int64(i), Events: evs}
				var msg any = wr
				if shared {
					enc, err := s.of(evs)
					if err != nil {
						b.Fatal(err)
					}
					if enc != nil {
						wr.Events = nil
						head, err := proto.Marshal(wr)
						if err != nil {
							b.Fatal(err)
						}
						msg = &encodedWatch{head, enc}
					}
				}
				data, err := codec.Marshal(msg)
				if err != nil {
					b.Fatal(err)
				}
				data.Free()
			}
		})
	}
}
