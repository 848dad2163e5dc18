package main

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"
)

// state is a whole store at one revision, keys in order. States are values: execute copies.
type state []*mvccpb.KeyValue

func (s state) find(key []byte) (int, bool) {
	return slices.BinarySearchFunc(s, key, func(kv *mvccpb.KeyValue, key []byte) int { return bytes.Compare(kv.Key, key) })
}

func (s state) get(key []byte) *mvccpb.KeyValue {
	if i, ok := s.find(key); ok {
		return s[i]
	}
	return nil
}

// execute is the specification in its plainest form, for the requests the traffic sends: it runs
// req on the store s at revision rev-1 and returns the answer etcd must give and the store after. A
// request that changes nothing leaves the revision at rev-1.
func execute(s state, rev int64, req proto.Message) (resp proto.Message, after state, wrote bool) {
	e := &execution{state: s, rev: rev}
	switch r := req.(type) {
	case *pb.RangeRequest:
		resp = e.rangeKeys(r)
	case *pb.PutRequest:
		resp = e.put(r)
	case *pb.DeleteRangeRequest:
		resp = e.deleteRange(r)
	case *pb.TxnRequest:
		resp = e.txn(r)
	default:
		panic(fmt.Sprintf("no execution of %T", req))
	}
	header := &pb.ResponseHeader{Revision: e.now()}
	switch r := resp.(type) {
	case *pb.RangeResponse:
		r.Header = header
	case *pb.PutResponse:
		r.Header = header
	case *pb.DeleteRangeResponse:
		r.Header = header
	case *pb.TxnResponse:
		r.Header = header
	}
	return resp, e.state, e.wrote
}

type execution struct {
	state state
	rev   int64 // the revision a write gets
	wrote bool
}

// now is the revision that headers show at this point.
func (e *execution) now() int64 {
	if e.wrote {
		return e.rev
	}
	return e.rev - 1
}

func (e *execution) rangeKeys(r *pb.RangeRequest) *pb.RangeResponse {
	resp := &pb.RangeResponse{}
	for _, kv := range e.state {
		if !inRange(kv.Key, r.Key, r.RangeEnd) {
			continue
		}
		resp.Count++
		if r.Limit > 0 && int64(len(resp.Kvs)) == r.Limit {
			resp.More = true
			continue
		}
		resp.Kvs = append(resp.Kvs, kv)
	}
	return resp
}

func inRange(key, start, end []byte) bool {
	if len(end) == 0 {
		return bytes.Equal(key, start)
	}
	return bytes.Compare(key, start) >= 0 && bytes.Compare(key, end) < 0
}

func (e *execution) put(r *pb.PutRequest) *pb.PutResponse {
	resp := &pb.PutResponse{}
	kv := &mvccpb.KeyValue{Key: r.Key, Value: r.Value, CreateRevision: e.rev, ModRevision: e.rev, Version: 1}
	i, exists := e.state.find(r.Key)
	e.state = slices.Clone(e.state)
	if exists {
		old := e.state[i]
		kv.CreateRevision, kv.Version = old.CreateRevision, old.Version+1
		if r.PrevKv {
			resp.PrevKv = old
		}
		e.state[i] = kv
	} else {
		e.state = slices.Insert(e.state, i, kv)
	}
	e.wrote = true
	return resp
}

func (e *execution) deleteRange(r *pb.DeleteRangeRequest) *pb.DeleteRangeResponse {
	resp := &pb.DeleteRangeResponse{}
	var kept state
	for _, kv := range e.state {
		if !inRange(kv.Key, r.Key, r.RangeEnd) {
			kept = append(kept, kv)
			continue
		}
		resp.Deleted++
		if r.PrevKv {
			resp.PrevKvs = append(resp.PrevKvs, kv)
		}
	}
	if resp.Deleted > 0 {
		e.state, e.wrote = kept, true
	}
	return resp
}

func (e *execution) txn(r *pb.TxnRequest) *pb.TxnResponse {
	resp := &pb.TxnResponse{Succeeded: true}
	for _, c := range r.Compare {
		resp.Succeeded = resp.Succeeded && e.holds(c)
	}
	ops := r.Failure
	if resp.Succeeded {
		ops = r.Success
	}
	for _, op := range ops {
		out := &pb.ResponseOp{}
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			a := e.rangeKeys(o.RequestRange)
			a.Header = &pb.ResponseHeader{Revision: e.now()}
			out.Response = &pb.ResponseOp_ResponseRange{ResponseRange: a}
		case *pb.RequestOp_RequestPut:
			a := e.put(o.RequestPut)
			a.Header = &pb.ResponseHeader{Revision: e.now()}
			out.Response = &pb.ResponseOp_ResponsePut{ResponsePut: a}
		case *pb.RequestOp_RequestDeleteRange:
			a := e.deleteRange(o.RequestDeleteRange)
			a.Header = &pb.ResponseHeader{Revision: e.now()}
			out.Response = &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: a}
		default:
			panic(fmt.Sprintf("the traffic sends no %T", o))
		}
		resp.Responses = append(resp.Responses, out)
	}
	return resp
}

func (e *execution) holds(c *pb.Compare) bool {
	kv := e.state.get(c.Key)
	if c.Result != pb.Compare_EQUAL {
		panic("the traffic compares for equality only")
	}
	switch c.Target {
	case pb.Compare_MOD:
		return kv.GetModRevision() == c.GetModRevision()
	case pb.Compare_VERSION:
		return kv.GetVersion() == c.GetVersion()
	}
	panic("the traffic compares versions and mod revisions only")
}

// sameState compares two stores.
func sameState(a, b state) bool {
	return slices.EqualFunc(a, b, func(x, y *mvccpb.KeyValue) bool { return x == y || proto.Equal(x, y) })
}

// sameAnswer compares an answer with the expected one; of the header only the revision counts.
func sameAnswer(got, want proto.Message) bool {
	got = proto.Clone(got)
	if h, ok := got.(interface{ GetHeader() *pb.ResponseHeader }); ok {
		if header := h.GetHeader(); header != nil {
			header.ClusterId, header.MemberId, header.RaftTerm = 0, 0, 0
		}
	}
	return proto.Equal(got, want)
}

// describe prints a change of state in one line.
func describe(before, after state) string {
	var out []string
	for _, kv := range after {
		if old := before.get(kv.Key); !proto.Equal(old, kv) {
			out = append(out, fmt.Sprintf("%s=%s (mod %d, version %d)", kv.Key, kv.Value, kv.ModRevision, kv.Version))
		}
	}
	for _, kv := range before {
		if after.get(kv.Key) == nil {
			out = append(out, fmt.Sprintf("%s deleted", kv.Key))
		}
	}
	if out == nil {
		return "no change"
	}
	return strings.Join(out, ", ")
}
