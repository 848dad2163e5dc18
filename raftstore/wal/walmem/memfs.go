// Package walmem is a file system in memory for tests and simulations of the write-ahead log.
// It can crash: Crash returns what a machine would find after losing power at that moment, and
// an injected function can fail any operation. A FS is safe for concurrent use; it owns all its
// state under one mutex.
package walmem

import (
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"

	"braid/raftstore/wal"
)

// SectorBytes is the unit in which unsynced data survives a crash or does not.
const SectorBytes = 512

// Mode says what a crash keeps of what was not synced.
type Mode int

const (
	// KeepNothing loses everything that was not synced.
	KeepNothing Mode = iota
	// KeepAll keeps everything written, as a killed process (not a lost machine) leaves it.
	KeepAll
	// KeepSome keeps a random set of sectors, in no order, and of the operations on names a
	// random prefix, as a journaling file system does.
	KeepSome
)

// Op describes an operation to an injected function.
type Op struct {
	// Kind is one of "create", "open", "rename", "remove", "syncdir", "write", "sync", "read",
	// "preallocate".
	Kind string
	Name string
	Off  int64
	Len  int
}

// FS is a crashable file system in memory. It implements wal.FS.
type FS struct {
	mu      sync.Mutex
	names   map[string]*inode // as seen now
	durable map[string]*inode // as of the last SyncDir
	pending []func(map[string]*inode)
	locks   map[string]bool
	inject  func(Op) error
}

type inode struct {
	name  string // of the last create or rename, for messages and injection
	data  []byte
	dirty map[int64][]byte // sector number to its content at the last sync
	size  int64            // at the last sync
}

var _ wal.FS = (*FS)(nil)

// New returns an empty file system.
func New() *FS {
	return &FS{names: map[string]*inode{}, durable: map[string]*inode{}, locks: map[string]bool{}}
}

// Inject makes every later operation call fn first, without any lock held; an error fails the
// operation before it has an effect. fn may block. Nil ends it.
func (f *FS) Inject(fn func(Op) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inject = fn
}

func (f *FS) check(op Op) error {
	f.mu.Lock()
	fn := f.inject
	f.mu.Unlock()
	if fn == nil {
		return nil
	}
	return fn(op)
}

// Crash returns the file system that is found after losing power now. The receiver goes on,
// unaffected, so that its users can be closed.
func (f *FS) Crash(rng *rand.Rand, mode Mode) *FS {
	f.mu.Lock()
	defer f.mu.Unlock()
	keep := 0
	switch mode {
	case KeepNothing:
	case KeepAll:
		keep = len(f.pending)
	case KeepSome:
		keep = rng.IntN(len(f.pending) + 1)
	}
	names := maps.Clone(f.durable)
	for _, op := range f.pending[:keep] {
		op(names)
	}
	out := New()
	// In order of names, so that a seed replays exactly.
	for _, name := range slices.Sorted(maps.Keys(names)) {
		n := &inode{name: name, data: names[name].survivor(rng, mode), dirty: map[int64][]byte{}}
		n.size = int64(len(n.data))
		out.names[name], out.durable[name] = n, n
	}
	return out
}

func (n *inode) survivor(rng *rand.Rand, mode Mode) []byte {
	data := slices.Clone(n.data)
	if mode == KeepAll {
		return data
	}
	for _, s := range slices.Sorted(maps.Keys(n.dirty)) {
		if mode == KeepSome && rng.IntN(2) == 0 {
			continue
		}
		if off := s * SectorBytes; off < int64(len(data)) {
			copy(data[off:min(off+SectorBytes, int64(len(data)))], n.dirty[s])
		}
	}
	if int64(len(data)) > n.size && (mode == KeepNothing || rng.IntN(2) == 0) {
		data = data[:n.size]
	}
	return data
}

// Corrupt flips the bits of mask in the byte at off of a file, durably: damage, not a crash.
func (f *FS) Corrupt(name string, off int64, mask byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.names[name]
	if n == nil || off >= int64(len(n.data)) {
		return &fs.PathError{Op: "corrupt", Path: name, Err: fs.ErrNotExist}
	}
	n.data[off] ^= mask
	return nil
}

// Bytes returns a copy of a file's content, nil when there is none.
func (f *FS) Bytes(name string) []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := f.names[name]; n != nil {
		return slices.Clone(n.data)
	}
	return nil
}

// change applies an operation on names now and remembers it until SyncDir. Called with mu held.
func (f *FS) change(op func(map[string]*inode)) {
	op(f.names)
	f.pending = append(f.pending, op)
}

