package engine

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"braid/mvcc"
)

func TestOnFlushSeesDurablePosition(t *testing.T) {
	var e *Engine
	got := make(chan string, 10)
	e, err := Open(Options{Dir: "db", FS: vfs.NewMem(), OnFlush: func() {
		p, _, err := e.DurablePosition(7)
		if err != nil {
			t.Error(err)
		}
		got <- string(p)
	}})
	if err != nil {
		t.Fatal(err)
	}
	commit(t, e, 7, nil, []byte("here"))
	if p, ok, err := e.DurablePosition(7); ok || err != nil {
		t.Fatalf("durable before a flush: %q %v", p, err)
	}
	if err := e.Flush(); err != nil {
		t.Fatal(err)
	}
	if p := <-got; p != "here" {
		t.Fatalf("position %q after the flush", p)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestOnFatalWhenTheDiskFails(t *testing.T) {
	var broken atomic.Bool
	fail := errors.New("disk is full")
	fs := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if broken.Load() && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && strings.HasSuffix(op.Path, ".sst") {
			return fail
		}
		return nil
	}))
	fatal := make(chan error, 1)
	e, err := Open(Options{Dir: "db", FS: fs, OnFatal: func(err error) { fatal <- err }})
	if err != nil {
		t.Fatal(err)
	}
	commit(t, e, 1, newHistory(1).txn(1), []byte("p"))
	broken.Store(true)
	if err := e.Flush(); err == nil {
		t.Error("flush succeeded")
	}
	if err := <-fatal; !errors.Is(err, fail) {
		t.Errorf("fatal: %v", err)
	}
	broken.Store(false) // Pebble goes on trying; let it end
	if err := e.Close(); err == nil {
		t.Error("close hides the failure")
	}
}

func TestFormatRefusals(t *testing.T) {
	write := func(fs vfs.FS, name, text string) {
		f, err := fs.Create(name, vfs.WriteCategoryUnspecified)
		if err == nil {
			_, err = f.Write([]byte(text))
		}
		if err = errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	for _, text := range []string{"braid engine 99\n", "", "something\n"} {
		fs := vfs.NewMem()
		if err := openMem(t, fs).Close(); err != nil {
			t.Fatal(err)
		}
		if err := openMem(t, fs).Close(); err != nil {
			t.Fatalf("second open: %v", err)
		}
		write(fs, "db/FORMAT", text)
		if _, err := Open(Options{Dir: "db", FS: fs}); !errors.Is(err, ErrFormat) {
			t.Errorf("format %q: %v", text, err)
		}
		if err := fs.Remove("db/FORMAT"); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(Options{Dir: "db", FS: fs}); !errors.Is(err, ErrFormat) {
			t.Errorf("without a format: %v", err)
		}
	}
}

func TestSlotTaken(t *testing.T) {
	e := openMem(t, vfs.NewMem())
	defer e.Close()
	put := func(vs ...mvcc.Version) error {
		b := e.NewBatch()
		defer b.Close()
		for i := range vs {
			if err := b.Put(&vs[i]); err != nil {
				return err
			}
		}
		return b.Commit()
	}
	v := func(key string, mod mvcc.Revision, sub int64) mvcc.Version {
		return mvcc.Version{Key: []byte(key), Mod: mod, Sub: sub, Create: mod, Version: 1}
	}
	if err := put(v("a", 5, 0), v("b", 5, 1)); err != nil {
		t.Fatal(err)
	}
	for _, c := range [][]mvcc.Version{
		{v("c", 5, 1)},
		{v("c", 9, 0), v("c", 5, 0)},
		{v("c", 7, 0), v("c", 6, 0), v("d", 7, 0)},
		{v("c", 7, 0), v("d", 7, 0)},
	} {
		if err := put(c...); !errors.Is(err, mvcc.ErrSlotTaken) {
			t.Errorf("%v: %v", c, err)
		}
	}
	size := e.LogicalBytes()
	if err := put(v("b", 5, 1)); err != nil {
		t.Errorf("repetition: %v", err)
	}
	if e.LogicalBytes() != size {
		t.Errorf("a repetition counts twice")
	}
	if err := put(v("c", 4, 0), v("c", 3, 0)); err != nil {
		t.Errorf("free slots out of order: %v", err)
	}
	checkIndex(t, e)
}

// TestConcurrentUse runs readers, a collection and snapshots beside a writer; the race detector
// and the checks on what is read are the test.
func TestConcurrentUse(t *testing.T) {
	e := openMem(t, vfs.NewMem())
	h := newHistory(1)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	loop := func(fn func() error) {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := fn(); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	loop(func() error {
		s, err := e.Snapshot()
		if err != nil {
			return err
		}
		defer s.Close()
		a, b := dump(t, s, mvcc.Span{}, mvcc.Latest), dump(t, s, mvcc.Span{}, mvcc.Latest)
		if a != b {
			return errors.New("snapshot changed")
		}
		return nil
	})
	loop(func() error { _, _, err := e.Get([]byte{1}, mvcc.Latest); return err })
	loop(func() error {
		_, err := e.GC(context.Background(), mvcc.Span{}, 0, mvcc.Revision(e.maxMod.Load()/2), nil)
		return err
	})
	loop(e.Flush)
	for range 300 {
		events, position := h.batch(uint64(1 + h.rng.IntN(4)))
		commit(t, e, 1, events, position)
	}
	close(stop)
	wg.Wait()
	checkIndex(t, e)
	if want := logicalBytes(t, e); e.LogicalBytes() != want {
		t.Errorf("%d logical bytes, versions have %d", e.LogicalBytes(), want)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}
