package routertest

import (
	"bytes"
	"cmp"
	"slices"
	"sort"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/region/regionpb"
)

func spanOf(key, end []byte) mvcc.Span {
	switch {
	case len(end) == 0:
		return mvcc.Key(key)
	case string(end) == "\x00":
		return mvcc.Span{Start: key}
	}
	return mvcc.Span{Start: key, End: end}
}

// write executes a transaction on the map, operation by operation, as etcd's documentation tells.
func (s *Store) write(req *pb.TxnRequest) (*pb.TxnResponse, error) {
	t := &txn{s: s, begin: s.rev}
	if err := t.check(req); err != nil {
		return nil, err
	}
	resp := t.run(req)
	resp.Header.Revision = int64(t.begin)
	if t.events > 0 {
		s.rev++
		s.cut++
		resp.Header.Revision++
	}
	return resp, nil
}

// writesNothing says whether a transaction takes branches without writes.
func (s *Store) writesNothing(req *pb.TxnRequest) bool {
	ops, _ := (&txn{s: s, begin: s.rev}).taken(req)
	return !slices.ContainsFunc(ops, func(op *pb.RequestOp) bool {
		inner := op.GetRequestTxn()
		return op.GetRequestRange() == nil && (inner == nil || !s.writesNothing(inner))
	})
}

// Txn executes a transaction on the whole store, as if it had one region.
func (s *Store) Txn(req *pb.TxnRequest) (*pb.TxnResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.write(req)
}

// txn is a transaction in progress: its changes have revision begin+1.
type txn struct {
	s      *Store
	begin  mvcc.Revision
	events int64
}

func (t *txn) now() mvcc.Revision {
	if t.events > 0 {
		return t.begin + 1
	}
	return t.begin
}

// taken returns the operations of the branch that a transaction takes. Compares look at the state
// before the whole transaction.
func (t *txn) taken(req *pb.TxnRequest) (ops []*pb.RequestOp, succeeded bool) {
	for _, c := range req.Compare {
		if !t.compare(c) {
			return req.Failure, false
		}
	}
	return req.Success, true
}

func (t *txn) compare(c *pb.Compare) bool {
	list := t.s.alive(spanOf(c.Key, c.RangeEnd), t.begin)
	if len(list) == 0 {
		return c.Target != pb.Compare_VALUE && holds(c, &mvccpb.KeyValue{})
	}
	for _, v := range list {
		if !holds(c, keyValue(v)) {
			return false
		}
	}
	return true
}

func holds(c *pb.Compare, kv *mvccpb.KeyValue) bool {
	d := map[pb.Compare_CompareTarget]int{
		pb.Compare_VALUE:   bytes.Compare(kv.Value, c.GetValue()),
		pb.Compare_CREATE:  cmp.Compare(kv.CreateRevision, c.GetCreateRevision()),
		pb.Compare_MOD:     cmp.Compare(kv.ModRevision, c.GetModRevision()),
		pb.Compare_VERSION: cmp.Compare(kv.Version, c.GetVersion()),
		pb.Compare_LEASE:   cmp.Compare(kv.Lease, c.GetLease()),
	}[c.Target]
	switch c.Result {
	case pb.Compare_EQUAL:
		return d == 0
	case pb.Compare_NOT_EQUAL:
		return d != 0
	case pb.Compare_GREATER:
		return d > 0
	case pb.Compare_LESS:
		return d < 0
	}
	return true
}

func (t *txn) check(req *pb.TxnRequest) error {
	ops, _ := t.taken(req)
	for _, op := range ops {
		var err error
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			switch rev := mvcc.Revision(o.RequestRange.Revision); {
			case rev == 0:
			case rev > t.begin:
				err = regionpb.ErrorOf(regionpb.FutureRevision)
			case rev < t.s.floor:
				err = regionpb.ErrorOf(regionpb.Compacted)
			}
		case *pb.RequestOp_RequestPut:
			p := o.RequestPut
			if p.Lease != 0 {
				err = regionpb.ErrorOf(regionpb.LeaseNotFound) // there are no leases here
			} else if _, ok := t.s.at(string(p.Key), t.begin); !ok && (p.IgnoreValue || p.IgnoreLease) {
				err = regionpb.ErrorOf(regionpb.KeyNotFound)
			}
		case *pb.RequestOp_RequestTxn:
			err = t.check(o.RequestTxn)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (t *txn) run(req *pb.TxnRequest) *pb.TxnResponse {
	ops, ok := t.taken(req)
	resp := &pb.TxnResponse{Header: &pb.ResponseHeader{}, Succeeded: ok}
	for _, op := range ops {
		out := &pb.ResponseOp{}
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			out.Response = &pb.ResponseOp_ResponseRange{ResponseRange: t.get(o.RequestRange)}
		case *pb.RequestOp_RequestPut:
			out.Response = &pb.ResponseOp_ResponsePut{ResponsePut: t.put(o.RequestPut)}
		case *pb.RequestOp_RequestDeleteRange:
			out.Response = &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: t.delete(o.RequestDeleteRange)}
		case *pb.RequestOp_RequestTxn:
			out.Response = &pb.ResponseOp_ResponseTxn{ResponseTxn: t.run(o.RequestTxn)}
		}
		resp.Responses = append(resp.Responses, out)
	}
	return resp
}

func (t *txn) add(v mvcc.Version) {
	v.Mod, v.Sub = t.begin+1, t.events
	t.events++
	if v.Version == 1 {
		v.Create = v.Mod
	}
	// A key deleted and put again in one transaction keeps only its last version.
	t.s.history[string(v.Key)] = append(t.s.history[string(v.Key)], v)
}

