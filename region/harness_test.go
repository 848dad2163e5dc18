package region

import (
	"context"
	"fmt"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/raftstore/raftid"
	"braid/region/regionpb"
)

// fakeLog is a raft group's replica as far as a state machine can tell: a log that the test
// extends, replaces, commits and truncates by hand.
type fakeLog struct {
	first     uint64 // index of entries[0]
	firstTerm uint64 // of first-1
	entries   []*raftpb.Entry
	committed uint64
	role      raftstore.Role
	drop      bool // the next proposals are dropped
	dropAll   bool
	appended  []*raftpb.Entry // not told to the machine yet
	truncated uint64
	reads     [][]byte
	detached  func() // runs when the test says so
}

func (f *fakeLog) Term() uint64                 { return f.role.Term }
func (f *fakeLog) Leader() raftid.ReplicaID     { return f.role.Leader }
func (f *fakeLog) Leading() (uint64, bool)      { return f.role.Open, f.role.Leading }
func (f *fakeLog) FirstIndex() uint64           { return f.first }
func (f *fakeLog) LastIndex() uint64            { return f.first + uint64(len(f.entries)) - 1 }
func (f *fakeLog) Committed() uint64            { return f.committed }
func (f *fakeLog) ReadIndex(ctx []byte)         { f.reads = append(f.reads, ctx) }
func (f *fakeLog) Transfer(raftid.ReplicaID)    {}
func (f *fakeLog) Campaign()                    {}
func (f *fakeLog) Detach(fn func())             { f.detached = fn }
func (f *fakeLog) ConfState() *raftpb.ConfState { return &raftpb.ConfState{} }
func (f *fakeLog) Checkpoint(uint64, uint64, []byte) {
	panic("a region writes no checkpoints")
}

func (f *fakeLog) TermAt(i uint64) (uint64, bool) {
	if i == f.first-1 {
		return f.firstTerm, true
	}
	if i < f.first || i > f.LastIndex() {
		return 0, false
	}
	return f.entries[i-f.first].GetTerm(), true
}

func (f *fakeLog) Entries(lo, hi, _ uint64) ([]*raftpb.Entry, error) {
	if lo < f.first || hi > f.LastIndex()+1 || lo > hi {
		return nil, fmt.Errorf("log holds %d..%d, asked for %d..%d", f.first, f.LastIndex(), lo, hi-1)
	}
	return slices.Clone(f.entries[lo-f.first : hi-f.first]), nil
}

func (f *fakeLog) Propose(data []byte) (uint64, uint64, error) {
	if !f.role.Leading || f.drop || f.dropAll {
		f.drop = false
		return 0, 0, raftstore.ErrDropped
	}
	e := &raftpb.Entry{Term: new(f.role.Term), Index: new(f.LastIndex() + 1), Data: data}
	f.put(e)
	return e.GetIndex(), e.GetTerm(), nil
}

// put makes e the log's last entry, replacing what was there.
func (f *fakeLog) put(e *raftpb.Entry) {
	f.entries = append(f.entries[:e.GetIndex()-f.first], e)
	f.appended = append(f.appended, e)
}

func (f *fakeLog) Truncate(i uint64) {
	if i > f.committed {
		panic("truncated above commit")
	}
	f.truncated = i
	if i >= f.first {
		f.firstTerm, _ = f.TermAt(i)
		f.entries = slices.Clone(f.entries[i+1-f.first:])
		f.first = i + 1
	}
}

// fakeOrder is pd for one region: it makes cuts of one report, and a stream for each replica
// that the test lets flow. Other regions get revisions between.
type fakeOrder struct {
	incarnation uint32
	cut         pdpb.Cut
	rev         mvcc.Revision
	fence       pdpb.Fence
	floor       mvcc.Revision
	upto        uint64
	term        uint64
	cum         uint64
	items       []pdpb.Item // all, item n at n-1
	sealed      uint64      // forgotten through
}

func newFakeOrder(d *pdpb.Descriptor) *fakeOrder {
	return &fakeOrder{incarnation: d.Incarnation, rev: 1, floor: -1, upto: d.StartIndex, term: d.StartTerm}
}

