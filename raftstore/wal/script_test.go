package wal_test

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
	"braid/raftstore/wal"
	"braid/raftstore/wal/walmem"
)

// TestScripts runs testdata: what is appended, what the files then hold, and what is found after
// a crash or damage. Rewrite the expectations with -rewrite.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		s := &script{fs: walmem.New()}
		defer s.close(t)
		datadriven.RunTest(t, path, s.run)
	})
}

type script struct {
	fs *walmem.FS
	l  *wal.Log
}

func (s *script) close(t *testing.T) {
	if s.l != nil {
		if err := s.l.Close(); err != nil {
			t.Error(err)
		}
		s.l = nil
	}
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	switch d.Cmd {
	case "open":
		o := wal.Options{FS: s.fs, SegmentBytes: wal.SegmentBytesMin}
		d.MaybeScanArgs(t, "kept", &o.SegmentsKept)
		l, err := wal.Open("/wal", o)
		if err != nil {
			return err.Error()
		}
		s.l = l
		return fmt.Sprintf("groups %v", l.Groups())
	case "close":
		s.close(t)
		return "closed"
	case "crash":
		// The old log is closed on the file system that is given up.
		mode := walmem.KeepNothing
		if d.HasArg("keep-all") {
			mode = walmem.KeepAll
		}
		found := s.fs.Crash(rand.New(rand.NewPCG(1, 1)), mode)
		s.close(t)
		s.fs = found
		return ""
	case "append":
		for line := range strings.Lines(d.Input) {
			id, rec := parseRecord(t, d, line)
			appendWait(s.l.Group(id), rec)
		}
		return ""
	case "state":
		var out strings.Builder
		for _, id := range s.l.Groups() {
			m, err := observe(s.l, id)
			fmt.Fprintln(&out, id, m, errText(err))
		}
		return out.String()
	case "dump":
		var seg uint32
		d.ScanArgs(t, "segment", &seg)
		return wal.Dump(s.fs.Bytes(segmentPath(seg)), seg)
	case "files":
		names, err := s.fs.List("/wal")
		if err != nil {
			return err.Error()
		}
		return strings.Join(names, "\n")
	case "corrupt":
		var seg uint32
		var off int
		d.ScanArgs(t, "segment", &seg)
		d.ScanArgs(t, "off", &off)
		if err := s.fs.Corrupt(segmentPath(seg), int64(off), 0x40); err != nil {
			return err.Error()
		}
		return ""
	}
	d.Fatalf(t, "unknown command")
	return ""
}

func segmentPath(seg uint32) string {
	return filepath.Join("/wal", fmt.Sprintf("%016x.wal", seg))
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

var word = regexp.MustCompile(`(\w+)=(\S+)`)

// parseRecord reads "GROUP entries=FIRST-LAST/TERM fill=BYTES hard=T/V/C truncate=I reset=I/T
// destroy=R checkpoint=I/T".
func parseRecord(t *testing.T, d *datadriven.TestData, line string) (raftid.GroupID, wal.Record) {
	var rec wal.Record
	var id raftid.GroupID
	scan := func(s, format string, args ...any) {
		if _, err := fmt.Sscanf(s, format, args...); err != nil {
			d.Fatalf(t, "%q: %v", s, err)
		}
	}
	scan(line, "%d", &id)
	fill := 0
	for _, m := range word.FindAllStringSubmatch(line, -1) {
		switch v := m[2]; m[1] {
		case "fill":
			scan(v, "%d", &fill)
		case "entries":
			var first, last, term uint64
			scan(v, "%d-%d/%d", &first, &last, &term)
			for i := first; i <= last; i++ {
				rec.Entries = append(rec.Entries, entry(i, term, fmt.Sprintf("e%d", i)))
			}
		case "hard":
			rec.Hard = &wal.HardState{}
			scan(v, "%d/%d/%d", &rec.Hard.Term, &rec.Hard.Vote, &rec.Hard.Commit)
		case "truncate":
			scan(v, "%d", &rec.Truncate)
		case "reset":
			rec.Reset = &wal.Position{}
			scan(v, "%d/%d", &rec.Reset.Index, &rec.Reset.Term)
		case "destroy":
			scan(v, "%d", &rec.Destroy)
		case "checkpoint":
			rec.Checkpoint = &wal.Checkpoint{Data: []byte("cp"), ConfState: &raftpb.ConfState{Voters: []uint64{1}}}
			scan(v, "%d/%d", &rec.Checkpoint.Index, &rec.Checkpoint.Term)
		default:
			d.Fatalf(t, "unknown word %s", m[1])
		}
	}
	for _, e := range rec.Entries {
		e.Data = append(e.Data, make([]byte, fill)...)
	}
	return id, rec
}
