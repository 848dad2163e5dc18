package sim

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/pd"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/region/regionpb"
)

// checker holds what happens against the invariants:
//
//	I1  revisions are consecutive: replay() over what was applied, and every cut
//	I2  real time: an answer's place is after everything that was acknowledged before the request
//	I3  what a revision, an item, a cut means is the same on every replica and member, for ever
//	I4  a read at a revision returns exactly the state after it; and replicas serve it only when
//	    they are complete through its cut (S3)
//	I5  nothing is applied before a member of pd has applied its cut, and with exactly its item
//	I6  replicas of a region apply the same entries in the same order under the same items
//	I8  what is acknowledged is durable on a quorum of its region, and its cut on one of pd
//
// and, beyond them: answers equal those of a sequential store (strict serializability), requests
// that were refused have no effect, fences void what was evaluated before them, and after healing
// everything that waits gets an answer, everything is applied and sealed, and the cluster falls
// silent.
type checker struct {
	w *World

	entries map[place]*appliedEntry
	items   map[itemKey]pdpb.Item // as pd's members made them
	newest  map[pdpb.RegionID][]pdpb.Item
	cuts    map[pdpb.Cut]cutRecord
	mark    pdpb.Mark                       // of the newest applied cut
	writes  map[mvcc.Revision]*appliedEntry // the entry that consumed a revision
	effects map[mvcc.Revision][]regionpb.Effect

	ops       []*op
	reads     []*read
	fences    []*fenceCall
	maxAcked  mvcc.Revision
	maxCut    pdpb.Cut // of an acknowledged write
	ackFence  pdpb.Fence
	lastRev   map[int]mvcc.Revision // newest acknowledged revision of a key
	nextValue int
}

type place struct {
	region pdpb.RegionID
	index  uint64
}

type itemKey struct {
	region pdpb.RegionID
	n      uint64
}

type appliedEntry struct {
	place
	term  uint64
	item  uint64
	cut   pdpb.Cut
	base  mvcc.Revision
	void  bool
	fence pdpb.Fence // stamp
	print string
}

type cutRecord struct {
	index, term uint64
	print       string
	mark        pdpb.Mark
}

func newChecker(w *World) *checker {
	return &checker{w: w, entries: map[place]*appliedEntry{}, items: map[itemKey]pdpb.Item{}, newest: map[pdpb.RegionID][]pdpb.Item{},
		cuts: map[pdpb.Cut]cutRecord{}, writes: map[mvcc.Revision]*appliedEntry{}, effects: map[mvcc.Revision][]regionpb.Effect{},
		lastRev: map[int]mvcc.Revision{}, mark: pdpb.Mark{Rev: 1, Floor: -1}}
}

func (c *checker) revision() mvcc.Revision { return c.mark.Rev }

// cutApplied is told each entry of pd's log by each member.
func (c *checker) cutApplied(s *store, index, term uint64, _ *pd.Entry, res pd.Result) {
	if res.Cut == nil {
		return
	}
	m := res.Cut.Mark
	print := res.Cut.String()
	if old, ok := c.cuts[m.Cut]; ok {
		if old.print != print || old.index != index || old.term != term {
			c.w.fail("I3: member %d applied cut %d at %d/%d as\n%s others at %d/%d as\n%s", s.i, m.Cut, index, term, print, old.index, old.term, old.print)
		}
		return
	}
	if m.Cut != c.mark.Cut+1 && !c.w.mut.pd.Delta {
		c.w.fail("I1: cut %d follows cut %d", m.Cut, c.mark.Cut)
	}
	given := mvcc.Revision(0)
	for _, it := range res.Cut.Items {
		if it.Base != c.mark.Rev+given {
			c.w.fail("I1: item %v begins at %d, the revisions before it end at %d", &it, it.Base, c.mark.Rev+given)
		}
		given += mvcc.Revision(it.Count)
		k := itemKey{it.Region, it.N}
		if old, ok := c.items[k]; ok && old != it {
			c.w.fail("I3: item %v was %v", &it, &old)
		}
		c.items[k] = it
		c.newest[it.Region] = append(c.newest[it.Region], it)
		c.w.stats.Items++
		if it.Upto > 0 && it.Fence < c.fenceBefore() {
			c.w.fail("F2: item %v was made under fence %d", &it, c.fenceBefore())
		}
	}
	if m.Rev != c.mark.Rev+given {
		c.w.fail("I1: cut %d ends at revision %d, its items at %d", m.Cut, m.Rev, c.mark.Rev+given)
	}
	c.mark = m
	c.cuts[m.Cut] = cutRecord{index, term, print, m}
	c.w.stats.Cuts++
	c.w.event("cut %v", m)
}

