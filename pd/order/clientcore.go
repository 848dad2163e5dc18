package order

import (
	"maps"
	"slices"
	"time"

	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// ClientOptions configure a ClientCore; zero durations and limits mean the default. Times are
// measured by the clock that Tick brings, so their resolution is the tick's.
type ClientOptions struct {
	Self    raftid.StoreID
	Members []raftid.StoreID // stores with a member of pd; Self among them has it in process
	Session uint64           // larger than any session of an earlier life of this store

	CallTimeout     time.Duration // 2 s: an unanswered request counts as failed
	RetryAfter      time.Duration // 50 ms: between attempts without news about the leader
	ResendAfter     time.Duration // 1 s: a report whose item was not seen is repeated
	FollowerDelay   time.Duration // 250 ms: a follower reports what was not seen for once to twice that
	SubscribeRetry  time.Duration // 1 s: a subscription without acknowledgement is repeated
	StandstillAfter time.Duration // 2 s: a silent stream is taken from another member (S5)

	BatchMax int // regions in one request, 8,192; the rest goes into the next

	Mutants Mutants
}

func (o *ClientOptions) setDefaults() {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&o.CallTimeout, 2*time.Second)
	def(&o.RetryAfter, 50*time.Millisecond)
	def(&o.ResendAfter, time.Second)
	def(&o.FollowerDelay, 250*time.Millisecond)
	def(&o.SubscribeRetry, time.Second)
	def(&o.StandstillAfter, 2*time.Second)
	if o.BatchMax == 0 {
		o.BatchMax = 8192
	}
}

// Request is one message to a pd member. To may be this store itself.
type Request struct {
	ID        uint64
	To        raftid.StoreID
	Via       raftid.StoreID // forwarded by this member; zero: directly
	Method    Method
	Subscribe *Subscribe // MethodSubscribe
	Session   uint64     // MethodMark
	Cut       pdpb.Cut   // MethodMark
	Event     *Event     // MethodPropose
}

// Output is what a ClientCore wants done.
type Output struct {
	Requests []Request
	// PullLocal: reports wait, and the leader is this store's own member: it should pull.
	PullLocal bool
	// SendReports: reports wait for a remote leader: build them and send.
	SendReports bool
	// Expired are the tokens of events that were sent, not answered, and must not be repeated.
	Expired []uint64
}

// ClientCore decides for one store: which member's stream it follows, what it subscribes to,
// which reports are sent when and to whom, and what is repeated. It is pure; its owner calls it
// under one lock, executes Take after each input, and ticks it with the time.
type ClientCore struct {
	opts ClientOptions
	now  time.Duration
	id   uint64 // of the last request

	role        Role // newest known of pd's leadership; Leading means: here
	leaderFails int  // requests to the leader that failed in a row
	nextMember  int  // round robin, for when nobody is known

	subs    map[pdpb.RegionID]*sub
	stream  stream
	reads   lane // of each kind of request one is in flight
	reports lane
	marks   lane
	subReqs lane
	dirReqs lane

	readsWaiting bool
	dirty        []*sub // to be reported now
	watched      []*sub // reported and not seen, or to be reported after a delay
	reporting    []*sub // in the request in flight
	pulling      bool   // the local member was asked to pull
	suspects     []*sub // were sent items and not asked since whether they have them

	needSub  []pdpb.RegionID            // to be subscribed
	drop     []pdpb.RegionID            // to be unsubscribed
	left     map[pdpb.RegionID]struct{} // unsubscribed in this session
	closing  []Request                  // streams elsewhere that still talk to us
	unacked  int
	subsSent time.Duration

	want, asked pdpb.Cut      // a mark somebody waits for; what we asked for
	wantSince   time.Duration // when the wait for progress began
	newest      pdpb.Mark     // the highest mark ever seen
	dirVersion  uint64        // announced by the stream
	dirHave     uint64

	events []*clientEvent
	out    Output
}

// lane is a kind of request of which one is in flight.
type lane struct {
	id      uint64         // zero: none
	leader  raftid.StoreID // whom it is meant for, if that is pd's leader
	since   time.Duration
	retryAt time.Duration
}

