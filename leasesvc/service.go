package leasesvc

import (
	"cmp"
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/region/regionpb"
)

// Store executes what has a place in the order. All methods may be called from any goroutine.
type Store interface {
	LeaseGrant(ctx context.Context, id, ttl int64) (mvcc.Revision, error)
	// LeaseRevoke ends a lease.
	LeaseRevoke(ctx context.Context, id int64) (mvcc.Revision, error)
	// LeaseExpire ends leases whose records lie in one region as that term's leader; those that have
	// ended are none of its errors. What they have left is not looked at. spans, of which the result does
	// not depend, are those of other regions in which they may have keys, as far as is known.
	LeaseExpire(ctx context.Context, list []regionpb.LeaseLeft, term uint64, spans []mvcc.Span) error
	// LeaseCheckpoint records what leases have left, whose records lie in one region; those that have
	// ended are none of its errors. With a term, only as that term's leader.
	LeaseCheckpoint(ctx context.Context, left []regionpb.LeaseLeft, term uint64) error
	// LeaseLook returns the confirmed record, nil when there is none, and the keys if asked for.
	LeaseLook(ctx context.Context, id int64, keys bool) (*regionpb.LeaseRecord, [][]byte, mvcc.Revision, error)
	Leases(ctx context.Context) ([]regionpb.Lease, mvcc.Revision, error)
	// LeaseHome returns the region that has a lease's record.
	LeaseHome(id int64) (pdpb.Descriptor, bool)
}

// Cluster is where regions are led, and the way there.
type Cluster interface {
	// Leader is where a region is led, 0 when unknown; here says that it is on this node.
	Leader(d *pdpb.Descriptor) (store raftid.StoreID, here bool)
	// Call sends a batch to the Serve of another node.
	Call(ctx context.Context, to raftid.StoreID, batch []byte) ([]byte, error)
	// Confirm asks a quorum whether a region is led here, and returns the term in which it was at some
	// moment after the call; 0 when it is led elsewhere.
	Confirm(ctx context.Context, region pdpb.RegionID) (term uint64, err error)
	// KeepAwake says whether the clock runs for leases of a region here.
	KeepAwake(region pdpb.RegionID, on bool)
}

// Config makes a Service.
type Config struct {
	Store   Store
	Cluster Cluster
	Options Options
	// MinTTL raises what clients ask for, in seconds.
	MinTTL int64
	// Workers bounds the goroutines that end leases, of which a few work and the others
	// wait for regions without a quorum. Default 256.
	Workers int
	// OneByOne ends every lease by itself: a store of one group has no attempts, and its commands
	// travel together anyway.
	OneByOne bool
}

// ErrNotFound says that there is no such lease.
var ErrNotFound = regionpb.ErrorOf(regionpb.LeaseNotFound)

// Service is the leases of one node. Its methods may be called from any goroutine.
type Service struct {
	cfg    Config
	origin time.Time
	ctx    context.Context
	stop   context.CancelFunc
	wg     sync.WaitGroup
	peers  peers

	mu struct {
		sync.Mutex
		core    *Core
		awake   map[pdpb.RegionID]bool
		waiting map[int64][]chan struct{} // closed when something about a lease has changed
		// confirming has the regions whose terms are being confirmed; each channel is closed when that
		// has succeeded.
		confirming map[pdpb.RegionID]chan struct{}
		todo       todo
		found      []Action // room for what the core says
		workers    int
		pausing    bool // a worker waits for the time of the next end
		pace       pace
		closed     bool
	}
}

// NewService starts a service. It has no timers until a region is led here.
func NewService(cfg Config) *Service {
	if cfg.Workers <= 0 {
		cfg.Workers = 256
	}
	s := &Service{cfg: cfg, origin: time.Now()}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.peers.s, s.peers.byID = s, map[raftid.StoreID]*peer{}
	s.mu.core = New(cfg.Options)
	s.mu.awake = map[pdpb.RegionID]bool{}
	s.mu.waiting = map[int64][]chan struct{}{}
	s.mu.confirming = map[pdpb.RegionID]chan struct{}{}
	s.mu.pace = newPace(cfg.Workers)
	return s
}

// Close ends what the service does and waits for it.
func (s *Service) Close() {
	s.mu.Lock()
	s.mu.closed = true
	s.mu.todo = todo{}
	s.mu.Unlock()
	s.stop()
	s.wg.Wait()
}

func (s *Service) now() time.Duration { return time.Since(s.origin) }

// goLocked runs f on a goroutine that Close waits for; false when the service is closed.
func (s *Service) goLocked(f func()) bool {
	if s.mu.closed {
		return false
	}
	s.wg.Go(f)
	return true
}

