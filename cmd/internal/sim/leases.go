package sim

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/leasesvc"
	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region"
	"braid/region/regionpb"
)

// leaseRate is how much faster the time of leases runs than that of raft, so that leases of whole
// seconds end within a run: a second of a lease is 50 steps.
const leaseRate = 20

// leaseTTLMax is the longest lease, in seconds; leaseExtend is what a new leader adds.
const (
	leaseTTLMax = 9
	leaseExtend = 7 * time.Second
)

// leaseTime is the time of leases as an onlooker sees it; every store counts from an origin of its own.
func (w *World) leaseTime() time.Duration      { return leaseRate * w.now }
func (s *store) leaseTime() time.Duration      { return s.origin + s.w.leaseTime() }
func (w *World) seconds(n int64) time.Duration { return time.Duration(n) * time.Second }

// leaseLoad is a term's records on their way to the core, as a scan of the engine brings them.
type leaseLoad struct {
	region pdpb.RegionID
	term   uint64
	read   bool
	list   []regionpb.Lease
}

func (s *store) openLeases() {
	s.leases = leasesvc.New(leasesvc.Options{
		// Less than a deposed leader may take to hear of it when its clock stands still.
		Extend: leaseExtend, CheckpointEvery: 3 * time.Second, RetryAfter: time.Second, RetryMax: 2 * time.Second, EndingMax: 4,
	})
	s.leases.NoExtend, s.leases.NoConfirm, s.leases.RenewEnding = s.w.mut.noExtend, s.w.mut.noConfirm, s.w.mut.renewEnding
	s.origin = time.Duration(s.w.rng.IntN(1e6)) * time.Millisecond
	s.loads, s.confirming, s.expiring = nil, map[pdpb.RegionID]bool{}, nil
}

// feedLeases makes a replica tell the store's core what it applies and when it leads.
func (s *store) feedLeases(cfg *region.Config) {
	id := cfg.Position.Descriptor.ID
	cfg.Observer.Leases = func(changes []region.LeaseChange) {
		for i := range changes {
			s.leases.Changed(id, changes[i].ID, changes[i].Record, s.leaseTime())
		}
		s.keepAwake(id)
	}
	cfg.Observer.LeaseTerm = func(term uint64) {
		s.loads = slices.DeleteFunc(s.loads, func(l *leaseLoad) bool { return l.region == id })
		if term == 0 {
			s.leases.End(id)
		} else {
			s.leases.Lead(id, term)
			s.loads = append(s.loads, &leaseLoad{region: id, term: term})
		}
		s.keepAwake(id)
	}
}

func (s *store) keepAwake(id pdpb.RegionID) {
	loading := slices.ContainsFunc(s.loads, func(l *leaseLoad) bool { return l.region == id })
	s.groups[id].replica.KeepAwake(loading || s.leases.Len(id) > 0)
	s.groups[id].wake()
}

// stepLeases loads records and carries out what the time of leases brings.
func (w *World) stepLeases(s *store) {
	if len(s.loads) > 0 && (w.calm || w.chance(3)) {
		w.load(s, s.loads[0])
	}
	for _, a := range s.leases.Tick(s.leaseTime(), nil) {
		w.event("s%d: %s", s.i, a.String())
		// Sometimes leases of several groups: the groups are for speed.
		if n := len(s.expiring); n > 0 && (a.Kind != leasesvc.Expire || n == endsMax || w.aim.oneGroup || a.Alone || s.expiring[0].Alone ||
			a.Region != s.expiring[0].Region || a.Term != s.expiring[0].Term || a.Group != s.expiring[0].Group && w.chance(2)) {
			s.expire()
		}
		if s.expiring = append(s.expiring, a); a.Kind != leasesvc.Expire {
			s.expire()
		} else if l := w.check.leases.byID[a.ID]; w.rng.IntN(100) < w.aim.anew && !w.calm && l.acked && !l.gone && !l.revoking {
			w.check.revokeLease(l) // at this very moment
		}
	}
	// For a while, so that some come together.
	if w.calm || w.chance(40) {
		s.expire()
	}
}

