package order

import (
	"slices"
	"time"

	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// Frame takes a frame, moves the regions' states to its mark, and returns the items to deliver, in
// order, before the next frame is taken. A state so names items that are on their way to the
// replica, which is complete only once it has applied them (S2). The other way round, items before
// the mark, a replica applies and answers a write of which its own store does not know yet, and
// who reads there at the newest mark does not find what was acknowledged.
//
// ok is false for a frame that is not the stream's next: those of other sessions are ignored; a
// hole ends the session, and so does a frame of another life of the member, which has forgotten
// the subscriptions.
func (c *ClientCore) Frame(from raftid.StoreID, f *Frame) (items []pdpb.Item, ok bool) {
	defer c.step()
	if from != c.stream.member || f.Session != c.stream.session {
		if f.Session < c.stream.session && from != c.stream.member && len(c.closing) < 16 {
			c.closing = append(c.closing, Request{To: from, Method: MethodSubscribe, Subscribe: &Subscribe{Session: f.Session, Close: true}})
		}
		return nil, false
	}
	if c.stream.seq == 0 {
		c.stream.life = f.Life
	}
	if f.Seq != c.stream.seq+1 || f.Life != c.stream.life || f.Mark.Cut < c.stream.mark.Cut {
		c.openStream(c.stream.member)
		return nil, false
	}
	c.stream.seq++
	c.settle(f)
	return f.Items, true
}

// settle moves the states to a frame's mark.
func (c *ClientCore) settle(f *Frame) {
	c.stream.frames, c.stream.heard = true, c.now
	if f.Role.Leader != 0 {
		c.stream.lastLive = c.now
	}
	for _, a := range f.Acks {
		s := c.subs[a.Region]
		if s == nil {
			continue
		}
		if !s.acked {
			s.acked = true
			c.unacked--
		}
		s.newest = max(s.newest, a.Newest)
		s.seenUpto = max(s.seenUpto, a.Upto)
		c.suspect(s)
	}
	for i := range f.Items {
		it := &f.Items[i]
		s := c.subs[it.Region]
		if s == nil {
			continue
		}
		s.seenUpto = max(s.seenUpto, it.Upto)
		if !s.acked {
			continue
		}
		if it.N > s.newest+1 {
			// The member skipped an item after the acknowledgement. It must not; a new session
			// gets a new acknowledgement.
			c.openStream(c.stream.member)
			return
		}
		s.newest = max(s.newest, it.N)
		c.suspect(s)
	}
	if f.Mark.Cut > c.stream.mark.Cut {
		c.wantSince = c.now
	}
	c.stream.mark = f.Mark
	if f.Mark.Cut >= c.newest.Cut {
		c.newest = f.Mark
	}
	c.dirVersion = max(c.dirVersion, f.Dir)
	c.learn(f.Role)
	c.turn()
}

// HaveDirectory tells which version of the directory is here.
func (c *ClientCore) HaveDirectory(version uint64) { c.dirHave = max(c.dirHave, version) }

// WantMark tells that somebody waits for a mark at or above cut (S4).
func (c *ClientCore) WantMark(cut pdpb.Cut) {
	if cut <= c.stream.mark.Cut {
		return
	}
	if c.want <= c.stream.mark.Cut {
		c.wantSince = c.now
	}
	c.want = max(c.want, cut)
	c.step()
}

// WantRead tells that callers wait for a read point, or that none does any more. One request is in
// flight; who comes meanwhile waits for the next (S1).
func (c *ClientCore) WantRead(waiting bool) {
	c.readsWaiting = waiting
	c.step()
}

// Propose sends an event to the leader until it is answered; the token comes back in Done.
func (c *ClientCore) Propose(e Event, token uint64) bool {
	const eventsMax = 1024
	if len(c.events) >= eventsMax {
		return false
	}
	c.events = append(c.events, &clientEvent{event: e, token: token})
	c.step()
	return true
}

// Forget drops an event whose caller went away. It may still be executed.
func (c *ClientCore) Forget(token uint64) {
	c.events = slices.DeleteFunc(c.events, func(e *clientEvent) bool { return e.token == token })
}

// Done is the end of a request: an answer, or err when none came. It returns whose request it
// was: the token of an event that is finished now (its answer counts), or that the read in flight
// ended.
func (c *ClientCore) Done(id uint64, r *Reply, err error) (token uint64, read bool) {
	defer c.step()
	before := c.role
	if r != nil {
		c.learn(r.Role)
		if err == nil {
			err = r.Err
		}
	}
	failed, news := err != nil, c.role != before
	defer c.turn() // the others in flight; this one has its answer
	end := func(l *lane) bool {
		if l.id != id || id == 0 {
			return false
		}
		*l = lane{}
		if failed && !news {
			l.retryAt = c.now + c.opts.RetryAfter
		}
		return true
	}
	switch {
	case end(&c.reads):
		c.leaderAnswered(r)
		return 0, true
	case end(&c.reports):
		c.leaderAnswered(r)
		if failed {
			c.unsent()
		}
	case end(&c.subReqs):
	case end(&c.marks):
		if failed {
			c.asked = 0
		}
	case end(&c.dirReqs):
		if r != nil && r.Directory != nil {
			c.dirHave = max(c.dirHave, r.Directory.Version)
		}
		if c.dirHave < c.dirVersion {
			c.dirReqs.retryAt = c.now + c.opts.RetryAfter
		}
	default:
		for i, e := range c.events {
			if end(&e.lane) {
				c.leaderAnswered(r)
				if failed && repeatable(&e.event, r) {
					return 0, false
				}
				c.events = slices.Delete(c.events, i, i+1)
				return e.token, false
			}
		}
	}
	return 0, false
}

// repeatable says whether an event that failed may be sent again: because it was certainly not
// executed, or because executing it twice does no harm.
func repeatable(e *Event, r *Reply) bool {
	if r != nil {
		if _, ok := r.Err.(*NotLeaderError); ok {
			return true
		}
		if r.Err == ErrOverloaded || r.Err == ErrInvalid || r.Err == ErrClosed {
			return false
		}
	}
	return e.Kind == EventAllocIDs || e.Kind == EventRegisterStore || e.Kind == EventRaiseFence ||
		e.Kind == EventAbort
}

func (c *ClientCore) leaderAnswered(r *Reply) {
	if r == nil {
		c.leaderFails++
	} else {
		c.leaderFails = 0
	}
}

// Tick brings the time.
func (c *ClientCore) Tick(now time.Duration) {
	c.now = max(c.now, now)
	for _, l := range []*lane{&c.reads, &c.reports, &c.marks, &c.subReqs, &c.dirReqs} {
		c.expire(l)
	}
	c.events = slices.DeleteFunc(c.events, func(e *clientEvent) bool {
		was := e.lane.id
		c.expire(&e.lane)
		gone := was != 0 && e.lane.id == 0 && !repeatable(&e.event, nil)
		if gone {
			c.out.Expired = append(c.out.Expired, e.token)
		}
		return gone
	})
	c.tickReports()
	c.tickStream()
	c.pulling = false
	c.step()
}

// expire fails a request whose answer does not come; should it come later, nobody knows its id.
func (c *ClientCore) expire(l *lane) {
	if l.id == 0 || c.now-l.since < c.opts.CallTimeout {
		return
	}
	if l != &c.marks && l != &c.subReqs && l != &c.dirReqs {
		c.leaderAnswered(nil)
	}
	if l == &c.reports {
		c.unsent()
	}
	*l = lane{}
	if l == &c.marks {
		c.asked = 0
	}
}

// unsent takes back what the reports in flight said: nobody may have heard it. Up-to would be
// repeated anyway until it is seen in an item; of seals there is no other sign (P4).
func (c *ClientCore) unsent() {
	for _, s := range c.reporting {
		if s.id != 0 {
			s.sentUpto, s.sentSealed = 0, 0
			c.markDirty(s)
		}
	}
}

// tickReports repeats reports that were not seen in an item, and lets followers speak.
func (c *ClientCore) tickReports() {
	keep := c.watched[:0]
	for _, s := range c.watched {
		if s.id == 0 {
			continue
		}
		if s.due != 0 && c.now >= s.due {
			s.due = 0
			c.markDirty(s)
		}
		unseen := s.sentUpto > s.seenUpto
		if unseen && c.now-s.sentAt >= c.opts.ResendAfter {
			s.sentAt = c.now
			c.markDirty(s)
		}
		s.isWatched = s.due != 0 || unseen
		if s.isWatched {
			keep = append(keep, s)
		}
	}
	clear(c.watched[len(keep):])
	c.watched = keep
}

// tickStream repeats what the stream lost and leaves a member that stands still (S5).
func (c *ClientCore) tickStream() {
	st := &c.stream
	if st.member == 0 {
		return
	}
	live := max(st.lastLive, st.opened)
	stuck := c.want > st.mark.Cut && c.now-c.wantSince > c.opts.StandstillAfter && c.now-st.opened > c.opts.StandstillAfter
	if c.now-live > c.opts.StandstillAfter || stuck {
		next := c.anotherMember(st.member)
		if next == 0 && c.now-max(st.heard, st.opened) > c.opts.StandstillAfter {
			next = st.member // the only one; it was restarted and has forgotten the stream
		}
		if next != 0 {
			c.wantSince = c.now
			c.openStream(next)
			return
		}
	}
	if (c.unacked > 0 || !st.frames) && c.now-c.subsSent >= c.opts.SubscribeRetry && c.subReqs.id == 0 {
		c.needSub = c.needSub[:0]
		for id, s := range c.subs {
			if !s.acked {
				c.needSub = append(c.needSub, id)
			}
		}
		slices.Sort(c.needSub)
		c.subsSent = 0
		c.subReqs.retryAt = 0
		st.reopen = true
	}
	if c.want > st.mark.Cut {
		c.asked = 0
	}
}

// anotherMember returns the next member in turn that is none of these; zero when there is none.
func (c *ClientCore) anotherMember(than ...raftid.StoreID) raftid.StoreID {
	n := len(c.opts.Members)
	for range n {
		m := c.opts.Members[c.nextMember%n]
		c.nextMember++
		if !slices.Contains(than, m) {
			return m
		}
	}
	return 0
}

// toLeader addresses a request to the leader: directly, through another member when it cannot be
// reached, and to any member when it is not known.
func (c *ClientCore) toLeader(m Method) (Request, bool) {
	to, via := c.role.Leader, raftid.StoreID(0)
	if to == 0 {
		if to = c.anotherMember(c.opts.Self); to == 0 {
			return Request{}, false
		}
	} else if to != c.opts.Self && c.leaderFails >= 2 && c.leaderFails%4 != 3 {
		via = c.anotherMember(to, c.opts.Self)
	}
	c.id++
	return Request{ID: c.id, To: to, Via: via, Method: m}, true
}

func (c *ClientCore) open(l *lane) bool { return l.id == 0 && c.now >= l.retryAt }

// step emits what can be done now.
func (c *ClientCore) step() {
	if c.readsWaiting && c.open(&c.reads) {
		if req, ok := c.toLeader(MethodReadPoint); ok {
			c.reads = lane{id: req.ID, leader: req.To, since: c.now}
			c.out.Requests = append(c.out.Requests, req)
		}
	}
	for _, e := range c.events {
		if c.open(&e.lane) {
			if req, ok := c.toLeader(MethodPropose); ok {
				e.lane = lane{id: req.ID, leader: req.To, since: c.now}
				ev := e.event
				req.Event = &ev
				c.out.Requests = append(c.out.Requests, req)
			}
		}
	}
	if len(c.dirty) > 0 {
		switch {
		case c.role.Leading:
			if !c.pulling {
				c.pulling = true
				c.out.PullLocal = true
			}
		case c.open(&c.reports):
			c.out.SendReports = true
		}
	}
	c.stepStream()
}

func (c *ClientCore) stepStream() {
	st := &c.stream
	for _, r := range c.closing {
		c.emit(nil, r)
	}
	c.closing = c.closing[:0]
	if st.member == 0 {
		return
	}
	if (len(c.needSub) > 0 || len(c.drop) > 0 || st.reopen) && c.open(&c.subReqs) {
		req := &Subscribe{Session: st.session, Remove: c.drop}
		c.drop = nil
		n := min(len(c.needSub), c.opts.BatchMax)
		for _, id := range c.needSub[:n] {
			s := c.subs[id]
			if s == nil || s.acked && !s.refetch {
				continue
			}
			have := s.oldNewest
			if s.refetch {
				have = min(have, s.have)
				if s.acked {
					have = s.have
				}
				s.refetch = false
			}
			req.Add = append(req.Add, Subscription{Region: id, Have: have})
		}
		// Unsubscribing goes first in a request, so a region that came back is in Add.
		c.needSub = c.needSub[:copy(c.needSub, c.needSub[n:])]
		st.reopen = false
		c.subsSent = c.now
		c.emit(&c.subReqs, Request{To: st.member, Method: MethodSubscribe, Subscribe: req})
	}
	if st.member == c.opts.Self {
		return // the member in process sends every mark and the directory by itself
	}
	if c.want > st.mark.Cut && c.want > c.asked && c.open(&c.marks) {
		c.asked = c.want
		c.emit(&c.marks, Request{To: st.member, Method: MethodMark, Session: st.session, Cut: c.want})
	}
	if c.dirVersion > c.dirHave && c.open(&c.dirReqs) {
		c.emit(&c.dirReqs, Request{To: st.member, Method: MethodDirectory})
	}
}

func (c *ClientCore) emit(l *lane, r Request) {
	c.id++
	r.ID = c.id
	if l != nil {
		*l = lane{id: r.ID, since: c.now}
	}
	c.out.Requests = append(c.out.Requests, r)
}
