package wal

import (
	"slices"

	"braid/raftstore/raftid"
)

// item is a record on its way to the disk.
type item struct {
	g     *GroupLog
	rec   *Record
	move  *rewrite // instead of rec
	seq   uint64   // of the group's Append
	order uint64   // of the push, over all groups
	trunc Position // what rec.Truncate came to
	bytes int64
	lazy  bool // causes no write by itself
}

// lazyMax is how many records that cause no write may wait for one that does.
const lazyMax = 1024

// push queues a record and counts what it made dead. It is called with the group's mu held, so
// that a group's records are queued in the order of their effect.
func (l *Log) push(it item, dead deltas) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.applyLive(dead)
	if l.failed != nil || l.closing {
		return // never acknowledged
	}
	l.seq++
	it.order = l.seq
	l.queuedBytes.Add(it.bytes)
	if l.isUrgent(it.g.id) {
		l.urgent = append(l.urgent, it)
	} else {
		l.ordinary = append(l.ordinary, it)
	}
	switch {
	case it.lazy:
		if l.lazies++; l.lazies < lazyMax {
			return
		}
	case l.shared && it.g.id != l.o.HoldGroup && l.queuedBytes.Load() < l.o.BatchBytesMax:
		if !l.held && !l.due {
			l.held = true
			if !l.writing {
				l.hold.Reset(l.o.HoldMax)
			}
		}
		return
	}
	l.setDue()
}

func (l *Log) isUrgent(id raftid.GroupID) bool {
	return !l.shared && l.priority != 0 && id == l.priority
}

func (l *Log) setDue() {
	if !l.due {
		l.due = true
		l.wake.Signal()
	}
}

// endHold is called by the hold timer. A timer that was started before the present turn is late.
func (l *Log) endHold() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held && !l.writing {
		l.setDue()
	}
}

// turnEnded starts the wait of what was queued during a turn. It counts from here because the
// next record of Options.HoldGroup follows from what this turn made durable: the cut in flight is
// the batch window of the next one, and a sync in between would cover no cut.
func (l *Log) turnEnded() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.writing = false
	if l.held && !l.due && !l.closing && l.failed == nil {
		l.hold.Reset(l.o.HoldMax)
	}
}

// Kick makes the writer write what is queued now.
func (l *Log) Kick() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.ordinary)+len(l.urgent) > 0 {
		l.setDue()
	}
}

// SetPriority puts a group's records first in every batch (B9); zero ends it. It has no effect
// while SharedFsync is on. Done is then in the order of writing: in the order of Append within
// each group, but no longer over all groups.
func (l *Log) SetPriority(id raftid.GroupID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.priority = id
	l.requeue()
}

// SharedFsync switches the mode in which one sync covers an entry and the cut that orders it:
// records stay in the order of Append over all groups, also in the log, and one of an ordinary
// group waits for the next one of Options.HoldGroup, for Kick, or for Options.HoldMax. It is safe
// only where this store is the only voter of all its groups (A1).
func (l *Log) SharedFsync(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.shared = on
	l.requeue()
	if len(l.ordinary)+len(l.urgent) > 0 {
		l.setDue()
	}
}

// requeue sorts what is queued after a change of rules, keeping each group's order.
func (l *Log) requeue() {
	all := slices.Concat(l.urgent, l.ordinary)
	slices.SortFunc(all, func(a, b item) int { return int(int64(a.order - b.order)) })
	l.urgent, l.ordinary = nil, nil
	for _, it := range all {
		if l.isUrgent(it.g.id) {
			l.urgent = append(l.urgent, it)
		} else {
			l.ordinary = append(l.ordinary, it)
		}
	}
}

// take moves the next batch's records into out: urgent ones first, up to about BatchBytesMax, at
// least one. Called with mu held.
func (l *Log) take(out []item) []item {
	room := l.o.BatchBytesMax
	for _, q := range []*[]item{&l.urgent, &l.ordinary} {
		n := 0
		for n < len(*q) && (len(out) == 0 || (*q)[n].bytes <= room) {
			room -= (*q)[n].bytes
			out = append(out, (*q)[n])
			n++
		}
		rest := copy(*q, (*q)[n:])
		clear((*q)[rest:])
		*q = (*q)[:rest]
		if rest > 0 {
			break // what comes later must not overtake, nor use up the room
		}
	}
	l.lazies = 0
	l.due = len(l.urgent)+len(l.ordinary) > 0
	if l.held && !l.writing {
		l.held = false
		l.hold.Stop()
	}
	return out
}

// firstQueued is the lowest order among the queued records, or above all.
func (l *Log) firstQueued() uint64 {
	first := l.seq + 1
	if len(l.urgent) > 0 {
		first = l.urgent[0].order
	}
	if len(l.ordinary) > 0 {
		first = min(first, l.ordinary[0].order)
	}
	return first
}
