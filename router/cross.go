package router

import (
	"bytes"
	"context"
	"errors"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
	"braid/router/txn"
)

// participant is a region's part in a transaction.
type participant struct {
	region pdpb.Descriptor
	locks  []regionpb.LockSpan
	term   uint64 // of the leader that may grant them; 0: any (L5)
}

// job is what an attempt does, once the locks are held.
type job interface {
	// participants says what to lock, in the order of keys (T5). It is asked anew for each attempt.
	participants(ctx context.Context, regions []pdpb.Descriptor) ([]participant, error)
	// evaluate decides at a read point that was asked for after the last grant. An error is the
	// answer, but for errAgain, which asks for another attempt.
	evaluate(ctx context.Context, p point, parts []participant) (outcome, error)
	// between is called after an attempt that failed so, without locks (T5: registrations come
	// before locks). It says whether the next attempt knows of something that the ones before did not
	// find; otherwise somebody else keeps changing what they find.
	between(ctx context.Context) (news bool, err error)
}

// grantsJob is a job that can do with what the regions said when they granted their locks.
type grantsJob interface {
	// granted decides as evaluate does; false when that is not known. An outcome without effects and records
	// would need a read point.
	granted(parts []participant, grants []regionpb.LockGrant) (out outcome, known bool, err error)
}

// outcome is what evaluation came to.
type outcome struct {
	effects []regionpb.Effect // in the order in which they are events (R1)
	// records are changes of the system space, by participant; nil when there are none.
	records [][]regionpb.RecordEffect
	// fill makes the answer: of a commit at rev, or, without effects and records, as of rev.
	fill func(rev mvcc.Revision) *pb.TxnResponse
	rev  mvcc.Revision // of the read point
}

// errAgain is wrapped by an evaluation that found the locks to be of other things than it needs.
var errAgain = errors.New("router: the attempt locked too little")

// participants cuts what a transaction may look at and write, on any branch, by region, in the
// order of keys: locks are taken in this order (T5). The leases of homes are locked where their
// records are.
func participants(regions []pdpb.Descriptor, req *pb.TxnRequest, homes []int64) ([]participant, error) {
	byRegion := map[pdpb.RegionID]*participant{}
	var list []*participant
	part := func(d *pdpb.Descriptor) *participant {
		p := byRegion[d.ID]
		if p == nil {
			p = &participant{region: *d}
			byRegion[d.ID] = p
			list = append(list, p)
		}
		return p
	}
	for _, l := range lockSpans(nil, req) {
		for _, d := range overlapping(regions, l.Span) {
			p := part(&d)
			p.locks = append(p.locks, regionpb.LockSpan{Span: l.Span.Intersect(d.Span), Exclusive: l.Exclusive})
		}
	}
	if len(list) == 0 {
		return nil, ErrNoRegion
	}
	leases(req, func(key []byte, lease int64) {
		if d, ok := find(regions, key); ok {
			part(d).lease(lease)
		}
	})
	for _, id := range homes {
		d, ok := find(regions, regionpb.LeasePlace(id))
		if !ok {
			return nil, ErrNoRegion
		}
		part(d).lease(id)
	}
	slices.SortFunc(list, func(a, b *participant) int { return bytes.Compare(a.region.Span.Start, b.region.Span.Start) })
	out := make([]participant, len(list))
	for i, p := range list {
		out[i] = *p
	}
	return out, nil
}

// lease locks a lease, shared (L2).
func (p *participant) lease(id int64) {
	if l := (regionpb.LockSpan{Lease: id}); !slices.ContainsFunc(p.locks, func(o regionpb.LockSpan) bool { return o.Lease == id }) {
		p.locks = append(p.locks, l)
	}
}

// leases calls fn with every key that a transaction may attach to a lease, on any branch.
func leases(req *pb.TxnRequest, fn func(key []byte, lease int64)) {
	for _, branch := range [...][]*pb.RequestOp{req.Success, req.Failure} {
		for _, op := range branch {
			switch o := op.Request.(type) {
			case *pb.RequestOp_RequestPut:
				if id := o.RequestPut.Lease; id != 0 {
					fn(o.RequestPut.Key, id)
				}
			case *pb.RequestOp_RequestTxn:
				leases(o.RequestTxn, fn)
			}
		}
	}
}

