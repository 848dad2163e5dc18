package wal_test

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"braid/raftstore/raftid"
	"braid/raftstore/wal"
	"braid/raftstore/wal/walmem"
)

var (
	crashSeed = flag.Uint64("crash-seed", 0, "run only this seed of TestCrash")
	crashRuns = flag.Int("crash-runs", 100, "seeds of TestCrash")
)

// TestCrash drives random records through logs that lose power at random operations of the
// writer, the preparer and the rewriter, again and again over what the last crash left. After
// each one all groups together must be in the state after some number of the records, in the
// order of Append, and no acknowledged one may be missing. Where one group has priority that
// holds for every group by itself.
func TestCrash(t *testing.T) {
	seeds := *crashRuns
	if testing.Short() {
		seeds = 10
	}
	var total wal.Stats
	for seed := uint64(1); seed <= uint64(seeds); seed++ {
		if *crashSeed != 0 && seed != *crashSeed {
			continue
		}
		if err := crashRun(seed, &total); err != nil {
			t.Fatalf("seed %d (go test ./raftstore/wal -run TestCrash -crash-seed %d): %v", seed, seed, err)
		}
	}
	t.Logf("%d syncs, %d records, %d segments created, %d recycled, %d bytes rewritten",
		total.Syncs, total.Records, total.Created, total.Recycled, total.Rewritten)
	if *crashSeed == 0 && !t.Failed() && (total.Recycled == 0 || total.Rewritten == 0) {
		t.Fatal("the runs never recycled or rewrote anything")
	}
}

// crasher loses power at the n-th operation from now on.
type crasher struct {
	fs    *walmem.FS
	rng   *rand.Rand
	mode  walmem.Mode
	left  atomic.Int64
	acked *acks

	found    *walmem.FS // what is found after the crash
	ackedMin []int64    // acked just before it
	crashed  chan struct{}
}

// acks says, for all groups (0) and each one, how many of the records are known to be durable.
type acks [16]atomic.Int64

func (a *acks) load() []int64 {
	var out []int64
	for i := range a {
		out = append(out, a[i].Load())
	}
	return out
}

func (c *crasher) op(op walmem.Op) error {
	if op.Kind == "read" || c.left.Add(-1) != 0 {
		return nil
	}
	c.ackedMin = c.acked.load()
	c.found = c.fs.Crash(c.rng, c.mode)
	close(c.crashed)
	return nil
}

func crashRun(seed uint64, total *wal.Stats) error {
	rng := rand.New(rand.NewPCG(seed, 0))
	fs := walmem.New()
	base := map[raftid.GroupID]model{}
	o := wal.Options{
		SegmentBytes:  wal.SegmentBytesMin << rng.IntN(3),
		SegmentsKept:  2 + rng.IntN(2),
		CacheBytes:    int64(1000 << rng.IntN(6)),
		BatchBytesMax: int64(1000 << rng.IntN(6)),
		OnFatal:       func(err error) { panic(fmt.Sprintf("seed %d: %v", seed, err)) },
	}
	groups := 1 + rng.IntN(12)
	for life := range 6 {
		w := newWorkload(rng, groups)
		for id, m := range base {
			w.now[id] = m
		}
		if rng.IntN(20) == 0 {
			w.big = 30000 // larger than a small segment
		}
		next, state, err := crashLife(rng, fs, o, w, base, total)
		if err != nil {
			return fmt.Errorf("life %d (%d groups, segments of %d): %w", life, groups, o.SegmentBytes, err)
		}
		fs, base = next, state
	}
	return nil
}

