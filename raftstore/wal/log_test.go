package wal_test

import (
	"fmt"
	"testing"

	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
	"braid/raftstore/wal"
	"braid/raftstore/wal/walmem"
)

func entry(index, term uint64, data string) *raftpb.Entry {
	return &raftpb.Entry{Index: &index, Term: &term, Type: raftpb.EntryType_EntryNormal.Enum(), Data: []byte(data)}
}

func open(t testing.TB, fs wal.FS, o wal.Options) *wal.Log {
	t.Helper()
	o.FS = fs
	if o.SegmentBytes == 0 {
		o.SegmentBytes = 1 << 20
	}
	if o.OnFatal == nil {
		o.OnFatal = func(err error) { panic(err) } // what waits for Done would wait for ever
	}
	l, err := wal.Open("/wal", o)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// appendWait appends and waits until the record is durable.
func appendWait(g *wal.GroupLog, rec wal.Record) {
	done := make(chan struct{})
	rec.Done = func() { close(done) }
	g.Append(&rec)
	<-done
}

func TestAppendAndReopen(t *testing.T) {
	fs := walmem.New()
	l := open(t, fs, wal.Options{})
	for id := raftid.GroupID(1); id <= 3; id++ {
		g := l.Group(id)
		var ents []*raftpb.Entry
		for i := uint64(1); i <= 10; i++ {
			ents = append(ents, entry(i, 1, fmt.Sprintf("%d/%d", id, i)))
		}
		appendWait(g, wal.Record{Entries: ents, Hard: &wal.HardState{Term: 1, Vote: 2, Commit: 3}})
		appendWait(g, wal.Record{Entries: []*raftpb.Entry{entry(8, 2, "new")}, Truncate: 4})
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = open(t, fs, wal.Options{})
	if got := fmt.Sprint(l.Groups()); got != "[1 2 3]" {
		t.Fatal(got)
	}
	for id := raftid.GroupID(1); id <= 3; id++ {
		g := l.Group(id)
		ents, err := g.Entries(5, 9, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		got := fmt.Sprintln(g.Hard(), g.Start(), g.FirstIndex(), g.LastIndex(), g.DurableIndex(), len(ents), string(ents[0].Data), string(ents[3].Data))
		if want := fmt.Sprintf("{1 2 3} {4 1} 5 8 8 4 %d/5 new\n", id); got != want {
			t.Fatalf("got %s, want %s", got, want)
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}
