package leasesvc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/region/regionpb"
)

// fakeStore is a store whose leases lie in one of two regions, by whether their ids are odd; it ends
// them at once, and lists 1 to 9. It is the cluster as well, which is led here.
type fakeStore struct {
	Store
	mu       sync.Mutex
	s        *Service
	ended    [][]int64     // each call of LeaseExpire
	fail     int           // so many of them fail
	stuck    int64         // leases from this id on cannot be ended, nor can others with them; 0 none
	hang     time.Duration // how long that takes
	once     int64         // a lease whose first end fails; 0 none
	takes    time.Duration // how long an end takes that succeeds
	ending   int           // leases that are being ended, not the stuck ones
	most     int           // of them at one time
	confirms int           // calls of Confirm
	refuse   error         // what Confirm answers
	round    time.Duration // how long Confirm takes
}

func regionOf(id int64) pdpb.RegionID { return pdpb.RegionID(10 + id%2) }

func (f *fakeStore) LeaseHome(id int64) (pdpb.Descriptor, bool) {
	return pdpb.Descriptor{ID: regionOf(id)}, true
}

func (f *fakeStore) LeaseLook(_ context.Context, id int64, _ bool) (*regionpb.LeaseRecord, [][]byte, mvcc.Revision, error) {
	return nil, nil, 1, nil
}

func (f *fakeStore) LeaseExpire(_ context.Context, list []regionpb.LeaseLeft, term uint64, _ []mvcc.Span) error {
	var ids []int64
	for i := range list {
		ids = append(ids, list[i].ID)
	}
	f.mu.Lock()
	f.ended = append(f.ended, slices.Clone(ids))
	stuck := f.stuck > 0 && slices.Max(ids) >= f.stuck
	failed := f.fail > 0 || stuck
	f.fail--
	if f.once != 0 && slices.Contains(ids, f.once) {
		f.once, failed = 0, true
	}
	if !stuck {
		f.ending += len(ids)
		f.most = max(f.most, f.ending)
	}
	f.mu.Unlock()
	if stuck {
		time.Sleep(f.hang) // fake time
	} else {
		time.Sleep(f.takes)
		f.mu.Lock()
		f.ending -= len(ids)
		f.mu.Unlock()
	}
	if failed {
		return errors.New("no quorum")
	}
	for _, id := range ids {
		f.s.Changed(regionOf(id), id, nil)
	}
	return nil
}

func (f *fakeStore) Leases(context.Context) (list []regionpb.Lease, rev mvcc.Revision, err error) {
	for id := int64(1); id < 10; id++ {
		list = append(list, regionpb.Lease{ID: id, Record: &regionpb.LeaseRecord{TTL: 60}})
	}
	return list, 7, nil
}

func (f *fakeStore) Leader(*pdpb.Descriptor) (raftid.StoreID, bool) { return 1, true }
func (f *fakeStore) KeepAwake(pdpb.RegionID, bool)                  {}
func (f *fakeStore) Call(context.Context, raftid.StoreID, []byte) ([]byte, error) {
	return nil, errors.New("there is one node")
}

func (f *fakeStore) Confirm(context.Context, pdpb.RegionID) (uint64, error) {
	time.Sleep(f.round) // fake time
	f.mu.Lock()
	defer f.mu.Unlock()
	f.confirms++
	return 5, f.refuse
}

// asked is how often a region's term was to be confirmed.
func (f *fakeStore) asked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.confirms
}

// newService is a service that leads both regions, with leases 1 to n of a time to live in seconds.
func newService(f *fakeStore, cfg Config, n int, ttl int64) *Service {
	cfg.Store, cfg.Cluster = f, f
	f.s = NewService(cfg)
	for _, id := range [...]int64{0, 1} {
		f.s.Lead(regionOf(id), 5, func(context.Context, func(int64, *regionpb.LeaseRecord)) error { return nil })
	}
	synctest.Wait()
	for id := range int64(n) {
		f.s.Changed(regionOf(id+1), id+1, &regionpb.LeaseRecord{TTL: ttl})
	}
	return f.s
}