// stream is the member whose frames we follow.
type stream struct {
	member   raftid.StoreID
	session  uint64
	seq      uint64
	life     uint64 // of the member, as its first frame said
	opened   time.Duration
	lastLive time.Duration // last frame of a member that knows a leader
	heard    time.Duration // last frame of this session
	mark     pdpb.Mark
	frames   bool // at least one came
	reopen   bool // a Subscribe is due even without regions: it opens the session
}

// sub is a region with a replica here.
type sub struct {
	id    pdpb.RegionID
	acked bool // in the stream's session (S2)
	// newest is the stream's newest item at its mark; meaningful when acked.
	newest uint64
	// What an earlier session had settled stays true: through oldMark, the newest item was
	// oldNewest. It counts until the present session has got as far.
	oldMark   pdpb.Mark
	oldNewest uint64
	settled   bool // oldMark and oldNewest mean something

	refetch   bool   // its replica lacks items above have that were delivered
	have      uint64 // meaningful with refetch
	suspected bool   // in suspects
	lacked    uint64 // what its replica wanted when it was asked last

	seenUpto uint64 // highest up-to of an item (or acknowledgement) seen

	leading    bool
	isDirty    bool
	isWatched  bool
	due        time.Duration // a follower's turn; zero: none
	lagUpto    uint64        // what a follower could have said at its last turn; zero: nothing
	sentUpto   uint64
	sentSealed uint64
	sentAt     time.Duration
}

type clientEvent struct {
	lane
	event Event
	token uint64
}

// NewClientCore returns a client that follows its own member, or the first one.
func NewClientCore(o ClientOptions) *ClientCore {
	o.setDefaults()
	c := &ClientCore{opts: o, id: o.Session, subs: map[pdpb.RegionID]*sub{}, left: map[pdpb.RegionID]struct{}{}, newest: pdpb.Mark{Rev: FirstRevision, Floor: NoFloor}}
	c.stream.session = o.Session
	c.SetMembers(o.Members)
	return c
}

// SetMembers replaces the list of pd's members.
func (c *ClientCore) SetMembers(members []raftid.StoreID) {
	c.opts.Members = slices.Clone(members)
	if c.stream.member == 0 || !slices.Contains(members, c.stream.member) {
		switch {
		case slices.Contains(members, c.opts.Self):
			c.openStream(c.opts.Self)
		case len(members) > 0:
			c.openStream(members[int(uint64(c.opts.Self)%uint64(len(members)))])
		}
	}
	c.step()
}

// Take returns what is to be done and forgets it.
func (c *ClientCore) Take() Output {
	o := c.out
	c.out = Output{}
	return o
}

// Register makes the store follow a region whose replica has the items through have. Registering
// again begins anew.
func (c *ClientCore) Register(id pdpb.RegionID, have uint64) {
	c.Unregister(id)
	c.subs[id] = &sub{id: id, oldNewest: have}
	c.unacked++
	if _, ok := c.left[id]; ok {
		// An acknowledgement of the subscription before may still be on its way and would be
		// taken for this one's. In a new session it cannot be.
		c.openStream(c.stream.member)
	} else {
		c.needSub = append(c.needSub, id)
	}
	c.step()
}

// Unregister forgets a region.
func (c *ClientCore) Unregister(id pdpb.RegionID) {
	s := c.subs[id]
	if s == nil {
		return
	}
	if !s.acked {
		c.unacked--
	}
	delete(c.subs, id)
	c.drop = append(c.drop, id)
	c.left[id] = struct{}{}
	s.id = 0 // lists may still hold it
	c.step()
}

// Refetch asks for the items of a region above have once more: its replica had no room for them.
func (c *ClientCore) Refetch(id pdpb.RegionID, have uint64) {
	s := c.subs[id]
	if s == nil || !s.acked || have >= s.newest {
		return
	}
	s.refetch, s.have = true, have
	c.needSub = append(c.needSub, id)
	c.step()
}

