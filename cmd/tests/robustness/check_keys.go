package main

import (
	"fmt"
	"math"
	"time"

	"github.com/anishathalye/porcupine"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// CheckKeys checks each key by itself with porcupine, as a register that is read, written and
// compared. Answers are judged without the store's numbering: what is known of a revision is what
// answers show of the key. Calls on several keys count for each key alone, which any linearizable
// store must pass as well. Only what became of writes without an answer is taken from the store's
// past, where CheckOrder could tell: a search that has to try all of them at all times does not end.
//
// It returns the keys whose history no order explains.
func CheckKeys(h *History, timeout time.Duration) []string {
	byKey := map[string][]porcupine.Operation{}
	outcomes, known := newOrderCheck(h).outcomes()
	for _, op := range h.Ops {
		end := int64(op.Return)
		if !op.OK() {
			if known && outcomes[op].rev == 0 {
				continue
			}
			end = math.MaxInt64 // may take effect at any later time, or never: then as the last one
			if known {
				end = int64(outcomes[op].by)
			}
		}
		for key, in := range projections(op) {
			byKey[key] = append(byKey[key], porcupine.Operation{ClientId: op.Client, Input: in, Call: int64(op.Call), Output: op, Return: end})
		}
	}
	var violations []string
	deadline := time.Now().Add(timeout)
	for key, ops := range byKey {
		renumber(ops)
		switch porcupine.CheckOperationsTimeout(registerModel, ops, max(time.Until(deadline), time.Millisecond)) {
		case porcupine.Illegal:
			violations = append(violations, fmt.Sprintf("key %q is not linearizable (%d calls)", key, len(ops)))
		case porcupine.Unknown:
			violations = append(violations, fmt.Sprintf("key %q: no verdict in time (%d calls)", key, len(ops)))
		}
	}
	return violations
}

// renumber gives calls without an answer a client of their own, which porcupine requires: their
// client went on while they were under way.
func renumber(ops []porcupine.Operation) {
	next := 0
	for _, op := range ops {
		next = max(next, op.ClientId+1)
	}
	for i := range ops {
		if !ops[i].Output.(*Op).OK() {
			ops[i].ClientId = next
			next++
		}
	}
}

// register is a key's value; mod is its mod revision, 0 while no answer has shown it.
type register struct {
	exists bool
	value  string
	mod    int64
}

// access is what one call means for one key.
type access struct {
	// cond is the mod revision (or, with byVersion unknown to a register, none) the key must have.
	cond *int64
	// fails: the compare is known not to have held, on this key alone.
	fails bool
	// reads: what the call saw of the key, before write.
	reads bool
	saw   register
	// writes: the key is written (or deleted), if cond holds.
	writes  bool
	write   register
	unknown bool // no answer: cond decides by itself
	deleted *int64
}

// projections returns what a call means for each of its keys.
func projections(op *Op) map[string]access {
	out := map[string]access{}
	switch r := op.Req.(type) {
	case *pb.RangeRequest:
		if !op.OK() || r.Serializable || r.Revision != 0 || r.Limit != 0 {
			return nil
		}
		for _, key := range keysIn(r) {
			out[key] = access{reads: true, saw: seen(op.Resp.(*pb.RangeResponse).Kvs, key)}
		}
	case *pb.PutRequest:
		out[string(r.Key)] = access{writes: true, write: register{true, string(r.Value), op.Revision()}, unknown: !op.OK()}
	case *pb.DeleteRangeRequest:
		for _, key := range keysIn(r) {
			a := access{writes: true, unknown: !op.OK()}
			if op.OK() {
				a.deleted = deletedOf(r, op.Resp.(*pb.DeleteRangeResponse), key)
			}
			out[key] = a
		}
	case *pb.TxnRequest:
		return txnProjections(op, r)
	}
	return out
}

func txnProjections(op *Op, r *pb.TxnRequest) map[string]access {
	out := map[string]access{}
	resp, _ := op.Resp.(*pb.TxnResponse)
	for _, c := range r.Compare {
		if c.Target != pb.Compare_MOD {
			continue
		}
		mod := c.GetModRevision()
		switch {
		case resp == nil && len(r.Compare) == 1:
			out[string(c.Key)] = access{cond: &mod, unknown: true}
		case resp.GetSucceeded():
			out[string(c.Key)] = access{cond: &mod}
		case resp != nil && len(r.Compare) == 1:
			out[string(c.Key)] = access{cond: &mod, fails: true}
		}
	}
	ops := r.Success
	if resp != nil && !resp.Succeeded {
		ops = r.Failure
	}
	for i, o := range ops {
		switch o := o.Request.(type) {
		case *pb.RequestOp_RequestRange:
			if resp == nil {
				continue
			}
			for _, key := range keysIn(o.RequestRange) {
				a := out[key]
				a.reads, a.saw = true, seen(resp.Responses[i].GetResponseRange().Kvs, key)
				out[key] = a
			}
		case *pb.RequestOp_RequestPut:
			key := string(o.RequestPut.Key)
			a := out[key]
			a.writes, a.write, a.unknown = true, register{true, string(o.RequestPut.Value), op.Revision()}, resp == nil
			out[key] = a
		case *pb.RequestOp_RequestDeleteRange:
			key := string(o.RequestDeleteRange.Key)
			a := out[key]
			a.writes, a.unknown = true, resp == nil
			if resp != nil {
				a.deleted = &resp.Responses[i].GetResponseDeleteRange().Deleted
			}
			out[key] = a
		}
	}
	return out
}

// deletedOf is how many keys a delete found at key, 0 or 1. One of a range tells only when asked for
// what was there before, as the traffic does.
func deletedOf(r *pb.DeleteRangeRequest, resp *pb.DeleteRangeResponse, key string) *int64 {
	n := resp.Deleted
	if len(r.RangeEnd) > 0 {
		n = 0
		if seen(resp.PrevKvs, key).exists {
			n = 1
		}
	}
	return &n
}

// keysIn lists the traffic's keys that a range covers.
func keysIn(r interface {
	GetKey() []byte
	GetRangeEnd() []byte
}) []string {
	var keys []string
	for _, key := range trafficKeys {
		if inRange([]byte(key), r.GetKey(), r.GetRangeEnd()) {
			keys = append(keys, key)
		}
	}
	return keys
}

func seen(kvs []*mvccpb.KeyValue, key string) register {
	for _, kv := range kvs {
		if string(kv.Key) == key {
			return register{true, string(kv.Value), kv.ModRevision}
		}
	}
	return register{}
}

// registerModel is nondeterministic for one case only: an unanswered compare on a key whose mod
// revision no answer has shown yet may or may not hold.
var registerModel = (&porcupine.NondeterministicModel{
	Init: func() []any { return []any{register{}} },
	Step: func(s, in, _ any) []any { return step(s.(register), in.(access)) },
}).ToModel()

func step(s register, a access) []any {
	if a.cond != nil {
		unclear := s.exists && s.mod == 0
		holds := unclear || (s.exists && s.mod == *a.cond) || (!s.exists && *a.cond == 0)
		if unclear && *a.cond == 0 {
			holds, unclear = false, false // it exists: its mod revision is not 0
		}
		switch {
		case a.unknown && (!holds || !a.writes):
			return []any{s}
		case a.unknown && unclear:
			return []any{s, a.write}
		case a.fails && holds && !unclear, !a.fails && !a.unknown && !holds:
			return nil
		case !a.fails && !a.unknown && unclear:
			s.mod = *a.cond // the compare held, which shows it
		}
	}
	if a.reads {
		if s.exists != a.saw.exists || s.value != a.saw.value || (s.mod != 0 && s.mod != a.saw.mod) {
			return nil
		}
		s.mod = a.saw.mod
	}
	if a.deleted != nil && (*a.deleted == 1) != s.exists {
		return nil
	}
	if a.writes {
		return []any{a.write}
	}
	return []any{s}
}
