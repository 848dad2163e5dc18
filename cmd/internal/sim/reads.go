package sim

import (
	"errors"
	"slices"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// kv is what a read found of a key; version 0 for nothing.
type kv struct {
	value                []byte
	create, mod, version int64
	lease                int64
}

// page is what a read found of a region.
type page map[string]kv

// read is a read of whole regions at one point, each served by whichever replica is complete.
type read struct {
	id        int
	store     int // that asks for the point
	sentRev   mvcc.Revision
	sentCut   pdpb.Cut
	sentFloor mvcc.Revision
	regions   []int
	got       map[int]page
	pointed   bool
	point     pdpb.ReadPoint
	rev       mvcc.Revision // the point's, or an older one
}

func (r *read) served() bool { return len(r.got) == len(r.regions) }

// clientRead asks for a read point. While a store is cut off it asks more than its share: it is
// the one that may not know that the world has moved on.
func (c *checker) clientRead() {
	const openMax = 10
	if len(c.pending) >= openMax {
		return
	}
	w := c.w
	s := w.stores[w.rng.IntN(len(w.stores))]
	if i := w.isolated(); i != nil && w.chance(w.aim.wait) {
		s = i
	}
	if !s.up {
		return
	}
	r := &read{id: len(c.reads), store: s.i, sentRev: c.maxAcked, sentCut: c.maxCut, sentFloor: c.ackFloor, got: map[int]page{}}
	for i := range w.cfg.Regions {
		if w.chance(2) || i == w.cfg.Regions-1 && len(r.regions) == 0 {
			r.regions = append(r.regions, i)
		}
	}
	c.reads = append(c.reads, r)
	c.pending = append(c.pending, r)
	w.stats.Reads++
	s.oracle.ReadPointFunc(func(p pdpb.ReadPoint, err error) {
		switch {
		case errors.Is(err, regionpb.ErrorOf(regionpb.TooManyRequests)):
			c.pending = slices.DeleteFunc(c.pending, func(x *read) bool { return x == r }) // too many wait for a leader
		case err != nil:
			w.fail("read %d: %v", r.id, err)
		default:
			c.pointAt(r, p)
		}
	})
}

// pointAt takes a read's point (I2).
func (c *checker) pointAt(r *read, p pdpb.ReadPoint) {
	r.pointed, r.point, r.rev = true, p, p.Rev
	switch lowest := max(p.Floor, 1); c.w.rng.IntN(6) {
	case 0:
		r.rev = lowest + mvcc.Revision(c.w.rng.IntN(int(p.Rev-lowest)+1))
	case 1:
		r.rev = lowest
	case 2:
		// Below the point's floor, where a router answers by itself: replicas must give all of
		// it or refuse (C1).
		r.rev = 1 + mvcc.Revision(c.w.rng.IntN(int(p.Rev)))
	}
	if p.Rev < r.sentRev || p.Cut < r.sentCut || p.Floor < r.sentFloor {
		c.w.fail("I2: read %d has point %v, and revision %d of cut %d and floor %d were acknowledged before it was asked for", r.id, p, r.sentRev, r.sentCut, r.sentFloor)
	}
}

// pollReads lets replicas serve what they can.
func (c *checker) pollReads() {
	kept := c.pending[:0]
	for _, r := range c.pending {
		if !r.pointed || c.serve(r) {
			kept = append(kept, r)
		}
	}
	clear(c.pending[len(kept):])
	c.pending = kept
}

// readable is a replica's group, nil when the store has none that may serve.
func (c *checker) readable(s *store, region int) *group {
	if !s.up {
		return nil
	}
	g := s.groups[c.w.region(region).ID]
	if g == nil || g.g.Status().Uninitialized {
		return nil
	}
	return g
}

// serve tries what is missing of a read; it returns whether the read goes on.
func (c *checker) serve(r *read) bool {
	for _, i := range r.regions {
		if r.got[i] != nil {
			continue
		}
		s := c.w.stores[c.w.rng.IntN(len(c.w.stores))]
		g := c.readable(s, i)
		if g == nil {
			continue
		}
		d := c.w.region(i)
		resp, err := g.replica.TryRead(&regionpb.ReadRequest{Region: d.ID, Epoch: 1, Cut: r.point.Cut, Rev: r.rev, Span: d.Span})
		var re *regionpb.Error
		switch {
		case err == nil:
			c.checkComplete(r, s, g)
			r.got[i] = pageOf(resp)
			c.w.stats.Served++
			c.w.event("read %d of region %d at %v, revision %d by s%d", r.id, d.ID, r.point, r.rev, s.i)
		case errors.As(err, &re) && re.Code == regionpb.NotComplete:
		case errors.As(err, &re) && re.Code == regionpb.Compacted && r.rev < c.mark.Floor:
			c.w.stats.Compacted++ // a client takes a new point, or is told (C2)
			return false
		default:
			c.w.fail("read %d at store %d: %v", r.id, s.i, err)
			return false
		}
	}
	return !r.served()
}

// checkComplete checks that whoever served had applied all items of the region through the
// read's cut (S3).
func (c *checker) checkComplete(r *read, s *store, g *group) {
	have := g.replica.Applied().Item
	items := c.newest[g.id]
	for i := len(items) - 1; i >= 0; i-- {
		if it := items[i]; it.Cut <= r.point.Cut {
			if it.N > have {
				c.w.fail("I4: store %d served read %d at %v of region %d with items through %d applied, and item %d is of cut %d (S3)", s.i, r.id, r.point, g.id, have, it.N, it.Cut)
			}
			return
		}
	}
}

func pageOf(resp *regionpb.ReadResponse) page {
	p := page{}
	for _, x := range resp.KVs {
		p[string(x.Key)] = kv{x.Value, x.CreateRevision, x.ModRevision, x.Version, x.Lease}
	}
	return p
}

// local is a serializable read: what a replica happens to have.
type local struct {
	store, region int
	rev           mvcc.Revision
	got           page
}

// sight is who looked at what: a client that stays with a replica.
type sight struct {
	store, region int
	life          uint64
}

// serializable reads a region from some replica without a point. The answer must be the state at
// the revision that it names (checked at the end), and that never falls while the replica lives.
func (c *checker) serializable() {
	s := c.w.stores[c.w.rng.IntN(len(c.w.stores))]
	i := c.w.rng.IntN(c.w.cfg.Regions)
	g := c.readable(s, i)
	if g == nil {
		return
	}
	d := c.w.region(i)
	if c.w.chance(3) {
		c.oldRead(s, i, g)
		return
	}
	resp, err := g.replica.TryRead(&regionpb.ReadRequest{Region: d.ID, Epoch: 1, Span: d.Span})
	var re *regionpb.Error
	if errors.As(err, &re) && re.Code == regionpb.NotComplete && g.g.Status().Installing {
		return
	}
	if err != nil {
		c.w.fail("serializable read of region %d at store %d: %v", d.ID, s.i, err)
		return
	}
	c.w.stats.Serializable++
	c.locals = append(c.locals, &local{s.i, i, resp.Rev, pageOf(resp)})
	at := sight{s.i, i, s.life}
	if resp.Rev < c.seen[at] {
		c.w.fail("I4: store %d answered a serializable read of region %d at revision %d after one at %d", s.i, d.ID, resp.Rev, c.seen[at])
	}
	c.seen[at] = resp.Rev
}

// oldRead reads some older revision of what a replica happens to have: all of it, or the word
// that it is compacted, which must be true.
func (c *checker) oldRead(s *store, i int, g *group) {
	d := c.w.region(i)
	rev := 1 + mvcc.Revision(c.w.rng.IntN(int(c.mark.Rev)))
	resp, err := g.replica.TryRead(&regionpb.ReadRequest{Region: d.ID, Epoch: 1, Rev: rev, Span: d.Span})
	var re *regionpb.Error
	switch {
	case err == nil:
		c.w.stats.Serializable++
		c.locals = append(c.locals, &local{s.i, i, rev, pageOf(resp)})
	case errors.As(err, &re) && re.Code == regionpb.FutureRevision:
	case errors.As(err, &re) && re.Code == regionpb.Compacted && rev < c.mark.Floor:
		c.w.stats.Compacted++
	default:
		c.w.fail("I4: serializable read of region %d at store %d, revision %d, with floor %d: %v", d.ID, s.i, rev, c.mark.Floor, err)
	}
}
