package node

import (
	"context"
	"time"

	"go.uber.org/zap"

	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/raftstore/raftid"
)

const (
	// handOverMax bounds how long a node that stops waits for its groups' new leaders. Nothing
	// depends on it but the time in which others would have to miss this one.
	handOverMax = 800 * time.Millisecond
	// handOverRetry is when a group that still leads is offered to another replica.
	handOverRetry = 250 * time.Millisecond
	handOverLook  = 5 * time.Millisecond
	// drainMax bounds how long a node that stops waits for the requests it has: without a quorum
	// they would last as long as etcd's timeouts do.
	drainMax = 2 * time.Second
)

// handOver gives away the leadership of every group before the node stops, so that clients and the
// placement group need not wait until it is missed. It ends when this node leads nothing that
// another could lead, or after handOverMax.
func (n *Node) handOver(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, handOverMax)
	defer cancel()
	retry := time.NewTicker(handOverRetry)
	defer retry.Stop()
	look := time.NewTicker(handOverLook)
	defer look.Stop()
	for round := 0; ; round++ {
		offered := 0
		for _, st := range n.store.Statuses() {
			if to, ok := n.successor(&st, round); ok {
				if err := n.store.Transfer(st.ID, to); err == nil {
					offered++
				}
			}
		}
		if offered == 0 {
			return
		}
		for again := false; !again; {
			select {
			case <-ctx.Done():
				n.log.Warn("stopping while leading", zap.Int("groups", n.leads(round)))
				return
			case <-retry.C:
				again = true
			case <-look.C:
				if n.leads(round) == 0 {
					return
				}
			}
		}
	}
}

// leads counts the groups led here that another replica could lead.
func (n *Node) leads(round int) (count int) {
	for _, st := range n.store.Statuses() {
		if _, ok := n.successor(&st, round); ok {
			count++
		}
	}
	return count
}

// successor is the replica that is to lead a group which is led here; another one in each round,
// and another one for each group.
func (n *Node) successor(st *raftstore.GroupStatus, round int) (raftid.ReplicaID, bool) {
	if !st.Leading || len(st.Voters) < 2 {
		return 0, false
	}
	for i := range st.Voters {
		r := raftid.ReplicaID(st.Voters[(int(st.ID)+round+i)%len(st.Voters)])
		if r == st.Replica {
			continue
		}
		if store, ok := n.storeOf(st.ID, r); ok && n.net.Alive(store) {
			return r, true
		}
	}
	return 0, false
}

// storeOf tells on which store a replica of a group lives.
func (n *Node) storeOf(group raftid.GroupID, r raftid.ReplicaID) (raftid.StoreID, bool) {
	if group == raftid.PDGroup {
		voters := n.pdVoters()
		if r < 1 || int(r) > len(voters) {
			return 0, false
		}
		return voters[r-1], true
	}
	h := n.regions.get(pdpb.RegionID(group))
	if h == nil {
		return 0, false
	}
	for _, p := range h.Descriptor().Peers {
		if p.Replica == r {
			return p.Store, true
		}
	}
	return 0, false
}

// awaitLeaders waits until the replicas here know who leads their groups: before, requests would
// wait for that. etcd's server waits for its first leader, too. Bounded, because a region without a
// quorum must not keep the others from being served.
func (n *Node) awaitLeaders(ctx context.Context) {
	const look = 10 * time.Millisecond
	ctx, cancel := context.WithTimeout(ctx, time.Second+3*time.Duration(n.cfg.ElectionMs)*time.Millisecond)
	defer cancel()
	tick := time.NewTicker(look)
	defer tick.Stop()
	for {
		unled := 0
		for _, h := range n.regions.all() {
			if leader, here := h.Leader(); leader == 0 && !here {
				unled++
			}
		}
		if leader, _ := n.oracle.Leader(); leader != 0 && unled == 0 {
			return
		}
		select {
		case <-ctx.Done():
			n.log.Warn("serving although not all regions have a leader", zap.Int("regions", unled))
			return
		case err := <-n.fatal:
			n.fatal <- err // whoever waits for the node hears of it
			return
		case <-tick.C:
		}
	}
}
