package sim

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"braid/mvcc"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/region"
	"braid/region/regionpb"
	"braid/router/txn"
)

// crossTxn is one attempt of a transaction over several regions: it reads some keys and writes
// some of them. The product's coordinator decides; what is simulated are its calls, which may be
// lost with the store they were made to, and its own end: it may vanish at any step.
type crossTxn struct {
	id      int
	attempt pdpb.AttemptID
	age     pdpb.AttemptID // of the transaction's first attempt
	begun   time.Duration  // the first attempt
	due     time.Duration  // not before
	eager   bool
	store   int // where the coordinator runs
	life    uint64
	keys    []int
	writes  []bool // of keys
	value   []byte
	lease   int64 // that its keys are attached to
	parts   []txnPart
	sentRev mvcc.Revision
	fence   pdpb.Fence

	c       *txn.Coordinator
	todo    []txn.Action
	tries   int  // locks asked for in vain
	gone    bool // it vanished
	done    bool
	asking  bool // for a read point
	pointed bool
	point   pdpb.ReadPoint
	got     map[int]kv // by key
	// evaluated is the newest fence that was in any cut when it was evaluated.
	evaluated pdpb.Fence
}

type txnPart struct {
	region     int
	keys       []int // indexes of crossTxn.keys
	attachable bool
}

// txnCall is a call to a replica that has not come back.
type txnCall struct {
	store int
	fail  func(error)
}

var errLost = errors.New("sim: the store that was asked is gone")

// decided is how an attempt ended, as the cuts say.
type decided struct {
	d           pdpb.Decision
	cut         pdpb.Cut
	index, term uint64
	took        bool // a revision
}

// partKey names a region's part in an attempt.
type partKey struct {
	attempt pdpb.AttemptID
	region  pdpb.RegionID
}

// txnState is what the checker knows of transactions over several regions.
type txnState struct {
	all      []*crossTxn
	live     []*crossTxn
	again    []*crossTxn // attempts that follow those that ended in this step
	calls    []*txnCall
	decided  map[pdpb.AttemptID]decided
	prepared map[partKey]*appliedEntry
	ended    map[partKey]pdpb.Decision
	effects  map[mvcc.Revision]map[int64]regionpb.Effect // by ordinal
	attempts pdpb.AttemptID                              // the last one
}

func newTxnState() txnState {
	return txnState{decided: map[pdpb.AttemptID]decided{}, prepared: map[partKey]*appliedEntry{},
		ended: map[partKey]pdpb.Decision{}, effects: map[mvcc.Revision]map[int64]regionpb.Effect{}}
}

// lockTriesMax bounds what an attempt asks in vain.
const lockTriesMax = 40

// startTxn begins a transaction over two or three keys of at least two regions.
func (c *checker) startTxn() {
	w := c.w
	s := w.stores[w.rng.IntN(len(w.stores))]
	if !s.up || len(c.txns.live) >= w.aim.live || w.cfg.Regions < 2 {
		return
	}
	t := &crossTxn{store: s.i, life: s.life, begun: w.now, due: w.now, eager: w.chance(2)}
	wide := w.rng.IntN(100) < w.aim.wide
	for range 2 + w.rng.IntN(2) {
		r := w.rng.IntN(w.cfg.Regions)
		if w.rng.IntN(100) < w.aim.hot {
			r = w.rng.IntN(2)
		}
		k := r * keysPerRegion
		if wide && !slices.Contains(t.keys, k) {
			t.keys = append(t.keys, k, k+1, k+2, k+3)
			continue
		}
		if w.rng.IntN(100) >= w.aim.hot {
			k += w.rng.IntN(keysPerRegion)
		}
		if !slices.Contains(t.keys, k) {
			t.keys = append(t.keys, k)
		}
	}
	slices.Sort(t.keys)
	for i, k := range t.keys {
		t.writes = append(t.writes, wide || w.rng.IntN(100) < w.aim.writes)
		r := k / keysPerRegion
		if n := len(t.parts); n == 0 || t.parts[n-1].region != r {
			t.parts = append(t.parts, txnPart{region: r})
		}
		p := &t.parts[len(t.parts)-1]
		p.keys = append(p.keys, i)
	}
	if len(t.parts) < 2 {
		return
	}
	if l := c.liveLease(); l != nil && !l.home() && w.chance(2) {
		t.lease = l.id
	}
	c.txns.live = append(c.txns.live, t)
	c.attempt(t)
}

