package node

import "braid/raftstore/wal"

// walFS is the log's file system: the operating system's, without syncs when asked to.
func walFS(unsafe bool) wal.FS {
	if unsafe {
		return noSyncFS{wal.OS}
	}
	return wal.OS
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