// fenceBefore is the fence that the newest applied cut left in force.
func (c *checker) fenceBefore() pdpb.Fence { return c.mark.Fence }

// applied is told each entry by each replica.
func (c *checker) applied(s *store, id pdpb.RegionID, index, term uint64, it *pdpb.Item, e *regionpb.Entry, rev mvcc.Revision, void bool) {
	a := &appliedEntry{place: place{id, index}, term: term, item: it.N, cut: it.Cut, base: rev, void: void, fence: e.Fence, print: fmt.Sprintf("%v", e.Commands)}
	if known, ok := c.items[itemKey{id, it.N}]; !ok || known != *it {
		c.w.fail("I5: store %d applied item %v, which no member of pd has made (known: %v)", s.i, it, &known)
		return
	}
	if fence := it.Fence; e.Fence < c.fenceOf(it) && !void {
		c.w.fail("F2: store %d region %d index %d of stamp %d took effect at cut %d, after fence %d was raised (item says %d)", s.i, id, index, e.Fence, it.Cut, c.fenceOf(it), fence)
		return
	}
	if old, ok := c.entries[a.place]; ok {
		if old.term != a.term || old.item != a.item || old.base != a.base || old.void != a.void || old.print != a.print {
			c.w.fail("I6: store %d applied region %d index %d as %+v, others as %+v", s.i, id, index, a, old)
		}
		return
	}
	c.entries[a.place] = a
	if void {
		c.w.stats.Void += len(e.Commands)
		return
	}
	for i := range e.Commands {
		fx := e.Commands[i].Effects
		if len(fx) == 0 {
			continue
		}
		rev++
		if old, ok := c.writes[rev]; ok {
			c.w.fail("I3: revision %d is region %d index %d and region %d index %d", rev, old.region, old.index, id, index)
			return
		}
		c.writes[rev] = a
		c.effects[rev] = cloneEffects(fx)
	}
}

// fenceOf is the fence in force for entries of an item: the one that the cut before left.
func (c *checker) fenceOf(it *pdpb.Item) pdpb.Fence { return c.cuts[it.Cut-1].mark.Fence }

func cloneEffects(fx []regionpb.Effect) []regionpb.Effect {
	out := slices.Clone(fx)
	for i := range out {
		out[i].Key, out[i].Value = bytes.Clone(out[i].Key), bytes.Clone(out[i].Value)
	}
	return out
}

// op is one request of a client.
type op struct {
	id      int
	key     int
	txn     *pb.TxnRequest
	value   []byte
	store   int
	life    uint64
	sentRev mvcc.Revision // acknowledged before it was sent
	fence   pdpb.Fence    // likewise
	done    bool
	lost    bool // its store crashed: nobody will answer
	resp    *pb.TxnResponse
	err     error
}

// clientOp sends a random transaction to a replica that may or may not lead.
func (c *checker) clientOp() {
	w := c.w
	k := w.rng.IntN(w.keys())
	d := w.regionOf(k)
	s := w.stores[w.rng.IntN(stores)]
	for range stores { // mostly to one that believes it leads
		if g := s.groups[d.ID]; s.up && g != nil && g.g.Status().Leading {
			break
		}
		if w.rng.IntN(8) == 0 {
			break
		}
		s = w.stores[(s.i+1)%stores]
	}
	g := s.groups[d.ID]
	if !s.up || g == nil || g.replica == nil {
		return
	}
	c.nextValue++
	o := &op{id: len(c.ops), key: k, store: s.i, life: s.life, sentRev: c.maxAcked, fence: c.ackFence, value: fmt.Appendf(nil, "v%d", c.nextValue)}
	o.txn = c.randomTxn(o)
	c.ops = append(c.ops, o)
	w.stats.Ops++
	g.replica.Write(&regionWrite{Txn: o.txn, Reply: func(resp *pb.TxnResponse, err error) { c.answer(s, d.ID, o, resp, err) }})
}

