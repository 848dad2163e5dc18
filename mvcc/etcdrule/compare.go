// Package etcdrule is what etcd's API means where more than one part of the store has to know it:
// when a compare of a transaction holds, and how the keys of a range are filtered, sorted and cut.
// The leader of a region evaluates them against state with revisions that are still to come, the
// router against snapshots of many regions; the rules are the same and stand here.
//
// Functions are pure, and the package holds no state.
package etcdrule

import (
	"bytes"
	"cmp"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// Satisfies applies a compare's result to the sign of actual minus wanted. A result that etcd does
// not know is satisfied by anything.
func Satisfies(r pb.Compare_CompareResult, sign int) bool {
	switch r {
	case pb.Compare_EQUAL:
		return sign == 0
	case pb.Compare_NOT_EQUAL:
		return sign != 0
	case pb.Compare_GREATER:
		return sign > 0
	case pb.Compare_LESS:
		return sign < 0
	}
	return true
}

// Holds says whether a key satisfies a compare. A union field that does not belong to the target
// counts as 0, an unknown target as equal.
func Holds(c *pb.Compare, kv *mvccpb.KeyValue) bool {
	var sign int
	switch c.GetTarget() {
	case pb.Compare_VALUE:
		sign = bytes.Compare(kv.Value, c.GetValue())
	case pb.Compare_CREATE:
		sign = cmp.Compare(kv.CreateRevision, c.GetCreateRevision())
	case pb.Compare_MOD:
		sign = cmp.Compare(kv.ModRevision, c.GetModRevision())
	case pb.Compare_VERSION:
		sign = cmp.Compare(kv.Version, c.GetVersion())
	case pb.Compare_LEASE:
		sign = cmp.Compare(kv.Lease, c.GetLease())
	}
	return Satisfies(c.GetResult(), sign)
}

// HoldsWithoutKey says whether a compare is satisfied where there is no key, or no key in its
// range: numbers count as 0, and values never match, since protobuf cannot tell "no value" from
// "empty".
func HoldsWithoutKey(c *pb.Compare) bool {
	return c.GetTarget() != pb.Compare_VALUE && Holds(c, &mvccpb.KeyValue{})
}