// State is a region's place in the stream, as region.Order wants it: everything through mark was
// delivered, the newest item of the region up to there is newest. ok is false until the region is
// acknowledged for the first time (S2); later sessions only keep the mark from moving.
func (c *ClientCore) State(id pdpb.RegionID) (mark pdpb.Mark, newest uint64, ok bool) {
	s := c.subs[id]
	if s == nil {
		return pdpb.Mark{}, 0, false
	}
	if c.opts.Mutants.PerStoreMark {
		return c.stream.mark, max(s.newest, s.oldNewest), c.stream.frames
	}
	if s.acked && (!s.settled || c.stream.mark.Cut >= s.oldMark.Cut) {
		return c.stream.mark, max(s.newest, s.oldNewest), true
	}
	return s.oldMark, s.oldNewest, s.settled
}

// Newest is the highest mark any stream has brought.
func (c *ClientCore) Newest() pdpb.Mark { return c.newest }

// Role is what is known of pd's leadership.
func (c *ClientCore) Role() Role { return c.role }

// StandsStillSince says since when no member that knows a leader was heard; ok is false while the
// stream is alive (S5).
func (c *ClientCore) StandsStillSince() (time.Duration, bool) {
	live := max(c.stream.lastLive, 0)
	return live, c.now-live > c.opts.StandstillAfter
}

// Down tells that a store fell silent or is another process now: a stream from it is gone, and is
// opened anew at once, elsewhere if there is a choice.
func (c *ClientCore) Down(store raftid.StoreID) {
	if c.stream.member != store || store == c.opts.Self {
		return
	}
	next := c.anotherMember(store)
	if next == 0 {
		next = store
	}
	c.openStream(next)
	c.step()
}

// openStream follows a member from now on. What the old session settled is kept.
func (c *ClientCore) openStream(member raftid.StoreID) {
	if old := c.stream.member; old != 0 && old != member {
		c.closing = append(c.closing, Request{To: old, Method: MethodSubscribe, Subscribe: &Subscribe{Session: c.stream.session, Close: true}})
	}
	for _, s := range c.subs {
		if s.acked {
			if !s.settled || c.stream.mark.Cut >= s.oldMark.Cut {
				s.oldMark, s.oldNewest, s.settled = c.stream.mark, max(s.newest, s.oldNewest), true
			}
			s.acked, s.newest = false, 0
		}
	}
	c.unacked = len(c.subs)
	c.needSub = slices.Sorted(maps.Keys(c.subs))
	c.drop = nil
	clear(c.left)
	c.subReqs = lane{}
	c.marks = lane{}
	c.asked = 0
	c.stream = stream{member: member, session: c.stream.session + 1, opened: c.now, lastLive: c.stream.lastLive, reopen: true}
	c.dirVersion = 0
	c.subsSent = c.now
}

// SetRole tells what the member in process knows of pd's leadership; older terms are ignored. When
// the leader is a new one, everything is reported again: the old one may have died with the reports
// (P4). Such a member hears the leader, so a store that has left it for another's stream comes back:
// the other may be the one that fell silent, and here no network can fail.
func (c *ClientCore) SetRole(r Role) {
	before := c.role
	c.learn(r)
	if c.role != before && c.role.Leader != 0 && c.stream.member != c.opts.Self && slices.Contains(c.opts.Members, c.opts.Self) {
		c.openStream(c.opts.Self)
	}
	c.turn()
	c.step()
}

// turn gives up what is in flight to another store than pd's leader and may be asked twice. A leader
// that was stopped or cut off answers nothing, and whoever shares the request would wait for its
// timeout while the next leader is there.
func (c *ClientCore) turn() {
	past := func(l *lane) bool { return l.id != 0 && c.role.Leader != 0 && l.leader != c.role.Leader }
	if past(&c.reads) {
		c.reads = lane{}
	}
	if past(&c.reports) {
		c.reports = lane{}
		c.unsent()
	}
	for _, e := range c.events {
		if past(&e.lane) && repeatable(&e.event, nil) {
			e.lane = lane{}
		}
	}
}

