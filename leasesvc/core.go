package leasesvc

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// Options are the times of a core. Zero means the default.
type Options struct {
	// Extend is added to what a lease has left when its timers move to a new leader. A leader renews no
	// longer than this after it has begun to ask a quorum that confirmed it (L6); so it must be the same
	// on all nodes. An election timeout. Default 1 s.
	Extend time.Duration
	// CheckpointEvery is how often what a lease has left is recorded. Default 5 min.
	CheckpointEvery time.Duration
	// RetryAfter is when an end that failed, or a checkpoint, is tried again. Default 500 ms. An end that
	// fails again and again is tried after twice the time each time, up to RetryMax. Default 30 s.
	RetryAfter, RetryMax time.Duration
	// EndingMax bounds the leases of one group that are being ended at one time. Default 1024.
	EndingMax int
	// SortMax is how many leases of a group are put in the order of their ids before they are ended. Those
	// that are ended together then are neighbours, in the engine's index of leases and often in what they are
	// attached to, and neighbours are found and removed in a fraction of the time. None waits for more than
	// so many others that came due after it. Default 8192.
	SortMax int
	// RecordingMax bounds those of which is being recorded what they have left; more are looked at again
	// after RetryAfter. Default 4096.
	RecordingMax int
}

func (o Options) withDefaults() Options {
	def := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&o.Extend, time.Second)
	def(&o.CheckpointEvery, 5*time.Minute)
	def(&o.RetryAfter, 500*time.Millisecond)
	def(&o.RetryMax, 30*time.Second)
	if o.EndingMax <= 0 {
		o.EndingMax = 1024
	}
	if o.SortMax <= 0 {
		o.SortMax = 8192
	}
	if o.RecordingMax <= 0 {
		o.RecordingMax = 4096
	}
	return o
}

// Core keeps the time of the leases whose regions are led here. It is pure: it is told the time,
// what is applied and who leads, and says what to do. Times are monotonic from any origin.
//
// A lease may live longer than its time to live and never shorter (L5): its deadline is only ever
// moved later, but by the end of the term, and what it says to end is ended only by the leader of
// the term in which it was said. A leader that was deposed and does not know it promises nothing that
// its successors do not keep (L6).
type Core struct {
	o     Options
	homes map[pdpb.RegionID]*home
	next  homeQueue
	// waiting are the groups with leases that wait for room; groups counts all there ever were.
	waiting   []*group
	groups    uint64
	recording int // of all homes
	// Mutants for tests.
	NoExtend    bool // a new leader adds nothing
	NoConfirm   bool // a leader renews without being confirmed
	RenewEnding bool // renewals do not wait for an end that has begun
}

// home is a region that is led here, with the leases recorded in it. It has a queue of its own, so that the
// end of a term costs the same however many leases there are.
type home struct {
	id     pdpb.RegionID
	queue  queue // of leases by when they are due
	index  int   // in Core.next, -1 outside: its queue is empty
	term   uint64
	loaded bool // every record is known
	// until is when the last confirmation of the term by a quorum ceases to cover renewals (L6).
	until  time.Duration
	leases map[int64]*lease
	// recording counts the leases that are.
	recording int
	groups    map[string]*group // by where their keys lie
	// gone are the leases that ended while records were still being read: the reader may have seen
	// them before.
	gone map[int64]bool
}

// group is leases that share a fate: their records lie in one region and their keys in the same ones, so
// that what keeps one of them from its end, a region without a quorum say, keeps all. It keeps no others:
// each group has room of its own for leases that are being ended, and only its own wait for that.
type group struct {
	home   *home
	id     uint64 // in Actions
	where  string // its key in home.groups
	spans  []mvcc.Span
	leases int
	ending int
	// over are leases whose time is up and that wait for room, the first one first, but for the first ones,
	// which are sorted by their ids; those that are not in that state, or not in this group, any more are
	// passed over.
	over   []*lease
	sorted int // how many of over are
}

type lease struct {
	group    *group
	id       int64
	grant    uint64 // who it is among all that ever have its id (L7)
	ttl      time.Duration
	recorded int64 // seconds that the record says are left, 0 all
	deadline time.Duration
	// due is when the lease is looked at next, and its place in the queue; at or before the
	// deadline, so that a renewal need not move it.
	due    time.Duration
	index  int           // in its home's queue, -1 outside
	checks time.Duration // when what is left is recorded next; 0 never
	state  leaseState
	failed uint8 // how often an Expire did, or the most that this can count
	// recording: a Checkpoint is on its way. A renewal waits for it, else the record could come to
	// say less than what the client was promised.
	recording bool
}

