package raftstore

import (
	"fmt"
	"runtime/debug"
	"sync"

	"go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"

	"braid/raftstore/raftid"
	"braid/raftstore/raftwire"
)

// runQueue holds the replicas that have something to do, urgent ones first. It is bounded by the
// number of replicas: each is in it at most once.
type runQueue struct {
	mu     sync.Mutex
	some   *sync.Cond
	urgent []*replica
	ring   []*replica // a ring; its length is a power of two
	head   int
	count  int
	closed bool
}

func (q *runQueue) init() {
	q.some = sync.NewCond(&q.mu)
	q.ring = make([]*replica, 64)
}

func (q *runQueue) push(r *replica) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if r.urgent {
		q.urgent = append(q.urgent, r)
	} else {
		if q.count == len(q.ring) {
			bigger := make([]*replica, 2*len(q.ring))
			n := copy(bigger, q.ring[q.head:])
			copy(bigger[n:], q.ring[:q.head])
			q.ring, q.head = bigger, 0
		}
		q.ring[(q.head+q.count)&(len(q.ring)-1)] = r
		q.count++
	}
	q.some.Signal()
}

// pop takes the next replica. With wait it waits for one; it returns nil when there is none, or
// when the queue is closed.
func (q *runQueue) pop(wait bool) *replica {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		switch {
		case q.closed:
			return nil
		case len(q.urgent) > 0:
			r := q.urgent[0]
			q.urgent = append(q.urgent[:0], q.urgent[1:]...)
			return r
		case q.count > 0:
			r := q.ring[q.head]
			q.ring[q.head] = nil
			q.head = (q.head + 1) & (len(q.ring) - 1)
			q.count--
			return r
		case !wait:
			return nil
		}
		q.some.Wait()
	}
}

func (q *runQueue) close() {
	q.mu.Lock()
	q.closed = true
	q.some.Broadcast()
	q.mu.Unlock()
}

// A worker's turn takes up to turnGroups groups while the queue has any, and sends what they
// want sent together, a batch of at most about turnBytes to each store.
const (
	turnGroups = 64
	turnBytes  = 512 << 10
)

// outbox collects a worker's messages by store.
type outbox struct {
	store   *Store
	batches map[raftid.StoreID]*outBatch
	out     Output
}

type outBatch struct {
	b      []byte
	urgent bool
	// apps are the replicas whose appends are in the batch: raft is told when it is dropped.
	apps []unsent
}

type unsent struct {
	r  *replica
	to raftid.ReplicaID
}

func (s *Store) work() {
	defer func() {
		if v := recover(); v != nil {
			// Raft and the machines panic when this replica cannot go on (I3, D2). The worker
			// ends with its group still taken, so nothing touches the group again.
			s.fail(fmt.Errorf("raftstore: %v\n%s", v, debug.Stack()))
		}
	}()
	box := &outbox{store: s, batches: make(map[raftid.StoreID]*outBatch)}
	for {
		r := s.queue.pop(true)
		if r == nil {
			return
		}
		for n := 1; r != nil; n++ {
			s.turn(r, box)
			if n == turnGroups {
				break
			}
			r = s.queue.pop(false)
		}
		box.flush()
	}
}

// turn drives one group once.
func (s *Store) turn(r *replica, box *outbox) {
	in := r.take()
	if in == nil {
		r.release(false)
		return
	}
	s.stats.turns.Add(1)
	out := &box.out
	out.Reset()
	r.group.Process(in, out)
	box.add(r, out)
	for _, snap := range out.Snapshots {
		s.sendSnapshot(r, snap)
	}
	for _, sink := range out.Discard {
		s.closeSink(r, sink)
		r.endStaging()
	}
	if out.Install != nil {
		s.installSnapshot(r, out.Install)
	}
	if out.Detached != nil {
		s.runDetached(r, out.Detached)
	}
	r.publish()
	if awake := !r.group.Asleep(); awake != r.ticking {
		r.ticking = awake
		s.setAwake(r, awake)
	}
	r.release(out.Again)
}

