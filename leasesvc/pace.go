package leasesvc

import (
	"cmp"
	"slices"
	"time"

	"braid/mvcc"
)

// pace keeps a storm of ends from those who write meanwhile: so few leases are ended at one time that
// what others ask of the regions is served in between, and yet enough that a region always has some to
// end. It is pure; the service asks it before it starts anything and guards it.
//
// What takes long does not count any more: it waits, for a region without a quorum most likely, and costs
// nothing. Its own group stands still meanwhile, and no other does (group).
//
// There may be many such groups, with keys in the same region or in several that have no quorum, and each
// would have to be tried to find that out. So whoever has keys where nothing has ended yet, or where the last
// end took long, is on *trial*: one flight for each such span at a time, and a few in all, beside what others
// do and not in its place, first where fewest have taken long. An end that succeeds gives trust to all the
// spans that it visited.
type pace struct {
	workers int
	flights map[*flight]struct{}
	groups  map[uint64]int // leases of a group that are being ended
	young   int            // cost of what has not taken long yet
	alone   int            // ends that have failed before
	again   map[uint64]int // those, by group
	// late are the spans, by their starts, of which is known whether leases end there: how many ends have
	// taken long since one has succeeded. Those with 0 are trusted.
	late map[string]int
	// trying and trials count trials that have not taken long yet, each span's and all.
	trying map[string]int
	trials int
	// rate is how many leases a second are ended while some wait, 0 when none does; paid is the time for
	// which those that were begun suffice at that rate.
	rate float64
	paid time.Duration
}

// flight is what a worker carries out.
type flight struct {
	group  uint64
	leases int
	cost   int
	alone  bool
	trial  bool
	spans  []mvcc.Span
	began  time.Duration
	old    bool
	blamed bool // its spans are known to have made it late
}

const (
	// togetherMax bounds the leases that are ended, or recorded, together. What that costs grows less
	// than their number; what a watcher gets in one revision, and for how long a region is busy with it,
	// grow with it.
	togetherMax = 128
	// groupMax bounds the leases of a group that are being ended at one time: while some are on their
	// way through logs and cuts, the next ones are evaluated.
	groupMax = 5 * togetherMax
	// youngMax bounds what a node ends at one time, in leases with keys in their own regions only; one
	// whose end is an attempt counts for spreadCost of them, and each flight for flightCost more.
	// With twice as much, writers beside them wait twice as long (docs/bench/leases.md).
	youngMax   = 700
	spreadCost = 2
	flightCost = 32
	// spreadFor is the time over which leases are ended whose time is up within soonFor: what they cost is
	// the same whenever it is paid, and whoever writes meanwhile has the rest of the machine. rateMin is how
	// many a second are ended at least: fewer are no storm.
	spreadFor = 4500 * time.Millisecond
	soonFor   = time.Second
	rateMin   = 2048
	// aheadMax is by how much ends may be ahead of the rate, so that what is no storm is not put off.
	aheadMax = 50 * time.Millisecond
	// youngFor is when a flight has taken long: many times what one takes where all is well.
	youngFor = time.Second
	// trustFor is how long an end may take before what is trusted is so no longer: a busy machine must not
	// make trials of all ends.
	trustFor = 3 * youngFor
	// aloneShare is the part of the workers that may be busy with ends that have failed before: each may
	// take as long as a request may.
	aloneShare = 8
	// trialShare is the part of the workers that may be busy with trials that have not taken long yet. Each
	// may go on for as long as a request may, so that they come to several times as many.
	trialShare = 16
	// lateMax bounds the spans of which something is known; when it is reached that is forgotten.
	lateMax = 64 << 10
)

func newPace(workers int) pace {
	return pace{workers: workers, flights: map[*flight]struct{}{}, groups: map[uint64]int{}, again: map[uint64]int{},
		late: map[string]int{}, trying: map[string]int{}}
}

// may says whether what is under way leaves room for an action.
func (p *pace) may(a *Action) bool {
	switch {
	case a.Kind != Expire:
		return true
	case p.onTrial(a.Spans):
		return p.trials < max(1, p.workers/trialShare) && !slices.ContainsFunc(a.Spans, func(s mvcc.Span) bool {
			return p.trying[string(s.Start)] > 0 && !p.trusts(s)
		})
	case p.young >= youngMax:
		return false
	case a.Alone:
		return p.alone < max(1, p.workers/aloneShare)
	}
	return p.groups[a.Group] < groupMax
}