// Lead begins a term of a region that is led here. load reads all records of its leases that are
// applied; it runs on a goroutine of the service. The group's owner calls it.
func (s *Service) Lead(region pdpb.RegionID, term uint64, load func(ctx context.Context, fn func(id int64, rec *regionpb.LeaseRecord)) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.core.Lead(region, term)
	s.keepAwakeLocked(region, true) // what it has is not known yet
	s.goLocked(func() {
		err := load(s.ctx, func(id int64, rec *regionpb.LeaseRecord) {
			s.mu.Lock()
			s.mu.core.Loaded(region, term, id, rec, s.now())
			s.mu.Unlock()
		})
		if err != nil {
			return // the engine has failed or the node stops: nothing is ended by this node
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.mu.core.LoadedAll(region, term)
		s.keepAwakeLocked(region, s.mu.core.Len(region) > 0)
		s.wakeAllLocked()
	})
}

// End tells that a region is not led here any more.
func (s *Service) End(region pdpb.RegionID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.core.End(region)
	s.keepAwakeLocked(region, false)
	s.wakeAllLocked()
}

// Changed brings a lease's record as it is applied now, nil when it is gone, on any replica.
func (s *Service) Changed(region pdpb.RegionID, id int64, rec *regionpb.LeaseRecord) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.core.Changed(region, id, rec, s.now())
	if s.mu.core.Leads(region) {
		s.keepAwakeLocked(region, s.mu.core.Len(region) > 0)
	}
	s.wakeLocked(id)
}

func (s *Service) keepAwakeLocked(region pdpb.RegionID, on bool) {
	if s.mu.awake[region] == on {
		return
	}
	if on {
		s.mu.awake[region] = true
	} else {
		delete(s.mu.awake, region)
	}
	s.cfg.Cluster.KeepAwake(region, on)
}

func (s *Service) wakeLocked(id int64) {
	for _, ch := range s.mu.waiting[id] {
		close(ch)
	}
	delete(s.mu.waiting, id)
}

func (s *Service) wakeAllLocked() {
	for id := range s.mu.waiting {
		s.wakeLocked(id)
	}
}

// Tick lets time pass. Any goroutine; a few times a second. It does not keep its caller, whose clock may be
// that of others, for longer than looksMax looks at the core take.
func (s *Service) Tick() {
	for n := 0; n < looksMax && s.tick(); n++ {
	}
}

// looksMax bounds the looks of one call. With ten calls a second it is enough for 900,000 leases of three
// seconds that are renewed all the time.
const looksMax = 32

// tick looks at some of the leases that are due and says whether there are more; whoever applies the ends
// of others gets the lock in between.
func (s *Service) tick() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return false
	}
	now := s.now()
	s.mu.pace.tick(now)
	s.lookLocked(now)
	if n := s.overLocked(); n > 0 {
		s.mu.pace.waiting(n + s.mu.core.Soon(now+soonFor)) // a storm has its rate from the start
	}
	s.startLocked()
	return s.mu.core.Due(now)
}

// lookLocked has the core say what is to be done now.
func (s *Service) lookLocked(now time.Duration) {
	s.mu.found = s.mu.core.Tick(now, s.mu.found[:0])
	s.mu.todo.add(s.mu.found)
	s.mu.pace.waiting(s.overLocked())
}

// overLocked is how many leases wait for their end, but for those on trial: they are not ended at a rate, and
// where there is no quorum they wait for as long as there is none.
func (s *Service) overLocked() (n int) {
	for _, p := range s.mu.todo.piles {
		if s.mu.pace.counts(&p.actions[0]) {
			n += len(p.actions)
		}
	}
	return n + s.mu.core.Over(func(spans []mvcc.Span) bool { return !s.mu.pace.onTrial(spans) })
}

// startLocked starts a worker if there is something to do, or to wait for. Each that takes something starts
// the next, so that all work and none idles.
func (s *Service) startLocked() {
	if s.mu.workers >= s.cfg.Workers {
		return
	}
	if at, pause := s.nextLocked(); (at >= 0 || pause > 0 && !s.mu.pausing) && s.goLocked(s.work) {
		s.mu.workers++
	}
}

// nextLocked is the pile from which something is done next. What has failed before comes last: however many
// leases a region without a quorum holds up, one of another group that has failed by chance does not wait
// for them. It is -1 when there is nothing to do now; if there is after a pause, that is how long it takes.
func (s *Service) nextLocked() (at int, pause time.Duration) {
	wait := s.mu.pace.pause(s.now())
	at = -1
	for i, p := range s.mu.todo.piles {
		switch a := &p.actions[0]; {
		case !s.mu.pace.may(a):
		case wait > 0 && s.mu.pace.counts(a):
			pause = wait
		case !a.Alone && !s.mu.pace.onTrial(a.Spans):
			return i, 0 // nothing comes before
		case at < 0 || s.mu.pace.compare(a, &s.mu.todo.piles[at].actions[0]) < 0:
			at = i
		}
	}
	return at, pause
}

