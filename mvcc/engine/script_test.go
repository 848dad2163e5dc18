package engine

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/cockroachdb/pebble/v2/vfs"

	"braid/mvcc"
)

// TestScripts runs testdata/*.script. After each command that changes something, the whole store
// is printed, as the keys and values Pebble holds.
//
//	txn group=1 position=x       lines: put KEY VALUE [lease] | del KEY
//	gc from=0 to=3
//	get key=a at=2               scan, count: start= end= at=
//	events from=1 to=9           hash at=3 floor=2
//	durable                      the durable positions
//	flush | reopen | crash
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		s := &script{t: t, fs: vfs.NewCrashableMem(), rev: 1, newest: map[string]mvcc.Version{}}
		s.e = openMem(t, s.fs)
		datadriven.RunTest(t, path, s.run)
		if err := s.e.Close(); err != nil {
			t.Error(err)
		}
	})
}

type script struct {
	t      *testing.T
	fs     *vfs.MemFS
	e      *Engine
	rev    mvcc.Revision
	newest map[string]mvcc.Version
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	var out strings.Builder
	arg := func(name string, def int64) mvcc.Revision {
		d.MaybeScanArgs(t, name, &def)
		return mvcc.Revision(def)
	}
	text := func(name string) (v string) { d.MaybeScanArgs(t, name, &v); return v }
	span := mvcc.Span{Start: []byte(text("start"))}
	if end := text("end"); end != "" {
		span.End = []byte(end)
	}
	at := arg("at", int64(mvcc.Latest))
	print := func(v *mvcc.Version) bool { fmt.Fprintln(&out, v); return true }
	var err error
	switch d.Cmd {
	case "txn":
		err = s.txn(d.Input, uint64(arg("group", 1)), text("position"))
		out.WriteString(s.dump())
	case "gc":
		var st mvcc.GCStats
		st, err = s.e.GC(context.Background(), span, arg("from", 0), arg("to", 0), nil)
		fmt.Fprintf(&out, "removed=%d bytes=%d\n%s", st.Removed, st.Bytes, s.dump())
	case "get":
		var v mvcc.Version
		var ok bool
		if v, ok, err = s.e.Get([]byte(text("key")), at); ok {
			print(&v)
		} else {
			fmt.Fprintln(&out, "none")
		}
	case "scan":
		err = s.e.Scan(span, at, mvcc.ScanOptions{}, print)
	case "count":
		var n int64
		n, err = s.e.Count(span, at)
		fmt.Fprintln(&out, n)
	case "events":
		err = s.e.Events(context.Background(), arg("from", 0), arg("to", int64(mvcc.Latest)), span,
			func(v *mvcc.Version) error { print(v); return nil })
	case "hash":
		var alive bool
		alive, err = s.e.HashSpan(context.Background(), span, 0, at, arg("floor", -1), func(r *mvcc.HashRecord) error {
			fmt.Fprintf(&out, "%q ifEmpty=%v\n", r.Key, r.IfEmpty)
			return nil
		})
		fmt.Fprintf(&out, "alive=%v\n", alive)
	case "durable":
		var all map[uint64][]byte
		all, err = s.e.DurablePositions()
		for g, p := range all {
			fmt.Fprintf(&out, "%d: %s\n", g, p)
		}
	case "flush":
		err = s.e.Flush()
	case "reopen", "crash":
		fs := s.fs
		if d.Cmd == "crash" {
			fs = fs.CrashClone(vfs.CrashCloneCfg{})
		}
		err = s.e.Close()
		s.fs, s.e = fs, openMem(t, fs)
		out.WriteString(s.dump())
	default:
		t.Fatalf("unknown command %s", d.Cmd)
	}
	if err != nil {
		fmt.Fprintln(&out, "error:", err)
	}
	return out.String()
}

func (s *script) txn(lines string, group uint64, position string) error {
	b := s.e.NewBatch()
	defer b.Close()
	s.rev++
	for i, line := range strings.Split(strings.TrimSpace(lines), "\n") {
		w := strings.Fields(line)
		v := mvcc.Version{Key: []byte(w[1]), Mod: s.rev, Sub: int64(i)}
		if w[0] == "put" {
			v.Create, v.Version, v.Value = s.rev, 1, []byte(w[2])
			if old, ok := s.newest[w[1]]; ok && !old.Tombstone() {
				v.Create, v.Version = old.Create, old.Version+1
			}
		}
		s.newest[w[1]] = v
		if err := b.Put(&v); err != nil {
			return err
		}
	}
	if err := b.SetPosition(group, []byte(position)); err != nil {
		return err
	}
	return b.Commit()
}

// dump prints what Pebble holds.
func (s *script) dump() string {
	it, err := s.e.db.NewIter(nil)
	if err != nil {
		s.t.Fatal(err)
	}
	defer it.Close()
	var out strings.Builder
	for ok := it.First(); ok; ok = it.Next() {
		fmt.Fprintf(&out, "%v = %q\n", prettyKey(it.Key()), it.Value())
	}
	return out.String()
}
