package wal_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
	"braid/raftstore/wal"
)

// model is a group's log as plainly as it can be said. A value is never changed once made.
type model struct {
	hard  wal.HardState
	start wal.Position
	ents  []modelEntry // from start.Index+1 on
	ckpt  string       // printed
	tombs []raftid.ReplicaID
}

type modelEntry struct {
	term uint64
	data string
}

func (m model) last() uint64 { return m.start.Index + uint64(len(m.ents)) }

func (m model) term(i uint64) uint64 {
	if i == m.start.Index {
		return m.start.Term
	}
	return m.ents[i-m.start.Index-1].term
}

func (m model) truncated(p wal.Position) model {
	switch {
	case p.Index > m.last():
		m.start, m.ents = p, nil
	case p.Index > m.start.Index:
		m.ents = m.ents[p.Index-m.start.Index:]
		m.start = p
	}
	return m
}

// apply returns the state after a record.
func (m model) apply(r *wal.Record) model {
	if r.Destroy != 0 {
		tombs := slices.Clone(m.tombs)
		if !slices.Contains(tombs, r.Destroy) {
			tombs = append(tombs, r.Destroy)
			slices.Sort(tombs)
		}
		m = model{tombs: tombs}
	}
	if r.Reset != nil {
		m.start, m.ents = *r.Reset, nil
	}
	if r.Checkpoint != nil {
		m.ckpt = printCheckpoint(r.Checkpoint)
		m = m.truncated(r.Checkpoint.Position)
	}
	if len(r.Entries) > 0 {
		keep := r.Entries[0].GetIndex() - m.start.Index - 1
		m.ents = slices.Clone(m.ents[:keep])
		for _, e := range r.Entries {
			m.ents = append(m.ents, modelEntry{e.GetTerm(), string(e.GetData())})
		}
	}
	if r.Hard != nil {
		m.hard = *r.Hard
	}
	if i := min(r.Truncate, m.last()); i > m.start.Index {
		m = m.truncated(wal.Position{Index: i, Term: m.term(i)})
	}
	return m
}

func printCheckpoint(c *wal.Checkpoint) string {
	if c == nil {
		return ""
	}
	return fmt.Sprintf("%d/%d %v %s", c.Index, c.Term, c.ConfState.GetVoters(), c.Data)
}

// String identifies the state; long data is shortened but not to less than tells it apart.
func (m model) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "hard=%v start=%v ckpt=%q tombs=%v ents=", m.hard, m.start, m.ckpt, m.tombs)
	for _, e := range m.ents {
		fmt.Fprintf(&b, " %d:%.20s#%d", e.term, e.data, len(e.data))
	}
	return b.String()
}

// observe reads a group's whole state through the log's own methods.
func observe(l *wal.Log, id raftid.GroupID) (model, error) {
	g := l.Group(id)
	m := model{hard: g.Hard(), start: g.Start(), ckpt: printCheckpoint(g.Checkpoint()), tombs: l.Destroyed(id)}
	if g.FirstIndex() != m.start.Index+1 {
		return m, fmt.Errorf("group %d: first index %d after start %d", id, g.FirstIndex(), m.start.Index)
	}
	for lo := g.FirstIndex(); lo <= g.LastIndex(); {
		ents, err := g.Entries(lo, g.LastIndex()+1, 3000)
		if err != nil {
			return m, fmt.Errorf("group %d: %w", id, err)
		}
		if len(ents) == 0 {
			return m, fmt.Errorf("group %d: no entries at %d", id, lo)
		}
		for k, e := range ents {
			if term, ok := g.TermAt(lo + uint64(k)); !ok || term != e.GetTerm() || e.GetIndex() != lo+uint64(k) {
				return m, fmt.Errorf("group %d: entry %v at index %d, TermAt says %d", id, e, lo+uint64(k), term)
			}
			m.ents = append(m.ents, modelEntry{e.GetTerm(), string(e.GetData())})
		}
		lo += uint64(len(ents))
	}
	return m, nil
}