// work carries out actions until there are none.
func (s *Service) work() {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() { s.mu.workers-- }()
	for {
		at, pause := s.nextLocked()
		if at < 0 && pause > 0 && !s.mu.pausing {
			s.pauseLocked(pause)
			continue
		}
		if at < 0 {
			return
		}
		most := togetherMax
		if k := &s.mu.todo.piles[at].key; k.alone || k.kind == Expire && s.cfg.OneByOne {
			most = 1
		}
		list := s.mu.todo.take(at, most, s.mu.core.Stands)
		if len(list) == 0 {
			continue
		}
		f := s.mu.pace.begin(list, s.now())
		s.startLocked()
		s.mu.Unlock()
		err := s.carryOut(list)
		s.mu.Lock()
		s.mu.pace.end(f, err == nil)
		for _, a := range list {
			if err != nil || a.Kind == Checkpoint {
				s.mu.core.Ended(a, s.now())
				s.wakeLocked(a.ID)
			}
		}
		if !s.mu.closed {
			s.lookLocked(s.now()) // room was made
		}
	}
}

// pauseLocked lets go of the lock for some time, or until the service closes.
func (s *Service) pauseLocked(d time.Duration) {
	s.mu.pausing = true
	s.mu.Unlock()
	t := time.NewTimer(d)
	select {
	case <-t.C:
	case <-s.ctx.Done():
		t.Stop()
	}
	s.mu.Lock()
	s.mu.pausing = false
}

// carryOut does what actions of one kind, region and term ask for.
func (s *Service) carryOut(list []Action) error {
	leases := make([]regionpb.LeaseLeft, len(list))
	for i := range list {
		leases[i] = regionpb.LeaseLeft{ID: list[i].ID, Grant: list[i].Grant, Remaining: list[i].Remaining}
	}
	if list[0].Kind == Checkpoint {
		// One that is lost costs precision after an election, and the next one comes.
		return s.cfg.Store.LeaseCheckpoint(s.ctx, leases, list[0].Term)
	}
	return s.cfg.Store.LeaseExpire(s.ctx, leases, list[0].Term, list[0].Spans)
}

// Grant makes a lease. id 0 lets the service choose one. It returns what was granted.
func (s *Service) Grant(ctx context.Context, id, ttl int64) (int64, int64, mvcc.Revision, error) {
	ttl = max(ttl, s.cfg.MinTTL)
	if id != 0 {
		rev, err := s.cfg.Store.LeaseGrant(ctx, id, ttl)
		return id, ttl, rev, err
	}
	for {
		for id == 0 {
			id = rand.Int64() // never negative, as etcd's own choice
		}
		rev, err := s.cfg.Store.LeaseGrant(ctx, id, ttl)
		if !isCode(err, regionpb.LeaseExists) {
			return id, ttl, rev, err
		}
		id = 0
	}
}

// Revoke ends a lease and deletes its keys.
func (s *Service) Revoke(ctx context.Context, id int64) (mvcc.Revision, error) {
	return s.cfg.Store.LeaseRevoke(ctx, id)
}

// Info is what is known of a lease.
type Info struct {
	TTL       int64 // granted, seconds
	Remaining time.Duration
	Keys      [][]byte
}

// TimeToLive looks at a lease: what it was granted and has left, and its keys if asked for. The
// revision is that of the store when it looked, also with ErrNotFound.
func (s *Service) TimeToLive(ctx context.Context, id int64, keys bool) (Info, mvcc.Revision, error) {
	for {
		rec, attached, rev, err := s.cfg.Store.LeaseLook(ctx, id, keys)
		if err == nil && rec == nil {
			err = ErrNotFound
		}
		if err != nil {
			return Info{}, rev, err
		}
		out, left, err := s.ask(ctx, request{kind: askRemaining, id: id})
		if err != nil {
			return Info{}, rev, err
		}
		if out == Renewed {
			return Info{TTL: rec.TTL, Remaining: time.Duration(left), Keys: attached}, rev, nil
		}
	}
}

// List returns the ids of all leases: first those whose time is kept here, by how long they have
// left, then the others.
func (s *Service) List(ctx context.Context) ([]int64, mvcc.Revision, error) {
	list, rev, err := s.cfg.Store.Leases(ctx)
	if err != nil {
		return nil, rev, err
	}
	type item struct {
		id   int64
		home pdpb.RegionID // 0 when there is none
		ends time.Duration
	}
	items := make([]item, len(list))
	for i, l := range list {
		items[i] = item{id: l.ID, ends: math.MaxInt64}
		if d, ok := s.cfg.Store.LeaseHome(l.ID); ok {
			items[i].home = d.ID
		}
	}
	s.mu.Lock()
	for i := range items {
		if ends, ok := s.mu.core.Deadline(items[i].home, items[i].id); ok {
			items[i].ends = ends
		}
	}
	s.mu.Unlock()
	slices.SortFunc(items, func(a, b item) int { return cmp.Or(cmp.Compare(a.ends, b.ends), cmp.Compare(a.id, b.id)) })
	ids := make([]int64, len(items))
	for i := range items {
		ids[i] = items[i].id
	}
	return ids, rev, nil
}
