package node

import (
	"context"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// clusterVersion is the API level that all nodes speak: etcd's.
const clusterVersion = "3.7.0"

// clusterView is what the gateway knows of the cluster. Where etcd means its one raft group, the
// group of the placement machine is meant.
type clusterView struct{ n *Node }

func (c *clusterView) ClusterID() uint64 { return c.n.cluster }
func (c *clusterView) MemberID() uint64  { return uint64(c.n.self) }

// Members lists the directory's stores; a linearizable list comes after a confirmed read point.
func (c *clusterView) Members(ctx context.Context, linearizable bool) ([]*pb.Member, error) {
	if linearizable {
		p, err := c.n.oracle.ReadPoint(ctx)
		if err != nil {
			return nil, err
		}
		if err := c.n.awaitCut(ctx, p.Cut); err != nil {
			return nil, err
		}
	}
	d := c.n.oracle.Directory()
	if d == nil {
		return nil, nil
	}
	list := make([]*pb.Member, 0, len(d.Stores))
	for _, s := range d.Stores {
		m := &pb.Member{ID: uint64(s.ID), PeerURLs: s.PeerURLs, ClientURLs: s.ClientURLs}
		if len(s.ClientURLs) > 0 { // a member that never started has no name, as in etcd
			m.Name = s.Name
		}
		list = append(list, m)
	}
	return list, nil
}

func (c *clusterView) Leader() uint64 {
	if c.n.cutOff() {
		return 0
	}
	l, _ := c.n.oracle.Leader()
	return uint64(l)
}

func (c *clusterView) RaftTerm() uint64 {
	if st, ok := c.n.store.Status(c.n.oracle.Group()); ok {
		return st.Term
	}
	_, term := c.n.oracle.Leader()
	return term
}

func (c *clusterView) RaftIndex() uint64 {
	if st, ok := c.n.store.Status(c.n.oracle.Group()); ok {
		return st.Committed
	}
	return uint64(c.n.oracle.Mark().Cut) // no member here: what the cuts that came say of it
}

func (c *clusterView) RaftAppliedIndex() uint64 { return c.n.appliedIndex() }

func (c *clusterView) Revision() int64        { return int64(c.n.oracle.Mark().Rev) }
func (c *clusterView) CompactRevision() int64 { return int64(c.n.oracle.Mark().Floor) }

// emptyBytes is the size of a store without data, as in etcd, whose file is never empty: the JSON
// form of Status leaves zeros out, and dashboards take them for a member that does not answer.
const emptyBytes = 20 << 10

func (c *clusterView) DBSize() (total, inUse int64) {
	b := emptyBytes + c.n.engine.LogicalBytes()
	return b, b
}

func (c *clusterView) Keys() int64 { return c.n.engine.LiveKeys() }

func (c *clusterView) DBSizeQuota() int64        { return 0 }
func (c *clusterView) Alarms() []*pb.AlarmMember { return nil }
func (c *clusterView) IsLearner() bool           { return false }
func (c *clusterView) ClusterVersion() string    { return clusterVersion }
func (c *clusterView) StorageVersion() string    { return clusterVersion }

// awaitCut waits until the stream from pd has brought everything through a cut. On a node with a
// member of pd the directory of that time comes before it; others fetch it right after.
func (n *Node) awaitCut(ctx context.Context, cut pdpb.Cut) error {
	if n.oracle.Mark().Cut >= cut {
		return nil
	}
	if o, ok := n.oracle.(*multiOracle); ok {
		o.client.WantMark(cut)
	}
	poll := time.NewTicker(5 * time.Millisecond)
	defer poll.Stop()
	for n.oracle.Mark().Cut < cut {
		select {
		case <-poll.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// appliedIndex is the applied index of the group whose state Status reports.
func (n *Node) appliedIndex() uint64 {
	switch o := n.oracle.(type) {
	case *multiOracle:
		if o.member != nil {
			return o.member.Status().Applied
		}
		return uint64(o.Mark().Cut)
	case *singleOracle:
		if h := n.regions.get(singleGroup); h != nil {
			return h.AppliedIndex()
		}
	}
	return 0
}

// storeAlive says whether a store is up as far as this node knows.
func (n *Node) storeAlive(id raftid.StoreID) bool { return n.net.Alive(id) }
