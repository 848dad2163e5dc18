package sim

import (
	"time"

	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// step is a millisecond: perhaps a fault, perhaps requests, and every store does a little.
func (w *World) step() {
	a := &w.aim
	if w.quiet {
		w.check.checkProgress()
	} else if a.quiet > 0 && w.stats.Steps > w.cfg.Steps-a.quiet {
		w.beginQuiet()
	} else {
		w.faults()
		w.stepDeposed()
	}
	if w.rng.IntN(1000) < a.ops {
		w.check.clientOps(1 + w.rng.IntN(a.burst))
	}
	if w.rng.IntN(1000) < a.reads {
		w.check.clientRead()
	}
	if w.chance(3) {
		w.check.pollReads()
	}
	if w.chance(a.locals) {
		w.check.serializable()
	}
	if w.rng.IntN(1000) < a.txns {
		w.check.startTxn()
	}
	w.check.stepClientsOfLeases()
	w.check.stepEnds()
	w.check.stepTxns()
	w.check.stepWatches()
	first := w.rng.IntN(len(w.stores))
	for i := range w.stores {
		w.storeStep(w.stores[(first+i)%len(w.stores)])
		if w.err != nil {
			return
		}
	}
	w.deliverDue()
	if w.chance(60) {
		// A store that notices that the leader's store is gone: sleeping followers must wake.
		if g := w.leaderless(); g != nil {
			g.in.Campaign, g.ready = true, true
		}
	}
}

// storeStep lets one store do a little.
func (w *World) storeStep(s *store) {
	a := &w.aim
	if !s.up {
		if w.rng.IntN(1000) < a.restart {
			w.restart(s)
		}
		return
	}
	if s.doomed > 0 && w.stats.Steps >= s.doomed {
		s.crash()
		return
	}
	if w.chance(a.tick) {
		w.tick(s)
	}
	if s.dirNews && w.chance(a.reconcile) {
		w.reconcile(s)
	}
	w.work(s, 4)
	if s.own != nil {
		s.own.step()
	}
	if w.chance(2) {
		w.turnHub(s)
	}
	if w.chance(2) {
		w.stepLeases(s)
	}
	if w.rng.IntN(1000) < a.logFlush {
		n := s.disk.Pending()
		if n > 0 && w.chance(4) {
			n = w.rng.IntN(n) + 1
		}
		s.disk.Flush(n)
		w.work(s, 2)
	}
	if w.rng.IntN(1000) < a.flush {
		s.flushEngine()
	}
	if w.chance(50) {
		w.check.collect(s)
	}
}

// faults are what goes wrong, leaders that move, and what administrators do.
func (w *World) faults() {
	a := &w.aim
	x := w.rng.IntN(10000)
	take := func(n int) bool {
		x -= n
		return x < 0
	}
	switch {
	case take(a.crash):
		if s := w.victim(); s.up {
			s.crash()
		}
	case take(a.partition):
		w.partition()
	case take(a.transfer):
		w.moveLeader()
	case take(a.depose):
		w.depose()
	case take(a.stopClock):
		if w.stopped = -1; w.chance(2) {
			w.stats.Stops++
			w.stopped = w.victim().i
		}
		w.event("stopped clock: %d", w.stopped)
	case take(a.fence):
		w.check.raiseFence(w.stores[w.rng.IntN(len(w.stores))])
	case take(a.compact):
		w.check.compact(w.stores[w.rng.IntN(len(w.stores))])
	}
}

// victim is a store for a fault: any, or the one of pd's leader.
func (w *World) victim() *store {
	if w.rng.IntN(100) < w.aim.pd {
		for _, s := range w.stores {
			if g := s.groups[raftid.PDGroup]; s.up && g.leading {
				return s
			}
		}
	}
	return w.stores[w.rng.IntN(len(w.stores))]
}

// partition heals the network, or cuts off a store, a link, or one direction of a link.
func (w *World) partition() {
	if len(w.stores) == 1 {
		return
	}
	w.net.blocked = [storesMax][storesMax]bool{}
	v := w.victim().i
	other := (v + 1 + w.rng.IntN(len(w.stores)-1)) % len(w.stores)
	cut := func(a, b int) { w.net.blocked[a][b], w.net.blocked[b][a] = true, true }
	switch w.rng.IntN(8) {
	case 0, 1, 2:
		w.event("network heals")
		return
	case 3, 4, 5:
		for i := range w.stores {
			if i != v {
				cut(v, i)
			}
		}
		w.event("cut off: %d", v)
	case 6:
		cut(v, other)
		w.event("cut off: %d from %d", v, other)
	case 7:
		w.net.blocked[v][other] = true
		w.event("cut off: %d to %d", v, other)
	}
	w.stats.Partitions++
}

// deposal is a leader's store that is about to be cut off, or is until a step.
type deposal struct {
	store     *store
	cut, heal int
}

// depose has a region's leader hand over, and cuts its store off and stops its clock before it hears
// how that ended.
func (w *World) depose() {
	if w.deposed.store != nil || len(w.stores) == 1 {
		return
	}
	s := w.stores[w.rng.IntN(len(w.stores))]
	for _, id := range s.ids {
		if g := s.groups[id]; s.up && g.replica != nil && g.leading && w.chance(2) {
			g.in.Transfer = raftid.ReplicaID(w.rng.IntN(len(w.stores)) + 1)
			g.ready = true
			w.deposed = deposal{s, w.stats.Steps + 1 + w.rng.IntN(12), w.stats.Steps + 400 + w.rng.IntN(800)}
			w.event("s%d g%d is deposed", s.i, id)
			return
		}
	}
}

// stepDeposed goes on with what depose began.
func (w *World) stepDeposed() {
	d := &w.deposed
	switch {
	case d.store == nil:
	case w.stats.Steps == d.cut:
		w.stopped = d.store.i
		w.check.believe(d.store)
		for i := range w.stores {
			if i != d.store.i {
				w.net.blocked[i][d.store.i], w.net.blocked[d.store.i][i] = true, true
			}
		}
		w.stats.Partitions++
	case w.stats.Steps == d.heal:
		w.deposed, w.stopped = deposal{}, -1
		w.net.blocked = [storesMax][storesMax]bool{}
	}
}

// isolated is the store that nobody reaches, nil when there is none.
func (w *World) isolated() *store {
	n := len(w.stores)
	for i, s := range w.stores {
		if b := &w.net.blocked[i]; b[(i+1)%n] && b[(i+2)%n] {
			return s
		}
	}
	return nil
}

func (w *World) moveLeader() {
	s := w.stores[w.rng.IntN(len(w.stores))]
	if !s.up {
		return
	}
	g := s.groups[s.ids[w.rng.IntN(len(s.ids))]]
	if w.rng.IntN(100) < w.aim.pd {
		g = s.groups[raftid.PDGroup]
	}
	if w.chance(2) {
		g.in.Transfer = raftid.ReplicaID(w.rng.IntN(len(w.stores)) + 1)
	} else {
		g.in.Campaign = true
	}
	g.ready = true
}

// leaderless is a replica of a group that nobody leads, nil when all are led.
func (w *World) leaderless() *group {
	ids := []pdpb.RegionID{raftid.PDGroup}
	for i := range w.boot.Regions {
		ids = append(ids, w.boot.Regions[i].ID)
	}
	for _, id := range ids {
		var any *group
		led := false
		for _, s := range w.stores {
			if g := s.groups[id]; s.up && g != nil {
				led = led || g.leading
				if any == nil || w.chance(2) {
					any = g
				}
			}
		}
		if !led && any != nil {
			return any
		}
	}
	return nil
}

func (w *World) restart(s *store) {
	w.event("s%d restarts", s.i)
	w.stats.Restarts++
	if err := s.start(); err != nil {
		w.fail("store %d does not start: %v", s.i, err)
	}
}

func (w *World) reconcile(s *store) {
	if err := s.reconcile(); err != nil {
		w.fail("store %d: %v", s.i, err)
	}
}

// tick lets time pass at a store.
func (w *World) tick(s *store) {
	if w.stopped == s.i {
		return
	}
	for _, id := range s.ids {
		g := s.groups[id]
		if !g.g.Asleep() {
			g.in.Ticks = 1
			g.ready = true
		}
		if g.replica != nil {
			g.replica.Tick()
		}
	}
	s.oracle.Tick(w.now)
	if s.ticks++; s.ticks%8 == 0 && s.member != nil {
		s.member.Tick()
	}
}

// work gives up to n groups that have something to do a turn.
func (w *World) work(s *store, n int) {
	for range n {
		s.todo = s.todo[:0]
		for _, id := range s.ids {
			if g := s.groups[id]; g.ready || g.install != nil || g.installed != nil || g.detached != nil {
				s.todo = append(s.todo, g)
			}
		}
		if len(s.todo) == 0 || w.err != nil {
			return
		}
		g := s.todo[w.rng.IntN(len(s.todo))]
		if g.install != nil && (w.calm || w.chance(8)) {
			g.finishInstall()
		}
		if g.detached != nil && (w.calm || w.chance(3)) {
			g.finishDetached()
		}
		// Who reads in between finds the new state and the old position.
		if g.installed != nil && (w.calm || w.chance(8)) {
			g.in.Installed, g.installed = g.installed, nil
			g.ready = true
		}
		if g.ready {
			g.turn()
		}
	}
}

// healRounds is how long a healed cluster may take to come to rest, of which most is for leases:
// nobody renews, so they end by themselves, each after what it was granted and what a new leader
// added, and what comes with that has to be ordered and sealed.
const healRounds = 900 + int((leaseTTLMax*time.Second+leaseExtend)/leaseRate/time.Millisecond)

// heal ends all faults and lets the cluster come to rest.
func (w *World) heal() {
	if w.err != nil {
		return
	}
	w.calm, w.stopped = true, -1
	w.net.blocked = [storesMax][storesMax]bool{}
	for _, p := range w.net.packets {
		p.due = w.stats.Steps
	}
	w.event("healing")
	var why string
	for round := range healRounds {
		for _, s := range w.stores {
			if !s.up {
				w.restart(s)
			}
		}
		w.calmRound(round)
		if w.err != nil {
			return
		}
		if round > 60 && round%10 == 0 {
			if why = w.check.unrest(); why == "" {
				w.check.silence()
				return
			}
		}
	}
	w.fail("LIVENESS: after %d rounds of healing %s", healRounds, why)
}

// calmRound is a round in which everything works.
func (w *World) calmRound(round int) {
	w.now += time.Millisecond
	for _, s := range w.stores {
		if w.err != nil {
			return
		}
		if s.dirNews {
			w.reconcile(s)
		}
		s.disk.Flush(-1)
		w.work(s, 40)
		if s.own != nil {
			s.own.step()
		}
		w.turnHub(s)
		w.stepLeases(s)
		w.deliverDue()
		if round%3 == 0 {
			w.tick(s)
		}
		if round%20 == 0 {
			s.flushEngine()
		}
	}
	w.check.stepEnds()
	w.check.stepTxns()
	w.check.stepWatches()
	w.check.pollReads()
	w.check.checkProgress()
}
