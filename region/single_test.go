package region

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

func reply(into *[]error) func(*pb.TxnResponse, error) {
	return func(_ *pb.TxnResponse, err error) { *into = append(*into, err) }
}

// ownOrder is a single-group store's orderer and placement machine: the fake pd, fed with its
// own log.
type ownOrder struct {
	*fakeOrder
	applied []string
}

func (o *ownOrder) OrderCommitted(r pdpb.Report) pdpb.Item {
	it, ok := o.order(&r, 0)
	if !ok {
		panic("a report of one entry moved nothing")
	}
	return *it
}

func (o *ownOrder) Mark() pdpb.Mark { return o.mark() }

func (o *ownOrder) ApplyMeta(index, _ uint64, payload []byte) {
	o.applied = append(o.applied, fmt.Sprintf("%d:%s", index, payload))
}

func (o *ownOrder) AppendState(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(len(o.applied)))
	for _, s := range o.applied {
		b = append(binary.AppendUvarint(b, uint64(len(s))), s...)
	}
	return b
}

func (o *ownOrder) LoadState(state []byte, p *Position) error {
	o.fakeOrder = newFakeOrder(&p.Descriptor)
	o.cut, o.rev, o.upto, o.term, o.cum = p.Cut, p.Revision, p.Upto, p.UptoTerm, p.Cum
	o.items, o.sealed = make([]pdpb.Item, p.Item), p.Item
	o.applied = nil
	if len(state) == 0 {
		return nil
	}
	n, k := binary.Uvarint(state)
	for state = state[k:]; n > 0; n-- {
		l, k := binary.Uvarint(state)
		o.applied = append(o.applied, string(state[k:k+int(l)]))
		state = state[k+int(l):]
	}
	return nil
}

// TestSingleGroup: entries and commands of the placement machine share the log; every entry is a
// cut of its own, alike on all replicas however their logs were committed, and across a crash.
func TestSingleGroup(t *testing.T) {
	orders := map[int]*ownOrder{}
	mk := func(id int) *host {
		return newHost(raftidOf(uint64(id)), testDesc, func(c *Config) {
			orders[id] = &ownOrder{}
			c.Orderer, c.Meta = orders[id], orders[id]
		})
	}
	a, b := mk(1), mk(2)
	var fates, metas []error
	a.lead(6)
	a.commit(11)
	put := func(k, v string) {
		a.r.Write(&Write{Txn: putTxn(k, v), Reply: reply(&fates)})
		a.work()
	}
	put("k", "1")
	a.r.ProposeMeta([]byte("bootstrap"), func(err error) { metas = append(metas, err) })
	a.work()
	put("k", "2")
	a.commit(12)
	a.commit(a.log.LastIndex())
	put("l", "3")
	a.commit(a.log.LastIndex())
	b.copyFrom(a, a.log.LastIndex())
	b.commit(a.log.LastIndex())
	if a.fatal != nil || b.fatal != nil {
		t.Fatal(a.fatal, b.fatal)
	}
	if fmt.Sprint(fates, metas) != "[<nil> <nil> <nil>] [<nil>]" {
		t.Fatalf("%v %v", fates, metas)
	}
	pa, pb := a.r.Applied(), b.r.Applied()
	if pa.String() != pb.String() || pa.Revision != 4 || pa.Item != 4 || string(pa.Meta) != string(pb.Meta) {
		t.Fatalf("%s\n%s", &pa, &pb)
	}
	if !a.r.Idle() || !b.r.Idle() {
		t.Error("nothing is pending, yet it is not idle")
	}

	b.store.Flush()
	put("k", "5")
	b.copyFrom(a, a.log.LastIndex())
	a.commit(a.log.LastIndex())
	b.commit(a.log.LastIndex())
	b.crash(testDesc.ID)
	b.work()
	b.commit(a.log.LastIndex())
	if pa, pb = a.r.Applied(), b.r.Applied(); pa.String() != pb.String() || fmt.Sprint(orders[2].applied) != "[13:bootstrap]" {
		t.Fatalf("after a crash\n%s\n%s %v", &pa, &pb, orders[2].applied)
	}
	if x, y := dump(a.store), dump(b.store); x != y {
		t.Fatalf("%s\n%s", x, y)
	}
}

