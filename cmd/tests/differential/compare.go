package main

import (
	"bytes"
	"cmp"
	"net/url"
	"slices"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"
)

// normalize replaces what must differ between two stores by whether it is there at all (ids, raft
// term and index, ports, what a lease has left) or leaves it out (sizes, the orders in which etcd lists
// leases and their keys: by clock, and none). Everything else stays and is compared.
func normalize(m proto.Message) proto.Message {
	if m == nil {
		return nil
	}
	m = proto.Clone(m)
	switch r := m.(type) {
	case *pb.RangeResponse:
		normalizeHeader(r.Header)
	case *pb.PutResponse:
		normalizeHeader(r.Header)
	case *pb.DeleteRangeResponse:
		normalizeHeader(r.Header)
	case *pb.TxnResponse:
		// Headers further inside carry no id and no term, in etcd; so they are compared as they are.
		normalizeHeader(r.Header)
	case *pb.CompactionResponse:
		normalizeHeader(r.Header)
	case *pb.HashKVResponse:
		normalizeHeader(r.Header)
	case *pb.StatusResponse:
		if r.Leader != 0 && r.Leader == r.Header.GetMemberId() {
			r.Leader = 1
		}
		normalizeHeader(r.Header)
		r.RaftTerm, r.RaftIndex, r.RaftAppliedIndex = present(r.RaftTerm), present(r.RaftIndex), present(r.RaftAppliedIndex)
		r.DbSize, r.DbSizeInUse = 0, 0
	case *pb.LeaseGrantResponse:
		normalizeHeader(r.Header)
	case *pb.LeaseRevokeResponse:
		normalizeHeader(r.Header)
	case *pb.LeaseKeepAliveResponse:
		normalizeHeader(r.Header)
	case *pb.LeaseTimeToLiveResponse:
		normalizeHeader(r.Header)
		if r.TTL > 0 && r.TTL <= r.GrantedTTL+leaseExtendMax {
			r.TTL = 1
		}
		slices.SortFunc(r.Keys, bytes.Compare)
	case *pb.LeaseLeasesResponse:
		normalizeHeader(r.Header)
		slices.SortFunc(r.Leases, func(a, b *pb.LeaseStatus) int { return cmp.Compare(a.ID, b.ID) })
	case *pb.MemberListResponse:
		normalizeHeader(r.Header)
		for _, member := range r.Members {
			member.ID = present(member.ID)
			for _, urls := range [][]string{member.PeerURLs, member.ClientURLs} {
				for i, u := range urls {
					if parsed, err := url.Parse(u); err == nil {
						urls[i] = parsed.Scheme + "://" + parsed.Hostname()
					}
				}
			}
		}
	}
	return m
}

// leaseExtendMax is what a new leader may add to a lease, in seconds.
const leaseExtendMax = 2

func normalizeHeader(h *pb.ResponseHeader) {
	if h != nil {
		h.ClusterId, h.MemberId, h.RaftTerm = present(h.ClusterId), present(h.MemberId), present(h.RaftTerm)
	}
}

func present[T int64 | uint64](n T) T {
	if n != 0 {
		return 1
	}
	return 0
}

// equal compares two answers to one request after normalising.
func equal(a, b Answer) bool {
	if a.Code != b.Code || a.Text != b.Text || a.Shape != b.Shape {
		return false
	}
	return !a.OK() || proto.Equal(normalize(a.Msg), normalize(b.Msg))
}

// equalButTies says whether two answers differ only in the order of keys that the requested sort
// does not tell apart: etcd's own sort is unstable, so that order promises nothing. With a limit
// the keys at the cut may differ too, as long as their sort values agree.
func equalButTies(r Request, a, b Answer) bool {
	if !a.OK() || !b.OK() || a.Shape != b.Shape {
		return false
	}
	am, bm := normalize(a.Msg), normalize(b.Msg)
	switch req := r.Msg.(type) {
	case *pb.RangeRequest:
		untie(req, am.(*pb.RangeResponse), bm.(*pb.RangeResponse))
	case *pb.TxnRequest:
		untieTxn(req, am.(*pb.TxnResponse), bm.(*pb.TxnResponse))
	}
	return proto.Equal(am, bm)
}

func untieTxn(req *pb.TxnRequest, a, b *pb.TxnResponse) {
	ops := req.Failure
	if a.Succeeded {
		ops = req.Success
	}
	if len(a.Responses) != len(ops) || len(b.Responses) != len(ops) {
		return
	}
	for i, op := range ops {
		if inner := op.GetRequestTxn(); inner != nil {
			if at, bt := a.Responses[i].GetResponseTxn(), b.Responses[i].GetResponseTxn(); at != nil && bt != nil {
				untieTxn(inner, at, bt)
			}
		}
		ar, br := a.Responses[i].GetResponseRange(), b.Responses[i].GetResponseRange()
		if rr := op.GetRequestRange(); rr != nil && ar != nil && br != nil {
			untie(rr, ar, br)
		}
	}
}

// untie brings both lists into one order where their sort values are alike at each place and every
// key that only one of them holds could have been cut off by the limit.
func untie(req *pb.RangeRequest, a, b *pb.RangeResponse) {
	if req.SortTarget == pb.RangeRequest_KEY || len(a.Kvs) != len(b.Kvs) || len(a.Kvs) == 0 {
		return
	}
	compare := sortValue(req.SortTarget)
	for i := range a.Kvs {
		if compare(a.Kvs[i], b.Kvs[i]) != 0 {
			return
		}
	}
	order := func(x, y *mvccpb.KeyValue) int {
		if c := compare(x, y); c != 0 {
			return c
		}
		return strings.Compare(string(x.Key), string(y.Key))
	}
	last := a.Kvs[len(a.Kvs)-1]
	slices.SortFunc(a.Kvs, order)
	slices.SortFunc(b.Kvs, order)
	if a.More {
		cut := func(kv *mvccpb.KeyValue) bool { return compare(kv, last) == 0 }
		a.Kvs, b.Kvs = slices.DeleteFunc(a.Kvs, cut), slices.DeleteFunc(b.Kvs, cut)
	}
}

func sortValue(target pb.RangeRequest_SortTarget) func(x, y *mvccpb.KeyValue) int {
	return func(x, y *mvccpb.KeyValue) int {
		switch target {
		case pb.RangeRequest_VERSION:
			return cmp.Compare(x.Version, y.Version)
		case pb.RangeRequest_CREATE:
			return cmp.Compare(x.CreateRevision, y.CreateRevision)
		case pb.RangeRequest_MOD:
			return cmp.Compare(x.ModRevision, y.ModRevision)
		case pb.RangeRequest_VALUE:
			return strings.Compare(string(x.Value), string(y.Value))
		}
		return 0
	}
}
