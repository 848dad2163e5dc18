package engine

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"braid/mvcc"
)

// TestGCCutShort stops a collection after each of its chunks and crashes there: reads at or above
// the floor answer as before, and the collection, repeated with the same bounds, ends where an
// undisturbed one does.
func TestGCCutShort(t *testing.T) {
	h := newHistory(11)
	fs := vfs.NewCrashableMem()
	e := openMem(t, fs)
	m := mvcc.NewMemStore()
	for range 150 {
		events, position := h.batch(1)
		commit(t, e, 1, events, position)
		commit(t, m, 1, events, position)
	}
	if err := e.Flush(); err != nil {
		t.Fatal(err)
	}
	floor := h.rev - 10
	reads := func(r mvcc.Reader) (out string) {
		for at := floor; at <= h.rev; at++ {
			err := r.Scan(mvcc.Span{}, at, mvcc.ScanOptions{}, func(v *mvcc.Version) bool {
				out += fmt.Sprintln(at, v)
				return true
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		return out
	}
	want := reads(m)
	m.GC(mvcc.Span{}, 0, floor)
	stop := errors.New("stop")
	for chunk := 1; ; chunk++ {
		n := 0
		st, err := e.GC(context.Background(), mvcc.Span{}, 0, floor, func(int) error {
			if n++; n == chunk {
				return stop
			}
			return nil
		})
		if err == nil && st.Complete {
			if chunk < 3 {
				t.Errorf("only %d chunks", chunk)
			}
			break
		}
		if !errors.Is(err, stop) {
			t.Fatal(err)
		}
		compare(t, reads(e), want)
		checkIndex(t, e)
		if err := e.Flush(); err != nil {
			t.Fatal(err)
		}
		crashed := fs.CrashClone(vfs.CrashCloneCfg{})
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		fs = crashed
		e = openMem(t, fs)
		compare(t, reads(e), want)
	}
	compare(t, groupDump(t, e, 1), groupDump(t, m, 1))
	if e.LogicalBytes() != m.LogicalBytes() {
		t.Errorf("%d logical bytes, model %d", e.LogicalBytes(), m.LogicalBytes())
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}
