package region

import (
	"bytes"
	"math"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/region/regionpb"
)

// command is one evaluated request: what it does, and the answer that waits for its revision.
type command struct {
	reply func(*pb.TxnResponse, error)
	num   number // its own revision, given at apply when it has effects
	tmpl  template
	// fault is the answer instead of the template: an error of evaluation has its place in the
	// order too (E5).
	fault   *regionpb.Error
	effects []regionpb.Effect
	records []regionpb.RecordEffect
	bytes   int // of effects and answer, for the in-flight limit

	// Room for what a plain put needs, so that it costs no further allocations.
	fixRoom    [2]fix
	effectRoom [1]regionpb.Effect
}

// verdict is what evaluation came to.
type verdict uint8

const (
	evaluated verdict = iota // the command has effects, an answer or a fault
	undecided                // a compare depends on a revision that is not known yet (E4)
	outside                  // the transaction touches keys that are not the region's
	exhausted                // it looks at more keys than the turn has left
	refusal                  // it is not executed, and has no place in the order; the fault says why
)

// evaluator runs transactions with etcd's semantics against applied state and overlay. It
// belongs to the group's owner and is reused; begin sets what it reads.
//
// A transaction is run in etcd's three steps: all compares, nested ones included, on the state
// before it; then the checks of the taken path, on the same state, in order; then execution,
// where an operation sees the ones before it. Only the first step can be undecided and only the
// second can refuse, so nothing is ever half executed. Whatever a step reads counts against left;
// a run for which that is not enough is given up, and what it wrote must be rolled back.
type evaluator struct {
	r    mvcc.Reader
	ov   *overlay
	span mvcc.Span // the region's
	// v is E4's V: every revision that is not known yet will be above it.
	v mvcc.Revision
	// floor is the compaction floor; reads of revisions below it fail.
	floor mvcc.Revision

	left  int // keys that may still be looked at
	over  bool
	whole bool // without that limit: the run is beside the group

	leases leaseState
	recent recentTerm

	cmd   *command
	path  []bool
	nodes []*node
	found []found
	err   error // the engine failed
}

// begin sets what the next runs read.
func (e *evaluator) begin(r mvcc.Reader, ov *overlay, span mvcc.Span, v, floor mvcc.Revision) {
	e.r, e.ov, e.span, e.v, e.floor, e.err = r, ov, span, v, floor, nil
	e.leases.missing, e.leases.tokens = false, nil
}

// visit counts a key that is looked at, and its value; false when there were too many.
func (e *evaluator) visit(value []byte) bool {
	e.left -= 1 + len(value)>>10
	e.over = e.over || e.left < 0 && !e.whole
	return !e.over
}

// stopped says that the run is to be given up.
func (e *evaluator) stopped() bool { return e.over || e.err != nil }

// run evaluates txn into cmd, whose writes go into the overlay unless the verdict is not
// evaluated. An error is the engine's and leaves the overlay to be rolled back.
func (e *evaluator) run(cmd *command, txn *pb.TxnRequest) (verdict, error) {
	if !covers(e.span, txn) {
		return outside, nil
	}
	e.cmd, e.path, e.over = cmd, e.path[:0], false
	decided := e.compareToPath(txn)
	switch {
	case e.err != nil:
		return undecided, e.err
	case e.over:
		return exhausted, nil
	case !decided:
		return undecided, nil
	}
	path := e.path
	cmd.fault = e.check(txn, &path)
	if e.leases.missing && !e.stopped() {
		e.cmd = nil
		return refusal, nil
	}
	if !e.stopped() && cmd.fault == nil {
		path = e.path
		cmd.tmpl.fixes, cmd.effects = cmd.fixRoom[:0], cmd.effectRoom[:0]
		resp := newTxnResponse()
		e.execute(txn, &path, resp)
		e.stamp(&resp.Header.Revision)
		cmd.tmpl.resp = resp
	}
	e.cmd = nil
	if e.over && e.err == nil {
		return exhausted, nil
	}
	return evaluated, e.err
}

// branch takes the next verdict of the path and returns the operations of the taken side.
func branch(txn *pb.TxnRequest, path *[]bool) ([]*pb.RequestOp, bool) {
	taken := (*path)[0]
	*path = (*path)[1:]
	if taken {
		return txn.GetSuccess(), true
	}
	return txn.GetFailure(), false
}

// check looks for what makes the transaction fail as a whole: first error wins.
func (e *evaluator) check(txn *pb.TxnRequest, path *[]bool) *regionpb.Error {
	ops, _ := branch(txn, path)
	for _, op := range ops {
		var fault *regionpb.Error
		switch r := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			fault = e.checkRange(r.RequestRange)
		case *pb.RequestOp_RequestPut:
			fault = e.checkPut(r.RequestPut)
		case *pb.RequestOp_RequestTxn:
			fault = e.check(r.RequestTxn, path)
		}
		if fault != nil || e.stopped() {
			return fault
		}
	}
	return nil
}

