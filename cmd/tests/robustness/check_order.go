package main

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
)

// CheckOrder checks a history against the order that revisions claim. Revisions are numbers that
// the store itself hands out, so no search is needed: each write stands at its revision, each read
// after the write whose revision its header shows, and the whole must be
//
//   - dense and unique: every revision from 2 to the last is the work of exactly one request;
//   - exact: every answer, field by field, is what the store at that place gives, headers included;
//   - in real time: a call that began after another one returned stands behind it.
//
// Writes with an unknown outcome are found by what they wrote (values are unique) or, for deletes,
// by a matching of unexplained revisions and unanswered deletes that could have made them.
//
// It returns what is wrong, in order of revision where there is one; at most violationsMax.
func CheckOrder(h *History) []string {
	c := newOrderCheck(h)
	c.replay()
	c.reads()
	c.causes()
	return c.violations
}

const violationsMax = 20

// newOrderCheck finds out who made each revision.
func newOrderCheck(h *History) *orderCheck {
	c := &orderCheck{h: h, writer: make([]*Op, len(h.States)), lower: h.lowerBounds()}
	c.acknowledged()
	c.unknown()
	return c
}

// outcome is what became of a write that got no answer.
type outcome struct {
	rev int64 // what it made, 0: nothing
	// by is when it certainly had happened, because an answer showed its revision; else the end of
	// time.
	by time.Duration
}

// outcomes tells for every write without an answer what became of it, as the store's past shows.
// ok is false if the past leaves a question open: then nothing is known.
func (c *orderCheck) outcomes() (found map[*Op]outcome, ok bool) {
	if len(c.violations) > 0 {
		return nil, false
	}
	// seen[r] is the earliest return of an answer that showed revision r or a later one.
	seen := make([]time.Duration, len(c.writer)+1)
	for i := range seen {
		seen[i] = math.MaxInt64
	}
	for _, op := range c.h.Ops {
		if rev := op.Revision(); rev > 0 && rev < int64(len(c.writer)) {
			seen[rev] = min(seen[rev], op.Return)
		}
	}
	for rev := len(c.writer) - 1; rev > 0; rev-- {
		seen[rev] = min(seen[rev], seen[rev+1])
	}
	found = map[*Op]outcome{}
	for _, op := range c.h.Ops {
		if op.IsWrite() && !op.OK() {
			found[op] = outcome{}
		}
	}
	for rev, op := range c.writer {
		if op != nil && !op.OK() {
			found[op] = outcome{int64(rev), max(seen[rev], op.Call+1)}
		}
	}
	return found, true
}

type orderCheck struct {
	h          *History
	writer     []*Op         // by revision: who made it
	lower      map[*Op]int64 // see lowerBounds
	violations []string
}

func (c *orderCheck) fail(format string, args ...any) {
	if len(c.violations) < violationsMax {
		c.violations = append(c.violations, fmt.Sprintf(format, args...))
	}
}

// lowerBounds gives for each call the highest revision that any call which had returned before it
// began has shown: it must not stand before that.
func (h *History) lowerBounds() map[*Op]int64 {
	byReturn := slices.Clone(h.Ops)
	slices.SortFunc(byReturn, func(a, b *Op) int { return int(a.Return - b.Return) })
	byCall := slices.Clone(h.Ops)
	slices.SortFunc(byCall, func(a, b *Op) int { return int(a.Call - b.Call) })
	lower := make(map[*Op]int64, len(h.Ops))
	highest, returned := int64(1), 0
	for _, op := range byCall {
		for ; byReturn[returned].Return < op.Call; returned++ {
			highest = max(highest, byReturn[returned].Revision())
		}
		lower[op] = highest
	}
	return lower
}

