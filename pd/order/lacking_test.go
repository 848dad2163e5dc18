package order

import (
	"slices"
	"testing"

	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// TestOnlyWhoWasSentItemsIsAsked: replicas are asked what they want after items were sent to them,
// again as long as they lack some, and not any more once they have all: the cost of a tick does
// not grow with the number of regions.
func TestOnlyWhoWasSentItemsIsAsked(t *testing.T) {
	c := NewClientCore(ClientOptions{Self: 1, Members: []raftid.StoreID{1}, Session: 1})
	for id := pdpb.RegionID(10); id < 20; id++ {
		c.Register(id, 0)
	}
	frame := func(seq uint64, acks []Ack, items ...pdpb.Item) {
		f := &Frame{Session: c.stream.session, Seq: seq, Role: Role{Term: 1, Leader: 1}, Acks: acks, Items: items}
		if _, ok := c.Frame(1, f); !ok {
			t.Fatalf("frame %d refused", seq)
		}
	}
	var acks []Ack
	for id := pdpb.RegionID(10); id < 20; id++ {
		acks = append(acks, Ack{Region: id})
	}
	ask := func(wanted uint64, want ...pdpb.RegionID) {
		t.Helper()
		got := c.Suspects(nil, 64)
		if !slices.Equal(got, want) {
			t.Errorf("asked %v, want %v", got, want)
		}
		for _, id := range got {
			c.Lacks(id, wanted)
		}
	}
	frame(1, acks)
	if got := c.Suspects(nil, 4); len(got) != 4 {
		t.Errorf("%d asked at once, limit 4", len(got))
	}
	c.Suspects(nil, 64)
	ask(1)
	frame(2, nil, pdpb.Item{Region: 12, N: 1}, pdpb.Item{Region: 12, N: 2})
	c.Take()
	ask(1, 12) // it has not got the items yet
	if c.subs[12].refetch {
		t.Error("asked for items that may be on their way")
	}
	ask(1, 12) // nor does it get them
	if s := c.subs[12]; !s.refetch || s.have != 0 {
		t.Errorf("refetch %v above %d", s.refetch, s.have)
	}
	ask(3, 12)
	ask(3)
}
