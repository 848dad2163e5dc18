package region

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"sort"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/region/regionpb"
)

// modelStore is the stupid model of a store: every version of every key in a list, transactions
// one after another, every number known. It shares no code with the evaluation it checks.
type modelStore struct {
	hist map[string][]*mvccpb.KeyValue // Version 0 is a deletion
	rev  int64
}

func newModel() *modelStore { return &modelStore{hist: map[string][]*mvccpb.KeyValue{}, rev: 1} }

func (m *modelStore) at(key string, rev int64) *mvccpb.KeyValue {
	h := m.hist[key]
	for i := len(h) - 1; i >= 0; i-- {
		if h[i].ModRevision <= rev {
			if h[i].Version == 0 {
				return nil
			}
			kv := h[i]
			return &mvccpb.KeyValue{Key: kv.Key, Value: kv.Value, CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision, Version: kv.Version, Lease: kv.Lease}
		}
	}
	return nil
}

func (m *modelStore) list(key, end []byte, rev int64) []*mvccpb.KeyValue {
	var out []*mvccpb.KeyValue
	keys := make([]string, 0, len(m.hist))
	for k := range m.hist {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		in := k == string(key)
		if len(end) > 0 {
			in = k >= string(key) && (string(end) == "\x00" || k < string(end))
		}
		if kv := m.at(k, rev); in && kv != nil {
			out = append(out, kv)
		}
	}
	return out
}

func (m *modelStore) holds(c *pb.Compare) bool {
	kvs := m.list(c.Key, c.RangeEnd, m.rev)
	if len(kvs) == 0 {
		if c.Target == pb.Compare_VALUE {
			return false
		}
		kvs = []*mvccpb.KeyValue{{}}
	}
	for _, kv := range kvs {
		var s int
		switch c.Target {
		case pb.Compare_VALUE:
			s = bytes.Compare(kv.Value, c.GetValue())
		case pb.Compare_MOD:
			s = cmp.Compare(kv.ModRevision, c.GetModRevision())
		case pb.Compare_CREATE:
			s = cmp.Compare(kv.CreateRevision, c.GetCreateRevision())
		case pb.Compare_VERSION:
			s = cmp.Compare(kv.Version, c.GetVersion())
		case pb.Compare_LEASE:
			s = cmp.Compare(kv.Lease, c.GetLease())
		}
		ok := true
		switch c.Result {
		case pb.Compare_EQUAL:
			ok = s == 0
		case pb.Compare_NOT_EQUAL:
			ok = s != 0
		case pb.Compare_LESS:
			ok = s < 0
		case pb.Compare_GREATER:
			ok = s > 0
		}
		if !ok {
			return false
		}
	}
	return true
}

// decide fixes the branches of a transaction and of those nested on its way, on the state before.
func (m *modelStore) decide(t *pb.TxnRequest, into map[*pb.TxnRequest]bool) {
	ok := true
	for _, c := range t.Compare {
		ok = ok && m.holds(c)
	}
	into[t] = ok
	ops := t.Success
	if !ok {
		ops = t.Failure
	}
	for _, op := range ops {
		if n := op.GetRequestTxn(); n != nil {
			m.decide(n, into)
		}
	}
}

func (m *modelStore) refuse(t *pb.TxnRequest, way map[*pb.TxnRequest]bool, known, floor int64) error {
	ops := t.Success
	if !way[t] {
		ops = t.Failure
	}
	for _, op := range ops {
		switch {
		case op.GetRequestRange() != nil:
			if r := op.GetRequestRange().Revision; r > known {
				return regionpb.ErrorOf(regionpb.FutureRevision)
			} else if r != 0 && r < floor {
				return regionpb.ErrorOf(regionpb.Compacted)
			}
		case op.GetRequestPut() != nil:
			p := op.GetRequestPut()
			if p.Lease != 0 {
				return regionpb.ErrorOf(regionpb.LeaseNotFound)
			}
			if (p.IgnoreValue || p.IgnoreLease) && m.at(string(p.Key), m.rev) == nil {
				return regionpb.ErrorOf(regionpb.KeyNotFound)
			}
		case op.GetRequestTxn() != nil:
			if err := m.refuse(op.GetRequestTxn(), way, known, floor); err != nil {
				return err
			}
		}
	}
	return nil
}

// run executes a transaction as the next one. known is the highest revision that a range may
// name, floor the lowest.
func (m *modelStore) run(t *pb.TxnRequest, known, floor int64) (*pb.TxnResponse, error) {
	way := map[*pb.TxnRequest]bool{}
	m.decide(t, way)
	if err := m.refuse(t, way, known, floor); err != nil {
		return nil, err
	}
	begin := m.rev
	resp := m.exec(t, way, begin)
	resp.Header = &pb.ResponseHeader{Revision: m.rev}
	return resp, nil
}