// lockSpans appends what a transaction reads, shared, and what it may write, exclusive.
func lockSpans(dst []regionpb.LockSpan, req *pb.TxnRequest) []regionpb.LockSpan {
	add := func(key, end []byte, exclusive bool) {
		if s := rangeSpan(key, end); !s.Empty() {
			dst = append(dst, regionpb.LockSpan{Span: s, Exclusive: exclusive})
		}
	}
	for _, c := range req.Compare {
		add(c.Key, c.RangeEnd, false)
	}
	for _, branch := range [...][]*pb.RequestOp{req.Success, req.Failure} {
		for _, op := range branch {
			switch o := op.Request.(type) {
			case *pb.RequestOp_RequestRange:
				add(o.RequestRange.Key, o.RequestRange.RangeEnd, false)
			case *pb.RequestOp_RequestPut:
				add(o.RequestPut.Key, nil, true)
			case *pb.RequestOp_RequestDeleteRange:
				add(o.RequestDeleteRange.Key, o.RequestDeleteRange.RangeEnd, true)
			case *pb.RequestOp_RequestTxn:
				dst = lockSpans(dst, o.RequestTxn)
			}
		}
	}
	return dst
}

// txnJob is a client's transaction.
type txnJob struct {
	r   *Router
	req *pb.TxnRequest
	// homes are leases that were found not to exist, whose records are locked to be sure; missing is
	// one that a region has to be registered for.
	homes   []int64
	missing *missingLease
	tried   map[leaseAt]bool // what was registered before; when it is missing again, others end it
}

func (j *txnJob) participants(_ context.Context, regions []pdpb.Descriptor) ([]participant, error) {
	return participants(regions, j.req, j.homes)
}

func (j *txnJob) evaluate(ctx context.Context, p point, _ []participant) (outcome, error) {
	e, err := j.r.evaluate(ctx, p, j.req, j.homes)
	if err != nil {
		errors.As(err, &j.missing)
		return outcome{}, err
	}
	out := outcome{effects: e.effects, fill: e.fill, rev: p.rev}
	e.effects = nil // fill keeps e
	return out, nil
}

func (j *txnJob) between(ctx context.Context) (news bool, err error) {
	m := j.missing
	if m == nil {
		return false, nil
	}
	j.missing = nil
	at := leaseAt{lease: m.lease}
	if d, ok := find(j.r.oracle.Regions(), m.key); ok {
		at.region = d.ID
	}
	if news = !j.tried[at]; news {
		if j.tried == nil {
			j.tried = map[leaseAt]bool{}
		}
		j.tried[at] = true
	}
	_, err = j.r.propose(ctx, &regionpb.WriteRequest{Lease: &regionpb.LeaseCommand{Op: regionpb.LeaseAttach, ID: m.lease, Span: mvcc.Key(m.key)}})
	if codeOf(err) == regionpb.LeaseNotFound {
		// Whether that matters depends on the branch that is taken, and it must be so at the same
		// point at which the branch is decided.
		j.homes, err = append(j.homes, m.lease), nil
	}
	return news, err
}

// attempts is a transaction over several regions: attempt after attempt, each with an id of its
// own (T4), while they are certainly not executed. The first takes its locks everywhere at once;
// where others are in the way, the next ones wait for theirs in the order of keys (T5).
func (r *Router) attempts(ctx context.Context, j job) (*pb.TxnResponse, error) {
	var age pdpb.AttemptID
	fresh, eager := false, true
	for b := r.backoff(); ; {
		a := &attempt{r: r, job: j, eager: eager}
		resp, err := a.run(ctx, age, fresh)
		if err == nil || !a.again || codeOf(err) == regionpb.LeaseTermOver {
			return resp, err
		}
		if age == 0 {
			age = a.id // what was tried first goes first, else a large transaction would starve
		}
		if codeOf(err) == regionpb.LockBusy {
			eager = false
			continue
		}
		if errors.Is(err, errAgain) {
			news, err := j.between(ctx)
			if err != nil {
				return nil, err
			}
			if news {
				continue
			}
		}
		fresh = codeOf(err) == regionpb.Aborted
		if werr := b.wait(ctx); werr != nil {
			return nil, werr
		}
	}
}

