package wal

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"syscall"
	"time"
)

// segment is a file of the log. Its fields belong to Log.mu, except num and file, which never
// change.
type segment struct {
	num  uint32
	file File
	live int64 // bytes of records in it that recovery would still need
	refs int   // readers
	dead bool  // freed, becomes a spare when the last reader leaves
}

// sparesMax is how many freed segments wait for use; more are removed.
const sparesMax = 4

// prepared is the next segment, or why there is none.
type prepared struct {
	seg      *segment
	recycled bool
	err      error
}

func signal(token chan struct{}) {
	select {
	case token <- struct{}{}:
	default:
	}
}

// applyLive counts changes of what segments hold. Called with mu held.
func (l *Log) applyLive(d deltas) {
	for _, c := range d {
		l.segs[c.seg-l.segs[0].num].live += c.bytes
	}
}

// pin returns the segments that the slots are in and keeps them from reuse until unpin. It is
// called with the group's mu held, so that the slots are true.
func (l *Log) pin(slots []slot) []*segment {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []*segment
	for _, s := range slots {
		seg := l.segs[s.seg-l.segs[0].num]
		if !slices.Contains(out, seg) {
			seg.refs++
			out = append(out, seg)
		}
	}
	return out
}

func (l *Log) unpin(segs []*segment) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range segs {
		if s.refs--; s.refs == 0 && s.dead {
			l.spare(s)
		}
	}
}

// spare gives a freed segment to the preparer. Called with mu held.
func (l *Log) spare(s *segment) {
	l.spares = append(l.spares, s)
	signal(l.freed)
}

// release frees the segments before oldest: a durable batch has said that nothing in them is
// live. Called with mu held.
func (l *Log) release(oldest uint32) {
	for l.segs[0].num < oldest {
		s := l.segs[0]
		l.segs = l.segs[1:]
		if s.dead = true; s.refs == 0 {
			l.spare(s)
		}
	}
}

