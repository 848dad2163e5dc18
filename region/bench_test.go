package region

import (
	"context"
	"fmt"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// nullStore is an engine without cost, so that what is measured is this package.
type nullStore struct{}

func (nullStore) Get([]byte, mvcc.Revision) (mvcc.Version, bool, error) {
	return mvcc.Version{}, false, nil
}
func (nullStore) Scan(mvcc.Span, mvcc.Revision, mvcc.ScanOptions, func(*mvcc.Version) bool) error {
	return nil
}
func (nullStore) Count(mvcc.Span, mvcc.Revision) (int64, error)               { return 0, nil }
func (nullStore) Attached([]int64, mvcc.Span, func(int64, []byte) bool) error { return nil }
func (nullStore) Lookup([]mvcc.RecordKey, func(int, []byte)) error            { return nil }
func (nullStore) Record(mvcc.RecordKey) ([]byte, bool, error)                 { return nil, false, nil }
func (nullStore) Records(mvcc.RecordKind, mvcc.Span, func(mvcc.RecordKey, []byte) bool) error {
	return nil
}
func (nullStore) Events(context.Context, mvcc.Revision, mvcc.Revision, mvcc.Span, func(*mvcc.Version) error) error {
	return nil
}
func (nullStore) NewBatch() mvcc.Batch { return nullBatch{} }

type nullBatch struct{}

func (nullBatch) Put(*mvcc.Version) error                { return nil }
func (nullBatch) Detach(int64, []byte) error             { return nil }
func (nullBatch) SetRecord(mvcc.RecordKey, []byte) error { return nil }
func (nullBatch) SetPosition(uint64, []byte) error       { return nil }
func (nullBatch) Commit() error                          { return nil }
func (nullBatch) Close() error                           { return nil }

func benchPuts(n int) []*pb.TxnRequest {
	value := make([]byte, 256)
	out := make([]*pb.TxnRequest, n)
	for i := range out {
		out[i] = putTxn(fmt.Sprintf("key-%08d", i*7919%n), string(value))
	}
	return out
}

// BenchmarkEvaluateAndEncode: 64 puts of 256 bytes, evaluated into one entry and encoded, with
// the overlay of 16 entries in flight. One operation is one put.
func BenchmarkEvaluateAndEncode(b *testing.B) {
	const batch, inflight = 64, 16
	puts := benchPuts(10_000)
	ov := newOverlay()
	var ev evaluator
	ev.begin(nullStore{}, ov, mvcc.Span{}, 1, -1)
	ev.whole = true // the limit is a turn's, and this is many turns
	b.ReportAllocs()
	index := uint64(0)
	for i := 0; i < b.N; i += batch {
		index++
		e := regionpb.Entry{Term: 1, Index: index}
		for j := range batch {
			c := &command{}
			if v, err := ev.run(c, puts[(i+j)%len(puts)]); v != evaluated || err != nil {
				b.Fatal(v, err)
			}
			e.Commands = append(e.Commands, regionpb.Command{Effects: c.effects})
		}
		ov.commit(index)
		if data := e.Encode(); len(data) < batch*256 {
			b.Fatal("short")
		}
		if index > inflight {
			ov.prune(index - inflight)
		}
	}
}

// BenchmarkApply: entries of 64 puts of 256 bytes, one item each, applied by a follower to
// mvcc.MemStore, and to an engine that costs nothing. One operation is one put.
func BenchmarkApply(b *testing.B) {
	for _, engine := range []struct {
		name  string
		store mvcc.Store
	}{{"engine=null", nullStore{}}, {"engine=memstore", mvcc.NewMemStore()}} {
		b.Run(engine.name, func(b *testing.B) {
			const batch = 64
			puts := benchPuts(10_000)
			desc := testDesc
			desc.Span = mvcc.Span{}
			h := newHost(1, desc, nil)
			h.cfg.Engine = engine.store
			p := InitialPosition(desc, 1)
			r, err := NewReplica(Config{Replica: 1, Engine: engine.store, Position: p, Order: h.stream, Wake: func() {}, Fatal: func(err error) { b.Fatal(err) }})
			must(err)
			h.r = r
			h.work()
			var cum uint64
			b.ReportAllocs()
			rev := mvcc.Revision(1)
			for i := 0; i < b.N; i += batch {
				b.StopTimer()
				e := regionpb.Entry{Term: 6, Index: h.log.LastIndex() + 1}
				for j := range batch {
					put := puts[(i+j)%len(puts)].Success[0].GetRequestPut()
					e.Commands = append(e.Commands, regionpb.Command{Effects: []regionpb.Effect{{Key: put.Key, Value: put.Value, Version: 1}}})
				}
				h.log.put(&raftpb.Entry{Term: new(e.Term), Index: new(e.Index), Data: e.Encode()})
				cum += batch
				it := pdpb.Item{Region: desc.ID, Incarnation: desc.Incarnation, N: e.Index - 10, Cut: 1, Upto: e.Index, UptoTerm: 6, Cum: cum, Count: batch, Base: rev}
				rev += batch
				h.log.committed = e.Index
				b.StartTimer()
				r.Deliver([]pdpb.Item{it})
				h.work()
			}
			if r.Applied().Cum != cum {
				b.Fatal("not applied")
			}
		})
	}
}

// BenchmarkWritePath: a put through Write, evaluation, proposal, report, item, apply and reply of
// one replica on an engine that costs nothing; batches of 64. One operation is one put.
func BenchmarkWritePath(b *testing.B) {
	const batch = 64
	puts := benchPuts(10_000)
	desc := testDesc
	desc.Span = mvcc.Span{}
	h := newHost(1, desc, nil)
	o := newFakeOrder(&desc)
	r, err := NewReplica(Config{Replica: 1, Engine: nullStore{}, Position: InitialPosition(desc, 1), Order: h.stream, Wake: func() {}, Fatal: func(err error) { b.Fatal(err) }})
	must(err)
	h.r = r
	h.lead(6)
	h.commit(11)
	b.ReportAllocs()
	answered := 0
	reply := func(_ *pb.TxnResponse, err error) {
		must(err)
		answered++
	}
	for i := 0; i < b.N; i += batch {
		for j := range batch {
			r.Write(&Write{Txn: puts[(i+j)%len(puts)], Reply: reply})
		}
		h.work()
		h.log.committed = h.log.LastIndex()
		h.work()
		rep, _ := r.BuildReport()
		it, ok := o.order(&rep, 0)
		if !ok {
			b.Fatal("nothing to order")
		}
		r.Deliver([]pdpb.Item{*it})
		h.work()
		if h.log.LastIndex() > 1<<12 {
			h.log.Truncate(h.log.committed)
		}
	}
	if answered < b.N {
		b.Fatal("not answered")
	}
}
