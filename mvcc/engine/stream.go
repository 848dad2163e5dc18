package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"braid/mvcc"
)

// The stream of a span is a sequence of frames: length(4) crc32c(4) payload, where the payload
// starts with its kind and the checksum covers the payload continued from the previous frame's
// checksum. A frame that is lost, repeated or out of place therefore fails like a damaged one.
//
//	'h' version(1) bytes(start) bytes(end, as it is) byte(1 when there is an end)
//	'd' { bytes(key) bytes(value) }...   records, then versions, in key order, in the engine's own encodings
//	'e' uvarint(number of keys)
const (
	streamVersion = 2

	frameHeader = 'h'
	frameData   = 'd'
	frameEnd    = 'e'

	frameHeadLen   = 8
	frameBytesGoal = 256 << 10 // a frame is closed when it reaches this
	frameBytesMax  = 256 << 20 // more than one version can need
)

// ErrStream says that a snapshot stream is damaged, cut short, of an unknown version, or of
// another span.
var ErrStream = errors.New("engine: bad snapshot stream")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// streamWriter frames a span. Its memory is one frame.
type streamWriter struct {
	w     io.Writer
	buf   []byte // frame head and payload under construction
	crc   uint32
	count uint64
}

func newStreamWriter(w io.Writer, span mvcc.Span) (*streamWriter, error) {
	s := &streamWriter{w: w}
	s.begin(frameHeader)
	s.buf = append(s.buf, streamVersion)
	s.bytes(span.Start)
	s.bytes(span.End)
	if span.End != nil {
		s.buf = append(s.buf, 1)
	} else {
		s.buf = append(s.buf, 0)
	}
	if err := s.flush(); err != nil {
		return nil, err
	}
	s.begin(frameData)
	return s, nil
}

func (s *streamWriter) begin(kind byte) {
	s.buf = append(append(s.buf[:0], make([]byte, frameHeadLen)...), kind)
}

func (s *streamWriter) bytes(b []byte) {
	s.buf = append(binary.AppendUvarint(s.buf, uint64(len(b))), b...)
}

func (s *streamWriter) flush() error {
	payload := s.buf[frameHeadLen:]
	s.crc = crc32.Update(s.crc, castagnoli, payload)
	binary.BigEndian.PutUint32(s.buf, uint32(len(payload)))
	binary.BigEndian.PutUint32(s.buf[4:], s.crc)
	_, err := s.w.Write(s.buf)
	return err
}

func (s *streamWriter) add(key, value []byte) error {
	s.bytes(key)
	s.bytes(value)
	s.count++
	if len(s.buf) < frameBytesGoal {
		return nil
	}
	err := s.flush()
	s.begin(frameData)
	return err
}

func (s *streamWriter) close() error {
	if len(s.buf) > frameHeadLen+1 {
		if err := s.flush(); err != nil {
			return err
		}
	}
	s.begin(frameEnd)
	s.buf = binary.AppendUvarint(s.buf, s.count)
	return s.flush()
}

// streamReader takes a stream in pieces of any size. Its memory is one frame.
type streamReader struct {
	buf   []byte // a frame that is not complete yet
	crc   uint32
	count uint64
	state byte // kind of the last frame; 0 at the start
	head  func(span mvcc.Span) error
	add   func(key, value []byte) error
}

func (s *streamReader) write(p []byte) error {
	for len(p) > 0 {
		want := frameHeadLen
		if len(s.buf) >= frameHeadLen {
			want += int(binary.BigEndian.Uint32(s.buf))
		}
		n := min(want-len(s.buf), len(p))
		s.buf, p = append(s.buf, p[:n]...), p[n:]
		if len(s.buf) < frameHeadLen {
			continue
		}
		size := binary.BigEndian.Uint32(s.buf)
		if size == 0 || size > frameBytesMax {
			return fmt.Errorf("%w: frame of %d bytes", ErrStream, size)
		}
		if len(s.buf) == frameHeadLen+int(size) {
			if err := s.frame(s.buf[frameHeadLen:]); err != nil {
				return err
			}
			s.buf = s.buf[:0]
		}
	}
	return nil
}

func (s *streamReader) frame(payload []byte) error {
	s.crc = crc32.Update(s.crc, castagnoli, payload)
	if got := binary.BigEndian.Uint32(s.buf[4:]); got != s.crc {
		return fmt.Errorf("%w: checksum", ErrStream)
	}
	kind := payload[0]
	r := varints{b: payload[1:]}
	switch {
	case kind == frameHeader && s.state == 0:
		if len(r.b) == 0 || r.b[0] != streamVersion {
			return fmt.Errorf("%w: unknown version", ErrStream)
		}
		r.b = r.b[1:]
		span := mvcc.Span{Start: r.bytes(), End: r.bytes()}
		if r.bad || len(r.b) != 1 {
			return fmt.Errorf("%w: header", ErrStream)
		}
		if r.b[0] == 0 {
			span.End = nil
		}
		if err := s.head(span); err != nil {
			return err
		}
	case kind == frameData && (s.state == frameHeader || s.state == frameData):
		for len(r.b) > 0 {
			key, value := r.bytes(), r.bytes()
			if r.bad {
				return fmt.Errorf("%w: data", ErrStream)
			}
			s.count++
			if err := s.add(key, value); err != nil {
				return err
			}
		}
	case kind == frameEnd && (s.state == frameHeader || s.state == frameData):
		if n := r.uvarint(); r.bad || n != s.count {
			return fmt.Errorf("%w: %d versions of %d", ErrStream, s.count, n)
		}
	default:
		return fmt.Errorf("%w: frame %q after %q", ErrStream, kind, s.state)
	}
	s.state = kind
	return nil
}

// done says whether the stream came whole.
func (s *streamReader) done() bool { return s.state == frameEnd && len(s.buf) == 0 }
