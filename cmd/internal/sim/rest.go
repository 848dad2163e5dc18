package sim

import (
	"fmt"
	"maps"
	"slices"

	"braid/raftstore/raftid"
)

// unrest says what keeps the healed cluster from being at rest, "" when nothing does.
func (c *checker) unrest() string {
	if len(c.open) > 0 {
		return fmt.Sprintf("op %d waits at store %d", c.open[0].id, c.open[0].store)
	}
	for _, e := range c.events {
		if s := c.w.stores[e.store]; !e.done && s.life == e.life {
			return fmt.Sprintf("%s, asked for at store %d, waits", e.name, e.store)
		}
	}
	if n := len(c.txns.live); n > 0 {
		return fmt.Sprintf("%d transactions over several regions are under way, the first is %d: %v", n, c.txns.live[0].id, c.txns.live[0].todo)
	}
	if why := c.restLeases(); why != "" {
		return why
	}
	for _, r := range c.pending {
		return fmt.Sprintf("read %d at %v waits", r.id, r.point)
	}
	for i := range c.w.boot.Regions {
		id := c.w.boot.Regions[i].ID
		led := false
		for _, s := range c.w.stores {
			led = led || s.groups[id] != nil && s.groups[id].leading
		}
		if !led {
			return fmt.Sprintf("region %d has no leader", id)
		}
		for _, s := range c.w.stores {
			g := s.groups[id]
			if g == nil {
				return fmt.Sprintf("store %d has no region %d", s.i, id)
			}
			if g.g.Status().Uninitialized {
				return fmt.Sprintf("store %d region %d is uninitialised", s.i, id)
			}
			if n := uint64(len(c.newest[id])); g.replica.Applied().Item != n {
				return fmt.Sprintf("store %d region %d applied items through %d of %d: %s", s.i, id, g.replica.Applied().Item, n, g.g.Status())
			}
			if !g.replica.Idle() {
				return fmt.Sprintf("store %d region %d is not idle: %s", s.i, id, g.g.Status())
			}
		}
	}
	for _, s := range c.w.stores {
		if s.member == nil {
			break // the one group's log is the order, and needs no seals
		}
		if st := s.member.Status(); st.Mark != c.mark {
			return fmt.Sprintf("pd's member %d is at %v of %v", s.i, st.Mark, c.mark)
		} else if n := s.member.Machine().Core().OpenTxns(); n > 0 {
			return fmt.Sprintf("pd's member %d has %d attempts that are not decided\n%s", s.i, n, c.sealState(s))
		} else if st.Held > 0 {
			return fmt.Sprintf("pd's member %d holds %d items\n%s", s.i, st.Held, c.sealState(s))
		} else if !s.member.Idle() {
			return fmt.Sprintf("pd's member %d is not idle: %+v", s.i, st)
		}
	}
	return c.restWatches()
}

// sealState says what each replica knows of the seals that pd waits for.
func (c *checker) sealState(member *store) string {
	out := member.member.Machine().Core().String()
	for _, s := range c.w.stores {
		for _, id := range s.ids {
			if g := s.groups[id]; g.replica != nil {
				r, ok := g.replica.BuildReport()
				out += fmt.Sprintf("  store %d: report %v %v, asleep %v\n    %s\n", s.i, &r, ok, g.g.Asleep(), g.g.Status())
			}
		}
	}
	return out
}

// silence checks that a cluster at rest stays at rest: no entries, no cuts (B2), and soon no
// message of any raft group (B12).
func (c *checker) silence() {
	const rounds, falling = 150, 100
	before, cut, sent := c.logs(), c.mark.Cut, 0
	for round := range rounds {
		if round == falling {
			sent = c.w.net.raft
		}
		c.w.calmRound(round)
	}
	if after := c.logs(); after != before || c.mark.Cut != cut {
		c.w.fail("B2: an idle cluster went on writing: logs %s, then %s; cut %d, then %d", before, after, cut, c.mark.Cut)
	}
	if n := c.w.net.raft - sent; n > 0 {
		c.w.fail("B12: an idle cluster sent %d messages of raft in %d rounds", n, rounds-falling)
	}
}

func (c *checker) logs() string {
	last := map[raftid.GroupID]uint64{}
	for _, s := range c.w.stores {
		for _, id := range s.ids {
			last[id] = max(last[id], s.disk.Log(id).LastIndex())
		}
	}
	out := ""
	for _, id := range slices.Sorted(maps.Keys(last)) {
		out += fmt.Sprintf("%d:%d ", id, last[id])
	}
	return out
}
