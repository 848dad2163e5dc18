package sim

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/region"
	"braid/region/regionpb"
	"braid/router/txn"
)

// leaseEnd ends a lease, or several whose time is up together, by one command or by an attempt over the
// regions that may have keys of them. As with crossTxn the coordinator is the product's,
// and its calls and its own life are simulated; what it locks and deletes follows package router's
// revokeJob.
type leaseEnd struct {
	leases []regionpb.LeaseLeft // those that are meant (L7)
	ids    []int64              // of them
	term   uint64
	client bool // asked for it; nobody's time is up
	store  int
	life   uint64
	over   func(error)
	begun  time.Duration

	attempt pdpb.AttemptID
	parts   []endPart
	grants  []regionpb.LockGrant // of each part, once locked
	c       *txn.Coordinator
	todo    []txn.Action
	tries   int

	want    bool // a read is wanted at point: of the records, and under the locks of the keys as well
	pointed bool
	point   pdpb.ReadPoint
	records map[int64]*regionpb.LeaseRecord // nil: it is gone, or another one has its id
	keys    map[leaseIn][][]byte
	done    bool
}

// endPart is a region that takes part, for some of the leases, in the order of keys.
type endPart struct {
	region int
	ids    []int64
}

// leaseIn is a lease in a region.
type leaseIn struct {
	region int
	lease  int64
}

// endsMax bounds the leases that are ended together. In single-group mode, where there are no attempts,
// each ends by itself.
const endsMax = 3