func (c *ClientCore) learn(r Role) {
	r.Leading = r.Leader != 0 && r.Leader == c.opts.Self
	if r.Term < c.role.Term || r == c.role {
		return
	}
	// A term has one leader. That somebody does not know it is no news, unless it was this store
	// itself: then it stepped down.
	if r.Term == c.role.Term && c.role.Leader != 0 && !(r.Leader == 0 && c.role.Leading) {
		return
	}
	news := r.Leader != 0 && (r.Leader != c.role.Leader || r.Term != c.role.Term)
	c.role = r
	if news {
		c.leaderFails = 0
		c.reads.retryAt, c.reports.retryAt = 0, 0
		for _, e := range c.events {
			e.retryAt = 0
		}
		c.pulling = false
		for _, id := range slices.Sorted(maps.Keys(c.subs)) {
			s := c.subs[id]
			s.sentUpto, s.sentSealed = 0, 0
			if s.leading {
				c.markDirty(s)
			} else {
				c.later(s)
			}
		}
	}
}

// Changed tells that a region's report changed; leading says whether its replica here leads.
// A leader's report goes out at once, a follower's only if nobody else's was seen in time (P4).
func (c *ClientCore) Changed(id pdpb.RegionID, leading bool) {
	s := c.subs[id]
	if s == nil {
		return
	}
	s.leading = leading
	if leading {
		s.due = 0
		c.markDirty(s)
	} else {
		c.later(s)
	}
	c.step()
}

func (c *ClientCore) markDirty(s *sub) {
	if !s.isDirty {
		s.isDirty = true
		c.dirty = append(c.dirty, s)
	}
}

func (c *ClientCore) later(s *sub) {
	if s.due == 0 {
		s.due = c.now + c.opts.FollowerDelay
	}
	c.watch(s)
}

func (c *ClientCore) watch(s *sub) {
	if !s.isWatched {
		s.isWatched = true
		c.watched = append(c.watched, s)
	}
}

// Reporting returns the regions whose reports are to be built now, and takes them off the list.
// The caller builds them, keeps those that Wants says yes to, and calls Reported.
func (c *ClientCore) Reporting(into []pdpb.RegionID) []pdpb.RegionID {
	n := min(len(c.dirty), c.opts.BatchMax)
	for _, s := range c.dirty[:n] {
		s.isDirty = false
		if s.id != 0 {
			into = append(into, s.id)
		}
	}
	c.dirty = c.dirty[:copy(c.dirty, c.dirty[n:])]
	return into
}

// Wants says whether a report is to be sent. A follower's is only when what it said a delay ago
// was still not seen: as long as somebody else reports, followers keep quiet.
func (c *ClientCore) Wants(r *pdpb.Report) bool {
	s := c.subs[r.Region]
	switch {
	case s == nil:
		return false
	case s.leading:
		return r.Upto > s.seenUpto || r.Sealed > s.sentSealed
	case r.Upto <= s.seenUpto:
		s.lagUpto = 0
		return false
	case s.lagUpto > s.seenUpto:
		return true
	}
	s.lagUpto = r.Upto
	c.later(s)
	return false
}

// Pulled tells that these reports went to this store's own member.
func (c *ClientCore) Pulled(reports []pdpb.Report) {
	c.pulling = false
	for i := range reports {
		c.sent(&reports[i])
	}
	c.step()
}

// Reported tells that these reports are about to be sent to the leader; false when there is
// nothing to send or nobody to send to.
func (c *ClientCore) Reported(reports []pdpb.Report) (Request, bool) {
	if len(reports) == 0 || c.reports.id != 0 {
		return Request{}, false
	}
	req, ok := c.toLeader(MethodReports)
	if !ok {
		for i := range reports {
			c.markDirty(c.subs[reports[i].Region])
		}
		return Request{}, false
	}
	c.reports = lane{id: req.ID, leader: req.To, since: c.now}
	c.reporting = c.reporting[:0]
	for i := range reports {
		if s := c.sent(&reports[i]); s != nil {
			c.reporting = append(c.reporting, s)
		}
	}
	return req, true
}

func (c *ClientCore) sent(r *pdpb.Report) *sub {
	s := c.subs[r.Region]
	if s == nil {
		return nil
	}
	s.sentUpto, s.sentSealed, s.sentAt = max(s.sentUpto, r.Upto), max(s.sentSealed, r.Sealed), c.now
	if s.sentUpto > s.seenUpto {
		c.watch(s)
	}
	return s
}
