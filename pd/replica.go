package pd

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/raft/v3/raftpb"

	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/raftstore/raftid"
	"braid/raftstore/wal"
)

// Replica is a member of pd: a raftstore.StateMachine for group raftid.PDGroup. Its state belongs
// to the group's owner; what other goroutines hand in waits in the inbox, which is bounded.
type Replica struct {
	cfg     Config
	mutants Mutants

	// Owned by the group's owner.
	machine       *Machine
	applied       uint64
	appliedTerm   uint64
	cutter        *order.Cutter
	reads         order.Reads[readReply]
	proposed      []proposal // in the log, not applied here, by index
	queue         []request  // events that wait for the next cut
	feed          *feed
	role          raftstore.Role
	roleChanged   bool
	confirmations int // ticks that the confirmation in flight has seen
	bootTerm      uint64
	dirTold       uint64
	lastCheck     uint64 // applied index of the last checkpoint
	logBytes      uint64 // applied since
	pulled        []pdpb.Report

	in inbox

	// Published for any goroutine.
	status    atomic.Pointer[Status]
	directory atomic.Pointer[order.Directory]
}

type readReply = func(pdpb.ReadPoint, error)

// request is an event and whom to answer.
type request struct {
	event order.Event
	done  func(order.EventResult, error)
}

// proposal is an entry in the log; waiters are keyed (index, term) (E6).
type proposal struct {
	index, term uint64
	at          time.Duration
	bytes       int
	requests    []request
}

// Status is a member's view of pd.
type Status struct {
	Role         order.Role
	Opened       bool // it leads and its term's opening entry is applied
	Applied      uint64
	AppliedTerm  uint64
	Mark         pdpb.Mark
	Regions      int
	Held         int // items no region has sealed
	Bootstrapped bool
}

// inbox is what other goroutines handed in; guarded by mu.
type inbox struct {
	mu      sync.Mutex
	reports []pdpb.Report
	reads   []readReply
	events  []request
	streams []streamRequest
	pull    bool
	tick    bool
	nReads  int // in the inbox and beyond: unanswered
	nEvents int
}

type streamRequest struct {
	from      raftid.StoreID
	subscribe *order.Subscribe
	session   uint64 // of a mark request
	cut       pdpb.Cut
}

var _ raftstore.StateMachine = (*Replica)(nil)
var _ order.Member = (*Replica)(nil)

// NewReplica returns a member with the state of a checkpoint, or of a fresh group when nil. Its
// raft group is started at Applied.
func NewReplica(cfg Config, cp *wal.Checkpoint) (*Replica, error) {
	cfg.Limits.setDefaults()
	r := &Replica{cfg: cfg, feed: newFeed(cfg.Store, cfg.Life)}
	if cfg.Mutants != nil {
		r.mutants = *cfg.Mutants
	}
	r.cutter = order.NewCutter(cfg.Cutter, r.mutants.Mutants)
	r.machine = NewMachine(r.mutants.Mutants)
	if cp != nil {
		m, err := LoadMachine(cp.Data, r.mutants.Mutants)
		if err != nil {
			return nil, err
		}
		r.machine, r.applied, r.appliedTerm = m, cp.Index, cp.Term
		r.lastCheck = cp.Index
	}
	if b := cfg.Bootstrap; b != nil {
		if err := b.Check(); err != nil {
			return nil, err
		}
	}
	r.cutter.Applied(r.applied)
	r.publish()
	return r, nil
}

// Applied is the position of the last applied entry. Owner only, or before the group starts.
func (r *Replica) Applied() (index, term uint64) { return r.applied, r.appliedTerm }

// Machine is the state, for checkers. Owner only.
func (r *Replica) Machine() *Machine { return r.machine }

// Status is what this member knows, as of its last Work. Any goroutine.
func (r *Replica) Status() Status { return *r.status.Load() }

// Directory is the directory as of the last Work; nil before there is one. Any goroutine.
func (r *Replica) Directory() *order.Directory { return r.directory.Load() }