// MkdirAll does nothing: a directory exists by being named.
func (f *FS) MkdirAll(string) error { return nil }

// Create implements wal.FS.
func (f *FS) Create(name string) (wal.File, error) {
	if err := f.check(Op{Kind: "create", Name: name}); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	n := &inode{name: name, dirty: map[int64][]byte{}}
	f.change(func(m map[string]*inode) { m[name] = n })
	return &file{fs: f, node: n}, nil
}

// Open implements wal.FS.
func (f *FS) Open(name string) (wal.File, error) {
	if err := f.check(Op{Kind: "open", Name: name}); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.names[name]
	if n == nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return &file{fs: f, node: n}, nil
}

// Rename implements wal.FS.
func (f *FS) Rename(oldName, newName string) error {
	if err := f.check(Op{Kind: "rename", Name: oldName}); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.names[oldName]
	if n == nil {
		return &fs.PathError{Op: "rename", Path: oldName, Err: fs.ErrNotExist}
	}
	f.change(func(m map[string]*inode) { delete(m, oldName); m[newName] = n })
	n.name = newName
	return nil
}

// Remove implements wal.FS.
func (f *FS) Remove(name string) error {
	if err := f.check(Op{Kind: "remove", Name: name}); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.names[name] == nil {
		return &fs.PathError{Op: "remove", Path: name, Err: fs.ErrNotExist}
	}
	f.change(func(m map[string]*inode) { delete(m, name) })
	return nil
}

// List implements wal.FS.
func (f *FS) List(dir string) ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	for name := range f.names {
		if filepath.Dir(name) == filepath.Clean(dir) {
			out = append(out, filepath.Base(name))
		}
	}
	slices.Sort(out)
	return out, nil
}

// SyncDir implements wal.FS. It makes all names durable, of every directory.
func (f *FS) SyncDir(dir string) error {
	if err := f.check(Op{Kind: "syncdir", Name: dir}); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.durable, f.pending = maps.Clone(f.names), nil
	return nil
}

// Lock implements wal.FS. A crashed copy starts without locks.
func (f *FS) Lock(name string) (io.Closer, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.locks[name] {
		return nil, wal.ErrLocked
	}
	f.locks[name] = true
	return &lock{f, name}, nil
}

type lock struct {
	fs   *FS
	name string
}

func (l *lock) Close() error {
	l.fs.mu.Lock()
	defer l.fs.mu.Unlock()
	delete(l.fs.locks, l.name)
	return nil
}

type file struct {
	fs   *FS
	node *inode
}

// touch remembers what sectors [off, end) held at the last sync. Called with mu held.
func (n *inode) touch(off, end int64) {
	for s := off / SectorBytes; s*SectorBytes < end; s++ {
		if _, ok := n.dirty[s]; ok {
			continue
		}
		old := make([]byte, SectorBytes)
		if o := s * SectorBytes; o < int64(len(n.data)) {
			copy(old, n.data[o:])
		}
		n.dirty[s] = old
	}
}

func (n *inode) grow(size int64) {
	if size > int64(len(n.data)) {
		n.data = append(n.data, make([]byte, size-int64(len(n.data)))...)
	}
}

func (h *file) op(kind string, off int64, n int) error {
	h.fs.mu.Lock()
	name := h.node.name
	h.fs.mu.Unlock()
	return h.fs.check(Op{Kind: kind, Name: name, Off: off, Len: n})
}

func (h *file) WriteAt(p []byte, off int64) (int, error) {
	if err := h.op("write", off, len(p)); err != nil {
		return 0, err
	}
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	end := off + int64(len(p))
	h.node.touch(off, end)
	h.node.grow(end)
	return copy(h.node.data[off:], p), nil
}

func (h *file) ReadAt(p []byte, off int64) (int, error) {
	if err := h.op("read", off, len(p)); err != nil {
		return 0, err
	}
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	if off < 0 {
		return 0, fmt.Errorf("walmem: negative offset %d", off)
	}
	if off >= int64(len(h.node.data)) {
		return 0, io.EOF
	}
	n := copy(p, h.node.data[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (h *file) Sync() error {
	if err := h.op("sync", 0, 0); err != nil {
		return err
	}
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	clear(h.node.dirty)
	h.node.size = int64(len(h.node.data))
	return nil
}

func (h *file) Preallocate(size int64) error {
	if err := h.op("preallocate", 0, int(size)); err != nil {
		return err
	}
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	h.node.grow(size)
	return nil
}

func (h *file) Size() (int64, error) {
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	return int64(len(h.node.data)), nil
}

func (h *file) Close() error { return nil }