// attempt begins an attempt.
func (c *checker) attempt(t *crossTxn) {
	t.id, t.attempt = len(c.txns.all), c.newAttempt()
	if t.age == 0 {
		t.age = t.attempt
	}
	t.value = fmt.Appendf(nil, "t%d", t.attempt)
	t.sentRev, t.fence, t.got = c.maxAcked, c.ackFence, map[int]kv{}
	t.c = c.coordinator(len(t.parts), t.eager)
	t.todo = t.c.Start()
	c.txns.all = append(c.txns.all, t)
	c.w.stats.Txns++
}

// repeat follows an attempt that was certainly not executed by another one, as package router does: with
// the age of the first, which waits if that one found others in its way (T4, T5).
func (c *checker) repeat(t *crossTxn) {
	n := &crossTxn{store: t.store, life: t.life, age: t.age, begun: t.begun, due: c.w.now, keys: t.keys, writes: t.writes, lease: t.lease, eager: t.eager}
	for _, p := range t.parts {
		n.parts = append(n.parts, txnPart{region: p.region, keys: p.keys})
	}
	if errors.Is(t.c.Result().Err, regionpb.ErrorOf(regionpb.LockBusy)) {
		n.eager = false
	} else {
		n.due += time.Duration(c.w.rng.IntN(20)) * time.Millisecond
	}
	c.txns.again = append(c.txns.again, n)
	c.attempt(n)
}

// coordinator is the product's, of n participants, without the rules that are dropped.
func (c *checker) coordinator(n int, eager bool) *txn.Coordinator {
	co := txn.New(n, eager || c.w.mut.unordered)
	co.SkipReaders, co.Unordered = c.w.mut.skipReaders, c.w.mut.unordered
	return co
}

// stepTxns lets coordinators do something.
func (c *checker) stepTxns() {
	kept := c.txns.live[:0]
	for _, t := range c.txns.live {
		s := c.w.stores[t.store]
		t.gone = t.gone || !s.up || s.life != t.life
		if !t.gone && !t.done && c.w.now >= t.due && (c.w.calm || c.w.chance(2)) {
			c.stepTxn(s, t)
		}
		if !t.gone && !t.done {
			kept = append(kept, t)
		}
	}
	clear(c.txns.live[len(kept):])
	c.txns.live, c.txns.again = append(kept, c.txns.again...), nil
}

func (c *checker) stepTxn(s *store, t *crossTxn) {
	if t.pointed {
		c.readTxn(t)
	}
	if len(t.todo) == 0 {
		return
	}
	if !c.w.calm && !c.w.quiet && c.w.chance(60) {
		t.gone = true // without a word
		return
	}
	do := t.todo[0]
	switch do.Kind {
	case txn.Lock, txn.Prepare, txn.Release:
		p := &t.parts[do.Part]
		id := c.w.region(p.region).ID
		at := c.replicaFor(id)
		if at == nil {
			return // nobody leads; later
		}
		t.todo = t.todo[1:]
		c.callTxn(t, do, at, at.groups[id].replica)
	case txn.Evaluate:
		t.todo, t.asking = t.todo[1:], true
		s.oracle.ReadPointFunc(func(p pdpb.ReadPoint, err error) {
			t.asking = false
			if err == nil {
				t.pointed, t.point = true, p
			}
		})
	case txn.AskAbort:
		t.todo = t.todo[1:]
		s.oracle.ProposeFunc(order.Event{Kind: order.EventAbort, Attempt: t.attempt}, func(r order.EventResult, err error) {
			if errors.Is(err, order.ErrAborted) {
				err = regionpb.ErrorOf(regionpb.Aborted)
			}
			t.todo = append(t.todo, t.c.Asked(r.Rev, err)...)
		})
	case txn.Done:
		t.done = true
		c.endTxn(t)
	}
}

