package raftwire

import (
	"bytes"
	"testing"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

func samples() []*raftpb.Message {
	u := func(v uint64) *uint64 { return &v }
	return []*raftpb.Message{
		{},
		{Type: raftpb.MsgHeartbeat.Enum(), To: u(2), From: u(1), Term: u(7), Commit: u(0), Context: []byte("12345678")},
		{Type: raftpb.MsgAppResp.Enum(), To: u(1), From: u(2), Term: u(7), Index: u(1 << 40), Reject: new(true), RejectHint: u(9), LogTerm: u(3)},
		{Type: raftpb.MsgVoteResp.Enum(), To: u(1), From: u(2), Term: u(7), Reject: new(false), Vote: u(3)},
		{Type: raftpb.MsgApp.Enum(), To: u(1), From: u(2), Term: u(7), Index: u(4), LogTerm: u(5), Commit: u(3), Entries: []*raftpb.Entry{
			{}, {Term: u(7), Index: u(5), Data: []byte("abc")}, {Term: u(7), Index: u(6), Type: raftpb.EntryConfChangeV2.Enum(), Data: []byte{}},
			{Term: u(7), Index: u(7), Data: bytes.Repeat([]byte("x"), 1000)},
		}},
		{Type: raftpb.MsgSnap.Enum(), To: u(1), From: u(2), Term: u(7), Snapshot: &raftpb.Snapshot{}},
		{Type: raftpb.MsgSnap.Enum(), To: u(1), From: u(2), Term: u(7), Snapshot: &raftpb.Snapshot{Data: []byte("state"), Metadata: &raftpb.SnapshotMetadata{
			Index: u(4), Term: u(2), ConfState: &raftpb.ConfState{Voters: []uint64{1, 2, 3}, Learners: []uint64{4}, VotersOutgoing: []uint64{1}, LearnersNext: []uint64{5}, AutoLeave: new(true)},
		}}},
	}
}

func TestRoundTrip(t *testing.T) {
	b := AppendBatchHeader(nil)
	for i, m := range samples() {
		got, err := DecodeMessage(AppendMessage(nil, m))
		if err != nil || !proto.Equal(got, m) {
			t.Fatalf("message %d: %v, %v, want %v", i, got, err, m)
		}
		b = AppendItem(b, 5, m)
		b = AppendControl(b, 1<<50, 1, 2, 1<<63)
	}
	batch, err := NewBatch(b)
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range samples() {
		it, ok := batch.Next()
		if !ok || it.Group != 5 || it.Kind != KindMessage {
			t.Fatalf("item %d: %v %v", i, it, ok)
		}
		if got, err := DecodeMessage(it.Body); err != nil || !proto.Equal(got, m) {
			t.Fatalf("item %d: %v, %v", i, got, err)
		}
		var x, y, z uint64
		if it, ok = batch.Next(); !ok || it.Kind != KindControl || Fields(it.Body, &x, &y, &z) != nil || x != 1 || y != 2 || z != 1<<63 {
			t.Fatalf("control %d: %v %v", i, it, ok)
		}
	}
	if _, ok := batch.Next(); ok || batch.Err() != nil {
		t.Fatal("the batch does not end")
	}
}

func TestLongItem(t *testing.T) {
	m := &raftpb.Message{Type: raftpb.MsgApp.Enum(), Entries: []*raftpb.Entry{{Data: make([]byte, 3<<20)}}}
	batch, err := NewBatch(AppendItem(AppendItem(AppendBatchHeader(nil), 5, m), 6, m))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		it, ok := batch.Next()
		if got, err := DecodeMessage(it.Body); !ok || err != nil || !proto.Equal(got, m) {
			t.Fatal("a long item is lost", err)
		}
	}
}

// TestTruncated: no prefix of an encoding decodes, none makes the decoder panic.
func TestTruncated(t *testing.T) {
	for _, m := range samples()[1:] {
		b := AppendMessage(nil, m)
		for i := range b {
			if got, err := DecodeMessage(b[:i]); err == nil {
				t.Fatalf("%d of %d bytes decode to %v", i, len(b), got)
			}
		}
	}
}

// FuzzMessage compares with protobuf: every message that protobuf reads keeps its fields, and
// arbitrary bytes do no harm.
func FuzzMessage(f *testing.F) {
	for _, m := range samples() {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(AppendMessage(nil, m))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if m, err := DecodeMessage(b); err == nil {
			if again, err := DecodeMessage(AppendMessage(nil, m)); err != nil || !proto.Equal(m, again) {
				t.Fatalf("%v decodes to %v, %v", m, again, err)
			}
		}
		m := new(raftpb.Message)
		if proto.Unmarshal(b, m) != nil {
			return
		}
		m.Responses = nil
		m.ProtoReflect().SetUnknown(nil)
		if !plain(m) {
			return
		}
		got, err := DecodeMessage(AppendMessage(nil, m))
		if err != nil || !proto.Equal(got, m) {
			t.Fatalf("%v became %v, %v", m, got, err)
		}
	})
}

// plain leaves out what the encoding does not carry: unknown fields and enum values below zero.
func plain(m *raftpb.Message) bool {
	if m.GetType() < 0 {
		return false
	}
	for _, e := range m.Entries {
		if e.GetType() < 0 || len(e.ProtoReflect().GetUnknown()) > 0 {
			return false
		}
	}
	s := m.Snapshot
	return s == nil || len(s.ProtoReflect().GetUnknown()) == 0 && len(s.GetMetadata().ProtoReflect().GetUnknown()) == 0 &&
		len(s.GetMetadata().GetConfState().ProtoReflect().GetUnknown()) == 0
}

func BenchmarkMessage(b *testing.B) {
	for _, c := range []struct {
		name string
		m    *raftpb.Message
	}{{"heartbeat", samples()[1]}, {"append", samples()[4]}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			var buf []byte
			for b.Loop() {
				buf = AppendMessage(buf[:0], c.m)
				if _, err := DecodeMessage(buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
