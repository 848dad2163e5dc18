package raftstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"braid/raftstore/raftid"
)

// Transport is what a store needs of the network. Package transport has the real one.
type Transport interface {
	// SendRaft queues a batch for a store, those that are urgent before others. It never
	// blocks; false means that the batch was dropped.
	SendRaft(to raftid.StoreID, urgent bool, batch []byte) bool
	// SendSnapshot streams a snapshot and returns after the receiver took or refused it.
	SendSnapshot(ctx context.Context, to raftid.StoreID, group raftid.GroupID, header []byte, src func(io.Writer) error) error
	// HandleRaft, HandleSnapshot and OnDown register the receiver. A handler of batches is
	// called on the stream's goroutine and keeps nothing of the batch; a snapshot's handler
	// reads until io.EOF, and its error refuses the snapshot; OnDown is called when a store has
	// fallen silent or has come back as another process.
	HandleRaft(func(from raftid.StoreID, batch []byte))
	HandleSnapshot(func(ctx context.Context, from raftid.StoreID, group raftid.GroupID, header []byte, r io.Reader) error)
	OnDown(func(raftid.StoreID))
}

// StoreConfig configures a Store. Zero numbers mean the defaults named.
type StoreConfig struct {
	Transport Transport // nil: a store without peers
	// TickInterval (100 ms) is the length of raft's tick.
	TickInterval time.Duration
	// Workers (max(2, GOMAXPROCS)) drive the groups.
	Workers int
	// MailboxBytes (32 MiB) bounds what waits for one group; messages beyond it are dropped,
	// which raft repairs.
	MailboxBytes int
	// DetachedMax (Workers) bounds what machines detached and runs at one time, beside the workers;
	// more waits for its turn, its groups parked.
	DetachedMax int
	// SnapshotsOut and SnapshotsIn (4 each) bound the snapshots on their way at one time; one
	// too many is refused and tried again by raft.
	SnapshotsOut, SnapshotsIn int
	// OnFatal is called once, when a machine or raft found that this replica cannot go on. The
	// node must stop: the group is left as it is. It is called on the worker's goroutine and
	// must not wait for the store. Nil: panic.
	OnFatal func(error)
	Logger  *zap.Logger
}

// ErrUnknownGroup says that the store has no replica of the group.
var ErrUnknownGroup = errors.New("raftstore: unknown group")

// ErrClosed says that the store is closed.
var ErrClosed = errors.New("raftstore: closed")

// Store runs the groups of a node. All methods may be called from any goroutine.
//
// Owners: a replica's group belongs to the worker that took it from the run queue, and is in the
// queue or with a worker at most once; its mailbox is guarded by the mailbox's own lock; the list
// of awake replicas by awake.mu. Goroutines: the workers, the ticker, one for what each parked
// machine detached, and one for each snapshot
// that is sent or installed, all waited for by Close.
type Store struct {
	cfg   StoreConfig
	log   *zap.Logger
	queue runQueue

	groups struct {
		sync.RWMutex
		byID map[raftid.GroupID]*replica
	}
	awake struct {
		sync.Mutex
		list   []*replica    // replicas that tick, each at its awakeAt
		dozing bool          // the ticker waits on some
		some   chan struct{} // of room for one
	}

	out, in  chan struct{} // slots for snapshots
	detached chan struct{} // slots for what machines detached
	ctx      context.Context
	stop     context.CancelFunc
	wg       sync.WaitGroup
	life     struct {
		sync.Mutex
		closed bool
		tasks  int // snapshot goroutines
		idle   *sync.Cond
	}
	fatal sync.Once
	stats storeStats
}

type storeStats struct {
	turns, dropped, messages, batches, snapshotsSent, snapshotsFailed, snapshotsInstalled atomic.Uint64
}

// StoreStats counts since the start.
type StoreStats struct {
	Groups, Awake                                      int
	Turns                                              uint64 // turns of groups
	Messages                                           uint64 // messages sent to other stores
	Batches                                            uint64 // batches they were sent in
	DroppedMessages                                    uint64 // received, but the mailbox was full
	SnapshotsSent, SnapshotsFailed, SnapshotsInstalled uint64
}

