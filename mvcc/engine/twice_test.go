package engine

import (
	"context"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"braid/mvcc"
)

// TestKeyTwiceInOneRevision: a transaction that writes a key twice (etcd's check for duplicates
// lets a put in one inner transaction and a delete in a later one pass) leaves one version, the
// last, and everything that walks the revision index meets it once.
func TestKeyTwiceInOneRevision(t *testing.T) {
	e := openMem(t, vfs.NewMem())
	defer e.Close()
	b := e.NewBatch()
	for _, v := range []mvcc.Version{
		{Key: []byte("k"), Mod: 2, Sub: 0, Create: 2, Version: 1, Value: []byte("v")},
		{Key: []byte("other"), Mod: 2, Sub: 1, Create: 2, Version: 1, Value: []byte("w")},
		{Key: []byte("k"), Mod: 2, Sub: 2},
	} {
		if err := b.Put(&v); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Commit(); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	var events, hashed []int64
	if err := e.Events(context.Background(), 1, 2, mvcc.Span{}, func(v *mvcc.Version) error {
		events = append(events, v.Sub)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := e.HashSpan(context.Background(), mvcc.Span{}, 0, 2, -1, func(r *mvcc.HashRecord) error {
		hashed = append(hashed, r.Sub)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for what, got := range map[string][]int64{"events": events, "hash records": hashed} {
		if len(got) != 2 || got[0] != 1 || got[1] != 2 {
			t.Errorf("%s have positions %v, want 1 and 2", what, got)
		}
	}
}
