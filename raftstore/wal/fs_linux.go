package wal

import (
	"errors"
	"os"
	"syscall"
)

// datasync is fdatasync: it skips the modification time, which no recovery needs, and with a
// file of settled size and extents so spares the file system's own journal.
func datasync(f *os.File) error {
	for {
		err := syscall.Fdatasync(int(f.Fd()))
		if !errors.Is(err, syscall.EINTR) {
			return os.NewSyscallError("fdatasync", err)
		}
	}
}

func preallocate(f *os.File, size int64) error {
	for {
		err := syscall.Fallocate(int(f.Fd()), 0, 0, size)
		switch {
		case errors.Is(err, syscall.EINTR):
		case errors.Is(err, syscall.EOPNOTSUPP), errors.Is(err, syscall.ENOSYS):
			// The file system cannot reserve; the zero fill that follows does it the slow way.
			return f.Truncate(size)
		default:
			return os.NewSyscallError("fallocate", err)
		}
	}
}