type leaseState uint8

const (
	alive  leaseState = iota
	over              // its time is up, and its group has no room to end it
	ending            // Expire was said and its end not heard
)

// ActionKind is what an Action asks for.
type ActionKind uint8

const (
	// Expire asks to revoke the lease, as leader of the term; the end is told to Ended if it
	// failed, and shows by Changed if not.
	Expire ActionKind = iota + 1
	// Checkpoint asks to record what is left; its end is told to Ended, however it went.
	Checkpoint
)

// Action is something to do.
type Action struct {
	Kind      ActionKind
	Region    pdpb.RegionID
	Term      uint64
	ID        int64
	Grant     uint64 // the lease that is meant, not another one of that id (L7)
	Remaining int64  // Checkpoint: seconds, 0 for all
	// Group is the same for leases that may be ended together: what keeps one from its end keeps all.
	Group uint64
	// Spans are those of other regions in which they may have keys, so that their end is an attempt; the
	// same for all of a group.
	Spans []mvcc.Span
	// Alone: an Expire that has failed before. What keeps this lease from its end, a region without a
	// quorum say, must not keep others from theirs, so it is not ended together with any.
	Alone bool
}

// New returns a core without leases.
func New(o Options) *Core {
	return &Core{o: o.withDefaults(), homes: map[pdpb.RegionID]*home{}}
}

// Lead begins a term of a region that is led here; its records come by Loaded, in any number of
// calls, while Changed goes on.
func (c *Core) Lead(region pdpb.RegionID, term uint64) {
	c.End(region)
	c.homes[region] = &home{id: region, term: term, index: -1, leases: map[int64]*lease{}, groups: map[string]*group{}, gone: map[int64]bool{}}
}

// End ends the term: somebody else keeps the time from now on.
func (c *Core) End(region pdpb.RegionID) {
	h := c.homes[region]
	if h == nil {
		return
	}
	c.next.remove(h)
	c.recording -= h.recording
	c.waiting = slices.DeleteFunc(c.waiting, func(g *group) bool { return g.home == h })
	delete(c.homes, region)
}

// Loaded brings a record as it was at some time since Lead.
func (c *Core) Loaded(region pdpb.RegionID, term uint64, id int64, rec *regionpb.LeaseRecord, now time.Duration) {
	h := c.homes[region]
	if h == nil || h.term != term || h.loaded || h.leases[id] != nil || h.gone[id] {
		return // what was applied meanwhile is newer
	}
	extend := c.o.Extend
	if c.NoExtend {
		extend = 0
	}
	c.add(h, id, rec, now+left(rec)+extend, now)
	// All of a region begin at this moment; they do not come due together.
	if l := h.leases[id]; l.checks > 0 {
		half := c.o.CheckpointEvery / 2
		l.checks -= time.Duration(spread(id) % uint64(half))
		l.due = min(l.due, l.checks)
		c.set(l)
	}
}

// spread mixes ids, which may follow each other.
func spread(id int64) uint64 {
	x := uint64(id) * 0x9e3779b97f4a7c15
	return x ^ x>>32
}

// Confirmed tells that a quorum said, in answer to a question that was put at a time, that the term
// leads. No later leader had read its records at that time, so each adds Extend to what it promises
// from then on.
func (c *Core) Confirmed(region pdpb.RegionID, term uint64, asked time.Duration) {
	if h := c.homes[region]; h != nil && h.term == term {
		h.until = max(h.until, asked+c.o.Extend)
	}
}

// ConfirmSoon says whether it is time to have the term confirmed, lest a renewal has to wait for it.
func (c *Core) ConfirmSoon(region pdpb.RegionID, now time.Duration) bool {
	h := c.homes[region]
	return h != nil && now >= h.until-c.o.Extend/2
}

// LoadedAll ends the loading of a term.
func (c *Core) LoadedAll(region pdpb.RegionID, term uint64) {
	if h := c.homes[region]; h != nil && h.term == term {
		h.loaded, h.gone = true, nil
	}
}

// left is what a record says is left of a lease.
func left(rec *regionpb.LeaseRecord) time.Duration {
	if rec.Remaining > 0 {
		return seconds(rec.Remaining)
	}
	return seconds(rec.TTL)
}

