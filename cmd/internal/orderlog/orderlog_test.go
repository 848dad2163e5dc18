package orderlog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"braid/cmd/internal/orderlog/orderlogtest"
	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// TestWALIsEtcds compares the log with what etcd's own writer made of the same requests.
func TestWALIsEtcds(t *testing.T) {
	dir := t.TempDir()
	w, err := createWAL(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.append([]request{
		{kind: kindLeaseSet, rev: 1, lease: 7, ttl: 60},
		{kind: kindWrite, rev: 2, changes: []change{{key: []byte("a"), value: []byte("1"), lease: 7}}},
		{kind: kindWrite, rev: 3, changes: []change{{key: []byte("a"), delete: true}}},
		{kind: kindCompaction, compact: 3},
		{kind: kindWrite, rev: 4, changes: []change{{key: []byte("b"), value: []byte("2")}, {key: []byte("c"), delete: true}}},
		{kind: kindLeaseEnd, rev: 4, lease: 7},
	}); err != nil {
		t.Fatal(err)
	}
	if err := w.close(); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(dir, walName))
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/etcd-3.7.3.wal")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("the log differs from etcd's:\n%x\n%x", got, want)
	}
}

// store feeds recorders what the replicas of two regions and a member of pd would.
type store struct {
	t    *testing.T
	dir  string
	rec  *Recorder
	died error
}

func (s *store) open(fresh bool) error {
	r, err := Open(Config{DataDir: s.dir, Fresh: fresh, Fatal: func(err error) { s.died = err }})
	s.rec = r
	return err
}

func (s *store) reopen() {
	s.t.Helper()
	if err := s.rec.Close(); err != nil {
		s.t.Fatal(err)
	}
	if err := s.open(false); err != nil {
		s.t.Fatal(err)
	}
}

// entry is a put of each key, each a command of its own.
func (s *store) entry(id pdpb.RegionID, n uint64, cut pdpb.Cut, index uint64, rev mvcc.Revision, keys ...string) {
	e := regionpb.Entry{}
	for _, k := range keys {
		c := regionpb.Command{}
		if k != "" { // a command that changed nothing
			c.Effects = []regionpb.Effect{{Key: []byte(k), Value: []byte("v")}}
		}
		e.Commands = append(e.Commands, c)
	}
	s.rec.Applied(id, index, &pdpb.Item{Region: id, N: n, Cut: cut}, &e, rev, false)
}

func (s *store) commit(id pdpb.RegionID, n uint64, cut pdpb.Cut, rev mvcc.Revision, sub int64, key string) {
	p := &regionpb.Prepared{Attempt: 9, Effects: []regionpb.Effect{{Key: []byte(key), Delete: true}}, Subs: []int64{sub}}
	s.rec.Decided(id, &pdpb.Item{Region: id, N: n, Cut: cut}, p, pdpb.Decision{Attempt: 9, Commit: true, Rev: rev})
}

// lease is an entry that writes a lease's record, or ends the lease and deletes keys.
func (s *store) lease(id pdpb.RegionID, n uint64, cut pdpb.Cut, index uint64, rev mvcc.Revision, lease int64, rec *regionpb.LeaseRecord, keys ...string) {
	e := regionpb.Entry{Commands: []regionpb.Command{{Records: []regionpb.RecordEffect{leaseRecord(lease, rec)}}}}
	for _, k := range keys {
		e.Commands[0].Effects = append(e.Commands[0].Effects, regionpb.Effect{Key: []byte(k), Delete: true, Detach: lease})
	}
	s.rec.Applied(id, index, &pdpb.Item{Region: id, N: n, Cut: cut}, &e, rev, false)
}

func leaseRecord(lease int64, rec *regionpb.LeaseRecord) regionpb.RecordEffect {
	x := regionpb.RecordEffect{Key: regionpb.LeaseKey(lease)}
	if rec != nil {
		x.Value = rec.Append(nil)
	}
	return x
}

// ends is a region's part of the end of a lease in an attempt; home says that the record is there.
func (s *store) ends(id pdpb.RegionID, n uint64, cut pdpb.Cut, attempt pdpb.AttemptID, rev mvcc.Revision, lease int64, home bool, keys ...string) {
	p := &regionpb.Prepared{Attempt: attempt, Records: []regionpb.RecordEffect{{Key: regionpb.RegisteredKey([]byte("m"), lease)}}}
	if home {
		p.Records[0] = leaseRecord(lease, nil)
	}
	for i, k := range keys {
		p.Effects = append(p.Effects, regionpb.Effect{Key: []byte(k), Delete: true, Detach: lease})
		p.Subs = append(p.Subs, int64(i))
	}
	s.rec.Decided(id, &pdpb.Item{Region: id, N: n, Cut: cut}, p, pdpb.Decision{Attempt: attempt, Commit: true, Rev: rev})
}