// NewStore starts a store without groups.
func NewStore(cfg StoreConfig) *Store {
	if cfg.TickInterval == 0 {
		cfg.TickInterval = 100 * time.Millisecond
	}
	if cfg.Workers == 0 {
		cfg.Workers = max(2, runtime.GOMAXPROCS(0))
	}
	if cfg.MailboxBytes == 0 {
		cfg.MailboxBytes = 32 << 20
	}
	if cfg.DetachedMax == 0 {
		cfg.DetachedMax = cfg.Workers
	}
	if cfg.SnapshotsOut == 0 {
		cfg.SnapshotsOut = 4
	}
	if cfg.SnapshotsIn == 0 {
		cfg.SnapshotsIn = 4
	}
	if cfg.Logger == nil {
		cfg.Logger = zap.NewNop()
	}
	if cfg.OnFatal == nil {
		cfg.OnFatal = func(err error) { panic(err) }
	}
	s := &Store{cfg: cfg, log: cfg.Logger, out: make(chan struct{}, cfg.SnapshotsOut), in: make(chan struct{}, cfg.SnapshotsIn),
		detached: make(chan struct{}, cfg.DetachedMax)}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.groups.byID = make(map[raftid.GroupID]*replica)
	s.awake.some = make(chan struct{}, 1)
	s.life.idle = sync.NewCond(&s.life.Mutex)
	s.queue.init()
	for range cfg.Workers {
		s.wg.Go(s.work)
	}
	s.wg.Go(s.tick)
	if t := cfg.Transport; t != nil {
		t.HandleRaft(s.receive)
		t.HandleSnapshot(s.receiveSnapshot)
		t.OnDown(s.storeDown)
	}
	return s
}

// AddGroup starts a replica. The store sets the configuration's Durable and the functions about
// snapshots itself. A replica that is its group's only voter campaigns at once.
func (s *Store) AddGroup(cfg GroupConfig) error {
	if s.replica(cfg.ID) != nil {
		return fmt.Errorf("raftstore: group %d is already here", cfg.ID)
	}
	r := &replica{store: s, id: cfg.ID, awakeAt: -1, ticking: true, peers: cfg.Peers, machine: cfg.Machine, urgent: cfg.ID == raftid.PDGroup}
	r.idle = sync.NewCond(&r.mail.Mutex)
	cfg.Durable = r.durable
	cfg.AcquireSnapshot, cfg.ReleaseSnapshot = s.acquireSnapshot, s.releaseSnapshot
	g, err := NewGroup(cfg)
	if err != nil {
		return err
	}
	// From here on the log's report on what NewGroup appended makes a worker the owner.
	r.mail.Lock()
	r.group = g
	r.publish()
	r.mail.Unlock()
	s.life.Lock()
	defer s.life.Unlock()
	if s.life.closed {
		return ErrClosed
	}
	s.groups.Lock()
	if s.groups.byID[cfg.ID] != nil {
		s.groups.Unlock()
		return fmt.Errorf("raftstore: group %d is already here", cfg.ID)
	}
	s.groups.byID[cfg.ID] = r
	s.groups.Unlock()
	s.setAwake(r, true)
	r.post(func(m *mail) { m.in.Work = true })
	return nil
}

// Remove stops a replica and returns when nothing of it runs any more. Its log stays.
func (s *Store) Remove(id raftid.GroupID) error {
	s.groups.Lock()
	r := s.groups.byID[id]
	delete(s.groups.byID, id)
	s.groups.Unlock()
	if r == nil {
		return ErrUnknownGroup
	}
	r.remove()
	s.setAwake(r, false)
	return nil
}

// Wake calls the machine's Work soon.
func (s *Store) Wake(id raftid.GroupID) {
	if r := s.replica(id); r != nil {
		r.post(func(m *mail) { m.in.Work = true })
	}
}

// Waker returns a function that does what Wake does, without looking the group up. It does
// nothing before the group is added and after it is removed.
func (s *Store) Waker(id raftid.GroupID) func() {
	var known atomic.Pointer[replica]
	return func() {
		r := known.Load()
		if r == nil {
			if r = s.replica(id); r == nil {
				return
			}
			known.Store(r)
		}
		r.post(func(m *mail) { m.in.Work = true })
	}
}

// Campaign starts an election on this replica.
func (s *Store) Campaign(id raftid.GroupID) error {
	return s.command(id, func(m *mail) { m.in.Campaign = true })
}

// Transfer asks this replica, when it leads, to hand leadership over.
func (s *Store) Transfer(id raftid.GroupID, to raftid.ReplicaID) error {
	return s.command(id, func(m *mail) { m.in.Transfer = to })
}

func (s *Store) command(id raftid.GroupID, f func(*mail)) error {
	r := s.replica(id)
	if r == nil {
		return ErrUnknownGroup
	}
	r.post(f)
	return nil
}

// Status is a group's state after its last turn.
func (s *Store) Status(id raftid.GroupID) (GroupStatus, bool) {
	r := s.replica(id)
	if r == nil {
		return GroupStatus{}, false
	}
	return r.status(), true
}

// Statuses is the state of all groups, in no particular order.
func (s *Store) Statuses() []GroupStatus {
	s.groups.RLock()
	defer s.groups.RUnlock()
	out := make([]GroupStatus, 0, len(s.groups.byID))
	for _, r := range s.groups.byID {
		out = append(out, r.status())
	}
	return out
}