// expire carries out what has been collected.
func (s *store) expire() {
	if list := s.expiring; len(list) > 0 {
		s.expiring = nil
		s.carryOut(list)
	}
}

func (w *World) load(s *store, l *leaseLoad) {
	switch {
	case !l.read:
		l.read = true
		d := w.region(int(l.region - w.region(0).ID))
		if err := s.engine.Records(mvcc.RecordLease, d.Span, func(k mvcc.RecordKey, value []byte) bool {
			rec, err := regionpb.DecodeLeaseRecord(bytes.Clone(value))
			if err != nil {
				w.fail("store %d: record %v: %v", s.i, k, err)
			}
			l.list = append(l.list, regionpb.Lease{ID: k.ID, Record: rec})
			return true
		}); err != nil {
			w.fail("store %d: %v", s.i, err)
		}
	case len(l.list) > 0:
		s.leases.Loaded(l.region, l.term, l.list[0].ID, l.list[0].Record, s.leaseTime())
		l.list = l.list[1:]
	default:
		s.leases.LoadedAll(l.region, l.term)
		s.loads = slices.DeleteFunc(s.loads, func(o *leaseLoad) bool { return o == l })
		s.keepAwake(l.region)
	}
}

// carryOut does one thing, or ends leases of one region and term together.
func (s *store) carryOut(list []leasesvc.Action) {
	c, life, first := s.w.check, s.life, list[0]
	over := func(err error) {
		for _, a := range list {
			if s.up && s.life == life && (err != nil || a.Kind == leasesvc.Checkpoint) {
				s.leases.Ended(a, s.leaseTime())
			}
		}
	}
	term := first.Term
	if s.w.mut.anyTerm {
		term = 0
	}
	e := &leaseEnd{term: term, store: s.i, life: s.life, over: over}
	for _, a := range list {
		e.leases = append(e.leases, regionpb.LeaseLeft{ID: a.ID, Grant: a.Grant, Remaining: a.Remaining})
	}
	if first.Kind == leasesvc.Checkpoint {
		if s.w.mut.anyGrant {
			e.leases[0].Grant = 0
		}
		c.leaseCall(regionpb.ManyLeases(regionpb.LeaseCheckpoint, e.leases, term), func(_ *pb.TxnResponse, err error) { over(err) })
		return
	}
	s.w.stats.Expiries += len(list)
	c.endLease(e)
}

// lease is what the checker knows of a lease: of one grant of an id, which several may have in turn.
type lease struct {
	id       int64
	grant    uint64
	ttl      int64
	via      int           // the store that its client is connected to
	acked    bool          // its grant is
	recorded bool          // somebody has applied its record
	begun    time.Duration // when that was, in the onlookers' time
	begin    mvcc.Revision // the last one before its place
	promised time.Duration // it may not end before, in the onlookers' time
	revoking bool          // a client has asked for its end: nothing is promised any more
	gone     bool          // somebody has applied its end
	end      mvcc.Revision // of its end, or the last one before
	took     bool          // the end took a revision
}

// home says that a lease has keys only in its own region, so that one command ends it.
func (l *lease) home() bool { return l.id%3 == 0 }

type leaseState struct {
	all   []*lease         // by grant, from 1
	byID  map[int64]*lease // the one that was granted last
	ends  []*leaseEnd
	looks []leaseLook
	calls int // of commands on leases, unanswered
}

// leaseLook is what a region said of a lease's keys at a revision.
type leaseLook struct {
	id     int64
	region int
	rev    mvcc.Revision
	keys   []string
}

const leasesMax = 8

func (c *checker) liveLease() *lease {
	var live []*lease
	for _, l := range c.leases.all {
		if l.acked && !l.gone {
			live = append(live, l)
		}
	}
	if len(live) == 0 {
		return nil
	}
	return live[c.w.rng.IntN(len(live))]
}

