package leasesvc

import "time"

// pace keeps a storm of ends from those who write meanwhile: so few leases are ended at one time that
// what others ask of the regions is served in between, and yet enough that a region always has some to
// end. It is pure; the service asks it before it starts anything and guards it.
//
// What takes long does not count any more: it waits, for a region without a quorum most likely, and costs
// nothing. Its own group stands still meanwhile, and no other does (group).
type pace struct {
	workers int
	flights map[*flight]struct{}
	groups  map[uint64]int // leases of a group that are being ended
	young   int            // cost of what has not taken long yet
	alone   int            // ends that have failed before
	again   map[uint64]int // those, by group
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
	began  time.Duration
	old    bool
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
	// spreadFor is the time over which leases are ended whose time is up at once: what they cost is the same
	// whenever it is paid, and whoever writes meanwhile has the rest of the machine. rateMin is how many a
	// second are ended at least: fewer are no storm.
	spreadFor = 3500 * time.Millisecond
	rateMin   = 2048
	// aheadMax is by how much ends may be ahead of the rate, so that what is no storm is not put off.
	aheadMax = 50 * time.Millisecond
	// youngFor is when a flight has taken long: many times what one takes where all is well.
	youngFor = time.Second
	// aloneShare is the part of the workers that may be busy with ends that have failed before: each may
	// take as long as a request may.
	aloneShare = 8
)

func newPace(workers int) pace {
	return pace{workers: workers, flights: map[*flight]struct{}{}, groups: map[uint64]int{}, again: map[uint64]int{}}
}

// may says whether what is under way leaves room for an action.
func (p *pace) may(a *Action) bool {
	switch {
	case a.Kind != Expire:
		return true
	case p.young >= youngMax:
		return false
	case a.Alone:
		return p.alone < max(1, p.workers/aloneShare)
	}
	return p.groups[a.Group] < groupMax
}

// pause is how long the next end has to wait for its time.
func (p *pace) pause(now time.Duration) time.Duration { return max(0, p.paid-aheadMax-now) }

// waiting tells how many leases wait for their end.
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
	if f.alone {
		p.alone++
		p.again[f.group]++
	} else {
		p.groups[f.group] += f.leases
	}
	p.young += f.cost
	p.flights[f] = struct{}{}
	if p.rate > 0 {
		p.paid = max(p.paid, now) + time.Duration(float64(f.leases)/p.rate*float64(time.Second))
	}
	return f
}

// end notes that it has ended.
func (p *pace) end(f *flight) {
	if _, ok := p.flights[f]; !ok {
		return
	}
	delete(p.flights, f)
	if !f.old {
		p.young -= f.cost
	}
	if f.alone {
		p.alone--
		if p.again[f.group]--; p.again[f.group] == 0 {
			delete(p.again, f.group)
		}
	} else if p.groups[f.group] -= f.leases; p.groups[f.group] == 0 {
		delete(p.groups, f.group)
	}
}

// tick lets time pass.
func (p *pace) tick(now time.Duration) {
	for f := range p.flights {
		if !f.old && now-f.began > youngFor {
			f.old = true
			p.young -= f.cost
		}
	}
}