func putOp(k, v []byte) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: k, Value: v, PrevKv: true}}}
}

func getOp(k []byte) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: k}}}
}

func deleteOp(k []byte) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: k, PrevKv: true}}}
}

// randomTxn makes one of the shapes that expect() can evaluate: puts, deletes, compare-and-puts by
// mod revision, version and value, and writes of two keys of the region with reads between.
func (c *checker) randomTxn(o *op) *pb.TxnRequest {
	k := key(o.key)
	other := key(o.key/keysPerRegion*keysPerRegion + c.w.rng.IntN(keysPerRegion))
	t := &pb.TxnRequest{}
	compare := func(x *pb.Compare) {
		x.Key = k
		t.Compare = append(t.Compare, x)
	}
	switch c.w.rng.IntN(8) {
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
		t.Success = []*pb.RequestOp{putOp(k, o.value), getOp(k)}
		if !bytes.Equal(other, k) {
			t.Success = append(t.Success, putOp(other, o.value))
		}
	}
	return t
}

// answer takes a replica's reply.
func (c *checker) answer(s *store, id pdpb.RegionID, o *op, resp *pb.TxnResponse, err error) {
	if o.done {
		c.w.fail("op %d was answered twice", o.id)
		return
	}
	o.done, o.resp, o.err = true, resp, err
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
		if holds(s, raftid.PDGroup, rec.index, rec.term) {
			cut++
		}
	}
	if region <= stores/2 {
		c.w.fail("I8: op %d is acknowledged, its entry %d/%d of region %d is durable on %d stores", o.id, a.index, a.term, a.region, region)
	}
	if cut <= stores/2 {
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

// crashed gives up what waits at a store that is gone.
func (c *checker) crashed(s *store) {
	for _, o := range c.ops {
		if !o.done && o.store == s.i && o.life == s.life {
			o.lost = true
		}
	}
	for _, r := range c.reads {
		if r.store == s.i && r.life == s.life && !r.pointed {
			r.gone = true
		}
	}
}

// read is a linearizable read of some keys, served by whichever replicas are complete.
type read struct {
	id      int
	store   int
	life    uint64
	sentRev mvcc.Revision
	sentCut pdpb.Cut
	keys    []int
	got     map[int]*kv
	pointed bool
	gone    bool
	point   pdpb.ReadPoint
}

// kv is what a read found; nil value for no key.
type kv struct {
	value                []byte
	create, mod, version int64
}

func (c *checker) clientRead() {
	c.pollReads()
	open := 0
	for _, r := range c.reads {
		if !r.gone && len(r.got) < len(r.keys) {
			open++
		}
	}
	if open > 6 {
		return
	}
	s := c.w.stores[c.w.rng.IntN(stores)]
	if !s.up {
		return
	}
	r := &read{id: len(c.reads), store: s.i, life: s.life, sentRev: c.maxAcked, sentCut: c.maxCut, got: map[int]*kv{}}
	for range 3 {
		if k := c.w.rng.IntN(c.w.keys()); !slices.Contains(r.keys, k) {
			r.keys = append(r.keys, k)
		}
	}
	c.reads = append(c.reads, r)
	c.w.stats.Reads++
	s.client.ReadPointFunc(func(p pdpb.ReadPoint, err error) {
		if err != nil {
			r.gone = true
			return
		}
		r.pointed, r.point = true, p
		if p.Rev < r.sentRev || p.Cut < r.sentCut {
			c.w.fail("I2: read %d has point %v, and revision %d of cut %d was acknowledged before it was asked for", r.id, p, r.sentRev, r.sentCut)
		}
	})
}

// pollReads lets replicas serve what they can.
func (c *checker) pollReads() {
	for _, r := range c.reads {
		if !r.pointed || r.gone || len(r.got) == len(r.keys) {
			continue
		}
		for _, k := range r.keys {
			if r.got[k] != nil {
				continue
			}
			s := c.w.stores[c.w.rng.IntN(stores)]
			d := c.w.regionOf(k)
			g := s.groups[d.ID]
			if !s.up || g == nil || g.g.Status().Uninitialized || g.install != nil || g.g.Status().Installing {
				continue
			}
			c.serve(r, k, s, g)
		}
	}
}

func (c *checker) serve(r *read, k int, s *store, g *group) {
	resp, err := g.replica.TryRead(&regionpb.ReadRequest{Region: g.id, Epoch: 1, Cut: r.point.Cut, Rev: r.point.Rev, Span: mvcc.Key(key(k))})
	if err != nil {
		var re *regionpb.Error
		if !errors.As(err, &re) || re.Code != regionpb.NotComplete {
			c.w.fail("read %d at store %d: %v", r.id, s.i, err)
		}
		return
	}
	c.w.stats.Served++
	have := g.replica.Applied().Item
	for i := len(c.newest[g.id]) - 1; i >= 0; i-- {
		if it := c.newest[g.id][i]; it.Cut <= r.point.Cut {
			if it.N > have {
				c.w.fail("I4: store %d served read %d at %v of region %d with items through %d applied, and item %d is of cut %d (S3)", s.i, r.id, r.point, g.id, have, it.N, it.Cut)
			}
			break
		}
	}
	v := &kv{}
	if len(resp.KVs) == 1 {
		x := resp.KVs[0]
		v.value, v.create, v.mod, v.version = x.Value, x.CreateRevision, x.ModRevision, x.Version
	}
	r.got[k] = v
	c.w.event("read %d of %d at %v: %q@%d", r.id, k, r.point, v.value, v.mod)
}

// raiseFence has pd raise the fence, as a change of authorisations will.
func (c *checker) raiseFence(s *store) {
	if !s.up {
		return
	}
	c.w.stats.Fences++
	f := &fenceCall{store: s.i, life: s.life}
	c.fences = append(c.fences, f)
	s.client.ProposeFunc(raiseFence, func(r order.EventResult, err error) {
		f.done = true
		if err == nil {
			c.ackFence = max(c.ackFence, r.Mark.Fence)
		}
	})
}

// fenceCall is an administrator's call that raises the fence.
type fenceCall struct {
	store int
	life  uint64
	done  bool
}

// unrest says what keeps the healed cluster from being at rest, "" when nothing does.
func (c *checker) unrest() string {
	for _, o := range c.ops {
		if !o.done && !o.lost {
			return fmt.Sprintf("op %d waits at store %d", o.id, o.store)
		}
	}
	for _, f := range c.fences {
		if s := c.w.stores[f.store]; !f.done && s.life == f.life {
			return fmt.Sprintf("a fence asked for at store %d waits", f.store)
		}
	}
	for _, r := range c.reads {
		if !r.gone && len(r.got) < len(r.keys) {
			return fmt.Sprintf("read %d at %v waits", r.id, r.point)
		}
	}
	for i := range c.w.boot.Regions {
		id := c.w.boot.Regions[i].ID
		led := false
		for _, s := range c.w.stores {
			led = led || s.groups[id] != nil && s.groups[id].g.Status().Leading
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
		}
	}
	for _, s := range c.w.stores {
		if st := s.member.Status(); st.Mark != c.mark {
			return fmt.Sprintf("pd's member %d is at %v of %v", s.i, st.Mark, c.mark)
		} else if st.Held > 0 {
			return fmt.Sprintf("pd's member %d holds %d items", s.i, st.Held)
		}
	}
	return ""
}

// silence checks that a cluster at rest stays at rest: no entries, no cuts (B2).
func (c *checker) silence() {
	before := c.logs()
	cut := c.mark.Cut
	for range 60 {
		c.w.now += 1e6
		for _, s := range c.w.stores {
			s.disk.Flush(-1)
			c.w.work(s, 40)
			c.w.deliverSome(60)
			c.w.tick(s)
		}
	}
	if after := c.logs(); after != before || c.mark.Cut != cut {
		c.w.fail("B2: an idle cluster went on writing: logs %s, then %s; cut %d, then %d", before, after, cut, c.mark.Cut)
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
