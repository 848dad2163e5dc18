package main

import (
	"context"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
)

// An accepted difference is one that is known, wanted, and told to users in docs/differences.md.
// This file is the whole list; each has a reason, and runs print how often each was met.
type accepted struct {
	name   string
	reason string
	// match sees the request as sent, the reference's answer and the other one's.
	match func(s *Session, r Request, want, got Answer) bool
}

var acceptedDifferences = []accepted{
	{
		name:   "order of equals",
		reason: "etcd sorts with an unstable algorithm: the order of keys with equal sort values promises nothing",
		match: func(_ *Session, r Request, want, got Answer) bool {
			return equalButTies(r, want, got)
		},
	},
	{
		name:   "hash after Compact(0)",
		reason: "etcd files the hash of a Compact(0) under revision 0 and hands it out for HashKV(0), which means the current revision, ever after",
		match: func(s *Session, r Request, want, got Answer) bool {
			m, ok := r.Msg.(*pb.HashKVRequest)
			return ok && m.Revision == 0 && s.compactedZero && want.OK() && got.OK() &&
				got.Msg.(*pb.HashKVResponse).HashRevision == s.world.current
		},
	},
	{
		name:   "hash of a compacted revision",
		reason: "each member of etcd remembers the hashes that its last ten compactions took before they removed anything, until it restarts, unless one began before the last was done; here only those of physical compactions are, by all members; of others the hash is of what is left, or the revision is compacted",
		match: func(s *Session, r Request, want, got Answer) bool {
			m, ok := r.Msg.(*pb.HashKVRequest)
			if !ok || !want.OK() || !s.compactions[m.Revision] {
				return false
			}
			if m.Revision < s.world.compact {
				return got.Code == codes.OutOfRange
			}
			if !got.OK() {
				return false
			}
			h, etcds := got.Msg.(*pb.HashKVResponse), want.Msg.(*pb.HashKVResponse)
			if h.HashRevision != m.Revision || h.CompactRevision > s.world.compact {
				return false
			}
			// One of the two has forgotten; when both remember they must agree.
			return h.CompactRevision == s.world.compact || etcds.CompactRevision == s.world.compact
		},
	},
	{
		name:   "stream sorted by something else",
		reason: "RangeStream with a sort target and no order passes etcd's check; etcd then sorts each chunk by itself, goes on after the key that ended it and so loses keys; right is what Range answers",
		match: func(s *Session, r Request, want, got Answer) bool {
			m, ok := r.Msg.(*pb.RangeRequest)
			if !ok || r.Method != "RangeStream" || m.SortTarget == pb.RangeRequest_KEY || !want.OK() || !got.OK() {
				return false
			}
			whole := Request{"Range", m}
			want = s.etcd.Do(context.Background(), whole)
			return equal(want, got) || equalButTies(whole, want, got)
		},
	},
	{
		name:   "message size in text",
		reason: "the number of bytes in grpc's \"larger than max\" text is the transport's",
		match: func(_ *Session, _ Request, want, got Answer) bool {
			const text = "received message larger than max"
			return want.Code == codes.ResourceExhausted && got.Code == want.Code &&
				strings.Contains(want.Text, text) && strings.Contains(got.Text, text)
		},
	},
}
