package gateway

import (
	"bytes"
	"fmt"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/protobuf/proto"
)

func opPut(key string) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(key)}}}
}
func opGet(key string) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte(key)}}}
}
func opDel(key, end string) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{
		RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte(key), RangeEnd: []byte(end)}}}
}
func ops(list ...*pb.RequestOp) []*pb.RequestOp { return list }
func opTxn(success, failure []*pb.RequestOp) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{Success: success, Failure: failure}}}
}

func TestCheckSimple(t *testing.T) {
	k := []byte("k")
	for i, c := range []struct{ got, want error }{
		{checkRange(&pb.RangeRequest{}), rpctypes.ErrGRPCEmptyKey},
		{checkRange(&pb.RangeRequest{Key: k}), nil},
		{checkRange(&pb.RangeRequest{Key: k, SortOrder: 3}), rpctypes.ErrGRPCInvalidSortOption},
		{checkRange(&pb.RangeRequest{Key: k, SortOrder: -1}), rpctypes.ErrGRPCInvalidSortOption},
		{checkRange(&pb.RangeRequest{Key: k, SortTarget: 5}), rpctypes.ErrGRPCInvalidSortOption},
		{checkRange(&pb.RangeRequest{Key: k, SortTarget: 4, SortOrder: 2}), nil},
		{checkRange(&pb.RangeRequest{SortTarget: 9}), rpctypes.ErrGRPCEmptyKey},
		{checkRangeStream(&pb.RangeRequest{Key: k, SortOrder: pb.RangeRequest_DESCEND}), errStreamSort},
		{checkRangeStream(&pb.RangeRequest{Key: k, SortOrder: pb.RangeRequest_ASCEND}), nil},
		{checkRangeStream(&pb.RangeRequest{Key: k, SortTarget: pb.RangeRequest_MOD}), nil},
		{checkRangeStream(&pb.RangeRequest{Key: k, SortTarget: pb.RangeRequest_MOD, SortOrder: pb.RangeRequest_ASCEND}), errStreamSort},
		{checkRangeStream(&pb.RangeRequest{Key: k, MaxCreateRevision: -1}), errStreamFilter},
		{checkPut(&pb.PutRequest{}), rpctypes.ErrGRPCEmptyKey},
		{checkPut(&pb.PutRequest{Key: k, Value: k}), nil},
		{checkPut(&pb.PutRequest{Key: k, Value: k, IgnoreValue: true}), rpctypes.ErrGRPCValueProvided},
		{checkPut(&pb.PutRequest{Key: k, Lease: 1, IgnoreLease: true}), rpctypes.ErrGRPCLeaseProvided},
		{checkPut(&pb.PutRequest{Key: k, Value: k, Lease: 1, IgnoreLease: true, IgnoreValue: true}), rpctypes.ErrGRPCValueProvided},
		{checkPut(&pb.PutRequest{Key: k, IgnoreLease: true, IgnoreValue: true}), nil},
		{checkDelete(&pb.DeleteRangeRequest{RangeEnd: k}), rpctypes.ErrGRPCEmptyKey},
		{checkDelete(&pb.DeleteRangeRequest{Key: k}), nil},
	} {
		if c.got != c.want {
			t.Errorf("case %d: %v, want %v", i, c.got, c.want)
		}
	}
}

