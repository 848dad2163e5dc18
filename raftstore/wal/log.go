package wal

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"braid/raftstore/raftid"
)

// ErrInUse says that another process has the log's directory open.
var ErrInUse = errors.New("data directory in use by another process")

// ErrClosed is the state of a log after Close.
var ErrClosed = errors.New("wal: closed")

// Options of a log. Zero values mean the defaults.
type Options struct {
	// FS is the file system, OS by default.
	FS FS
	// SegmentBytes is the size of a segment file, 64 MiB by default; at least 16 KiB.
	SegmentBytes int64
	// SegmentsKept is how many segments may hold live records before stragglers are moved out
	// of the oldest, 4 by default.
	SegmentsKept int
	// CacheBytes bounds the entries kept in memory beside those not yet written, 64 MiB by
	// default.
	CacheBytes int64
	// QueueBytesMax is where Full begins to say so, 64 MiB by default.
	QueueBytesMax int64
	// BatchBytesMax bounds what one sync covers, 4 MiB by default; a larger record goes alone (B9).
	BatchBytesMax int64
	// HoldGroup is the group whose records wake the writer under shared fsync: the placement
	// group by default.
	HoldGroup raftid.GroupID
	// HoldMax is how long a record may wait for that, 500 us by default.
	HoldMax time.Duration
	// OnFatal is called once, from a goroutine of the log, when a write or a sync failed, or the
	// rewriter found damage. Nothing is acknowledged after that; the node must stop. It must not
	// call Close, which waits for that goroutine.
	OnFatal func(error)
	// OnSync is called from the writer's goroutine after each batch with the time its write and
	// sync took.
	OnSync func(d time.Duration, records, bytes int)
	Logger *zap.Logger
}

// SegmentBytesMin is the smallest allowed Options.SegmentBytes.
const SegmentBytesMin = 4 * blockBytes

func (o Options) withDefaults() (Options, error) {
	if o.FS == nil {
		o.FS = OS
	}
	o.SegmentBytes = cmp.Or(o.SegmentBytes, 64<<20)
	o.SegmentsKept = cmp.Or(o.SegmentsKept, 4)
	o.CacheBytes = cmp.Or(o.CacheBytes, 64<<20)
	o.QueueBytesMax = cmp.Or(o.QueueBytesMax, 64<<20)
	o.BatchBytesMax = cmp.Or(o.BatchBytesMax, 4<<20)
	o.HoldGroup = cmp.Or(o.HoldGroup, raftid.PDGroup)
	o.HoldMax = cmp.Or(o.HoldMax, 500*time.Microsecond)
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.OnFatal == nil {
		o.OnFatal = func(error) {}
	}
	if o.OnSync == nil {
		o.OnSync = func(time.Duration, int, int) {}
	}
	switch {
	case o.SegmentBytes < SegmentBytesMin || o.SegmentBytes > 1<<30:
		return o, fmt.Errorf("wal: segment size %d is not within [%d, 1 GiB]", o.SegmentBytes, SegmentBytesMin)
	case o.SegmentsKept < 2:
		return o, fmt.Errorf("wal: %d segments kept, at least 2 are needed", o.SegmentsKept)
	case o.BatchBytesMax < 1 || o.BatchBytesMax > 1<<30:
		return o, fmt.Errorf("wal: batch size %d is not within [1, 1 GiB]", o.BatchBytesMax)
	}
	o.SegmentBytes = alignUp(o.SegmentBytes, blockBytes)
	return o, nil
}

// Log is the physical log of one store. It is safe for concurrent use; see GroupLog for who may
// append to a group.
type Log struct {
	dir   string
	o     Options
	logID uint64
	run   uint64
	lock  io.Closer

	// cacheBytes is what all groups' caches hold, unwritten entries included.
	cacheBytes  atomic.Int64
	queuedBytes atomic.Int64

	groupsMu sync.RWMutex
	groups   map[raftid.GroupID]*GroupLog

	mu sync.Mutex // after a GroupLog.mu, never before one
	// wake is signalled when due or closing become true.
	wake *sync.Cond
	due  bool // the writer has a reason to run
	// urgent holds the priority group's records, ordinary everybody else's, both in seq order.
	urgent, ordinary []item
	seq              uint64 // of the last record pushed
	lazies           int    // records pushed since the last take that cause no write
	priority         raftid.GroupID
	shared           bool
	hold             *time.Timer // ends the wait of held records
	held             bool        // records wait for hold, or for the end of the turn that starts it
	writing          bool        // the writer is in a turn
	closing          bool
	failed           error
	segs             []*segment // live ones, oldest first; the last is the head
	spares           []*segment // freed, for the next new ones
	stats            Stats

	w        writer
	next     chan prepared // the next segment, ready to write
	stop     chan struct{} // closed by Close after the writer has ended
	freed    chan struct{} // a token: spares has grown
	waits    atomic.Bool   // the writer waits for the next segment
	moves    chan struct{} // a token: look whether a straggler must be moved
	workers  sync.WaitGroup
	wrote    chan struct{} // closed when the writer ends
	closeErr error
}

// Stats are counters since Open and gauges of now.
type Stats struct {
	Syncs, Records, Bytes uint64 // Bytes as written, padding included
	Rewritten             uint64 // bytes of live records moved out of old segments
	Recycled, Created     uint64 // segments taken into use
	SyncTime              time.Duration
	Segments              int   // that hold live records or may
	LiveBytes             int64 // in them
	Oldest, Head          uint32
	QueuedBytes           int64
	CacheBytes            int64
}

