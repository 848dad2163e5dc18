package dbfile

import (
	"bufio"
	"cmp"
	"container/heap"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"
)

const (
	// runBytesMax bounds what is sorted in memory at a time.
	runBytesMax = 16 << 20
	// readBytes is the buffer of each run when they are merged.
	readBytes = 32 << 10
	// entryBytes is what an entry costs in memory besides its data.
	entryBytes = 24
	// headBytes is the revision and the length before each key-value in the file.
	headBytes = 8 + 4
)

// runs sorts key-values by their revisions: those that fit into memory are sorted and written as one
// run, and the runs are merged. Those of one revision stay in the order in which they came.
type runs struct {
	file  *os.File // nil when closed
	room  func() error
	max   int
	ends  []int64 // of the runs in the file
	data  []byte  // of the next run
	index []entry
}

// entry is where a key-value lies in runs.data.
type entry struct {
	rev     int64
	at, end int
}

func newRuns(path string, bytesMax int, room func() error) (*runs, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	return &runs{file: f, room: room, max: bytesMax, data: make([]byte, 0, bytesMax)}, nil
}

func (r *runs) add(kv *mvccpb.KeyValue) error {
	at := len(r.data)
	var err error
	if r.data, err = (proto.MarshalOptions{}).MarshalAppend(r.data, kv); err != nil {
		return err
	}
	r.index = append(r.index, entry{rev: kv.ModRevision, at: at, end: len(r.data)})
	if len(r.data)+entryBytes*len(r.index) < r.max {
		return nil
	}
	return r.spill()
}

// spill writes what is in memory as a run.
func (r *runs) spill() error {
	if len(r.index) == 0 {
		return nil
	}
	if err := r.room(); err != nil {
		return err
	}
	slices.SortStableFunc(r.index, func(a, b entry) int { return cmp.Compare(a.rev, b.rev) })
	end := int64(0)
	if n := len(r.ends); n > 0 {
		end = r.ends[n-1]
	}
	out := bufio.NewWriterSize(r.file, 256<<10)
	var head [headBytes]byte
	for _, e := range r.index {
		binary.BigEndian.PutUint64(head[:8], uint64(e.rev))
		binary.BigEndian.PutUint32(head[8:], uint32(e.end-e.at))
		out.Write(head[:]) // Flush returns the error
		out.Write(r.data[e.at:e.end])
		end += int64(headBytes + e.end - e.at)
	}
	r.ends = append(r.ends, end)
	r.data, r.index = r.data[:0], r.index[:0]
	return out.Flush()
}

// merge calls fn with all that was spilled, in order. fn may keep the values. The buffers for adding
// are given back; nothing can be added any more.
func (r *runs) merge(fn func(rev int64, value []byte) error) error {
	r.data, r.index = nil, nil
	var heads heads
	start := int64(0)
	for i, end := range r.ends {
		h := &head{run: i, in: bufio.NewReaderSize(io.NewSectionReader(r.file, start, end-start), readBytes)}
		start = end
		if err := h.next(); err != nil {
			return noEnd(err)
		}
		heads = append(heads, h)
	}
	heap.Init(&heads)
	for len(heads) > 0 {
		h := heads[0]
		if err := fn(h.rev, h.value); err != nil {
			return err
		}
		switch err := h.next(); {
		case err == nil:
			heap.Fix(&heads, 0)
		case errors.Is(err, io.EOF):
			heap.Pop(&heads)
		default:
			return err
		}
	}
	return nil
}

// noEnd is for a run that must have something.
func noEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (r *runs) close() error {
	if r.file == nil {
		return nil
	}
	f := r.file
	r.file = nil
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// head is the first key-value of what is left of a run.
type head struct {
	run   int
	in    *bufio.Reader
	rev   int64
	value []byte
}

// next returns io.EOF at the end of the run.
func (h *head) next() error {
	var b [headBytes]byte
	if _, err := io.ReadFull(h.in, b[:]); err != nil {
		return err
	}
	h.rev = int64(binary.BigEndian.Uint64(b[:8]))
	h.value = make([]byte, binary.BigEndian.Uint32(b[8:]))
	if _, err := io.ReadFull(h.in, h.value); err != nil {
		return fmt.Errorf("dbfile: run %d: %w", h.run, noEnd(err))
	}
	return nil
}

// heads is a heap. Runs came in the order of keys.
type heads []*head

func (h heads) Len() int      { return len(h) }
func (h heads) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h heads) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(h[i].rev, h[j].rev), cmp.Compare(h[i].run, h[j].run)) < 0
}
func (h *heads) Push(x any) { *h = append(*h, x.(*head)) }
func (h *heads) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}