// execute runs the taken side and fills in resp, whose header is the caller's business: the
// outermost one gets a revision, nested ones stay empty as in etcd.
func (e *evaluator) execute(txn *pb.TxnRequest, path *[]bool, resp *pb.TxnResponse) {
	ops, taken := branch(txn, path)
	resp.Succeeded = taken
	if len(ops) > 0 {
		resp.Responses = make([]*pb.ResponseOp, len(ops))
	}
	for i, op := range ops {
		if r, ok := op.Request.(*pb.RequestOp_RequestPut); ok {
			out, put := regionpb.NewPutResponse()
			resp.Responses[i] = out
			e.put(r.RequestPut, put)
			if e.stopped() {
				return
			}
			continue
		}
		out := &pb.ResponseOp{}
		switch r := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			out.Response = &pb.ResponseOp_ResponseRange{ResponseRange: e.rangeOp(r.RequestRange)}
		case *pb.RequestOp_RequestDeleteRange:
			out.Response = &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: e.deleteRange(r.RequestDeleteRange)}
		case *pb.RequestOp_RequestTxn:
			inner := newTxnResponse()
			e.execute(r.RequestTxn, path, inner)
			out.Response = &pb.ResponseOp_ResponseTxn{ResponseTxn: inner}
		}
		if e.stopped() {
			return
		}
		resp.Responses[i] = out
	}
}

// stamp makes *dst the revision as of this moment of the transaction: its own once it has
// changed something, the one before it until then.
func (e *evaluator) stamp(dst *int64) {
	if len(e.cmd.effects) > 0 {
		e.cmd.tmpl.fix(dst, &e.cmd.num)
	} else {
		e.cmd.tmpl.fix(dst, nil)
	}
}

// get returns the newest version of key as the transaction sees it; false when there is none or
// it is deleted.
func (e *evaluator) get(key []byte) (pending, bool) {
	if p := e.ov.get(key); p != nil {
		if p.tombstone() {
			return pending{}, false
		}
		return *p, true
	}
	v, ok, err := e.r.Get(key, mvcc.Latest)
	if err != nil {
		e.err = err
		return pending{}, false
	}
	if !e.visit(v.Value) || !ok || v.Tombstone() {
		return pending{}, false
	}
	e.recent.note(&v)
	return ofVersion(&v), true
}

// look is get without the value, for those who do not need it.
func (e *evaluator) look(key []byte) (pending, bool) {
	if e.ov.get(key) == nil {
		if p, ok := e.recent.get(key); ok {
			if !e.visit(nil) || p.tombstone() {
				return pending{}, false
			}
			return p, true
		}
	}
	return e.get(key)
}

func ofVersion(v *mvcc.Version) pending {
	return pending{mod: known(v.Mod), create: known(v.Create), version: v.Version, lease: v.Lease, value: v.Value}
}

// found is a key that a range found, with the version that is seen.
type found struct {
	key []byte
	pending
}

// scan appends to e.found[:0] the living keys of a range in order, at most max of them (0: all).
// at is mvcc.Latest to see the overlay too, else a revision of applied state.
func (e *evaluator) scan(key, end []byte, at mvcc.Revision, keysOnly bool, max int64) []found {
	out := e.found[:0]
	e.each(key, end, at, keysOnly, func(key []byte, p *pending) bool {
		out = append(out, found{key, *p})
		return max <= 0 || int64(len(out)) < max
	})
	e.found = out[:0]
	if len(out) > foundKeptMax {
		e.found = nil
	}
	return out
}

// foundKeptMax is the longest list that is kept for the next scan.
const foundKeptMax = 4096

