package orderlog

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// A journal is a file of frames: length and checksum of the payload, four bytes each, then the
// payload. It is written with one write a frame and never synced: it has to outlive the process,
// not the machine. A torn last frame is cut off when the file is opened.
const (
	frameHeader  = 8
	frameBytes   = 64 << 20 // no frame is longer
	frameVersion = 2        // 1 was one without leases
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type frameKind uint8

const (
	frameRegion  frameKind = iota + 1 // an entry or a decision of a region
	frameEvent                        // an event of pd
	frameWritten                      // the log holds everything through a cut
	frameEnded                        // the record ends
)

// frame is one piece of the record.
type frame struct {
	kind     frameKind
	region   pdpb.RegionID
	cut      pdpb.Cut
	at       place
	requests []request
	err      error // it is not what it should be, and is not written
}

// take adds what a command or a part of a transaction did, if that was anything.
func (f *frame) take(effects []regionpb.Effect, subs []int64, records []regionpb.RecordEffect, rev mvcc.Revision) {
	q, err := effective(effects, subs, records, rev)
	if err != nil {
		f.err = err
	}
	if q.kind != 0 {
		f.requests = append(f.requests, q)
	}
}

func (f *frame) append(b []byte) []byte {
	b = append(b, frameVersion, byte(f.kind), byte(f.at.phase))
	for _, v := range [...]uint64{uint64(f.region), uint64(f.cut), f.at.item, f.at.ord, uint64(len(f.requests))} {
		b = binary.AppendUvarint(b, v)
	}
	for i := range f.requests {
		q := &f.requests[i]
		b = append(b, byte(q.kind))
		b = binary.AppendUvarint(b, uint64(q.rev))
		b = binary.AppendVarint(b, int64(q.compact))
		b = binary.AppendVarint(b, q.lease)
		b = binary.AppendVarint(b, q.ttl)
		b = binary.AppendUvarint(b, uint64(len(q.changes)))
		for j := range q.changes {
			c := &q.changes[j]
			b = pdpb.AppendBool(b, c.delete)
			b = binary.AppendUvarint(b, uint64(c.sub))
			b = binary.AppendVarint(b, c.lease)
			b = append(binary.AppendUvarint(b, uint64(len(c.key))), c.key...)
			b = append(binary.AppendUvarint(b, uint64(len(c.value))), c.value...)
		}
	}
	return b
}

var errFrame = errors.New("orderlog: damaged frame")

// reader takes numbers and strings off a frame; err is set by the first that is not there.
type reader struct {
	b   []byte
	err error
}

func (r *reader) byte() byte {
	if len(r.b) == 0 {
		r.err = errFrame
		return 0
	}
	v := r.b[0]
	r.b = r.b[1:]
	return v
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.err, r.b = errFrame, nil
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) varint() int64 {
	v, n := binary.Varint(r.b)
	if n <= 0 {
		r.err, r.b = errFrame, nil
		return 0
	}
	r.b = r.b[n:]
	return v
}

// count reads a number of things that take at least size bytes each.
func (r *reader) count(size int) int {
	n := r.uvarint()
	if n > uint64(len(r.b)/size) {
		r.err, r.b = errFrame, nil
		return 0
	}
	return int(n)
}

func (r *reader) bytes() []byte {
	n := r.count(1)
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

func decodeFrame(b []byte) (*frame, error) {
	r := reader{b: b}
	if v := r.byte(); r.err == nil && v != frameVersion {
		return nil, fmt.Errorf("%w: version %d", errFrame, v)
	}
	f := &frame{kind: frameKind(r.byte())}
	f.at.phase = phase(r.byte())
	f.region, f.cut = pdpb.RegionID(r.uvarint()), pdpb.Cut(r.uvarint())
	f.at.item, f.at.ord = r.uvarint(), r.uvarint()
	f.requests = make([]request, r.count(6))
	for i := range f.requests {
		q := &f.requests[i]
		q.kind = kind(r.byte())
		q.rev, q.compact = mvcc.Revision(r.uvarint()), mvcc.Revision(r.varint())
		q.lease, q.ttl = r.varint(), r.varint()
		q.changes = make([]change, r.count(5))
		for j := range q.changes {
			q.changes[j] = change{delete: r.byte() != 0, sub: int64(r.uvarint()), lease: r.varint(), key: r.bytes(), value: r.bytes()}
		}
	}
	if r.err == nil && len(r.b) > 0 {
		r.err = errFrame
	}
	return f, r.err
}

// journal is the open file, at its end.
type journal struct {
	file *os.File
	buf  []byte
}

// openJournal reads a journal, hands out its frames, and leaves it ready for more.
func openJournal(path string, replay func(*frame) error) (*journal, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	end, err := readJournal(file, replay)
	if err == nil {
		err = file.Truncate(end)
	}
	if err == nil {
		_, err = file.Seek(end, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), file.Close())
	}
	return &journal{file: file}, nil
}

// readJournal returns where the last whole frame ends.
func readJournal(file io.Reader, replay func(*frame) error) (end int64, err error) {
	in := bufio.NewReaderSize(file, 1<<20)
	for {
		var header [frameHeader]byte
		if _, err := io.ReadFull(in, header[:]); errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return end, nil
		} else if err != nil {
			return end, err
		}
		n := binary.LittleEndian.Uint32(header[:])
		if n > frameBytes {
			return end, fmt.Errorf("%w: %d bytes at offset %d", errFrame, n, end)
		}
		payload := make([]byte, n) // not shared: the frame keeps it
		if _, err := io.ReadFull(in, payload); errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return end, nil
		} else if err != nil {
			return end, err
		}
		if crc32.Checksum(payload, castagnoli) != binary.LittleEndian.Uint32(header[4:]) {
			return end, fmt.Errorf("%w: checksum at offset %d", errFrame, end)
		}
		f, err := decodeFrame(payload)
		if err != nil {
			return end, fmt.Errorf("at offset %d: %w", end, err)
		}
		if err := replay(f); err != nil {
			return end, err
		}
		end += frameHeader + int64(n)
	}
}

func (j *journal) append(f *frame) error {
	j.buf = append(j.buf[:0], make([]byte, frameHeader)...)
	j.buf = f.append(j.buf)
	payload := j.buf[frameHeader:]
	if len(payload) > frameBytes {
		return fmt.Errorf("%w: %d bytes", errFrame, len(payload))
	}
	binary.LittleEndian.PutUint32(j.buf, uint32(len(payload)))
	binary.LittleEndian.PutUint32(j.buf[4:], crc32.Checksum(payload, castagnoli))
	_, err := j.file.Write(j.buf)
	return err
}

func (j *journal) close() error { return j.file.Close() }