// Idle implements raftstore.StateMachine.
func (r *Replica) Idle() bool {
	r.in.mu.Lock()
	waiting := len(r.in.reports) + len(r.in.reads) + len(r.in.events) + len(r.in.streams)
	waiting += r.in.nReads + r.in.nEvents
	pull := r.in.pull || r.in.tick
	r.in.mu.Unlock()
	return waiting == 0 && !pull && len(r.queue) == 0 && len(r.proposed) == 0 && !r.cutter.Pending() &&
		(!r.role.Leading || r.cutter.Opened() && (r.machine.Bootstrapped() || r.cfg.Bootstrap == nil))
}

// Update implements raftstore.StateMachine.
func (r *Replica) Update(_ raftstore.Handle, u raftstore.Update) {
	if u.Installed != nil {
		r.installed()
	}
	if u.Role != nil {
		r.role = *u.Role
		r.roleChanged = true
		r.cutter.Role(r.role.Leading, r.role.Term, r.role.Open)
		r.reads.Fail(func(done readReply) { r.answerRead(done, pdpb.ReadPoint{}, r.notLeader()) })
		if !r.role.Leading {
			for _, q := range r.queue {
				r.answerEvent(q, order.EventResult{}, r.notLeader())
			}
			r.queue = nil
		}
	}
	if len(u.Appended) > 0 {
		r.replaced(u.Appended[0].GetIndex(), u.Appended[0].GetTerm())
	}
	for _, s := range u.ReadStates {
		r.reads.Confirmed(s.RequestCtx, s.Index)
	}
}

// replaced answers those whose proposals were cut off this log by an entry of another term at
// index or below. Another member may still hold and commit what was cut off here, so they cannot
// know (E6); waiting for the index to be applied could take for ever in an idle log.
func (r *Replica) replaced(index, term uint64) {
	for n := len(r.proposed); n > 0 && r.proposed[n-1].index >= index && r.proposed[n-1].term != term; n-- {
		for _, q := range r.proposed[n-1].requests {
			r.answerEvent(q, order.EventResult{}, order.ErrUnknown)
		}
		r.proposed = r.proposed[:n-1]
	}
}

// installed follows a snapshot that replaced the state: waiters it skipped are told that they
// cannot know (E6), and streams begin anew.
func (r *Replica) installed() {
	for _, p := range r.proposed {
		for _, q := range p.requests {
			r.answerEvent(q, order.EventResult{}, order.ErrUnknown)
		}
	}
	r.proposed = nil
	r.cutter.Applied(r.applied)
	r.feed.jumped(r.machine.Core())
}

// Work implements raftstore.StateMachine.
func (r *Replica) Work(h raftstore.Handle) (again bool) {
	in := r.take()
	if r.roleChanged {
		r.roleChanged = false
		r.feed.all()
		in.pull = in.pull || r.role.Leading
		if r.cfg.Local != nil {
			r.cfg.Local.HandleRole(r.orderRole())
		}
	}
	again = r.apply(h)
	for _, s := range in.streams {
		if s.subscribe != nil {
			r.feed.subscribe(r.machine.Core(), s.from, s.subscribe)
		} else {
			r.feed.wantMark(r.machine.Core().Mark().Cut, s.from, s.session, s.cut)
		}
	}
	if in.tick {
		r.tick(h)
	}
	r.tellDirectory()
	r.feed.flush(r.machine.Core().Mark(), r.orderRole(), r.machine.Version(), r.localFrame(), r.cfg.Sender)
	r.intake(&in)
	r.serveReads(h)
	r.propose(h)
	r.checkpoint(h)
	r.publish()
	return again
}

func (r *Replica) localFrame() func(*order.Frame) {
	if r.cfg.Local == nil {
		return nil
	}
	return func(f *order.Frame) { r.cfg.Local.HandleFrame(r.cfg.Store, f) }
}

// tick serves those who would otherwise wait for somebody else's traffic.
func (r *Replica) tick(h raftstore.Handle) {
	r.cutter.Tick()
	r.feed.all()
	// A question to the quorum may be lost on the way; asking again is harmless.
	if ctx, ok := r.reads.InFlight(); ok {
		if r.confirmations++; r.confirmations > 1 {
			r.confirmations = 0
			h.ReadIndex(ctx)
		}
	}
}

