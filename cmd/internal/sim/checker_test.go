package sim

import (
	"strings"
	"testing"
	"testing/cryptotest"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/pd"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/region/regionpb"
	"braid/watchsvc"
)

// TestCheckersCanFail plants one wrong fact in an otherwise clean run for each invariant, and
// wants its checker to speak.
func TestCheckersCanFail(t *testing.T) {
	for _, c := range []struct {
		name, want string
		plant      func(t *testing.T, w *World)
	}{
		{"a cut that skips a revision", "I1", func(t *testing.T, w *World) {
			m := w.check.mark
			m.Cut, m.Rev = m.Cut+1, m.Rev+1
			w.check.cutApplied(w.stores[0], 1e6, 1e6, &pd.Entry{Cut: &order.CutProposal{}}, pd.Result{Cut: &order.CutResult{Mark: m}})
		}},
		{"an item that begins at another's revision", "I1", func(t *testing.T, w *World) {
			m := w.check.mark
			m.Cut, m.Rev = m.Cut+1, m.Rev+2
			it := pdpb.Item{Region: w.region(0).ID, N: 1e6, Cut: m.Cut, Base: m.Rev - 1, Count: 2}
			w.check.cutApplied(w.stores[0], 1e6, 1e6, &pd.Entry{Cut: &order.CutProposal{}}, pd.Result{Cut: &order.CutResult{Mark: m, Items: []pdpb.Item{it}}})
		}},
		{"a revision without effects", "I1", func(t *testing.T, w *World) {
			delete(w.check.effects, w.check.mark.Rev/2)
			w.check.final()
		}},
		{"an answer below an acknowledged one", "I2", func(t *testing.T, w *World) {
			o := answered(t, w)
			o.done, o.sentRev = false, mvcc.Revision(o.resp.Header.Revision)+1
			w.check.answer(w.region(o.key/keysPerRegion).ID, o, o.resp, nil)
		}},
		{"a read point below an acknowledged write", "I2", func(t *testing.T, w *World) {
			w.check.pointAt(&read{sentRev: w.check.mark.Rev + 1}, pdpb.ReadPoint{Cut: w.check.mark.Cut, Rev: w.check.mark.Rev, Floor: w.check.mark.Floor})
		}},
		{"a cut that two members see differently", "I3", func(t *testing.T, w *World) {
			m := w.check.mark
			w.check.cutApplied(w.stores[0], 1e6, 1e6, &pd.Entry{Cut: &order.CutProposal{}}, pd.Result{Cut: &order.CutResult{Mark: m}})
		}},
		{"a version that one engine has not", "I3", func(t *testing.T, w *World) {
			b := w.stores[1].engine.NewBatch()
			v := mvcc.Version{Key: key(0), Mod: w.check.mark.Rev, Sub: 1000, Create: 1, Version: 77, Value: []byte("x")}
			if err := b.Put(&v); err != nil {
				t.Fatal(err)
			}
			if err := b.Commit(); err != nil {
				t.Fatal(err)
			}
			w.check.final()
		}},
		{"a read that found another value", "I4", func(t *testing.T, w *World) {
			for _, r := range w.check.reads {
				for _, p := range r.got {
					for k, v := range p {
						v.version++
						p[k] = v
						w.check.final()
						return
					}
				}
			}
		}},
		{"a read served by an incomplete replica", "I4", func(t *testing.T, w *World) {
			id := w.region(0).ID
			items := w.check.newest[id]
			next := items[len(items)-1]
			next.N++
			w.check.newest[id] = append(items, next)
			w.check.checkComplete(&read{point: pdpb.ReadPoint{Cut: w.check.mark.Cut}}, w.stores[0], w.stores[0].groups[id])
		}},
		{"a serializable read that goes back", "I4", func(t *testing.T, w *World) {
			for s := range w.stores {
				for i := range w.cfg.Regions {
					w.check.seen[sight{s, i, w.stores[s].life}] = w.check.mark.Rev + 1
				}
			}
			for range 20 { // whichever replica it is that is asked, and may not be complete
				w.check.serializable()
			}
		}},
		{"an item applied that no cut holds", "I5", func(t *testing.T, w *World) {
			id := w.region(0).ID
			it := pdpb.Item{Region: id, N: 1e6, Cut: w.check.mark.Cut + 1}
			w.check.applied(w.stores[0], id, 1e6, 1, &it, &regionpb.Entry{}, w.check.mark.Rev, false)
		}},
		{"an entry that two replicas see differently", "I6", func(t *testing.T, w *World) {
			for _, a := range w.check.entries {
				it := w.check.items[itemKey{a.region, a.item}]
				w.check.applied(w.stores[0], a.region, a.index, a.term+1, &it, &regionpb.Entry{Fence: 1e6}, a.base, a.void)
				return
			}
		}},
		{"an event that a watch did not get", "I7", func(t *testing.T, w *World) {
			a := eventful(t, w)
			a.got = a.got[1:]
			w.check.final()
		}},
		{"an event of a watch that never was", "I7", func(t *testing.T, w *World) {
			a := eventful(t, w)
			e := a.got[len(a.got)-1]
			e.Kv = &mvccpb.KeyValue{Key: key(99), ModRevision: e.Kv.ModRevision}
			w.check.final()
		}},
		{"an event that a watch gets twice", "I7", func(t *testing.T, w *World) {
			a := eventful(t, w)
			a.created, a.over, a.stale = true, false, false
			st := &watchStream{store: w.stores[0], watches: []*watch{a}}
			w.check.watched(st, &watchsvc.Response{Tag: a, Revision: w.check.mark.Rev, Events: a.got[len(a.got)-1:]})
		}},
		{"an event that a progress response precedes", "I7", func(t *testing.T, w *World) {
			a := &watch{to: keysPerRegion, begin: 1, next: 1, created: true}
			st := &watchStream{store: w.stores[0], watches: []*watch{a}}
			w.check.watched(st, &watchsvc.Response{ID: watchsvc.AllWatchers, Revision: 5})
			kv := &mvccpb.KeyValue{Key: key(0), ModRevision: 5}
			w.check.watched(st, &watchsvc.Response{Tag: a, Revision: 6, Events: []*mvccpb.Event{{Kv: kv}}})
		}},
		{"progress that goes back", "I7", func(t *testing.T, w *World) {
			st := &watchStream{store: w.stores[0]}
			w.check.watched(st, &watchsvc.Response{ID: watchsvc.AllWatchers, Revision: 6})
			w.check.watched(st, &watchsvc.Response{ID: watchsvc.AllWatchers, Revision: 5})
		}},
		{"a watch that is canceled though nothing it needs is compacted", "I7", func(t *testing.T, w *World) {
			a := &watch{to: keysPerRegion, begin: 9, next: 9, created: true}
			st := &watchStream{store: w.stores[0], watches: []*watch{a}}
			w.check.watched(st, &watchsvc.Response{Tag: a, Canceled: true, Compacted: 9})
		}},
		{"a floor that no cut has ordered", "I5", func(t *testing.T, w *World) {
			w.check.mark.Floor = -5
			w.check.checkFloor(w.stores[0], w.stores[0].groups[w.region(0).ID])
		}},
		{"a lease that ends before its time", "L5", func(t *testing.T, w *World) {
			id := int64(1e6)
			w.check.leases.byID[id] = &lease{id: id, grant: 1, recorded: true, promised: w.leaseTime() + 1}
			w.check.leaseRecorded([]regionpb.RecordEffect{{Key: regionpb.LeaseKey(id)}}, w.check.mark.Rev, false)
		}},
		{"a lease that is there again", "L2", func(t *testing.T, w *World) {
			l := endedLease(t, w)
			rec := regionpb.LeaseRecord{Grant: l.grant, TTL: l.ttl}
			w.check.leaseRecorded([]regionpb.RecordEffect{{Key: regionpb.LeaseKey(l.id), Value: rec.Append(nil)}}, w.check.mark.Rev, false)
		}},
		{"a lease that ends twice", "L7", func(t *testing.T, w *World) {
			w.check.leaseRecorded([]regionpb.RecordEffect{{Key: regionpb.LeaseKey(endedLease(t, w).id)}}, w.check.mark.Rev, false)
		}},
		{"a key that outlives its lease", "L2", func(t *testing.T, w *World) {
			endedLease(t, w).end--
			w.check.final()
		}},
		{"keys of a lease that are not deleted at its end's revision", "L2", func(t *testing.T, w *World) {
			// At that of a put, which is not the end of any.
			for rev := w.check.mark.Rev; rev > 1; rev-- {
				if w.check.effects[rev][0].Delete {
					continue
				}
				for _, l := range w.check.leases.all {
					if l.gone && l.recorded {
						l.end, l.took = rev, true
						w.check.final()
						return
					}
				}
			}
		}},
		{"keys that a lease has not", "I4", func(t *testing.T, w *World) {
			w.check.leases.looks = append(w.check.leases.looks, leaseLook{id: 1, rev: w.check.mark.Rev, keys: []string{"x"}})
			w.check.final()
		}},
		{"a watch that stays with a store that lags", "W2", func(t *testing.T, w *World) {
			w.aim.lag = 500
			for _, a := range w.check.watches.open {
				if a.st != nil && a.created {
					a.st.idle, a.lag = false, lag{a.st, w.check.mark.Rev + 1, -1000}
				}
			}
			w.check.checkLag()
		}},
		{"a command that nobody answers", "PROGRESS", func(t *testing.T, w *World) {
			w.quiet = true
			w.check.open = append(w.check.open, &op{begun: w.now - quietSettle - progressMax - 1})
			w.check.checkProgress()
		}},
		{"a transaction that does not get on", "PROGRESS", func(t *testing.T, w *World) {
			w.quiet = true
			w.check.txns.live = append(w.check.txns.live, &crossTxn{begun: w.now - quietSettle - progressMax - 1})
			w.check.checkProgress()
		}},
		{"an end of a lease that does not get on", "PROGRESS", func(t *testing.T, w *World) {
			w.quiet = true
			w.check.leases.ends = append(w.check.leases.ends, &leaseEnd{begun: w.now - quietSettle - progressMax - 1})
			w.check.checkProgress()
		}},
		{"an acknowledged write that two stores have lost", "I8", func(t *testing.T, w *World) {
			o := answered(t, w)
			a := w.check.writes[mvcc.Revision(o.resp.Header.Revision)]
			for _, s := range w.stores[:2] {
				s.disk, s.engine = newStore(w, s.i).disk, newStore(w, s.i).engine
			}
			w.check.durable(o, a)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cryptotest.SetGlobalRandom(t, 3)
			w := newWorld(Config{Seed: 3, Steps: 1200})
			w.guard(func() { w.steps(1200); w.heal() })
			if w.err != nil {
				t.Fatal(w.err)
			}
			c.plant(t, w)
			if w.err == nil || !strings.Contains(w.err.Error(), c.want+":") {
				t.Errorf("%s was found as %v", c.want, w.err)
			}
		})
	}
}

// eventful is a watch that got events.
func eventful(t *testing.T, w *World) *watch {
	for _, a := range w.check.watches.all {
		if len(a.got) > 0 {
			return a
		}
	}
	t.Fatal("no watch got an event")
	return nil
}

// endedLease is a lease that ended with keys.
func endedLease(t *testing.T, w *World) *lease {
	for _, l := range w.check.leases.all {
		if l.gone && l.recorded && l.took && w.check.leases.byID[l.id] == l {
			return l
		}
	}
	t.Fatal("no lease ended with keys")
	return nil
}

// answered is an acknowledged write.
func answered(t *testing.T, w *World) *op {
	for _, o := range w.check.ops {
		if o.done && o.err == nil && w.check.wrote(o, mvcc.Revision(o.resp.GetHeader().GetRevision())) {
			return o
		}
	}
	t.Fatal("no write was acknowledged")
	return nil
}