func (m *modelStore) exec(t *pb.TxnRequest, way map[*pb.TxnRequest]bool, begin int64) *pb.TxnResponse {
	resp := &pb.TxnResponse{Header: &pb.ResponseHeader{}, Succeeded: way[t]}
	ops := t.Success
	if !way[t] {
		ops = t.Failure
	}
	for _, op := range ops {
		var out *pb.ResponseOp
		switch {
		case op.GetRequestPut() != nil:
			p := op.GetRequestPut()
			prev := m.at(string(p.Key), m.rev)
			m.rev = begin + 1
			kv := &mvccpb.KeyValue{Key: p.Key, Value: p.Value, CreateRevision: m.rev, ModRevision: m.rev, Version: 1}
			if prev != nil {
				kv.CreateRevision, kv.Version = prev.CreateRevision, prev.Version+1
				if p.IgnoreValue {
					kv.Value = prev.Value
				}
			}
			m.write(kv)
			r := &pb.PutResponse{Header: &pb.ResponseHeader{Revision: m.rev}}
			if p.PrevKv {
				r.PrevKv = prev
			}
			out = &pb.ResponseOp{Response: &pb.ResponseOp_ResponsePut{ResponsePut: r}}
		case op.GetRequestDeleteRange() != nil:
			d := op.GetRequestDeleteRange()
			gone := m.list(d.Key, d.RangeEnd, m.rev)
			if len(gone) > 0 {
				m.rev = begin + 1
			}
			for _, kv := range gone {
				m.write(&mvccpb.KeyValue{Key: kv.Key, ModRevision: m.rev})
			}
			r := &pb.DeleteRangeResponse{Header: &pb.ResponseHeader{Revision: m.rev}, Deleted: int64(len(gone))}
			if d.PrevKv {
				r.PrevKvs = gone
			}
			out = &pb.ResponseOp{Response: &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: r}}
		case op.GetRequestRange() != nil:
			out = &pb.ResponseOp{Response: &pb.ResponseOp_ResponseRange{ResponseRange: m.find(op.GetRequestRange())}}
		case op.GetRequestTxn() != nil:
			out = &pb.ResponseOp{Response: &pb.ResponseOp_ResponseTxn{ResponseTxn: m.exec(op.GetRequestTxn(), way, begin)}}
		}
		resp.Responses = append(resp.Responses, out)
	}
	return resp
}

func (m *modelStore) write(kv *mvccpb.KeyValue) {
	m.hist[string(kv.Key)] = append(m.hist[string(kv.Key)], kv)
}

func (m *modelStore) find(r *pb.RangeRequest) *pb.RangeResponse {
	rev := m.rev
	if r.Revision > 0 {
		rev = r.Revision
	}
	kvs := m.list(r.Key, r.RangeEnd, rev)
	resp := &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: m.rev}, Count: int64(len(kvs))}
	if r.CountOnly {
		return resp
	}
	filters := r.MinModRevision != 0 || r.MaxModRevision != 0 || r.MinCreateRevision != 0 || r.MaxCreateRevision != 0
	plain := r.SortOrder == pb.RangeRequest_NONE || r.SortTarget == pb.RangeRequest_KEY && r.SortOrder == pb.RangeRequest_ASCEND
	if plain && !filters && r.Limit > 0 && int64(len(kvs)) > r.Limit+1 {
		kvs = kvs[:r.Limit+1]
	}
	kvs = slices.DeleteFunc(kvs, func(kv *mvccpb.KeyValue) bool {
		out := func(v, lo, hi int64) bool { return lo != 0 && v < lo || hi != 0 && v > hi }
		return out(kv.ModRevision, r.MinModRevision, r.MaxModRevision) || out(kv.CreateRevision, r.MinCreateRevision, r.MaxCreateRevision)
	})
	by := byField{kvs, map[pb.RangeRequest_SortTarget]func(a, b *mvccpb.KeyValue) int{
		pb.RangeRequest_KEY:     func(a, b *mvccpb.KeyValue) int { return bytes.Compare(a.Key, b.Key) },
		pb.RangeRequest_VALUE:   func(a, b *mvccpb.KeyValue) int { return bytes.Compare(a.Value, b.Value) },
		pb.RangeRequest_VERSION: func(a, b *mvccpb.KeyValue) int { return cmp.Compare(a.Version, b.Version) },
		pb.RangeRequest_MOD:     func(a, b *mvccpb.KeyValue) int { return cmp.Compare(a.ModRevision, b.ModRevision) },
		pb.RangeRequest_CREATE:  func(a, b *mvccpb.KeyValue) int { return cmp.Compare(a.CreateRevision, b.CreateRevision) },
	}[r.SortTarget]}
	if r.SortOrder == pb.RangeRequest_DESCEND {
		sort.Sort(sort.Reverse(by))
	} else if r.SortTarget != pb.RangeRequest_KEY {
		sort.Sort(by)
	}
	if r.Limit > 0 && int64(len(kvs)) > r.Limit {
		kvs, resp.More = kvs[:r.Limit], true
	}
	for _, kv := range kvs {
		if r.KeysOnly {
			kv.Value = nil
			if r.SortTarget != pb.RangeRequest_VALUE {
				kv.Lease = 0
			}
		}
	}
	resp.Kvs = kvs
	return resp
}

type byField struct {
	kvs []*mvccpb.KeyValue
	cmp func(a, b *mvccpb.KeyValue) int
}

func (b byField) Len() int           { return len(b.kvs) }
func (b byField) Less(i, j int) bool { return b.cmp(b.kvs[i], b.kvs[j]) < 0 }
func (b byField) Swap(i, j int)      { b.kvs[i], b.kvs[j] = b.kvs[j], b.kvs[i] }

// dump prints every version, as a replica's engine must hold them.
func (m *modelStore) dump() string {
	var keys []string
	for k := range m.hist {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	var b bytes.Buffer
	for _, k := range keys {
		h := m.hist[k]
		for i := range h {
			kv := h[i]
			fmt.Fprintf(&b, "%s@%d c%d v%d %q\n", k, kv.ModRevision, kv.CreateRevision, kv.Version, kv.Value)
		}
	}
	return b.String()
}
