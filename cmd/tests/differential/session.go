package main

import (
	"bytes"
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
	// Splits are the region borders of the third store; none: it is treated like the second.
	Splits []string
	// SplitsFlag gives them to the third store by flag; false when a program that does not know
	// the flag stands in for braid.
	SplitsFlag bool
	// Tamper is planted between the third store (the second, too, when both is set) and the
	// comparison.
	Tamper     func(t *Target, r Request, call func(Request) Answer) Answer
	TamperBoth bool
	// AuditEvery is the number of requests between comparisons of the whole state, 0: never.
	AuditEvery int
	// RestartEvery is the number of requests between kill -9 and restart of the tested stores, 0:
	// never.
	RestartEvery int
	// Without lists methods that are not sent.
	Without []string
}

// Session is three stores that started empty and have been given the same requests since. One
// goroutine owns it.
type Session struct {
	setup  Setup
	dir    string
	etcd   *Target // the reference
	one    *Target // braid, one region
	many   *Target // braid, several regions
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
	Spread   int // writes over several regions of the third store
	Withheld int // transactions that etcd was not asked, see deletesAndPuts
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

// NewSession starts the three stores on empty data.
func NewSession(ctx context.Context, setup Setup) (*Session, error) {
	dir, err := os.MkdirTemp("", "braid-differential-")
	if err != nil {
		return nil, err
	}
	s := &Session{setup: setup, dir: dir, splits: newSplits(setup.Splits)}
	s.stats.Accepted = map[string]int{}
	s.world = world{current: 1, compact: -1, lookup: s.lookup(ctx)}

	starts := []struct {
		target    **Target
		name, bin string
		args      []string
	}{
		{&s.etcd, "etcd", setup.Etcd, []string{"--unsafe-no-fsync"}},
		{&s.one, "one", setup.Braid, nil},
		{&s.many, "many", setup.Braid, splitArgs(setup)},
	}
	errs := make([]error, len(starts))
	var wg sync.WaitGroup
	for i, start := range starts {
		wg.Go(func() {
			*start.target, errs[i] = startTarget(ctx, start.name, start.bin, filepath.Join(dir, start.name), start.args...)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	s.many.tamper = setup.Tamper
	if setup.TamperBoth {
		s.one.tamper = setup.Tamper
	}
	return s, nil
}

func splitArgs(setup Setup) []string {
	if !setup.SplitsFlag || len(setup.Splits) == 0 {
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

// Close ends the stores and removes their data.
func (s *Session) Close() error {
	var errs []error
	for _, t := range []*Target{s.etcd, s.one, s.many} {
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
	if d, withheld := s.deletesAndPuts(ctx, r); d != nil || withheld {
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
	if d := s.compare(ctx, r, want, s.one, s.many); d != nil {
		return d, ctx.Err()
	}
	if n := s.setup.RestartEvery; n > 0 && s.steps%n == 0 {
		for _, t := range []*Target{s.one, s.many} {
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

// compare sends r to the given stores and compares with the reference's answer.
func (s *Session) compare(ctx context.Context, r Request, want Answer, targets ...*Target) *Difference {
	answers := make([]Answer, len(targets))
	var wg sync.WaitGroup
	for i, t := range targets {
		wg.Go(func() { answers[i] = t.Do(ctx, r) })
	}
	wg.Wait()
	for i, t := range targets {
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

// deletesAndPuts handles transactions that delete to the end of the key space and put a key of that
// range. etcd 3.7 gives that key two events at one revision, later releases refuse it as a
// duplicate key, and so must both other stores, while etcd is not asked.
func (s *Session) deletesAndPuts(ctx context.Context, r Request) (d *Difference, withheld bool) {
	m, ok := r.Msg.(*pb.TxnRequest)
	if !ok || !deletesWhatItPuts(m) {
		return nil, false
	}
	s.stats.Withheld++
	for _, ops := range [][]*pb.RequestOp{m.Success, m.Failure} {
		for _, op := range ops {
			if op.GetRequestTxn() != nil {
				return nil, true // whether it is refused depends on the order of the inner ones
			}
		}
	}
	for _, t := range []*Target{s.one, s.many} {
		if got := t.Do(ctx, r); got.Code != codes.InvalidArgument {
			return &Difference{Request: r, Store: t.Name, Got: got, Why: "a key that is deleted and put was not refused"}, true
		}
	}
	return nil, true
}

// deletesWhatItPuts says whether a branch, with everything inside it, has a delete with the end
// "\x00" and a put at or above its key. It errs on the side of yes where only one of two inner
// branches runs; static checks do too.
func deletesWhatItPuts(t *pb.TxnRequest) bool {
	for _, branch := range [][]*pb.RequestOp{t.GetSuccess(), t.GetFailure()} {
		var lowest []byte // of the deletes
		var highest []byte
		found := false
		var walk func(ops []*pb.RequestOp)
		walk = func(ops []*pb.RequestOp) {
			for _, op := range ops {
				switch x := op.GetRequest().(type) {
				case *pb.RequestOp_RequestDeleteRange:
					if d := x.RequestDeleteRange; string(d.GetRangeEnd()) == "\x00" && (!found || bytes.Compare(d.Key, lowest) < 0) {
						lowest, found = d.Key, true
					}
				case *pb.RequestOp_RequestPut:
					if k := x.RequestPut.GetKey(); bytes.Compare(k, highest) > 0 {
						highest = k
					}
				case *pb.RequestOp_RequestTxn:
					walk(x.RequestTxn.GetSuccess())
					walk(x.RequestTxn.GetFailure())
				}
			}
		}
		walk(branch)
		if found && bytes.Compare(highest, lowest) >= 0 {
			return true
		}
	}
	return false
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

// Audit compares the whole state: values, a hash of the history, what is still readable of it.
func (s *Session) Audit(ctx context.Context) (*Difference, error) {
	audits := []Request{
		{"Range", &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}},
		{"HashKV", &pb.HashKVRequest{Revision: s.world.current}},
		{"Status", &pb.StatusRequest{}},
	}
	for rev := max(s.world.compact, s.world.current-20, 1); rev <= s.world.current; rev += 5 {
		audits = append(audits, Request{"Range", &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, Revision: rev}})
	}
	for _, r := range audits {
		if slices.Contains(s.setup.Without, r.Method) {
			continue
		}
		want := s.etcd.Do(ctx, r)
		if d := s.compare(ctx, r, want, s.one, s.many); d != nil {
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