// TestMetaCommandsAreBounded: commands of the placement machine that cannot be proposed fill the
// queue they share with writes, wherever in it they are; more are refused, and room comes back.
func TestMetaCommandsAreBounded(t *testing.T) {
	o := &ownOrder{}
	const max = 4
	h := newHost(1, testDesc, func(c *Config) {
		c.Orderer, c.Meta = o, o
		c.Limits.QueueCountMax = max
	})
	h.lead(6)
	h.commit(11)
	h.log.dropAll = true
	var fates []error
	propose := func() {
		h.r.ProposeMeta([]byte("event"), func(err error) { fates = append(fates, err) })
		h.work() // takes it from the inbox each time
	}
	for range max {
		propose()
	}
	if len(fates) != 0 {
		t.Fatalf("%v before the queue was full", fates)
	}
	propose()
	h.r.Write(&Write{Txn: putTxn("k", "1"), Reply: reply(&fates)})
	if len(fates) != 2 || !errors.Is(fates[0], regionpb.ErrorOf(regionpb.TooManyRequests)) || !errors.Is(fates[1], regionpb.ErrorOf(regionpb.TooManyRequests)) {
		t.Fatalf("%v with a full queue", fates)
	}
	h.log.dropAll = false
	h.work()
	h.commit(h.log.LastIndex())
	if len(fates) != 2+max || errors.Join(fates[2:]...) != nil {
		t.Fatalf("%v", fates)
	}
	for range max - 1 {
		propose()
	}
	h.follow(7, 2) // refuses what waits
	if n := h.r.Stats().Queued; n != 0 {
		t.Fatalf("%d count as queued when nothing is", n)
	}
}

// TestReadPoint: the read point of a single-group store waits for raft's confirmation and for
// the confirmed index to be applied; whoever comes meanwhile takes the next question.
func TestReadPoint(t *testing.T) {
	o := &ownOrder{}
	h := newHost(1, testDesc, func(c *Config) { c.Orderer, c.Meta = o, o })
	h.lead(6)
	h.commit(11)
	var fates []error
	h.r.Write(&Write{Txn: putTxn("k", "1"), Reply: reply(&fates)})
	h.work()
	type result struct {
		rp  pdpb.ReadPoint
		err error
	}
	got := make(chan result, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		rp, err := h.r.ReadPoint(context.Background())
		got <- result{rp, err}
	})
	for h.asked() == 0 {
		h.work()
	}
	states := []raft.ReadState{{Index: 12, RequestCtx: h.log.reads[0]}}
	h.turn(nil, states)
	h.commit(12)
	res := <-got
	if res.err != nil || res.rp.Rev != 2 || res.rp.Cut != 1 {
		t.Fatalf("%+v", res)
	}
	ctx, cancel := context.WithCancel(context.Background())
	wg.Go(func() {
		_, err := h.r.ReadPoint(ctx)
		got <- result{err: err}
	})
	for h.asked() == 1 {
		h.work()
	}
	cancel()
	if res := <-got; !errors.Is(res.err, context.Canceled) {
		t.Fatalf("%+v", res)
	}
	wg.Wait()
}

func (h *host) asked() int { return len(h.log.reads) }

// lockedStream is a stream whose mark moves while readers wait.
type lockedStream struct {
	mu      sync.Mutex
	mark    pdpb.Mark
	newest  uint64
	changed chan struct{}
}

