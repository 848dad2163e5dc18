package node

import (
	"braid/mvcc"
	"braid/pd"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

const (
	replicasMax = 3 // of a region
	pdVotersMax = 5
	// singleVotersMax bounds the nodes of a single-group store: each of them is a voter.
	singleVotersMax = 7
	// A region's log starts behind this place, so that no real entry has index or term zero.
	startIndex, startTerm = 10, 1
)

// oddUpTo is the largest odd number of voters that nodes can hold, at most limit: an even number
// survives no more failures than one less.
func oddUpTo(nodes, limit int) int {
	v := min(nodes, limit)
	if v%2 == 0 {
		v--
	}
	return v
}

// pdVoters are the stores with a member of pd, in order of their replica ids: 1, 2, ...
func (n *Node) pdVoters() []raftid.StoreID {
	ids := make([]raftid.StoreID, oddUpTo(len(n.members), pdVotersMax))
	for i := range ids {
		ids[i] = raftid.StoreID(n.members[i].ID)
	}
	return ids
}

// bootstrap describes the cluster that the flags ask for. Every node computes one, the first
// leader of pd proposes its own, and what is in pd's log counts.
func (n *Node) bootstrap() *pd.Bootstrap {
	b := &pd.Bootstrap{ClusterID: n.cfg.ClusterID(), Mode: n.mode()}
	for _, m := range n.members {
		b.Stores = append(b.Stores, pdpb.Store{ID: raftid.StoreID(m.ID), Name: m.Name, PeerURLs: m.PeerURLs})
	}
	splits := n.cfg.SplitKeys
	if n.cfg.SingleGroup {
		splits = nil
	}
	var start []byte
	for i := 0; i <= len(splits); i++ {
		var end []byte
		if i < len(splits) {
			end = splits[i]
		}
		id := raftid.FirstRegion + raftid.GroupID(i)
		if n.cfg.SingleGroup {
			id = singleGroup
		}
		b.Regions = append(b.Regions, pdpb.Descriptor{
			ID: id, Span: mvcc.Span{Start: start, End: end}, Epoch: 1, Incarnation: 1, Peers: n.place(i),
			StartIndex: startIndex, StartTerm: startTerm,
		})
		start = end
	}
	return b
}

// place puts the replicas of the i-th region on stores, in turn; the first one is to lead.
func (n *Node) place(i int) []pdpb.Peer {
	count := oddUpTo(len(n.members), replicasMax)
	if n.cfg.SingleGroup {
		count = min(len(n.members), singleVotersMax) // every node, as in etcd
		i = 0
	}
	peers := make([]pdpb.Peer, count)
	for j := range peers {
		m := n.members[(i+j)%len(n.members)]
		peers[j] = pdpb.Peer{Replica: raftid.ReplicaID(j + 1), Store: raftid.StoreID(m.ID)}
	}
	return peers
}