// each calls fn with the living keys of a range in order, until it returns false. fn owns the key
// and what p points to is its own copy; it may write what it was called with.
func (e *evaluator) each(key, end []byte, at mvcc.Revision, keysOnly bool, fn func(key []byte, p *pending) bool) {
	s, single := spanOf(key, end)
	if single {
		if at == mvcc.Latest {
			if p, ok := e.get(key); ok {
				fn(key, &p)
			}
			return
		}
		v, ok, err := e.r.Get(key, at)
		if err != nil {
			e.err = err
		} else if e.visit(v.Value) && ok && !v.Tombstone() {
			p := ofVersion(&v)
			fn(key, &p)
		}
		return
	}
	if s.Empty() {
		return
	}
	// fn may evaluate no further range, so that the list is free to be used here.
	e.nodes = e.nodes[:0]
	if at == mvcc.Latest {
		e.nodes = e.ov.span(s, e.nodes)
	}
	nodes, full := e.nodes, false
	// before passes what the overlay has below key; nil means everything that is left.
	before := func(key []byte) {
		for len(nodes) > 0 && (key == nil || bytes.Compare(nodes[0].key, key) < 0) && !full {
			n := nodes[0]
			nodes = nodes[1:]
			if !e.visit(nil) {
				full = true
			} else if !n.cur.tombstone() {
				p := n.cur
				full = !fn(n.key, &p)
			}
		}
	}
	err := e.r.Scan(s, at, mvcc.ScanOptions{KeysOnly: keysOnly}, func(v *mvcc.Version) bool {
		before(v.Key)
		if full || !e.visit(v.Value) {
			full = true
			return false
		}
		if len(nodes) > 0 && bytes.Equal(nodes[0].key, v.Key) {
			return true // the overlay's version hides it, and comes by before
		}
		p := ofVersion(v)
		p.value = bytes.Clone(v.Value)
		full = !fn(bytes.Clone(v.Key), &p)
		return !full
	})
	if err != nil {
		e.err = err
		return
	}
	before(nil)
}

// count returns the number of living keys of a range.
func (e *evaluator) count(key, end []byte, at mvcc.Revision) (n int64) {
	s, single := spanOf(key, end)
	if single || !e.whole {
		// Key by key, because that can be given up.
		e.each(key, end, at, true, func([]byte, *pending) bool { n++; return true })
		return n
	}
	if s.Empty() {
		return 0
	}
	n, err := e.r.Count(s, at)
	if err != nil {
		e.err = err
		return 0
	}
	if at != mvcc.Latest {
		return n
	}
	e.nodes = e.ov.span(s, e.nodes[:0])
	for _, node := range e.nodes {
		v, ok, err := e.r.Get(node.key, mvcc.Latest)
		if err != nil {
			e.err = err
			return 0
		}
		was, is := ok && !v.Tombstone(), !node.cur.tombstone()
		switch {
		case is && !was:
			n++
		case was && !is:
			n--
		}
	}
	return n
}

// kv makes the answer's form of a version, with a place for each revision that is not known.
func (e *evaluator) kv(key []byte, p *pending) *mvccpb.KeyValue {
	kv := &mvccpb.KeyValue{Key: key, Value: p.value, Version: p.version, Lease: p.lease}
	e.revision(&kv.ModRevision, p.mod)
	e.revision(&kv.CreateRevision, p.create)
	e.cmd.bytes += len(key) + len(p.value)
	return kv
}

func (e *evaluator) revision(dst *int64, r revision) {
	if v, ok := r.value(); ok {
		*dst = int64(v)
	} else {
		e.cmd.tmpl.fix(dst, r.num)
	}
}

// spanOf reads etcd's pair of key and range end: no end is one key, "\0" is "to the last key".
func spanOf(key, end []byte) (s mvcc.Span, single bool) {
	switch {
	case len(end) == 0:
		return mvcc.Span{Start: key}, true
	case len(end) == 1 && end[0] == 0:
		return mvcc.Span{Start: key}, false
	}
	return mvcc.Span{Start: key, End: end}, false
}

// ranges calls fn with every key range that txn names, on both branches, until it returns false.
func ranges(txn *pb.TxnRequest, fn func(key, end []byte) bool) bool {
	for _, c := range txn.GetCompare() {
		if !fn(c.GetKey(), c.GetRangeEnd()) {
			return false
		}
	}
	return opRanges(txn.GetSuccess(), fn) && opRanges(txn.GetFailure(), fn)
}

func opRanges(ops []*pb.RequestOp, fn func(key, end []byte) bool) bool {
	for _, op := range ops {
		ok := true
		switch r := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			ok = fn(r.RequestRange.GetKey(), r.RequestRange.GetRangeEnd())
		case *pb.RequestOp_RequestPut:
			ok = fn(r.RequestPut.GetKey(), nil)
		case *pb.RequestOp_RequestDeleteRange:
			ok = fn(r.RequestDeleteRange.GetKey(), r.RequestDeleteRange.GetRangeEnd())
		case *pb.RequestOp_RequestTxn:
			ok = ranges(r.RequestTxn, fn)
		}
		if !ok {
			return false
		}
	}
	return true
}

// covers says whether the region has every key that txn may touch.
func covers(region mvcc.Span, txn *pb.TxnRequest) bool {
	return ranges(txn, func(key, end []byte) bool {
		s, single := spanOf(key, end)
		if single {
			return region.Contains(key)
		}
		return region.Covers(s)
	})
}

// limitOf is how many keys must be found to fill an answer and know that there are more.
func limitOf(limit int64) int64 {
	if limit > 0 && limit < math.MaxInt64 {
		return limit + 1
	}
	return 0
}
