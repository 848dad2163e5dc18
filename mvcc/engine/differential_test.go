package engine

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"braid/mvcc"
)

// TestDifferential drives the engine and the model through the same random history of batches,
// flushes, collections, restarts, exports and imports, and compares all they can answer.
func TestDifferential(t *testing.T) {
	seeds, steps := uint64(25), 150
	if testing.Short() {
		seeds = 5
	}
	for seed := range seeds {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			w := &world{t: t, h: newHistory(seed), fs: vfs.NewMem(), m: mvcc.NewMemStore()}
			w.e = openMem(t, w.fs)
			for range steps {
				w.step()
			}
			w.unpin()
			checkEqual(t, w.e, w.m, w.h)
			if err := w.e.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// world is an engine and the model of what it holds.
type world struct {
	t     *testing.T
	h     *history
	fs    vfs.FS
	e     *Engine
	m     *mvcc.MemStore
	floor [5]mvcc.Revision // per group

	pin     *Snapshot // with what it showed when it was taken
	pinAt   mvcc.Revision
	pinDump string
}

func (w *world) step() {
	group := uint64(1 + w.h.rng.IntN(4))
	switch p := w.h.rng.IntN(100); {
	case p < 70:
		w.write(group)
	case p < 75:
		w.must(w.e.Flush())
	case p < 83:
		w.gc(group)
	case p < 87:
		w.unpin()
		w.must(w.e.Close())
		w.e = openMem(w.t, w.fs)
	case p < 90:
		w.goBack(group)
	case p < 93:
		w.unpin()
		var err error
		w.pin, err = w.e.Snapshot()
		w.must(err)
		w.pinAt = w.h.rev / 2
		w.pinDump = dump(w.t, w.pin, mvcc.Span{}, mvcc.Latest, w.pinAt)
	default:
		checkEqual(w.t, w.e, w.m, w.h)
	}
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) write(group uint64) {
	events, position := w.h.batch(group)
	commit(w.t, w.e, group, events, position)
	commit(w.t, w.m, group, events, position)
}

func (w *world) gc(group uint64) {
	from := w.floor[group]
	to := from + mvcc.Revision(w.h.rng.Int64N(int64(w.h.rev-from+1)))
	got, err := w.e.GC(context.Background(), groupSpan(group), from, to, nil)
	w.must(err)
	want := w.m.GC(groupSpan(group), from, to)
	if got.Removed != want.Removed || got.Bytes != want.Bytes || !got.Complete {
		w.t.Fatalf("collected %+v, model %+v", got, want)
	}
	w.floor[group] = to
}

// goBack moves a replica on and returns it, by its own snapshot, to what it was: the index records
// of what is taken back must go.
func (w *world) goBack(group uint64) {
	stream, pos := export(w.t, w.e, group)
	data, _ := w.m.ExportSpan(group, groupSpan(group))
	saved := w.h.clone()
	for range w.h.rng.IntN(4) {
		w.write(group)
	}
	saved.rng = w.h.rng
	w.h = saved
	w.must(w.m.InstallSpan(group, data, pos))
	install(w.t, w.e, group, stream, pos)
}

// unpin checks that a pinned snapshot still shows what it showed.
func (w *world) unpin() {
	if w.pin != nil {
		compare(w.t, dump(w.t, w.pin, mvcc.Span{}, mvcc.Latest, w.pinAt), w.pinDump)
		w.must(w.pin.Close())
		w.pin = nil
	}
}

// export returns a group's stream and position.
func export(t testing.TB, e *Engine, group uint64) (stream, position []byte) {
	t.Helper()
	s, err := e.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var b bytes.Buffer
	if err := s.Export(context.Background(), groupSpan(group), &b); err != nil {
		t.Fatal(err)
	}
	position, _, err = s.Position(group)
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes(), position
}

// install takes a stream in, in pieces.
func install(t testing.TB, e *Engine, group uint64, stream, position []byte) {
	t.Helper()
	i := stage(t, e, group, stream)
	if err := i.Install(position); err != nil {
		t.Fatal(err)
	}
	if err := i.Close(); err != nil {
		t.Fatal(err)
	}
}

func stage(t testing.TB, e *Engine, group uint64, stream []byte) *Import {
	t.Helper()
	i, err := e.NewImport(group, groupSpan(group))
	if err != nil {
		t.Fatal(err)
	}
	i.fresh.setBytesMax(512) // several runs
	i.data.max = 1024        // several tables
	for len(stream) > 0 {
		n := min(len(stream), 100)
		if _, err := i.Write(stream[:n]); err != nil {
			t.Fatal(err)
		}
		stream = stream[n:]
	}
	return i
}