func (s *lockedStream) State(pdpb.RegionID) (pdpb.Mark, uint64, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mark, s.newest, true
}
func (s *lockedStream) Report(pdpb.RegionID) {}
func (s *lockedStream) set(m pdpb.Mark, newest uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mark, s.newest = m, newest
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *lockedStream) WaitMark(ctx context.Context, _ pdpb.RegionID, cut pdpb.Cut) error {
	for {
		s.mu.Lock()
		done, ch := s.mark.Cut >= cut, s.changed
		s.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-ch:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// TestReadersWait: many readers, on their own goroutines, wait for a mark and then for the item
// that it names; a stop lets the others go.
func TestReadersWait(t *testing.T) {
	h := newHost(1, testDesc, nil)
	st := &lockedStream{mark: pdpb.Mark{Rev: 1, Floor: -1}, changed: make(chan struct{})}
	r, err := NewReplica(Config{Replica: 1, Engine: h.store, Position: InitialPosition(testDesc, 1), Order: st, Wake: func() {},
		Fatal: func(err error) { t.Error(err) }})
	must(err)
	h.r = r
	o := newFakeOrder(&testDesc)
	h.lead(6)
	h.commit(11)
	var fates []error
	r.Write(&Write{Txn: putTxn("k", "1"), Reply: reply(&fates)})
	h.work()
	h.commit(12)
	rep, _ := r.BuildReport()
	it, _ := o.order(&rep, 0)

	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			resp, err := r.Read(ctx, &regionpb.ReadRequest{Region: 7, Cut: 1, Rev: 2, Span: mvcc.Key([]byte("k"))})
			if err != nil || len(resp.KVs) != 1 || string(resp.KVs[0].Value) != "1" {
				t.Errorf("%+v %v", resp, err)
			}
		})
	}
	st.set(o.mark(), 1)
	// The mark is here, its item is not applied: who pins the engine's state now would miss it.
	short, stop := context.WithTimeout(ctx, time.Millisecond)
	if err := r.AwaitCut(short, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("complete before the item is applied: %v", err)
	}
	stop()
	r.Deliver([]pdpb.Item{*it})
	h.work()
	wg.Wait()
	if err := r.AwaitCut(ctx, 1); err != nil {
		t.Error(err)
	}

	stopped := make(chan error, 1)
	st.set(pdpb.Mark{Cut: 9, Rev: 9, Floor: -1}, 2) // an item that will never come
	wg.Go(func() {
		_, err := r.Read(ctx, &regionpb.ReadRequest{Region: 7, Cut: 9, Rev: 2, Span: mvcc.Key([]byte("k"))})
		stopped <- err
	})
	for {
		r.mu.Lock()
		n := len(r.mu.waiters)
		r.mu.Unlock()
		if n == 1 {
			break
		}
		if ctx.Err() != nil {
			t.Fatal("the reader did not wait")
		}
	}
	r.Stop()
	if err := <-stopped; !errors.Is(err, ErrStopped) {
		t.Fatal(err)
	}
	wg.Wait()
}

// TestSingleGroupOrderStopsWithThePosition: the order core's state is written with the position,
// so it must not be ahead of it: after a crash the entry would be ordered twice, and a reader
// would be given a revision whose effects are not there.
func TestSingleGroupOrderStopsWithThePosition(t *testing.T) {
	o := &ownOrder{}
	h := newHost(1, testDesc, func(c *Config) {
		c.Orderer, c.Meta = o, o
		c.Observer.Position = func(p *Position) {
			if m := o.Mark(); m.Cut != p.Cut || m.Rev != p.Revision {
				t.Errorf("position at cut %d revision %d, the order's state at %+v", p.Cut, p.Revision, m)
			}
		}
	})
	h.lead(6)
	h.commit(11)
	var fates []error
	for _, v := range []string{"1", "2", "3"} {
		h.r.Write(&Write{Txn: putTxn("k", v), Reply: reply(&fates)})
		h.work()
	}
	h.commit(h.log.LastIndex())
	for range 4 {
		h.work()
		h.r.mu.Lock()
		if h.r.mu.vouched > h.r.mu.applied.Revision {
			t.Errorf("vouched %d, applied %d", h.r.mu.vouched, h.r.mu.applied.Revision)
		}
		h.r.mu.Unlock()
	}
	if len(fates) != 3 {
		t.Fatal(fates)
	}
}
