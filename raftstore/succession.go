package raftstore

import (
	"slices"

	"go.etcd.io/raft/v3"

	"braid/raftstore/raftid"
)

// A store that is down takes the leaders of many groups with it. Raft would notice that in each group
// by itself: an election timeout after the leader's last word, up to twice as long by chance, and
// longer where the leader can still be heard and hears nobody, because it goes on for up to two
// timeouts until it counts its quorum. Who looks after the stores knows it of all groups at the same
// moment, so their replicas do not wait: they forget the leader, which lets them vote for another at
// once, and campaign one after another, so that they do not get into each other's way.
//
// That decides nothing about safety. A leader that is alive after all is found again by its next
// heartbeat, or is deposed as in any other election: pre-votes are refused by whoever has not
// forgotten it.

// successionTicks is what a replica leaves to the one before it for winning its election, and how
// often it tries again; the others may have noticed a little later.
const successionTicks = 2

// succession is a follower's part in replacing a leader whose store is down.
type succession struct {
	next int // ticks until it campaigns
	left int // ticks until it leaves that to raft's own timeout; zero: there is nothing to do
}

// storeDown is told that a store with a replica of the group is down.
func (g *Group) storeDown(store raftid.StoreID) {
	g.wake()
	g.drain() // what came in this turn may tell of another leader
	if g.state == raft.StateLeader || g.lead == raft.None {
		return
	}
	lost := raftid.ReplicaID(g.lead)
	if at, ok := g.cfg.Peers(lost); !ok || at != store {
		return
	}
	if err := g.rn.ForgetLeader(); err != nil {
		g.cfg.Logger.Debugf("forgetting leader %d: %v", lost, err)
		return
	}
	g.drain()
	if rank, ok := g.rank(lost); ok {
		g.heir = succession{next: rank * successionTicks, left: g.cfg.ElectionTicks}
		g.succeed(0)
	}
}

// rank is this replica's place among those that may follow a leader, another one in each group, so
// that one store's leaders do not all come to the same other one. ok is false for who cannot lead.
func (g *Group) rank(lost raftid.ReplicaID) (rank int, ok bool) {
	voters := slices.Clone(g.conf.GetVoters())
	slices.Sort(voters)
	first := int(uint64(g.cfg.ID) % uint64(max(len(voters), 1)))
	for i := range voters {
		switch raftid.ReplicaID(voters[(first+i)%len(voters)]) {
		case g.cfg.Replica:
			return rank, true
		case lost:
		default:
			rank++
		}
	}
	return 0, false
}

// succeed campaigns when it is this replica's turn, and again, until there is a leader.
func (g *Group) succeed(ticks int) {
	if g.heir.left == 0 {
		return
	}
	g.drain()
	if g.lead != raft.None {
		g.heir = succession{}
		return
	}
	if g.heir.next -= ticks; g.heir.next <= 0 {
		g.heir.next = successionTicks * max(len(g.conf.GetVoters())-1, 1)
		g.startElection()
	}
	g.heir.left = max(g.heir.left-ticks, 0)
}