// acknowledged places the writes that know their revision.
func (c *orderCheck) acknowledged() {
	for _, op := range c.h.Ops {
		if !op.OK() || !op.Wrote() {
			continue
		}
		rev := op.Revision()
		switch {
		case rev < 2:
			c.fail("a write at revision %d: %s", rev, op)
		case rev > c.h.Last():
			c.fail("lost: the store ends at revision %d, acknowledged was %s", c.h.Last(), op)
		case c.writer[rev] != nil:
			c.fail("revision %d was given to two writes: %s AND %s", rev, c.writer[rev], op)
		default:
			c.writer[rev] = op
		}
	}
}

// unknown finds who made the revisions that no acknowledged write claims.
func (c *orderCheck) unknown() {
	byID := map[int]*Op{}
	var deletes []*Op
	for _, op := range c.h.Ops {
		byID[op.ID] = op
		if !op.OK() && op.IsWrite() && mayOnlyDelete(op.Req) {
			deletes = append(deletes, op)
		}
	}
	used := map[*Op]int64{}
	var unexplained []int64
	for rev := int64(2); rev <= c.h.Last(); rev++ {
		before, after := state(c.h.States[rev-1]), state(c.h.States[rev])
		if sameState(before, after) {
			c.fail("revision %d is a hole: nothing changed", rev)
			continue
		}
		if c.writer[rev] != nil {
			continue
		}
		id := 0
		for _, kv := range after {
			if kv.ModRevision == rev {
				id = valueID(kv.Value)
			}
		}
		if id == 0 {
			unexplained = append(unexplained, rev)
			continue
		}
		op := byID[id]
		switch {
		case op == nil:
			c.fail("revision %d was written by nobody: %s", rev, describe(before, after))
		case op.OK():
			c.fail("revision %d holds a write that was told another revision or that it failed: %s; %s", rev, describe(before, after), op)
		case used[op] != 0:
			c.fail("one write was done twice, at revisions %d and %d: %s", used[op], rev, op)
		default:
			used[op] = rev
			c.writer[rev] = op
		}
	}
	c.matchDeletes(unexplained, deletes)
}

// valueID is the id of the call that put a value, 0 if none can be read from it.
func valueID(value []byte) int {
	head, _, _ := strings.Cut(string(value), "-")
	id, err := strconv.Atoi(head)
	if err != nil {
		return 0
	}
	return id
}

func mayOnlyDelete(req proto.Message) bool {
	switch r := req.(type) {
	case *pb.DeleteRangeRequest:
		return true
	case *pb.TxnRequest:
		return len(r.Success) == 1 && r.Success[0].GetRequestDeleteRange() != nil
	}
	return false
}

// matchDeletes pairs revisions that only deleted something with unanswered deletes that could have
// done it: a maximum bipartite matching by augmenting paths; both sides have a few dozen at most.
func (c *orderCheck) matchDeletes(revs []int64, deletes []*Op) {
	could := func(op *Op, rev int64) bool {
		if c.lower[op] >= rev {
			return false
		}
		_, after, wrote := execute(c.h.States[rev-1], rev, op.Req)
		return wrote && sameState(after, c.h.States[rev])
	}
	taken := map[*Op]int64{}
	var assign func(rev int64, tried map[*Op]bool) bool
	assign = func(rev int64, tried map[*Op]bool) bool {
		for _, op := range deletes {
			if tried[op] || !could(op, rev) {
				continue
			}
			tried[op] = true
			if held, ok := taken[op]; !ok || assign(held, tried) {
				taken[op] = rev
				return true
			}
		}
		return false
	}
	for _, rev := range revs {
		if !assign(rev, map[*Op]bool{}) {
			c.fail("revision %d was written by nobody: %s", rev, describe(c.h.States[rev-1], c.h.States[rev]))
		}
	}
	for op, rev := range taken {
		c.writer[rev] = op
	}
}