// order makes a cut of a report, with `others` revisions given to other regions before it. It
// returns false when the report moves nothing.
func (o *fakeOrder) order(rep *pdpb.Report, others int) (*pdpb.Item, bool) {
	if err := rep.Check(); err != nil {
		panic(err)
	}
	if rep.From > o.upto {
		panic(fmt.Sprintf("report from %d leaves a gap after %d", rep.From, o.upto))
	}
	o.sealed = max(o.sealed, rep.Sealed)
	if o.sealed > uint64(len(o.items)) {
		panic("sealed an item that does not exist")
	}
	o.cut++
	o.rev += mvcc.Revision(others)
	if rep.Upto <= o.upto {
		return nil, false
	}
	base, n := o.cum, uint64(0)
	for _, x := range rep.Runs {
		if x.Index <= o.upto {
			continue
		}
		if x.Stamp >= o.fence {
			n += x.Cum - base
		}
		base = x.Cum
	}
	it := pdpb.Item{Region: rep.Region, Incarnation: o.incarnation, N: uint64(len(o.items)) + 1, Cut: o.cut,
		Upto: rep.Upto, UptoTerm: rep.UptoTerm, Cum: rep.Cum, Count: n, Base: o.rev, Fence: o.fence}
	o.upto, o.term, o.cum = rep.Upto, rep.UptoTerm, rep.Cum
	o.rev += mvcc.Revision(n)
	o.items = append(o.items, it)
	return &it, true
}

func (o *fakeOrder) mark() pdpb.Mark {
	return pdpb.Mark{Cut: o.cut, Rev: o.rev, Fence: o.fence, Floor: o.floor}
}

// fakeStream is one replica's subscription.
type fakeStream struct {
	mark    pdpb.Mark
	newest  uint64
	ok      bool
	reports int
}

