//go:build !linux

package wal

import (
	"errors"
	"os"
)

func datasync(f *os.File) error { return f.Sync() }

func preallocate(f *os.File, size int64) error { return f.Truncate(size) }

// lockFile refuses: a directory that two processes may open at once is no place for a log.
func lockFile(*os.File) error {
	return errors.New("wal: no directory lock on this system")
}
