package sim

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/region"
	"braid/region/regionpb"
)

// op is one request of a client.
type op struct {
	id      int
	key     int
	txn     *pb.TxnRequest
	value   []byte
	store   int
	sentRev mvcc.Revision // acknowledged before it was sent
	fence   pdpb.Fence    // likewise
	tokens  []regionpb.LeaseToken
	begun   time.Duration
	done    bool
	resp    *pb.TxnResponse
	err     error
}

// clientOps sends random transactions, all at once, to a replica that may or may not lead.
func (c *checker) clientOps(n int) {
	w := c.w
	r := w.rng.IntN(w.cfg.Regions)
	if w.rng.IntN(100) < w.aim.hot {
		r = 0
	}
	s := c.replicaFor(w.region(r).ID)
	if s == nil {
		return
	}
	for range n {
		k := r*keysPerRegion + w.rng.IntN(keysPerRegion)
		if w.rng.IntN(100) < w.aim.hot {
			k = r * keysPerRegion
		}
		c.nextValue++
		o := &op{id: len(c.ops), key: k, store: s.i, begun: w.now, sentRev: c.maxAcked, fence: c.ackFence, value: fmt.Appendf(nil, "v%d", c.nextValue)}
		o.txn = c.randomTxn(o)
		if l := c.liveLease(); l != nil && (!l.home() || c.homeOf(l.id) == w.region(r).ID) && w.chance(2) {
			for _, x := range o.txn.Success {
				if p := x.GetRequestPut(); p != nil {
					p.Lease = l.id
				}
			}
		}
		c.ops = append(c.ops, o)
		c.open = append(c.open, o)
		w.stats.Ops++
		id := w.region(r).ID
		s.groups[id].replica.Write(&region.Write{Txn: o.txn, Reply: func(resp *pb.TxnResponse, err error) { c.answer(id, o, resp, err) }})
	}
}

// replicaFor is a store for a request: mostly one that believes it leads; two may.
func (c *checker) replicaFor(id pdpb.RegionID) *store {
	first := c.w.rng.IntN(len(c.w.stores))
	for i := range c.w.stores {
		s := c.w.stores[(first+i)%len(c.w.stores)]
		if g := s.groups[id]; s.up && g != nil && (g.leading || !c.w.quiet && !c.w.calm && c.w.chance(12)) {
			return s
		}
	}
	return nil
}

func putOp(k, v []byte) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: k, Value: v, PrevKv: true}}}
}

func getOp(k []byte) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: k}}}
}

func rangeOp(from, to []byte) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: from, RangeEnd: to}}}
}

func deleteOp(k []byte) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: k, PrevKv: true}}}
}

// randomTxn makes one of the shapes that an expectation can evaluate: puts, deletes, compares of
// mod revision and version, a read of the whole region and a put, and writes of two keys.
func (c *checker) randomTxn(o *op) *pb.TxnRequest {
	k := key(o.key)
	other := key(o.key/keysPerRegion*keysPerRegion + c.w.rng.IntN(keysPerRegion))
	t := &pb.TxnRequest{}
	compare := func(x *pb.Compare) {
		x.Key = k
		t.Compare = append(t.Compare, x)
	}
	switch c.w.rng.IntN(9) {
	case 0, 1, 2:
		t.Success = []*pb.RequestOp{putOp(k, o.value)}
	case 3:
		compare(&pb.Compare{Target: pb.Compare_MOD, Result: pb.Compare_EQUAL, TargetUnion: &pb.Compare_ModRevision{ModRevision: int64(c.lastRev[o.key])}})
		t.Success, t.Failure = []*pb.RequestOp{putOp(k, o.value)}, []*pb.RequestOp{getOp(k)}
	case 4:
		// A guess at a number that a pending version may get: E4 must wait for it.
		guess := int64(c.mark.Rev) + int64(c.w.rng.IntN(4))
		compare(&pb.Compare{Target: pb.Compare_MOD, Result: pb.Compare_LESS, TargetUnion: &pb.Compare_ModRevision{ModRevision: guess}})
		t.Success, t.Failure = []*pb.RequestOp{putOp(k, o.value)}, []*pb.RequestOp{getOp(k)}
	case 5:
		compare(&pb.Compare{Target: pb.Compare_VERSION, Result: pb.Compare_GREATER, TargetUnion: &pb.Compare_Version{Version: int64(c.w.rng.IntN(3))}})
		t.Success, t.Failure = []*pb.RequestOp{deleteOp(k), getOp(other)}, []*pb.RequestOp{getOp(k)}
	case 6:
		t.Success = []*pb.RequestOp{deleteOp(k)}
	case 7:
		first := o.key / keysPerRegion * keysPerRegion
		t.Success = []*pb.RequestOp{rangeOp(key(first), key(first+keysPerRegion)), putOp(k, o.value)}
	case 8:
		t.Success = []*pb.RequestOp{putOp(k, o.value), getOp(k)}
		if !bytes.Equal(other, k) {
			t.Success = append(t.Success, putOp(other, o.value))
		}
	}
	return t
}