// onTrial says whether nobody knows whether leases with keys in these spans can be ended.
func (p *pace) onTrial(spans []mvcc.Span) bool {
	return slices.ContainsFunc(spans, func(s mvcc.Span) bool { return !p.trusts(s) })
}

func (p *pace) trusts(s mvcc.Span) bool {
	n, known := p.late[string(s.Start)]
	return known && n == 0
}

// compare orders actions that may be carried out: what has failed before comes last, and first of it that of
// which group least is tried again already; before that, of trials, where fewest ends have taken long.
func (p *pace) compare(a, b *Action) int {
	late := func(a *Action) (n int) {
		for i := range a.Spans {
			n += p.late[string(a.Spans[i].Start)]
		}
		return n
	}
	alone := func(a *Action) int {
		if a.Alone {
			return 1 + p.again[a.Group]
		}
		return 0
	}
	return cmp.Or(cmp.Compare(late(a), late(b)), cmp.Compare(alone(a), alone(b)))
}

// counts says whether an action has to wait for its time: an end that is no trial.
func (p *pace) counts(a *Action) bool { return a.Kind == Expire && !p.onTrial(a.Spans) }

// pause is how long the next end has to wait for its time.
func (p *pace) pause(now time.Duration) time.Duration { return max(0, p.paid-aheadMax-now) }

// waiting tells how many leases wait for their end, or soon will.
func (p *pace) waiting(n int) {
	if n == 0 {
		p.rate = 0
	} else {
		p.rate = max(p.rate, rateMin, float64(n)/spreadFor.Seconds())
	}
}

// begin notes that actions of one kind are carried out from now on, and returns them for end.
func (p *pace) begin(list []Action, now time.Duration) *flight {
	f := &flight{group: list[0].Group, leases: len(list), cost: len(list) + flightCost, began: now, alone: list[0].Alone}
	if len(list[0].Spans) > 0 {
		f.cost *= spreadCost
	}
	if list[0].Kind != Expire {
		return f
	}
	f.spans, f.trial = list[0].Spans, p.onTrial(list[0].Spans)
	p.flights[f] = struct{}{}
	p.count(f, 1)
	if f.alone {
		p.again[f.group]++
	} else {
		p.groups[f.group] += f.leases
	}
	if f.trial {
		return f
	}
	if f.alone {
		p.alone++
	}
	if p.rate > 0 {
		p.paid = max(p.paid, now) + time.Duration(float64(f.leases)/p.rate*float64(time.Second))
	}
	return f
}

// count adds a flight, that has not taken long yet, to what is under way, or takes it off.
func (p *pace) count(f *flight, n int) {
	if !f.trial {
		p.young += n * f.cost
		return
	}
	p.trials += n
	for i := range f.spans {
		k := string(f.spans[i].Start)
		if p.trying[k] += n; p.trying[k] == 0 {
			delete(p.trying, k)
		}
	}
}

// end notes that it has ended, and whether the leases have.
func (p *pace) end(f *flight, ok bool) {
	if _, under := p.flights[f]; !under {
		return
	}
	delete(p.flights, f)
	if !f.old {
		p.count(f, -1)
	}
	for i := 0; ok && i < len(f.spans); i++ {
		p.learn(f.spans[i], 0)
	}
	if f.alone && !f.trial {
		p.alone--
	}
	if f.alone {
		if p.again[f.group]--; p.again[f.group] == 0 {
			delete(p.again, f.group)
		}
	} else if p.groups[f.group] -= f.leases; p.groups[f.group] == 0 {
		delete(p.groups, f.group)
	}
}

func (p *pace) learn(s mvcc.Span, late int) {
	if len(p.late) >= lateMax {
		clear(p.late)
	}
	p.late[string(s.Start)] = late
}

// tick lets time pass.
func (p *pace) tick(now time.Duration) {
	for f := range p.flights {
		if !f.old && now-f.began > youngFor {
			f.old = true
			p.count(f, -1)
		}
		if long := now - f.began; !f.blamed && (f.trial && long > youngFor || long > trustFor) {
			f.blamed = true
			p.blame(f.spans)
		}
	}
}

// blame notes that an end takes long.
func (p *pace) blame(spans []mvcc.Span) {
	trial := p.onTrial(spans)
	for _, s := range spans {
		if !trial || !p.trusts(s) { // else it is not this one
			p.learn(s, p.late[string(s.Start)]+1)
		}
	}
}
