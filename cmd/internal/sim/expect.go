package sim

import (
	"bytes"
	"errors"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/region/regionpb"
)

// checkOp holds an answer against a sequential store at its place.
func (c *checker) checkOp(h history, o *op) error {
	if !o.done {
		return nil
	}
	if o.err != nil {
		var re *regionpb.Error
		if errors.As(o.err, &re) && re.NotExecuted() {
			for rev, fx := range c.effects {
				for i := range fx {
					if bytes.Equal(fx[i].Value, o.value) && !fx[i].Delete {
						return fmt.Errorf("was refused (%v) and took effect at revision %d", o.err, rev)
					}
				}
			}
		}
		return nil
	}
	rev := mvcc.Revision(o.resp.GetHeader().GetRevision())
	before := rev
	if c.wrote(o, rev) {
		before = rev - 1
	}
	e := expectation{h: h, before: before, rev: rev, pending: map[string]kv{}}
	want, err := e.txn(o.txn)
	if err != nil {
		return err
	}
	if got := print(o.resp); got != print(want) {
		return fmt.Errorf("answered\n%s\na sequential store at revision %d answers\n%s", got, before, print(want))
	}
	if e.effects != len(c.effectsOf(o, rev)) {
		return fmt.Errorf("%d effects at revision %d, a sequential store has %d", len(c.effectsOf(o, rev)), rev, e.effects)
	}
	return nil
}

func (c *checker) effectsOf(o *op, rev mvcc.Revision) []regionpb.Effect {
	if !c.wrote(o, rev) {
		return nil
	}
	return c.effects[rev]
}

func print(r *pb.TxnResponse) string {
	s := fmt.Sprintf("succeeded %v\n", r.Succeeded)
	one := func(x *mvccpb.KeyValue) string {
		if x == nil {
			return "nil"
		}
		return fmt.Sprintf("%s=%s c%d m%d v%d l%d", x.Key, x.Value, x.CreateRevision, x.ModRevision, x.Version, x.Lease)
	}
	for _, op := range r.Responses {
		switch x := op.Response.(type) {
		case *pb.ResponseOp_ResponsePut:
			s += "put prev " + one(x.ResponsePut.PrevKv) + "\n"
		case *pb.ResponseOp_ResponseDeleteRange:
			s += fmt.Sprintf("deleted %d", x.ResponseDeleteRange.Deleted)
			for _, p := range x.ResponseDeleteRange.PrevKvs {
				s += " " + one(p)
			}
			s += "\n"
		case *pb.ResponseOp_ResponseRange:
			s += fmt.Sprintf("range %d", x.ResponseRange.Count)
			for _, p := range x.ResponseRange.Kvs {
				s += " " + one(p)
			}
			s += "\n"
		}
	}
	return s
}

// expectation evaluates the shapes of randomTxn on a state, with the dumbest code that can.
type expectation struct {
	h           history
	before, rev mvcc.Revision
	pending     map[string]kv // written by the transaction itself
	effects     int
}

func (e *expectation) get(k []byte) kv {
	if v, ok := e.pending[string(k)]; ok {
		return v
	}
	return e.h.at(k, e.before)
}

func (e *expectation) txn(t *pb.TxnRequest) (*pb.TxnResponse, error) {
	resp := &pb.TxnResponse{Succeeded: true}
	for _, x := range t.Compare {
		v := e.get(x.Key)
		var have, want int64
		switch x.Target {
		case pb.Compare_MOD:
			have, want = v.mod, x.GetModRevision()
		case pb.Compare_VERSION:
			have, want = v.version, x.GetVersion()
		default:
			return nil, fmt.Errorf("no expectation for %v", x)
		}
		ok := x.Result == pb.Compare_EQUAL && have == want || x.Result == pb.Compare_LESS && have < want || x.Result == pb.Compare_GREATER && have > want
		resp.Succeeded = resp.Succeeded && ok
	}
	ops := t.Success
	if !resp.Succeeded {
		ops = t.Failure
	}
	for _, op := range ops {
		switch x := op.Request.(type) {
		case *pb.RequestOp_RequestPut:
			k := x.RequestPut.Key
			old := e.get(k)
			r := &pb.PutResponse{PrevKv: asKV(k, old)}
			now := kv{value: x.RequestPut.Value, create: old.create, mod: int64(e.rev), version: old.version + 1, lease: x.RequestPut.Lease}
			if old.version == 0 {
				now.create = int64(e.rev)
			}
			e.pending[string(k)] = now
			e.effects++
			resp.Responses = append(resp.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponsePut{ResponsePut: r}})
		case *pb.RequestOp_RequestDeleteRange:
			k := x.RequestDeleteRange.Key
			r := &pb.DeleteRangeResponse{}
			if old := e.get(k); old.version > 0 {
				r.Deleted, r.PrevKvs = 1, []*mvccpb.KeyValue{asKV(k, old)}
				e.pending[string(k)] = kv{}
				e.effects++
			}
			resp.Responses = append(resp.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: r}})
		case *pb.RequestOp_RequestRange:
			r := &pb.RangeResponse{}
			for _, k := range keysOf(x.RequestRange) {
				if v := e.get(k); v.version > 0 {
					r.Count++
					r.Kvs = append(r.Kvs, asKV(k, v))
				}
			}
			resp.Responses = append(resp.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseRange{ResponseRange: r}})
		}
	}
	return resp, nil
}

// keysOf are the keys of a range, which begins at one of ours.
func keysOf(r *pb.RangeRequest) (keys [][]byte) {
	if len(r.RangeEnd) == 0 {
		return [][]byte{r.Key}
	}
	var i int
	if _, err := fmt.Sscanf(string(r.Key), "k%d", &i); err != nil {
		panic(err)
	}
	for ; bytes.Compare(key(i), r.RangeEnd) < 0; i++ {
		keys = append(keys, key(i))
	}
	return keys
}

func asKV(k []byte, v kv) *mvccpb.KeyValue {
	if v.version == 0 {
		return nil
	}
	return &mvccpb.KeyValue{Key: k, Value: v.value, CreateRevision: v.create, ModRevision: v.mod, Version: v.version, Lease: v.lease}
}