// replay executes the writes in order: each must do exactly what the store's past shows, and have
// been answered exactly so.
func (c *orderCheck) replay() {
	for rev := int64(2); rev <= c.h.Last(); rev++ {
		op := c.writer[rev]
		if op == nil {
			continue // reported already
		}
		before, after := state(c.h.States[rev-1]), state(c.h.States[rev])
		want, then, _ := execute(before, rev, op.Req)
		if !sameState(then, after) {
			c.fail("revision %d should be %q, the store shows %q, by %s", rev, describe(before, then), describe(before, after), op)
		}
		if op.OK() && !sameAnswer(op.Resp, want) {
			c.fail("wrong answer at revision %d: %s; should be %v", rev, op, want)
		}
		if rev <= c.lower[op] {
			c.fail("revision %d is behind real time: %d had been seen before this was sent: %s", rev, c.lower[op], op)
		}
	}
}

// reads checks all calls that changed nothing.
func (c *orderCheck) reads() {
	var compacts []*Op
	for _, op := range c.h.Ops {
		if _, ok := op.Req.(*pb.CompactionRequest); ok {
			compacts = append(compacts, op)
		}
	}
	for _, op := range c.h.Ops {
		switch r := op.Req.(type) {
		case *pb.CompactionRequest:
			if op.OK() && op.Revision() < r.Revision {
				c.fail("compaction at a revision that its header has not reached: %s", op)
			}
		case *pb.RangeRequest:
			if !op.OK() {
				c.refusedRead(op, r, compacts)
				continue
			}
			c.read(op, r.Revision)
			for _, compact := range compacts {
				if r.Revision > 0 && compact.OK() && compact.Return < op.Call && r.Revision < compact.Req.(*pb.CompactionRequest).Revision {
					c.fail("a read at a compacted revision was served: %s after %s", op, compact)
				}
			}
		default:
			if op.OK() && !op.Wrote() {
				c.read(op, 0)
			}
		}
	}
}

// read checks one acknowledged call that changed nothing; at is the revision it asked for, 0: the
// current one.
func (c *orderCheck) read(op *Op, at int64) {
	rev := op.Revision()
	if rev < 1 || rev > c.h.Last() {
		c.fail("a header revision that the store never had (it ends at %d): %s", c.h.Last(), op)
		return
	}
	if rev < c.lower[op] && !op.Serializable() {
		c.fail("stale: revision %d had been seen before this was sent: %s", c.lower[op], op)
	}
	if at <= 0 {
		at = rev
	}
	if at > rev {
		c.fail("a read at revision %d, which was still to come at %d: %s", at, rev, op)
		return
	}
	want, _, wrote := execute(c.h.States[at], at+1, op.Req)
	if h, ok := want.(*pb.RangeResponse); ok {
		h.Header.Revision = rev // a header always shows the current revision
	}
	if wrote || !sameAnswer(op.Resp, want) {
		c.fail("wrong answer at revision %d: %s; should be %v", at, op, want)
	}
}

// refusedRead checks that the two errors about revisions are true.
func (c *orderCheck) refusedRead(op *Op, r *pb.RangeRequest, compacts []*Op) {
	switch {
	case strings.Contains(op.Err, "required revision has been compacted"):
		for _, compact := range compacts {
			if compact.Call < op.Return && compact.Req.(*pb.CompactionRequest).Revision > r.Revision {
				return
			}
		}
		c.fail("called compacted, but no compaction was asked for: %s", op)
	case strings.Contains(op.Err, "required revision is a future revision"):
		if r.Revision <= c.lower[op] && !r.Serializable {
			c.fail("called future, but revision %d had been seen: %s", c.lower[op], op)
		}
	}
}

// causes checks that nobody saw a revision before the request that made it was sent.
func (c *orderCheck) causes() {
	// sent[r] is when the latest-sent of the writes up to r was sent: an answer that shows r has
	// seen them all.
	sent := make([]time.Duration, len(c.h.States))
	for rev := 2; rev < len(sent); rev++ {
		sent[rev] = sent[rev-1]
		if op := c.writer[rev]; op != nil {
			sent[rev] = max(sent[rev], op.Call)
		}
	}
	for _, op := range c.h.Ops {
		if rev := op.Revision(); op.OK() && rev >= 1 && rev <= c.h.Last() && op.Return < sent[rev] {
			c.fail("revision %d was seen before it was sent: %s", rev, op)
		}
	}
}