// callTxn makes a call to a replica. Should its store crash, the call ends with an error.
func (c *checker) callTxn(t *crossTxn, do txn.Action, at *store, r *region.Replica) {
	p := &t.parts[do.Part]
	call := &txnCall{store: at.i}
	switch do.Kind {
	case txn.Lock:
		end := func(g regionpb.LockGrant, err error) {
			c.calledBack(call)
			switch {
			case t.gone:
			case errors.Is(err, regionpb.ErrorOf(regionpb.NotLeader)) && t.tries < lockTriesMax:
				t.tries++ // package router does so in the first region only
				t.todo = append(t.todo, do)
			default:
				t.todo = append(t.todo, t.c.Locked(do.Part, g.ID, err)...)
			}
		}
		call.fail = func(err error) { end(regionpb.LockGrant{}, err) }
		c.txns.calls = append(c.txns.calls, call)
		l := &region.Lock{Attempt: t.attempt, Age: t.age, Owner: storeID(t.store), Now: t.c.Eager(), Reply: end}
		for _, i := range p.keys {
			l.Spans = append(l.Spans, regionpb.LockSpan{Span: mvcc.Key(key(t.keys[i])), Exclusive: t.writes[i]})
		}
		if t.lease != 0 && c.partWrites(t, do.Part) {
			l.Spans = append(l.Spans, regionpb.LockSpan{Lease: t.lease}) // L2
		}
		r.Lock(l)
	case txn.Prepare:
		end := func(rev mvcc.Revision, err error) {
			c.calledBack(call)
			if !t.gone {
				t.todo = append(t.todo, t.c.Prepared(do.Part, rev, err)...)
			}
		}
		call.fail = func(err error) { end(0, err) }
		c.txns.calls = append(c.txns.calls, call)
		req := &regionpb.PrepareRequest{Region: c.w.region(p.region).ID, Attempt: t.attempt, Lock: t.c.LockID(do.Part)}
		for i := range t.parts {
			if !t.c.SkipReaders || c.partWrites(t, i) {
				req.Participants = append(req.Participants, c.w.region(t.parts[i].region).ID)
			}
		}
		req.Effects, req.Subs = c.effectsOfPart(t, do.Part)
		r.Prepare(&region.Prepare{Request: req, Reply: end})
	case txn.Release:
		r.Release(t.attempt)
	}
}

func (c *checker) partWrites(t *crossTxn, part int) bool {
	return slices.ContainsFunc(t.parts[part].keys, func(i int) bool { return t.writes[i] })
}

func (c *checker) effectsOfPart(t *crossTxn, part int) (fx []regionpb.Effect, subs []int64) {
	ordinal := int64(0)
	for i, k := range t.keys {
		if !t.writes[i] {
			continue
		}
		if k/keysPerRegion == t.parts[part].region {
			f := regionpb.Effect{Key: key(k), Value: t.value, Version: t.got[k].version + 1, CreateKind: regionpb.CreateNew, Lease: t.lease}
			if t.got[k].lease != t.lease {
				f.Detach = t.got[k].lease
			}
			if t.got[k].version > 0 {
				f.CreateKind, f.Create = regionpb.CreateKnown, mvcc.Revision(t.got[k].create)
			}
			fx, subs = append(fx, f), append(subs, ordinal)
		}
		ordinal++
	}
	return fx, subs
}

// readTxn reads the keys at the point, each from whichever replica is complete.
func (c *checker) readTxn(t *crossTxn) {
	for _, k := range t.keys {
		if _, ok := t.got[k]; ok {
			continue
		}
		i := k / keysPerRegion
		g := c.readable(c.w.stores[c.w.rng.IntN(len(c.w.stores))], i)
		if g == nil {
			return
		}
		resp, err := g.replica.TryRead(&regionpb.ReadRequest{Region: g.id, Epoch: 1, Cut: t.point.Cut, Rev: t.point.Rev, Span: mvcc.Key(key(k))})
		var re *regionpb.Error
		switch {
		case err == nil:
			t.got[k] = pageOf(resp)[string(key(k))]
		case errors.As(err, &re) && re.Code == regionpb.Compacted:
			t.pointed = false
			t.todo = append(t.todo, t.c.Evaluated(nil, err)...)
			return
		case !errors.As(err, &re) || re.Code != regionpb.NotComplete:
			c.w.fail("txn %d at %v: %v", t.id, t.point, err)
			return
		}
	}
	if len(t.got) < len(t.keys) || !c.attachable(t) {
		return
	}
	t.pointed, t.evaluated = false, c.mark.Fence
	writes := make([]bool, len(t.parts))
	for i := range t.parts {
		writes[i] = c.partWrites(t, i)
	}
	t.todo = append(t.todo, t.c.Evaluated(writes, nil)...)
}

// attachable looks under the locks whether every region that is written may attach keys to the
// transaction's lease. For one that may not the transaction fails, and the region is registered for
// the next one that needs it, without locks (L4).
func (c *checker) attachable(t *crossTxn) bool {
	if t.lease == 0 {
		return true
	}
	for i := range t.parts {
		p := &t.parts[i]
		if p.attachable || !c.partWrites(t, i) {
			continue
		}
		g := c.readable(c.w.stores[c.w.rng.IntN(len(c.w.stores))], p.region)
		if g == nil {
			return false
		}
		resp, err := g.replica.TryRead(&regionpb.ReadRequest{Region: g.id, Epoch: 1, Cut: t.point.Cut, Rev: t.point.Rev,
			Span: mvcc.Key(key(t.keys[p.keys[0]])), Leases: true, Lease: t.lease})
		var re *regionpb.Error
		switch {
		case errors.As(err, &re) && re.Code == regionpb.NotComplete:
			return false
		case err == nil && len(resp.KVs) == 0 && c.w.mut.registerHeld:
			t.pointed = false
			c.attach(p.region, t.lease, func(err error) { c.registeredHeld(t, err) })
			return false
		case err != nil || len(resp.KVs) == 0:
			t.pointed = false
			t.todo = append(t.todo, t.c.Evaluated(nil, regionpb.ErrorOf(regionpb.LeaseNotFound))...)
			if err == nil {
				c.attach(p.region, t.lease, func(error) {})
			}
			return false
		}
		p.attachable = true
	}
	return true
}

