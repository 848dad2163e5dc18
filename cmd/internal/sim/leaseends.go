package sim

import (
	"errors"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/region"
	"braid/region/regionpb"
	"braid/router/txn"
)

// leaseEnd ends a lease: by one command, or by an attempt over the regions that may have keys of
// it. As with crossTxn the coordinator is the product's, and its calls and its own life are
// simulated; what it locks and deletes follows package router's revokeJob.
type leaseEnd struct {
	id    int64
	term  uint64
	store int
	life  uint64
	over  func(error)

	attempt pdpb.AttemptID
	parts   []int // regions, in the order of keys
	c       *txn.Coordinator
	todo    []txn.Action
	tries   int

	want    bool // a read is wanted at point: of the record, and under the locks of the keys as well
	pointed bool
	point   pdpb.ReadPoint
	record  *regionpb.LeaseRecord
	absent  bool
	keys    map[int][][]byte
	done    bool
}

func (c *checker) endLease(e *leaseEnd) {
	c.leases.ends = append(c.leases.ends, e)
	c.leaseCall(&regionpb.LeaseCommand{Op: regionpb.LeaseRevoke, ID: e.id, Term: e.term}, func(_ *pb.TxnResponse, err error) {
		switch {
		case errors.Is(err, regionpb.ErrorOf(regionpb.LeaseSpread)):
			c.readForEnd(e)
		default:
			c.ended(e, err)
		}
	})
}

func (c *checker) ended(e *leaseEnd, err error) {
	if e.done {
		return
	}
	e.done = true
	c.leases.ends = slices.DeleteFunc(c.leases.ends, func(x *leaseEnd) bool { return x == e })
	e.over(err)
}

func (c *checker) alive(e *leaseEnd) bool {
	s := c.w.stores[e.store]
	return s.up && s.life == e.life
}

// readForEnd asks for a point; stepEnd reads at it.
func (c *checker) readForEnd(e *leaseEnd) {
	if !c.alive(e) {
		c.ended(e, errLost)
		return
	}
	e.want, e.pointed, e.record, e.absent, e.keys = true, false, nil, false, map[int][][]byte{}
	c.w.stores[e.store].client.ReadPointFunc(func(p pdpb.ReadPoint, err error) {
		if err != nil {
			c.ended(e, err)
			return
		}
		e.pointed, e.point = true, p
	})
}

func (c *checker) stepEnds() {
	for _, e := range slices.Clone(c.leases.ends) {
		switch {
		case e.done:
		case !c.alive(e):
			c.ended(e, errLost)
		case c.w.calm || c.w.chance(2):
			c.stepEnd(e)
		}
	}
}

func (c *checker) stepEnd(e *leaseEnd) {
	if e.want {
		if e.pointed && c.readEnd(e) {
			e.want = false
			c.haveRead(e)
		}
		return
	}
	if len(e.todo) == 0 {
		return
	}
	if e.term == 0 && !c.w.calm && c.w.chance(60) {
		c.ended(e, errLost) // without a word
		return
	}
	do := e.todo[0]
	switch do.Kind {
	case txn.Evaluate:
		e.todo = e.todo[1:]
		c.readForEnd(e)
	case txn.AskAbort:
		e.todo = e.todo[1:]
		c.w.stores[e.store].client.ProposeFunc(order.Event{Kind: order.EventAbort, Attempt: e.attempt}, func(r order.EventResult, err error) {
			if errors.Is(err, order.ErrAborted) {
				err = regionpb.ErrorOf(regionpb.Aborted)
			}
			e.todo = append(e.todo, e.c.Asked(r.Rev, err)...)
		})
	case txn.Done:
		res := e.c.Result()
		c.w.event("end of lease %d (attempt %d) %v %d", e.id, e.attempt, res.Outcome, res.Rev)
		if res.Outcome == txn.Committed {
			c.w.stats.SpreadEnds++
			c.ended(e, nil)
			return
		}
		c.ended(e, errLost)
	default:
		at := c.replicaFor(c.w.region(e.parts[do.Part]).ID)
		if at != nil {
			e.todo = e.todo[1:]
			c.callEnd(e, do, at)
		}
	}
}

// readAt reads something of leases in a region, at the point.
func (c *checker) readAt(e *leaseEnd, i int, req regionpb.ReadRequest) (*regionpb.ReadResponse, bool) {
	g := c.readable(c.w.stores[c.w.rng.IntN(len(c.w.stores))], i)
	if g == nil {
		return nil, false
	}
	req.Region, req.Epoch, req.Cut, req.Rev = g.id, 1, e.point.Cut, e.point.Rev
	resp, err := g.replica.TryRead(&req)
	var re *regionpb.Error
	switch {
	case err == nil:
		return resp, true
	case errors.As(err, &re) && re.Code == regionpb.Compacted:
		c.readForEnd(e)
	case !errors.As(err, &re) || re.Code != regionpb.NotComplete:
		c.w.fail("end of lease %d, region %d: %v", e.id, i, err)
	}
	return nil, false
}

