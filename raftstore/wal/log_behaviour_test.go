package wal_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
	"braid/raftstore/wal"
	"braid/raftstore/wal/walmem"
)

func one(index uint64, bytes int) []*raftpb.Entry {
	return []*raftpb.Entry{entry(index, 1, strings.Repeat("x", bytes))}
}

func mustClose(t testing.TB, l *wal.Log) {
	t.Helper()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// gate holds the writer in its next write until opened.
type gate struct {
	reached, open chan struct{}
	once          sync.Once
}

func gateWrites(fs *walmem.FS) *gate {
	g := &gate{reached: make(chan struct{}), open: make(chan struct{})}
	fs.Inject(func(op walmem.Op) error {
		if op.Kind == "write" && strings.HasSuffix(op.Name, ".wal") {
			g.once.Do(func() { close(g.reached) })
			<-g.open
		}
		return nil
	})
	return g
}

func TestAppendDoesNotWait(t *testing.T) {
	fs := walmem.New()
	l := open(t, fs, wal.Options{QueueBytesMax: 5000, CacheBytes: 1})
	defer mustClose(t, l)
	g := l.Group(7)
	appendWait(g, wal.Record{Entries: one(1, 10)})
	gate := gateWrites(fs)
	acked := make(chan uint64, 10)
	for i := uint64(2); i <= 6; i++ {
		g.Append(&wal.Record{Entries: one(i, 1000), Done: func() { acked <- i }})
	}
	<-gate.reached
	if !l.Full() || l.QueuedBytes() < 5000 {
		t.Errorf("queued %d bytes, full %v", l.QueuedBytes(), l.Full())
	}
	if ents, err := g.Entries(1, 7, 1<<20); err != nil || len(ents) != 6 {
		t.Errorf("%d entries, %v", len(ents), err)
	}
	if got := g.DurableIndex(); got != 1 {
		t.Errorf("durable through %d while the disk stands still", got)
	}
	close(gate.open)
	for i := uint64(2); i <= 6; i++ {
		if got := <-acked; got != i {
			t.Errorf("acknowledged %d, want %d", got, i)
		}
	}
	if l.QueuedBytes() != 0 || l.Full() || g.DurableIndex() != 6 {
		t.Errorf("queued %d, full %v, durable %d", l.QueuedBytes(), l.Full(), g.DurableIndex())
	}
}

func TestReadErrors(t *testing.T) {
	l := open(t, walmem.New(), wal.Options{})
	defer mustClose(t, l)
	g := l.Group(1)
	g.Append(&wal.Record{Entries: []*raftpb.Entry{entry(1, 1, "a"), entry(2, 1, "b"), entry(3, 2, "c")}, Truncate: 1})
	if _, err := g.Entries(1, 3, 1); !errors.Is(err, raft.ErrCompacted) {
		t.Error(err)
	}
	if _, err := g.Entries(2, 5, 1); !errors.Is(err, raft.ErrUnavailable) {
		t.Error(err)
	}
	if ents, err := g.Entries(2, 4, 0); err != nil || len(ents) != 1 {
		t.Error(ents, err)
	}
	for i, want := range []string{"0 false", "1 true", "1 true", "2 true", "0 false"} {
		if term, ok := g.TermAt(uint64(i)); fmt.Sprint(term, ok) != want {
			t.Errorf("TermAt(%d) = %d %v, want %s", i, term, ok, want)
		}
	}
	for _, ents := range [][]*raftpb.Entry{{entry(5, 2, "hole")}, {entry(1, 2, "below")}, {entry(4, 2, ""), entry(6, 2, "")}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("entries from %d were taken", ents[0].GetIndex())
				}
			}()
			g.Append(&wal.Record{Entries: ents})
		}()
	}
}