// answer takes a replica's reply.
func (c *checker) answer(id pdpb.RegionID, o *op, resp *pb.TxnResponse, err error) {
	if o.done {
		c.w.fail("op %d was answered twice", o.id)
		return
	}
	var nr *regionpb.Error
	if errors.As(err, &nr) && nr.Code == regionpb.LeaseNotRegistered && len(o.tokens) == 0 {
		c.register(id, o, nr.Token)
		return
	}
	o.done, o.resp, o.err = true, resp, err
	if i := slices.Index(c.open, o); i >= 0 {
		c.open = slices.Delete(c.open, i, i+1)
	}
	if err != nil {
		var re *regionpb.Error
		switch {
		case !errors.As(err, &re):
			c.w.fail("op %d: %v", o.id, err)
		case re.NotExecuted():
			c.w.stats.Refused++
		default:
			c.w.stats.Unknown++
		}
		return
	}
	c.w.stats.Acked++
	rev := mvcc.Revision(resp.GetHeader().GetRevision())
	c.w.event("op %d acked at %d", o.id, rev)
	if rev < o.sentRev {
		c.w.fail("I2: op %d has revision %d, and %d was acknowledged before it was sent", o.id, rev, o.sentRev)
		return
	}
	wrote := c.wrote(o, rev)
	if wrote && rev <= o.sentRev {
		c.w.fail("I2: op %d wrote revision %d, and %d was acknowledged before it was sent", o.id, rev, o.sentRev)
		return
	}
	if !wrote {
		c.maxAcked = max(c.maxAcked, rev)
		return
	}
	a := c.writes[rev]
	if a.region != id {
		c.w.fail("I3: op %d of region %d has revision %d of region %d", o.id, id, rev, a.region)
		return
	}
	if a.fence < o.fence {
		c.w.fail("F2: op %d was sent after fence %d was acknowledged and took effect under %d", o.id, o.fence, a.fence)
	}
	c.durable(o, a)
	c.maxAcked = max(c.maxAcked, rev)
	c.maxCut = max(c.maxCut, a.cut)
	c.lastRev[o.key] = max(c.lastRev[o.key], rev)
}

// wrote says whether the op's own effects are the ones of the revision. Values are unique, and a
// deletion that is alone at its revision is recognised by its answer.
func (c *checker) wrote(o *op, rev mvcc.Revision) bool {
	for _, r := range o.resp.GetResponses() {
		if r.GetResponsePut() != nil || r.GetResponseDeleteRange().GetDeleted() > 0 {
			return c.writes[rev] != nil
		}
	}
	return false
}

// durable checks I8.
func (c *checker) durable(o *op, a *appliedEntry) {
	region, cut := 0, 0
	rec := c.cuts[a.cut]
	for _, s := range c.w.stores {
		if holds(s, a.region, a.index, a.term) {
			region++
		}
		if holds(s, c.w.orderGroup(), rec.index, rec.term) {
			cut++
		}
	}
	if region <= len(c.w.stores)/2 {
		c.w.fail("I8: op %d is acknowledged, its entry %d/%d of region %d is durable on %d stores", o.id, a.index, a.term, a.region, region)
	}
	if cut <= len(c.w.stores)/2 {
		c.w.fail("I8: op %d is acknowledged, its cut %d at %d/%d is durable on %d stores", o.id, a.cut, rec.index, rec.term, cut)
	}
}

// holds says whether a crash of the store now would keep an entry or state that contains it.
func holds(s *store, id raftid.GroupID, index, term uint64) bool {
	log := s.disk.Log(id)
	if log.DurableIndex() < index {
		return false
	}
	if log.Start().Index >= index {
		return true
	}
	t, ok := log.TermAt(index)
	return ok && t == term
}
