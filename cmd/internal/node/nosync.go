package node

import "braid/raftstore/wal"

// walFS is the log's file system: fs, or the operating system's, without syncs when asked to.
func walFS(fs wal.FS, unsafe bool) wal.FS {
	if fs == nil {
		fs = wal.OS
	}
	if unsafe {
		return noSyncFS{fs}
	}
	return fs
}

// noSyncFS is --unsafe-no-fsync: a crash of the machine may lose what was acknowledged.
type noSyncFS struct{ wal.FS }

func (f noSyncFS) Create(name string) (wal.File, error) {
	file, err := f.FS.Create(name)
	return noSyncFile{file}, err
}

func (f noSyncFS) Open(name string) (wal.File, error) {
	file, err := f.FS.Open(name)
	return noSyncFile{file}, err
}

func (noSyncFS) SyncDir(string) error { return nil }

type noSyncFile struct{ wal.File }

func (noSyncFile) Sync() error { return nil }
