package main

import (
	"cmp"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"braid/cmd/tests/etcdbin"
)

// simulate makes the history of a store that does everything right: the traffic's own requests, by
// concurrent clients in virtual time, each executed at one instant between call and return. One in
// twenty gets no answer; of these some are executed, even after their client has given up.
func simulate(seed uint64, calls int) *History {
	rng := rand.New(rand.NewPCG(seed, 3))
	t := &Traffic{seed: seed}
	h := &History{Seed: seed, States: make([][]*mvccpb.KeyValue, 2)}
	type event struct {
		at time.Duration
		do func()
	}
	var events []event
	schedule := func(at time.Duration, do func()) {
		i, _ := slices.BinarySearchFunc(events, at, func(e event, at time.Duration) int { return cmp.Compare(e.at, at) })
		events = slices.Insert(events, i, event{at, do})
	}
	now := time.Duration(0)
	after := func(most time.Duration) time.Duration { return now + 1 + time.Duration(rng.Int64N(int64(most))) }
	var start func(c *client)
	start = func(c *client) {
		if calls--; calls < 0 {
			return
		}
		op := &Op{ID: int(t.ids.Add(1)), Client: c.id, Call: now}
		op.Req = c.request(op.ID)
		lost := rng.IntN(20) == 0
		done := after(5 * time.Millisecond)
		if r, ok := op.Req.(*pb.RangeRequest); ok {
			r.Revision = min(r.Revision, h.Last())
		}
		execution := func() {
			last := h.Last()
			at := last
			if r, ok := op.Req.(*pb.RangeRequest); ok && r.Revision > 0 {
				at = r.Revision
			}
			resp, state, wrote := execute(h.States[at], at+1, op.Req)
			if wrote {
				h.States = append(h.States, state)
			}
			resp = proto.Clone(resp)
			if r, ok := resp.(*pb.RangeResponse); ok {
				r.Header.Revision = last
			}
			if !lost {
				op.Resp = resp
			}
		}
		schedule(done, execution)
		end := done + 1 + time.Duration(rng.Int64N(int64(3*time.Millisecond)))
		if lost {
			op.Err = "DeadlineExceeded: context deadline exceeded"
			end = after(8 * time.Millisecond)
			if rng.IntN(2) == 0 {
				events = slices.DeleteFunc(events, func(e event) bool { return e.at == done })
			}
		}
		schedule(end, func() {
			op.Return = now
			t.record(op)
			c.learn(op)
			schedule(after(2*time.Millisecond), func() { start(c) })
		})
	}
	// As in a real round, the first call shows that the store is fresh.
	t.record(&Op{ID: int(t.ids.Add(1)), Client: clients + 1, Call: 1, Return: 2, Req: everyKey(), Resp: &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: 1}}})
	now = 2
	for id := range 8 {
		c := &client{t: t, id: id, rng: rand.New(rand.NewPCG(seed, uint64(id))), mods: map[string]int64{}}
		schedule(after(time.Millisecond), func() { start(c) })
	}
	for len(events) > 0 {
		e := events[0]
		events = events[1:]
		now = e.at
		e.do()
	}
	h.Ops = t.Ops()
	return h
}

func TestRightHistories(t *testing.T) {
	for seed := range uint64(10) {
		h := simulate(seed, 1500)
		unknown := 0
		for _, op := range h.Ops {
			if op.IsWrite() && !op.OK() {
				unknown++
			}
		}
		if h.Last() < 500 || unknown < 20 {
			t.Fatalf("seed %d: %d revisions, %d unknown: not the history this test means", seed, h.Last(), unknown)
		}
		for _, checker := range checkers {
			if v := checker.check(h); v != nil {
				t.Errorf("seed %d, %s: %s", seed, checker.name, v[0])
			}
		}
	}
}

