package node

import (
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// TestStopSaysWhatWasWritten writes in two of three regions, alone and in one transaction, and looks
// for the counts in the line that a stopping node logs for each region.
func TestStopSaysWhatWasWritten(t *testing.T) {
	c := newCluster(t, 1, splitAt("h", "p"))
	c.start(c.nodes...)
	n := c.nodes[0]
	put := func(key string) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(key), Value: []byte("v")}}}
	}
	for _, key := range []string{"a", "b", "k"} {
		if _, err := n.kv.Put(t.Context(), put(key).GetRequestPut()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := n.kv.Txn(t.Context(), &pb.TxnRequest{Success: []*pb.RequestOp{put("a"), put("k")}}); err != nil {
		t.Fatal(err)
	}
	n.all() // the answer comes with the first region that commits; this reads what both have applied
	c.stop(n)
	type counts struct{ writes, crossed uint64 }
	got := map[counts]int{}
	for _, e := range n.logs.FilterMessage("writes of a region").All() {
		m := e.ContextMap()
		got[counts{m["writes"].(uint64), m["cross-region-commits"].(uint64)}]++
	}
	if len(got) != 3 || got[counts{3, 1}] != 1 || got[counts{2, 1}] != 1 || got[counts{0, 0}] != 1 {
		t.Errorf("the regions' counts, and how many have them: %v", got)
	}
}
