package wal_test

import (
	"encoding/binary"
	"testing"

	"braid/raftstore/wal"
	"braid/raftstore/wal/walmem"
)

// FuzzDecodeRecord: no payload makes the decoder panic or read past its end.
func FuzzDecodeRecord(f *testing.F) {
	for _, seed := range seedPayloads(f) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := wal.DecodeRecord(b)
		if err == nil && (n < 6 || n > len(b)) {
			t.Errorf("took %d of %d bytes", n, len(b))
		}
	})
}

// FuzzOpen: whatever is in a segment after its header, Open neither panics nor hangs.
func FuzzOpen(f *testing.F) {
	for _, seed := range seedPayloads(f) {
		f.Add(seed, uint32(0))
		f.Add(seed, uint32(900))
	}
	fs := walmem.New()
	l := open(f, fs, wal.Options{SegmentBytes: wal.SegmentBytesMin})
	appendWait(l.Group(1), wal.Record{Entries: one(1, 900)})
	mustClose(f, l)
	f.Fuzz(func(t *testing.T, b []byte, off uint32) {
		img := fs.Crash(nil, walmem.KeepAll)
		file, err := img.Open(segmentPath(1))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := file.WriteAt(b, int64(off%8000)); err != nil {
			t.Fatal(err)
		}
		l, err := wal.Open("/wal", wal.Options{FS: img, SegmentBytes: wal.SegmentBytesMin})
		if err != nil {
			return
		}
		defer mustClose(t, l)
		for _, id := range l.Groups() {
			if _, err := observe(l, id); err != nil {
				t.Error(err)
			}
		}
	})
}

// seedPayloads returns payloads as a log writes them.
func seedPayloads(f *testing.F) [][]byte {
	fs := walmem.New()
	l := open(f, fs, wal.Options{SegmentBytes: wal.SegmentBytesMin})
	g := l.Group(3)
	appendWait(g, wal.Record{Entries: one(1, 20), Hard: &wal.HardState{Term: 1, Vote: 2, Commit: 1}, Truncate: 1})
	appendWait(g, wal.Record{Checkpoint: &wal.Checkpoint{Position: wal.Position{Index: 1, Term: 1}, Data: []byte("d")}})
	appendWait(g, wal.Record{Destroy: 4, Reset: &wal.Position{Index: 9, Term: 2}})
	mustClose(f, l)
	var out [][]byte
	b := fs.Bytes(segmentPath(1))
	for off := 4096; off+512 <= len(b) && b[off] != 0; off += 512 {
		n := int(binary.LittleEndian.Uint32(b[off+4:]))
		out = append(out, b[off+72:off+72+n])
	}
	return out
}
