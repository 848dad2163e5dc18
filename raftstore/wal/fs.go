package wal

import (
	"errors"
	"io"
)

// ErrLocked is returned by FS.Lock when another process holds the lock.
var ErrLocked = errors.New("wal: locked by another process")

// FS is the file system below a log. The log relies on these promises and on no others:
//
//   - data is durable after File.Sync; before that any 512-byte sector of it may or may not
//     survive a crash, each on its own, but no sector is torn;
//   - names are durable after SyncDir; a file's data is durable under whatever name it has.
type FS interface {
	// MkdirAll makes dir and its parents, durably.
	MkdirAll(dir string) error
	// Create makes an empty file, replacing one of that name.
	Create(name string) (File, error)
	// Open opens an existing file for reading and writing.
	Open(name string) (File, error)
	// Rename gives a file a new name. An open File stays valid.
	Rename(oldName, newName string) error
	Remove(name string) error
	// List returns the base names of the files in dir, in any order.
	List(dir string) ([]string, error)
	// SyncDir makes the names in dir durable.
	SyncDir(dir string) error
	// Lock takes an exclusive lock that dies with the process; ErrLocked when it is held.
	Lock(name string) (io.Closer, error)
}

// File is an open file. ReadAt may run beside WriteAt and Sync.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	// Sync makes all data written before the call durable, and the size if it grew. Other
	// metadata need not be (fdatasync).
	Sync() error
	// Preallocate reserves size bytes and makes the file that long; it reads as zeros.
	Preallocate(size int64) error
	Size() (int64, error)
}
