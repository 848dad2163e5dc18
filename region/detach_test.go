package region

import (
	"errors"
	"fmt"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"

	"braid/mvcc"
	"braid/raftstore"
	"braid/region/regionpb"
)

// lone is a leading replica with its pd, for tests of what it leaves to be done beside its group.
type lone struct {
	t *testing.T
	*host
	pd *fakeOrder
}

func newLone(t *testing.T, change func(*Config)) *lone {
	h := newHost(1, testDesc, func(c *Config) {
		c.Limits.TurnKeysMax, c.Limits.TurnBytesMax = 8, 400
		if change != nil {
			change(c)
		}
	})
	l := &lone{t: t, host: h, pd: newFakeOrder(&testDesc)}
	h.lead(6)
	l.settle()
	return l
}

// settle commits, orders and applies what is in the log.
func (l *lone) settle() {
	l.t.Helper()
	l.commit(l.log.LastIndex())
	if rep, ok := l.r.BuildReport(); ok {
		l.pd.order(&rep, 0)
	}
	l.feed(l.pd)
	if l.fatal != nil {
		l.t.Fatal(l.fatal)
	}
}

type result struct {
	resp *pb.TxnResponse
	err  error
	n    int
}

func (l *lone) write(txn *pb.TxnRequest) *result {
	res := new(result)
	l.r.Write(&Write{Txn: txn, Reply: func(resp *pb.TxnResponse, err error) { res.resp, res.err, res.n = resp, err, res.n+1 }})
	l.work()
	return res
}

// load puts n keys.
func (l *lone) load(n int) {
	for i := range n {
		res := l.write(putTxn(fmt.Sprintf("k%03d", i), "v"))
		l.settle()
		if res.err != nil || res.n != 1 {
			l.t.Fatalf("put %d: %v", i, res.err)
		}
	}
}

func deleteAll() *pb.TxnRequest {
	return &pb.TxnRequest{Success: []*pb.RequestOp{deleteOp(&pb.DeleteRangeRequest{Key: []byte("k"), RangeEnd: []byte("l"), PrevKv: true})}}
}

func (r *result) deleted() *pb.DeleteRangeResponse {
	return r.resp.Responses[0].GetResponseDeleteRange()
}

