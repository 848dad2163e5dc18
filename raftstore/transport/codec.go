package transport

import (
	"fmt"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
)

// codecName is the content-subtype of our streams: gRPC picks the codec by it, so a server that
// carries other services as well is not disturbed.
const codecName = "braidraw"

// rawCodec passes bytes through: it sends a mem.Buffer and receives into a *[]byte that the
// receiver owns.
type rawCodec struct{}

// gRPC's registry of codecs is global and must be filled in init.
func init() { encoding.RegisterCodecV2(rawCodec{}) }

// Marshal implements encoding.CodecV2.
func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	switch b := v.(type) {
	case mem.Buffer:
		return mem.BufferSlice{b}, nil
	case []byte:
		return mem.BufferSlice{mem.SliceBuffer(b)}, nil
	}
	return nil, fmt.Errorf("transport: cannot send a %T", v)
}

// Unmarshal implements encoding.CodecV2.
func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	b, ok := v.(*[]byte)
	if !ok {
		return fmt.Errorf("transport: cannot receive into a %T", v)
	}
	*b = data.Materialize()
	return nil
}

// Name implements encoding.CodecV2.
func (rawCodec) Name() string { return codecName }