// crashLife opens the log, checks that it holds base, works until a crash, and returns what is
// found after it and every group's state in it.
func crashLife(rng *rand.Rand, fs *walmem.FS, o wal.Options, w *workload, base map[raftid.GroupID]model, total *wal.Stats) (*walmem.FS, map[raftid.GroupID]model, error) {
	var acked acks
	c := &crasher{fs: fs, rng: rand.New(rand.NewPCG(rng.Uint64(), 0)), acked: &acked, crashed: make(chan struct{}),
		mode: walmem.Mode(rng.IntN(3))}
	c.left.Store(int64(1 + rng.IntN(400)))
	fs.Inject(c.op)
	o.FS = fs
	l, err := wal.Open("/wal", o)
	if err != nil {
		return nil, nil, err
	}
	priority := false
	switch rng.IntN(4) {
	case 0:
		l.SharedFsync(true)
	case 1:
		l.SetPriority(1)
		priority = w.groups > 1
	}
	if err := w.check(l, base); err != nil {
		return nil, nil, fmt.Errorf("after reopening: %w", err)
	}
	order := make(chan error, 1)
	crashed := false
	for k := 0; !crashed && k < 3000; k++ {
		id, r := w.next()
		wait := make(chan struct{})
		r.Done = func() {
			acked[id].Store(int64(k + 1))
			if got := acked[0].Swap(int64(k + 1)); got > int64(k) && !priority {
				select {
				case order <- fmt.Errorf("record %d acknowledged after %d", k, got):
				default:
				}
			}
			close(wait)
		}
		if rng.IntN(3) == 0 {
			r.Done = nil
			close(wait)
		}
		l.Group(id).Append(r)
		switch rng.IntN(10) {
		case 0:
			l.Kick()
			<-wait
		case 1:
			got, err := observe(l, id)
			if err != nil {
				return nil, nil, err
			}
			if got.String() != w.now[id].String() {
				return nil, nil, fmt.Errorf("group %d reads\n %v, want\n %v", id, got, w.now[id])
			}
		}
		select {
		case <-c.crashed:
			crashed = true
		default:
		}
	}
	if !crashed && rng.IntN(2) == 0 {
		c.left.Store(1) // at the next operation, of Close at the latest
	}
	if err := l.Close(); err != nil {
		return nil, nil, err
	}
	s := l.Totals()
	total.Syncs += s.Syncs
	total.Records += s.Records
	total.Created += s.Created
	total.Recycled += s.Recycled
	total.Rewritten += s.Rewritten
	select {
	case err := <-order:
		return nil, nil, err
	default:
	}
	fs.Inject(nil)
	found, least := fs, acked.load()
	select {
	case <-c.crashed:
		found, least = c.found, c.ackedMin
	default: // a clean stop: everything is there
		for i := range least {
			least[i] = int64(len(w.of))
		}
	}
	o.FS = found
	l, err = wal.Open("/wal", o)
	if err != nil {
		return nil, nil, err
	}
	state, err := w.match(l, base, least, priority)
	return found, state, errors.Join(err, l.Close())
}

// match returns the state that the log is in, which must be one after at least least[0] records,
// or, when groups are to be looked at by themselves, least[id] for each.
func (w *workload) match(l *wal.Log, base map[raftid.GroupID]model, least []int64, apart bool) (map[raftid.GroupID]model, error) {
	var err error
	for n := int(least[0]); !apart && n <= len(w.of); n++ {
		state := w.at(base, n)
		miss := w.check(l, state)
		if miss == nil {
			return state, nil
		}
		err = cmp.Or(err, fmt.Errorf("no state after %d to %d records is what was found; the first differs in %w", n, len(w.of), miss))
	}
	if !apart {
		return nil, err
	}
	out := map[raftid.GroupID]model{}
	for id := raftid.GroupID(1); id <= raftid.GroupID(w.groups); id++ {
		got, err := observe(l, id)
		if err != nil {
			return nil, err
		}
		ok, m, found := false, base[id], got.String()
		for n := 0; n <= len(w.of) && !ok; n++ {
			if n > 0 && w.of[n-1] == id {
				m = w.states[n-1]
			}
			if n >= int(least[id]) && m.String() == found {
				out[id], ok = m, true
			}
		}
		if !ok {
			return nil, fmt.Errorf("group %d is in no state after %d to %d records: %v", id, least[id], len(w.of), got)
		}
	}
	return out, nil
}
