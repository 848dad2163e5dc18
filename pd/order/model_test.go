package order

import (
	"fmt"
	"maps"
	"math/rand"
	"slices"
	"testing"

	"braid/mvcc"
	"braid/pd/pdpb"
)

// modelEntry is one entry of a modelled region: what it consumes and its stamp.
type modelEntry struct {
	consumes uint64
	stamp    pdpb.Fence
	term     uint64
	prepare  *pdpb.Fact // its index is set when it is reported
}

// modelRegion knows a region's whole log, and which entries have their place.
type modelRegion struct {
	log      []modelEntry // entry i is at index i+1
	ordered  uint64
	items    []pdpb.Item
	sealed   uint64 // what reports may claim
	reported []pdpb.Report
}

// model is the stupid order: it recounts every entry of every region for every cut.
type model struct {
	regions  []modelRegion // region i has id i+2
	rev      mvcc.Revision
	fence    pdpb.Fence
	prepared map[pdpb.AttemptID]map[pdpb.RegionID]pdpb.Fact // ordered and not void
	ended    map[pdpb.AttemptID]bool
}

// report makes the report a replica would make that applied the items through item number have
// and knows the log through upto.
func (m *model) report(id int, have int, upto uint64, sealed uint64) pdpb.Report {
	g := &m.regions[id]
	r := pdpb.Report{Region: pdpb.RegionID(id + 2), Sealed: sealed, Upto: upto}
	if have > 0 {
		r.From = g.items[have-1].Upto
	}
	r.Upto = max(r.Upto, r.From)
	for i := uint64(1); i <= r.Upto; i++ {
		e := g.log[i-1]
		r.Cum += e.consumes
		r.UptoTerm = e.term
		if i <= r.From {
			continue
		}
		if n := len(r.Runs); n > 0 && r.Runs[n-1].Stamp == e.stamp {
			r.Runs[n-1].Index, r.Runs[n-1].Cum = i, r.Cum
		} else {
			r.Runs = append(r.Runs, pdpb.Run{Index: i, Stamp: e.stamp, Cum: r.Cum})
		}
		if e.prepare != nil {
			f := *e.prepare
			f.Index, f.Stamp = i, e.stamp
			r.Facts = append(r.Facts, f)
		}
	}
	return r
}

// cut orders everything that the parts name, and returns the items by recounting.
func (m *model) cut(cut pdpb.Cut, parts []pdpb.Report, events []Event) (items []pdpb.Item) {
	var late []pdpb.RegionID
	var lateOf []pdpb.AttemptID
	for _, p := range parts {
		g := &m.regions[p.Region-2]
		if p.Upto <= g.ordered {
			continue
		}
		it := pdpb.Item{
			Region: p.Region, N: uint64(len(g.items) + 1), Cut: cut, Upto: p.Upto, UptoTerm: g.log[p.Upto-1].term,
			Base: m.rev, Fence: m.fence,
		}
		for i, e := range g.log[:p.Upto] {
			it.Cum += e.consumes
			if uint64(i) >= g.ordered && e.stamp >= m.fence {
				it.Count += e.consumes
				if f := e.prepare; f != nil {
					if m.prepared[f.Attempt] == nil {
						m.prepared[f.Attempt] = map[pdpb.RegionID]pdpb.Fact{}
					}
					m.prepared[f.Attempt][p.Region] = *f
					if m.ended[f.Attempt] {
						delete(m.prepared[f.Attempt], p.Region)
						late = append(late, pdpb.RegionID(p.Region))
						lateOf = append(lateOf, f.Attempt)
					}
				}
			}
		}
		m.rev += mvcc.Revision(it.Count)
		g.ordered = p.Upto
		g.items = append(g.items, it)
		items = append(items, it)
	}
	tell := func(id pdpb.RegionID, d pdpb.Decision) {
		g := &m.regions[id-2]
		i := slices.IndexFunc(items, func(it pdpb.Item) bool { return it.Region == id })
		if i < 0 {
			it := pdpb.Item{Region: id, N: uint64(len(g.items) + 1), Cut: cut, Upto: g.ordered, Base: m.rev, Fence: m.fence}
			for _, e := range g.log[:g.ordered] {
				it.Cum += e.consumes
				it.UptoTerm = e.term
			}
			i = len(items)
			items, g.items = append(items, it), append(g.items, it)
		}
		items[i].Decisions = append(items[i].Decisions, d)
		g.items[len(g.items)-1] = items[i]
	}
	end := func(id pdpb.AttemptID, d pdpb.Decision) {
		for _, r := range slices.Sorted(maps.Keys(m.prepared[id])) {
			tell(r, d)
		}
		m.ended[id] = true
	}
	for _, e := range events {
		if e.Kind == EventAbort && !m.ended[e.Attempt] {
			end(e.Attempt, pdpb.Decision{Attempt: e.Attempt})
		}
	}
	for i, id := range late {
		tell(id, pdpb.Decision{Attempt: lateOf[i]})
	}
	for _, id := range slices.Sorted(maps.Keys(m.prepared)) {
		facts, writes := m.prepared[id], false
		all := len(facts) > 0 && !m.ended[id]
		for _, f := range facts {
			all = all && len(facts) == len(f.Participants)
			writes = writes || f.Writes
		}
		if all {
			if writes {
				m.rev++
			}
			end(id, pdpb.Decision{Attempt: id, Commit: true, Rev: m.rev})
		}
	}
	slices.SortFunc(items, func(a, b pdpb.Item) int { return int(a.Region) - int(b.Region) })
	return items
}

