package region

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/region/regionpb"
)

// lockTable is who may use which keys of a region while attempts over several regions are under
// way (T1, T5). It is pure and belongs to the group's owner; only a leader has anything in it.
//
// An attempt locks everything it needs of a region at once. It is granted when nobody who is in
// front of it is in conflict: holders, and waiters that are older (the oldest first, by the
// transaction's first attempt). Coordinators that wait for others lock region after region in the
// order of keys, and within a region everybody waits for holders or for older attempts only; those
// that lock all regions at the same time are refused where they would wait for another attempt, or
// for a command that waits for one. So nobody waits in a circle. Commands of a single region
// take no locks: they wait while they conflict with a holder, or with a waiter, so that a stream
// of them cannot keep a waiter out; one that has waited long stands back no longer for waiters that
// came after it, and they stand back for it, so that a stream of attempts cannot keep it out either.
// Among waiters and such commands the order is one (see before), so that this makes no circle.
//
// A lock that is only granted is volatile: it ends with the term, with a higher fence (F3), when
// its coordinator gives it up, its coordinator's store falls silent, or after a while. Once its prepare is applied it is in
// the position, and only the decision ends it.
type lockTable struct {
	term    uint64 // whose locks these are; 0 when this replica does not lead
	seq     uint64 // of the last grant
	held    []*lock
	waiting []*lock // ascending by age, then attempt
}

type lockState uint8

const (
	lockWaiting  lockState = iota
	lockGranted            // the coordinator may read
	lockProposed           // its prepare is in the log, not applied
	lockPrepared           // its prepare is in the position
)

type lock struct {
	attempt pdpb.AttemptID
	age     pdpb.AttemptID // the transaction's first attempt
	owner   raftid.StoreID // of its coordinator; 0 for what was prepared in an earlier term
	spans   []regionpb.LockSpan
	set     spanSet // of spans
	state   lockState
	id      regionpb.LockID
	ticks   int  // in this state
	since   int  // the owner's clock when it was asked for
	now     bool // refused rather than made to wait for others
	refused regionpb.Code
	reply   func(regionpb.LockGrant, error)
	// attached are the keys of the leases that it ends, from the grant until the answer.
	attached []regionpb.Attachment
}

func (t *lockTable) empty() bool { return len(t.held)+len(t.waiting) == 0 }
func (t *lockTable) len() int    { return len(t.held) + len(t.waiting) }

func (t *lockTable) find(attempt pdpb.AttemptID) *lock {
	for _, l := range t.held {
		if l.attempt == attempt {
			return l
		}
	}
	return nil
}

// begin starts a term with the locks of what is prepared: a new leader has them all, because
// everything before its term is applied (E2). Where their coordinators run is not known any more, and
// they may be lost with the leader that was: so it is a quarter of the usual time until pd is asked for
// an abort. What is prepared everywhere is decided long before that.
func (t *lockTable) begin(term uint64, prepared []regionpb.Prepared, l *Limits) {
	t.term = term
	for i := range prepared {
		p := &prepared[i]
		t.held = append(t.held, &lock{attempt: p.Attempt, spans: p.Locks, set: newSpanSet(p.Locks), state: lockPrepared, ticks: l.AbortTicks - max(l.AbortTicks/4, 1)})
	}
}

// end forgets everything and returns who waited: leadership was lost.
func (t *lockTable) end() (waiting []*lock) {
	waiting = t.waiting
	*t = lockTable{seq: t.seq}
	return waiting
}

// fence drops what is not prepared: it was read, or would be prepared, under an older fence, and
// what is in flight is void (F3). keepGranted is the mutant that keeps what is only granted.
func (t *lockTable) fence(prepared []regionpb.Prepared, keepGranted bool) {
	t.held = slices.DeleteFunc(t.held, func(l *lock) bool {
		if keepGranted && l.state == lockGranted {
			return false
		}
		return !slices.ContainsFunc(prepared, func(p regionpb.Prepared) bool { return p.Attempt == l.attempt })
	})
}

// request makes an attempt wait. One that asks again lost the answer: it gets a new grant, with a
// new number, so that only the newest counts.
func (t *lockTable) request(l *lock) (ok bool) {
	if old := t.find(l.attempt); old != nil {
		if old.state != lockGranted {
			return false // it has been used
		}
		t.release(l.attempt)
	}
	i, again := slices.BinarySearchFunc(t.waiting, l, func(w, l *lock) int {
		return cmp.Or(cmp.Compare(w.age, l.age), cmp.Compare(w.attempt, l.attempt))
	})
	if again {
		return false
	}
	l.set = newSpanSet(l.spans)
	t.waiting = slices.Insert(t.waiting, i, l)
	return true
}

// grantRules are what a table does not know of its region.
type grantRules struct {
	// withKeys adds to what ends a lease the keys that the lease has now, and returns them; false says that
	// they are more than can be prepared.
	withKeys func([]regionpb.LockSpan) ([]regionpb.LockSpan, []regionpb.Attachment, bool)
	// inFlight says of spans that something that was evaluated before is not numbered yet: what an
	// attempt reads under its locks must be what all of it leaves behind. It ends by itself.
	inFlight func([]regionpb.LockSpan) bool
	// goesFirst says that a command that has waited long, maybe for another attempt, must go before
	// the n-th waiter.
	goesFirst func(spans []regionpb.LockSpan, n int) bool
	// anyAge is the mutant without an order among those that wait.
	anyAge bool
}

