package gateway

import (
	"bytes"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/pkg/v3/adt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"braid/mvcc/etcdrule"
)

// The checks of this file need nothing but the request, and come in etcd's order, so that a request
// with several faults gets the same answer.

var (
	errStreamSort   = status.Error(codes.Unimplemented, "RangeStream does not support custom sort orders")
	errStreamFilter = status.Error(codes.Unimplemented, "RangeStream does not support revision filters")
)

func checkRange(r *pb.RangeRequest) error {
	if len(r.Key) == 0 {
		return rpctypes.ErrGRPCEmptyKey
	}
	if r.SortOrder < pb.RangeRequest_NONE || r.SortOrder > pb.RangeRequest_DESCEND ||
		r.SortTarget < pb.RangeRequest_KEY || r.SortTarget > pb.RangeRequest_VALUE {
		return rpctypes.ErrGRPCInvalidSortOption
	}
	return nil
}

func checkRangeStream(r *pb.RangeRequest) error {
	if err := checkRange(r); err != nil {
		return err
	}
	if !etcdrule.KeyOrder(r) {
		return errStreamSort
	}
	if etcdrule.HasRevisionFilters(r) {
		return errStreamFilter
	}
	return nil
}

func checkPut(r *pb.PutRequest) error {
	switch {
	case len(r.Key) == 0:
		return rpctypes.ErrGRPCEmptyKey
	case r.IgnoreValue && len(r.Value) != 0:
		return rpctypes.ErrGRPCValueProvided
	case r.IgnoreLease && r.Lease != 0:
		return rpctypes.ErrGRPCLeaseProvided
	}
	return nil
}

func checkDelete(r *pb.DeleteRangeRequest) error {
	if len(r.Key) == 0 {
		return rpctypes.ErrGRPCEmptyKey
	}
	return nil
}

// checkTxn checks a whole transaction: its operations first, then that no key is written twice,
// which would be too costly on a request of any size.
func checkTxn(r *pb.TxnRequest, opsMax int) error {
	if err := checkOps(r, opsMax); err != nil {
		return err
	}
	for _, branch := range [...][]*pb.RequestOp{r.Success, r.Failure} {
		if trivial(branch) {
			continue
		}
		if _, err := writesOf(branch); err != nil {
			return err
		}
	}
	return nil
}

// checkOps allows each list of a transaction opsMax entries; what the longest list takes is gone
// for the transactions inside.
func checkOps(r *pb.TxnRequest, opsMax int) error {
	longest := max(len(r.Compare), len(r.Success), len(r.Failure))
	if longest > opsMax {
		return rpctypes.ErrGRPCTooManyOps
	}
	for _, c := range r.Compare {
		if len(c.Key) == 0 {
			return rpctypes.ErrGRPCEmptyKey
		}
	}
	for _, branch := range [...][]*pb.RequestOp{r.Success, r.Failure} {
		for _, op := range branch {
			if err := checkOp(op, opsMax-longest); err != nil {
				return err
			}
		}
	}
	return nil
}

func checkOp(op *pb.RequestOp, opsMax int) error {
	switch o := op.Request.(type) {
	case *pb.RequestOp_RequestRange:
		return checkRange(o.RequestRange)
	case *pb.RequestOp_RequestPut:
		return checkPut(o.RequestPut)
	case *pb.RequestOp_RequestDeleteRange:
		return checkDelete(o.RequestDeleteRange)
	case *pb.RequestOp_RequestTxn:
		return checkOps(o.RequestTxn, opsMax)
	}
	return rpctypes.ErrGRPCKeyNotFound // an operation without a request
}

// trivial says whether a list of operations cannot write a key twice: the usual transaction has one
// put, or a few of different keys and nothing else.
func trivial(ops []*pb.RequestOp) bool {
	const fewMax = 4 // puts that are compared pairwise
	var keys [fewMax][]byte
	n, deletes := 0, 0
	for _, op := range ops {
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestTxn:
			return false
		case *pb.RequestOp_RequestDeleteRange:
			deletes++
		case *pb.RequestOp_RequestPut:
			if n == fewMax {
				return false
			}
			for _, k := range keys[:n] {
				if bytes.Equal(k, o.RequestPut.Key) {
					return false
				}
			}
			keys[n] = o.RequestPut.Key
			n++
		}
	}
	return deletes == 0 || n == 0
}