// TestExpireTogether: leases of a region whose time is up together are ended together, up to a number;
// where attempts have no cost of their own each is ended by itself. What failed is ended again, each by
// itself, and nothing twice.
func TestExpireTogether(t *testing.T) {
	const n = 2*togetherMax + 100
	for _, c := range []struct {
		name         string
		oneByOne     bool
		fail         int
		calls, total int // of LeaseExpire, and ids in them
	}{
		{"together", false, 0, 4, n},
		{"one by one", true, 0, n, n},
		{"one fails", false, 1, 4 + togetherMax, n + togetherMax},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeStore{fail: c.fail}
				s := newService(f, Config{OneByOne: c.oneByOne, Workers: 1}, n, 10)
				defer s.Close()
				time.Sleep(10*time.Second - time.Millisecond)
				s.Tick()
				synctest.Wait()
				if len(f.ended) != 0 {
					t.Fatalf("%d ends before the time", len(f.ended))
				}
				for range 8 {
					time.Sleep(500 * time.Millisecond)
					s.Tick()
					synctest.Wait()
				}
				total, seen := 0, map[int64]int{}
				for _, ids := range f.ended {
					if len(ids) > togetherMax {
						t.Errorf("%d leases ended together", len(ids))
					}
					for _, id := range ids {
						if regionOf(id) != regionOf(ids[0]) {
							t.Fatalf("leases of two regions: %v", ids)
						}
						seen[id]++
						total++
					}
				}
				if len(f.ended) != c.calls || total != c.total || len(seen) != n {
					t.Errorf("%d ends of %d leases, %d in all; want %d and %d of %d", len(f.ended), len(seen), total, c.calls, c.total, n)
				}
				if left := s.mu.core.Total(); left != 0 {
					t.Errorf("%d leases are left", left)
				}
			})
		})
	}
}

// TestStuckLease: a lease that cannot be ended, because a region of its keys has no quorum, keeps none
// from its end whose time was up together with it, or is later.
func TestStuckLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeStore{stuck: 9}
		s := newService(f, Config{Workers: 1}, 9, 10)
		defer s.Close()
		s.Changed(regionOf(7), 7, &regionpb.LeaseRecord{TTL: 11})
		for range 26 {
			time.Sleep(500 * time.Millisecond)
			s.Tick()
			synctest.Wait()
		}
		if left := s.mu.core.Total(); left != 1 || s.mu.core.Len(regionOf(9)) != 1 {
			t.Errorf("%d leases are left, of the region of the stuck one %d", left, s.mu.core.Len(regionOf(9)))
		}
		f.mu.Lock()
		f.stuck = 0
		f.mu.Unlock()
		time.Sleep(500 * time.Millisecond)
		s.Tick()
		synctest.Wait()
		if left := s.mu.core.Total(); left != 0 {
			t.Errorf("%d leases are left", left)
		}
	})
}

// TestManyStuckLeases: however many leases cannot be ended, and however long each try takes, there are
// workers for others.
func TestManyStuckLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeStore{stuck: 100, hang: 7 * time.Second}
		s := newService(f, Config{Workers: 16}, 0, 0)
		for id := range int64(500) {
			s.Changed(regionOf(100+id), 100+id, &regionpb.LeaseRecord{TTL: 10})
		}
		s.Changed(regionOf(1), 1, &regionpb.LeaseRecord{TTL: 40})
		tick := func(d time.Duration) {
			for range d / (100 * time.Millisecond) {
				time.Sleep(100 * time.Millisecond)
				s.Tick()
				synctest.Wait()
			}
		}
		tick(39 * time.Second)
		s.mu.Lock()
		alone, workers := s.mu.pace.alone, s.mu.workers
		s.mu.Unlock()
		if alone != 2 || workers != 2 {
			t.Errorf("%d of %d workers end what has failed, want 2", alone, workers)
		}
		tick(1100 * time.Millisecond)
		if left := s.mu.core.Total(); left != 500 {
			t.Errorf("%d leases are left, want the stuck ones", left)
		}
		s.Close()
		if s.mu.pace.alone != 0 || s.mu.workers != 0 {
			t.Errorf("%d of %d workers are left", s.mu.pace.alone, s.mu.workers)
		}
	})
}

