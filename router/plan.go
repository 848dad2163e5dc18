package router

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/pd/pdpb"
)

// place finds the one region that holds all keys of a transaction: of its compares and of both
// branches, nested ones included, since which branch is taken is known only under the evaluation.
// Ranges that cannot hold a key do not count, unless there is nothing else.
func place(regions []pdpb.Descriptor, req *pb.TxnRequest) (*pdpb.Descriptor, error) {
	p := placer{regions: regions}
	if err := p.txn(req); err != nil {
		return nil, err
	}
	if p.region == nil {
		d, ok := find(regions, p.fallback)
		if !ok {
			return nil, ErrNoRegion
		}
		return d, nil
	}
	return p.region, nil
}

type placer struct {
	regions  []pdpb.Descriptor
	region   *pdpb.Descriptor
	fallback []byte // start of an empty range
}

func (p *placer) txn(req *pb.TxnRequest) error {
	for _, c := range req.Compare {
		if err := p.span(c.Key, c.RangeEnd); err != nil {
			return err
		}
	}
	for _, branch := range [...][]*pb.RequestOp{req.Success, req.Failure} {
		for _, op := range branch {
			if err := p.op(op); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *placer) op(op *pb.RequestOp) error {
	switch o := op.Request.(type) {
	case *pb.RequestOp_RequestPut:
		return p.span(o.RequestPut.Key, nil)
	case *pb.RequestOp_RequestRange:
		return p.span(o.RequestRange.Key, o.RequestRange.RangeEnd)
	case *pb.RequestOp_RequestDeleteRange:
		return p.span(o.RequestDeleteRange.Key, o.RequestDeleteRange.RangeEnd)
	case *pb.RequestOp_RequestTxn:
		return p.txn(o.RequestTxn)
	}
	return nil
}

func (p *placer) span(key, end []byte) error {
	if len(end) == 0 {
		// The common case of a single key, without making a span of it.
		if p.region != nil {
			if p.region.Span.Contains(key) {
				return nil
			}
			return errSeveral
		}
		d, ok := find(p.regions, key)
		if !ok {
			return ErrNoRegion
		}
		p.region = d
		return nil
	}
	span := rangeSpan(key, end)
	if span.Empty() {
		p.fallback = key
		return nil
	}
	if p.region == nil {
		d, ok := find(p.regions, key)
		if !ok {
			return ErrNoRegion
		}
		p.region = d
	}
	if !p.region.Span.Covers(span) {
		return errSeveral
	}
	return nil
}

// onlyReads says whether no branch of a transaction can write.
func onlyReads(req *pb.TxnRequest) bool {
	for _, branch := range [...][]*pb.RequestOp{req.Success, req.Failure} {
		for _, op := range branch {
			switch o := op.Request.(type) {
			case *pb.RequestOp_RequestPut, *pb.RequestOp_RequestDeleteRange:
				return false
			case *pb.RequestOp_RequestTxn:
				if !onlyReads(o.RequestTxn) {
					return false
				}
			}
		}
	}
	return true
}

// compares says whether what a transaction does depends on anything.
func compares(req *pb.TxnRequest) bool {
	if len(req.Compare) > 0 {
		return true
	}
	for _, op := range req.Success {
		if o, ok := op.Request.(*pb.RequestOp_RequestTxn); ok && compares(o.RequestTxn) {
			return true
		}
	}
	return false
}

// ReadOnly says whether etcd would answer a transaction without proposing it: all operations of
// both branches are ranges. A nested transaction always goes the way of a write there, which is
// why its size is limited like that of a write.
func ReadOnly(req *pb.TxnRequest) bool {
	for _, branch := range [...][]*pb.RequestOp{req.Success, req.Failure} {
		for _, op := range branch {
			if op.GetRequestRange() == nil {
				return false
			}
		}
	}
	return true
}

// serializableTxn says whether a read-only transaction may be answered from this node alone. One
// without any range says nothing about it; etcd then takes stale state, here it is read at a
// confirmed point.
func serializableTxn(req *pb.TxnRequest) bool {
	if !ReadOnly(req) || len(req.Success)+len(req.Failure) == 0 {
		return false
	}
	for _, branch := range [...][]*pb.RequestOp{req.Success, req.Failure} {
		for _, op := range branch {
			if !op.GetRequestRange().Serializable {
				return false
			}
		}
	}
	return true
}

// spans appends every range a transaction may look at.
func spans(dst []mvcc.Span, req *pb.TxnRequest) []mvcc.Span {
	for _, c := range req.Compare {
		dst = append(dst, rangeSpan(c.Key, c.RangeEnd))
	}
	for _, branch := range [...][]*pb.RequestOp{req.Success, req.Failure} {
		for _, op := range branch {
			switch o := op.Request.(type) {
			case *pb.RequestOp_RequestRange:
				dst = append(dst, rangeSpan(o.RequestRange.Key, o.RequestRange.RangeEnd))
			case *pb.RequestOp_RequestTxn:
				dst = spans(dst, o.RequestTxn)
			}
		}
	}
	return dst
}

// namesRevision says whether a range of a transaction names a revision.
func namesRevision(req *pb.TxnRequest) bool {
	for _, branch := range [...][]*pb.RequestOp{req.Success, req.Failure} {
		for _, op := range branch {
			switch o := op.Request.(type) {
			case *pb.RequestOp_RequestRange:
				if o.RequestRange.Revision != 0 {
					return true
				}
			case *pb.RequestOp_RequestTxn:
				if namesRevision(o.RequestTxn) {
					return true
				}
			}
		}
	}
	return false
}