// add puts a group's messages into the batches. pd's leave at once, ahead of the others (B9).
func (b *outbox) add(r *replica, out *Output) {
	for _, m := range out.Messages {
		to := raftid.ReplicaID(m.GetTo())
		if batch := b.batch(r, to); batch != nil {
			batch.b = raftwire.AppendItem(batch.b, r.id, m)
			if m.GetType() == raftpb.MsgApp {
				batch.apps = append(batch.apps, unsent{r, to})
			}
			b.store.stats.messages.Add(1)
		}
	}
	for _, c := range out.Controls {
		if batch := b.batch(r, c.To); batch != nil {
			batch.b = raftwire.AppendControl(batch.b, r.id, uint64(c.Kind), uint64(c.From), uint64(c.To), c.Term, c.Index, c.LogTerm)
			b.store.stats.messages.Add(1)
		}
	}
	if r.urgent {
		b.flush()
	}
}

func (b *outbox) batch(r *replica, to raftid.ReplicaID) *outBatch {
	id, ok := r.storeOf(to)
	if !ok || b.store.cfg.Transport == nil {
		return nil
	}
	batch := b.batches[id]
	if batch == nil {
		batch = new(outBatch)
		b.batches[id] = batch
	}
	if len(batch.b) > 0 && (len(batch.b) > turnBytes || r.urgent != batch.urgent) {
		b.send(id, batch)
	}
	if len(batch.b) == 0 {
		batch.urgent = r.urgent
		batch.b = raftwire.AppendBatchHeader(make([]byte, 0, 512))
	}
	return batch
}

func (b *outbox) flush() {
	for id, batch := range b.batches {
		if len(batch.b) > 0 {
			b.send(id, batch)
		}
	}
}

func (b *outbox) send(to raftid.StoreID, batch *outBatch) {
	b.store.stats.batches.Add(1)
	if !b.store.cfg.Transport.SendRaft(to, batch.urgent, batch.b) {
		for _, u := range batch.apps {
			u.r.post(func(m *mail) {
				if len(m.in.Unreachable) < controlsMax {
					m.in.Unreachable = append(m.in.Unreachable, u.to)
				}
			})
		}
	}
	clear(batch.apps)
	batch.b, batch.apps = nil, batch.apps[:0] // the transport keeps the bytes
}

// receive takes a batch from another store.
func (s *Store) receive(from raftid.StoreID, b []byte) {
	batch, err := raftwire.NewBatch(b)
	if err != nil {
		s.log.Warn("batch of raft messages refused", zap.Stringer("from", from), zap.Error(err))
		return
	}
	for {
		it, ok := batch.Next()
		if !ok {
			break
		}
		r := s.replica(it.Group)
		if r == nil {
			continue // not here yet, or not any more
		}
		if err = s.receiveItem(r, it); err != nil {
			break
		}
	}
	if err == nil {
		err = batch.Err()
	}
	if err != nil {
		s.log.Warn("batch of raft messages cut short", zap.Stringer("from", from), zap.Error(err))
	}
}

func (s *Store) receiveItem(r *replica, it raftwire.Item) error {
	ok := true
	switch it.Kind {
	case raftwire.KindMessage:
		m, err := raftwire.DecodeMessage(it.Body)
		if err != nil {
			return err
		}
		if m.GetType() == raftpb.MsgSnap {
			return nil // snapshots have streams of their own
		}
		ok = r.deliver(m, len(it.Body))
	case raftwire.KindControl:
		var kind, from, to uint64
		var c Control
		if err := raftwire.Fields(it.Body, &kind, &from, &to, &c.Term, &c.Index, &c.LogTerm); err != nil {
			return err
		}
		c.Kind, c.From, c.To = ControlKind(kind), raftid.ReplicaID(from), raftid.ReplicaID(to)
		ok = r.deliverControl(c)
	}
	if !ok {
		s.stats.dropped.Add(1)
	}
	return nil
}
