package region

import (
	"fmt"
	"sync"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/raftstore/raftid"
	"braid/region/regionpb"
)

// Replica is one replica of a region: the state machine of its raft group.
//
// Everything outside mu belongs to the group's owner, the worker that calls Update and Work;
// mu is what any goroutine may use. The owner never holds mu while it calls out.
type Replica struct {
	cfg Config
	lim Limits
	id  pdpb.RegionID

	pos    Position // applied; what the engine's newest batch holds
	in     *Intake
	loaded bool  // the window holds the log
	failed error // Fatal was called: do nothing more

	role  raftstore.Role
	stood bool          // leadership began or ended since the last publish
	fence pdpb.Fence    // what a leader stamps (F2)
	v     mvcc.Revision // E4's V
	// through is a cut that this replica is complete through; once it is, it stays so.
	through pdpb.Cut
	floor   mvcc.Revision // of compaction, as of that cut
	ov      *overlay
	ev      evaluator

	queue    []*Write // waiting for evaluation, in order of arrival
	txns     []txnRequest
	locks    lockTable
	deciding []deciding // prepared here or about to be, not decided
	clock    int        // ticks
	metas    []*metaWrite
	inflight inflight
	sealed   uint64   // leader: highest item sealed in any entry of its log
	idle     int      // ticks without a proposal
	asked    pdpb.Cut // mark that was asked for, askedAge ticks ago
	askedAge int
	held     *heldProposal
	detach   func()       // what this call of Work leaves to be done beside the group (detach.go)
	long     *longCommand // what was evaluated there

	entry        regionpb.Entry // reused by apply
	creates      map[string]mvcc.Revision
	events       []mvcc.Version // of the batch, for Observer.Events; never reused
	leaseChanges []LeaseChange  // of the batch
	replies      []answer
	truncated    uint64
	readIdx      readIndexer
	posBytes     []byte

	mu shared
}

// shared is what any goroutine may use, under its mutex.
type shared struct {
	sync.Mutex
	inbox      []*Write
	metas      []*metaWrite
	txns       []txnRequest
	queueCount int // in inbox and queue, and commands of the placement machine
	queueBytes int
	items      []pdpb.Item
	ticks      int
	durable    uint64 // applied index that the engine holds durably
	floors     []*floorRequest
	reads      []readIndexWaiter // waiting for a ReadIndex
	applied    Position
	vouched    mvcc.Revision // V: newest revision this replica is known to be complete through
	through    pdpb.Cut
	floor      mvcc.Revision // of compaction, as of through
	wanted     uint64
	waiters    []appliedWaiter
	leading    bool
	leader     raftid.StoreID
	report     pdpb.Report
	reportOK   bool
	installed  *Position // set by a snapshot's sink
	stopped    bool
	stats      Stats
	busy       bool // the owner has something that waits, see Idle
	awake      bool // somebody's clock runs for leases here
}

// Stats are a replica's counters and gauges for metrics.
type Stats struct {
	Evaluated    uint64 // commands, deferred ones counted once
	Deferred     uint64 // evaluations that had to wait for a revision (E4)
	Proposed     uint64 // entries with commands
	Seals        uint64 // entries that only seal
	Applied      uint64 // commands applied, on any replica
	Void         uint64 // commands void by fence or header
	Writes       uint64 // revisions applied here, those of transactions over several regions included
	Crossed      uint64 // of them, of transactions over several regions
	Queued       int
	Inflight     int // entries
	InflightSize int // bytes
	OverlayKeys  int
	Window       int // entries that wait for their item
	Locks        int // attempts over several regions that hold, wait for or are asking for locks here
	Prepared     int // of them, prepared
}

// NewReplica makes a replica at its engine's position. It does nothing until its group calls it.
func NewReplica(cfg Config) (*Replica, error) {
	if cfg.Engine == nil || cfg.Wake == nil || cfg.Fatal == nil {
		return nil, fmt.Errorf("region %d: engine, Wake and Fatal are needed", cfg.Position.Descriptor.ID)
	}
	if (cfg.Order == nil) == (cfg.Orderer == nil) {
		return nil, fmt.Errorf("region %d: exactly one of Order and Orderer is needed", cfg.Position.Descriptor.ID)
	}
	r := &Replica{cfg: cfg, lim: cfg.Limits.withDefaults(), id: cfg.Position.Descriptor.ID, ov: newOverlay(), floor: -1}
	r.in = NewIntake(&cfg.Position, &r.lim, cfg.SharedFsync, &r.cfg.Mutants)
	r.in.own = cfg.Orderer != nil
	if err := r.adopt(cfg.Position); err != nil {
		return nil, err
	}
	return r, nil
}

