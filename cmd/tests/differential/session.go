package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// Setup says which programs a session compares.
type Setup struct {
	Etcd, Braid string // paths of binaries
	// Splits are the region borders of the store of many regions; none: it has one as well.
	Splits []string
	// OwnFlags says that the tested program knows braid's own flags: the store of many regions gets
	// its borders by flag, and a further one runs as a single group. False when another program
	// stands in for braid.
	OwnFlags bool
	// Tamper is planted between the store of many regions and the comparison.
	Tamper func(t *Target, r Request, call func(Request) Answer) Answer
	// AuditEvery is the number of requests between comparisons of the whole state, 0: never.
	AuditEvery int
	// RestartEvery is the number of requests between kill -9 and restart of the tested stores, 0:
	// never.
	RestartEvery int
	// Without lists methods that are not sent.
	Without []string
}

// Session is a few stores that started empty and have been given the same requests since. One
// goroutine owns it.
type Session struct {
	setup  Setup
	dir    string
	etcd   *Target   // the reference
	tested []*Target // braid with one region, with many, and as a single group
	splits splits
	world  world
	// compactedZero: a Compact(0) succeeded (see acceptedDifferences).
	compactedZero bool
	compactions   map[int64]bool // revisions that were compacted at (likewise)
	stats         Stats
	steps         int
}

// Stats counts what a session has seen.
type Stats struct {
	Requests int
	Errors   int // requests that the reference refused, per plan
	Spread   int // writes over several regions of the store of many
	Withheld int // transactions that etcd was not asked, see withhold
	Accepted map[string]int
}

// Difference is the first disagreement of a sequence.
type Difference struct {
	Request Request // as it was sent
	Store   string
	Want    Answer
	Got     Answer
	Why     string // set when it is not about two answers that differ
}

func (d *Difference) String() string {
	if d.Why != "" {
		return fmt.Sprintf("%s: %s\n  request  %s\n  answer   %s", d.Store, d.Why, short(d.Request.Text()), short(d.Got.String()))
	}
	return fmt.Sprintf("%s answers unlike etcd\n  request  %s\n  etcd     %s\n  %-8s %s",
		d.Store, short(d.Request.Text()), short(d.Want.String()), d.Store, short(d.Got.String()))
}

// short keeps a printed line readable when a value is a megabyte long.
func short(s string) string {
	const bytesMax = 1500
	if len(s) <= bytesMax {
		return s
	}
	return fmt.Sprintf("%s ... (%d bytes) ... %s", s[:bytesMax/2], len(s), s[len(s)-bytesMax/2:])
}