func (s *fakeStream) State(pdpb.RegionID) (pdpb.Mark, uint64, bool) { return s.mark, s.newest, s.ok }
func (s *fakeStream) Report(pdpb.RegionID)                          { s.reports++ }
func (s *fakeStream) WaitMark(ctx context.Context, _ pdpb.RegionID, cut pdpb.Cut) error {
	if s.mark.Cut >= cut {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

// host is one replica with everything around it.
type host struct {
	id     raftid.ReplicaID
	log    *fakeLog
	store  *mvcc.MemStore
	stream *fakeStream
	r      *Replica
	cfg    Config
	fatal  error
	wakes  int
	told   bool

	park     bool   // what is detached waits for unpark
	parked   func() // waits
	detached int    // how often
	newRole  *raftstore.Role
}

var testDesc = pdpb.Descriptor{
	ID: 7, Span: mvcc.Span{Start: []byte("a"), End: []byte("z")}, Epoch: 1, Incarnation: 3,
	StartIndex: 10, StartTerm: 5,
	Peers: []pdpb.Peer{{Replica: 1, Store: 0xa}, {Replica: 2, Store: 0xb}, {Replica: 3, Store: 0xc}},
}

func newHost(id raftid.ReplicaID, desc pdpb.Descriptor, change func(*Config)) *host {
	h := &host{id: id, log: &fakeLog{first: desc.StartIndex + 1, firstTerm: desc.StartTerm, committed: desc.StartIndex},
		store: mvcc.NewMemStore()}
	p := InitialPosition(desc, 1)
	b := h.store.NewBatch()
	must(b.SetPosition(uint64(desc.ID), p.Append(nil)))
	must(b.Commit())
	must(b.Close())
	h.store.Flush()
	h.cfg = Config{Replica: id, Store: raftid.StoreID(9 + id), Recent: NewRecent(5), Tallies: NewTallies(TallyOptions{Worth: 1, BucketKeys: 1, BucketsMax: 3})}
	if change != nil {
		change(&h.cfg)
	}
	h.start(desc.ID)
	return h
}

// start makes the replica from what the store holds.
func (h *host) start(id pdpb.RegionID) {
	data, ok := h.store.Position(uint64(id))
	if !ok {
		panic("no position")
	}
	p, err := regionpb.DecodePosition(data)
	must(err)
	h.stream = &fakeStream{mark: pdpb.Mark{Rev: 1, Floor: -1}}
	h.fatal, h.told = nil, false
	cfg := h.cfg
	cfg.Engine, cfg.Position = h.store, p
	if cfg.Orderer == nil {
		cfg.Order = h.stream
	}
	cfg.Wake = func() { h.wakes++ }
	cfg.Fatal = func(err error) { h.fatal = err }
	if cfg.Limits.PipelineCommandsMin == 0 {
		cfg.Limits.PipelineCommandsMin = 1 // each write an entry of its own, unless the test says otherwise
	}
	h.r, err = NewReplica(cfg)
	must(err)
	h.log.role = raftstore.Role{Term: h.log.role.Term}
	h.log.committed = max(min(h.log.committed, h.log.LastIndex()), p.Index) // HardState.Commit may lag; D2
	h.log.appended = nil
}

// turn is what a group's Process does with its machine.
func (h *host) turn(role *raftstore.Role, reads []raft.ReadState) {
	for i := 0; ; i++ {
		if h.parked != nil {
			if role != nil {
				h.newRole = role
			}
			return // what changed is told when it has ended
		}
		if h.newRole != nil && role == nil {
			role = h.newRole
		}
		h.newRole = nil
		h.r.Update(h.log, raftstore.Update{Appended: h.log.appended, Committed: h.log.committed, Role: role, ReadStates: reads})
		h.log.appended, role, reads = nil, nil, nil
		again := h.r.Work(h.log)
		if f := h.log.detached; f != nil {
			h.log.detached = nil
			h.detached++
			if h.park {
				h.parked = f
				return
			}
			f()
			again = true
		}
		if !again && len(h.log.appended) == 0 {
			return
		}
		if i > 100_000 {
			panic("Work asks for more without end")
		}
	}
}

func (h *host) work() { h.turn(nil, nil) }

// unpark lets what was detached run, and then goes on.
func (h *host) unpark() {
	f := h.parked
	h.parked = nil
	f()
	h.work()
}

// lead makes the replica leader of a term, with the entry that opens it.
func (h *host) lead(term uint64) {
	h.log.role = raftstore.Role{Term: term, Leader: h.id, Leading: true, Open: h.log.LastIndex() + 1}
	h.log.put(&raftpb.Entry{Term: new(term), Index: new(h.log.role.Open)})
	role := h.log.role
	h.turn(&role, nil)
}

func (h *host) follow(term uint64, leader raftid.ReplicaID) {
	h.log.role = raftstore.Role{Term: term, Leader: leader}
	role := h.log.role
	h.turn(&role, nil)
}

// copyFrom brings this log to that of another replica, through index.
func (h *host) copyFrom(o *host, through uint64) {
	for i := h.log.first; i <= min(through, o.log.LastIndex()); i++ {
		mine, ok := h.log.TermAt(i)
		theirs, has := o.log.TermAt(i)
		if !has || ok && mine == theirs {
			continue
		}
		h.log.put(o.log.entries[i-o.log.first])
	}
	h.work()
}

func (h *host) commit(index uint64) {
	h.log.committed = max(h.log.committed, index)
	h.work()
}

// feed lets the stream deliver everything that pd still has.
func (h *host) feed(o *fakeOrder) {
	h.feedTo(o, uint64(len(o.items)))
	h.stream.mark = o.mark()
	h.work()
}

func (h *host) feedTo(o *fakeOrder, n uint64) {
	h.r.Deliver(slices.Clone(o.items[min(o.sealed, n):n]))
	h.stream.newest, h.stream.ok = n, true
	if n > 0 {
		h.stream.mark = pdpb.Mark{Cut: o.items[n-1].Cut, Rev: o.items[n-1].Base + mvcc.Revision(o.items[n-1].Count), Floor: -1}
	}
	h.work()
}

func (h *host) crash(id pdpb.RegionID) {
	h.r.Stop()
	h.store = h.store.Crash()
	h.start(id)
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// putTxn is the simplest write.
func putTxn(key, value string) *pb.TxnRequest {
	return &pb.TxnRequest{Success: []*pb.RequestOp{putOp(&pb.PutRequest{Key: []byte(key), Value: []byte(value)})}}
}

func putOp(r *pb.PutRequest) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: r}}
}

func rangeOp(r *pb.RangeRequest) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: r}}
}

func deleteOp(r *pb.DeleteRangeRequest) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: r}}
}

func txnOp(r *pb.TxnRequest) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: r}}
}

func raftidOf(n uint64) raftid.ReplicaID { return raftid.ReplicaID(n) }
