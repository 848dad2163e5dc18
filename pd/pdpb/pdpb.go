// Package pdpb holds what travels between stores and the placement group: regions and their
// descriptors, reports, cuts, order items, marks and read points. It is a leaf that every
// package may import; it decides nothing. Rule names (P1, O2, S1 ...) refer to docs/ordering.md.
package pdpb

import (
	"slices"

	"braid/mvcc"
	"braid/raftstore/raftid"
)

// RegionID names a region; it is also the id of the region's raft group.
type RegionID = raftid.GroupID

// Cut numbers the cuts, from 1; 0 is "before the first".
type Cut uint64

// Fence numbers the changes of cluster-wide state that void what was evaluated before (F1).
type Fence uint64

// Peer is one replica of a region.
type Peer struct {
	Replica raftid.ReplicaID
	Store   raftid.StoreID
}

// Descriptor says what a region is and where its replicas are.
type Descriptor struct {
	ID          RegionID
	Span        mvcc.Span
	Epoch       uint64 // raised by every change of span or peers
	Incarnation uint32 // raised by unsafe recovery only (P1)
	Peers       []Peer
	StartIndex  uint64 // index and term at which the region's log starts
	StartTerm   uint64
}

// Run is a stretch of entries that carry one fence stamp (F2): entries up to Index have it, and
// Cum is the cumulative count through Index.
type Run struct {
	Index uint64
	Stamp Fence
	Cum   uint64
}

// Report states what is committed in a region's log (P1, P2). Reports are idempotent facts: the
// highest wins, and any replica may send one.
type Report struct {
	Region      RegionID
	Incarnation uint32
	From        uint64 // up-to of the reporter's last applied item (P2)
	Upto        uint64 // last committed entry that is not silent (O2)
	UptoTerm    uint64
	Cum         uint64 // revisions consumed by all entries through Upto since the region began
	Runs        []Run  // the stamps of (From, Upto]
	Facts       []Fact // what entries of (From, Upto] say beyond counts (P2), by index
	Sealed      uint64 // highest item sealed in the reporter's committed prefix (P4)
}

// AttemptID names one attempt of a transaction over several regions. Every attempt has a fresh one
// (T4), taken from pd's counter of ids, so that a higher one is younger.
type AttemptID uint64

// Fact is a prepared attempt: the entry at Index makes Report.Region one of the participants that
// are prepared (T2). It counts unless the entry is void (F2).
type Fact struct {
	Index        uint64
	Stamp        Fence
	Attempt      AttemptID
	Participants []RegionID // all of them, ascending, the reporting region included
	Writes       bool       // this participant has effects
}

// Decision is the end of an attempt, as the participants that are prepared hear it (T3).
type Decision struct {
	Attempt AttemptID
	Commit  bool
	Rev     mvcc.Revision // of a commit: its own if anybody writes, else the last one before it
}

// Item is item N of a region's order log: what one cut said of the region.
type Item struct {
	Region      RegionID
	Incarnation uint32
	N           uint64 // from 1, without holes
	Cut         Cut
	Upto        uint64
	UptoTerm    uint64
	Cum         uint64        // cumulative count through Upto, as in the report
	Count       uint64        // revisions this item gives to entries of (previous Upto, Upto]
	Base        mvcc.Revision // the first entry that consumes a revision gets Base+1
	Fence       Fence         // in force: entries with a lower stamp are void
	// Decisions take effect after the item's entries, in this order (P3). Their revisions are
	// none of Count.
	Decisions []Decision
}

// Equal says whether two items say the same.
func (it *Item) Equal(o *Item) bool {
	return it.Region == o.Region && it.Incarnation == o.Incarnation && it.N == o.N && it.Cut == o.Cut &&
		it.Upto == o.Upto && it.UptoTerm == o.UptoTerm && it.Cum == o.Cum && it.Count == o.Count &&
		it.Base == o.Base && it.Fence == o.Fence && slices.Equal(it.Decisions, o.Decisions)
}

// Last is the last revision that the item gives out.
func (it *Item) Last() mvcc.Revision {
	last := it.Base + mvcc.Revision(it.Count)
	for i := range it.Decisions {
		if d := &it.Decisions[i]; d.Commit {
			last = max(last, d.Rev)
		}
	}
	return last
}

// Mark says that a stream has delivered everything through Cut.
type Mark struct {
	Cut   Cut
	Rev   mvcc.Revision // last revision given out by Cut
	Floor mvcc.Revision // logical compaction floor; -1 when nothing was compacted (C3)
	Fence Fence
}

// CompactHash is what the store hashed to at Rev, the revision of a compaction, when its floor was
// still Floor. Rev 0 means none.
type CompactHash struct {
	Rev, Floor mvcc.Revision
	Hash       uint32
}

// ReadPoint is a confirmed position of the whole store: a read at Rev on a replica that is
// complete through Cut is linearizable (S1).
type ReadPoint struct {
	Cut   Cut
	Rev   mvcc.Revision
	Floor mvcc.Revision
}

// Store is a node that takes part in the cluster.
type Store struct {
	ID         raftid.StoreID
	Name       string
	PeerURLs   []string
	ClientURLs []string
}