// Stats counts what the store did.
func (s *Store) Stats() StoreStats {
	s.groups.RLock()
	groups := len(s.groups.byID)
	s.groups.RUnlock()
	s.awake.Lock()
	awake := len(s.awake.list)
	s.awake.Unlock()
	c := &s.stats
	return StoreStats{
		Groups: groups, Awake: awake, Turns: c.turns.Load(), Messages: c.messages.Load(), Batches: c.batches.Load(),
		DroppedMessages: c.dropped.Load(), SnapshotsSent: c.snapshotsSent.Load(),
		SnapshotsFailed: c.snapshotsFailed.Load(), SnapshotsInstalled: c.snapshotsInstalled.Load(),
	}
}

// Close stops everything and waits for it. Close the log after it: no group appends any more.
func (s *Store) Close() {
	s.life.Lock()
	if s.life.closed {
		s.life.Unlock()
		return
	}
	s.life.closed = true
	s.life.Unlock()
	s.stop()
	s.queue.close()
	s.wg.Wait()
	s.life.Lock()
	for s.life.tasks > 0 {
		s.life.idle.Wait()
	}
	s.life.Unlock()
	s.groups.RLock()
	defer s.groups.RUnlock()
	for _, r := range s.groups.byID {
		r.mail.Lock()
		r.mail.removed = true
		r.dropStaged()
		r.mail.Unlock()
	}
}

// task runs f in a goroutine that Close waits for; false when the store is closed.
func (s *Store) task(f func()) bool {
	s.life.Lock()
	defer s.life.Unlock()
	if s.life.closed {
		return false
	}
	s.life.tasks++
	go func() {
		defer s.taskDone()
		f()
	}()
	return true
}

// enter counts a caller's goroutine among the tasks; false when the store is closed.
func (s *Store) enter() bool {
	s.life.Lock()
	defer s.life.Unlock()
	if s.life.closed {
		return false
	}
	s.life.tasks++
	return true
}

func (s *Store) taskDone() {
	s.life.Lock()
	s.life.tasks--
	s.life.idle.Broadcast()
	s.life.Unlock()
}

func (s *Store) replica(id raftid.GroupID) *replica {
	s.groups.RLock()
	defer s.groups.RUnlock()
	return s.groups.byID[id]
}

// tick counts time for the groups that are awake; the others cost nothing, and when all are asleep
// nothing happens here.
func (s *Store) tick() {
	t := time.NewTicker(s.cfg.TickInterval)
	defer t.Stop()
	var list []*replica
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-t.C:
		}
		s.awake.Lock()
		list = append(list[:0], s.awake.list...)
		s.awake.dozing = len(list) == 0
		s.awake.Unlock()
		if len(list) == 0 {
			t.Stop()
			select {
			case <-s.ctx.Done():
				return
			case <-s.awake.some:
			}
			t.Reset(s.cfg.TickInterval)
			continue
		}
		for _, r := range list {
			// One at most: a store that was starved must not take it for the leader's silence.
			r.post(func(m *mail) { m.in.Ticks = 1 })
		}
		clear(list)
	}
}

// setAwake adds a replica to those that tick, or takes it out.
func (s *Store) setAwake(r *replica, on bool) {
	s.awake.Lock()
	defer s.awake.Unlock()
	switch at := r.awakeAt; {
	case on && at < 0:
		r.awakeAt = len(s.awake.list)
		s.awake.list = append(s.awake.list, r)
		if s.awake.dozing {
			s.awake.dozing = false
			s.awake.some <- struct{}{} // has room: there is one for each time that it dozes
		}
	case !on && at >= 0:
		last := len(s.awake.list) - 1
		moved := s.awake.list[last]
		s.awake.list[at], moved.awakeAt = moved, at
		s.awake.list[last] = nil
		s.awake.list = s.awake.list[:last]
		r.awakeAt = -1
	}
}

// storeDown tells the groups that have a replica on a store that fell silent: followers of a
// leader there elect another, leaders with a follower there must count their quorum again (B12).
func (s *Store) storeDown(store raftid.StoreID) {
	s.groups.RLock()
	defer s.groups.RUnlock()
	for _, r := range s.groups.byID {
		if r.livesOn(store) {
			r.post(func(m *mail) {
				if !slices.Contains(m.in.Down, store) {
					m.in.Down = append(m.in.Down, store)
				}
			})
		}
	}
}

func (s *Store) fail(err error) {
	s.fatal.Do(func() {
		s.log.Error("a group cannot go on; the node must stop", zap.Error(err))
		s.cfg.OnFatal(err)
	})
}