// first is the store's beginning: two regions in cuts 1 and 2, a transaction over both, a compaction.
func (s *store) first() {
	s.entry(2, 1, 1, 11, 3, "x", "", "y") // before region 1, whose revisions come first
	s.entry(1, 1, 1, 7, 1, "a", "b")
	s.commit(2, 2, 2, 6, 0, "x")
	s.commit(1, 2, 2, 6, 1, "a")
}

func (s *store) events() {
	s.rec.PDApplied(1)
	s.rec.Compacted(2, 0, 4)
	s.rec.PDApplied(2)
}

// through writes the log as Run does.
func (s *store) through(cut pdpb.Cut) error {
	s.rec.mu.Lock()
	defer s.rec.mu.Unlock()
	return s.rec.advance(cut)
}

// log reads the requests back.
func (s *store) log() string {
	s.t.Helper()
	return orderlogtest.Read(s.t, s.dir)
}

func newStore(t *testing.T) *store {
	s := &store{t: t, dir: t.TempDir()}
	if err := s.open(true); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.rec.Close() })
	return s
}

const firstLog = "1 put a; 2 put b; 3 put x; 4 put y; 5 del x del a; 6 compact 4; "

// TestOrder: whatever comes first, the log has the order of the cuts.
func TestOrder(t *testing.T) {
	s := newStore(t)
	s.first()
	if got := s.log(); got != "" {
		t.Errorf("written before the regions are complete: %s", got)
	}
	s.events()
	if err := s.through(2); err != nil {
		t.Fatal(err)
	}
	if got := s.log(); got != firstLog {
		t.Errorf("got  %s\nwant %s", got, firstLog)
	}
}

// TestRestart kills and restarts the store after each step; replicas repeat what they applied.
func TestRestart(t *testing.T) {
	s := newStore(t)
	for range 3 {
		s.first()
		s.reopen()
		s.events()
		s.reopen()
	}
	if err := s.through(2); err != nil {
		t.Fatal(err)
	}
	s.reopen()
	s.first()
	s.events()
	s.entry(1, 3, 3, 9, 6, "c")
	s.rec.PDApplied(3)
	if err := s.through(3); err != nil {
		t.Fatal(err)
	}
	if got, want := s.log(), firstLog+"7 put c; "; got != want || s.died != nil {
		t.Errorf("%v: got  %s\nwant %s", s.died, got, want)
	}
}

// TestLeases: grants and ends have their place, only ends with keys a revision; what else a lease's
// record is written for is none of an etcd's requests.
func TestLeases(t *testing.T) {
	s := newStore(t)
	steps := func() {
		s.lease(1, 1, 1, 7, 1, 70, &regionpb.LeaseRecord{TTL: 60})
		s.lease(2, 1, 1, 7, 1, 71, &regionpb.LeaseRecord{TTL: 60})
		s.rec.PDApplied(1)
		s.entry(1, 2, 2, 8, 1, "a", "b")
		s.lease(1, 2, 2, 9, 3, 70, &regionpb.LeaseRecord{TTL: 60, Remaining: 30, Spans: []mvcc.Span{{Start: []byte("m")}}})
		s.entry(2, 2, 2, 8, 3, "x")
		s.lease(1, 2, 2, 10, 3, 70, &regionpb.LeaseRecord{TTL: 60})
		s.rec.PDApplied(2)
		// Three ends in one cut, of which only the second, over two regions, deletes anything.
		s.lease(2, 3, 3, 9, 4, 72, &regionpb.LeaseRecord{TTL: 60})
		s.ends(1, 3, 3, 20, 4, 71, false)
		s.ends(2, 4, 3, 20, 4, 71, true)
		s.ends(1, 3, 3, 21, 5, 70, true)
		s.ends(2, 4, 3, 21, 5, 70, false, "x")
		s.ends(2, 4, 3, 22, 5, 72, true)
		s.rec.PDApplied(3)
		s.lease(1, 4, 4, 11, 5, 70, &regionpb.LeaseRecord{TTL: 60}) // its id again
		s.lease(1, 4, 4, 12, 5, 70, nil, "a", "b")
		s.rec.PDApplied(4)
	}
	const want = "1 grant 70; 2 grant 71; 3 put a; 4 put b; 5 put x; 6 grant 72; 7 revoke 71; 8 revoke 70; 9 revoke 72; 10 grant 70; 11 revoke 70; "
	steps()
	if err := s.through(2); err != nil { // a restart between a grant and the next write of its record
		t.Fatal(err)
	}
	s.reopen()
	steps()
	if err := s.through(4); err != nil {
		t.Fatal(err)
	}
	s.reopen()
	steps()
	if got := s.log(); got != want || s.died != nil || s.rec.merge.last != 6 {
		t.Errorf("%v, revision %d: got  %s\nwant %s", s.died, s.rec.merge.last, got, want)
	}
}

