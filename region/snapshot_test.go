package region

import (
	"context"
	"encoding/binary"
	"io"
	"testing"

	"braid/mvcc"
	"braid/raftstore"
	"braid/region/regionpb"
)

// memSnapshots is a SnapshotBackend over mvcc.MemStore: what it streams is a token for the
// pinned span.
type memSnapshots struct {
	h     *host
	spans *[]*mvcc.MemSpan
}

func (m memSnapshots) Pin() (PinnedState, error) {
	data, pos := m.h.store.ExportSpan(uint64(testDesc.ID), testDesc.Span)
	return &memPinned{m, data, pos}, nil
}

func (m memSnapshots) Import(group uint64, _ mvcc.Span) (StateImport, error) {
	return &memImport{m: m, group: group}, nil
}

type memPinned struct {
	m    memSnapshots
	data *mvcc.MemSpan
	pos  []byte
}

func (p *memPinned) Position(uint64) ([]byte, bool, error) { return p.pos, p.pos != nil, nil }
func (p *memPinned) Close() error                          { return nil }
func (p *memPinned) Export(_ context.Context, _ mvcc.Span, w io.Writer) error {
	*p.m.spans = append(*p.m.spans, p.data)
	_, err := w.Write(binary.BigEndian.AppendUint64(nil, uint64(len(*p.m.spans)-1)))
	return err
}

type memImport struct {
	m     memSnapshots
	group uint64
	token []byte
}

func (i *memImport) Write(b []byte) (int, error) { i.token = append(i.token, b...); return len(b), nil }
func (i *memImport) Close() error                { return nil }
func (i *memImport) Install(position []byte) error {
	return i.m.h.store.InstallSpan(i.group, (*i.m.spans)[binary.BigEndian.Uint64(i.token)], position)
}

// transfer moves a snapshot from one host to another, in small pieces, and resets its log.
func transfer(t *testing.T, from, to *host) {
	t.Helper()
	src, err := from.r.Snapshot()
	must(err)
	meta := src.Meta()
	sink, err := to.r.Receive(meta)
	must(err)
	if err := src.WriteTo(context.Background(), oneByOne{sink}); err != nil {
		t.Fatal(err)
	}
	must(sink.Install())
	must(sink.Close())
	must(src.Close())
	to.log.entries, to.log.appended = nil, nil
	to.log.first, to.log.firstTerm, to.log.committed = meta.Index+1, meta.Term, meta.Index
	to.r.Update(to.log, raftstore.Update{Committed: meta.Index, Installed: &meta})
	to.work()
}

type oneByOne struct{ w io.Writer }

func (o oneByOne) Write(b []byte) (int, error) {
	for i := range b {
		if _, err := o.w.Write(b[i : i+1]); err != nil {
			return i, err
		}
	}
	return len(b), nil
}

// TestSnapshotCarriesThePosition: a replica that was filled by a snapshot numbers what follows as
// the others do (D1), tells its waiters that it does not know (E6), and without the cumulative
// count it notices that it cannot (O3).
func TestSnapshotCarriesThePosition(t *testing.T) {
	for _, mutant := range []bool{false, true} {
		var spans []*mvcc.MemSpan
		var a, b *host
		a = newHost(1, testDesc, nil)
		a.cfg.Snapshots, a.cfg.Mutants.SnapNoCum = memSnapshots{a, &spans}, mutant
		a.start(testDesc.ID)
		b = newHost(2, testDesc, nil)
		b.cfg.Snapshots = memSnapshots{b, &spans}
		b.start(testDesc.ID)
		o := newFakeOrder(&testDesc)

		// b leads first, and has something in flight that nobody will ever see.
		var fates []error
		b.lead(6)
		b.commit(11)
		b.r.Write(&Write{Txn: putTxn("x", "lost"), Reply: reply(&fates)})
		b.work()
		a.lead(7)
		a.commit(11)
		for _, v := range []string{"1", "2", "3"} {
			a.r.Write(&Write{Txn: putTxn("k", v), Reply: reply(&fates)})
			a.work()
		}
		a.commit(a.log.LastIndex())
		rep, _ := a.r.BuildReport()
		o.order(&rep, 4)
		a.feed(o)
		b.follow(7, 1)
		transfer(t, a, b)
		if len(fates) != 4 || fates[3] == nil || fates[3].Error() != regionpb.ErrorOf(regionpb.Unknown).Error() {
			t.Fatalf("fates: %v", fates)
		}
		a.r.Write(&Write{Txn: putTxn("k", "4"), Reply: reply(&fates)})
		a.work()
		b.copyFrom(a, a.log.LastIndex())
		a.commit(a.log.LastIndex())
		b.commit(a.log.LastIndex())
		rep, _ = a.r.BuildReport()
		o.order(&rep, 0)
		a.feed(o)
		b.feed(o)
		if mutant {
			if b.fatal == nil {
				t.Fatal("a snapshot without the cumulative count went unnoticed")
			}
			continue
		}
		if a.fatal != nil || b.fatal != nil {
			t.Fatal(a.fatal, b.fatal)
		}
		pa, pb := a.r.Applied(), b.r.Applied()
		if pa.String() != pb.String() || pa.Cum != 4 {
			t.Fatalf("%s, %s", &pa, &pb)
		}
		if x, y := dump(a.store), dump(b.store); x != y {
			t.Fatalf("%s\n%s", x, y)
		}
	}
}

// TestSnapshotBehindTheItems: a snapshot that reaches further in the log and less far in the order
// would take back what readers and watchers were given, whenever that turns out (I4, I7).
func TestSnapshotBehindTheItems(t *testing.T) {
	var spans []*mvcc.MemSpan
	a, b := newHost(1, testDesc, nil), newHost(2, testDesc, nil)
	for _, h := range []*host{a, b} {
		h.cfg.Snapshots = memSnapshots{h, &spans}
		h.start(testDesc.ID)
	}
	src, err := a.r.Snapshot()
	must(err)
	defer src.Close()
	stage := func() (*snapshotSink, error) {
		sink, err := b.r.Receive(src.Meta())
		must(err)
		return sink.(*snapshotSink), src.WriteTo(context.Background(), sink)
	}
	sink, err := stage()
	must(err)
	if sink.Stale() {
		t.Error("a snapshot of the same items is stale")
	}
	// An item without entries is applied: the index stays.
	b.r.pos.Item++
	b.r.publishApplied()
	if !sink.Stale() {
		t.Error("a staged snapshot that lacks an applied item is not stale")
	}
	if _, err := stage(); err == nil {
		t.Error("a snapshot that lacks an applied item was staged")
	}
}

// TestSnapshotFloorBeforeItsState: versions that the sender has removed are gone for readers once
// the state is exchanged, before the owner adopts the position (C1).
func TestSnapshotFloorBeforeItsState(t *testing.T) {
	var spans []*mvcc.MemSpan
	a, b := newHost(1, testDesc, nil), newHost(2, testDesc, nil)
	for _, h := range []*host{a, b} {
		h.cfg.Snapshots = memSnapshots{h, &spans}
		h.start(testDesc.ID)
	}
	src, err := a.r.Snapshot()
	must(err)
	defer src.Close()
	src.(*snapshotSource).pos.Floor = 9
	sink, err := b.r.Receive(src.Meta())
	must(err)
	must(src.WriteTo(context.Background(), sink))
	must(sink.Install())
	if floor := b.r.Applied().Floor; floor != 9 {
		t.Errorf("readers know floor %d, the state's is 9", floor)
	}
}
