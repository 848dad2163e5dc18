package sim

import (
	"fmt"
	"strings"
)

// Stats counts what a run did; it is also how one sees that a schedule does its work.
type Stats struct {
	Steps, Turns, Delivered, Lost, Duplicated                 int
	Crashes, Restarts, Partitions, Stops, Elections           int
	PDElections, Snapshots, Installs, PDInstalls              int
	Uninitialised, Flushes, Holes, Detached                   int
	Ops, Acked, Unknown, Refused, Void, Deferred              int
	Reads, Served, Serializable, Compacted                    int
	Cuts, Items, Fences, Compactions, GCs, Removed            int
	Txns, Commits, Aborts                                     int
	Watches, WatchEvents, WatchMoves, Histories               int
	Progress, ProgressAsked, WatchesCompacted                 int
	Revisions                                                 int
	Grants, Renewals, Revokes, Expiries                       int
	Registrations, LeaseEnds, SpreadEnds, EndsTogether, Looks int
	Confirms, Regrants, ByGrants                              int
	// Slowest is how many steps anything took that had nothing to wait for but others (see progress).
	Slowest int
}

func (s *Stats) fields() []*int {
	return []*int{
		&s.Steps, &s.Turns, &s.Delivered, &s.Lost, &s.Duplicated,
		&s.Crashes, &s.Restarts, &s.Partitions, &s.Stops, &s.Elections, &s.PDElections,
		&s.Snapshots, &s.Installs, &s.PDInstalls, &s.Uninitialised, &s.Flushes, &s.Holes, &s.Detached,
		&s.Ops, &s.Acked, &s.Unknown, &s.Refused, &s.Void, &s.Deferred,
		&s.Reads, &s.Served, &s.Serializable, &s.Compacted,
		&s.Cuts, &s.Items, &s.Fences, &s.Compactions, &s.GCs, &s.Removed, &s.Txns, &s.Commits, &s.Aborts, &s.Revisions,
		&s.Watches, &s.WatchEvents, &s.WatchMoves, &s.Histories, &s.WatchesCompacted, &s.ProgressAsked, &s.Progress,
		&s.Grants, &s.Renewals, &s.Revokes, &s.Expiries, &s.Registrations, &s.LeaseEnds, &s.SpreadEnds, &s.EndsTogether, &s.Looks, &s.Confirms, &s.Regrants, &s.ByGrants,
	}
}

// statNames go with fields; a bar begins a new group.
var statNames = strings.Fields(`steps turns delivered lost duplicated
	| crashes restarts partitions stopped-clocks elections pd-elections
	| snapshots installs pd-installs uninitialised flushes holes detached
	| ops acked unknown refused void deferred
	| reads served serializable compacted
	| cuts items fences compactions collections removed txns commits aborts revisions
	| watches events moves histories compacted progress-asked progress
	| grants renewals revokes expiries registrations ends spread-ends ends-together looks confirms granted-anew ends-by-grants`)

// Add adds up.
func (s *Stats) Add(o Stats) {
	from := o.fields()
	for i, p := range s.fields() {
		*p += *from[i]
	}
	s.Slowest = max(s.Slowest, o.Slowest)
}

// String prints the counts in one line.
func (s Stats) String() string {
	var b strings.Builder
	f := s.fields()
	for _, name := range statNames {
		if name == "|" {
			b.WriteString("| ")
			continue
		}
		fmt.Fprintf(&b, "%s %d ", name, *f[0])
		f = f[1:]
	}
	fmt.Fprintf(&b, "slowest %d", s.Slowest)
	return b.String()
}