// noRoom says that a disk is full, the one failure that passes: a segment may come free.
func noRoom(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// prepareLoop keeps one segment ready ahead of the writer, from num on. It ends with stop, or when
// the writer has taken an error that does not pass.
func (l *Log) prepareLoop(num uint32) {
	var p prepared
	for {
		if p.seg == nil && p.err == nil {
			p = l.prepare(num)
		}
		select {
		case l.next <- p:
			if p.err == nil {
				num++
			} else if !noRoom(p.err) {
				return
			}
			p = prepared{}
		case <-l.freed:
			// If the disk was full, the spare is the way out.
			if noRoom(p.err) {
				p = prepared{}
			}
			if err := l.trimSpares(); err != nil {
				l.o.Logger.Sugar().Warnf("wal: removing a spare segment: %v", err)
			}
		case <-l.stop:
			if p.seg != nil {
				l.mu.Lock()
				l.spares = append(l.spares, p.seg) // closed with the others
				l.mu.Unlock()
			}
			return
		}
	}
}

// trimSpares removes spares above sparesMax.
func (l *Log) trimSpares() error {
	l.mu.Lock()
	var surplus []*segment
	if n := len(l.spares) - sparesMax; n > 0 {
		surplus = slices.Clone(l.spares[:n])
		l.spares = slices.Delete(l.spares, 0, n)
	}
	l.mu.Unlock()
	var errs []error
	for _, s := range surplus {
		errs = append(errs, s.file.Close(), l.o.FS.Remove(l.path(segmentName(s.num))))
	}
	return errors.Join(errs...)
}

// prepare makes segment num ready for the writer, from a spare if there is one.
func (l *Log) prepare(num uint32) prepared {
	s, err := l.takeSpare(num)
	if err != nil {
		return prepared{err: err}
	}
	if s == nil {
		s, err = l.create(num)
		return prepared{seg: s, err: err}
	}
	file := s.file
	// The name first: until it is durable the old contents must stay readable under the old one.
	if s.num != num {
		if err := l.o.FS.Rename(l.path(segmentName(s.num)), l.path(segmentName(num))); err != nil {
			return prepared{err: errors.Join(fmt.Errorf("wal: recycling a segment: %w", err), file.Close())}
		}
		if err := l.o.FS.SyncDir(l.dir); err != nil {
			return prepared{err: errors.Join(fmt.Errorf("wal: recycling a segment: %w", err), file.Close())}
		}
	}
	if err := l.writeSegmentHeader(file, num); err != nil {
		return prepared{err: errors.Join(err, file.Close())}
	}
	return prepared{seg: &segment{num: num, file: file}, recycled: true}
}

func (l *Log) writeSegmentHeader(f File, num uint32) error {
	if _, err := f.WriteAt(appendSegmentHeader(nil, l.logID, num), 0); err != nil {
		return fmt.Errorf("wal: segment header: %w", err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("wal: segment header: %w", err)
	}
	return nil
}

// takeSpare picks a spare of the right size, first of all one that already has the name. Spares
// of another size are removed.
func (l *Log) takeSpare(num uint32) (*segment, error) {
	l.mu.Lock()
	spares := l.spares
	l.spares = nil
	l.mu.Unlock()
	var fit []*segment
	var errs []error
	for _, s := range spares {
		size, err := s.file.Size()
		if err == nil && size == l.o.SegmentBytes {
			fit = append(fit, s)
			continue
		}
		errs = append(errs, err, s.file.Close(), l.o.FS.Remove(l.path(segmentName(s.num))))
	}
	var out *segment
	err := errors.Join(errs...)
	if err != nil {
		err = fmt.Errorf("wal: removing a spare segment: %w", err)
	} else if len(fit) > 0 {
		i := max(0, slices.IndexFunc(fit, func(s *segment) bool { return s.num == num }))
		out = fit[i]
		fit = slices.Delete(fit, i, i+1)
	}
	l.mu.Lock()
	l.spares = append(fit, l.spares...)
	l.mu.Unlock()
	return out, err
}

const (
	fillBytes = 1 << 20
	// fillPause spaces the chunks of the zero fill, so that the writer's syncs have the disk.
	fillPause = 4 * time.Millisecond
	tmpName   = "new.tmp"
)

// create makes a new file. It fills it with zeros, so that later syncs have no extents to
// convert, unless the writer is already waiting.
func (l *Log) create(num uint32) (s *segment, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("wal: creating segment %d: %w", num, err)
		}
	}()
	file, err := l.o.FS.Create(l.path(tmpName))
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, file.Close())
		}
	}()
	if err := file.Preallocate(l.o.SegmentBytes); err != nil {
		return nil, err
	}
	if err := l.fill(file); err != nil {
		return nil, err
	}
	if err := l.writeSegmentHeader(file, num); err != nil {
		return nil, err
	}
	if err := l.o.FS.Rename(l.path(tmpName), l.path(segmentName(num))); err != nil {
		return nil, err
	}
	if err := l.o.FS.SyncDir(l.dir); err != nil {
		return nil, err
	}
	return &segment{num: num, file: file}, nil
}

func (l *Log) fill(file File) error {
	zeros := make([]byte, min(fillBytes, l.o.SegmentBytes))
	pause := time.NewTimer(0)
	defer pause.Stop()
	for off := int64(0); off < l.o.SegmentBytes; off += int64(len(zeros)) {
		select {
		case <-pause.C:
		case <-l.stop:
			return ErrClosed
		}
		if l.waits.Load() {
			return nil
		}
		if _, err := file.WriteAt(zeros[:min(int64(len(zeros)), l.o.SegmentBytes-off)], off); err != nil {
			return err
		}
		if err := file.Sync(); err != nil {
			return err
		}
		pause.Reset(fillPause)
	}
	return nil
}

func readFull(f File, b []byte, off int64) error {
	n, err := f.ReadAt(b, off)
	if n == len(b) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
