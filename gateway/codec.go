package gateway

import (
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // the codec that is wrapped
	"google.golang.org/grpc/mem"
)

// countingCodec is gRPC's own protobuf codec that also counts bytes, and takes responses that are
// encoded already.
type countingCodec struct {
	inner encoding.CodecV2
	m     *metrics
}

func newCountingCodec(m *metrics) countingCodec {
	return countingCodec{inner: encoding.GetCodecV2("proto"), m: m}
}

func (c countingCodec) Marshal(v any) (mem.BufferSlice, error) {
	var data mem.BufferSlice
	var err error
	if e, ok := v.(*encodedWatch); ok {
		data = e.buffers()
	} else {
		data, err = c.inner.Marshal(v)
	}
	c.m.sentBytes.Add(float64(data.Len()))
	return data, err
}

func (c countingCodec) Unmarshal(data mem.BufferSlice, v any) error {
	c.m.receivedBytes.Add(float64(data.Len()))
	return c.inner.Unmarshal(data, v)
}

func (c countingCodec) Name() string { return c.inner.Name() }