// TestPriority: what the priority group appends goes before what others queued earlier (B9).
func TestPriority(t *testing.T) {
	fs := walmem.New()
	l := open(t, fs, wal.Options{BatchBytesMax: 3000})
	defer mustClose(t, l)
	l.SetPriority(1)
	appendWait(l.Group(2), wal.Record{Entries: one(1, 10)})
	gate := gateWrites(fs)
	var mu sync.Mutex
	var order []string
	var all sync.WaitGroup
	add := func(id raftid.GroupID, i uint64, n int) {
		all.Add(1)
		l.Group(id).Append(&wal.Record{Entries: one(i, n), Done: func() {
			mu.Lock()
			order = append(order, fmt.Sprintf("%d/%d", id, i))
			mu.Unlock()
			all.Done()
		}})
	}
	add(2, 2, 10)
	<-gate.reached
	for i := uint64(3); i <= 6; i++ {
		add(2, i, 2000)
	}
	add(1, 1, 10)
	add(1, 2, 10)
	close(gate.open)
	all.Wait()
	if got := fmt.Sprint(order); got != "[2/2 1/1 1/2 2/3 2/4 2/5 2/6]" {
		t.Error(got)
	}
}

// TestPriorityChange: a group's records keep their order when the rules change under them.
func TestPriorityChange(t *testing.T) {
	fs := walmem.New()
	l := open(t, fs, wal.Options{})
	g := l.Group(1)
	appendWait(g, wal.Record{Entries: one(1, 10)})
	gate := gateWrites(fs)
	var last atomic.Uint64
	index := uint64(1)
	add := func() {
		index++
		i := index
		g.Append(&wal.Record{Entries: one(i, 10), Done: func() {
			if last.Swap(i) > i {
				t.Errorf("%d acknowledged too late", i)
			}
		}})
	}
	add()
	<-gate.reached
	add()
	l.SetPriority(1)
	add()
	l.SharedFsync(true)
	add()
	l.SharedFsync(false)
	add()
	l.SetPriority(0)
	add()
	close(gate.open)
	mustClose(t, l)
	if last.Load() != index {
		t.Errorf("acknowledged through %d of %d", last.Load(), index)
	}
}

func TestSharedFsync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := open(t, walmem.New(), wal.Options{HoldMax: 500 * time.Microsecond})
		defer mustClose(t, l)
		l.SharedFsync(true)
		l.SetPriority(1)
		began := time.Now()
		var acked atomic.Int32 // the log's timers have no order with what the test reads
		done := func() { acked.Add(1) }
		syncs := func() int { return int(l.Stats().Syncs) }

		// The entry waits for the cut that follows it, and both are one sync.
		l.Group(5).Append(&wal.Record{Entries: one(1, 10), Done: done})
		l.Group(6).Append(&wal.Record{Entries: one(1, 10), Done: done})
		synctest.Wait()
		if acked.Load() != 0 || syncs() != 0 {
			t.Errorf("%d acknowledged, %d syncs before the cut", acked.Load(), syncs())
		}
		l.Group(1).Append(&wal.Record{Entries: one(1, 10), Done: done})
		synctest.Wait()
		if acked.Load() != 3 || syncs() != 1 || time.Since(began) != 0 {
			t.Errorf("%d acknowledged, %d syncs after %v", acked.Load(), syncs(), time.Since(began))
		}

		// Kick.
		l.Group(5).Append(&wal.Record{Entries: one(2, 10), Done: done})
		l.Kick()
		synctest.Wait()
		if acked.Load() != 4 || time.Since(began) != 0 {
			t.Errorf("%d acknowledged after %v", acked.Load(), time.Since(began))
		}

		// HoldMax.
		l.Group(5).Append(&wal.Record{Entries: one(3, 10), Done: done})
		<-time.After(499 * time.Microsecond)
		synctest.Wait()
		if acked.Load() != 4 {
			t.Error("acknowledged before HoldMax")
		}
		<-time.After(time.Microsecond)
		synctest.Wait()
		if acked.Load() != 5 {
			t.Error("not acknowledged after HoldMax")
		}
	})
}