// secondsMax keeps durations from overflowing: etcd's longest time to live, which leaves seven years.
const secondsMax = 9_000_000_000

func seconds(n int64) time.Duration { return time.Duration(min(n, secondsMax)) * time.Second }

// Changed brings a lease's record as it is applied now; nil when it is gone.
func (c *Core) Changed(region pdpb.RegionID, id int64, rec *regionpb.LeaseRecord, now time.Duration) {
	h := c.homes[region]
	if h == nil {
		return
	}
	l := h.leases[id]
	switch {
	case rec == nil && l != nil:
		c.drop(l)
		delete(h.leases, id)
		fallthrough
	case rec == nil:
		if h.gone != nil {
			h.gone[id] = true
		}
	case l != nil:
		l.recorded = rec.Remaining
		c.join(l, h, rec)
	case h.gone != nil && !h.gone[id]:
		// Not read yet: how long it has run is not known here.
		c.Loaded(region, h.term, id, rec, now)
	default:
		c.add(h, id, rec, now+seconds(rec.TTL), now)
	}
}

func (c *Core) add(h *home, id int64, rec *regionpb.LeaseRecord, deadline, now time.Duration) {
	l := &lease{id: id, grant: rec.Grant, ttl: seconds(rec.TTL), recorded: rec.Remaining, deadline: deadline, index: -1}
	h.leases[id] = l
	c.join(l, h, rec)
	c.schedule(l, now)
}

// join puts a lease into the group of its record, in the state that it has.
func (c *Core) join(l *lease, h *home, rec *regionpb.LeaseRecord) {
	var room [64]byte
	where := room[:0]
	for _, s := range rec.Spans {
		where = append(append(append(where, s.Start...), 0), s.End...) // likeness is enough
		where = append(where, 0)
	}
	g := h.groups[string(where)]
	if g == nil {
		c.groups++
		g = &group{home: h, id: c.groups, where: string(where), spans: rec.Spans}
		h.groups[g.where] = g
	}
	if l.group == g {
		return
	}
	c.leave(l)
	l.group = g
	g.leases++
	switch l.state {
	case ending:
		g.ending++
	case over:
		c.wait(l)
	}
}

// leave takes a lease out of its group.
func (c *Core) leave(l *lease) {
	g := l.group
	if g == nil {
		return
	}
	if l.state == ending {
		g.ending--
	}
	if g.leases--; g.leases == 0 && g.home.groups[g.where] == g {
		delete(g.home.groups, g.where)
	}
	l.group = nil
}

// wait puts a lease whose time is up behind the others of its group.
func (c *Core) wait(l *lease) {
	g := l.group
	l.state = over
	if len(g.over) == 0 {
		c.waiting = append(c.waiting, g)
	}
	g.over = append(g.over, l)
}

// schedule puts a lease where it is looked at next. What a lease has left is recorded only if that
// is more than an interval: shorter ones live through an election at their full length.
func (c *Core) schedule(l *lease, now time.Duration) {
	l.checks = 0
	if l.deadline-now > c.o.CheckpointEvery {
		l.checks = now + c.o.CheckpointEvery
	}
	l.due = l.deadline
	if l.checks > 0 {
		l.due = min(l.due, l.checks)
	}
	c.set(l)
}

// set puts a lease where it belongs in the queue, or takes it to its new place.
func (c *Core) set(l *lease) {
	h := l.group.home
	h.queue.set(l)
	c.next.set(h)
}

// remove takes a lease out of the queue, if it is in it.
func (c *Core) remove(l *lease) {
	h := l.group.home
	h.queue.remove(l)
	if len(h.queue) > 0 {
		c.next.set(h)
	} else {
		c.next.remove(h)
	}
}

func (c *Core) drop(l *lease) {
	c.remove(l)
	c.recorded(l)
	c.leave(l)
}

// record begins the recording of a lease.
func (c *Core) record(l *lease) {
	l.recording = true
	l.group.home.recording++
	c.recording++
}

// recorded ends the recording of a lease, if there is one.
func (c *Core) recorded(l *lease) {
	if l.recording {
		l.recording = false
		l.group.home.recording--
		c.recording--
	}
}

// Outcome is what became of a renewal.
type Outcome uint8