// grant returns the waiters that got their locks, and those that left: because they must not wait for
// others, or because they can never be prepared.
func (t *lockTable) grant(rules grantRules) (granted, refused []*lock) {
	for i := 0; i < len(t.waiting); {
		w := t.waiting[i]
		spans, older := w.spans, i
		var keys []regionpb.Attachment
		if rules.anyAge {
			older = 0
		}
		others, fits := t.inFront(spans, older), true // and the keys of its leases need not be looked up
		if !others {
			spans, keys, fits = rules.withKeys(spans)
			others = len(spans) > len(w.spans) && t.inFront(spans[len(w.spans):], older) || rules.goesFirst(spans, i)
		}
		if !fits || others && w.now {
			w.refused = regionpb.LockBusy
			if !fits {
				w.refused = regionpb.TooLarge
			}
			t.waiting = slices.Delete(t.waiting, i, i+1)
			refused = append(refused, w)
			continue
		}
		if others || rules.inFlight(spans) {
			i++
			continue
		}
		if len(spans) > len(w.spans) {
			w.spans, w.set = spans, newSpanSet(spans)
		}
		t.waiting = slices.Delete(t.waiting, i, i+1)
		t.seq++
		w.attached = keys
		w.state, w.ticks, w.id = lockGranted, 0, regionpb.LockID{Term: t.term, Seq: t.seq}
		t.held = append(t.held, w)
		granted = append(granted, w)
	}
	return granted, refused
}

// before returns how many waiters go before a command that came at a time and has waited long: those
// that came before it, and for their sake whoever goes before them, so that it does not wait for one
// that waits for another that waits for it.
func (t *lockTable) before(since int) int {
	for i := len(t.waiting) - 1; i >= 0; i-- {
		if t.waiting[i].since < since {
			return i + 1
		}
	}
	return 0
}

// inFront says whether spans conflict with a holder or with one of the first n waiters.
func (t *lockTable) inFront(spans []regionpb.LockSpan, n int) bool {
	for _, l := range t.held {
		if l.set.conflicts(spans) {
			return true
		}
	}
	for _, l := range t.waiting[:n] {
		if l.set.conflicts(spans) {
			return true
		}
	}
	return false
}

// release ends a lock that is held.
func (t *lockTable) release(attempt pdpb.AttemptID) {
	t.held = slices.DeleteFunc(t.held, func(l *lock) bool { return l.attempt == attempt })
}

// cancel takes back a request that waits.
func (t *lockTable) cancel(attempt pdpb.AttemptID) *lock {
	for i, l := range t.waiting {
		if l.attempt == attempt {
			t.waiting = slices.Delete(t.waiting, i, i+1)
			return l
		}
	}
	return nil
}

// ownedBy returns the attempts whose coordinator ran on a store.
func (t *lockTable) ownedBy(store raftid.StoreID) (list []pdpb.AttemptID) {
	for _, locks := range [2][]*lock{t.held, t.waiting} {
		for _, l := range locks {
			if l.owner == store {
				list = append(list, l.attempt)
			}
		}
	}
	return list
}

// tick lets time pass. It returns the waiters that have waited too long, which leave the table,
// and the prepared attempts of which pd must be asked for an abort (T6).
func (t *lockTable) tick(ticks int, l *Limits) (late []*lock, orphans []pdpb.AttemptID) {
	t.held = slices.DeleteFunc(t.held, func(x *lock) bool {
		before := x.ticks
		x.ticks += ticks
		switch x.state {
		case lockGranted:
			return x.ticks > l.LockTicksMax
		case lockPrepared:
			if x.ticks/l.AbortTicks > before/l.AbortTicks {
				orphans = append(orphans, x.attempt)
			}
		}
		return false
	})
	t.waiting = slices.DeleteFunc(t.waiting, func(x *lock) bool {
		if x.ticks += ticks; x.ticks > l.LockWaitTicksMax {
			late = append(late, x)
			return true
		}
		return false
	})
	return late, orphans
}

// spansOf makes a transaction of one region comparable with locks: what it may write, on either
// branch, as exclusive, what it reads as shared.
func spansOf(dst []regionpb.LockSpan, txn *pb.TxnRequest) []regionpb.LockSpan {
	add := func(key, end []byte, exclusive bool) {
		s, single := spanOf(key, end)
		if single {
			s = mvcc.Key(key)
		}
		if !s.Empty() {
			dst = append(dst, regionpb.LockSpan{Span: s, Exclusive: exclusive})
		}
	}
	for _, c := range txn.GetCompare() {
		add(c.GetKey(), c.GetRangeEnd(), false)
	}
	for _, ops := range [2][]*pb.RequestOp{txn.GetSuccess(), txn.GetFailure()} {
		for _, op := range ops {
			switch r := op.Request.(type) {
			case *pb.RequestOp_RequestRange:
				add(r.RequestRange.GetKey(), r.RequestRange.GetRangeEnd(), false)
			case *pb.RequestOp_RequestPut:
				add(r.RequestPut.GetKey(), nil, true)
				if id := r.RequestPut.GetLease(); id != 0 {
					dst = append(dst, regionpb.LockSpan{Lease: id})
				}
			case *pb.RequestOp_RequestDeleteRange:
				add(r.RequestDeleteRange.GetKey(), r.RequestDeleteRange.GetRangeEnd(), true)
			case *pb.RequestOp_RequestTxn:
				dst = spansOf(dst, r.RequestTxn)
			}
		}
	}
	return dst
}

// String prints who holds and who waits for what, a line for each.
func (t *lockTable) String() string {
	var b strings.Builder
	names := [...]string{"waits", "holds", "proposed", "prepared"}
	for _, l := range append(slices.Clone(t.held), t.waiting...) {
		fmt.Fprintf(&b, "t%d %s", l.attempt, names[l.state])
		for _, s := range l.spans {
			mode := "shared"
			if s.Exclusive {
				mode = "exclusive"
			}
			fmt.Fprintf(&b, " %s %v", mode, &s)
		}
		b.WriteByte('\n')
	}
	return b.String()
}