// TestCoreAgainstModel drives the core with reports as they may come: repeated, delayed,
// overlapping, from replicas that have applied little; it must order exactly what the model does.
func TestCoreAgainstModel(t *testing.T) {
	for seed := range int64(60) {
		if err := coreAgainstModel(seed, 400, Mutants{}); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

// TestModelCatches shows that the test above can fail.
func TestModelCatches(t *testing.T) {
	for name, mut := range map[string]Mutants{"delta": {Delta: true}, "no fence": {NoFence: true}, "forget all": {ForgetAll: true},
		"decisions first": {DecisionsFirst: true}} {
		caught := 0
		for seed := range int64(10) {
			if coreAgainstModel(seed, 400, mut) != nil {
				caught++
			}
		}
		if caught == 0 {
			t.Errorf("mutant %q was not noticed", name)
		}
	}
}

func coreAgainstModel(seed int64, steps int, mut Mutants) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	rnd := rand.New(rand.NewSource(seed))
	m := &model{regions: make([]modelRegion, 1+rnd.Intn(6)), rev: FirstRevision,
		prepared: map[pdpb.AttemptID]map[pdpb.RegionID]pdpb.Fact{}, ended: map[pdpb.AttemptID]bool{}}
	attempt := 0
	todo := map[pdpb.RegionID][]pdpb.Fact{} // what participants have not prepared
	core, member := NewCore(), NewCore()
	core.Mutants, member.Mutants = mut, mut
	for i := range m.regions {
		d := &pdpb.Descriptor{ID: pdpb.RegionID(i + 2)}
		core.AddRegion(d)
		member.AddRegion(d)
	}
	for step := range steps {
		p := &CutProposal{}
		for i := range m.regions {
			g := &m.regions[i]
			for range rnd.Intn(4) {
				e := modelEntry{consumes: uint64(rnd.Intn(3)), stamp: m.fence, term: uint64(1 + step/50)}
				if rnd.Intn(3) == 0 && len(g.log) > 0 {
					e.stamp = g.log[len(g.log)-1].stamp // its leader has not heard of a raise
				}
				if rnd.Intn(6) == 0 { // a new attempt, or one that somebody else began
					if attempt == 0 || rnd.Intn(2) == 0 {
						attempt++
						f := pdpb.Fact{Attempt: pdpb.AttemptID(attempt)}
						for id := range m.regions {
							if rnd.Intn(3) > 0 {
								f.Participants = append(f.Participants, pdpb.RegionID(id+2))
							}
						}
						for _, id := range f.Participants {
							todo[id] = append(todo[id], f)
						}
					}
					id := pdpb.RegionID(i + 2)
					if k := len(todo[id]); k > 0 {
						j := rnd.Intn(k)
						f := todo[id][j]
						todo[id] = slices.Delete(todo[id], j, j+1)
						f.Writes = rnd.Intn(2) == 0
						e.prepare, e.consumes = &f, 0
					}
				}
				g.log = append(g.log, e)
			}
			g.sealed += uint64(rnd.Intn(len(g.items) - int(g.sealed) + 1))
			// A fresh report, and one from any time before.
			g.reported = append(g.reported, m.report(i, rnd.Intn(len(g.items)+1), uint64(len(g.log)), g.sealed))
			switch rnd.Intn(3) {
			case 0:
				p.Parts = append(p.Parts, g.reported[len(g.reported)-1])
			case 1:
				p.Parts = append(p.Parts, g.reported[rnd.Intn(len(g.reported))])
			}
		}
		if mut.Delta {
			for i := range p.Parts {
				pos, _ := core.Position(p.Parts[i].Region)
				p.Parts[i].Cum -= min(pos.Cum, p.Parts[i].Cum)
				if rnd.Intn(4) == 0 {
					p.Parts[i].Cum++ // two cuts in flight named the same entry
				}
			}
		}
		if rnd.Intn(10) == 0 {
			p.Events = append(p.Events, Event{Kind: EventRaiseFence})
		}
		for rnd.Intn(4) == 0 && attempt > 0 {
			p.Events = append(p.Events, Event{Kind: EventAbort, Attempt: pdpb.AttemptID(1 + rnd.Intn(attempt))})
		}
		want := m.cut(core.Mark().Cut+1, p.Parts, p.Events)
		got := core.Apply(p)
		if len(got.Items) != len(want) {
			return fmt.Errorf("step %d: %d items, want %d\n%s%s", step, len(got.Items), len(want), p, &got)
		}
		for i := range want {
			if !got.Items[i].Equal(&want[i]) {
				return fmt.Errorf("step %d: item %v, want %v", step, &got.Items[i], &want[i])
			}
		}
		for _, e := range p.Events {
			if e.Kind == EventRaiseFence {
				m.fence++
			}
		}
		if got.Mark.Rev != m.rev || got.Mark.Fence != m.fence {
			return fmt.Errorf("step %d: mark %v, want revision %d, fence %d", step, got.Mark, m.rev, m.fence)
		}
		if len(got.Rejected) > 0 {
			return fmt.Errorf("step %d: rejected %v", step, got.Rejected)
		}
		// What is retained is what no part has shown to be sealed.
		for _, part := range p.Parts {
			g := &m.regions[part.Region-2]
			for _, it := range g.items {
				held := core.AppendItems(nil, it.Region, it.N-1)
				if it.N > g.sealed && (len(held) == 0 || !held[0].Equal(&it)) {
					return fmt.Errorf("step %d: item %v is lost", step, &it)
				}
			}
		}
		// Another member, or the same one after a restart from its checkpoint.
		member.Apply(p)
		if rnd.Intn(20) == 0 {
			if member, _, err = LoadState(member.AppendState(nil)); err != nil {
				return err
			}
			member.Mutants = mut
		}
		if a, b := core.String(), member.String(); a != b {
			return fmt.Errorf("step %d: members differ (I3):\n%s%s", step, a, b)
		}
	}
	return nil
}

func BenchmarkCut(b *testing.B) {
	for _, n := range []int{10, 1000, 100000} {
		b.Run(fmt.Sprintf("regions=%d", n), func(b *testing.B) {
			core := NewCore()
			for i := range n {
				core.AddRegion(&pdpb.Descriptor{ID: pdpb.RegionID(i + 2)})
			}
			moved := max(n/10, 1)
			p := &CutProposal{Parts: make([]pdpb.Report, moved)}
			runs := make([]pdpb.Run, moved)
			var upto uint64
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				upto++
				for i := range p.Parts {
					runs[i] = pdpb.Run{Index: upto, Cum: upto * 3}
					p.Parts[i] = pdpb.Report{
						Region: pdpb.RegionID(i*10 + 2), From: upto - 1, Upto: upto, UptoTerm: 1, Cum: upto * 3,
						Runs: runs[i : i+1], Sealed: upto - 1,
					}
				}
				core.Apply(p)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*moved), "ns/moved")
		})
	}
}

