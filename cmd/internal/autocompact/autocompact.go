// Package autocompact decides when a store is compacted by itself, and at which revision, by etcd's
// rules for --auto-compaction-mode and --auto-compaction-retention.
//
// Core is pure: its owner tells it the time and the store's newest revision, and carries out what
// it says. Every node has one and remembers revisions, but only one node acts.
package autocompact

import (
	"errors"
	"fmt"
	"strconv"
	"time"
)

// Mode says what the retention counts.
type Mode string

const (
	// Periodic keeps the history of a span of time: it is compacted at the revision of that long
	// ago, once it has passed, and then once in that time, or every hour if it is longer.
	Periodic Mode = "periodic"
	// Revision keeps a number of revisions, and compacts every five minutes.
	Revision Mode = "revision"
)

const (
	revisionEvery = 5 * time.Minute
	periodicMax   = time.Hour // between two periodic compactions
	looks         = 10        // at the revision, in the time between two periodic compactions
)

// Policy is a mode with its retention. The zero value never compacts.
type Policy struct {
	Mode   Mode
	Period time.Duration // Periodic
	Keep   int64         // Revision
}

// Parse reads the values of the two flags as etcd does: a plain number means hours or revisions, by
// the mode; anything else is a duration.
func Parse(mode, retention string) (Policy, error) {
	p := Policy{Mode: Mode(mode)}
	switch p.Mode {
	case Periodic, Revision:
	case "":
		return p, errors.New("--auto-compaction-mode is undefined")
	default:
		return p, fmt.Errorf("unknown --auto-compaction-mode %q", mode)
	}
	if retention == "" {
		return p, nil
	}
	n, err := strconv.Atoi(retention)
	var d time.Duration
	if err != nil || n < 0 {
		if d, err = time.ParseDuration(retention); err != nil {
			return p, fmt.Errorf("error parsing --auto-compaction-retention: %w", err)
		}
		if d < 0 {
			return p, fmt.Errorf("--auto-compaction-retention %s is negative", retention)
		}
	}
	switch {
	case p.Mode == Revision && d > 0:
		p.Keep = int64(d) // as etcd takes it
	case p.Mode == Revision:
		p.Keep = int64(n)
	case d > 0:
		p.Period = d
	default:
		p.Period = time.Duration(n) * time.Hour
	}
	return p, nil
}

// Enabled says whether the policy compacts at all.
func (p Policy) Enabled() bool { return p.Period > 0 || p.Keep > 0 }

// Every is how often Core.Tick has something to do.
func (p Policy) Every() time.Duration {
	if p.Mode == Revision {
		return revisionEvery
	}
	return max(min(p.Period, periodicMax)/looks, 1)
}

// Core is the state of one node.
type Core struct {
	p       Policy
	next    time.Duration
	started bool
	last    time.Duration // when the last compaction succeeded, or the start
	wait    time.Duration // from then to the next
	done    int64         // the revision of the last compaction
	revs    []int64       // newest revisions at past looks, oldest first: the first is of Period ago
}

// New returns a core that has seen nothing.
func New(p Policy) *Core { return &Core{p: p, wait: p.Period} }

// Tick takes the time, from any fixed origin, and the newest revision. It returns the revision to
// compact at, 0 for none. acts says whether this node is the one that compacts.
func (c *Core) Tick(now time.Duration, rev int64, acts bool) (at int64) {
	if !c.started {
		c.started, c.last, c.next = true, now, now+c.p.Every()
		c.remember(rev)
		return 0
	}
	if now < c.next {
		return 0
	}
	c.next = now + c.p.Every()
	if c.p.Mode == Revision {
		if at = rev - c.p.Keep; !acts || at <= 0 || at == c.done {
			return 0
		}
		return at
	}
	if acts && now-c.last >= c.wait && c.revs[0] != c.done {
		at, c.wait = c.revs[0], min(c.p.Period, periodicMax)
	}
	c.remember(rev)
	return at
}

func (c *Core) remember(rev int64) {
	if c.revs = append(c.revs, rev); len(c.revs) > int(c.p.Period/c.p.Every())+1 {
		c.revs = c.revs[1:]
	}
}

// Next is when Tick has something to do.
func (c *Core) Next() time.Duration { return c.next }

// Done tells that the store is compacted at a revision; what failed is tried again at the next Tick.
func (c *Core) Done(at int64, now time.Duration) { c.done, c.last = at, now }