// readEnd reads what is missing and says whether everything is there.
func (c *checker) readEnd(e *leaseEnd) bool {
	place := regionpb.LeasePlace(e.id)
	if e.record == nil && !e.absent {
		resp, ok := c.readAt(e, c.regionOf(place), regionpb.ReadRequest{Span: mvcc.Key(place), Leases: true})
		if !ok {
			return false
		}
		if e.absent = len(resp.KVs) == 0; !e.absent {
			rec, err := regionpb.DecodeLeaseRecord(resp.KVs[0].Value)
			if err != nil {
				c.w.fail("record of lease %d: %v", e.id, err)
				return false
			}
			e.record = rec
		}
	}
	if e.absent || e.c == nil {
		return true
	}
	for _, i := range e.parts {
		if _, ok := e.keys[i]; ok {
			continue
		}
		resp, ok := c.readAt(e, i, regionpb.ReadRequest{Span: c.w.region(i).Span, Lease: e.id})
		if !ok {
			return false
		}
		e.keys[i] = nil
		for _, x := range resp.KVs {
			e.keys[i] = append(e.keys[i], x.Key)
		}
	}
	return true
}

// partsOf are the regions that a record names, and its own.
func (c *checker) partsOf(e *leaseEnd) (parts []int) {
	for i := range c.w.cfg.Regions {
		d := c.w.region(i)
		named := d.Span.Contains(regionpb.LeasePlace(e.id))
		for _, s := range e.record.Spans {
			named = named || !s.Intersect(d.Span).Empty()
		}
		if named {
			parts = append(parts, i)
		}
	}
	return parts
}

// haveRead goes on with what was read: who takes part, or what to prepare.
func (c *checker) haveRead(e *leaseEnd) {
	notFound := regionpb.ErrorOf(regionpb.LeaseNotFound)
	switch {
	case e.c == nil && e.absent:
		c.ended(e, nil)
	case e.c == nil:
		e.parts = c.partsOf(e)
		e.attempt = c.newAttempt()
		e.c = txn.New(len(e.parts))
		e.todo = e.c.Start()
	case e.absent:
		e.todo = append(e.todo, e.c.Evaluated(nil, notFound)...)
	case !c.w.mut.noReread && !slices.Equal(e.parts, c.partsOf(e)):
		e.todo = append(e.todo, e.c.Evaluated(nil, errLost)...) // a region registered meanwhile
	default:
		writes := make([]bool, len(e.parts))
		for i := range writes {
			writes[i] = true
		}
		e.todo = append(e.todo, e.c.Evaluated(writes, nil)...)
	}
}

func (c *checker) callEnd(e *leaseEnd, do txn.Action, at *store) {
	i := e.parts[do.Part]
	d := c.w.region(i)
	r := at.groups[d.ID].replica
	call := &txnCall{store: at.i}
	home := d.Span.Contains(regionpb.LeasePlace(e.id))
	switch do.Kind {
	case txn.Lock:
		end := func(id regionpb.LockID, err error) {
			c.calledBack(call)
			switch {
			case e.done:
			case errors.Is(err, regionpb.ErrorOf(regionpb.NotLeader)) && e.tries < lockTriesMax:
				e.tries++
				e.todo = append(e.todo, do)
			default:
				e.todo = append(e.todo, e.c.Locked(do.Part, id, err)...)
			}
		}
		call.fail = func(err error) { end(regionpb.LockID{}, err) }
		c.txns.calls = append(c.txns.calls, call)
		l := &region.Lock{Attempt: e.attempt, Age: e.attempt, Spans: []regionpb.LockSpan{{Lease: e.id, Exclusive: true}}, Reply: end}
		if home {
			l.Term = e.term
		}
		r.Lock(l)
	case txn.Prepare:
		end := func(rev mvcc.Revision, err error) {
			c.calledBack(call)
			if !e.done {
				e.todo = append(e.todo, e.c.Prepared(do.Part, rev, err)...)
			}
		}
		call.fail = func(err error) { end(0, err) }
		c.txns.calls = append(c.txns.calls, call)
		k := regionpb.RegisteredKey(d.Span.Start, e.id)
		if home {
			k = regionpb.LeaseKey(e.id)
		}
		req := &regionpb.PrepareRequest{Region: d.ID, Attempt: e.attempt, Lock: e.c.LockID(do.Part), Records: []regionpb.RecordEffect{{Key: k}}}
		sub := int64(0)
		for _, j := range e.parts {
			req.Participants = append(req.Participants, c.w.region(j).ID)
			for _, key := range e.keys[j] {
				if j == i {
					req.Effects = append(req.Effects, regionpb.Effect{Key: key, Delete: true, Detach: e.id})
					req.Subs = append(req.Subs, sub)
				}
				sub++
			}
		}
		slices.Sort(req.Participants)
		r.Prepare(&region.Prepare{Request: req, Reply: end})
	case txn.Release:
		r.Release(e.attempt)
	}
}

// newAttempt is an attempt id that nobody has.
func (c *checker) newAttempt() pdpb.AttemptID {
	c.txns.attempts++
	return c.txns.attempts
}
