// Package engine implements mvcc.Store over one Pebble per store, without Pebble's own log: the
// raft logs are the log.
//
// It is the state of all replicas of a node: versions of keys, the revision index (which event
// happened at which revision), and the applied position of every group. It is not durable by
// itself: a batch is visible at once and survives a crash once a flush has covered it, and what a
// crash leaves is a prefix of the batches in commit order, positions included. It knows no raft,
// no clock and no network, and does not check that a read lies above a compaction floor: who
// pins what is the caller's knowledge (C1, C2).
//
// The life of an Engine: Open, many batches and reads from any goroutine, OnFlush after each
// flush so that logs can be cut at DurablePosition (D6), GC, Snapshot/Export on one node and
// Import/Install on another (D3), Close, which flushes. The Engine owns one goroutine besides
// Pebble's; Close waits for it.
package engine

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"

	"braid/mvcc"
)

// Options configure an Engine. Zero means the default.
type Options struct {
	// Dir holds Pebble's files, a FORMAT file, and import-* folders while snapshots come in.
	Dir string
	// FS is the file system; nil is the operating system's.
	FS vfs.FS
	// CacheBytes is what the cache of uncompressed blocks has while one memtable waits for its
	// flush; it has more while none does, and less while several do. Default 128 MiB.
	CacheBytes int64
	// MemTableBytes is the size at which a memtable is flushed; up to four exist. Default 64 MiB.
	MemTableBytes int64
	// Logger gets Pebble's messages: errors as errors, all else as debug. Default none.
	Logger *zap.Logger
	// OnFlush is called after each flush, one call at a time, from a goroutine of the engine.
	// Flushes that end close together may share a call. It may read the engine.
	OnFlush func()
	// OnFatal is called once, from any goroutine, when the engine can no longer promise to keep
	// what it accepted (a failed write or sync, damage). The node must stop. When Pebble cannot
	// go on at all the engine panics after OnFatal returns; without OnFatal it always panics.
	OnFatal func(error)
}

const (
	cacheBytesDefault    = 128 << 20
	memTableBytesDefault = 64 << 20
	memTablesMax         = 4  // Pebble stops writes when so many wait for their flush
	l0SublevelsMax       = 24 // ... or when reads would have to look into so many layers
	filterBitsPerKey     = 10
	blockBytes           = 32 << 10
)