func (c *checker) endLease(e *leaseEnd) {
	e.begun = c.w.now
	for i := range e.leases {
		if c.w.mut.anyGrant {
			e.leases[i].Grant = 0
		}
		e.ids = append(e.ids, e.leases[i].ID)
	}
	c.leases.ends = append(c.leases.ends, e)
	c.leaseCall(regionpb.ManyLeases(regionpb.LeaseRevoke, slices.Clone(e.leases), e.term), func(_ *pb.TxnResponse, err error) {
		switch {
		case errors.Is(err, regionpb.ErrorOf(regionpb.LeaseSpread)):
			c.readForEnd(e)
		case err == nil && len(e.ids) > 1:
			c.w.stats.EndsTogether++
			fallthrough
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
	e.want, e.pointed, e.records, e.keys = true, false, map[int64]*regionpb.LeaseRecord{}, map[leaseIn][][]byte{}
	c.w.stores[e.store].oracle.ReadPointFunc(func(p pdpb.ReadPoint, err error) {
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
	if e.client && !c.w.calm && !c.w.quiet && c.w.chance(60) {
		c.ended(e, errLost) // without a word
		return
	}
	do := e.todo[0]
	switch do.Kind {
	case txn.Evaluate:
		e.todo = e.todo[1:]
		// What was granted says as much as what is read under the locks.
		if c.w.chance(4) || !c.takeGrants(e) {
			c.readForEnd(e)
		}
	case txn.AskAbort:
		e.todo = e.todo[1:]
		c.w.stores[e.store].oracle.ProposeFunc(order.Event{Kind: order.EventAbort, Attempt: e.attempt}, func(r order.EventResult, err error) {
			if errors.Is(err, order.ErrAborted) {
				err = regionpb.ErrorOf(regionpb.Aborted)
			}
			e.todo = append(e.todo, e.c.Asked(r.Rev, err)...)
		})
	case txn.Done:
		res := e.c.Result()
		c.w.event("end of leases %v (attempt %d) %v %d %v", e.ids, e.attempt, res.Outcome, res.Rev, res.Err)
		if res.Outcome == txn.Committed {
			c.w.stats.SpreadEnds++
			c.ended(e, nil)
			return
		}
		c.ended(e, errLost)
	default:
		at := c.replicaFor(c.w.region(e.parts[do.Part].region).ID)
		if at != nil {
			e.todo = e.todo[1:]
			c.callEnd(e, do, at)
		}
	}
}

// readAt reads something of leases in a region, as it is at the point or later: records have no revision,
// and keys are locked.
func (c *checker) readAt(e *leaseEnd, i int, req regionpb.ReadRequest) (*regionpb.ReadResponse, bool) {
	g := c.readable(c.w.stores[c.w.rng.IntN(len(c.w.stores))], i)
	if g == nil {
		return nil, false
	}
	req.Region, req.Epoch, req.Cut = g.id, 1, e.point.Cut
	resp, err := g.replica.TryRead(&req)
	var re *regionpb.Error
	switch {
	case err == nil:
		return resp, true
	case errors.As(err, &re) && re.Code == regionpb.Compacted:
		c.readForEnd(e)
	case !errors.As(err, &re) || re.Code != regionpb.NotComplete:
		c.w.fail("end of leases %v, region %d: %v", e.ids, i, err)
	}
	return nil, false
}

// readEnd reads what is missing and says whether everything is there.
func (c *checker) readEnd(e *leaseEnd) bool {
	for len(e.records) < len(e.ids) {
		var ids []int64 // of one region
		home := -1
		for _, id := range e.ids {
			at := c.regionOf(regionpb.LeasePlace(id))
			if _, ok := e.records[id]; !ok && (home < 0 || home == at) {
				home, ids = at, append(ids, id)
			}
		}
		resp, ok := c.readAt(e, home, regionpb.ReadRequest{Span: c.w.region(home).Span, Leases: true, Of: ids})
		if !ok {
			return false
		}
		for _, id := range ids[:resp.Count] {
			e.records[id] = nil
		}
		for _, x := range resp.KVs {
			id := int64(binary.BigEndian.Uint64(x.Key))
			rec, err := regionpb.DecodeLeaseRecord(x.Value)
			if err != nil {
				c.w.fail("record of lease %d: %v", id, err)
				return false
			}
			c.found(e, id, rec)
		}
	}
	if e.c == nil {
		return true
	}
	for _, p := range e.parts {
		for rest := p.ids; len(rest) > 0; {
			if _, ok := e.keys[leaseIn{p.region, rest[0]}]; ok || e.records[rest[0]] == nil {
				rest = rest[1:]
				continue
			}
			resp, ok := c.readAt(e, p.region, regionpb.ReadRequest{Span: c.w.region(p.region).Span, Of: rest})
			n := 1
			if ok && resp.Count == 0 { // more than a reply holds
				resp, ok = c.readAt(e, p.region, regionpb.ReadRequest{Span: c.w.region(p.region).Span, Lease: rest[0]})
			} else if ok {
				n = int(resp.Count)
			}
			if !ok {
				return false
			}
			for _, id := range rest[:n] {
				e.keys[leaseIn{p.region, id}] = nil
			}
			for _, x := range resp.KVs {
				at := leaseIn{p.region, cmp.Or(x.Lease, rest[0])}
				e.keys[at] = append(e.keys[at], x.Key)
			}
			rest = rest[n:]
		}
	}
	return true
}

// found takes the record of a lease. The first look settles who is meant.
func (c *checker) found(e *leaseEnd, id int64, rec *regionpb.LeaseRecord) {
	if l := &e.leases[slices.Index(e.ids, id)]; l.Means(rec) {
		e.records[id] = rec
		if !c.w.mut.anyGrant {
			l.Grant = rec.Grant
		}
	}
}

// takeGrants goes on with what the grants say of the leases; false when they do not say all.
func (c *checker) takeGrants(e *leaseEnd) bool {
	if slices.ContainsFunc(e.grants, func(g regionpb.LockGrant) bool { return !g.Whole }) {
		return false
	}
	e.records, e.keys = map[int64]*regionpb.LeaseRecord{}, map[leaseIn][][]byte{}
	for _, id := range e.ids {
		e.records[id] = nil
	}
	for i := range e.grants {
		for _, l := range e.grants[i].Records {
			c.found(e, l.ID, l.Record)
		}
	}
	for i := range e.grants {
		for _, k := range e.grants[i].Attached {
			if e.records[k.Lease] != nil {
				at := leaseIn{e.parts[i].region, k.Lease}
				e.keys[at] = append(e.keys[at], k.Key)
			}
		}
	}
	c.w.stats.ByGrants++
	c.haveRead(e)
	return true
}

// partsOf are the regions that the records name, and their own.
func (c *checker) partsOf(e *leaseEnd) (parts []endPart) {
	for i := range c.w.cfg.Regions {
		d, p := c.w.region(i), endPart{region: i}
		for _, id := range e.ids {
			rec := e.records[id]
			if rec != nil && (d.Span.Contains(regionpb.LeasePlace(id)) ||
				slices.ContainsFunc(rec.Spans, func(s mvcc.Span) bool { return !s.Intersect(d.Span).Empty() })) {
				p.ids = append(p.ids, id)
			}
		}
		if len(p.ids) > 0 {
			parts = append(parts, p)
		}
	}
	return parts
}

// locked says whether everything that the records name now is locked.
func (c *checker) locked(e *leaseEnd) bool {
	for _, p := range c.partsOf(e) {
		i := slices.IndexFunc(e.parts, func(x endPart) bool { return x.region == p.region })
		for _, id := range p.ids {
			if i < 0 || !slices.Contains(e.parts[i].ids, id) {
				return false
			}
		}
	}
	return true
}

// haveRead goes on with what was read: who takes part, or what to prepare.
func (c *checker) haveRead(e *leaseEnd) {
	gone := len(c.partsOf(e)) == 0
	switch {
	case e.c == nil && gone:
		c.ended(e, nil)
	case e.c == nil:
		e.parts = c.partsOf(e)
		e.grants = make([]regionpb.LockGrant, len(e.parts))
		e.attempt = c.newAttempt()
		e.c = c.coordinator(len(e.parts), c.w.chance(2))
		e.todo = e.c.Start()
	case gone:
		e.todo = append(e.todo, e.c.Evaluated(nil, regionpb.ErrorOf(regionpb.LeaseNotFound))...)
	case !c.w.mut.noReread && !c.locked(e):
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
	p := &e.parts[do.Part]
	d := c.w.region(p.region)
	r := at.groups[d.ID].replica
	call := &txnCall{store: at.i}
	switch do.Kind {
	case txn.Lock:
		end := func(g regionpb.LockGrant, err error) {
			c.calledBack(call)
			switch {
			case e.done:
			case errors.Is(err, regionpb.ErrorOf(regionpb.NotLeader)) && e.tries < lockTriesMax:
				e.tries++
				e.todo = append(e.todo, do)
			default:
				e.grants[do.Part] = g
				e.todo = append(e.todo, e.c.Locked(do.Part, g.ID, err)...)
			}
		}
		call.fail = func(err error) { end(regionpb.LockGrant{}, err) }
		c.txns.calls = append(c.txns.calls, call)
		l := &region.Lock{Attempt: e.attempt, Age: e.attempt, Owner: storeID(e.store), Now: e.c.Eager(), Reply: end}
		for _, id := range p.ids {
			l.Spans = append(l.Spans, regionpb.LockSpan{Lease: id, Exclusive: true})
			if d.Span.Contains(regionpb.LeasePlace(id)) {
				l.Term = e.term // L5
			}
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
		r.Prepare(&region.Prepare{Request: c.prepareOf(e, do.Part), Reply: end})
	case txn.Release:
		r.Release(e.attempt)
	}
}

// prepareOf is what a part of an end does: its keys of all the leases go, in the order of keys, with
// what records the leases here.
func (c *checker) prepareOf(e *leaseEnd, part int) *regionpb.PrepareRequest {
	d := c.w.region(e.parts[part].region)
	req := &regionpb.PrepareRequest{Region: d.ID, Attempt: e.attempt, Lock: e.c.LockID(part)}
	sub := int64(0)
	for i, p := range e.parts {
		req.Participants = append(req.Participants, c.w.region(p.region).ID)
		var fx []regionpb.Effect
		for _, id := range p.ids {
			for _, key := range e.keys[leaseIn{p.region, id}] {
				fx = append(fx, regionpb.Effect{Key: key, Delete: true, Detach: id})
			}
			if i == part && e.records[id] != nil {
				k := regionpb.RegisteredKey(d.Span.Start, id)
				if d.Span.Contains(regionpb.LeasePlace(id)) {
					k = regionpb.LeaseKey(id)
				}
				req.Records = append(req.Records, regionpb.RecordEffect{Key: k})
			}
		}
		slices.SortFunc(fx, func(a, b regionpb.Effect) int { return bytes.Compare(a.Key, b.Key) })
		for range fx {
			if i == part {
				req.Subs = append(req.Subs, sub)
			}
			sub++
		}
		if i == part {
			req.Effects = fx
		}
	}
	slices.Sort(req.Participants)
	return req
}

// newAttempt is an attempt id that nobody has.
func (c *checker) newAttempt() pdpb.AttemptID {
	c.txns.attempts++
	return c.txns.attempts
}