// stepClientsOfLeases grants, renews, looks at and revokes.
func (c *checker) stepClientsOfLeases() {
	w := c.w
	if w.rng.IntN(1000) >= w.aim.leases {
		return
	}
	l := c.liveLease()
	live := 0
	for _, x := range c.leases.all {
		if !x.gone {
			live++
		}
	}
	switch x := w.rng.IntN(20); {
	case l == nil || x < 5 && live < leasesMax:
		if live < leasesMax {
			c.grantLease(c.leaseID())
		}
	case x < 16:
		c.renewLease(l)
	case x < 18:
		c.lookAtLease(l)
	case x < 19 && w.chance(3):
		c.revokeLease(l)
	}
}

// revokeLease ends a lease for a client, which grants it anew at once (L7).
func (c *checker) revokeLease(l *lease) {
	w := c.w
	l.revoking = true
	s := w.stores[w.rng.IntN(len(w.stores))]
	w.stats.Revokes++
	c.endLease(&leaseEnd{leases: []regionpb.LeaseLeft{{ID: l.id}}, client: true, store: s.i, life: s.life, over: func(err error) {
		if err == nil && l.gone && c.leases.byID[l.id] == l && !w.calm {
			c.grantLease(l.id)
		}
	}})
}

// leaseID is one that no lease has: a new one, or that of one that has ended.
func (c *checker) leaseID() int64 {
	if n := len(c.leases.all); n > 0 && c.w.chance(2) {
		if l := c.leases.all[c.w.rng.IntN(n)]; l.recorded && l.gone && c.leases.byID[l.id] == l {
			return l.id
		}
	}
	return int64(len(c.leases.byID) + 1)
}

func (c *checker) grantLease(id int64) {
	l := &lease{id: id, ttl: 2 + int64(c.w.rng.IntN(leaseTTLMax-1)), via: c.w.rng.IntN(len(c.w.stores))}
	if c.leases.byID[id] != nil {
		c.w.stats.Regrants++
	}
	c.leases.all = append(c.leases.all, l)
	l.grant = uint64(len(c.leases.all))
	c.leases.byID[l.id] = l
	c.w.stats.Grants++
	sent := c.maxAcked
	c.leaseCall(&regionpb.LeaseCommand{Op: regionpb.LeaseGrant, ID: l.id, Grant: l.grant, TTL: l.ttl}, func(resp *pb.TxnResponse, err error) {
		var re *regionpb.Error
		switch {
		case err == nil:
			l.acked = true
			if got := mvcc.Revision(resp.GetHeader().GetRevision()); got < sent {
				c.w.fail("I2: the grant of lease %d has revision %d, and %d was acknowledged before it was sent", l.id, got, sent)
			}
			if !l.recorded {
				c.w.fail("I5: the grant of lease %d is acknowledged, and nobody has its record", l.id)
			}
		case errors.Is(err, regionpb.ErrorOf(regionpb.LeaseExists)):
			c.w.fail("L2: lease %d is still there for a grant that was sent after its end", l.id)
		case errors.As(err, &re) && re.NotExecuted():
			l.gone = !l.recorded
		}
	})
}

// renewLease asks the store that the lease's client is connected to, which passes the question on to
// whom it takes for the leader, if that is another store. A client that is not answered goes on for
// a while, and then elsewhere.
func (c *checker) renewLease(l *lease) {
	w := c.w
	home := c.homeOf(l.id)
	s := w.timekeeper(w.stores[l.via], home)
	out, ttl, forget := leasesvc.Elsewhere, int64(0), leasesvc.Action{}
	if s != nil {
		out, ttl, forget = s.leases.Renew(home, l.id, s.leaseTime())
		if s.leases.ConfirmSoon(home, s.leaseTime()) {
			s.confirm(home)
		}
	}
	switch {
	case forget.Kind == leasesvc.Checkpoint:
		c.leaseCall(&regionpb.LeaseCommand{Op: regionpb.LeaseCheckpoint, ID: l.id}, func(*pb.TxnResponse, error) {})
	case out == leasesvc.Renewed:
		w.stats.Renewals++
		w.event("lease %d is renewed by s%d for %d s", l.id, s.i, ttl)
		if newest := l; s.leases.Grant(home, l.id) != l.grant {
			// A deposed leader does not know that a client has ended it, nor what was granted since.
			l = c.leases.all[s.leases.Grant(home, l.id)-1]
			if w.leaseTime() >= newest.begun+leaseExtend {
				w.fail("L6: store %d renews grant %d of lease %d, and %d began %v ago", s.i, l.grant, l.id, newest.grant, w.leaseTime()-newest.begun)
			}
		}
		if l.gone && !l.revoking {
			w.fail("L5: store %d renews lease %d, which has expired", s.i, l.id)
		}
		if ttl != l.ttl {
			w.fail("L5: store %d renews lease %d for %d s, it was granted %d s", s.i, l.id, ttl, l.ttl)
		}
		l.promised = max(l.promised, w.leaseTime()+w.seconds(ttl))
	case w.chance(w.aim.leave):
		l.via = w.rng.IntN(len(w.stores))
	}
}