// WithDefaults returns the options with every zero replaced.
func (o Options) WithDefaults() Options {
	if o.FS == nil {
		o.FS = vfs.Default
	}
	if o.CacheBytes == 0 {
		o.CacheBytes = cacheBytesDefault
	}
	if o.MemTableBytes == 0 {
		o.MemTableBytes = memTableBytesDefault
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	return o
}

// Validate reports options that cannot work.
func (o Options) Validate() error {
	switch {
	case o.Dir == "":
		return errors.New("engine: no directory")
	case o.CacheBytes < 0 || o.MemTableBytes < 0:
		return errors.New("engine: negative size")
	case o.MemTableBytes > 0 && o.MemTableBytes < 16<<10:
		return fmt.Errorf("engine: a memtable of %d bytes is too small", o.MemTableBytes)
	}
	return nil
}

// Engine is an open store. All methods may be called from any goroutine until Close.
type Engine struct {
	reader // reads of the latest state

	o    Options
	db   *pebble.DB
	popt *pebble.Options

	logical atomic.Int64 // totals.bytes; as durable as what it counts
	live    atomic.Int64 // totals.keys
	maxMod  atomic.Int64 // no index record is above it (R1's fast path)

	pressure pressure
	notify   notifier

	fatalOnce sync.Once
	fatal     chan struct{} // closed after the first fatal error

	installs installs // keeps GC away from spans that are being replaced

	gc        gcLimits
	importSeq atomic.Uint64 // names of import folders
}

var _ mvcc.Store = (*Engine)(nil)

var keyTotals = []byte{spaceMeta, 't', 'o', 't', 'a', 'l', 's'}

// Open opens the store in o.Dir, creating it when the directory is empty or missing.
func Open(o Options) (*Engine, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o = o.WithDefaults()
	if err := o.FS.MkdirAll(o.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("engine: create %s: %w", o.Dir, err)
	}
	if err := checkFormat(o.FS, o.Dir); err != nil {
		return nil, err
	}
	if err := removeImports(o.FS, o.Dir); err != nil {
		return nil, err
	}
	e := &Engine{o: o, fatal: make(chan struct{}), gc: gcLimits{gcVisitsMax, gcRemovesMax}}
	e.pressure.growing.Store(true)
	e.notify.init(e.onNotify)
	e.popt = e.pebbleOptions()
	db, err := pebble.Open(o.Dir, e.popt)
	if err != nil {
		return nil, fmt.Errorf("engine: open %s: %w", o.Dir, err)
	}
	e.db = db
	e.reader = reader{src: dbSource{db}}
	if err := e.load(); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	e.notify.start()
	return e, nil
}

// load reads the totals that live in memory.
func (e *Engine) load() error {
	enc, closer, err := e.db.Get(keyTotals)
	if err == nil {
		t, err := decodeSum(enc)
		if err = errors.Join(err, closer.Close()); err != nil {
			return fmt.Errorf("engine: totals: %w", err)
		}
		e.count(t)
	} else if !errors.Is(err, pebble.ErrNotFound) {
		return fmt.Errorf("engine: totals: %w", err)
	}
	it, err := e.db.NewIter(&pebble.IterOptions{
		LowerBound: []byte{spaceIndex}, UpperBound: []byte{spaceIndex + 1}})
	if err != nil {
		return fmt.Errorf("engine: last revision: %w", err)
	}
	if it.Last() {
		var rev mvcc.Revision
		if rev, _, err = decodeIndexKey(it.Key()); err == nil {
			e.maxMod.Store(int64(rev))
		}
	}
	if err = errors.Join(err, it.Close()); err != nil {
		return fmt.Errorf("engine: last revision: %w", err)
	}
	return nil
}

func (e *Engine) pebbleOptions() *pebble.Options {
	po := &pebble.Options{
		FS:       yieldingFS{e.o.FS},
		Comparer: comparer,
		Merger:   sumMerger,
		// The newest format: older ones write row blocks, and cannot ingest and excise at once.
		FormatMajorVersion: pebble.FormatNewest,
		DisableWAL:         true,
		// Pebble takes the memtables' memory out of the cache's. Without room for them two would
		// leave no cache at all, and each evaluation of a put would unpack an index block.
		CacheSize:                   e.o.CacheBytes + 2*e.o.MemTableBytes,
		MemTableSize:                uint64(e.o.MemTableBytes),
		MemTableStopWritesThreshold: memTablesMax,
		L0CompactionThreshold:       2,
		L0StopWritesThreshold:       l0SublevelsMax,
		LBaseMaxBytes:               max(e.o.MemTableBytes, 1<<20),
		CompactionConcurrencyRange: func() (int, int) {
			return 1, min(max(runtime.GOMAXPROCS(0)-1, 1), 4)
		},
		Logger: pebbleLogger{e},
		EventListener: &pebble.EventListener{
			BackgroundError: func(err error) { e.fail(fmt.Errorf("engine: background work: %w", err)) },
			DataCorruption: func(i pebble.DataCorruptionInfo) {
				e.fail(fmt.Errorf("engine: damaged file %s: %w", i.Path, i.Details))
			},
			FlushEnd:        e.onFlushEnd,
			CompactionEnd:   func(pebble.CompactionInfo) { e.notify.kick() },
			WriteStallBegin: func(pebble.WriteStallBeginInfo) { e.pressure.stall(true) },
			WriteStallEnd:   func() { e.pressure.stall(false); e.notify.kick() },
		},
	}
	po.Experimental.ShortAttributeExtractor = valueAttribute
	for i := range po.Levels {
		po.Levels[i].BlockSize = blockBytes
		po.Levels[i].FilterPolicy = bloom.FilterPolicy(filterBitsPerKey)
	}
	po.EnsureDefaults()
	return po
}

// Flush makes everything visible durable. It returns early when the engine has failed.
func (e *Engine) Flush() error {
	done, err := e.db.AsyncFlush()
	if err != nil {
		return fmt.Errorf("engine: flush: %w", err)
	}
	select {
	case <-done:
		return nil
	case <-e.fatal:
		// Pebble repeats a failed flush for ever.
		return errors.New("engine: flush after a fatal error")
	}
}

// Close flushes and closes. No other call may be running or follow.
func (e *Engine) Close() error {
	err := e.Flush()
	e.notify.stop()
	return errors.Join(err, e.db.Close())
}

// fail reports the first fatal error.
func (e *Engine) fail(err error) {
	e.fatalOnce.Do(func() {
		e.o.Logger.Error("state engine failed", zap.Error(err))
		close(e.fatal)
		if e.o.OnFatal == nil {
			panic(err)
		}
		e.o.OnFatal(err)
	})
}

// pebbleLogger hands Pebble's messages on.
type pebbleLogger struct{ e *Engine }

func (l pebbleLogger) Infof(format string, args ...any) {
	if ce := l.e.o.Logger.Check(zap.DebugLevel, "pebble"); ce != nil {
		ce.Write(zap.String("event", strings.TrimSpace(fmt.Sprintf(format, args...))))
	}
}

func (l pebbleLogger) Errorf(format string, args ...any) {
	l.e.o.Logger.Error("pebble", zap.String("event", fmt.Sprintf(format, args...)))
}

// Fatalf must not return: Pebble calls it where it cannot go on, with locks held.
func (l pebbleLogger) Fatalf(format string, args ...any) {
	err := fmt.Errorf("engine: "+format, args...)
	l.e.fail(err)
	panic(err)
}

// isNotExist covers the file systems of tests as well.
func isNotExist(err error) bool { return errors.Is(err, os.ErrNotExist) }