// TestSharedFsyncHoldsDuringSync: what is appended while the writer syncs waits for the next cut
// from the end of the sync on, however long the sync takes. Otherwise every slow sync would be
// followed by one that covers no cut, for which the next cut would have to wait.
func TestSharedFsyncHoldsDuringSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fs := walmem.New()
		l := open(t, fs, wal.Options{HoldMax: 500 * time.Microsecond})
		defer mustClose(t, l)
		l.SharedFsync(true)
		release := make(chan struct{})
		fs.Inject(func(op walmem.Op) error {
			if op.Kind == "sync" && strings.HasSuffix(op.Name, ".wal") { // not the next segment's, which is being made
				<-release
			}
			return nil
		})
		acked := 0
		done := func() { acked++ }
		l.Group(1).Append(&wal.Record{Entries: one(1, 10), Done: done}) // a cut, now being synced
		synctest.Wait()
		l.Group(5).Append(&wal.Record{Entries: one(1, 10), Done: done})
		<-time.After(5 * time.Millisecond)
		release <- struct{}{}
		synctest.Wait()
		if acked != 1 {
			t.Fatalf("%d acknowledged after the first sync", acked)
		}
		<-time.After(400 * time.Microsecond)
		synctest.Wait()
		l.Group(1).Append(&wal.Record{Entries: one(2, 10), Done: done})
		close(release)
		synctest.Wait()
		if n := l.Stats().Syncs; acked != 3 || n != 2 {
			t.Errorf("%d acknowledged by %d syncs", acked, n)
		}
		fs.Inject(nil)
	})
}

// TestTruncateIsLazy: a truncation causes no sync, and is in the log with what comes next.
func TestTruncateIsLazy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fs := walmem.New()
		l := open(t, fs, wal.Options{})
		g := l.Group(1)
		appendWait(g, wal.Record{Entries: []*raftpb.Entry{entry(1, 1, ""), entry(2, 1, "")}})
		syncs := l.Stats().Syncs
		g.Append(&wal.Record{Truncate: 1})
		<-time.After(time.Hour)
		synctest.Wait()
		if got := l.Stats().Syncs; got != syncs || g.FirstIndex() != 2 {
			t.Errorf("%d syncs, first %d", got-syncs, g.FirstIndex())
		}
		appendWait(l.Group(2), wal.Record{Entries: one(1, 1)})
		found := fs.Crash(nil, walmem.KeepNothing)
		mustClose(t, l)
		l = open(t, found, wal.Options{})
		defer mustClose(t, l)
		if got := l.Group(1).Start(); got != (wal.Position{Index: 1, Term: 1}) {
			t.Error(got)
		}
	})
}

// TestFailedSync: after a failed write or sync nothing is acknowledged any more, the failure is
// told once, and reads go on.
func TestFailedSync(t *testing.T) {
	for _, kind := range []string{"write", "sync"} {
		t.Run(kind, func(t *testing.T) {
			fs := walmem.New()
			var told []error
			fatal := make(chan struct{})
			l := open(t, fs, wal.Options{OnFatal: func(err error) { told = append(told, err); close(fatal) }})
			g := l.Group(1)
			appendWait(g, wal.Record{Entries: one(1, 10)})
			fs.Inject(func(op walmem.Op) error {
				if op.Kind == kind && strings.HasSuffix(op.Name, ".wal") {
					return syscall.EIO
				}
				return nil
			})
			never := func() { t.Error("acknowledged after the failure") }
			g.Append(&wal.Record{Entries: one(2, 10), Done: never})
			<-fatal
			fs.Inject(nil)
			g.Append(&wal.Record{Entries: one(3, 10), Done: never})
			l.Group(2).Append(&wal.Record{Entries: one(1, 10), Done: never})
			l.Kick()
			if ents, err := g.Entries(1, 4, 1<<20); err != nil || len(ents) != 3 {
				t.Error(len(ents), err)
			}
			if g.DurableIndex() != 1 {
				t.Error("durable through", g.DurableIndex())
			}
			if err := l.Close(); !errors.Is(err, syscall.EIO) {
				t.Error(err)
			}
			if len(told) != 1 || !errors.Is(told[0], syscall.EIO) {
				t.Error(told)
			}
		})
	}
}