// adopt makes p the applied position: at start and after a snapshot.
func (r *Replica) adopt(p Position) error {
	r.pos = p
	r.in.Reset(&p)
	r.ov.reset()
	r.ev.recent = recentTerm{}
	r.loaded = false
	// Whoever wrote the floor was complete through it, which may be above the region's own newest
	// revision: without it a current read would fail as compacted until the stream is back (B7).
	r.v = max(r.v, p.Revision, p.Floor)
	r.through = max(r.through, p.Cut)
	r.floor = max(r.floor, p.Floor)
	r.fence = max(r.fence, p.Fence)
	if r.cfg.Meta != nil {
		if err := r.cfg.Meta.LoadState(p.Meta, &p); err != nil {
			return fmt.Errorf("region %d: state of the placement machine: %w", r.id, err)
		}
	}
	r.publishApplied()
	return nil
}

// Update takes what changed in the log (raftstore.StateMachine).
func (r *Replica) Update(h raftstore.Handle, u raftstore.Update) {
	if r.failed != nil {
		return
	}
	if u.Installed != nil {
		if err := r.install(u.Installed); err != nil {
			r.fail(err)
			return
		}
	}
	if !r.loaded {
		if err := r.load(h); err != nil {
			r.fail(err)
			return
		}
	} else if len(u.Appended) > 0 {
		// What is replaced here may still be committed elsewhere, but it may also never be heard
		// of again: its clients must not wait for an index that an idle region never reaches.
		for _, p := range r.inflight.replaced(u.Appended[0]) {
			p.fail(regionpb.ErrorOf(regionpb.Unknown))
		}
		if err := r.in.Append(u.Appended); err != nil {
			r.fail(err)
			return
		}
	}
	r.in.Commit(u.Committed)
	if u.Role != nil {
		r.setRole(*u.Role)
	}
	r.readIdx.answered(u.ReadStates)
	if r.cfg.SharedFsync && len(u.Appended) > 0 {
		// The cut must be in the log's queue before the writer takes what was appended here:
		// then one sync covers both. Waiting for Work would mean waiting for the sync (A1).
		r.publish()
	}
}

// Work does what waits (raftstore.StateMachine).
func (r *Replica) Work(h raftstore.Handle) (again bool) {
	if r.failed != nil {
		return false
	}
	if !r.loaded {
		if err := r.load(h); err != nil {
			r.fail(err)
			return false
		}
		r.in.Commit(h.Committed())
	}
	if err := r.proposeLong(h); err != nil {
		r.fail(err)
		return false
	}
	in := r.takeInbox()
	r.clock += in.ticks
	for i := range in.items {
		if err := r.in.AddItem(&in.items[i]); err != nil {
			r.fail(err)
			return false
		}
	}
	again, err := r.apply(h)
	switch {
	case r.detach != nil:
		r.giveBack(in.floors)
	case err == nil && len(in.floors) > 0 && r.stalled():
		r.detach = func() {
			if err := r.raiseFloors(in.floors); err != nil {
				r.fail(err)
			}
		}
	case err == nil:
		err = r.raiseFloors(in.floors)
	}
	if err == nil && r.detach == nil {
		r.lookAtMark()
		r.proposeHeld(h)
		var more bool
		more, err = r.lead(h, in.ticks)
		again = again || more
	}
	if err == nil {
		r.serveReadIndex(h, in.ticks)
		r.truncate(h, in.durable)
		r.publish()
	}
	if err != nil {
		r.fail(err)
		return false
	}
	if f := r.detach; f != nil {
		r.detach = nil
		h.Detach(f)
		return false // Work is called when it has ended
	}
	return again
}

// Idle says whether nothing is pending here (raftstore.StateMachine, B12).
func (r *Replica) Idle() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed != nil || (r.in.Quiet() && len(r.queue) == 0 && len(r.metas) == 0 && r.inflight.empty() &&
		len(r.mu.inbox) == 0 && len(r.mu.metas) == 0 && len(r.mu.items) == 0 && len(r.mu.waiters) == 0 && len(r.mu.floors) == 0 &&
		len(r.mu.reads) == 0 && r.readIdx.empty() && !r.mu.awake &&
		len(r.mu.txns) == 0 && len(r.txns) == 0 && r.locks.empty() && len(r.pos.Prepared) == 0)
}