// attempt drives one coordinator with real calls.
type attempt struct {
	r      *Router
	job    job
	eager  bool
	id     pdpb.AttemptID
	parts  []participant
	c      *txn.Coordinator
	grants []regionpb.LockGrant // of each participant, once locked
	out    outcome
	work   []work // of each participant, once evaluated
	again  bool   // it is certainly not executed, and a further attempt may fare better
}

// work is a participant's part of the effects, with their places among all.
type work struct {
	effects []regionpb.Effect
	subs    []int64
}

// reply is the end of one call: of a prepare, or of a lock when several are asked for at once.
type reply struct {
	kind txn.Kind
	part int
	lock regionpb.LockGrant
	rev  mvcc.Revision
	err  error
}

func (a *attempt) run(ctx context.Context, age pdpb.AttemptID, fresh bool) (*pb.TxnResponse, error) {
	r := a.r
	var err error
	if a.parts, err = a.job.participants(ctx, r.oracle.Regions()); err != nil {
		a.again = errors.Is(err, ErrNoRegion)
		return nil, err
	}
	if a.id, err = r.oracle.Attempt(ctx, fresh); err != nil {
		a.again = readAgain(err)
		return nil, err
	}
	if age == 0 {
		age = a.id
	}
	a.grants = make([]regionpb.LockGrant, len(a.parts))
	a.c = txn.New(len(a.parts), a.eager && len(a.parts) > 1)
	// Calls that nobody waits for any more end with pctx; they have ended when run returns.
	pctx, cancel := context.WithCancel(ctx)
	replies := make(chan reply, len(a.parts))
	open := 0
	drain := func() {
		cancel()
		for ; open > 0; open-- {
			<-replies
		}
	}
	defer drain()
	todo := a.c.Start()
	for a.c.Result().Outcome == txn.Open {
		if len(todo) == 0 {
			select {
			case p := <-replies:
				open--
				if p.kind == txn.Lock {
					a.grants[p.part] = p.lock
					todo = a.c.Locked(p.part, p.lock.ID, p.err)
				} else {
					todo = a.c.Prepared(p.part, p.rev, p.err)
				}
			case <-ctx.Done():
				todo = a.c.GiveUp(ctx.Err())
			}
			continue
		}
		do := todo[0]
		todo = todo[1:]
		var next []txn.Action
		switch do.Kind {
		case txn.Lock:
			if a.c.Eager() {
				open++
				go func() {
					g, err := a.lock(pctx, do.Part, age)
					replies <- reply{kind: txn.Lock, part: do.Part, lock: g, err: err}
				}()
				break
			}
			g, err := a.lock(ctx, do.Part, age)
			a.grants[do.Part] = g
			if err != nil && ctx.Err() != nil {
				next = a.c.GiveUp(ctx.Err())
			} else {
				next = a.c.Locked(do.Part, g.ID, err)
			}
		case txn.Evaluate:
			next = a.c.Evaluated(a.evaluate(ctx))
		case txn.Prepare:
			open++
			go func() { replies <- a.prepare(pctx, do.Part) }()
		case txn.AskAbort:
			next = a.c.Asked(a.abort(ctx))
		}
		todo = append(todo, next...)
	}
	drain() // a release that overtakes its request would leave that granted
	for _, do := range todo {
		if do.Kind == txn.Release {
			r.stores.Release(a.parts[do.Part].region, &regionpb.ReleaseRequest{Region: a.parts[do.Part].region.ID, Attempt: a.id})
		}
	}
	switch res := a.c.Result(); res.Outcome {
	case txn.Committed:
		return a.out.fill(res.Rev), nil
	case txn.Nothing:
		return a.out.fill(a.out.rev), nil
	case txn.Retry:
		a.again = true
		return nil, res.Err
	case txn.Failed:
		a.again = errors.Is(res.Err, errAgain)
		return nil, res.Err
	default:
		// What is prepared would keep its locks until a region asks for itself (T6), much longer than
		// clients wait. If all of it is prepared, the commit is on its way and comes before this.
		r.oracle.Abandon(a.id)
		return nil, unknown(res.Err)
	}
}