// TestLongCommandIsEvaluatedBesideTheGroup: a deletion that looks at more keys than a turn has is
// parked, and so is its application; what comes meanwhile waits behind it and sees it.
func TestLongCommandIsEvaluatedBesideTheGroup(t *testing.T) {
	l := newLone(t, nil)
	l.load(40)
	l.park = true
	last := l.log.LastIndex()
	del := l.write(deleteAll())
	if l.parked == nil || l.log.LastIndex() != last {
		t.Fatalf("not parked; the log is at %d, was at %d", l.log.LastIndex(), last)
	}
	get := l.write(&pb.TxnRequest{Success: []*pb.RequestOp{rangeOp(&pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")})}})
	l.unpark()
	if l.log.LastIndex() == last {
		t.Fatal("the deletion was not proposed")
	}
	l.settle()
	if l.parked == nil || del.n != 0 {
		t.Fatal("the deletion was not applied beside the group")
	}
	l.unpark()
	for range 3 {
		l.settle()
	}
	if del.n != 1 || del.err != nil || del.deleted().Deleted != 40 || len(del.deleted().PrevKvs) != 40 {
		t.Fatalf("%d answers to the deletion: %v, %v", del.n, del.resp, del.err)
	}
	if get.n != 1 || get.err != nil || get.resp.Responses[0].GetResponseRange().Count != 0 {
		t.Fatalf("the read behind it: %d answers: %v, %v", get.n, get.resp, get.err)
	}
	if n, err := l.store.Count(mvcc.Span{Start: []byte("k"), End: []byte("l")}, mvcc.Latest); err != nil || n != 0 {
		t.Fatalf("%d keys are left, %v", n, err)
	}
}

// TestLongCommandOfAnotherTerm: leadership that ends while a command is evaluated beside the group
// ends the command; nothing of it is left, also when the replica leads again before it is told.
func TestLongCommandOfAnotherTerm(t *testing.T) {
	for _, again := range []bool{false, true} {
		t.Run(fmt.Sprint(again), func(t *testing.T) {
			l := newLone(t, nil)
			l.load(40)
			l.park = true
			del := l.write(deleteAll())
			if again {
				l.log.role = raftstore.Role{Term: 8, Leader: 1, Leading: true, Open: l.log.LastIndex() + 1}
				l.log.put(&raftpb.Entry{Term: new(uint64(8)), Index: new(l.log.role.Open)})
				role := l.log.role
				l.turn(&role, nil)
			} else {
				l.follow(7, 2)
			}
			l.park = false
			last := l.log.LastIndex()
			l.unpark()
			if again {
				for range 4 {
					l.settle()
				}
				if del.n != 1 || del.err != nil || del.deleted().Deleted != 40 {
					t.Fatalf("%d answers: %v, %v", del.n, del.resp, del.err)
				}
			} else {
				var re *regionpb.Error
				if del.n != 1 || !errors.As(del.err, &re) || re.Code != regionpb.NotLeader || l.log.LastIndex() != last {
					t.Fatalf("%d answers: %v, %v; the log went from %d to %d", del.n, del.resp, del.err, last, l.log.LastIndex())
				}
			}
			if l.r.ov.len() != 0 || len(l.r.ov.log) != 0 {
				t.Fatalf("the overlay holds %d keys, %d writes to undo", l.r.ov.len(), len(l.r.ov.log))
			}
		})
	}
}

// TestUndecidedLongCommandWaits: a long command whose compare has to wait for a number (E4) is not
// evaluated again and again until there is one.
func TestUndecidedLongCommandWaits(t *testing.T) {
	l := newLone(t, nil)
	l.load(40)
	first := l.write(putTxn("k000", "new")) // pending
	before := l.detached
	txn := deleteAll()
	txn.Compare = []*pb.Compare{{
		Key: []byte("k"), RangeEnd: []byte("l"), Target: pb.Compare_MOD, Result: pb.Compare_NOT_EQUAL,
		TargetUnion: &pb.Compare_ModRevision{ModRevision: 1000},
	}}
	del := l.write(txn)
	for range 5 {
		l.work()
	}
	if n := l.detached - before; n != 1 {
		t.Fatalf("evaluated %d times", n)
	}
	for range 4 {
		l.settle()
	}
	if first.n != 1 || del.n != 1 || del.err != nil || !del.resp.Succeeded || del.deleted().Deleted != 40 {
		t.Fatalf("%d answers: %v, %v", del.n, del.resp, del.err)
	}
}

// TestLongCommandsMemoryIsGivenBack: what a deletion of very many keys needs is not kept.
func TestLongCommandsMemoryIsGivenBack(t *testing.T) {
	const n = undoKeptMax + 1
	l := newLone(t, func(c *Config) { c.Limits = DefaultLimits })
	for i := 0; i < n; i += 1024 {
		txn := new(pb.TxnRequest)
		for j := i; j < min(i+1024, n); j++ {
			txn.Success = append(txn.Success, putOp(&pb.PutRequest{Key: fmt.Appendf(nil, "k%06d", j)}))
		}
		l.write(txn)
		l.settle()
	}
	del := l.write(deleteAll())
	for range 3 {
		l.settle()
	}
	if del.n != 1 || del.err != nil || del.deleted().Deleted != n {
		t.Fatalf("%d answers: %v", del.n, del.err)
	}
	if l.detached == 0 {
		t.Fatal("it was evaluated in a turn")
	}
	if c := cap(l.r.ov.log); c > undoKeptMax {
		t.Errorf("the overlay keeps room for %d writes", c)
	}
	if c := l.r.entryEffects(); c > effectsKeptMax {
		t.Errorf("apply keeps room for %d effects", c)
	}
	if c := cap(l.r.ev.found); c > foundKeptMax {
		t.Errorf("evaluation keeps room for %d keys", c)
	}
}

// TestTurnsKeysAreShared: commands that are short alone share what a turn has, and none of them is
// evaluated beside the group.
func TestTurnsKeysAreShared(t *testing.T) {
	l := newLone(t, nil)
	l.load(6)
	before := l.detached
	var all []*result
	for range 4 {
		res := new(result)
		l.r.Write(&Write{Txn: &pb.TxnRequest{Success: []*pb.RequestOp{rangeOp(&pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")})}},
			Reply: func(resp *pb.TxnResponse, err error) { res.resp, res.err, res.n = resp, err, res.n+1 }})
		all = append(all, res)
	}
	l.work()
	for range 2 {
		l.settle()
	}
	for i, res := range all {
		if res.n != 1 || res.err != nil || res.resp.Responses[0].GetResponseRange().Count != 6 {
			t.Fatalf("command %d: %d answers: %v, %v", i, res.n, res.resp, res.err)
		}
	}
	if l.detached != before {
		t.Fatalf("%d were detached", l.detached-before)
	}
}

// TestStalledEngineIsWaitedForBesideTheGroup: while the engine makes writers wait the group does
// not wait with them.
func TestStalledEngineIsWaitedForBesideTheGroup(t *testing.T) {
	stalled := false
	l := newLone(t, func(c *Config) { c.Stalled = func() bool { return stalled } })
	l.load(3)
	stalled, l.park = true, true
	put := l.write(putTxn("k", "v"))
	applied := l.r.AppliedIndex()
	l.settle()
	if l.parked == nil || put.n != 0 || l.r.AppliedIndex() != applied {
		t.Fatalf("parked %v, %d answers, applied %d, was %d", l.parked != nil, put.n, l.r.AppliedIndex(), applied)
	}
	l.park = false
	l.unpark()
	if put.n != 1 || put.err != nil || l.fatal != nil {
		t.Fatalf("%d answers: %v, %v", put.n, put.err, l.fatal)
	}
}

// TestFloorInAStalledEngine: a floor of an idle region, for which no other call of Work may ever come, is
// raised although the engine makes writers wait at that moment.
func TestFloorInAStalledEngine(t *testing.T) {
	stalled := false
	l := newLone(t, func(c *Config) { c.Stalled = func() bool { return stalled } })
	l.load(3)
	l.settle()
	stalled, l.park = true, true
	rev := l.r.CompleteThrough()
	q := &floorRequest{rev: rev, done: make(chan mvcc.Revision, 1)}
	l.r.mu.Lock()
	l.r.mu.floors = append(l.r.mu.floors, q)
	l.r.mu.Unlock()
	l.work()
	if l.parked == nil || len(q.done) != 0 {
		t.Fatalf("parked %v, %d answers while the engine stands still", l.parked != nil, len(q.done))
	}
	l.unpark()
	if len(q.done) != 1 || <-q.done != rev || l.r.Applied().Floor != rev || l.fatal != nil {
		t.Fatalf("the floor is %d, want %d; %v", l.r.Applied().Floor, rev, l.fatal)
	}
}

// TestCommandTooLargeForAnEntry: a command whose changes would fit into no message to a follower is
// refused for good, evaluated beside the group or in a turn, and leaves nothing behind.
func TestCommandTooLargeForAnEntry(t *testing.T) {
	for _, detached := range []bool{false, true} {
		t.Run(fmt.Sprint(detached), func(t *testing.T) {
			l := newLone(t, func(c *Config) {
				c.Limits.CommandBytesMax = 200
				if !detached {
					c.Limits.TurnKeysMax = 1000
				}
			})
			l.load(60)
			last, before := l.log.LastIndex(), l.detached
			del := l.write(deleteAll())
			l.settle()
			if del.n != 1 || !errors.Is(del.err, regionpb.ErrorOf(regionpb.TooLarge)) || l.log.LastIndex() != last {
				t.Fatalf("%d answers: %v, %v; the log went from %d to %d", del.n, del.resp, del.err, last, l.log.LastIndex())
			}
			if got := l.detached > before; got != detached {
				t.Fatalf("evaluated beside the group: %v", got)
			}
			// The size of an answer does not count, and the keys are all there.
			get := l.write(&pb.TxnRequest{Success: []*pb.RequestOp{rangeOp(&pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")}), putOp(&pb.PutRequest{Key: []byte("k000")})}})
			for range 3 {
				l.settle()
			}
			if get.n != 1 || get.err != nil || get.resp.Responses[0].GetResponseRange().Count != 60 {
				t.Fatalf("%d answers to the read: %v, %v", get.n, get.resp, get.err)
			}
		})
	}
}
