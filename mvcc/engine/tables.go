package engine

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/objstorage/objstorageprovider"
	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// tableBytesMax is the size at which a staged table is closed.
const tableBytesMax = 64 << 20

// tables writes a sorted sequence of records into as many tables as it needs. Memory is one
// table's index and filter.
type tables struct {
	fs     vfs.FS
	popt   *pebble.Options
	format sstable.TableFormat
	name   func(n int) string
	paths  []string
	w      *sstable.Writer
	bytes  int64 // in the open table
	max    int64
	last   []byte // prefix of the last key: a key's versions stay in one table
}

func (t *tables) writer(key []byte) (*sstable.Writer, error) {
	prefix := key[:splitKey(key)]
	if t.w != nil && t.bytes >= t.max && string(prefix) != string(t.last) {
		if err := t.closeTable(); err != nil {
			return nil, err
		}
	}
	t.last = append(t.last[:0], prefix...)
	if t.w == nil {
		path := t.name(len(t.paths))
		f, err := t.fs.Create(path, vfs.WriteCategoryUnspecified)
		if err != nil {
			return nil, fmt.Errorf("engine: stage: %w", err)
		}
		t.paths = append(t.paths, path)
		t.w = sstable.NewWriter(objstorageprovider.NewFileWritable(f), t.popt.MakeWriterOptions(0, t.format))
		t.bytes = 0
	}
	return t.w, nil
}

func (t *tables) set(key, value []byte) error {
	w, err := t.writer(key)
	if err != nil {
		return err
	}
	t.bytes += int64(len(key) + len(value))
	return w.Set(key, value)
}

func (t *tables) merge(key, value []byte) error {
	w, err := t.writer(key)
	if err != nil {
		return err
	}
	return w.Merge(key, value)
}

func (t *tables) delete(key []byte) error {
	w, err := t.writer(key)
	if err != nil {
		return err
	}
	t.bytes += int64(len(key))
	return w.Delete(key)
}

// closeTable finishes the open table: it is complete and synced afterwards.
func (t *tables) closeTable() error {
	if t.w == nil {
		return nil
	}
	err := t.w.Close()
	t.w = nil
	if err != nil {
		return fmt.Errorf("engine: stage: %w", err)
	}
	return nil
}

// slotSorter sorts index records (encoded slot, then key) that come in key order into slot order,
// in bounded memory: full buffers are sorted into tables, which Pebble merges.
type slotSorter struct {
	t        tables // a table per run; t.max is never reached within one
	pairs    []pair
	bytes    int64
	bytesMax int64
	runs     [][]sstable.ReadableFile
}

type pair struct{ key, value []byte }

// slotSortBytes is the buffer of one sorter.
const slotSortBytes = 16 << 20

func (s *slotSorter) add(key, value []byte) error {
	buf := append(append(make([]byte, 0, len(key)+len(value)), key...), value...)
	s.pairs = append(s.pairs, pair{buf[:len(key):len(key)], buf[len(key):]})
	s.bytes += int64(len(buf)) + 48
	if s.bytes < s.bytesMax {
		return nil
	}
	return s.spill()
}

func (s *slotSorter) spill() error {
	s.sort()
	for _, p := range s.pairs {
		if err := s.t.set(p.key, p.value); err != nil {
			return err
		}
	}
	s.pairs, s.bytes = s.pairs[:0], 0
	return s.t.closeTable()
}

// iterate returns the records in order. The sorter takes no more.
func (s *slotSorter) iterate() (pairIter, error) {
	if len(s.t.paths) == 0 {
		s.sort()
		return &pairSlice{pairs: s.pairs}, nil
	}
	if len(s.pairs) > 0 {
		if err := s.spill(); err != nil {
			return nil, err
		}
	}
	for _, path := range s.t.paths {
		f, err := s.t.fs.Open(path)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("engine: stage: %w", err), s.closeRuns())
		}
		s.runs = append(s.runs, []sstable.ReadableFile{f})
	}
	it, err := pebble.NewExternalIter(s.t.popt, &pebble.IterOptions{}, s.runs)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("engine: stage: %w", err), s.closeRuns())
	}
	s.runs = nil // the iterator closes them
	return &pairRuns{it: it}, nil
}

func (s *slotSorter) closeRuns() (err error) {
	for _, r := range s.runs {
		err = errors.Join(err, r[0].Close())
	}
	s.runs = nil
	return err
}

// pairIter yields records in order; the slices are valid until the next call.
type pairIter interface {
	next() (p pair, ok bool, err error)
	close() error
}

type pairSlice struct{ pairs []pair }

func (s *pairSlice) next() (p pair, ok bool, err error) {
	if len(s.pairs) == 0 {
		return p, false, nil
	}
	p, s.pairs = s.pairs[0], s.pairs[1:]
	return p, true, nil
}

func (s *pairSlice) close() error { return nil }

type pairRuns struct {
	it      *pebble.Iterator
	started bool
}

func (r *pairRuns) next() (p pair, ok bool, err error) {
	if r.started {
		ok = r.it.Next()
	} else {
		r.started, ok = true, r.it.First()
	}
	if !ok {
		return p, false, r.it.Error()
	}
	v, err := r.it.ValueAndErr()
	return pair{r.it.Key(), v}, true, err
}

func (r *pairRuns) close() error { return r.it.Close() }

func (s *slotSorter) sort() {
	slices.SortFunc(s.pairs, func(a, b pair) int { return bytes.Compare(a.key, b.key) })
}
