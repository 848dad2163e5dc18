package region

import (
	"cmp"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc/etcdrule"
)

// tri is a truth value that may not be known yet.
type tri uint8

const (
	no tri = iota
	yes
	unknown
)

func triOf(b bool) tri {
	if b {
		return yes
	}
	return no
}

// and is no as soon as one side is, whatever the other will turn out to be.
func (t tri) and(o tri) tri {
	switch {
	case t == no || o == no:
		return no
	case t == unknown || o == unknown:
		return unknown
	}
	return yes
}

// compareToPath appends the verdicts of txn and of the transactions nested on its taken path, in
// the order in which execution meets them; false when one is not decided.
func (e *evaluator) compareToPath(txn *pb.TxnRequest) bool {
	all := yes
	for _, c := range txn.GetCompare() {
		if all = all.and(e.compare(c)); all == no || e.stopped() {
			break
		}
	}
	if all == unknown || e.stopped() {
		return false
	}
	e.path = append(e.path, all == yes)
	ops := txn.GetSuccess()
	if all == no {
		ops = txn.GetFailure()
	}
	for _, op := range ops {
		if r, ok := op.Request.(*pb.RequestOp_RequestTxn); ok && !e.compareToPath(r.RequestTxn) {
			return false
		}
	}
	return true
}

// compare decides one compare: every key of the range must satisfy it; a range without keys is
// compared as one key whose numbers are 0, and never satisfies a compare of values.
func (e *evaluator) compare(c *pb.Compare) tri {
	if _, single := spanOf(c.GetKey(), c.GetRangeEnd()); single {
		read := e.look
		if c.GetTarget() == pb.Compare_VALUE {
			read = e.get
		}
		p, ok := read(c.GetKey())
		if !ok && c.GetTarget() == pb.Compare_VALUE {
			return no
		}
		return e.compareVersion(c, &p)
	}
	all := e.scan(c.GetKey(), c.GetRangeEnd(), latest, c.GetTarget() != pb.Compare_VALUE, 0)
	if len(all) == 0 {
		if c.GetTarget() == pb.Compare_VALUE {
			return no
		}
		return e.compareVersion(c, &pending{})
	}
	t := yes
	for i := range all {
		if t = t.and(e.compareVersion(c, &all[i].pending)); t == no {
			break
		}
	}
	return t
}

func (e *evaluator) compareVersion(c *pb.Compare, p *pending) tri {
	switch c.GetTarget() {
	case pb.Compare_CREATE:
		return e.compareRevision(c, p.create, c.GetCreateRevision())
	case pb.Compare_MOD:
		return e.compareRevision(c, p.mod, c.GetModRevision())
	}
	return triOf(etcdrule.Holds(c, &mvccpb.KeyValue{Value: p.value, Version: p.version, Lease: p.lease}))
}

// compareRevision is E4: a revision that is not known yet is above V, so it is above everything
// that is not; else it must be waited for, unless the result asks nothing of it.
func (e *evaluator) compareRevision(c *pb.Compare, r revision, x int64) tri {
	v, ok := r.value()
	switch {
	case ok:
		return triOf(etcdrule.Satisfies(c.GetResult(), cmp.Compare(int64(v), x)))
	case x <= int64(e.v):
		return triOf(etcdrule.Satisfies(c.GetResult(), 1))
	}
	if _, ok := pb.Compare_CompareResult_name[int32(c.GetResult())]; !ok {
		return yes
	}
	return unknown
}
