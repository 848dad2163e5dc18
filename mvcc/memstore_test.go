package mvcc

import (
	"errors"
	"testing"
)

func put(t testing.TB, s Store, pos string, vs ...Version) {
	t.Helper()
	b := s.NewBatch()
	defer b.Close()
	for i := range vs {
		if err := b.Put(&vs[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.SetPosition(7, []byte(pos)); err != nil {
		t.Fatal(err)
	}
	if err := b.Commit(); err != nil {
		t.Fatal(err)
	}
}

func live(key string, mod, create Revision, version int64, value string) Version {
	return Version{Key: []byte(key), Mod: mod, Create: create, Version: version, Value: []byte(value)}
}

func TestMemStoreReadsAtRevision(t *testing.T) {
	s := NewMemStore()
	put(t, s, "1", live("a", 2, 2, 1, "x"), Version{Key: []byte("b"), Mod: 2, Sub: 1, Create: 2, Version: 1})
	put(t, s, "2", live("a", 3, 2, 2, "y"))
	put(t, s, "3", Version{Key: []byte("a"), Mod: 4})
	for _, c := range []struct {
		at    Revision
		want  string
		found bool
		count int64
	}{{1, "", false, 0}, {2, "x", true, 2}, {3, "y", true, 2}, {4, "", true, 1}, {Latest, "", true, 1}} {
		v, ok, err := s.Get([]byte("a"), c.at)
		if err != nil || ok != c.found || string(v.Value) != c.want {
			t.Errorf("get at %d: %v %v %v", c.at, v, ok, err)
		}
		if n, err := s.Count(Span{}, c.at); err != nil || n != c.count {
			t.Errorf("count at %d: %d %v", c.at, n, err)
		}
	}
}

func TestMemStoreCrashReturnsToFlush(t *testing.T) {
	s := NewMemStore()
	put(t, s, "1", live("a", 2, 2, 1, "x"))
	s.Flush()
	put(t, s, "2", live("a", 3, 2, 2, "y"))
	c := s.Crash()
	if p, _ := c.Position(7); string(p) != "1" {
		t.Fatalf("position %q", p)
	}
	put(t, c, "2", live("a", 3, 2, 2, "z"))
	if v, _, _ := s.Get([]byte("a"), Latest); string(v.Value) != "y" {
		t.Fatalf("crashed copy shares state: %v", &v)
	}
	if err := c.CheckIndex(); err != nil {
		t.Fatal(err)
	}
}

func TestMemStoreSlotTaken(t *testing.T) {
	s := NewMemStore()
	put(t, s, "1", live("a", 2, 2, 1, "x"))
	b := s.NewBatch()
	defer b.Close()
	v := live("b", 2, 2, 1, "x")
	if err := b.Put(&v); err != nil {
		t.Fatal(err)
	}
	if err := b.Commit(); !errors.Is(err, ErrSlotTaken) {
		t.Fatalf("got %v", err)
	}
}

func TestMemStoreImportKinds(t *testing.T) {
	src := NewMemStore()
	put(t, src, "9", live("a", 9, 9, 1, "new"))
	data, pos := src.ExportSpan(7, Span{})
	for _, c := range []struct {
		kind ImportKind
		want string
	}{{ImportVolatile, ""}, {ImportAhead, "9"}} {
		s := NewMemStore()
		put(t, s, "1", live("a", 2, 2, 1, "old"))
		if err := s.ImportSpan(7, data, pos, c.kind); err != nil {
			t.Fatal(err)
		}
		if p, _ := s.Crash().Position(7); string(p) != c.want {
			t.Errorf("kind %d: position %q after crash", c.kind, p)
		}
	}
	s := NewMemStore()
	put(t, s, "1", live("a", 2, 2, 1, "old"))
	if err := s.InstallSpan(7, data, pos); err != nil {
		t.Fatal(err)
	}
	if v, _, _ := s.Crash().Get([]byte("a"), Latest); string(v.Value) != "new" {
		t.Errorf("installed: %v", &v)
	}
}

func TestMemStoreGCKeepsTombstoneAtFloor(t *testing.T) {
	s := NewMemStore()
	put(t, s, "1", live("a", 2, 2, 1, "x"), live("b", 3, 3, 1, "y"))
	put(t, s, "2", Version{Key: []byte("a"), Mod: 4})
	put(t, s, "3", live("b", 5, 3, 2, "z"))
	if st := s.GC(Span{}, 0, 4); st.Removed != 1 {
		t.Fatalf("%+v\n%s", st, s)
	}
	if st := s.GC(Span{}, 4, 5); st.Removed != 2 { // the tombstone at the old floor, and b@3
		t.Fatalf("%+v\n%s", st, s)
	}
	if err := s.CheckIndex(); err != nil {
		t.Fatal(err)
	}
	if s.LogicalBytes() != versionOverhead+2 {
		t.Fatal(s.LogicalBytes())
	}
}

func TestSpanOfOneKey(t *testing.T) {
	for _, key := range []string{"", "a", "a\x00", "\xff\xff"} {
		if got, ok := Key([]byte(key)).Single(); !ok || string(got) != key {
			t.Errorf("%q: %q %v", key, got, ok)
		}
	}
	for _, s := range []Span{{}, {Start: []byte("a")}, {Start: []byte("a"), End: []byte{}}, {Start: []byte("a"), End: []byte("a")},
		{Start: []byte("a"), End: []byte("b")}, {Start: []byte("a"), End: []byte("a\x00\x00")}, {Start: []byte("a"), End: []byte("b\x00")}} {
		if key, ok := s.Single(); ok {
			t.Errorf("%v is said to hold only %q", s, key)
		}
	}
}