// registeredHeld goes on with an attempt that registered a region with its locks held (without L4).
func (c *checker) registeredHeld(t *crossTxn, err error) {
	switch {
	case t.gone || t.c.Result().Outcome != txn.Open:
	case err != nil:
		t.todo = append(t.todo, t.c.Evaluated(nil, err)...)
	default:
		t.got = map[int]kv{}
		t.todo = append(t.todo, txn.Action{Kind: txn.Evaluate})
	}
}

// endTxn takes what the coordinator tells its client.
func (c *checker) endTxn(t *crossTxn) {
	res := t.c.Result()
	c.w.event("txn %d (attempt %d) %v %d", t.id, t.attempt, res.Outcome, res.Rev)
	d, ok := c.txns.decided[t.attempt]
	switch res.Outcome {
	case txn.Committed:
		c.w.stats.Commits++
		if !ok || !d.d.Commit || d.d.Rev != res.Rev {
			c.w.fail("T3: txn %d is told that it is committed at %d, cuts say %v", t.id, res.Rev, d.d)
			return
		}
		if res.Rev <= t.sentRev {
			c.w.fail("I2: txn %d wrote revision %d, and %d was acknowledged before it was sent", t.id, res.Rev, t.sentRev)
		}
		c.durableTxn(t, d)
		c.maxAcked, c.maxCut = max(c.maxAcked, res.Rev), max(c.maxCut, d.cut)
		for i, k := range t.keys {
			if t.writes[i] {
				c.lastRev[k] = max(c.lastRev[k], res.Rev)
			}
		}
	case txn.Unknown:
		c.w.stats.Unknown++
	case txn.Retry:
		c.w.stats.Refused++
		c.repeat(t)
	default:
		c.w.stats.Refused++
	}
}

// durableTxn checks I8 for every participant, and F2.
func (c *checker) durableTxn(t *crossTxn, d decided) {
	for i := range t.parts {
		if t.c.SkipReaders && !c.partWrites(t, i) {
			continue
		}
		id := c.w.region(t.parts[i].region).ID
		a := c.txns.prepared[partKey{t.attempt, id}]
		if a == nil {
			continue // nobody applied it yet; the cut says that it is committed
		}
		if a.fence < t.fence {
			c.w.fail("F2: txn %d was sent after fence %d was acknowledged and prepared under %d", t.id, t.fence, a.fence)
		}
		n := 0
		for _, s := range c.w.stores {
			if holds(s, id, a.index, a.term) {
				n++
			}
		}
		if n <= len(c.w.stores)/2 {
			c.w.fail("I8: txn %d is acknowledged, its prepare %d/%d of region %d is durable on %d stores", t.id, a.index, a.term, id, n)
		}
	}
	n := 0
	for _, s := range c.w.stores {
		if holds(s, c.w.orderGroup(), d.index, d.term) {
			n++
		}
	}
	if n <= len(c.w.stores)/2 {
		c.w.fail("I8: txn %d is acknowledged, its cut %d is durable on %d stores", t.id, d.cut, n)
	}
}

func (c *checker) calledBack(call *txnCall) {
	if i := slices.Index(c.txns.calls, call); i >= 0 {
		c.txns.calls = slices.Delete(c.txns.calls, i, i+1)
	}
}

// crashedTxns ends the calls to a store that is gone.
func (c *checker) crashedTxns(s *store) {
	var lost []*txnCall
	for _, call := range c.txns.calls {
		if call.store == s.i {
			lost = append(lost, call)
		}
	}
	for _, call := range lost {
		call.fail(errLost)
	}
}

