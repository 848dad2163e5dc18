package wal_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
	"braid/raftstore/wal"
)

// BenchmarkAppend is 256 clients in a closed loop over some groups on the real disk, as
// each group's owner would drive them: what waits in a group is one record, one record per group
// is under way at a time, entries of 256 bytes, truncated as they go.
func BenchmarkAppend(b *testing.B) {
	for _, groups := range []int{1, 64} {
		b.Run(fmt.Sprintf("groups=%d", groups), func(b *testing.B) { benchmarkAppend(b, groups, 256) })
	}
}

func benchmarkAppend(b *testing.B, groups, clients int) {
	l, err := wal.Open(b.TempDir(), wal.Options{})
	if err != nil {
		b.Fatal(err)
	}
	data := make([]byte, 256)
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	b.ResetTimer()
	began := time.Now()
	var wg sync.WaitGroup
	for k := range groups {
		g := l.Group(raftid.GroupID(k + 1))
		todo := b.N / groups
		if k == 0 {
			todo += b.N % groups
		}
		perGroup := clients / groups
		wg.Go(func() {
			done := make(chan int, 1)
			waiting, inFlight, index, sent := perGroup, 0, uint64(1), 0
			for sent < todo || inFlight > 0 {
				if inFlight == 0 && waiting > 0 && sent < todo {
					n := min(waiting, todo-sent)
					rec := &wal.Record{Done: func() { done <- n }}
					for range n {
						i, term := index, uint64(1)
						rec.Entries = append(rec.Entries, &raftpb.Entry{Index: &i, Term: &term, Data: data})
						index++
					}
					if index%1000 < uint64(n) && index > 2000 {
						rec.Truncate = index - 2000
					}
					waiting, inFlight, sent = waiting-n, n, sent+n
					g.Append(rec)
				}
				n := <-done
				waiting, inFlight = waiting+n, inFlight-n
			}
		})
	}
	wg.Wait()
	took := time.Since(began)
	b.StopTimer()
	s := l.Stats()
	b.ReportMetric(float64(b.N)/took.Seconds(), "entries/s")
	b.ReportMetric(float64(s.Syncs)/took.Seconds(), "syncs/s")
	b.ReportMetric(float64(b.N)/float64(max(s.Syncs, 1)), "entries/sync")
	if err := l.Close(); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkRecover opens a log of b.N entries of 256 bytes in 64 groups.
func BenchmarkRecover(b *testing.B) {
	dir := b.TempDir()
	l, err := wal.Open(dir, wal.Options{})
	if err != nil {
		b.Fatal(err)
	}
	data := make([]byte, 256)
	const per = 50
	var wg sync.WaitGroup
	for n := 0; n*per*64 < b.N; n++ {
		for k := range raftid.GroupID(64) {
			rec := &wal.Record{}
			for j := range per {
				i, term := uint64(n*per+j+1), uint64(1)
				rec.Entries = append(rec.Entries, &raftpb.Entry{Index: &i, Term: &term, Data: data})
			}
			wg.Add(1)
			rec.Done = wg.Done
			l.Group(k + 1).Append(rec)
		}
		wg.Wait()
	}
	if err := l.Close(); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(256)
	b.ResetTimer()
	if l, err = wal.Open(dir, wal.Options{}); err != nil {
		b.Fatal(err)
	}
	b.StopTimer()
	if err := l.Close(); err != nil {
		b.Fatal(err)
	}
}