// writes is what a list of operations may change, both branches of inner transactions included.
type writes struct {
	puts    map[string]struct{}
	deletes adt.IntervalTree
}

// everything is the interval over which deletes of inner transactions are taken over.
var everything = adt.NewStringAffineInterval("\x00", "")

// writesOf collects the writes of a list, and refuses one that puts a key twice or puts a key that
// it also deletes, in any order. The two branches of an inner transaction may put the same key:
// only one of them runs. Deletes may overlap.
//
// The intervals are etcd's own tree, because the answer for ranges whose end lies below their start
// depends on how that tree searches. An end of "\x00" means "everything from here on"; etcd 3.7
// takes it for such an inverted range and lets a key have two events at one revision, which its
// later releases refuse, and so does this.
func writesOf(ops []*pb.RequestOp) (writes, error) {
	w := writes{puts: make(map[string]struct{}), deletes: adt.NewIntervalTree()}
	for _, op := range ops {
		if o, ok := op.Request.(*pb.RequestOp_RequestDeleteRange); ok {
			d := o.RequestDeleteRange
			if len(d.RangeEnd) == 0 {
				w.deletes.Insert(adt.NewStringAffinePoint(string(d.Key)), struct{}{})
			} else {
				end := string(d.RangeEnd)
				if end == "\x00" {
					end = "" // the tree's infinity
				}
				w.deletes.Insert(adt.NewStringAffineInterval(string(d.Key), end), struct{}{})
			}
		}
	}
	for _, op := range ops {
		if o, ok := op.Request.(*pb.RequestOp_RequestTxn); ok {
			if err := w.nested(o.RequestTxn); err != nil {
				return w, err
			}
		}
	}
	for _, op := range ops {
		if o, ok := op.Request.(*pb.RequestOp_RequestPut); ok {
			if err := w.put(string(o.RequestPut.Key), nil); err != nil {
				return w, err
			}
		}
	}
	return w, nil
}

// put adds a key; one that is in except may be there already.
func (w *writes) put(key string, except map[string]struct{}) error {
	if _, twice := w.puts[key]; twice {
		if _, fine := except[key]; !fine {
			return rpctypes.ErrGRPCDuplicateKey
		}
	}
	if w.deletes.Intersects(adt.NewStringAffinePoint(key)) {
		return rpctypes.ErrGRPCDuplicateKey
	}
	w.puts[key] = struct{}{}
	return nil
}

// nested adds the writes of an inner transaction. Its puts meet the deletes of this list and of the
// inner transactions before it; its own deletes count for what follows.
func (w *writes) nested(r *pb.TxnRequest) error {
	success, err := writesOf(r.Success)
	if err != nil {
		return err
	}
	failure, err := writesOf(r.Failure)
	if err != nil {
		return err
	}
	for key := range success.puts {
		if err := w.put(key, nil); err != nil {
			return err
		}
	}
	for key := range failure.puts {
		if err := w.put(key, success.puts); err != nil {
			return err
		}
	}
	w.deletes.Union(success.deletes, everything)
	w.deletes.Union(failure.deletes, everything)
	return nil
}

// sizer measures a write as etcd does: marshalled inside its internal request, whose header holds
// a request id that starts with the member's id.
type sizer struct{ headerBytes int }

func newSizer(memberID uint64) sizer {
	// etcd's generator puts the low 16 bits of the member id on top of a clock and a counter.
	// How long the number is as a varint depends on these bits alone, but for members whose
	// bits are 0, where the clock decides; it fills its 40 bits.
	id := memberID&0xffff<<48 | 1<<47
	inner := protowire.SizeTag(1) + protowire.SizeVarint(id)
	return sizer{headerBytes: protowire.SizeTag(100) + protowire.SizeBytes(inner)}
}

// write returns the size of a put, a range deletion or a transaction as a proposal.
func (z sizer) write(r proto.Message) int {
	return z.headerBytes + protowire.SizeTag(4) + protowire.SizeBytes(proto.Size(r))
}