const (
	// Elsewhere: the region is not led here.
	Elsewhere Outcome = iota
	// Unknown: there is no such lease.
	Unknown
	// Renewed: it has its full time to live again.
	Renewed
	// Wait: it is being ended, or not known yet; ask again when something has changed (L5).
	Wait
	// Unconfirmed: a quorum must confirm the term first; ask again after Confirmed.
	Unconfirmed
)

// Renew gives a lease its full time to live again, and returns that in seconds. forget says that
// the record holds less, which must be taken back (Checkpoint with 0) before the client is told.
func (c *Core) Renew(region pdpb.RegionID, id int64, now time.Duration) (out Outcome, ttl int64, forget Action) {
	h := c.homes[region]
	if h == nil {
		return Elsewhere, 0, forget
	}
	l := h.leases[id]
	switch {
	case l == nil && !h.loaded:
		return Wait, 0, forget
	case l == nil:
		return Unknown, 0, forget
	case !c.RenewEnding && (l.state != alive || now >= l.deadline) || l.recording:
		return Wait, 0, forget
	case now >= h.until && !c.NoConfirm:
		return Unconfirmed, 0, forget
	case l.recorded > 0:
		return Renewed, 0, Action{Kind: Checkpoint, Region: region, Term: h.term, ID: id, Grant: l.grant}
	}
	// Never earlier: a new leader's extension covers what the old one may still promise (L6).
	l.deadline = max(l.deadline, now+l.ttl)
	// The queue holds an earlier time and corrects itself when that comes.
	return Renewed, int64(l.ttl / time.Second), forget
}

// Remaining is how long a lease has; it may be negative while it is being ended.
func (c *Core) Remaining(region pdpb.RegionID, id int64, now time.Duration) (Outcome, time.Duration) {
	h := c.homes[region]
	if h == nil {
		return Elsewhere, 0
	}
	l := h.leases[id]
	switch {
	case l == nil && !h.loaded:
		return Wait, 0
	case l == nil:
		return Unknown, 0
	case now >= h.until && !c.NoConfirm:
		return Unconfirmed, 0 // it may have been renewed elsewhere
	}
	return Renewed, l.deadline - now
}

// Ended tells that an Expire failed: the lease is still there, and is ended anew after a pause, which grows
// each time; what was over stays over, and nobody renews it meanwhile. Or that a Checkpoint is over.
func (c *Core) Ended(a Action, now time.Duration) {
	l := c.meant(&a)
	if l == nil {
		return
	}
	if a.Kind == Checkpoint {
		c.recorded(l) // one that failed may have been executed, so what it said stays in l.recorded
		return
	}
	if l.state == ending {
		l.state = alive
		l.group.ending--
		pause := c.o.RetryAfter
		for range l.failed {
			pause = min(2*pause, c.o.RetryMax)
		}
		l.failed = min(l.failed+1, failedMax)
		l.due = now + pause
		c.set(l)
	}
}

// failedMax is how many failures of an end are counted: no shorter pause takes longer to double to the
// longest one.
const failedMax = 32

// Tick appends to dst what is to be done now. It looks at no more than tickMax leases, since whoever applies
// the ends of others waits meanwhile; Due says whether there are more. What has no room comes when an end
// has made some.
func (c *Core) Tick(now time.Duration, dst []Action) []Action {
	for n := 0; n < tickMax && c.Due(now); n++ {
		h := c.next[0]
		l := h.queue[0]
		switch {
		case now >= l.deadline:
			c.remove(l)
			c.wait(l)
		case l.checks > 0 && now >= l.checks && !l.recording && c.recording < c.o.RecordingMax:
			// Rounded up: never early. Never more than all of it: what a new leader added would be
			// added to by the next one.
			remaining := int64((min(l.deadline-now, l.ttl) + time.Second - 1) / time.Second)
			dst = append(dst, Action{Kind: Checkpoint, Region: h.id, Term: h.term, ID: l.id, Grant: l.grant, Remaining: remaining})
			c.record(l)
			l.recorded = remaining
			c.schedule(l, now)
		default:
			checks := l.checks
			if checks > 0 && checks <= now {
				checks = now + c.o.RetryAfter // the Checkpoint before is still on its way, or there is no room
			}
			c.schedule(l, now)
			if checks > 0 {
				// A renewal does not put off what is to be recorded.
				l.checks = checks
				l.due = min(l.due, checks)
				c.set(l)
			}
		}
	}
	return c.expire(dst)
}

const tickMax = 1024

