package wal_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"braid/raftstore/raftid"
	"braid/raftstore/wal"
	"braid/raftstore/wal/walmem"
)

// TestStragglers: groups that never truncate do not keep the log long while another group writes
// a hundred segments, and nothing of theirs is lost or changed.
func TestStragglers(t *testing.T) {
	fs := walmem.New()
	o := wal.Options{SegmentBytes: 64 << 10, SegmentsKept: 3, CacheBytes: 1}
	l := open(t, fs, o)
	var want map[raftid.GroupID]string
	for id := raftid.GroupID(2); id < 20; id++ {
		g := l.Group(id)
		for i := uint64(1); i <= 5; i++ {
			appendWait(g, wal.Record{Entries: one(i, 100), Hard: &wal.HardState{Term: i, Vote: 1, Commit: i}})
		}
		switch id % 4 {
		case 0:
			appendWait(g, wal.Record{Checkpoint: &wal.Checkpoint{Position: wal.Position{Index: 3, Term: 1}, Data: []byte("state")}})
		case 1:
			appendWait(g, wal.Record{Destroy: raftid.ReplicaID(id)})
		case 2:
			appendWait(g, wal.Record{Truncate: 2})
		}
	}
	see := func() map[raftid.GroupID]string {
		got := map[raftid.GroupID]string{}
		for id := raftid.GroupID(2); id < 20; id++ {
			m, err := observe(l, id)
			got[id] = fmt.Sprint(m, err)
		}
		return got
	}
	want = see()
	filesMax := 0
	for i := uint64(1); l.Stats().Head < 100; i++ {
		appendWait(l.Group(1), wal.Record{Entries: one(i, 3000), Truncate: max(i, 3) - 3})
		names, err := fs.List("/wal")
		if err != nil {
			t.Fatal(err)
		}
		filesMax = max(filesMax, len(names))
	}
	s := l.Stats()
	t.Logf("at most %d files; %+v", filesMax, s)
	// The rewriter runs beside the writer, so on a busy machine it comes late; never 100 files late.
	if filesMax > 60 || s.Rewritten == 0 || s.Recycled < 20 {
		t.Errorf("at most %d files, %+v", filesMax, s)
	}
	if got := see(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	found := fs.Crash(nil, walmem.KeepNothing)
	mustClose(t, l)
	l = open(t, found, o)
	defer mustClose(t, l)
	if got := see(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("after a crash: got %v, want %v", got, want)
	}
}

// TestMissingSegment: a file that is gone is noticed, wherever it was.
func TestMissingSegment(t *testing.T) {
	fs := walmem.New()
	o := wal.Options{SegmentBytes: wal.SegmentBytesMin, SegmentsKept: 100}
	l := open(t, fs, o)
	for i := uint64(1); l.Stats().Head < 6; i++ {
		appendWait(l.Group(1), wal.Record{Entries: one(i, 3000)})
	}
	found := fs.Crash(nil, walmem.KeepNothing)
	mustClose(t, l)
	o.FS = found
	for _, seg := range []uint32{1, 3, 5} {
		name := segmentPath(seg)
		if err := found.Rename(name, "/elsewhere"); err != nil {
			t.Fatal(err)
		}
		if l, err := wal.Open("/wal", o); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("without segment %d: %v", seg, err)
			if err == nil {
				mustClose(t, l)
			}
		}
		if err := found.Rename("/elsewhere", name); err != nil {
			t.Fatal(err)
		}
	}
	l = open(t, found, o)
	mustClose(t, l)
}

// TestForeignSegment: another log's file under a fitting name is refused.
func TestForeignSegment(t *testing.T) {
	a, b := walmem.New(), walmem.New()
	o := wal.Options{SegmentBytes: wal.SegmentBytesMin}
	for _, fs := range []*walmem.FS{a, b} {
		l := open(t, fs, o)
		for i := uint64(1); l.Stats().Head < 3; i++ {
			appendWait(l.Group(1), wal.Record{Entries: one(i, 3000)})
		}
		mustClose(t, l)
	}
	overwrite(t, a, segmentPath(2), 0, b.Bytes(segmentPath(2)))
	o.FS = a
	var damage *wal.CorruptError
	if _, err := wal.Open("/wal", o); !errors.As(err, &damage) {
		t.Error(err)
	}
}

