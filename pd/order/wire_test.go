package order

import (
	"errors"
	"reflect"
	"testing"

	"braid/mvcc"
	"braid/pd/pdpb"
)

func TestReplyRoundTrip(t *testing.T) {
	role := Role{Term: 4, Leader: 9, Leading: true}
	dir := &Directory{
		Version: 3, ClusterID: 1 << 63, Mode: pdpb.SingleGroup,
		Regions: []pdpb.Descriptor{{ID: 2, Span: mvcc.Span{}, Peers: []pdpb.Peer{{Replica: 1, Store: 1}}}},
		Stores:  []pdpb.Store{{ID: 1, Name: "a"}},
	}
	mark := pdpb.Mark{Cut: 3, Rev: 9, Floor: -1}
	for m, r := range map[Method]*Reply{
		MethodReports:   {Role: role},
		MethodReadPoint: {Role: role, ReadPoint: pdpb.ReadPoint{Cut: 3, Rev: 9, Floor: -1}},
		MethodPropose:   {Role: role, Result: EventResult{Outcome: Future, Mark: mark, FirstID: 7}},
		MethodDirectory: {Role: role, Directory: dir},
	} {
		got, err := DecodeReply(m, AppendReply(nil, m, r))
		if err != nil || !reflect.DeepEqual(got, r) {
			t.Errorf("%v: %+v, %v", m, got, err)
		}
	}
	for _, want := range []error{ErrNoLeader, ErrTimeout, ErrUnknown, ErrOverloaded, ErrClosed, ErrInvalid} {
		got, err := DecodeReply(MethodReadPoint, AppendReply(nil, MethodReadPoint, &Reply{Role: role, Err: want}))
		if err != nil || !errors.Is(got.Err, want) {
			t.Errorf("%v became %v, %v", want, got, err)
		}
	}
	var nl *NotLeaderError
	got, err := DecodeReply(MethodPropose, AppendReply(nil, MethodPropose, &Reply{Role: role, Err: &NotLeaderError{Leader: 9, Term: 4}}))
	if err != nil || !errors.As(got.Err, &nl) || nl.Leader != 9 || nl.Term != 4 {
		t.Errorf("not leader became %+v, %v", got, err)
	}
}

// FuzzWire: what comes from other nodes never panics and never allocates out of proportion.
func FuzzWire(f *testing.F) {
	fr := &Frame{Session: 1, Seq: 2, Life: 3, Acks: []Ack{{2, 3, 4}}, Items: []pdpb.Item{{Region: 2, N: 3}}}
	f.Add(fr.Append(nil))
	f.Add((&Subscribe{Session: 1, Add: []Subscription{{2, 3}}, Remove: []pdpb.RegionID{4}}).Append(nil))
	f.Add(AppendReports(nil, []pdpb.Report{{Region: 2}}))
	f.Add(AppendEvent(nil, &Event{Kind: EventAllocIDs, N: 4}))
	f.Add(AppendForward(nil, MethodReadPoint, nil))
	f.Add((&CutProposal{Parts: []pdpb.Report{{Region: 2}}, Events: []Event{{Kind: EventRaiseFence}}}).Append(nil))
	f.Add(NewCore().AppendState(nil))
	f.Add(AppendReply(nil, MethodDirectory, &Reply{Directory: &Directory{Version: 1}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if fr, err := DecodeFrame(b); err == nil {
			if g, err := DecodeFrame(fr.Append(nil)); err != nil || g.String() != fr.String() {
				t.Fatalf("frame %v %v: %v", fr, g, err)
			}
		}
		if p, err := DecodeSubscribe(b); err == nil {
			if q, err := DecodeSubscribe(p.Append(nil)); err != nil || !reflect.DeepEqual(p, q) {
				t.Fatalf("subscribe %+v %+v: %v", p, q, err)
			}
		}
		if rs, err := DecodeReports(b); err == nil {
			if _, err := DecodeReports(AppendReports(nil, rs)); err != nil {
				t.Fatal(err)
			}
		}
		if e, err := DecodeEvent(b); err == nil {
			if _, err := DecodeEvent(AppendEvent(nil, &e)); err != nil {
				t.Fatal(err)
			}
		}
		d := pdpb.NewDec(b)
		if p := ReadProposal(d); d.Done() == nil {
			d = pdpb.NewDec(p.Append(nil))
			if q := ReadProposal(d); d.Done() != nil || q.String() != p.String() {
				t.Fatalf("proposal %v %v", p, q)
			}
		}
		if c, rest, err := LoadState(b); err == nil {
			e, _, err := LoadState(c.AppendState(nil))
			if err != nil || e.String() != c.String() {
				t.Fatalf("state %v %v: %v, %d bytes left", c, e, err, len(rest))
			}
		}
		for _, m := range Methods {
			if _, err := DecodeReply(m, b); err != nil && !errors.Is(err, pdpb.ErrCorrupt) {
				t.Fatal(err)
			}
		}
		if _, _, err := DecodeForward(b); err != nil && !errors.Is(err, pdpb.ErrCorrupt) {
			t.Fatal(err)
		}
	})
}