// TestDiskFull: without room for another segment the log works on until it needs one, and if a
// segment came free by then it does not notice.
func TestDiskFull(t *testing.T) {
	full := func(op walmem.Op) error {
		if op.Kind == "preallocate" {
			return syscall.ENOSPC
		}
		return nil
	}
	for _, truncate := range []bool{false, true} {
		t.Run(fmt.Sprint("truncate=", truncate), func(t *testing.T) {
			fs := walmem.New()
			var failed atomic.Pointer[error]
			fatal := make(chan struct{})
			l := open(t, fs, wal.Options{SegmentBytes: wal.SegmentBytesMin, OnFatal: func(err error) {
				failed.Store(&err)
				close(fatal)
			}})
			g := l.Group(1)
			// Into the second segment, so that the first can come free.
			for i := uint64(1); i <= 3; i++ {
				appendWait(g, wal.Record{Entries: one(i, 5000), Truncate: i - 1})
			}
			if l.Stats().Head == 1 {
				t.Fatal("still the first segment")
			}
			fs.Inject(full)
			done := make(chan struct{}, 1)
			for i := uint64(4); i <= 30; i++ {
				rec := &wal.Record{Entries: one(i, 5000), Done: func() { done <- struct{}{} }}
				if truncate {
					rec.Truncate = i - 1
				}
				g.Append(rec)
				select {
				case <-done:
				case <-fatal:
				}
			}
			err := failed.Load()
			if truncate && err != nil {
				t.Error(*err)
			}
			if !truncate && (err == nil || !errors.Is(*err, syscall.ENOSPC)) {
				t.Error("want a full disk, got", err)
			}
			if cerr := l.Close(); (cerr == nil) != truncate {
				t.Error(cerr)
			}
		})
	}
}

func TestLocked(t *testing.T) {
	for name, fs := range map[string]wal.FS{"mem": walmem.New(), "os": wal.OS} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			o := wal.Options{FS: fs, SegmentBytes: 1 << 20}
			l, err := wal.Open(dir, o)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := wal.Open(dir, o); !errors.Is(err, wal.ErrInUse) || !strings.Contains(err.Error(), dir) {
				t.Error(err)
			}
			mustClose(t, l)
			l, err = wal.Open(dir, o)
			if err != nil {
				t.Fatal(err)
			}
			mustClose(t, l)
		})
	}
}

// TestCacheBound: the cache stays within its bound and everything is still read, from the disk.
func TestCacheBound(t *testing.T) {
	l := open(t, walmem.New(), wal.Options{CacheBytes: 20000, SegmentBytes: 64 << 10})
	defer mustClose(t, l)
	for i := uint64(1); i <= 200; i++ {
		for id := raftid.GroupID(1); id <= 3; id++ {
			appendWait(l.Group(id), wal.Record{Entries: one(i, int(i))})
		}
	}
	appendWait(l.Group(9), wal.Record{}) // the bound holds after a turn, not during it
	if got := l.Stats().CacheBytes; got > 20000 || got < 10000 {
		t.Errorf("cache of %d bytes", got)
	}
	for id := raftid.GroupID(1); id <= 3; id++ {
		ents, err := l.Group(id).Entries(1, 201, 1<<30)
		if err != nil || len(ents) != 200 {
			t.Fatal(len(ents), err)
		}
		for k, e := range ents {
			if e.GetIndex() != uint64(k+1) || len(e.GetData()) != k+1 {
				t.Fatal(e)
			}
		}
	}
}

// TestDoneOrder: without priorities Done follows the order of Append over all groups.
func TestDoneOrder(t *testing.T) {
	l := open(t, walmem.New(), wal.Options{})
	var got []int
	for k := range 1000 {
		g := l.Group(raftid.GroupID(1 + k%17))
		g.Append(&wal.Record{Entries: one(g.LastIndex()+1, 5), Done: func() { got = append(got, k) }})
	}
	mustClose(t, l)
	if len(got) != 1000 || !slices.IsSorted(got) {
		t.Error(len(got), "acknowledged, sorted:", slices.IsSorted(got))
	}
}
