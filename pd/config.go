package pd

import (
	"time"

	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// Local is the order.Client of the member's own store. Calls come from the worker that owns the
// group and must not block; they may call back into the replica's inbox.
type Local interface {
	// HandleFrame takes the next frame of this store's stream.
	HandleFrame(from raftid.StoreID, f *order.Frame)
	// HandleRole tells about pd's leadership as this member knows it.
	HandleRole(r order.Role)
	// PullReports appends what this store's replicas have to report; called when this member
	// leads.
	PullReports(into []pdpb.Report) []pdpb.Report
	// HandleDirectory tells that the directory changed.
	HandleDirectory(d *order.Directory)
}

// Mutants drop rules of this package on purpose; see order.Mutants.
type Mutants struct {
	order.Mutants
	// ReadPointWithoutQuorum: a leader answers read points without confirming that it leads (S1).
	ReadPointWithoutQuorum bool
}

// CutStats describes one cut, for metrics.
type CutStats struct {
	Parts, Items int
	Bytes        int
	Revisions    uint64
	// Latency is the time from proposal to apply; zero on members that did not propose it.
	Latency time.Duration
}

// Metrics are called by the owner of the replica; nil fields are not.
type Metrics struct {
	// Cut: one was applied.
	Cut func(CutStats)
	// Verdict: a report was judged, see order.Verdict. Conflicts deserve an alarm.
	Verdict func(order.Verdict)
}

// Limits bound a replica's inbox and work; zero means the default.
type Limits struct {
	ReportsMax      int // reports in the inbox (131,072); more are dropped: stores repeat them
	ReadsMax        int // unanswered read points (65,536); more get ErrOverloaded
	ProposalsMax    int // events not applied (4,096); more get ErrOverloaded
	StreamReqsMax   int // subscription changes in the inbox (4,096); more are dropped: stores repeat them
	ApplyBytesMax   uint64
	CheckpointEvery uint64 // entries (10,000)
	CheckpointBytes uint64 // bytes of log (16 MiB)
}

func (l *Limits) setDefaults() {
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	def(&l.ReportsMax, 131072)
	def(&l.ReadsMax, 65536)
	def(&l.ProposalsMax, 4096)
	def(&l.StreamReqsMax, 4096)
	for p, v := range map[*uint64]uint64{&l.ApplyBytesMax: 4 << 20, &l.CheckpointEvery: 10000, &l.CheckpointBytes: 16 << 20} {
		if *p == 0 {
			*p = v
		}
	}
}

// Config is what a Replica needs. Only Store and Wake are required.
type Config struct {
	Store raftid.StoreID
	// Life differs from that of every earlier start of this store. Streams carry it, because a
	// member that restarted has forgotten them.
	Life uint64
	// Wake makes the group's owner call Work soon. Any goroutine, never blocks.
	Wake func()
	// StoreOf finds the store of a replica of pd's group, to tell others where the leader is.
	StoreOf func(raftid.ReplicaID) (raftid.StoreID, bool)
	// Bootstrap is proposed when this member leads and the cluster does not exist; nil: never.
	Bootstrap *Bootstrap
	// Local is this store's client, nil when there is none.
	Local Local
	// Sender carries frames to other stores; nil drops them.
	Sender Sender
	// Net forwards requests to the leader for stores that cannot reach it (S5); nil: it does not.
	Net order.Net
	// Now is a monotonic time for metrics; nil: none are taken.
	Now     func() time.Duration
	Cutter  order.CutterOptions
	Limits  Limits
	Metrics Metrics
	// OnApply is told every entry and what it did, in order; for checkers and logs.
	OnApply func(index, term uint64, e *Entry, res Result)
	Mutants *Mutants
}