// wrongs change a right history into one that no right store could give. find returns the call to
// change; the change must be seen by the checkers named.
var wrongs = []struct {
	name   string
	change func(h *History, rng *rand.Rand) bool
	seenBy string
}{
	{"an acknowledged write lost", func(h *History, _ *rand.Rand) bool {
		h.States = h.States[:h.Last()-5]
		return true
	}, "order"},
	{"a read of an old state, with the old header", func(h *History, rng *rand.Rand) bool {
		op := choose(h, rng, func(op *Op) bool { return isRead(op) && len(op.Req.(*pb.RangeRequest).RangeEnd) > 0 })
		old := op.Revision() - 60
		op.Resp, _, _ = execute(h.States[old], old+1, op.Req)
		return true
	}, "order keys etcd"},
	{"a read of an old state, with the right header", func(h *History, rng *rand.Rand) bool {
		op := choose(h, rng, func(op *Op) bool { return isRead(op) && len(op.Req.(*pb.RangeRequest).RangeEnd) > 0 })
		rev := op.Revision()
		resp, _, _ := execute(h.States[rev-60], rev-59, op.Req)
		resp.(*pb.RangeResponse).Header.Revision = rev
		op.Resp = resp
		return true
	}, "order keys etcd"},
	{"a read's header one too high", func(h *History, rng *rand.Rand) bool {
		op := choose(h, rng, func(op *Op) bool { return isRead(op) && string(op.Req.(*pb.RangeRequest).RangeEnd) == "z" })
		op.Resp.(*pb.RangeResponse).Header.Revision++
		return true
	}, "order etcd"},
	{"two writes with one revision", func(h *History, rng *rand.Rand) bool {
		op := choose(h, rng, isPut)
		op.Resp.(*pb.PutResponse).Header.Revision--
		return true
	}, "order"},
	{"a revision nobody made", func(h *History, rng *rand.Rand) bool {
		op := choose(h, rng, isPut)
		h.Ops = slices.DeleteFunc(h.Ops, func(o *Op) bool { return o == op })
		return true
	}, "order"},
	{"a hole", func(h *History, _ *rand.Rand) bool {
		h.States = append(h.States, h.States[h.Last()])
		return true
	}, "order"},
	{"a write that failed, and was done", func(h *History, rng *rand.Rand) bool {
		op := choose(h, rng, func(op *Op) bool { r, ok := op.Resp.(*pb.TxnResponse); return ok && op.OK() && r.Succeeded })
		resp := op.Resp.(*pb.TxnResponse)
		resp.Succeeded = false
		resp.Responses = []*pb.ResponseOp{{Response: &pb.ResponseOp_ResponseRange{ResponseRange: &pb.RangeResponse{Header: resp.Header}}}}
		return true
	}, "order"},
	{"a compare that did not hold taken for true", func(h *History, rng *rand.Rand) bool {
		op := choose(h, rng, func(op *Op) bool {
			r, ok := op.Resp.(*pb.TxnResponse)
			return ok && r.Succeeded && len(op.Req.(*pb.TxnRequest).Success) == 1 && op.Req.(*pb.TxnRequest).Success[0].GetRequestPut() != nil
		})
		op.Req.(*pb.TxnRequest).Compare[0].TargetUnion = &pb.Compare_ModRevision{ModRevision: 1}
		return true
	}, "order keys etcd"},
	{"a delete that counts wrong", func(h *History, rng *rand.Rand) bool {
		op := choose(h, rng, func(op *Op) bool { r, ok := op.Resp.(*pb.DeleteRangeResponse); return ok && r.Deleted == 0 })
		op.Resp.(*pb.DeleteRangeResponse).Deleted = 1
		return true
	}, "order"},
	{"prev_kv wrong", func(h *History, rng *rand.Rand) bool {
		op := choose(h, rng, func(op *Op) bool { return isPut(op) && op.Resp.(*pb.PutResponse).PrevKv != nil })
		op.Resp.(*pb.PutResponse).PrevKv.Version++
		return true
	}, "order"},
	{"a version that did not count up", func(h *History, rng *rand.Rand) bool {
		op := choose(h, rng, func(op *Op) bool { return isRead(op) && len(op.Resp.(*pb.RangeResponse).Kvs) > 0 })
		op.Resp.(*pb.RangeResponse).Kvs[0].Version++
		return true
	}, "order etcd"},
	{"a read of the past that shows the present", func(h *History, rng *rand.Rand) bool {
		op := choose(h, rng, func(op *Op) bool {
			r, ok := op.Req.(*pb.RangeRequest)
			return ok && op.OK() && r.Revision > 1 && r.Revision < op.Revision()-3
		})
		rev := op.Revision()
		op.Resp, _, _ = execute(h.States[rev], rev+1, op.Req)
		return true
	}, "order etcd"},
	{"a write behind one that was acknowledged before it began", func(h *History, rng *rand.Rand) bool {
		op := choose(h, rng, isPut)
		late := 50 * time.Millisecond
		op.Call, op.Return = op.Call+late, op.Return+late
		return true
	}, "order"},
	{"a compacted revision served", func(h *History, rng *rand.Rand) bool {
		op := choose(h, rng, func(op *Op) bool {
			r, ok := op.Req.(*pb.RangeRequest)
			return ok && op.OK() && r.Revision > 1 && r.Revision < op.Revision()-3
		})
		rev := op.Req.(*pb.RangeRequest).Revision
		h.Ops = append(h.Ops, &Op{ID: 1 << 30, Client: clients, Call: op.Call - 10, Return: op.Call - 5, Req: &pb.CompactionRequest{Revision: rev + 1},
			Resp: &pb.CompactionResponse{Header: &pb.ResponseHeader{Revision: rev + 1}}})
		return true
	}, "order"},
}

