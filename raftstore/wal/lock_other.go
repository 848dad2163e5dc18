//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly)

package wal

import (
	"errors"
	"os"
)

// lockFile refuses: a directory that two processes may open at once is no place for a log.
func lockFile(*os.File) error {
	return errors.New("wal: no directory lock on this system")
}
