package order

import "braid/pd/pdpb"

// A replica that had no room for an item drops it and wants it again. Only replicas that were sent
// something can lack anything, so only they are looked at, and a tick of a store whose regions are
// idle costs the same for a thousand of them as for one.

// suspect remembers that a replica was sent items and may not have kept them.
func (c *ClientCore) suspect(s *sub) {
	if !s.suspected {
		s.suspected = true
		c.suspects = append(c.suspects, s)
	}
}

// Suspects takes up to max regions whose replicas are to be asked what they want; the answers
// come with Lacks.
func (c *ClientCore) Suspects(into []pdpb.RegionID, max int) []pdpb.RegionID {
	n := min(max, len(c.suspects))
	for _, s := range c.suspects[:n] {
		s.suspected = false
		if s.id != 0 {
			into = append(into, s.id)
		}
	}
	rest := copy(c.suspects, c.suspects[n:])
	clear(c.suspects[rest:])
	c.suspects = c.suspects[:rest]
	return into
}

// Lacks tells the first item that a region's replica neither has applied nor holds. If that has not
// changed since it was told last, the item is not on its way and is asked for.
func (c *ClientCore) Lacks(id pdpb.RegionID, wanted uint64) {
	s := c.subs[id]
	if s == nil {
		return
	}
	if s.acked && wanted <= s.newest { // an acknowledgement to come makes it a suspect anyway
		c.suspect(s)
	}
	if s.lacked == wanted {
		c.Refetch(id, wanted-1)
	}
	s.lacked = wanted
}