// load fills the window from the log: at start, and after a snapshot replaced the state.
func (r *Replica) load(h raftstore.Handle) error {
	const chunk = 4 << 20
	for lo, last := r.in.Last()+1, h.LastIndex(); lo <= last; lo = r.in.Last() + 1 {
		entries, err := h.Entries(lo, last+1, chunk)
		if err != nil {
			return fmt.Errorf("region %d: reading its log from %d: %w", r.id, lo, err)
		}
		if err := r.in.Append(entries); err != nil {
			return err
		}
		if r.in.Last() < lo {
			return fmt.Errorf("%w: the log does not hold entry %d", ErrDiverged, lo)
		}
	}
	r.loaded = true
	return nil
}

// setRole follows raft's role. What was evaluated in another term is not built upon (E2).
func (r *Replica) setRole(role raftstore.Role) {
	was := r.role
	r.role = role
	r.stood = r.stood || role.Leading != was.Leading
	if !role.Leading || role.Term != was.Term {
		r.endLeases()
		r.ov.reset()
		r.ev.recent = recentTerm{}
		r.refuseTxns(&regionpb.Error{Code: regionpb.NotLeader, Leader: r.storeOf(role.Leader)})
	}
	if role.Leading && (!was.Leading || role.Term != was.Term) {
		r.sealed = r.in.SealedInLog()
		r.idle = 0
		r.ev.recent = r.cfg.Recent.begin()
		if r.cfg.Mutants.RecentStays {
			r.ev.recent.term = 0
		}
	}
	hint := r.storeOf(role.Leader)
	if !role.Leading {
		// Requests that were not proposed are certainly not executed; proposed ones wait for
		// their fate (E6).
		r.refuseQueue(&regionpb.Error{Code: regionpb.NotLeader, Leader: hint})
	}
	r.readIdx.roleChanged()
	r.mu.Lock()
	r.mu.leading, r.mu.leader = role.Leading, hint
	r.mu.Unlock()
}

func (r *Replica) storeOf(replica raftid.ReplicaID) raftid.StoreID {
	for _, p := range r.pos.Descriptor.Peers {
		if p.Replica == replica && replica != 0 {
			return p.Store
		}
	}
	return 0
}

// lookAtMark learns from pd's stream, once this replica is complete through its mark: nothing of
// this region that is not applied is ordered at or before it.
func (r *Replica) lookAtMark() {
	mark, ok := r.complete()
	if !ok {
		return
	}
	r.v = max(r.v, mark.Rev)
	r.through = max(r.through, mark.Cut)
	r.floor = max(r.floor, mark.Floor)
	r.raiseFence(mark.Fence)
}

// complete returns the stream's mark if this replica has applied everything through it (S2).
func (r *Replica) complete() (pdpb.Mark, bool) {
	if r.cfg.Orderer != nil {
		// An item may be made and wait for its batch.
		return r.cfg.Orderer.Mark(), r.in.Wanted() == r.pos.Item+1
	}
	mark, newest, ok := r.cfg.Order.State(r.id)
	return mark, ok && r.pos.Item >= newest
}

// CompleteThrough is a revision at or below which nothing further will be applied here, as far as
// is known now: it rises with pd's marks also while the region is idle (S4). Everything that it
// counts on was passed to Observer.Events before. Any goroutine.
func (r *Replica) CompleteThrough() mvcc.Revision {
	var mark pdpb.Mark
	var newest uint64
	var ok bool
	if r.cfg.Order != nil {
		mark, newest, ok = r.cfg.Order.State(r.id) // before what is applied, which only rises
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if ok && r.mu.applied.Item >= newest {
		return max(mark.Rev, r.mu.vouched)
	}
	return r.mu.vouched
}

// raiseFence adopts a higher fence: what is in flight under the lower one is void, so nothing may
// be evaluated on it (F3).
func (r *Replica) raiseFence(f pdpb.Fence) {
	if f > r.fence {
		r.fence = f
		r.ov.reset()
		r.locks.fence(r.pos.Prepared, r.cfg.Mutants.FenceKeepsLocks)
	}
}

// fail stops the replica: only this replica sees the trouble, so the process must stop.
func (r *Replica) fail(err error) {
	r.failed = err
	r.cfg.Fatal(fmt.Errorf("region %d at %s: %w", r.id, &r.pos, err))
}

// truncate lets the log forget what the engine holds durably (D6). What followers still need is
// the log's business.
func (r *Replica) truncate(h raftstore.Handle, durable uint64) {
	if r.cfg.Mutants.TruncApplied {
		durable = r.in.Index()
	}
	// An item may have proved a commit of which raft has not heard yet.
	if to := min(durable, h.Committed()); to > r.truncated && to >= h.FirstIndex() {
		r.truncated = to
		h.Truncate(to)
	}
}

var _ raftstore.StateMachine = (*Replica)(nil)