// NewSession starts the stores on empty data.
func NewSession(ctx context.Context, setup Setup) (*Session, error) {
	dir, err := os.MkdirTemp("", "braid-differential-")
	if err != nil {
		return nil, err
	}
	s := &Session{setup: setup, dir: dir, splits: newSplits(setup.Splits)}
	s.stats.Accepted = map[string]int{}
	s.world = world{current: 1, compact: -1, lookup: s.lookup(ctx)}

	starts := []struct {
		name, bin string
		args      []string
		tamper    func(t *Target, r Request, call func(Request) Answer) Answer
	}{
		{"etcd", setup.Etcd, []string{"--unsafe-no-fsync"}, nil},
		{"one", setup.Braid, nil, nil},
		{"many", setup.Braid, splitArgs(setup), setup.Tamper},
		{"single", setup.Braid, []string{"--single-group"}, nil},
	}
	if !setup.OwnFlags {
		starts = starts[:3]
	}
	all := make([]*Target, len(starts))
	errs := make([]error, len(starts))
	var wg sync.WaitGroup
	for i, start := range starts {
		wg.Go(func() {
			if all[i], errs[i] = startTarget(ctx, start.name, start.bin, filepath.Join(dir, start.name), start.args...); errs[i] == nil {
				all[i].tamper = start.tamper
			}
		})
	}
	wg.Wait()
	s.etcd, s.tested = all[0], all[1:]
	if err := errors.Join(errs...); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func splitArgs(setup Setup) []string {
	if !setup.OwnFlags || len(setup.Splits) == 0 {
		return nil
	}
	keys := ""
	for i, k := range setup.Splits {
		if i > 0 {
			keys += ","
		}
		keys += k
	}
	return []string{"--region-split-keys=" + keys}
}

// all returns the stores, the reference first.
func (s *Session) all() []*Target { return append([]*Target{s.etcd}, s.tested...) }

// Close ends the stores and removes their data.
func (s *Session) Close() error {
	var errs []error
	for _, t := range s.all() {
		if t != nil {
			errs = append(errs, t.close())
		}
	}
	return errors.Join(append(errs, os.RemoveAll(s.dir))...)
}

func (s *Session) lookup(ctx context.Context) func(key []byte) *pb.RangeResponse {
	return func(key []byte) *pb.RangeResponse {
		if len(key) == 0 {
			return nil
		}
		a := s.etcd.Do(ctx, Request{"Range", &pb.RangeRequest{Key: key}})
		resp, _ := a.Msg.(*pb.RangeResponse)
		return resp
	}
}

// Step sends one request to the stores and returns the difference found, nil if none. An error is
// the harness's own trouble.
func (s *Session) Step(ctx context.Context, symbolic Request) (*Difference, error) {
	s.steps++
	s.stats.Requests++
	r := s.world.resolve(symbolic)
	if d, withheld := s.withhold(ctx, r); d != nil || withheld {
		return d, ctx.Err()
	}
	if s.splits.writeSpread(r) == manyRegions {
		s.stats.Spread++
	}

	want := s.etcd.Do(ctx, r)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if !want.OK() {
		s.stats.Errors++
		switch want.Code {
		case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
			return nil, fmt.Errorf("the reference etcd is in trouble: %s\n%s", want, s.etcd.node.LogTail())
		}
	}
	s.learn(r, want)
	if d := s.compare(ctx, r, want); d != nil {
		return d, ctx.Err()
	}
	if n := s.setup.RestartEvery; n > 0 && s.steps%n == 0 {
		for _, t := range s.tested {
			if err := t.restart(ctx); err != nil {
				return &Difference{Request: r, Store: t.Name, Why: err.Error()}, nil
			}
		}
		return s.Audit(ctx)
	}
	if n := s.setup.AuditEvery; n > 0 && s.steps%n == 0 {
		return s.Audit(ctx)
	}
	return nil, nil
}

// compare sends r to the tested stores and compares with the reference's answer.
func (s *Session) compare(ctx context.Context, r Request, want Answer) *Difference {
	answers := make([]Answer, len(s.tested))
	var wg sync.WaitGroup
	for i, t := range s.tested {
		wg.Go(func() { answers[i] = t.Do(ctx, r) })
	}
	wg.Wait()
	for i, t := range s.tested {
		if d := s.judge(r, want, t, answers[i]); d != nil {
			return d
		}
	}
	return nil
}

func (s *Session) judge(r Request, want Answer, t *Target, got Answer) *Difference {
	if equal(want, got) {
		return nil
	}
	for _, known := range acceptedDifferences {
		if known.match(s, r, want, got) {
			s.stats.Accepted[known.name]++
			return nil
		}
	}
	return &Difference{Request: r, Store: t.Name, Want: want, Got: got}
}

// learn keeps the world up to date from the reference's answer.
func (s *Session) learn(r Request, want Answer) {
	if !want.OK() {
		return
	}
	if header, ok := want.Msg.(interface{ GetHeader() *pb.ResponseHeader }); ok {
		if rev := header.GetHeader().GetRevision(); rev > s.world.current {
			s.world.current = rev
		}
	}
	if m, ok := r.Msg.(*pb.CompactionRequest); ok {
		s.world.compact = m.Revision
		s.compactedZero = s.compactedZero || m.Revision == 0
		if s.compactions == nil {
			s.compactions = map[int64]bool{}
		}
		s.compactions[m.Revision] = true
	}
}

// everything reads the whole store, keys only: revisions and versions tell all writes apart.
var everything = Request{"Range", &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, KeysOnly: true}}

// Audit compares the whole state: values, a hash of the history, what is still readable of it, leases.
func (s *Session) Audit(ctx context.Context) (*Difference, error) {
	audits := []Request{
		{"Range", &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}},
		{"HashKV", &pb.HashKVRequest{Revision: s.world.current}},
		{"Status", &pb.StatusRequest{}},
	}
	for rev := max(s.world.compact, s.world.current-20, 1); rev <= s.world.current; rev += 5 {
		audits = append(audits, Request{"Range", &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, Revision: rev}})
	}
	audits = append(audits, leaseAudits()...)
	for _, r := range audits {
		if slices.Contains(s.setup.Without, r.Method) {
			continue
		}
		want := s.etcd.Do(ctx, r)
		if d := s.compare(ctx, r, want); d != nil {
			return d, ctx.Err()
		}
	}
	return nil, ctx.Err()
}

// Run sends a whole sequence and audits at its end.
func (s *Session) Run(ctx context.Context, sequence []Request) (*Difference, error) {
	for _, r := range sequence {
		if d, err := s.Step(ctx, Request{r.Method, proto.Clone(r.Msg)}); d != nil || err != nil {
			return d, err
		}
	}
	return s.Audit(ctx)
}
