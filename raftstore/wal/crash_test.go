package wal_test

import (
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
	crashRuns = flag.Int("crash-runs", 150, "seeds of TestCrash")
)

// TestCrash drives random records through logs that lose power at random operations of the
// writer, the preparer and the rewriter, again and again over what the last crash left. After
// each one all groups together must be in the state after some number of the records, in the
// order of Append, and no acknowledged one may be missing.
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
	if *crashSeed == 0 && (total.Recycled == 0 || total.Rewritten == 0) {
		t.Fatal("the runs never recycled or rewrote anything")
	}
}

// crasher loses power at the n-th operation from now on.
type crasher struct {
	fs    *walmem.FS
	rng   *rand.Rand
	mode  walmem.Mode
	left  atomic.Int64
	acked *atomic.Int64 // records known durable

	found    *walmem.FS // what is found after the crash
	ackedMin int64      // acked just before it
	crashed  chan struct{}
}

func (c *crasher) op(op walmem.Op) error {
	if op.Kind == "read" || c.left.Add(-1) != 0 {
		return nil
	}
	c.ackedMin = c.acked.Load()
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
		next, n, err := crashLife(rng, fs, o, w, base, total)
		if err != nil {
			return fmt.Errorf("life %d (%d groups, segments of %d): %w", life, groups, o.SegmentBytes, err)
		}
		fs, base = next, w.at(base, n)
	}
	return nil
}

// crashLife opens the log, checks that it holds base, works until a crash, and returns what is
// found after it and how many of the records are in it.
func crashLife(rng *rand.Rand, fs *walmem.FS, o wal.Options, w *workload, base map[raftid.GroupID]model, total *wal.Stats) (*walmem.FS, int, error) {
	var acked atomic.Int64
	c := &crasher{fs: fs, rng: rand.New(rand.NewPCG(rng.Uint64(), 0)), acked: &acked, crashed: make(chan struct{}),
		mode: walmem.Mode(rng.IntN(3))}
	c.left.Store(int64(1 + rng.IntN(400)))
	fs.Inject(c.op)
	o.FS = fs
	l, err := wal.Open("/wal", o)
	if err != nil {
		return nil, 0, err
	}
	if rng.IntN(3) == 0 {
		l.SharedFsync(true)
	}
	if err := w.check(l, base); err != nil {
		return nil, 0, fmt.Errorf("after reopening: %w", err)
	}
	order := make(chan error, 1)
	crashed := false
	for k := 0; !crashed && k < 3000; k++ {
		id, r := w.next()
		wait := make(chan struct{})
		r.Done = func() {
			if got := acked.Swap(int64(k + 1)); got > int64(k) {
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
				return nil, 0, err
			}
			if got.String() != w.now[id].String() {
				return nil, 0, fmt.Errorf("group %d reads\n %v, want\n %v", id, got, w.now[id])
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
		return nil, 0, err
	}
	s := l.Totals()
	total.Syncs += s.Syncs
	total.Records += s.Records
	total.Created += s.Created
	total.Recycled += s.Recycled
	total.Rewritten += s.Rewritten
	select {
	case err := <-order:
		return nil, 0, err
	default:
	}
	fs.Inject(nil)
	found, least := fs, len(w.of)
	select {
	case <-c.crashed:
		found, least = c.found, int(c.ackedMin)
	default: // a clean stop
	}
	o.FS = found
	l, err = wal.Open("/wal", o)
	if err != nil {
		return nil, 0, err
	}
	defer l.Close()
	var first error
	for n := least; n <= len(w.of); n++ {
		err := w.check(l, w.at(base, n))
		if err == nil {
			return found, n, l.Close()
		}
		if first == nil {
			first = err
		}
	}
	return nil, 0, fmt.Errorf("no state after %d to %d records is what was found; the first differs in %w", least, len(w.of), first)
}
