package gateway

import (
	"fmt"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// encodedWatch is a WatchResponse of which the events, its last field, are encoded already; the
// codec sends it as it is. Both parts are only read.
type encodedWatch struct{ head, events []byte }

func (e *encodedWatch) buffers() mem.BufferSlice {
	return mem.BufferSlice{mem.SliceBuffer(e.head), mem.SliceBuffer(e.events)}
}

// sharedEvents encodes events once for the watchers of one stream that get the same ones after each
// other. The zero value is ready.
type sharedEvents struct {
	last    []*mvccpb.Event // empty if they were large
	encoded []byte          // of last, once they came twice
}

// sharedBytesMax is about how large the events are that a stream keeps, and their encoding; larger ones are
// encoded each time. A stream may be quiet for long, and there may be many.
const sharedBytesMax = 64 << 10

// keep makes these events the last ones.
func (s *sharedEvents) keep(events []*mvccpb.Event) {
	clear(s.last) // of more events than there are now none must stay
	s.last, s.encoded = s.last[:0], nil
	size := 0
	for _, e := range events {
		if size += proto.Size(e); size > sharedBytesMax {
			return
		}
	}
	s.last = append(s.last, events...)
}

const watchEventsField = 11 // WatchResponse.events

// of returns the events' encoding as fields of a WatchResponse, nil when these events are new or
// large: the response is then as well encoded as a whole.
func (s *sharedEvents) of(events []*mvccpb.Event) ([]byte, error) {
	if !slices.Equal(s.last, events) {
		s.keep(events)
		return nil, nil
	}
	if s.encoded != nil || len(events) == 0 {
		return s.encoded, nil
	}
	size := 0
	for _, e := range events {
		size += protowire.SizeTag(watchEventsField) + protowire.SizeBytes(proto.Size(e))
	}
	b := make([]byte, 0, size)
	for _, e := range events {
		b = protowire.AppendTag(b, watchEventsField, protowire.BytesType)
		b = protowire.AppendVarint(b, uint64(proto.Size(e)))
		var err error
		if b, err = (proto.MarshalOptions{}).MarshalAppend(b, e); err != nil {
			return nil, fmt.Errorf("gateway: encoding an event: %w", err)
		}
	}
	s.encoded = b
	return b, nil
}

// sendEvents sends a response, with its events' encoding shared if the last one had the same.
func (ws *watchStream) sendEvents(wr *pb.WatchResponse) error {
	events, err := ws.shared.of(wr.Events)
	if err != nil {
		return err
	}
	if events == nil {
		return ws.grpc.Send(wr)
	}
	wr.Events = nil
	head, err := proto.Marshal(wr)
	if err != nil {
		return fmt.Errorf("gateway: encoding a watch response: %w", err)
	}
	return ws.grpc.SendMsg(&encodedWatch{head, events})
}
