package raftstore

import (
	"testing"
	"time"

	"braid/raftstore/raftid"
)

// TestParkedMachineKeepsItsGroup: while what a leader's machine detached runs, for several election
// timeouts, the group keeps its leader and its followers' appends, its store's other groups go on,
// and it is not removed under the machine's feet.
func TestParkedMachineKeepsItsGroup(t *testing.T) {
	const tick = 10 * time.Millisecond
	c := newHosts(t, 3, 3, tick)
	c.propose(2, "a")
	c.same(2, "a")
	l := c.leader(2)
	before, _ := l.store.Status(2)
	begun, end := make(chan struct{}), make(chan struct{})
	l.toys[2].look(func(toy *toy) bool {
		toy.long = func() { close(begun); <-end }
		toy.queue = append(toy.queue, "b") // proposed in the same turn, so the others apply it
		return true
	})
	l.store.Wake(2)
	<-begun
	for _, h := range c.nodes {
		if h == l {
			continue
		}
		eventually(t, "what was proposed before at the followers", func() bool {
			return h.toys[2].look(func(toy *toy) bool { return len(toy.state) == 2 })
		})
	}
	for g := range c.groups {
		if g := raftid.PDGroup + raftid.GroupID(g); g != 2 {
			c.propose(g, "z")
		}
	}
	deadline := time.After(50 * tick) // five election timeouts
	look := time.NewTicker(tick)
	defer look.Stop()
	for over := false; !over; {
		select {
		case <-deadline:
			over = true
		case <-look.C:
		}
		if s, _ := l.store.Status(2); !s.Leading || s.Term != before.Term {
			t.Fatalf("leadership of term %d was lost: %v", before.Term, s)
		}
	}
	if l.toys[2].look(func(toy *toy) bool { return len(toy.state) == 2 }) {
		t.Fatal("a parked machine was called")
	}
	removed := make(chan error, 1)
	other := c.nodes[l.id%3]
	otherBegun, otherEnd := make(chan struct{}), make(chan struct{})
	other.toys[2].look(func(toy *toy) bool {
		toy.long = func() { close(otherBegun); <-otherEnd }
		return true
	})
	other.store.Wake(2)
	<-otherBegun
	go func() { removed <- other.store.Remove(2) }()
	close(end)
	eventually(t, "the machine's return", func() bool {
		return l.toys[2].look(func(toy *toy) bool { return len(toy.state) == 2 })
	})
	select {
	case err := <-removed:
		t.Fatalf("removed under a detached function: %v", err)
	default:
	}
	close(otherEnd)
	if err := <-removed; err != nil {
		t.Fatal(err)
	}
}
