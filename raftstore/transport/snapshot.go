package transport

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"braid/raftstore/raftid"
)

// A snapshot's stream, after the handshake: one message with version byte, uvarint group and the
// header; then messages of a tag byte and data, the last with the tag snapshotEnd and none; then
// one message back: empty for taken, else the reason. HTTP/2's flow control bounds what is on its
// way, so both ends need a chunk of memory each.
const (
	snapshotVersion = 1
	snapshotChunk   = 1
	snapshotEnd     = 2

	snapshotChunkBytes = 256 << 10
)

// SendSnapshot streams what src writes to a store and returns when that has taken it, or with the
// reason why not. One that makes no progress for SnapshotStall is given up.
func (t *Transport) SendSnapshot(ctx context.Context, to raftid.StoreID, group raftid.GroupID, header []byte, src func(io.Writer) error) (err error) {
	p := t.peers[to]
	if p == nil {
		return fmt.Errorf("%w: %w %s", ErrUnavailable, errUnknownStore, to)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(t.ctx, func() { cancel(ErrUnavailable) })()
	stalled := errors.New("transport: the snapshot makes no progress")
	watchdog := time.AfterFunc(t.cfg.SnapshotStall, func() { cancel(stalled) })
	defer watchdog.Stop()
	s, free, err := p.open(ctx, methodSnapshot, 0)
	for attempt := 1; err != nil && attempt < len(p.addrs) && ctx.Err() == nil; attempt++ {
		s, free, err = p.open(ctx, methodSnapshot, attempt)
	}
	if err != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	defer free()
	defer cancel(nil)
	head := binary.AppendUvarint([]byte{snapshotVersion}, uint64(group))
	w := &snapshotWriter{t: t, to: to, s: s, progress: func() { watchdog.Reset(t.cfg.SnapshotStall) }}
	err = s.SendMsg(append(head, header...))
	if err == nil {
		err = src(w)
	}
	if err == nil {
		err = w.finish()
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return errors.Join(err, context.Cause(ctx))
	}
	// The receiver may have said why it does not want more, or takes its time to install.
	var b []byte
	if err := s.RecvMsg(&b); err != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	if len(b) > 0 {
		return fmt.Errorf("transport: store %s refuses the snapshot: %s", to, b)
	}
	return nil
}

// snapshotWriter cuts what is written into messages.
type snapshotWriter struct {
	t        *Transport
	to       raftid.StoreID
	s        grpc.ClientStream
	buf      []byte
	progress func()
}

// Write implements io.Writer.
func (w *snapshotWriter) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		if w.buf == nil {
			w.buf = append(make([]byte, 0, snapshotChunkBytes), snapshotChunk)
		}
		k := min(len(p), cap(w.buf)-len(w.buf))
		w.buf = append(w.buf, p[:k]...)
		p = p[k:]
		if len(w.buf) == cap(w.buf) {
			if err := w.flush(); err != nil {
				return n - len(p), err
			}
		}
	}
	return n, nil
}

func (w *snapshotWriter) flush() error {
	b := w.buf
	w.buf = nil // gRPC keeps it until it is on the wire
	if len(b) == 0 {
		return nil
	}
	if err := w.s.SendMsg(b); err != nil {
		return err
	}
	w.progress()
	w.t.sent(w.to, len(b))
	return nil
}

func (w *snapshotWriter) finish() error {
	if err := w.flush(); err != nil {
		return err
	}
	if err := w.s.SendMsg([]byte{snapshotEnd}); err != nil {
		return err
	}
	return w.s.CloseSend()
}

func (t *Transport) serveSnapshot(p *peer, s grpc.ServerStream) error {
	var b []byte
	if err := s.RecvMsg(&b); err != nil {
		return err
	}
	if len(b) == 0 || b[0] != snapshotVersion || t.snapshot == nil {
		return status.Error(codes.InvalidArgument, "malformed snapshot")
	}
	group, n := binary.Uvarint(b[1:])
	if n <= 0 {
		return status.Error(codes.InvalidArgument, "malformed snapshot")
	}
	r := &snapshotReader{t: t, p: p, s: s}
	err := t.snapshot(s.Context(), p.id, raftid.GroupID(group), b[1+n:], r)
	if err == nil && !r.ended {
		err = errors.New("transport: the receiver did not read to the end")
	}
	if err != nil {
		return s.SendMsg([]byte(err.Error()))
	}
	return s.SendMsg([]byte{})
}

// snapshotReader reads a stream's chunks; io.EOF comes only after the sender's end mark.
type snapshotReader struct {
	t     *Transport
	p     *peer
	s     grpc.ServerStream
	b     []byte
	ended bool
}

// Read implements io.Reader.
func (r *snapshotReader) Read(p []byte) (int, error) {
	for len(r.b) == 0 {
		if r.ended {
			return 0, io.EOF
		}
		var b []byte
		if err := r.s.RecvMsg(&b); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return 0, err
		}
		r.t.received(r.p.id, len(b))
		switch {
		case len(b) == 1 && b[0] == snapshotEnd:
			r.ended = true
		case len(b) > 1 && b[0] == snapshotChunk:
			r.b = b[1:]
		default:
			return 0, errors.New("transport: malformed snapshot")
		}
	}
	n := copy(p, r.b)
	r.b = r.b[n:]
	return n, nil
}