// believe connects to a store the clients of the leases that it keeps the time of.
func (c *checker) believe(s *store) {
	for _, l := range c.leases.all {
		if !l.gone && s.up && s.leases.Leads(c.homeOf(l.id)) {
			l.via = s.i
		}
	}
}

// timekeeper is the store that one takes for the leader of a region, nil when it does not reach any.
func (w *World) timekeeper(s *store, id pdpb.RegionID) *store {
	if !s.up || s.groups[id] == nil {
		return nil
	}
	leader, here := s.groups[id].replica.Leader()
	if here {
		return s
	}
	for _, o := range w.stores {
		if o.id == leader && o.up && !w.net.blocked[s.i][o.i] && !w.net.blocked[o.i][s.i] {
			return o
		}
	}
	return nil
}

// confirm has a quorum asked whether a region is led here (L6).
func (s *store) confirm(id pdpb.RegionID) {
	if s.confirming[id] {
		return
	}
	s.confirming[id] = true
	life, asked := s.life, s.leaseTime()
	s.groups[id].replica.ConfirmLeader(func(term uint64, err error) {
		if !s.up || s.life != life {
			return
		}
		delete(s.confirming, id)
		if err == nil && term != 0 {
			s.w.stats.Confirms++
			s.leases.Confirmed(id, term, asked)
		}
	})
}

func (c *checker) homeOf(id int64) pdpb.RegionID {
	return c.w.region(c.regionOf(regionpb.LeasePlace(id))).ID
}

func (c *checker) regionOf(key []byte) int {
	return slices.IndexFunc(c.w.boot.Regions, func(d pdpb.Descriptor) bool { return d.Span.Contains(key) })
}

// leaseCall makes a command on a lease to whoever seems to lead. done is called once.
func (c *checker) leaseCall(cmd *regionpb.LeaseCommand, done func(*pb.TxnResponse, error)) {
	c.leaseCallIn(c.homeOf(cmd.ID), &region.Write{Lease: cmd}, done)
}

// leaseCallIn makes a command of a region that need not be the lease's own.
func (c *checker) leaseCallIn(id pdpb.RegionID, wr *region.Write, done func(*pb.TxnResponse, error)) {
	at := c.replicaFor(id)
	if at == nil {
		done(nil, regionpb.ErrorOf(regionpb.NotLeader))
		return
	}
	call := &txnCall{store: at.i}
	over := false
	end := func(resp *pb.TxnResponse, err error) {
		if over {
			return // it crashed first
		}
		over = true
		c.leases.calls--
		c.calledBack(call)
		done(resp, err)
	}
	call.fail = func(err error) { end(nil, err) }
	c.txns.calls = append(c.txns.calls, call)
	c.leases.calls++
	wr.Reply = end
	at.groups[id].replica.Write(wr)
}

// attach registers a region for a lease, as package router does between two attempts (L3, L4).
// done is called once.
func (c *checker) attach(i int, lease int64, done func(error)) {
	d := c.w.region(i)
	cmd := &regionpb.LeaseCommand{Op: regionpb.LeaseAttach, ID: lease, Span: mvcc.Key(key(i * keysPerRegion))}
	c.leaseCallIn(d.ID, &region.Write{Lease: cmd}, func(_ *pb.TxnResponse, err error) {
		var nr *regionpb.Error
		if !errors.As(err, &nr) || nr.Code != regionpb.LeaseNotRegistered {
			done(err)
			return
		}
		c.w.stats.Registrations++
		c.leaseCall(&regionpb.LeaseCommand{Op: regionpb.LeaseRegister, ID: lease, Span: d.Span}, func(_ *pb.TxnResponse, err error) {
			if err != nil {
				done(err)
				return
			}
			c.leaseCallIn(d.ID, &region.Write{Lease: cmd, Tokens: []regionpb.LeaseToken{nr.Token}}, func(_ *pb.TxnResponse, err error) { done(err) })
		})
	})
}

