package sim

import (
	"bytes"
	"errors"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/pd/order"
	"braid/region"
	"braid/region/regionpb"
)

type regionWrite = region.Write

var raiseFence = order.Event{Kind: order.EventRaiseFence}

// version is a key's state from a revision on.
type version struct {
	rev mvcc.Revision
	kv  kv
}

// history is every key's versions, made by playing all effects in revision order on an empty map.
type history map[string][]version

func (h history) at(k []byte, rev mvcc.Revision) kv {
	vs := h[string(k)]
	for i := len(vs) - 1; i >= 0; i-- {
		if vs[i].rev <= rev {
			return vs[i].kv
		}
	}
	return kv{}
}

// final replays everything that was applied and holds answers and reads against it.
func (c *checker) final() {
	h := c.replay()
	if c.w.err != nil {
		return
	}
	for _, r := range c.reads {
		for k, got := range r.got {
			if want := h.at(key(k), r.point.Rev); !same(want, *got) {
				c.w.fail("I4: read %d of %s at %v gave %+v, the state was %+v", r.id, key(k), r.point, *got, want)
				return
			}
		}
	}
	for _, o := range c.ops {
		if err := c.checkOp(h, o); err != nil {
			c.w.fail("op %d (%v): %v", o.id, o.txn, err)
			return
		}
	}
	for _, s := range c.w.stores {
		if err := c.checkEngine(h, s); err != nil {
			c.w.fail("store %d: %v", s.i, err)
			return
		}
	}
}

// replay plays the effects in order; I1 over the whole run.
func (c *checker) replay() history {
	h := history{}
	for rev := mvcc.Revision(2); rev <= c.mark.Rev; rev++ {
		fx, ok := c.effects[rev]
		if !ok {
			c.w.fail("I1: nobody has revision %d of %d", rev, c.mark.Rev)
			return nil
		}
		for i := range fx {
			f := &fx[i]
			k := string(f.Key)
			before := h.at(f.Key, rev)
			if f.Delete {
				if before.version == 0 {
					c.w.fail("revision %d deletes %s, which is not there", rev, k)
				}
				h[k] = append(h[k], version{rev: rev})
				continue
			}
			now := kv{value: f.Value, create: before.create, mod: int64(rev), version: before.version + 1}
			if before.version == 0 {
				now.create = int64(rev)
			}
			if f.Version != now.version || (f.CreateKind == regionpb.CreateNew) != (before.version == 0) {
				c.w.fail("revision %d puts version %d of %s (%+v), the state before was %+v: it was evaluated on another state", rev, f.Version, k, f, before)
			}
			h[k] = append(h[k], version{rev, now})
		}
	}
	if n := len(c.effects); n != int(c.mark.Rev)-1 {
		c.w.fail("I1: %d revisions have effects, the order gave out %d", n, c.mark.Rev-1)
	}
	return h
}

func same(a, b kv) bool {
	return bytes.Equal(a.value, b.value) && a.create == b.create && a.mod == b.mod && a.version == b.version
}

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
		return fmt.Sprintf("%s=%s c%d m%d v%d", x.Key, x.Value, x.CreateRevision, x.ModRevision, x.Version)
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
			now := kv{value: x.RequestPut.Value, create: old.create, mod: int64(e.rev), version: old.version + 1}
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
			k := x.RequestRange.Key
			r := &pb.RangeResponse{}
			if v := e.get(k); v.version > 0 {
				r.Count, r.Kvs = 1, []*mvccpb.KeyValue{asKV(k, v)}
			}
			resp.Responses = append(resp.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseRange{ResponseRange: r}})
		}
	}
	return resp, nil
}

func asKV(k []byte, v kv) *mvccpb.KeyValue {
	if v.version == 0 {
		return nil
	}
	return &mvccpb.KeyValue{Key: k, Value: v.value, CreateRevision: v.create, ModRevision: v.mod, Version: v.version}
}

// checkEngine compares a store's whole state with the replay, at every revision.
func (c *checker) checkEngine(h history, s *store) error {
	if err := s.engine.CheckIndex(); err != nil {
		return err
	}
	for k := range c.w.keys() {
		for rev := mvcc.Revision(1); rev <= c.mark.Rev; rev++ {
			v, ok, err := s.engine.Get(key(k), rev)
			if err != nil {
				return err
			}
			got := kv{}
			if ok && !v.Tombstone() {
				got = kv{value: v.Value, create: int64(v.Create), mod: int64(v.Mod), version: v.Version}
			}
			if want := h.at(key(k), rev); !same(got, want) {
				return fmt.Errorf("I3: %s at revision %d is %+v, it was %+v", key(k), rev, got, want)
			}
		}
	}
	return nil
}
