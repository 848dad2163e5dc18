package node

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sort"

	"braid/cmd/internal/admin"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// adminBackend answers the admin service from what this node knows.
type adminBackend struct{ n *Node }

func (a *adminBackend) Regions(_ context.Context, from []byte, limit int) (rs []admin.Region, more bool, err error) {
	list := a.n.oracle.Regions()
	i := sort.Search(len(list), func(i int) bool {
		end := list[i].Span.End
		return end == nil || bytes.Compare(end, from) > 0
	})
	for ; i < len(list); i++ {
		if len(rs) == limit {
			return rs, true, nil
		}
		rs = append(rs, a.region(&list[i]))
	}
	return rs, false, nil
}

func (a *adminBackend) region(d *pdpb.Descriptor) admin.Region {
	r := admin.Region{ID: uint64(d.ID), Start: d.Span.Start, End: d.Span.End, Epoch: d.Epoch, Incarnation: d.Incarnation}
	for _, p := range d.Peers {
		r.Peers = append(r.Peers, admin.Peer{Replica: uint64(p.Replica), Store: uint64(p.Store)})
	}
	h := a.n.regions.get(d.ID)
	leader, here := a.n.stores.leader(h, d)
	if here {
		leader = a.n.self
	}
	r.LeaderStore = uint64(leader)
	if h == nil {
		return r
	}
	if st, ok := a.n.store.Status(d.ID); ok {
		r.Term = st.Term
	}
	pos := h.Applied()
	r.AppliedIndex, r.Revision = pos.Index, int64(pos.Revision)
	r.ItemsRetained = pos.Item - min(pos.Item, pos.Sealed)
	return r
}

// TransferRegion moves a region's leadership; the store that leads it is asked.
func (a *adminBackend) TransferRegion(ctx context.Context, region, store uint64) error {
	list := a.n.oracle.Regions()
	i := slices.IndexFunc(list, func(d pdpb.Descriptor) bool { return uint64(d.ID) == region })
	if i < 0 {
		return fmt.Errorf("region %d: %w", region, admin.ErrNotFound)
	}
	d := &list[i]
	to, ok := peerOn(*d, raftid.StoreID(store))
	if !ok {
		return fmt.Errorf("region %d has no replica on store %x: %w", region, store, admin.ErrRefused)
	}
	leader, here := a.n.stores.leader(a.n.regions.get(d.ID), d)
	if here {
		leader = a.n.self
	}
	return a.n.transfer(ctx, leader, d.ID, to)
}

// TransferPD moves the placement group's leadership.
func (a *adminBackend) TransferPD(ctx context.Context, store uint64) error {
	var to raftid.ReplicaID
	if a.n.cfg.SingleGroup {
		for _, d := range a.n.oracle.Regions() {
			to, _ = peerOn(d, raftid.StoreID(store))
		}
	} else {
		to = raftid.ReplicaID(slices.Index(a.n.pdVoters(), raftid.StoreID(store)) + 1)
	}
	if to == 0 {
		return fmt.Errorf("store %x has no member of the placement group: %w", store, admin.ErrRefused)
	}
	leader, _ := a.n.oracle.Leader()
	return a.n.transfer(ctx, leader, a.n.oracle.Group(), to)
}

func (a *adminBackend) PD(context.Context) (admin.PD, error) {
	n := a.n
	leader, term := n.oracle.Leader()
	mark := n.oracle.Mark()
	pd := admin.PD{
		ClusterID: n.cfg.ClusterID(), SingleGroup: n.cfg.SingleGroup, LeaderStore: uint64(leader), Term: term,
		AppliedIndex: n.appliedIndex(), Cut: uint64(mark.Cut), Revision: int64(mark.Rev), CompactRevision: int64(mark.Floor),
		Fence: uint64(mark.Fence), ItemsRetained: uint64(n.oracle.Held()),
	}
	d := n.oracle.Directory()
	if d == nil {
		return pd, nil
	}
	pd.Regions = uint64(len(d.Regions))
	voters := n.pdVoters()
	for _, s := range d.Stores {
		pd.Stores = append(pd.Stores, admin.Store{
			ID: uint64(s.ID), Name: s.Name, PeerURLs: s.PeerURLs, ClientURLs: s.ClientURLs,
			PDVoter: slices.Contains(voters, s.ID), Alive: n.storeAlive(s.ID),
		})
	}
	return pd, nil
}

// transfer asks the leader of a group to hand over.
func (n *Node) transfer(ctx context.Context, leader raftid.StoreID, group raftid.GroupID, to raftid.ReplicaID) error {
	switch leader {
	case 0:
		return fmt.Errorf("group %d has no known leader: %w", group, admin.ErrUnavailable)
	case n.self:
		return n.store.Transfer(group, to)
	}
	payload := binary.AppendUvarint([]byte{transferV1}, uint64(group))
	payload = binary.AppendUvarint(payload, uint64(to))
	if _, err := n.net.Call(ctx, leader, methodTransfer, payload); err != nil {
		return fmt.Errorf("store %s: %w: %w", leader, err, admin.ErrUnavailable)
	}
	return nil
}

const transferV1 = 1

// registerAdmin takes other nodes' requests for a transfer.
func (n *Node) registerAdmin() {
	n.net.HandleCall(methodTransfer, func(_ context.Context, _ raftid.StoreID, payload []byte, reply func([]byte, error)) {
		group, to, err := decodeTransfer(payload)
		if err == nil {
			err = n.store.Transfer(group, to)
		}
		reply(nil, err)
	})
}

func decodeTransfer(b []byte) (raftid.GroupID, raftid.ReplicaID, error) {
	if len(b) == 0 || b[0] != transferV1 {
		return 0, 0, fmt.Errorf("node: transfer request of another version")
	}
	group, n := binary.Uvarint(b[1:])
	if n <= 0 {
		return 0, 0, fmt.Errorf("node: malformed transfer request")
	}
	to, m := binary.Uvarint(b[1+n:])
	if m <= 0 {
		return 0, 0, fmt.Errorf("node: malformed transfer request")
	}
	return raftid.GroupID(group), raftid.ReplicaID(to), nil
}
