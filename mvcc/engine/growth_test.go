package engine

import (
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"braid/mvcc"
)

// TestGrowth: the small memtables that Pebble begins with do not pile up until they have half the
// size of a full one.
func TestGrowth(t *testing.T) {
	flushed := make(chan struct{}, 1)
	e, err := Open(Options{Dir: "d", FS: vfs.NewMem(), OnFlush: func() {
		select {
		case flushed <- struct{}{}:
		default:
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}()
	value := make([]byte, 1<<10)
	for i := range 2 << 10 { // 2 MiB of 64
		b := e.NewBatch()
		rev := mvcc.Revision(i + 2)
		if err := b.Put(&mvcc.Version{Key: fmt.Appendf(nil, "k%d", i), Mod: rev, Create: rev, Version: 1, Value: value}); err != nil {
			t.Fatal(err)
		}
		if err := b.Commit(); err != nil {
			t.Fatal(err)
		}
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
	}
	<-flushed // for ever without
}