func overwrite(t *testing.T, fs *walmem.FS, name string, off int64, b []byte) {
	t.Helper()
	f, err := fs.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(b, off); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}

// TestCutStaysCut: what a recovery has cut off does not come back behind records that were
// written later and happen to end where it begins.
func TestCutStaysCut(t *testing.T) {
	fs := walmem.New()
	l := open(t, fs, wal.Options{})
	g := l.Group(1)
	appendWait(g, wal.Record{Entries: one(1, 10)}) // at 4096
	before := fs.Crash(nil, walmem.KeepAll)
	appendWait(g, wal.Record{Entries: one(2, 10)}) // at 4608
	appendWait(g, wal.Record{Entries: one(3, 10)}) // at 5120
	late := fs.Bytes(segmentPath(1))[5120:5632]
	mustClose(t, l)

	l = open(t, before, wal.Options{})
	appendWait(l.Group(1), wal.Record{Entries: one(2, 10)}) // the same again, at 4608
	found := before.Crash(nil, walmem.KeepAll)
	mustClose(t, l)
	overwrite(t, found, segmentPath(1), 5120, late)
	l = open(t, found, wal.Options{})
	defer mustClose(t, l)
	if got := l.Group(1).LastIndex(); got != 2 {
		t.Errorf("last index %d", got)
	}
}

// TestCutIsLogged: what a recovery cuts off is said in the log, and nothing when there is no such thing.
func TestCutIsLogged(t *testing.T) {
	for damage, want := range map[int64]int{0: 0, 4608 + 70: 1, 4608 + 100: 1} { // none, header, payload
		fs := walmem.New()
		l := open(t, fs, wal.Options{})
		appendWait(l.Group(1), wal.Record{Entries: one(1, 10)})  // at 4096
		appendWait(l.Group(1), wal.Record{Entries: one(2, 100)}) // at 4608
		found := fs.Crash(nil, walmem.KeepAll)
		mustClose(t, l)
		if damage > 0 {
			overwrite(t, found, segmentPath(1), damage, []byte{0xff ^ fs.Bytes(segmentPath(1))[damage]})
		}
		core, logs := observer.New(zapcore.WarnLevel)
		l = open(t, found, wal.Options{Logger: zap.New(core)})
		if got := l.Group(1).LastIndex(); got != uint64(2-want) {
			t.Errorf("damage at %d: last index %d", damage, got)
		}
		cut := logs.FilterMessageSnippet("incomplete and cut off").FilterField(zap.Uint32("offset", 4608))
		if cut.Len() != want || logs.Len() != want {
			t.Errorf("damage at %d: logged %v", damage, logs.All())
		}
		mustClose(t, l)
	}
}

// TestRealFiles runs the log on the operating system's files through many segments, two sizes of
// them, and a record larger than either.
func TestRealFiles(t *testing.T) {
	dir := t.TempDir()
	index := uint64(0)
	for _, size := range []int64{64 << 10, 64 << 10, 128 << 10} {
		o := wal.Options{SegmentBytes: size, SegmentsKept: 2, CacheBytes: 1}
		l, err := wal.Open(dir, o)
		if err != nil {
			t.Fatal(err)
		}
		g := l.Group(1)
		if got := g.LastIndex(); got != index {
			t.Fatalf("last index %d, want %d", got, index)
		}
		if index == 0 {
			appendWait(l.Group(2), wal.Record{Entries: one(1, 50), Hard: &wal.HardState{Term: 1}})
		}
		appendWait(g, wal.Record{Entries: one(index+1, 300<<10)})
		for range 100 {
			index = g.LastIndex() + 1
			appendWait(g, wal.Record{Entries: one(index, 4000), Truncate: index - 1})
		}
		if ents, err := g.Entries(index, index+1, 1); err != nil || len(ents[0].GetData()) != 4000 {
			t.Error(err)
		}
		if ents, err := l.Group(2).Entries(1, 2, 1); err != nil || len(ents[0].GetData()) != 50 {
			t.Error(err)
		}
		mustClose(t, l)
	}
	names, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(names) > 12 {
		t.Error(names, err)
	}
}
