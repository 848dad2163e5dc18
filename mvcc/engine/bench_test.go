package engine

import (
	"context"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"braid/mvcc"
)

const benchValueBytes = 128

func benchKey(i int) []byte { return fmt.Appendf(nil, "/registry/pods/ns-%03d/pod-%08d", i%500, i) }

// benchEngine loads keys, each overwritten until it has the number of versions, in random order.
func benchEngine(b *testing.B, keys, versions int) (*Engine, mvcc.Revision) {
	b.Helper()
	e, err := Open(Options{Dir: b.TempDir(), CacheBytes: 512 << 20})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := e.Close(); err != nil {
			b.Error(err)
		}
	})
	rng := rand.New(rand.NewPCG(1, 1))
	value := make([]byte, benchValueBytes)
	rev := mvcc.Revision(1)
	create := make([]mvcc.Revision, keys)
	for n := range versions {
		order := rng.Perm(keys)
		for len(order) > 0 {
			batch := e.NewBatch()
			for _, k := range order[:min(200, len(order))] {
				rev++
				if n == 0 {
					create[k] = rev
				}
				for i := range value {
					value[i] = byte(rng.Uint32())
				}
				if err := batch.Put(&mvcc.Version{Key: benchKey(k), Mod: rev, Create: create[k], Version: int64(n + 1), Value: value}); err != nil {
					b.Fatal(err)
				}
			}
			if err := batch.Commit(); err != nil {
				b.Fatal(err)
			}
			if err := batch.Close(); err != nil {
				b.Fatal(err)
			}
			order = order[min(200, len(order)):]
		}
	}
	if err := e.Flush(); err != nil {
		b.Fatal(err)
	}
	// Compacted, so that no compaction runs beside what is measured.
	if err := e.db.Compact(context.Background(), []byte{0}, []byte{0xff}, true); err != nil {
		b.Fatal(err)
	}
	return e, rev
}

// cpu reports the processor time per operation, of all the process's goroutines: on a shared machine
// it says more than the wall clock.
func cpu(b *testing.B) func() {
	used := func() time.Duration {
		var r syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
			b.Fatal(err)
		}
		return time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	start := used()
	return func() { b.ReportMetric(float64((used()-start).Nanoseconds())/float64(b.N), "cpu-ns/op") }
}

// BenchmarkRead measures reads of a store whose blocks are in the cache.
func BenchmarkRead(b *testing.B) {
	for _, c := range []struct{ keys, versions int }{{100_000, 1}, {100_000, 10}} {
		b.Run(fmt.Sprintf("keys=%d/versions=%d", c.keys, c.versions), func(b *testing.B) { benchRead(b, c.keys, c.versions) })
	}
}

func benchRead(b *testing.B, keys, versions int) {
	e, rev := benchEngine(b, keys, versions)
	rng := rand.New(rand.NewPCG(2, 2))
	order := rng.Perm(keys)
	count := func(b *testing.B, at mvcc.Revision, want int64) {
		n, err := e.Count(mvcc.Span{}, at)
		if err != nil || (want > 0 && n != want) {
			b.Fatal(n, err)
		}
	}
	count(b, rev, int64(keys)) // warm
	b.Run("op=get", func(b *testing.B) {
		b.ReportAllocs()
		defer cpu(b)()
		for i := 0; b.Loop(); i++ {
			if _, ok, err := e.Get(benchKey(order[i%keys]), rev); !ok || err != nil {
				b.Fatal(ok, err)
			}
		}
	})
	b.Run("op=scan-one", func(b *testing.B) {
		b.ReportAllocs()
		defer cpu(b)()
		for i := 0; b.Loop(); i++ {
			n := 0
			if err := e.Scan(mvcc.Key(benchKey(order[i%keys])), rev, mvcc.ScanOptions{}, func(*mvcc.Version) bool { n++; return true }); n != 1 || err != nil {
				b.Fatal(n, err)
			}
		}
	})
	b.Run("op=get-absent", func(b *testing.B) {
		b.ReportAllocs()
		defer cpu(b)()
		for i := 0; b.Loop(); i++ {
			if _, ok, err := e.Get(append(benchKey(order[i%keys]), 'x'), rev); ok || err != nil {
				b.Fatal(ok, err)
			}
		}
	})
	for _, at := range []mvcc.Revision{rev, rev / 2} {
		b.Run(fmt.Sprintf("op=list/limit=10000/past=%v", at != rev), func(b *testing.B) {
			defer cpu(b)()
			for b.Loop() {
				n := 0
				if err := e.Scan(mvcc.Span{}, at, mvcc.ScanOptions{}, func(*mvcc.Version) bool { n++; return n < 10000 }); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("op=count/past=%v", at != rev), func(b *testing.B) {
			defer cpu(b)()
			for b.Loop() {
				count(b, at, 0)
			}
		})
	}
}

// BenchmarkApply measures batches of puts with a position, as apply writes them.
func BenchmarkApply(b *testing.B) {
	for _, puts := range []int{1, 16, 256} {
		for _, behind := range []bool{false, true} {
			b.Run(fmt.Sprintf("puts=%d/behind=%v", puts, behind), func(b *testing.B) { benchApply(b, puts, behind) })
		}
	}
}

// benchApply applies batches; behind another region every slot must be looked up (R1).
func benchApply(b *testing.B, puts int, behind bool) {
	e, err := Open(Options{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	defer e.Close()
	rev, value, position := mvcc.Revision(1), make([]byte, benchValueBytes), make([]byte, 80)
	if behind {
		commit(b, e, 2, []mvcc.Version{{Key: []byte("z"), Mod: 1 << 40, Create: 1, Version: 1}}, position)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	keys := make([][]byte, 100_000)
	for i := range keys {
		keys[i] = benchKey(i)
	}
	b.ReportAllocs()
	defer cpu(b)()
	for b.Loop() {
		batch := e.NewBatch()
		for range puts {
			rev++
			if err := batch.Put(&mvcc.Version{Key: keys[rng.IntN(len(keys))], Mod: rev, Create: rev, Version: 1, Value: value}); err != nil {
				b.Fatal(err)
			}
		}
		if err := batch.SetPosition(1, position); err != nil {
			b.Fatal(err)
		}
		if err := batch.Commit(); err != nil {
			b.Fatal(err)
		}
		if err := batch.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