// Due says whether there are leases to look at now. A lease that was renewed is looked at once in its time
// to live all the same, so whoever leaves them for later falls behind, and leases end late that were not.
func (c *Core) Due(now time.Duration) bool { return len(c.next) > 0 && c.next[0].queue[0].due <= now }

// Stands says whether an action that has waited is still to be done. Its term may be over, or a client has
// ended the lease meanwhile.
func (c *Core) Stands(a *Action) bool {
	l := c.meant(a)
	if l == nil {
		return false
	}
	if a.Kind == Checkpoint {
		return l.recording
	}
	return l.state == ending
}

// meant is the lease of an action, nil when its time is not kept here any more. One of that id that was
// granted since is another lease, and has all of its time (L7).
func (c *Core) meant(a *Action) *lease {
	h := c.homes[a.Region]
	if h == nil || h.term != a.Term {
		return nil
	}
	if l := h.leases[a.ID]; l != nil && l.grant == a.Grant {
		return l
	}
	return nil
}

// Grant is that of the lease of an id whose time is kept here, 0 when there is none.
func (c *Core) Grant(region pdpb.RegionID, id int64) uint64 {
	if h := c.homes[region]; h != nil && h.leases[id] != nil {
		return h.leases[id].grant
	}
	return 0
}

// expire appends the ends of leases that wait, as far as their groups have room.
func (c *Core) expire(dst []Action) []Action {
	c.waiting = slices.DeleteFunc(c.waiting, func(g *group) bool {
		n := 0
		for ; n < len(g.over) && g.ending < c.o.EndingMax; n++ {
			if n == g.sorted {
				g.sorted = min(len(g.over), n+c.o.SortMax)
				slices.SortFunc(g.over[n:g.sorted], func(a, b *lease) int { return cmp.Compare(a.id, b.id) })
			}
			l := g.over[n]
			g.over[n] = nil
			if l.group == g && l.state == over {
				l.state = ending
				g.ending++
				dst = append(dst, Action{Kind: Expire, Region: g.home.id, Term: g.home.term, ID: l.id, Grant: l.grant, Group: g.id, Spans: g.spans, Alone: l.failed > 0})
			}
		}
		g.sorted -= n
		if g.over = g.over[n:]; len(g.over) == 0 {
			g.over = nil
		}
		return g.over == nil
	})
	return dst
}

// Over is about how many leases' time is up and wait for room, of those with keys in spans that count.
func (c *Core) Over(counts func(spans []mvcc.Span) bool) (n int) {
	for _, g := range c.waiting {
		if counts(g.spans) {
			n += len(g.over)
		}
	}
	return n
}

// Soon is about how many leases' time is up by a moment and was not at the last Tick, judged by some of them.
func (c *Core) Soon(until time.Duration) (n int) {
	for _, h := range c.next {
		if h.queue[0].due > until {
			continue
		}
		seen, soon := 0, 0
		for i := 0; i < len(h.queue); i += max(1, len(h.queue)/soonLooks) {
			seen++
			if h.queue[i].deadline <= until {
				soon++
			}
		}
		n += len(h.queue) * soon / seen
	}
	return n
}

// soonLooks is at how many leases of a region Soon looks, or up to twice as many.
const soonLooks = 64

// Deadline is when a lease's time is up as far as is known here, whether or not a quorum confirms that
// the time is kept here; false for a lease that is not known.
func (c *Core) Deadline(region pdpb.RegionID, id int64) (time.Duration, bool) {
	if h := c.homes[region]; h != nil && h.leases[id] != nil {
		return h.leases[id].deadline, true
	}
	return 0, false
}

// Leads says whether a region is led here.
func (c *Core) Leads(region pdpb.RegionID) bool { return c.homes[region] != nil }

// Len is the number of leases whose time is kept here, of a region.
func (c *Core) Len(region pdpb.RegionID) int {
	if h := c.homes[region]; h != nil {
		return len(h.leases)
	}
	return 0
}

// Total is the number of leases whose time is kept here.
func (c *Core) Total() (n int) {
	for _, h := range c.homes {
		n += len(h.leases)
	}
	return n
}

// String prints the action in one line.
func (a *Action) String() string {
	if a.Kind == Expire {
		return fmt.Sprintf("expire %d of region %d, term %d", a.ID, a.Region, a.Term)
	}
	return fmt.Sprintf("record %d s of %d of region %d, term %d", a.Remaining, a.ID, a.Region, a.Term)
}