// register has the region of a refused op added to the record of the lease, as package router does,
// and sends the op again with the token (L1, L3).
func (c *checker) register(id pdpb.RegionID, o *op, t regionpb.LeaseToken) {
	c.w.stats.Registrations++
	d := c.w.region(int(id - c.w.region(0).ID))
	c.leaseCall(&regionpb.LeaseCommand{Op: regionpb.LeaseRegister, ID: t.Lease, Span: d.Span}, func(_ *pb.TxnResponse, err error) {
		if !slices.Contains(c.open, o) {
			return // its store has crashed
		}
		at := c.replicaFor(id)
		if err == nil && at == nil {
			err = regionpb.ErrorOf(regionpb.NotLeader)
		}
		if err != nil {
			// What failed is the registration; the op itself was not executed.
			c.answer(id, o, nil, regionpb.ErrorOf(regionpb.NotLeader))
			return
		}
		o.store = at.i
		o.tokens = append(slices.DeleteFunc(o.tokens, func(x regionpb.LeaseToken) bool { return x.Lease == t.Lease }), t)
		at.groups[id].replica.Write(&region.Write{Txn: o.txn, Tokens: slices.Clone(o.tokens), Reply: func(resp *pb.TxnResponse, err error) { c.answer(id, o, resp, err) }})
	})
}

// lookAtLease reads a lease's keys, region by region, as TimeToLive does.
func (c *checker) lookAtLease(l *lease) {
	w := c.w
	s := w.stores[w.rng.IntN(len(w.stores))]
	if !s.up {
		return
	}
	s.oracle.ReadPointFunc(func(p pdpb.ReadPoint, err error) {
		if err != nil {
			return
		}
		for i := range w.cfg.Regions {
			g := c.readable(w.stores[w.rng.IntN(len(w.stores))], i)
			if g == nil {
				continue
			}
			resp, err := g.replica.TryRead(&regionpb.ReadRequest{Region: g.id, Epoch: 1, Cut: p.Cut, Rev: p.Rev, Span: w.region(i).Span, Lease: l.id})
			var re *regionpb.Error
			if errors.As(err, &re) && (re.Code == regionpb.NotComplete || re.Code == regionpb.Compacted) {
				continue
			}
			if err != nil {
				w.fail("keys of lease %d at store %d: %v", l.id, g.s.i, err)
				return
			}
			look := leaseLook{id: l.id, region: i, rev: p.Rev}
			for _, x := range resp.KVs {
				look.keys = append(look.keys, string(x.Key))
			}
			w.stats.Looks++
			c.leases.looks = append(c.leases.looks, look)
		}
	})
}

// leaseRecorded is told of each change of a lease's record once, at its place: rev is the last
// revision given out, and took says that it is the change's own.
func (c *checker) leaseRecorded(list []regionpb.RecordEffect, rev mvcc.Revision, took bool) {
	for i := range list {
		l := c.leases.byID[list[i].Key.ID]
		if list[i].Key.Kind != mvcc.RecordLease || l == nil {
			continue
		}
		if len(list[i].Value) > 0 {
			rec, err := regionpb.DecodeLeaseRecord(list[i].Value)
			if err != nil {
				c.w.fail("record of lease %d: %v", l.id, err)
				return
			}
			if rec.Grant != l.grant {
				c.w.fail("L7: lease %d has the record of grant %d, and %d was sent after its end", l.id, rec.Grant, l.grant)
			}
		}
		switch {
		case len(list[i].Value) > 0 && l.gone:
			c.w.fail("L2: lease %d has a record again after revision %d", l.id, rev)
		case len(list[i].Value) > 0 && !l.recorded:
			l.recorded, l.begun, l.begin = true, c.w.leaseTime(), rev
			l.promised = l.begun + c.w.seconds(l.ttl)
			// An end that a client has asked for before may be of this one.
			l.revoking = l.revoking || slices.ContainsFunc(c.leases.ends, func(e *leaseEnd) bool { return e.client && slices.Contains(e.ids, l.id) })
		case len(list[i].Value) == 0 && (!l.recorded || l.gone):
			c.w.fail("L7: an end of lease %d, which is not there, at %d", l.id, rev)
		case len(list[i].Value) == 0:
			c.w.event("lease %d is gone at %d", l.id, rev)
			c.w.stats.LeaseEnds++
			if left := l.promised - c.w.leaseTime(); left > 0 && !l.revoking {
				c.w.fail("L5: lease %d ends %v before the time that was promised", l.id, left)
			}
			l.gone, l.end, l.took = true, rev, took
		}
	}
}