// cutDecided is told the decisions of each cut once; it returns the revisions they took.
func (c *checker) cutDecided(cut pdpb.Cut, index, term uint64, list []pdpb.Decision, before mvcc.Revision) (given mvcc.Revision) {
	for _, d := range list {
		if old, ok := c.txns.decided[d.Attempt]; ok && old.d != d {
			c.w.fail("I3: attempt %d was decided as %v, and in cut %d as %v", d.Attempt, old.d, cut, d)
		}
		c.txns.decided[d.Attempt] = decided{d, cut, index, term, d.Commit && d.Rev != before+given}
		if !d.Commit {
			c.w.stats.Aborts++
			continue
		}
		if d.Rev == before+given {
			continue // it only changes records, and takes no revision
		}
		if given++; d.Rev != before+given {
			c.w.fail("I1: attempt %d has revision %d, the revisions before it end at %d", d.Attempt, d.Rev, before+given-1)
		}
	}
	return given
}

// partDecided is told each decision by each replica.
func (c *checker) partDecided(s *store, id pdpb.RegionID, it *pdpb.Item, p *regionpb.Prepared, d pdpb.Decision) {
	k := partKey{d.Attempt, id}
	if _, ok := c.txns.decided[d.Attempt]; !ok && !d.Commit {
		// Prepared after pd had forgotten so old attempts: aborted without a decision of its own (A4).
		// The item is of a cut, and nobody may find it committed.
		c.txns.decided[d.Attempt] = decided{d: d, cut: it.Cut}
	}
	if known, ok := c.txns.decided[d.Attempt]; !ok || known.d != d {
		c.w.fail("T3: store %d region %d applied %v in item %d, cuts say %v", s.i, id, d, it.N, known.d)
		return
	}
	if old, ok := c.txns.ended[k]; ok {
		if old != d {
			c.w.fail("I6: store %d region %d applied %v, others %v", s.i, id, d, old)
		}
		return
	}
	c.txns.ended[k] = d
	if !d.Commit {
		return
	}
	took := c.txns.decided[d.Attempt].took
	c.leaseRecorded(p.Records, d.Rev, took)
	if !took {
		if len(p.Effects) > 0 {
			c.w.fail("I1: attempt %d has effects and took no revision", d.Attempt)
		}
		return
	}
	fx := c.txns.effects[d.Rev]
	if fx == nil {
		fx = map[int64]regionpb.Effect{}
		c.txns.effects[d.Rev] = fx
	}
	for i, f := range cloneEffects(p.Effects) {
		if _, ok := fx[p.Subs[i]]; ok {
			c.w.fail("R1: two events of revision %d are number %d", d.Rev, p.Subs[i])
		}
		fx[p.Subs[i]] = f
	}
	c.writes[d.Rev] = &appliedEntry{cut: it.Cut}
	c.effects[d.Rev] = nil
	for sub := range int64(ordinalsMax) {
		if f, ok := fx[sub]; ok {
			c.effects[d.Rev] = append(c.effects[d.Rev], f)
		}
	}
}

// ordinalsMax bounds the ordinals of a transaction here.
const ordinalsMax = 16

// checkTxns holds every attempt against the replayed history: all of it or nothing, and on the
// state that it read.
func (c *checker) checkTxns(h history) error {
	for _, t := range c.txns.all {
		d, ok := c.txns.decided[t.attempt]
		for i := range t.parts {
			if t.c.SkipReaders && !c.partWrites(t, i) {
				continue
			}
			id := c.w.region(t.parts[i].region).ID
			end, ended := c.txns.ended[partKey{t.attempt, id}]
			if ok && d.d.Commit && !(ended && end.Commit) {
				return fmt.Errorf("atomicity: txn %d is committed at %d, and region %d did not hear it", t.id, d.d.Rev, id)
			}
			// A leader that knows a fence has dropped the locks of what was evaluated before it was raised.
			if a := c.txns.prepared[partKey{t.attempt, id}]; ok && d.d.Commit && a != nil && a.fence > t.evaluated {
				return fmt.Errorf("F3: txn %d was evaluated under fence %d at most, and region %d prepared it under fence %d", t.id, t.evaluated, id, a.fence)
			}
		}
		if res := t.c.Result().Outcome; ok && d.d.Commit && (res == txn.Retry || res == txn.Failed || res == txn.Nothing) {
			return fmt.Errorf("txn %d was told that it is not executed (%v), and is committed at %d", t.id, res, d.d.Rev)
		}
		if !ok || !d.d.Commit {
			continue
		}
		for _, k := range t.keys {
			if was := h.at(key(k), d.d.Rev-1); !same(was, t.got[k]) {
				return fmt.Errorf("serializability: txn %d read %s as %+v and is committed at %d, before which it was %+v", t.id, key(k), t.got[k], d.d.Rev, was)
			}
		}
	}
	return nil
}