func TestCheckTxnOps(t *testing.T) {
	many := func(n int) (list []*pb.RequestOp) {
		for i := range n {
			list = append(list, opGet(fmt.Sprint("k", i)))
		}
		return list
	}
	compares := func(n int) (list []*pb.Compare) {
		for range n {
			list = append(list, &pb.Compare{Key: []byte("k")})
		}
		return list
	}
	for _, c := range []struct {
		name string
		req  *pb.TxnRequest
		want error
	}{
		{"empty", &pb.TxnRequest{}, nil},
		{"full lists", &pb.TxnRequest{Compare: compares(8), Success: many(8), Failure: many(8)}, nil},
		{"compares", &pb.TxnRequest{Compare: compares(9)}, rpctypes.ErrGRPCTooManyOps},
		{"success", &pb.TxnRequest{Success: many(9)}, rpctypes.ErrGRPCTooManyOps},
		{"failure", &pb.TxnRequest{Failure: many(9)}, rpctypes.ErrGRPCTooManyOps},
		{"too many before empty key", &pb.TxnRequest{Compare: make([]*pb.Compare, 9)}, rpctypes.ErrGRPCTooManyOps},
		{"nested takes what is left", &pb.TxnRequest{Success: ops(opTxn(many(7), nil))}, nil},
		{"nested takes more", &pb.TxnRequest{Success: ops(opTxn(many(8), nil))}, rpctypes.ErrGRPCTooManyOps},
		{"the longest list counts for the nested", &pb.TxnRequest{Compare: compares(5), Success: ops(opTxn(many(4), nil))}, rpctypes.ErrGRPCTooManyOps},
		{"compare without a key", &pb.TxnRequest{Compare: []*pb.Compare{{}}}, rpctypes.ErrGRPCEmptyKey},
		{"operation without a request", &pb.TxnRequest{Failure: ops(&pb.RequestOp{})}, rpctypes.ErrGRPCKeyNotFound},
		{"put without a key", &pb.TxnRequest{Success: ops(opPut(""))}, rpctypes.ErrGRPCEmptyKey},
		{"nested get without a key", &pb.TxnRequest{Success: ops(opTxn(nil, ops(opGet(""))))}, rpctypes.ErrGRPCEmptyKey},
		{"operations before duplicates", &pb.TxnRequest{Success: ops(opPut("a"), opPut("a"), opGet(""))}, rpctypes.ErrGRPCEmptyKey},
	} {
		if got := checkTxn(c.req, 8); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestCheckDuplicates(t *testing.T) {
	for _, c := range []struct {
		name string
		ops  []*pb.RequestOp
		bad  bool
	}{
		{"two puts", ops(opPut("a"), opPut("a")), true},
		{"different puts", ops(opPut("a"), opPut("b"), opPut("c"), opPut("d"), opPut("e")), false},
		{"the fifth put", ops(opPut("a"), opPut("b"), opPut("c"), opPut("d"), opPut("e"), opPut("e")), true},
		{"put then delete", ops(opPut("a"), opDel("a", "")), true},
		{"delete then put", ops(opDel("a", ""), opPut("a")), true},
		{"put inside a deleted range", ops(opDel("a", "c"), opPut("b")), true},
		{"put at the end of a deleted range", ops(opDel("a", "c"), opPut("c")), false},
		{"put before a deleted range", ops(opDel("b", "c"), opPut("a")), false},
		{"overlapping deletes", ops(opDel("a", "c"), opDel("b", "d"), opDel("b", "")), false},
		{"gets do not matter", ops(opPut("a"), opGet("a"), opGet("a")), false},
		{"put in both branches of an inner transaction", ops(opTxn(ops(opPut("a")), ops(opPut("a")))), false},
		{"put outside and in a branch", ops(opPut("a"), opTxn(ops(opPut("a")), nil)), true},
		{"put outside and in the other branch", ops(opTxn(nil, ops(opPut("a"))), opPut("a")), true},
		{"put in two inner transactions", ops(opTxn(ops(opPut("a")), nil), opTxn(nil, ops(opPut("a")))), true},
		{"put in both branches, then again", ops(opTxn(ops(opPut("a")), ops(opPut("a"))), opPut("a")), true},
		{"delete outside, put inside", ops(opDel("a", "c"), opTxn(ops(opPut("b")), nil)), true},
		{"put outside, delete inside", ops(opPut("b"), opTxn(ops(opDel("a", "c")), nil)), true},
		{"delete in one branch, put in the other", ops(opTxn(ops(opDel("a", "c")), ops(opPut("b")))), false},
		{"delete in an inner, put in a later inner", ops(opTxn(ops(opDel("a", "c")), nil), opTxn(ops(opPut("b")), nil)), true},
		{"put in an inner, delete in a later inner", ops(opTxn(ops(opPut("b")), nil), opTxn(ops(opDel("a", "c")), nil)), false},
		{"two puts in an inner of an inner", ops(opTxn(nil, ops(opTxn(ops(opPut("a"), opPut("a")), nil)))), true},
		{"put, and deep inside", ops(opPut("a"), opTxn(nil, ops(opTxn(ops(opPut("a")), nil)))), true},
		{"empty range", ops(opDel("b", "a"), opPut("b")), false},
		{"put inside a range without end", ops(opDel("a", "\x00"), opPut("b")), true},
		{"put before a range without end", ops(opDel("b", "\x00"), opPut("a")), false},
	} {
		for side, req := range map[string]*pb.TxnRequest{"success": {Success: c.ops}, "failure": {Failure: c.ops}} {
			var want error
			if c.bad {
				want = rpctypes.ErrGRPCDuplicateKey
			}
			if got := checkTxn(req, 128); got != want {
				t.Errorf("%s (%s): %v, want %v", c.name, side, got, want)
			}
		}
	}
	both := &pb.TxnRequest{Success: ops(opPut("a")), Failure: ops(opPut("a"), opDel("x", ""))}
	if err := checkTxn(both, 128); err != nil {
		t.Errorf("the same key in both branches: %v", err)
	}
}

// TestTrivialAgrees compares the short way with the long one.
func TestTrivialAgrees(t *testing.T) {
	lists := [][]*pb.RequestOp{nil, ops(opPut("a")), ops(opPut("a"), opPut("b")), ops(opGet("a"), opPut("a")), ops(opDel("a", "c"), opGet("b")), ops(opDel("a", "c"), opDel("b", ""))}
	for i, list := range lists {
		if !trivial(list) {
			t.Errorf("list %d takes the long way", i)
		}
		if _, err := writesOf(list); err != nil {
			t.Errorf("list %d: %v", i, err)
		}
	}
}

// TestSize compares the measure with the marshalled size of etcd's internal request.
func TestSize(t *testing.T) {
	for _, member := range []uint64{1, 0x7fff, 0x8000, 0x8e9e05c52164694d, 0xffff0000} {
		id := member&0xffff<<48 | 1<<47 | 12345
		z := newSizer(member)
		for _, n := range []int{0, 1, 100, 127, 128, 16383, 20000, 1 << 20} {
			put := &pb.PutRequest{Key: []byte("key"), Value: bytes.Repeat([]byte{1}, n)}
			h := &pb.RequestHeader{ID: id}
			if got, want := z.write(put), proto.Size(&pb.InternalRaftRequest{Header: h, Put: put}); got != want {
				t.Errorf("member %x, put of %d: %d, want %d", member, n, got, want)
			}
			txn := &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: put}}}}
			if got, want := z.write(txn), proto.Size(&pb.InternalRaftRequest{Header: h, Txn: txn}); got != want {
				t.Errorf("member %x, transaction of %d: %d, want %d", member, n, got, want)
			}
		}
	}
}
