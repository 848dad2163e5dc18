package sim

import (
	"strings"
	"testing"
	"testing/cryptotest"

	"braid/mvcc"
	"braid/pd"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/region/regionpb"
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
			v := mvcc.Version{Key: key(0), Mod: w.check.mark.Rev, Sub: 5, Create: 1, Version: 77, Value: []byte("x")}
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
			for s := range stores {
				for i := range w.cfg.Regions {
					w.check.seen[sight{s, i, w.stores[s].life}] = w.check.mark.Rev + 1
				}
			}
			w.check.serializable()
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