// lock asks a region for its locks, again while it has no leader, if it is the first: a grant binds
// nobody until it is used, so that asking twice does no harm. What other regions have granted is not
// kept from others meanwhile: there the attempt ends, and the next one comes after a pause.
func (a *attempt) lock(ctx context.Context, part int, age pdpb.AttemptID) (regionpb.LockGrant, error) {
	p := &a.parts[part]
	req := &regionpb.LockRequest{Region: p.region.ID, Epoch: p.region.Epoch, Attempt: a.id, Age: age, Locks: p.locks, Term: p.term, Now: a.c.Eager()}
	for b := a.r.backoff(); ; {
		g, err := a.r.stores.Lock(ctx, p.region, req)
		if err == nil || (codeOf(err) != regionpb.NotLeader && !errors.Is(err, ErrNotSent)) {
			return g, err
		}
		if req.Now {
			return g, regionpb.ErrorOf(regionpb.LockBusy)
		}
		if part > 0 {
			return g, err
		}
		if werr := b.wait(ctx); werr != nil {
			return g, werr
		}
	}
}

// abort asks pd for an abort, until pd has the question.
func (a *attempt) abort(ctx context.Context) (mvcc.Revision, error) {
	for b := a.r.backoff(); ; {
		rev, err := a.r.oracle.Abort(ctx, a.id)
		if err == nil || !notExecuted(err) {
			return rev, err
		}
		if werr := b.wait(ctx); werr != nil {
			return 0, werr
		}
	}
}

// evaluate runs the transaction at a read point that was asked for after the last grant, unless the grants
// say all that it has to know.
func (a *attempt) evaluate(ctx context.Context) (writes []bool, err error) {
	known := false
	if j, ok := a.job.(grantsJob); ok {
		a.out, known, err = j.granted(a.parts, a.grants)
	}
	if !known && err == nil {
		err = a.r.at(ctx, false, nil, func(ctx context.Context, p point) (err error) {
			a.out, err = a.job.evaluate(ctx, p, a.parts)
			return err
		})
	}
	if err != nil {
		return nil, err
	}
	writes = make([]bool, len(a.parts))
	a.work = make([]work, len(a.parts))
	for i := range a.out.effects {
		p := a.partOf(a.out.effects[i].Key)
		writes[p] = true
		a.work[p].effects = append(a.work[p].effects, a.out.effects[i])
		a.work[p].subs = append(a.work[p].subs, int64(i))
	}
	a.out.effects = nil
	for i := range a.out.records {
		writes[i] = writes[i] || len(a.out.records[i]) > 0
	}
	return writes, nil
}

// partOf returns the participant that has a key; there is one, since every key is locked.
func (a *attempt) partOf(key []byte) int {
	i, ok := slices.BinarySearchFunc(a.parts, key, func(p participant, key []byte) int { return bytes.Compare(p.region.Span.Start, key) })
	if ok {
		return i
	}
	return i - 1
}

func (a *attempt) prepare(ctx context.Context, part int) reply {
	d := a.parts[part].region
	w := &a.work[part]
	req := &regionpb.PrepareRequest{Region: d.ID, Attempt: a.id, Lock: a.c.LockID(part), Effects: w.effects, Subs: w.subs}
	for i := range a.parts {
		req.Participants = append(req.Participants, a.parts[i].region.ID)
	}
	slices.Sort(req.Participants)
	if a.out.records != nil {
		req.Records = a.out.records[part]
	}
	rev, err := a.r.stores.Prepare(ctx, d, req)
	return reply{kind: txn.Prepare, part: part, rev: rev, err: err}
}