// apply applies what is committed, up to a budget; true when more is left.
func (r *Replica) apply(h raftstore.Handle) bool {
	budget := r.cfg.Limits.ApplyBytesMax
	var spent uint64
	for r.applied < h.Committed() && spent < budget {
		entries, err := h.Entries(r.applied+1, h.Committed()+1, budget-spent)
		if err != nil || len(entries) == 0 {
			panic(fmt.Sprintf("pd: log entries from %d to %d: %v", r.applied+1, h.Committed(), err))
		}
		for _, e := range entries {
			if e.GetIndex() != r.applied+1 {
				panic(fmt.Sprintf("pd: log entry %d follows %d", e.GetIndex(), r.applied))
			}
			spent += uint64(len(e.GetData())) + 16
			r.applyEntry(e)
		}
	}
	r.reads.Ready(r.applied, func(done readReply) { r.answerRead(done, r.readPoint(), nil) })
	return r.applied < h.Committed()
}

func (r *Replica) applyEntry(e *raftpb.Entry) {
	index, term := e.GetIndex(), e.GetTerm()
	var prop *proposal
	if len(r.proposed) > 0 && r.proposed[0].index <= index {
		prop = &r.proposed[0]
		r.proposed = r.proposed[1:]
	}
	var res Result
	if e.GetType() == raftpb.EntryNormal && len(e.GetData()) > 0 {
		entry, err := DecodeEntry(e.GetData())
		if err != nil {
			panic(fmt.Sprintf("pd: entry %d of term %d: %v", index, term, err))
		}
		res = r.machine.apply(entry)
		if r.cfg.OnApply != nil {
			r.cfg.OnApply(index, term, entry, res)
		}
	}
	r.applied, r.appliedTerm = index, term
	r.cutter.Applied(index)
	r.logBytes += uint64(len(e.GetData()))
	if res.Cut != nil {
		r.feed.cut(res.Cut)
		for _, x := range res.Cut.Rejected {
			r.verdict(x.Verdict)
		}
	}
	mine := prop != nil && prop.index == index && prop.term == term
	if res.Cut != nil && r.cfg.Metrics.Cut != nil {
		st := CutStats{Items: len(res.Cut.Items), Bytes: len(e.GetData()), Revisions: res.Cut.Revisions}
		st.Parts = st.Items + len(res.Cut.Rejected)
		if mine && r.cfg.Now != nil {
			st.Latency = r.cfg.Now() - prop.at
		}
		r.cfg.Metrics.Cut(st)
	}
	if prop == nil {
		return
	}
	for i, q := range prop.requests {
		if mine {
			r.answerEvent(q, res.Cut.Events[i], res.Cut.Events[i].Err())
		} else {
			// Another term's entry has the place: this proposal is gone for ever.
			r.answerEvent(q, order.EventResult{}, r.notLeader())
		}
	}
}

// intake hands reports to the cutter. Those of this store are fetched here, so that one wake-up
// of the group takes all of them without a queue between.
func (r *Replica) intake(in *taken) {
	if !r.role.Leading {
		for _, q := range in.events {
			r.answerEvent(q, order.EventResult{}, r.notLeader())
		}
		return
	}
	r.queue = append(r.queue, in.events...)
	core := r.machine.Core()
	for i := range in.reports {
		r.verdict(r.cutter.Offer(core, &in.reports[i]))
	}
	if in.pull && r.cfg.Local != nil {
		r.pulled = r.cfg.Local.PullReports(r.pulled[:0])
		for i := range r.pulled {
			r.verdict(r.cutter.Offer(core, &r.pulled[i]))
		}
	}
}

func (r *Replica) verdict(v order.Verdict) {
	if r.cfg.Metrics.Verdict != nil {
		r.cfg.Metrics.Verdict(v)
	}
}

// eventsPerCut bounds pd's own events in one cut; the rest waits for the next one.
const eventsPerCut = 256

