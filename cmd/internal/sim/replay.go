package sim

import (
	"bytes"
	"fmt"

	"braid/mvcc"
	"braid/region/regionpb"
)

// version is a key's state from a revision on.
type version struct {
	rev mvcc.Revision
	kv  kv
}

// history is every key's versions, made by playing all effects in revision order on an empty map.
type history map[string][]version

func (h history) at(k []byte, rev mvcc.Revision) kv {
	vs := h[string(k)]
	for i := len(vs) - 1; i >= 0; i-- {
		if vs[i].rev <= rev {
			return vs[i].kv
		}
	}
	return kv{}
}

// final replays everything that was applied and holds answers and reads against it.
func (c *checker) final() {
	if c.w.err != nil {
		return
	}
	h := c.replay()
	if c.w.err != nil {
		return
	}
	for _, r := range c.reads {
		for i, got := range r.got {
			if err := c.samePage(h, i, r.rev, got); err != nil {
				c.w.fail("I4: read %d at %v, revision %d: %v", r.id, r.point, r.rev, err)
				return
			}
		}
	}
	for _, l := range c.locals {
		if err := c.samePage(h, l.region, l.rev, l.got); err != nil {
			c.w.fail("I4: serializable read at store %d, revision %d: %v", l.store, l.rev, err)
			return
		}
	}
	for _, o := range c.ops {
		if err := c.checkOp(h, o); err != nil {
			c.w.fail("op %d (%v): %v", o.id, o.txn, err)
			return
		}
	}
	if err := c.checkLeases(h); err != nil {
		c.w.fail("%v", err)
		return
	}
	if err := c.checkTxns(h); err != nil {
		c.w.fail("%v", err)
		return
	}
	if err := c.checkWatches(h); err != nil {
		c.w.fail("%v", err)
		return
	}
	for _, s := range c.w.stores {
		if err := c.checkEngine(h, s); err != nil {
			c.w.fail("store %d: %v", s.i, err)
			return
		}
	}
}

// samePage compares what a read found of a region with the state at its revision.
func (c *checker) samePage(h history, region int, rev mvcc.Revision, got page) error {
	n := 0
	for k := region * keysPerRegion; k < (region+1)*keysPerRegion; k++ {
		want, have := h.at(key(k), rev), got[string(key(k))]
		if !same(want, have) {
			return fmt.Errorf("%s was found as %+v, the state was %+v", key(k), have, want)
		}
		if have.version > 0 {
			n++
		}
	}
	if n != len(got) {
		return fmt.Errorf("%d keys were found, %d exist", len(got), n)
	}
	return nil
}

// replay plays the effects in order; I1 over the whole run.
func (c *checker) replay() history {
	h := history{}
	for rev := mvcc.Revision(2); rev <= c.mark.Rev; rev++ {
		fx, ok := c.effects[rev]
		if !ok {
			c.w.fail("I1: nobody has revision %d of %d", rev, c.mark.Rev)
			return nil
		}
		for i := range fx {
			f := &fx[i]
			k := string(f.Key)
			before := h.at(f.Key, rev)
			if before.lease != 0 && before.lease != f.Lease && f.Detach != before.lease {
				c.w.fail("revision %d moves %s from lease %d and says that it was %d", rev, k, before.lease, f.Detach)
			}
			if f.Delete {
				if before.version == 0 {
					c.w.fail("revision %d deletes %s, which is not there", rev, k)
				}
				h[k] = append(h[k], version{rev: rev})
				continue
			}
			now := kv{value: f.Value, create: before.create, mod: int64(rev), version: before.version + 1, lease: f.Lease}
			if before.version == 0 {
				now.create = int64(rev)
			}
			if f.Version != now.version || (f.CreateKind == regionpb.CreateNew) != (before.version == 0) {
				c.w.fail("revision %d puts version %d of %s (%+v), the state before was %+v: it was evaluated on another state", rev, f.Version, k, f, before)
			}
			h[k] = append(h[k], version{rev, now})
		}
	}
	if n := len(c.effects); n != int(c.mark.Rev)-1 {
		c.w.fail("I1: %d revisions have effects, the order gave out %d", n, c.mark.Rev-1)
	}
	return h
}

func same(a, b kv) bool {
	return bytes.Equal(a.value, b.value) && a.create == b.create && a.mod == b.mod && a.version == b.version && a.lease == b.lease
}

// checkEngine compares a store's versions with the replay. Those that a collection may have
// removed may be missing, but not differ.
func (c *checker) checkEngine(h history, s *store) error {
	if err := s.engine.CheckIndex(); err != nil {
		return err
	}
	for i := range c.w.cfg.Regions {
		floor := max(1, s.groups[c.w.region(i).ID].replica.Applied().Floor)
		data, _ := s.engine.ExportSpan(0, c.w.region(i).Span)
		have := map[string]map[mvcc.Revision]kv{}
		for v := range data.All() {
			m := have[string(v.Key)]
			if m == nil {
				m = map[mvcc.Revision]kv{}
				have[string(v.Key)] = m
			}
			m[v.Mod] = kv{}
			if !v.Tombstone() {
				m[v.Mod] = kv{v.Value, int64(v.Create), int64(v.Mod), v.Version, v.Lease}
			}
		}
		for k := i * keysPerRegion; k < (i+1)*keysPerRegion; k++ {
			name := string(key(k))
			versions, n := h[name], 0
			for j, want := range versions {
				got, ok := have[name][want.rev]
				superseded := want.rev <= floor && (j+1 < len(versions) && versions[j+1].rev <= floor || want.kv.version == 0)
				switch {
				case ok && !same(got, want.kv):
					return fmt.Errorf("I3: %s of revision %d is %+v, it was %+v", name, want.rev, got, want.kv)
				case ok:
					n++
				case !superseded:
					return fmt.Errorf("I3: %s of revision %d is missing, the floor is %d", name, want.rev, floor)
				}
			}
			if n != len(have[name]) {
				return fmt.Errorf("I3: %s has %d versions, %d of them are known", name, len(have[name]), n)
			}
		}
	}
	return nil
}