// TestStorm: leases that end all at once end one after the other over a time, only so many at a time; few
// that do end at once.
func TestStorm(t *testing.T) {
	for _, c := range []struct {
		n        int
		from, to time.Duration
	}{
		{20_000, spreadFor - 200*time.Millisecond, spreadFor + 100*time.Millisecond},
		{200, 0, 100 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := &fakeStore{takes: 20 * time.Millisecond}
			s := newService(f, Config{}, c.n, 10)
			defer s.Close()
			time.Sleep(10 * time.Second)
			s.Tick()
			began, before := time.Now(), c.n
			for s.leases() > 0 && time.Since(began) < time.Minute {
				for range 10 {
					time.Sleep(10 * time.Millisecond)
					synctest.Wait()
				}
				s.Tick()
				left := s.leases()
				if fair := c.n * int(100*time.Millisecond) / int(spreadFor); c.n > 200 && before-left > 2*fair {
					t.Errorf("%d leases were ended in 100 ms, %v after their time; %d are fair", before-left, time.Since(began), fair)
				}
				before = left
			}
			if took := time.Since(began); took < c.from || took > c.to {
				t.Errorf("%d leases took %v, want %v to %v", c.n, took, c.from, c.to)
			}
			if f.most > youngMax {
				t.Errorf("%d leases were ended at one time", f.most)
			}
		})
	}
}

// TestStormAfterStuck: a storm is as even when leases of an earlier one, that was larger, still wait for a
// region without a quorum.
func TestStormAfterStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, first = 20_000, 1_000_000
		f := &fakeStore{stuck: first, hang: 7 * time.Second, takes: 20 * time.Millisecond}
		s := newService(f, Config{}, 0, 0)
		defer s.Close()
		dead := []mvcc.Span{mvcc.Key([]byte("dead"))}
		for id := range int64(3 * n) {
			s.Changed(regionOf(0), first+2*id, &regionpb.LeaseRecord{TTL: 10, Spans: dead})
			s.Changed(regionOf(0), 2*(n+id), &regionpb.LeaseRecord{TTL: 10})
		}
		tick := func(d time.Duration) {
			for range d / (100 * time.Millisecond) {
				time.Sleep(100 * time.Millisecond)
				s.Tick()
				synctest.Wait()
			}
		}
		tick(30 * time.Second)
		if left := s.leases(); left != 3*n {
			t.Fatalf("%d leases are left, want the stuck ones", left)
		}
		for id := range int64(n) {
			s.Changed(regionOf(0), 2*id, &regionpb.LeaseRecord{TTL: 10})
		}
		tick(10*time.Second + spreadFor/2)
		if left := s.leases() - 3*n; left < n/3 || left > 2*n/3 {
			t.Errorf("%d of %d leases are left after half of the time", left, n)
		}
	})
}

// TestStormAhead: leases whose time is up within a second end as evenly as if it were up at once.
func TestStormAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, steps = 20_000, 20
		f := &fakeStore{takes: 20 * time.Millisecond}
		s := newService(f, Config{}, 0, 0)
		defer s.Close()
		for id := range int64(n) {
			if id%(n/steps) == 0 && id > 0 {
				time.Sleep(time.Second / steps)
			}
			s.Changed(regionOf(id), id, &regionpb.LeaseRecord{TTL: 10})
		}
		time.Sleep(9 * time.Second)
		for before, tick := n, 0; before > 0 && tick < 100; tick++ {
			for range 10 {
				time.Sleep(10 * time.Millisecond)
				synctest.Wait()
			}
			s.Tick()
			left := s.leases()
			if fair := n * int(100*time.Millisecond) / int(spreadFor); tick > 2 && left > n/20 && (before-left < fair/2 || before-left > 2*fair) {
				t.Errorf("%d leases were ended in tick %d, %d are fair", before-left, tick, fair)
			}
			before = left
		}
		if left := s.leases(); left > 0 {
			t.Errorf("%d leases are left", left)
		}
	})
}

// TestCloseInStorm: a service that closes leaves no worker behind that waits for its time.
func TestCloseInStorm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeStore{}
		s := newService(f, Config{}, 20_000, 10)
		time.Sleep(10 * time.Second)
		s.Tick()
		synctest.Wait()
		began := time.Now()
		s.Close()
		if took := time.Since(began); took > 0 || s.mu.workers != 0 {
			t.Errorf("%d workers are left after %v", s.mu.workers, took)
		}
		if left := s.leases(); left == 0 || left == 20_000 {
			t.Errorf("%d leases are left: this was no storm", left)
		}
	})
}