// propose proposes what there is to propose.
func (r *Replica) propose(h raftstore.Handle) {
	if !r.role.Leading {
		return
	}
	if r.cfg.Bootstrap != nil && !r.machine.Bootstrapped() && r.cutter.Opened() && r.bootTerm != r.role.Term {
		e := Entry{Bootstrap: r.cfg.Bootstrap}
		if _, _, err := h.Propose(e.Append(nil)); err == nil {
			r.bootTerm = r.role.Term
		}
	}
	for {
		n := min(len(r.queue), eventsPerCut)
		var events []order.Event
		if n > 0 {
			events = make([]order.Event, n)
			for i := range events {
				events[i] = r.queue[i].event
			}
		}
		cut, ok := r.cutter.Next(r.machine.Core(), events)
		if !ok {
			return
		}
		data := (&Entry{Cut: cut}).Append(nil)
		index, term, err := h.Propose(data)
		if err != nil {
			// Dropped for certain (E1). Either the role is about to change, which clears all
			// this, or raft has too much in flight and a later Work tries again.
			r.cutter.Undo(cut)
			if !errors.Is(err, raftstore.ErrDropped) {
				panic(fmt.Sprintf("pd: propose: %v", err))
			}
			return
		}
		r.cutter.Proposed(cut, index)
		p := proposal{index: index, term: term, bytes: len(data), requests: append([]request(nil), r.queue[:n]...)}
		if r.cfg.Now != nil {
			p.at = r.cfg.Now()
		}
		r.queue = r.queue[:copy(r.queue, r.queue[n:])]
		r.replaced(index, term)
		r.proposed = append(r.proposed, p)
	}
}

// serveReads starts a confirmation of the quorum for the requests that wait (S1). Without the
// opening entry the state may miss cuts that an earlier leader acknowledged (A13).
func (r *Replica) serveReads(h raftstore.Handle) {
	if !r.role.Leading || !r.cutter.Opened() && !r.mutants.EarlyRead {
		return
	}
	ctx, ok := r.reads.Start()
	if !ok {
		return
	}
	if r.mutants.ReadPointWithoutQuorum || r.mutants.EarlyRead {
		r.reads.Confirmed(ctx, 0)
		r.reads.Ready(r.applied, func(done readReply) { r.answerRead(done, r.readPoint(), nil) })
		return
	}
	r.confirmations = 0
	h.ReadIndex(ctx)
}

func (r *Replica) readPoint() pdpb.ReadPoint {
	m := r.machine.Core().Mark()
	return pdpb.ReadPoint{Cut: m.Cut, Rev: m.Rev, Floor: m.Floor}
}

func (r *Replica) orderRole() order.Role {
	o := order.Role{Term: r.role.Term, Leading: r.role.Leading}
	switch {
	case r.role.Leading:
		o.Leader = r.cfg.Store
	case r.role.Leader != 0 && r.cfg.StoreOf != nil:
		o.Leader, _ = r.cfg.StoreOf(r.role.Leader)
	}
	return o
}

func (r *Replica) notLeader() error {
	o := r.orderRole()
	return &order.NotLeaderError{Leader: o.Leader, Term: o.Term}
}

func (r *Replica) tellDirectory() {
	if v := r.machine.Version(); v != r.dirTold {
		r.dirTold = v
		d := r.machine.Directory()
		r.directory.Store(d)
		r.feed.all() // frames carry the version
		if r.cfg.Local != nil {
			r.cfg.Local.HandleDirectory(d)
		}
	}
}

func (r *Replica) publish() {
	if v := r.machine.Version(); v > 0 && r.directory.Load() == nil {
		r.directory.Store(r.machine.Directory())
	}
	s := Status{
		Role: r.orderRole(), Opened: r.cutter.Opened(), Applied: r.applied, AppliedTerm: r.appliedTerm,
		Mark: r.machine.Core().Mark(), Regions: r.machine.Core().Regions(), Held: r.machine.Core().Held(),
		Bootstrapped: r.machine.Bootstrapped(),
	}
	if old := r.status.Load(); old == nil || *old != s {
		r.status.Store(&s)
	}
}