// Open opens or creates the log in dir and recovers every group. It fails with ErrInUse when
// another process has the directory open, and with a *CorruptError when something that had been
// synced is damaged; a torn tail is cut.
func Open(dir string, o Options) (*Log, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	if err := o.FS.MkdirAll(dir); err != nil {
		return nil, fmt.Errorf("wal: %w", err)
	}
	lock, err := o.FS.Lock(filepath.Join(dir, "LOCK"))
	if errors.Is(err, ErrLocked) {
		return nil, fmt.Errorf("%w: %s", ErrInUse, dir)
	} else if err != nil {
		return nil, fmt.Errorf("wal: locking %s: %w", dir, err)
	}
	l := &Log{
		dir: dir, o: o, lock: lock, run: randomUint64(),
		groups: map[raftid.GroupID]*GroupLog{},
		next:   make(chan prepared),
		stop:   make(chan struct{}),
		freed:  make(chan struct{}, 1),
		moves:  make(chan struct{}, 1),
		wrote:  make(chan struct{}),
	}
	l.wake = sync.NewCond(&l.mu)
	l.hold = time.AfterFunc(time.Hour, l.endHold)
	l.hold.Stop()
	if err := l.recover(); err != nil {
		return nil, errors.Join(err, l.closeFiles())
	}
	num := l.w.head.num + 1
	l.workers.Go(func() { l.prepareLoop(num) })
	l.workers.Go(l.rewriteLoop)
	go func() {
		defer close(l.wrote)
		l.writeLoop()
	}()
	return l, nil
}

func randomUint64() uint64 {
	var b [8]byte
	rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint64(b[:])
}

// Groups returns the groups that hold anything, in order. Destroyed ones are not among them.
func (l *Log) Groups() []raftid.GroupID {
	var out []raftid.GroupID
	for _, g := range l.allGroups() {
		g.mu.Lock()
		if !g.empty() {
			out = append(out, g.id)
		}
		g.mu.Unlock()
	}
	return out
}

// allGroups returns every group in order of id.
func (l *Log) allGroups() []*GroupLog {
	l.groupsMu.RLock()
	out := make([]*GroupLog, 0, len(l.groups))
	for _, g := range l.groups {
		out = append(out, g)
	}
	l.groupsMu.RUnlock()
	slices.SortFunc(out, func(a, b *GroupLog) int { return cmp.Compare(a.id, b.id) })
	return out
}

// Destroyed returns the replicas of a group that left a tombstone, in order of id.
func (l *Log) Destroyed(id raftid.GroupID) []raftid.ReplicaID {
	g := l.Group(id)
	g.mu.Lock()
	defer g.mu.Unlock()
	return tombsOf(g)
}

// Group returns a group's log, an empty one if it is new.
func (l *Log) Group(id raftid.GroupID) *GroupLog {
	l.groupsMu.RLock()
	g := l.groups[id]
	l.groupsMu.RUnlock()
	if g != nil {
		return g
	}
	l.groupsMu.Lock()
	defer l.groupsMu.Unlock()
	if g = l.groups[id]; g == nil {
		g = &GroupLog{id: id, seed: groupSeed(id), log: l}
		l.groups[id] = g
	}
	return g
}

// QueuedBytes is how much was appended and is not yet durable.
func (l *Log) QueuedBytes() int64 { return l.queuedBytes.Load() }

// Full says that QueuedBytes has reached Options.QueueBytesMax. Append does not refuse, because
// raft cannot take back what it has handed out; whoever feeds raft must stop while the log is
// full: refuse proposals, leave messages with entries unread. So the queue is bounded by the
// limit and what is then still under way.
func (l *Log) Full() bool { return l.queuedBytes.Load() >= l.o.QueueBytesMax }

// Err returns why the log no longer acknowledges anything: nil, ErrClosed, or the write or sync
// that failed.
func (l *Log) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed == nil && l.closing {
		return ErrClosed
	}
	return l.failed
}

// Stats returns the counters and gauges.
func (l *Log) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	s.Segments = len(l.segs)
	s.Oldest, s.Head = l.segs[0].num, l.segs[len(l.segs)-1].num
	for _, seg := range l.segs {
		s.LiveBytes += seg.live
	}
	s.QueuedBytes, s.CacheBytes = l.queuedBytes.Load(), l.cacheBytes.Load()
	return s
}

func (l *Log) path(name string) string { return filepath.Join(l.dir, name) }

// Close writes and syncs what is queued, ends the goroutines and gives the directory free. It
// returns the failure that had stopped the log, if one had. Nobody may append or read any more.
func (l *Log) Close() error {
	l.mu.Lock()
	if l.closing {
		l.mu.Unlock()
		<-l.wrote
		l.workers.Wait()
		return l.closeErr
	}
	l.closing = true
	l.hold.Stop()
	l.wake.Signal()
	l.mu.Unlock()
	<-l.wrote
	close(l.stop)
	l.workers.Wait()
	l.mu.Lock()
	failed := l.failed
	l.mu.Unlock()
	l.closeErr = errors.Join(failed, l.closeFiles())
	return l.closeErr
}

func (l *Log) closeFiles() error {
	var errs []error
	for _, s := range slices.Concat(l.segs, l.spares) {
		errs = append(errs, s.file.Close())
	}
	l.segs, l.spares = l.segs[:0:0], nil
	errs = append(errs, l.lock.Close())
	return errors.Join(errs...)
}
