package order

import (
	"bytes"
	"testing"

	"braid/mvcc"
	"braid/pd/pdpb"
)

// TestHashesOfCompactions: a hash is remembered when the floor is still where it was taken, through
// encodings of proposals and of the state; the oldest go.
func TestHashesOfCompactions(t *testing.T) {
	c := NewCore()
	c.rev = 1000
	execute := func(e Event) EventResult {
		p := CutProposal{Events: []Event{e}}
		d := pdpb.NewDec(p.Append(nil))
		decoded := ReadProposal(d)
		if err := d.Done(); err != nil || decoded.String() != p.String() {
			t.Fatalf("%v became %v: %v", &p, decoded, err)
		}
		return c.Apply(decoded).Events[0]
	}
	recall := func(rev mvcc.Revision) pdpb.CompactHash {
		r := execute(Event{Kind: EventCompactHash, Rev: rev})
		reply := Reply{Result: r}
		back, err := DecodeReply(MethodPropose, AppendReply(nil, MethodPropose, &reply))
		if err != nil || back.Result != r {
			t.Fatalf("%v became %v: %v", &r, &back.Result, err)
		}
		if (r.Outcome == Done) != (r.Hash.Rev != 0) || r.Outcome != Done && r.Outcome != Forgotten {
			t.Fatalf("%v with %+v", &r, r.Hash)
		}
		return r.Hash
	}
	compact := func(rev mvcc.Revision, h pdpb.CompactHash) {
		if r := execute(Event{Kind: EventCompact, Rev: rev, Hash: h}); r.Outcome != Done {
			t.Fatalf("compact %d: %v", rev, &r)
		}
	}
	first := pdpb.CompactHash{Rev: 10, Floor: NoFloor, Hash: 0xfedcba98}
	compact(10, first)
	if h := recall(10); h != first {
		t.Errorf("%+v, want %+v", h, first)
	}
	compact(20, pdpb.CompactHash{})
	if h := recall(20); h.Rev != 0 {
		t.Errorf("a compaction without a hash has %+v", h)
	}
	compact(30, pdpb.CompactHash{Rev: 30, Floor: 10, Hash: 1}) // another was faster
	if h := recall(30); h.Rev != 0 {
		t.Errorf("a hash of what was half gone: %+v", h)
	}
	for rev := mvcc.Revision(31); rev < 31+hashesMax; rev++ {
		if rev == 36 {
			loaded, rest, err := LoadState(c.AppendState(nil))
			if err != nil || len(rest) > 0 || !bytes.Equal(loaded.AppendState(nil), c.AppendState(nil)) {
				t.Fatalf("state: %v, %d bytes left", err, len(rest))
			}
			c = loaded
		}
		if h := recall(10); h != first {
			t.Fatalf("%+v before %d, want %+v", h, rev, first)
		}
		compact(rev, pdpb.CompactHash{Rev: rev, Floor: rev - 1, Hash: uint32(rev)})
	}
	if h := recall(10); h.Rev != 0 {
		t.Errorf("the eleventh is still known: %+v", h)
	}
	if h := recall(31); h.Hash != 31 {
		t.Errorf("%+v of 31", h)
	}
}
