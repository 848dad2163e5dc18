package pd

import (
	"bytes"
	"testing"

	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// TestSingle: replicas that apply one log agree, also one that begins from a state in the middle; only
// who made a command hears what it came to, and every entry and command is a cut of its own.
func TestSingle(t *testing.T) {
	d := pdpb.Descriptor{ID: raftid.FirstRegion, Epoch: 1, Incarnation: 1, StartIndex: 10, StartTerm: 1, Peers: []pdpb.Peer{{Replica: 1, Store: 1}}}
	boot := &Bootstrap{ClusterID: 7, Mode: pdpb.SingleGroup, Stores: []pdpb.Store{{ID: 1, Name: "a"}}, Regions: []pdpb.Descriptor{d}}
	var cuts []pdpb.Cut
	changes := 0
	newSingle := func(origin uint64, state []byte) *Single {
		cfg := SingleConfig{Bootstrap: boot, Origin: origin}
		if origin == 1 {
			cfg.OnCut = func(_, _ uint64, _ *order.CutProposal, res *order.CutResult) { cuts = append(cuts, res.Mark.Cut) }
			cfg.OnChange = func(*Machine) { changes++ }
		}
		s := NewSingle(cfg)
		if err := s.Load(state); err != nil {
			t.Fatal(err)
		}
		return s
	}
	a, b := newSingle(1, nil), newSingle(2, nil)
	entry := func(index, cum uint64) {
		t.Helper()
		r := pdpb.Report{Region: d.ID, Incarnation: 1, From: index - 1, Upto: index, UptoTerm: 1, Cum: cum, Runs: []pdpb.Run{{Index: index, Cum: cum}}}
		x, y := a.OrderCommitted(r), b.OrderCommitted(r)
		if !x.Equal(&y) || x.Cum != cum || a.Mark() != b.Mark() {
			t.Fatalf("ordered as %v, %v", &x, &y)
		}
	}
	meta := func(index uint64, payload []byte, on ...*Single) {
		for _, s := range on {
			s.ApplyMeta(index, 1, payload)
		}
	}
	entry(11, 3)
	payload, id := a.Command(order.Event{Kind: order.EventCompact, Rev: 4})
	meta(12, payload, a, b)
	if res, ok := b.Take(id); ok {
		t.Errorf("somebody else's command came to %v", &res)
	}
	if res, ok := a.Take(id); !ok || res.Err() != nil || res.Mark.Floor != 4 || res.Mark.Rev != 4 {
		t.Errorf("the command came to %v, %v", &res, ok)
	}
	if _, ok := a.Take(id); ok {
		t.Error("a command is answered twice")
	}
	if _, id := a.Command(order.Event{Kind: order.EventRaiseFence}); true {
		if _, ok := a.Take(id); ok {
			t.Error("a command that is in no log is answered")
		}
	}
	c := newSingle(1, a.AppendState(nil)) // restarted: the command that follows is of another life
	payload, id = b.Command(order.Event{Kind: order.EventRaiseFence})
	meta(13, payload, a, b, c)
	if res, ok := b.Take(id); !ok || res.Mark.Fence != 1 {
		t.Errorf("the fence came to %v, %v", &res, ok)
	}
	if state := a.AppendState(nil); !bytes.Equal(state, b.AppendState(nil)) || !bytes.Equal(state, c.AppendState(nil)) || c.Mark() != a.Mark() {
		t.Errorf("they differ: %v, %v, %v", a.Mark(), b.Mark(), c.Mark())
	}
	// Loads of a and c, and commands: a, c twice each; cuts: one entry and two commands of a, one of c.
	if changes != 5 || len(cuts) != 4 || a.Mark().Cut != 3 {
		t.Errorf("%d changes, cuts %v", changes, cuts)
	}
}