func (t *txn) put(p *pb.PutRequest) *pb.PutResponse {
	old, ok := t.s.at(string(p.Key), t.begin+1)
	v := mvcc.Version{Key: p.Key, Value: p.Value, Lease: p.Lease, Version: old.Version + 1, Create: old.Create}
	if p.IgnoreValue {
		v.Value = old.Value
	}
	if p.IgnoreLease {
		v.Lease = old.Lease
	}
	t.add(v)
	resp := &pb.PutResponse{Header: &pb.ResponseHeader{Revision: int64(t.begin) + 1}}
	if p.PrevKv && ok {
		resp.PrevKv = keyValue(old)
	}
	return resp
}

func (t *txn) delete(d *pb.DeleteRangeRequest) *pb.DeleteRangeResponse {
	resp := &pb.DeleteRangeResponse{}
	for _, v := range t.s.alive(spanOf(d.Key, d.RangeEnd), t.begin+1) {
		if d.PrevKv {
			resp.PrevKvs = append(resp.PrevKvs, keyValue(v))
		}
		t.add(mvcc.Version{Key: v.Key})
		resp.Deleted++
	}
	resp.Header = &pb.ResponseHeader{Revision: int64(t.now())}
	return resp
}

func (t *txn) get(r *pb.RangeRequest) *pb.RangeResponse {
	rev := mvcc.Revision(r.Revision)
	if rev <= 0 {
		rev = t.begin + 1
	}
	resp := Range(t.s.alive(spanOf(r.Key, r.RangeEnd), rev), r)
	resp.Header = &pb.ResponseHeader{Revision: int64(t.now())}
	return resp
}

// Range answers a range the plain way, from everything that is alive in it at its revision: filter
// all, sort all, cut. It is what the router is compared with. The header is left out.
func Range(alive []mvcc.Version, r *pb.RangeRequest) *pb.RangeResponse {
	resp := &pb.RangeResponse{Count: int64(len(alive))}
	if r.CountOnly {
		return resp
	}
	byKey := r.SortOrder == pb.RangeRequest_NONE || (r.SortTarget == pb.RangeRequest_KEY && r.SortOrder == pb.RangeRequest_ASCEND)
	filtered := r.MinModRevision != 0 || r.MaxModRevision != 0 || r.MinCreateRevision != 0 || r.MaxCreateRevision != 0
	kvs := make([]*mvccpb.KeyValue, 0, len(alive))
	for _, v := range alive {
		kv := keyValue(v)
		if r.KeysOnly && r.SortTarget != pb.RangeRequest_VALUE {
			kv.Value, kv.Lease = nil, 0
		}
		kvs = append(kvs, kv)
	}
	if byKey && !filtered && r.Limit > 0 && int64(len(kvs)) > r.Limit+1 {
		kvs = kvs[:r.Limit+1]
	}
	outside := func(value, low, high int64) bool { return (low != 0 && value < low) || (high != 0 && value > high) }
	kvs = slices.DeleteFunc(kvs, func(kv *mvccpb.KeyValue) bool {
		return outside(kv.ModRevision, r.MinModRevision, r.MaxModRevision) || outside(kv.CreateRevision, r.MinCreateRevision, r.MaxCreateRevision)
	})
	compare := func(a, b *mvccpb.KeyValue) int {
		switch r.SortTarget {
		case pb.RangeRequest_VERSION:
			return cmp.Compare(a.Version, b.Version)
		case pb.RangeRequest_CREATE:
			return cmp.Compare(a.CreateRevision, b.CreateRevision)
		case pb.RangeRequest_MOD:
			return cmp.Compare(a.ModRevision, b.ModRevision)
		case pb.RangeRequest_VALUE:
			return bytes.Compare(a.Value, b.Value)
		}
		return bytes.Compare(a.Key, b.Key)
	}
	// The library's unstable sort, as etcd uses it: the order of equal ones is that of this
	// algorithm.
	sorter := sort.Interface(&byCompare{kvs, compare})
	if r.SortOrder == pb.RangeRequest_DESCEND {
		sorter = sort.Reverse(sorter)
	}
	if !byKey || r.SortTarget != pb.RangeRequest_KEY {
		sort.Sort(sorter)
	}
	if r.Limit > 0 && int64(len(kvs)) > r.Limit {
		kvs, resp.More = kvs[:r.Limit], true
	}
	for _, kv := range kvs {
		if r.KeysOnly {
			kv.Value = nil
		}
	}
	resp.Kvs = kvs
	return resp
}

type byCompare struct {
	kvs     []*mvccpb.KeyValue
	compare func(a, b *mvccpb.KeyValue) int
}

func (s *byCompare) Len() int           { return len(s.kvs) }
func (s *byCompare) Swap(i, j int)      { s.kvs[i], s.kvs[j] = s.kvs[j], s.kvs[i] }
func (s *byCompare) Less(i, j int) bool { return s.compare(s.kvs[i], s.kvs[j]) < 0 }

// within says whether all keys that a transaction names lie in a span; what reaches a region must.
func within(span mvcc.Span, req *pb.TxnRequest) bool {
	for _, c := range req.Compare {
		if !span.Covers(spanOf(c.Key, c.RangeEnd)) {
			return false
		}
	}
	for _, op := range slices.Concat(req.Success, req.Failure) {
		ok := true
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			ok = span.Covers(spanOf(o.RequestRange.Key, o.RequestRange.RangeEnd))
		case *pb.RequestOp_RequestPut:
			ok = span.Contains(o.RequestPut.Key)
		case *pb.RequestOp_RequestDeleteRange:
			ok = span.Covers(spanOf(o.RequestDeleteRange.Key, o.RequestDeleteRange.RangeEnd))
		case *pb.RequestOp_RequestTxn:
			ok = within(span, o.RequestTxn)
		}
		if !ok {
			return false
		}
	}
	return true
}
