package engine

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"braid/mvcc"
)

func someStream(t *testing.T) (stream, position []byte, want string) {
	t.Helper()
	e := openMem(t, vfs.NewMem())
	defer e.Close()
	h := newHistory(3)
	for range 40 {
		events, position := h.batch(1)
		commit(t, e, 1, events, position)
	}
	want = groupDump(t, e, 1)
	stream, position = export(t, e, 1)
	return stream, position, want
}

// TestImportRefusesDamage cuts the stream at every length and flips bits all over it: Install
// never succeeds, and what is live stays as it is.
func TestImportRefusesDamage(t *testing.T) {
	stream, position, _ := someStream(t)
	e := openMem(t, vfs.NewMem())
	defer e.Close()
	commit(t, e, 1, newHistory(4).txn(1), []byte("old"))
	before := groupDump(t, e, 1)
	try := func(what string, n int, s []byte) {
		i, err := e.NewImport(1, groupSpan(1))
		if err != nil {
			t.Fatal(err)
		}
		_, err = i.Write(s)
		if err == nil {
			err = i.Install(position)
		}
		if !errors.Is(err, ErrStream) {
			t.Fatalf("%s at %d: %v", what, n, err)
		}
		if err := i.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for n := 0; n < len(stream); n += 1 + len(stream)/100 {
		try("cut", n, stream[:n])
		bad := bytes.Clone(stream)
		bad[n] ^= 0x40
		try("flip", n, bad)
	}
	try("repetition", 0, append(bytes.Clone(stream), stream...))
	compare(t, groupDump(t, e, 1), before)
	if p, _, err := e.Position(1); string(p) != "old" || err != nil {
		t.Fatalf("position %q %v", p, err)
	}
}

func TestImportRefusesOtherSpan(t *testing.T) {
	stream, _, _ := someStream(t)
	e := openMem(t, vfs.NewMem())
	defer e.Close()
	i, err := e.NewImport(2, groupSpan(2))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := i.Write(stream); !errors.Is(err, ErrStream) {
		t.Fatal(err)
	}
	if err := i.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := e.NewImport(2, mvcc.Span{Start: []byte("b"), End: []byte("a")}); err == nil {
		t.Fatal("empty span accepted")
	}
}

func TestImportOfEverything(t *testing.T) {
	stream, position, want := someStream(t)
	e := openMem(t, vfs.NewMem())
	defer e.Close()
	install(t, e, 1, stream, position)
	compare(t, groupDump(t, e, 1), want)
	// A snapshot of an empty region empties it.
	empty := openMem(t, vfs.NewMem())
	defer empty.Close()
	none, _ := export(t, empty, 1)
	install(t, e, 1, none, []byte("reset"))
	compare(t, groupDump(t, e, 1), "")
	checkIndex(t, e)
	if e.LogicalBytes() != 0 {
		t.Fatal(e.LogicalBytes())
	}
	// Imports without an upper bound.
	commit(t, empty, 1, newHistory(5).txn(1), []byte("x"))
	s, err := empty.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	i, err := e.NewImport(9, mvcc.Span{})
	if err != nil {
		t.Fatal(err)
	}
	defer i.Close()
	if err := s.Export(context.Background(), mvcc.Span{}, i); err != nil {
		t.Fatal(err)
	}
	if err := i.Install([]byte("all")); err != nil {
		t.Fatal(err)
	}
	compare(t, groupDump(t, e, 1), groupDump(t, empty, 1))
	if err := i.Install([]byte("all")); err == nil {
		t.Fatal("installed twice")
	}
}

// TestInstallVoidsGC checks A11: a collection that was decided on the old state of a span removes
// nothing from the new one.
func TestInstallVoidsGC(t *testing.T) {
	stream, position, want := someStream(t)
	e := openMem(t, vfs.NewMem())
	defer e.Close()
	install(t, e, 1, stream, position)
	e.gc = gcLimits{visits: 1 << 20, removes: 1 << 20}
	run, err := e.installs.beginGC(groupSpan(1))
	if err != nil {
		t.Fatal(err)
	}
	i := stage(t, e, 1, stream)
	i.beforeIngest = func() {
		if _, err := e.GC(context.Background(), groupSpan(1), 0, 1000, nil); !errors.Is(err, ErrSpanReplaced) {
			t.Errorf("collection during install: %v", err)
		}
		if _, err := e.GC(context.Background(), groupSpan(2), 0, 1000, nil); err != nil {
			t.Errorf("collection of another span: %v", err)
		}
	}
	if err := i.Install(position); err != nil {
		t.Fatal(err)
	}
	c := &gcChunk{e: e, span: groupSpan(1), to: 1000, next: appendIndexKey(nil, 0, 0)}
	if err := c.collect(run); !errors.Is(err, ErrSpanReplaced) {
		t.Fatalf("collection went on: %v", err)
	}
	e.installs.endGC(run)
	compare(t, groupDump(t, e, 1), want)
	if err := i.Close(); err != nil {
		t.Fatal(err)
	}
}