// TestStuckGroup: leases of one region end in time although as many others, of the same region and due at
// the same moment, have keys where there is no quorum: more than are ever ended at one time.
func TestStuckGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, first = 10_000, 1_000_000
		f := &fakeStore{stuck: first, hang: 7 * time.Second, takes: 20 * time.Millisecond}
		s := newService(f, Config{}, 0, 0)
		defer s.Close()
		for id := range int64(n) {
			s.Changed(regionOf(0), first+2*id, &regionpb.LeaseRecord{TTL: 10, Spans: []mvcc.Span{mvcc.Key([]byte("dead"))}})
			s.Changed(regionOf(0), 2*id, &regionpb.LeaseRecord{TTL: 10})
		}
		time.Sleep(10 * time.Second)
		// The first stuck ones count for youngFor each.
		for range 45 {
			s.Tick()
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
		}
		if left := s.leases(); left != n {
			t.Errorf("%d leases are left after four and a half seconds, want the stuck ones", left)
		}
	})
}

// TestFailedOnce: an end that failed by chance is tried again soon, although hundreds of another group are
// tried again and again, and take long each time.
func TestFailedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeStore{stuck: 100, hang: 7 * time.Second, once: 2}
		s := newService(f, Config{Workers: 16}, 0, 0)
		defer s.Close()
		for id := range int64(500) {
			s.Changed(regionOf(0), 100+id, &regionpb.LeaseRecord{TTL: 10, Spans: []mvcc.Span{mvcc.Key([]byte("dead"))}})
		}
		s.Changed(regionOf(2), 2, &regionpb.LeaseRecord{TTL: 40})
		for range 495 {
			time.Sleep(100 * time.Millisecond)
			s.Tick()
			synctest.Wait()
		}
		if left := s.leases(); f.once != 0 || left != 500 {
			t.Errorf("%d leases are left, want the stuck ones", left)
		}
	})
}

// TestGrantedAnew: leases whose ends wait for room, and that a client ends meanwhile and grants anew, are
// new ones and live.
func TestGrantedAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 4 * togetherMax
		f := &fakeStore{takes: 300 * time.Millisecond}
		s := newService(f, Config{Workers: 1}, 0, 0)
		defer s.Close()
		for id := range int64(n) {
			s.Changed(regionOf(0), 2*id, &regionpb.LeaseRecord{TTL: 10})
		}
		time.Sleep(10 * time.Second)
		s.Tick()
		synctest.Wait()
		const anew = 2 * (n - 1)
		s.Changed(regionOf(0), anew, nil)
		s.Changed(regionOf(0), anew, &regionpb.LeaseRecord{TTL: 60})
		for range 50 {
			time.Sleep(100 * time.Millisecond)
			s.Tick()
			synctest.Wait()
		}
		for _, ids := range f.ended {
			if slices.Contains(ids, anew) {
				t.Error("a lease was ended a moment after its grant")
			}
		}
		if left := s.leases(); left != 1 {
			t.Errorf("%d leases are left, want the new one", left)
		}
	})
}

// TestManyRenewed: however many leases are renewed all the time, one that is not ends in time.
func TestManyRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, ttl = 100 * tickMax, 5 // more than 1024 each 100 ms, for each time to live
		f := &fakeStore{}
		s := newService(f, Config{}, n, ttl)
		defer s.Close()
		for now := 100 * time.Millisecond; now <= 21*time.Second; now += 100 * time.Millisecond {
			time.Sleep(100 * time.Millisecond)
			s.mu.Lock()
			for id := range int64(n) {
				if now%(2*time.Second) == 0 && (id > 0 || now < 15*time.Second) {
					s.mu.core.Confirmed(regionOf(id+1), 5, s.now())
					s.mu.core.Renew(regionOf(id+1), id+1, s.now())
				}
			}
			s.mu.Unlock()
			s.Tick()
			synctest.Wait()
			if left := s.leases(); now < 19*time.Second && left != n || now > 19*time.Second+200*time.Millisecond && left != n-1 {
				t.Fatalf("%d of %d leases are left after %v", left, n, now)
			}
		}
	})
}

// leases is the number of leases whose time is kept here.
func (s *Service) leases() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.core.Total()
}