// TestTornFrame: a journal that was cut within its last frame goes on from the frame before.
func TestTornFrame(t *testing.T) {
	s := newStore(t)
	s.first()
	if err := s.rec.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(s.dir, Dir, "order.journal")
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, info.Size()-3); err != nil {
		t.Fatal(err)
	}
	if err := s.open(false); err != nil {
		t.Fatal(err)
	}
	s.first()
	s.events()
	if err := s.through(2); err != nil {
		t.Fatal(err)
	}
	if got := s.log(); got != firstLog {
		t.Errorf("got  %s\nwant %s", got, firstLog)
	}
}

// TestHoles: what would make the record a lie is an error, and a snapshot ends it.
func TestHoles(t *testing.T) {
	for name, tc := range map[string]func(s *store) error{
		"a revision": func(s *store) error { s.entry(1, 1, 1, 7, 2, "a"); return s.through(1) },
		"an item":    func(s *store) error { s.entry(1, 2, 1, 7, 1, "a"); return s.died },
		"a part of a transaction twice": func(s *store) error {
			s.entry(1, 1, 1, 7, 1, "a")
			s.entry(2, 1, 1, 7, 1, "b")
			return s.through(1)
		},
		"a lease that never began": func(s *store) error { s.lease(1, 1, 1, 7, 1, 70, nil); return s.through(1) },
		"the place of a grant": func(s *store) error {
			s.lease(1, 1, 1, 7, 2, 70, &regionpb.LeaseRecord{TTL: 60})
			return s.through(1)
		},
		"an end with two revisions": func(s *store) error {
			s.lease(1, 1, 1, 7, 1, 70, &regionpb.LeaseRecord{TTL: 60})
			s.ends(1, 2, 2, 9, 2, 70, true, "a")
			s.ends(2, 1, 2, 9, 3, 70, false, "x")
			return s.through(2)
		},
		"a store that was used without": func(s *store) error {
			s.rec.Close()
			if err := os.Remove(filepath.Join(s.dir, Dir, "order.journal")); err != nil {
				return err
			}
			err := s.open(false)
			if err != nil {
				_ = s.open(true)
			}
			return err
		},
	} {
		if err := tc(newStore(t)); !errors.Is(err, ErrHole) {
			t.Errorf("%s: %v", name, err)
		}
	}
	s := newStore(t)
	s.first()
	s.rec.PDApplied(1)
	if err := s.through(1); err != nil {
		t.Fatal(err)
	}
	s.rec.PDApplied(3) // cut 2 came in a snapshot
	s.entry(1, 7, 7, 70, 70, "later")
	s.reopen()
	s.entry(1, 8, 8, 80, 80, "later")
	if got, want := s.log(), strings.SplitAfter(firstLog, "y; ")[0]; got != want || s.died != nil {
		t.Errorf("%v: got  %s\nwant %s", s.died, got, want)
	}
}

// TestRun writes what is complete, waits for what is not, and ends with its context.
func TestRun(t *testing.T) {
	s := newStore(t)
	ctx, cancel := context.WithCancel(context.Background())
	asked := make(chan pdpb.Cut)
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.rec.Run(ctx, func(ctx context.Context, cut pdpb.Cut) error {
			select {
			case asked <- cut:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	s.entry(1, 1, 1, 7, 1, "a")
	s.rec.PDApplied(1)
	if cut := <-asked; cut != 1 {
		t.Errorf("asked for cut %d", cut)
	}
	s.entry(1, 2, 2, 8, 2, "b")
	s.rec.PDApplied(2)
	if cut := <-asked; cut != 2 {
		t.Errorf("asked for cut %d", cut)
	}
	if got := s.log(); !strings.HasPrefix(got, "1 put a; ") {
		t.Errorf("got %s", got)
	}
	cancel()
	<-done
}

func TestFrameCodec(t *testing.T) {
	f := &frame{kind: frameRegion, region: 3, cut: 9, at: place{4, phaseCommits, 77}, requests: []request{
		{kind: kindWrite, rev: 12, changes: []change{{sub: 3, key: []byte("k"), value: []byte("v"), lease: -5}, {key: []byte{}, value: []byte{}, delete: true}}},
		{kind: kindCompaction, compact: -1, changes: []change{}},
		{kind: kindLeaseSet, rev: 12, lease: -9, ttl: 60, changes: []change{}},
	}}
	b := f.append(nil)
	back, err := decodeFrame(b)
	if err != nil || fmt.Sprintf("%+v", back) != fmt.Sprintf("%+v", f) {
		t.Errorf("%v: %+v, want %+v", err, back, f)
	}
	for n := range b {
		if _, err := decodeFrame(b[:n]); err == nil {
			t.Errorf("%d of %d bytes are taken for a frame", n, len(b))
		}
	}
}
