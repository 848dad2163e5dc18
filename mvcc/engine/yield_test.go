package engine

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"braid/mvcc"
)

// TestFlushYields: a flush lets others run after each block, not when the scheduler interrupts it.
func TestFlushYields(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	e, err := Open(Options{Dir: "d", FS: vfs.NewMem()}) // no system calls, at which others run as well
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	const batches, puts, valueBytes = 100, 100, 1000
	value := make([]byte, valueBytes)
	for i := range value {
		value[i] = byte(i * i)
	}
	for i := range batches {
		b := e.NewBatch()
		for j := range puts {
			k := i*puts + j
			copy(value, fmt.Sprint(k))
			if err := b.Put(&mvcc.Version{Key: fmt.Appendf(nil, "%08d", k), Mod: mvcc.Revision(k + 2), Create: mvcc.Revision(k + 2), Version: 1, Value: value}); err != nil {
				t.Fatal(err)
			}
		}
		if err := b.Commit(); err != nil {
			t.Fatal(err)
		}
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
	}
	flushed := make(chan error, 1)
	go func() { flushed <- e.Flush() }()
	for turns := 0; ; turns++ {
		select {
		case err := <-flushed:
			if blocks := int(e.Metrics().FlushedBytes) / blockBytes; err != nil || blocks < 20 || turns < blocks {
				t.Errorf("%d turns beside a flush of %d blocks: %v", turns, blocks, err)
			} else {
				t.Logf("%d turns beside a flush of %d blocks", turns, blocks)
			}
			return
		default:
			runtime.Gosched()
		}
	}
}