// workload makes random records for random groups and remembers every state a group was in.
type workload struct {
	rng    *rand.Rand
	groups int
	// record k (from 0) of the history turned group of[k] into states[k].
	of     []raftid.GroupID
	states []model
	now    map[raftid.GroupID]model
	serial int
	big    int // largest data
}

func newWorkload(rng *rand.Rand, groups int) *workload {
	return &workload{rng: rng, groups: groups, now: map[raftid.GroupID]model{}, big: 1500}
}

// next returns a record and whose it is. Groups with an id divisible by 4 are stragglers: they
// never truncate, and are small.
func (w *workload) next() (raftid.GroupID, *wal.Record) {
	id := raftid.GroupID(1 + w.rng.IntN(w.groups))
	m := w.now[id]
	straggler := id%4 == 0
	r := &wal.Record{}
	last, lastTerm := m.last(), m.term(m.last())
	w.serial++
	switch p := w.rng.IntN(100); {
	case p < 1:
		r.Destroy = raftid.ReplicaID(1 + w.rng.IntN(3))
		last, lastTerm = 0, 0
		m.start = wal.Position{}
	case p < 2:
		r.Reset = &wal.Position{Index: last + uint64(w.rng.IntN(200)), Term: lastTerm + 1}
		last, lastTerm, m.start = r.Reset.Index, r.Reset.Term, *r.Reset
	case p < 5 && last > 0:
		c := m.start.Index + uint64(w.rng.IntN(len(m.ents)+1))
		if c > 0 {
			r.Checkpoint = &wal.Checkpoint{
				Position:  wal.Position{Index: c, Term: m.term(c)},
				ConfState: &raftpb.ConfState{Voters: []uint64{uint64(w.rng.IntN(9))}},
				Data:      w.data(),
			}
			m.start = r.Checkpoint.Position
		}
	}
	if w.rng.IntN(10) < 7 && !(straggler && len(m.ents) > 20) {
		first := last + 1
		if room := last - m.start.Index; room > 0 && w.rng.IntN(8) == 0 {
			first -= uint64(w.rng.IntN(int(min(room, 6)) + 1))
		}
		term := lastTerm + uint64(w.rng.IntN(2))
		if term == 0 {
			term = 1
		}
		for n := range uint64(1 + w.rng.IntN(4)) {
			r.Entries = append(r.Entries, entry(first+n, term, string(w.data())))
			last = first + n
		}
	}
	if w.rng.IntN(2) == 0 {
		r.Hard = &wal.HardState{Term: lastTerm + 1, Vote: raftid.ReplicaID(w.rng.IntN(4)), Commit: uint64(w.serial)}
	}
	if !straggler && w.rng.IntN(4) == 0 {
		r.Truncate = m.start.Index + uint64(w.rng.IntN(int(last-m.start.Index)+3))
	}
	m = w.now[id].apply(r)
	w.now[id] = m
	w.of, w.states = append(w.of, id), append(w.states, m)
	return id, r
}

func (w *workload) data() []byte {
	n := w.rng.IntN(60)
	if w.rng.IntN(5) == 0 {
		n = w.rng.IntN(w.big)
	}
	return append(fmt.Appendf(nil, "s%d.", w.serial), slices.Repeat([]byte{'x'}, n)...)
}

// at returns every group's state after the first n records of the history.
func (w *workload) at(base map[raftid.GroupID]model, n int) map[raftid.GroupID]model {
	out := map[raftid.GroupID]model{}
	for id, m := range base {
		out[id] = m
	}
	for k := range n {
		out[w.of[k]] = w.states[k]
	}
	return out
}

// check compares all groups with want.
func (w *workload) check(l *wal.Log, want map[raftid.GroupID]model) error {
	var errs []error
	for id := raftid.GroupID(1); id <= raftid.GroupID(w.groups); id++ {
		got, err := observe(l, id)
		if err == nil && got.String() != want[id].String() {
			err = fmt.Errorf("group %d:\n got  %v\n want %v", id, got, want[id])
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
