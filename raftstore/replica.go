package raftstore

import (
	"slices"
	"sync"

	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
)

// replica is a group with its mailbox. The group belongs to the worker that took the replica
// from the run queue; the mailbox to whoever holds its lock.
type replica struct {
	store   *Store
	id      raftid.GroupID
	group   *Group
	machine StateMachine
	peers   func(raftid.ReplicaID) (raftid.StoreID, bool)
	urgent  bool // pd's group: everything waits for its cuts (B9)

	mail mail
	idle *sync.Cond // of the mailbox's lock: the replica left its worker

	awakeAt int // guarded by Store.awake

	seen struct {
		sync.Mutex
		status GroupStatus
		stores []raftid.StoreID // where the other replicas live
	}

	// The owner's.
	spare   Input // swapped with the mailbox's
	ticking bool  // in Store.awake
	conf    *raftpb.ConfState
}

// mail is what waits for a replica's next turn.
type mail struct {
	sync.Mutex
	in      Input
	bytes   int // of in.Messages
	pending bool
	// scheduled: in the run queue or with a worker. staging: a snapshot is being received or
	// installed; one at a time. detached: something that the machine detached has not ended.
	scheduled, removed, staging, detached bool
}

// post changes the mailbox and schedules the replica. It is short and never blocks.
func (r *replica) post(f func(*mail)) {
	r.mail.Lock()
	defer r.mail.Unlock()
	if r.mail.removed {
		return
	}
	f(&r.mail)
	r.schedule()
}

// schedule puts the replica into the run queue, once; under the mailbox's lock.
func (r *replica) schedule() {
	r.mail.pending = true
	if !r.mail.scheduled {
		r.mail.scheduled = true
		r.store.queue.push(r)
	}
}

// durable is the log's report; it comes from the log's writer goroutine.
func (r *replica) durable(token uint64) {
	r.mail.Lock()
	defer r.mail.Unlock()
	r.mail.in.Durable = max(r.mail.in.Durable, token)
	if r.group != nil && !r.mail.removed { // nil: still in NewGroup, the first turn will see it
		r.schedule()
	}
}

// messageOverheadBytes is what a message counts in a mailbox beside its entries' data.
const messageOverheadBytes = 128

// deliver adds a message, or drops it when the mailbox is full.
func (r *replica) deliver(m *raftpb.Message, bytes int) bool {
	r.mail.Lock()
	defer r.mail.Unlock()
	if r.mail.removed || r.mail.bytes+bytes > r.store.cfg.MailboxBytes && r.mail.bytes > 0 {
		return false
	}
	r.mail.bytes += bytes + messageOverheadBytes
	r.mail.in.Messages = append(r.mail.in.Messages, m)
	r.schedule()
	return true
}

// controlsMax bounds the controls in a mailbox; they are sent again, so more are dropped.
const controlsMax = 256

func (r *replica) deliverControl(c Control) bool {
	ok := false
	r.post(func(m *mail) {
		if ok = len(m.in.Controls) < controlsMax; ok {
			m.in.Controls = append(m.in.Controls, c)
		}
	})
	return ok
}

// take empties the mailbox for a turn; nil when the replica was removed.
func (r *replica) take() *Input {
	r.mail.Lock()
	defer r.mail.Unlock()
	if r.mail.removed {
		return nil
	}
	in := r.spare
	r.spare, r.mail.in = r.mail.in, in
	r.mail.bytes, r.mail.pending = 0, false
	return &r.spare
}

// release ends a turn: the replica goes back into the queue if something arrived.
func (r *replica) release(again bool) {
	in := &r.spare
	clear(in.Messages)
	r.spare = Input{Messages: in.Messages[:0], Controls: in.Controls[:0], Sent: in.Sent[:0], Unreachable: in.Unreachable[:0]}
	r.mail.Lock()
	defer r.mail.Unlock()
	if again {
		r.mail.in.Work = true
		r.mail.pending = true
	}
	if r.mail.pending && !r.mail.removed {
		r.store.queue.push(r)
		return
	}
	r.mail.scheduled = false
	r.idle.Broadcast()
}

// remove waits until no worker has the replica; nothing is scheduled after it.
func (r *replica) remove() {
	r.mail.Lock()
	defer r.mail.Unlock()
	r.mail.removed = true
	for r.mail.scheduled || r.mail.detached {
		r.idle.Wait()
	}
	r.dropStaged()
}

// dropStaged closes a snapshot that no turn will take; under the mailbox's lock.
func (r *replica) dropStaged() {
	if st := r.mail.in.Staged; st != nil {
		r.store.closeSink(r, st.Sink)
	}
	r.mail.in = Input{}
}

func (r *replica) beginStaging() bool {
	r.mail.Lock()
	defer r.mail.Unlock()
	if r.mail.staging || r.mail.removed {
		return false
	}
	r.mail.staging = true
	return true
}

func (r *replica) endStaging() {
	r.mail.Lock()
	r.mail.staging = false
	r.mail.Unlock()
}

// publish makes the group's state visible to others; owner only.
func (r *replica) publish() {
	st := r.group.Status()
	r.seen.Lock()
	defer r.seen.Unlock()
	r.seen.status = st
	if r.conf == r.group.conf {
		return
	}
	r.conf = r.group.conf
	r.seen.stores = nil
	for _, p := range r.group.Peers() {
		if s, ok := r.storeOf(p); ok {
			r.seen.stores = append(r.seen.stores, s)
		}
	}
}

func (r *replica) status() GroupStatus {
	r.seen.Lock()
	defer r.seen.Unlock()
	return r.seen.status
}

func (r *replica) livesOn(store raftid.StoreID) bool {
	r.seen.Lock()
	defer r.seen.Unlock()
	return slices.Contains(r.seen.stores, store)
}

func (r *replica) storeOf(p raftid.ReplicaID) (raftid.StoreID, bool) {
	if r.peers == nil {
		return 0, false
	}
	return r.peers(p)
}
