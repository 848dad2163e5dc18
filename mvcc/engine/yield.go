package engine

import (
	"runtime"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// yieldingFS makes flushes and compactions give way to whoever else has something to do, each time they have
// written a block of a table. They are loops of a second and more, and on a machine of two cores the two of
// them are as many as there are threads to run anything: a request, which passes from goroutine to goroutine
// a dozen times, would wait for the scheduler to interrupt them each time, which it does after ten
// milliseconds.
type yieldingFS struct{ vfs.FS }

// Create implements vfs.FS.
func (fs yieldingFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, category)
	if err != nil || !strings.HasSuffix(name, ".sst") {
		return f, err
	}
	return yieldingFile{f}, nil
}

// Unwrap implements vfs.FS.
func (fs yieldingFS) Unwrap() vfs.FS { return fs.FS }

type yieldingFile struct{ vfs.File }

func (f yieldingFile) Write(p []byte) (int, error) {
	n, err := f.File.Write(p)
	runtime.Gosched()
	return n, err
}