// choose picks an acknowledged call of the middle of the history.
func choose(h *History, rng *rand.Rand, want func(*Op) bool) *Op {
	var fit []*Op
	for _, op := range h.Ops {
		if op.OK() && op.Revision() > 100 && op.Revision() < h.Last()-100 && want(op) {
			fit = append(fit, op)
		}
	}
	return fit[rng.IntN(len(fit))]
}

func isPut(op *Op) bool { _, ok := op.Req.(*pb.PutRequest); return ok }

// isRead: a linearizable read of the present.
func isRead(op *Op) bool {
	r, ok := op.Req.(*pb.RangeRequest)
	return ok && r.Revision == 0 && !r.Serializable
}

// TestWrongHistories: every checker can fail, each wrong is seen by those that must.
func TestWrongHistories(t *testing.T) {
	for _, wrong := range wrongs {
		t.Run(strings.ReplaceAll(wrong.name, " ", "_"), func(t *testing.T) {
			for seed := range uint64(3) {
				h := simulate(100+seed, 1200)
				if !wrong.change(h, rand.New(rand.NewPCG(seed, 9))) {
					t.Fatal("nothing to change")
				}
				for _, checker := range checkers {
					if !strings.Contains(wrong.seenBy, checker.name) {
						continue
					}
					v := checker.check(h)
					if v == nil {
						t.Errorf("seed %d: %s does not see it", seed, checker.name)
					} else if seed == 0 {
						t.Logf("%s: %.300s", checker.name, v[0])
					}
				}
			}
		})
	}
}

func TestSaveAndLoad(t *testing.T) {
	h := simulate(4, 600)
	path := filepath.Join(t.TempDir(), "history.jsonl")
	if err := h.Save(path); err != nil {
		t.Fatal(err)
	}
	got, err := LoadHistory(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Ops) != len(h.Ops) || got.Last() != h.Last() {
		t.Fatalf("%d calls and %d revisions became %d and %d", len(h.Ops), h.Last(), len(got.Ops), got.Last())
	}
	for i, op := range h.Ops {
		g := got.Ops[i]
		if !proto.Equal(op.Req, g.Req) || op.OK() != g.OK() || (op.OK() && !proto.Equal(op.Resp, g.Resp)) || op.Call != g.Call || op.Return != g.Return {
			t.Fatalf("%s became %s", op, g)
		}
	}
	for _, checker := range checkers {
		if v := checker.check(got); v != nil {
			t.Errorf("%s: %s", checker.name, v[0])
		}
	}
}

// realRound runs a round against etcd.
func realRound(t *testing.T, fault Fault, plant Plant, seed uint64) *RoundResult {
	t.Helper()
	if testing.Short() {
		t.Skip("starts three processes")
	}
	bin, err := etcdbin.Etcd()
	if err != nil {
		t.Fatal(err)
	}
	result, err := RunRound(t.Context(), RoundConfig{Bin: bin, Seed: seed, Fault: fault, Plant: plant, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Log(result.Line())
	return result
}

func TestEtcdRound(t *testing.T) {
	for _, fault := range []Fault{KillLeader, Transfers} {
		if result := realRound(t, fault, "", 1); len(result.Violations) > 0 {
			t.Errorf("%s: %s", fault, strings.Join(result.Violations, "\n"))
		}
	}
}

// TestPlantedInClients: reads that may be behind, and a retry that may do a write twice, planted in
// real rounds.
func TestPlantedInClients(t *testing.T) {
	for plant, fault := range map[Plant]Fault{PlantStale: KillLeader, PlantRetry: PauseLeader} {
		found := false
		for seed := range uint64(4) {
			if result := realRound(t, fault, plant, seed); len(result.Violations) > 0 {
				t.Logf("%s: %.300s", plant, result.Violations[0])
				found = true
				break
			}
		}
		if !found {
			t.Errorf("%s was not found", plant)
		}
	}
}