// TestList: leases whose time is kept here come first, by when they end, whether or not a quorum has
// just confirmed that it is kept here; then the others, by id.
func TestList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeStore{refuse: errors.New("cut off")}
		s := newService(f, Config{}, 0, 0)
		defer s.Close()
		for i, id := range [...]int64{7, 2, 9, 4, 5} {
			s.Changed(regionOf(id), id, &regionpb.LeaseRecord{TTL: int64(20 + i)})
		}
		ids, rev, err := s.List(t.Context())
		if want := []int64{7, 2, 9, 4, 5, 1, 3, 6, 8}; err != nil || rev != 7 || !slices.Equal(ids, want) {
			t.Errorf("got %v at %d, %v; want %v", ids, rev, err, want)
		}
	})
}

// TestConfirmations: renewals wait for a quorum's word and share it; it is asked for again before it is
// too old, and two rounds a second are enough for any number of renewals (L6).
func TestConfirmations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeStore{round: 3 * time.Millisecond, refuse: errors.New("cut off")}
		s := newService(f, Config{Options: Options{Extend: time.Second}}, 20, 60)
		defer s.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		if _, err := s.Renew(ctx, 2); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("renewed by nobody's leader: %v", err)
		}
		cancel()
		if n := f.asked(); n < 2 || n > 20 {
			t.Errorf("asked %d times in 300 ms", n)
		}
		time.Sleep(time.Second)
		f.mu.Lock()
		f.refuse, f.confirms = nil, 0
		f.mu.Unlock()
		waited := 0
		for range 1000 {
			var wg sync.WaitGroup
			began := time.Now()
			for id := range int64(20) {
				wg.Go(func() {
					if ttl, err := s.Renew(t.Context(), id+1); err != nil || ttl != 60 {
						t.Errorf("renewal of %d: %d, %v", id+1, ttl, err)
					}
				})
			}
			wg.Wait()
			if time.Since(began) > 0 {
				waited++
			}
			time.Sleep(10 * time.Millisecond)
		}
		// Ten seconds, two regions.
		if n := f.asked(); n < 30 || n > 44 || waited != 1 {
			t.Errorf("asked %d times, %d rounds of renewals waited", n, waited)
		}
	})
}

// TestManyDeadGroups: leases end in time although those of hundreds of groups do not, whose time was up just
// before, because all of these have keys where there is no quorum, in one region or in many; and those end as
// soon as there is one.
func TestManyDeadGroups(t *testing.T) {
	for name, dead := range map[string]func(group int64) string{
		"one region":   func(int64) string { return "dead" },
		"many regions": func(group int64) string { return fmt.Sprint("dead", group%40) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const groups, each, live, first = 500, 8, 2000, 1_000_000
				f := &fakeStore{stuck: first, hang: 7 * time.Second, takes: 20 * time.Millisecond}
				s := newService(f, Config{}, 0, 0)
				defer s.Close()
				for id := range int64(groups * each) {
					at := []mvcc.Span{mvcc.Key([]byte(dead(id % groups))), mvcc.Key(fmt.Append(nil, "other", id%groups/2))}
					s.Changed(regionOf(id), first+id, &regionpb.LeaseRecord{TTL: 10, Spans: at})
				}
				for id := range int64(live) {
					s.Changed(regionOf(id), id, &regionpb.LeaseRecord{TTL: 11, Spans: []mvcc.Span{mvcc.Key(fmt.Append(nil, "other", id%groups/2))}})
				}
				tick := func(d time.Duration) {
					for range d / (10 * time.Millisecond) {
						time.Sleep(10 * time.Millisecond)
						s.Tick()
						synctest.Wait()
					}
				}
				// It takes so long to find out about 40 regions, and to see that it is not the others.
				const find = 2 * time.Second
				tick(11*time.Second + spreadFor + find)
				if left := s.leases(); left != groups*each {
					t.Errorf("%d leases are left after %v, want the stuck ones, %d", left, spreadFor+find, groups*each)
				}
				f.mu.Lock()
				if n := len(f.ended); n > 1000 {
					t.Errorf("%d ends were tried", n)
				}
				f.stuck = 0
				f.mu.Unlock()
				tick(2 * time.Minute)
				if left := s.leases(); left != 0 {
					t.Errorf("%d leases are left", left)
				}
			})
		})
	}
}