// attachedAt are the keys attached to a lease after a revision, in order.
func (h history) attachedAt(id int64, regions []int, rev mvcc.Revision) (keys []string) {
	for _, i := range regions {
		for k := i * keysPerRegion; k < (i+1)*keysPerRegion; k++ {
			if v := h.at(key(k), rev); v.version > 0 && v.lease == id {
				keys = append(keys, string(key(k)))
			}
		}
	}
	return keys
}

// checkLeases holds the ends of leases and what was said of their keys against the history.
func (c *checker) checkLeases(h history) error {
	var regions []int
	for i := range c.w.cfg.Regions {
		regions = append(regions, i)
	}
	together := map[mvcc.Revision][]*lease{} // that end at a revision of their own
	for _, l := range c.leases.all {
		if !l.gone || !l.recorded {
			continue
		}
		if left := h.attachedAt(l.id, regions, l.end); len(left) > 0 {
			return fmt.Errorf("L2: lease %d ends at revision %d, and %v are attached to it", l.id, l.end, left)
		}
		if l.took {
			together[l.end] = append(together[l.end], l)
		}
	}
	for k, vs := range h {
		for _, v := range vs {
			if id := v.kv.lease; id != 0 && !slices.ContainsFunc(c.leases.all, func(l *lease) bool {
				return l.id == id && l.recorded && v.rev > l.begin && (!l.gone || v.rev <= l.end)
			}) {
				return fmt.Errorf("L2: %s is attached to lease %d at revision %d, when there is none", k, id, v.rev)
			}
		}
	}
	for rev, list := range together {
		var want, got []string
		for _, l := range list {
			want = append(want, h.attachedAt(l.id, regions, rev-1)...)
		}
		slices.Sort(want)
		for _, f := range c.effects[rev] {
			if !f.Delete {
				return fmt.Errorf("L2: the end of lease %d puts %s", list[0].id, f.Key)
			}
			got = append(got, string(f.Key))
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("L2: the end of %d leases at revision %d, %d is one, deletes %v, attached were %v", len(list), rev, list[0].id, got, want)
		}
	}
	for _, x := range c.leases.looks {
		if want := h.attachedAt(x.id, []int{x.region}, x.rev); !slices.Equal(x.keys, want) {
			return fmt.Errorf("I4: region %d said that lease %d has %v at revision %d, it had %v", x.region, x.id, x.keys, x.rev, want)
		}
	}
	return nil
}

// restLeases says what is left of leases in a healed cluster, "" for nothing: nobody renews, so all
// must end by themselves.
func (c *checker) restLeases() string {
	if n := c.leases.calls + len(c.leases.ends); n > 0 {
		return fmt.Sprintf("%d commands on leases and %d ends are under way", c.leases.calls, len(c.leases.ends))
	}
	for _, l := range c.leases.all {
		if l.recorded && !l.gone {
			return fmt.Sprintf("lease %d is still there", l.id)
		}
	}
	for _, s := range c.w.stores {
		if n := s.leases.Total(); n > 0 || len(s.loads) > 0 {
			return fmt.Sprintf("store %d keeps the time of %d leases", s.i, n)
		}
	}
	return ""
}
