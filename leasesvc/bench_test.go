package leasesvc

import (
	"runtime"
	"testing"
	"time"

	"braid/region/regionpb"
)

// crowd is a core with the time of 900,000 leases of an hour, and the heap's bytes for each.
func crowd(b *testing.B) (c *Core, bytesPerLease float64) {
	b.Helper()
	const n = 900_000
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	c = New(Options{})
	c.Lead(7, 1)
	rec := &regionpb.LeaseRecord{TTL: 3600}
	for id := range int64(n) {
		c.Loaded(7, 1, id, rec, 0)
	}
	c.LoadedAll(7, 1)
	runtime.GC()
	runtime.ReadMemStats(&after)
	return c, float64(after.HeapAlloc-before.HeapAlloc) / n
}

// BenchmarkRenew: one renewal among 900,000 leases.
func BenchmarkRenew(b *testing.B) {
	c, bytes := crowd(b)
	c.Confirmed(7, 1, time.Minute)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if out, _, _ := c.Renew(7, int64(i*7919%900_000), time.Minute); out != Renewed {
			b.Fatal(out)
		}
	}
	b.ReportMetric(bytes, "heap-B/lease")
}

// BenchmarkEnd: a term ends, with the time of 900,000 leases.
func BenchmarkEnd(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		c, _ := crowd(b)
		b.StartTimer()
		c.End(7)
		if n := c.Total(); n != 0 || c.Due(10*time.Hour) {
			b.Fatal(n)
		}
	}
}