// BenchmarkCutter is the leader's side of the same: reports in, cut out, encoded and applied.
func BenchmarkCutter(b *testing.B) {
	for _, n := range []int{10, 1000, 100000} {
		b.Run(fmt.Sprintf("regions=%d", n), func(b *testing.B) {
			core, cutter := NewCore(), NewCutter(CutterOptions{}, Mutants{})
			for i := range n {
				core.AddRegion(&pdpb.Descriptor{ID: pdpb.RegionID(i + 2)})
			}
			cutter.Role(true, 1, 0)
			moved := max(n/10, 1)
			runs := make([]pdpb.Run, moved)
			var buf []byte
			b.ReportAllocs()
			b.ResetTimer()
			for k := range b.N {
				upto := uint64(k + 1)
				for i := range moved {
					runs[i] = pdpb.Run{Index: upto, Cum: upto * 3}
					cutter.Offer(core, &pdpb.Report{
						Region: pdpb.RegionID(i*10 + 2), From: upto - 1, Upto: upto, UptoTerm: 1, Cum: upto * 3,
						Runs: runs[i : i+1], Sealed: upto - 1,
					})
				}
				p, ok := cutter.Next(core, nil)
				if !ok {
					b.Fatal("no cut")
				}
				cutter.Proposed(p, upto)
				buf = p.Append(buf[:0])
				core.Apply(p)
				cutter.Applied(upto)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*moved), "ns/moved")
			b.ReportMetric(float64(len(buf)), "cut-bytes")
		})
	}
}
