package main

import (
	"bytes"
	"context"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
)

// Two kinds of transactions pass etcd's check for duplicate keys and give a key two events at one
// revision. Braid does not (docs/differences.md), and what the stores hold would differ ever after,
// so they are not sent to etcd.

// withhold says whether a request is such a transaction. Where all stores but etcd must refuse it,
// they are asked, and d is what is wrong with their answer.
func (s *Session) withhold(ctx context.Context, r Request) (d *Difference, withheld bool) {
	m, ok := r.Msg.(*pb.TxnRequest)
	if !ok {
		return nil, false
	}
	refused := deletesWhatItPuts(m)
	if !refused && !deletesAfterPut(m) {
		return nil, false
	}
	s.stats.Withheld++
	if !s.setup.OwnFlags {
		return nil, true // an etcd stands in for braid
	}
	for _, ops := range [][]*pb.RequestOp{m.Success, m.Failure} {
		for _, op := range ops {
			if op.GetRequestTxn() != nil {
				return nil, true // whether it is refused depends on the order of the inner ones
			}
		}
	}
	for _, t := range s.tested {
		if got := t.Do(ctx, r); got.Code != codes.InvalidArgument {
			return &Difference{Request: r, Store: t.Name, Got: got, Why: "a key that is deleted and put was not refused"}, true
		}
	}
	return nil, true
}

// deletesWhatItPuts says whether a branch, with everything inside it, has a delete with the end
// "\x00" and a put at or above its key: etcd 3.7 overlooks it, later releases refuse it as a
// duplicate key. It errs on the side of yes where only one of two inner branches runs; static
// checks do too.
func deletesWhatItPuts(t *pb.TxnRequest) bool {
	for _, branch := range [][]*pb.RequestOp{t.GetSuccess(), t.GetFailure()} {
		f := flatten(branch)
		for _, d := range f.deletes {
			if string(d.RangeEnd) == "\x00" && slices.ContainsFunc(f.puts, func(k []byte) bool { return bytes.Compare(k, d.Key) >= 0 }) {
				return true
			}
		}
	}
	return false
}

// deletesAfterPut says whether an inner transaction deletes what an earlier one of the same branch
// puts: etcd checks inner puts against earlier deletes only. Like the above it does not ask which
// inner branches run.
func deletesAfterPut(t *pb.TxnRequest) bool {
	for _, branch := range [][]*pb.RequestOp{t.GetSuccess(), t.GetFailure()} {
		var puts [][]byte // of the inner transactions so far
		for _, op := range branch {
			inner := op.GetRequestTxn()
			if inner == nil {
				continue
			}
			if deletesAfterPut(inner) {
				return true
			}
			f := flatten(inner.GetSuccess())
			f.add(inner.GetFailure())
			for _, d := range f.deletes {
				if slices.ContainsFunc(puts, func(k []byte) bool { return covers(d, k) }) {
					return true
				}
			}
			puts = append(puts, f.puts...)
		}
	}
	return false
}

func covers(d *pb.DeleteRangeRequest, key []byte) bool {
	switch {
	case len(d.RangeEnd) == 0:
		return bytes.Equal(d.Key, key)
	case string(d.RangeEnd) == "\x00":
		return bytes.Compare(key, d.Key) >= 0
	}
	return bytes.Compare(key, d.Key) >= 0 && bytes.Compare(key, d.RangeEnd) < 0
}

// flat is what a list of operations may change, at any depth.
type flat struct {
	puts    [][]byte
	deletes []*pb.DeleteRangeRequest
}

func flatten(ops []*pb.RequestOp) (f flat) {
	f.add(ops)
	return f
}

func (f *flat) add(ops []*pb.RequestOp) {
	for _, op := range ops {
		switch x := op.GetRequest().(type) {
		case *pb.RequestOp_RequestDeleteRange:
			if x.RequestDeleteRange != nil {
				f.deletes = append(f.deletes, x.RequestDeleteRange)
			}
		case *pb.RequestOp_RequestPut:
			f.puts = append(f.puts, x.RequestPut.GetKey())
		case *pb.RequestOp_RequestTxn:
			f.add(x.RequestTxn.GetSuccess())
			f.add(x.RequestTxn.GetFailure())
		}
	}
}
