// Command differential drives the same random requests at a real etcd and at braid with one
// region, with seven, and as a single group, and compares whole answers: every field, every error's
// code and text. etcd is the specification; a difference is a bug or stands in accepted.go with its
// reason.
//
// Requests are a pure function of the seed. What differs is shrunk on fresh stores to a short
// sequence, printed and written to a file that -replay runs again.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"braid/cmd/tests/etcdbin"
)

type options struct {
	seed          uint64
	n             int
	duration      time.Duration
	braid, etcd   string
	replay        string
	out           string
	regions       bool
	audit         int
	restart       int
	shrinkTime    time.Duration
	perSession    int
	stopAfterDiff int
	without       string
}

func main() {
	var o options
	flag.Uint64Var(&o.seed, "seed", uint64(time.Now().UnixNano()%1e9), "seed of the requests")
	flag.IntVar(&o.n, "n", 20000, "number of requests, 0: no limit")
	flag.DurationVar(&o.duration, "duration", 0, "stop after this time, 0: no limit")
	flag.StringVar(&o.braid, "braid", "", "braid binary (default: built from this repository)")
	flag.StringVar(&o.etcd, "etcd", "", "etcd binary (default: etcd "+etcdbin.Version+", built when missing)")
	flag.StringVar(&o.replay, "replay", "", "run the requests in this file instead of random ones")
	flag.StringVar(&o.out, "out", ".", "folder for replay files")
	flag.BoolVar(&o.regions, "regions", true, "use braid's own flags for regions and for a single group; false when -braid is not braid")
	flag.IntVar(&o.audit, "audit", 250, "compare the whole state every so many requests")
	flag.IntVar(&o.restart, "restart", 4000, "kill -9 and restart braid every so many requests")
	flag.DurationVar(&o.shrinkTime, "shrink", time.Minute, "time for shrinking a difference")
	flag.IntVar(&o.perSession, "session", 10000, "start over with empty stores (and the next seed) after so many requests")
	flag.IntVar(&o.stopAfterDiff, "differences", 1, "stop after so many differences")
	flag.StringVar(&o.without, "without", "", "methods to leave out, comma separated: to look past a known difference")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	found, err := run(ctx, o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "differential:", err)
		os.Exit(2)
	}
	if found > 0 {
		os.Exit(1)
	}
}

func (o *options) setup() (Setup, error) {
	var err error
	if o.etcd == "" {
		if o.etcd, err = etcdbin.Etcd(); err != nil {
			return Setup{}, err
		}
	}
	if o.braid == "" {
		if o.braid, err = etcdbin.Braid(); err != nil {
			return Setup{}, err
		}
	}
	setup := Setup{Etcd: o.etcd, Braid: o.braid, AuditEvery: o.audit, RestartEvery: o.restart,
		Without: strings.Split(o.without, ",")}
	if o.regions {
		setup.Splits, setup.OwnFlags = splitKeys, true
	}
	return setup, nil
}

// run returns the number of differences found.
func run(ctx context.Context, o options) (int, error) {
	setup, err := o.setup()
	if err != nil {
		return 0, err
	}
	if o.replay != "" {
		return replay(ctx, setup, o.replay)
	}
	if o.duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.duration)
		defer cancel()
	}
	started, total, found := time.Now(), 0, 0
	for seed := o.seed; found < o.stopAfterDiff && (o.n == 0 || total < o.n) && ctx.Err() == nil; seed++ {
		n := o.perSession
		if o.n > 0 {
			n = min(n, o.n-total)
		}
		stats, sequence, diff, err := oneSession(ctx, setup, seed, n)
		total += stats.Requests
		if err != nil && ctx.Err() == nil {
			return found, fmt.Errorf("seed %d: %w", seed, err)
		}
		report(seed, stats)
		if diff != nil {
			found++
			// The time limit is for the search, not for the work on what was found.
			if err := explain(context.WithoutCancel(ctx), o, setup, seed, sequence, diff); err != nil {
				return found, err
			}
		}
	}
	fmt.Printf("%d requests in %s from seed %d on, differences: %d\n", total, time.Since(started).Round(time.Second), o.seed, found)
	return found, nil
}

// oneSession runs n requests of a seed on fresh stores; it returns those sent.
func oneSession(ctx context.Context, setup Setup, seed uint64, n int) (stats Stats, sequence []Request, diff *Difference, err error) {
	session, err := NewSession(ctx, setup)
	if err != nil {
		return Stats{}, nil, nil, err
	}
	defer func() { err = errors.Join(err, session.Close()) }()
	gen := newGenerator(seed)
	for range n {
		r := gen.next()
		if slices.Contains(setup.Without, r.Method) {
			continue
		}
		sequence = append(sequence, r)
		if diff, err = session.Step(ctx, r); diff != nil || err != nil {
			return session.stats, sequence, diff, err
		}
	}
	diff, err = session.Audit(ctx)
	return session.stats, sequence, diff, err
}

func report(seed uint64, stats Stats) {
	fmt.Printf("seed %d: %d requests, %d refused by etcd, %d writes over several regions, %d not asked of etcd", seed, stats.Requests, stats.Errors, stats.Spread, stats.Withheld)
	for _, name := range slices.Sorted(maps.Keys(stats.Accepted)) {
		fmt.Printf(", accepted %q %d times", name, stats.Accepted[name])
	}
	fmt.Println()
}

// explain shrinks a difference, prints it and writes the replay file.
func explain(ctx context.Context, o options, setup Setup, seed uint64, sequence []Request, diff *Difference) error {
	fmt.Printf("\nDIFFERENCE at request %d of seed %d\n%s\n", len(sequence), seed, diff)
	setup.AuditEvery = 1 // a short sequence is audited at its end anyway; between, it finds more
	if setup.RestartEvery > len(sequence) {
		setup.RestartEvery = 0
	}
	small, smallDiff, err := shrink(ctx, setup, sequence, diff, o.shrinkTime)
	if err != nil {
		return fmt.Errorf("shrinking: %w", err)
	}
	fmt.Printf("\nshrunk to %d requests (numbers near 2^50 and above stand for revisions, see request.go):\n", len(small))
	const printedMax = 30
	var file strings.Builder
	fmt.Fprintf(&file, "# seed %d\n", seed)
	for i, r := range small {
		if i < printedMax {
			fmt.Printf("  %s\n", short(r.Text()))
		}
		file.WriteString(r.Text() + "\n")
	}
	if smallDiff != diff {
		fmt.Println(smallDiff)
	}
	path := fmt.Sprintf("%s/difference-%d.txt", o.out, seed)
	if err := os.WriteFile(path, []byte(file.String()), 0o644); err != nil {
		return err
	}
	fmt.Printf("replay: go run ./differential -replay %s\nagain:  go run ./differential -seed %d -n %d\n\n", path, seed, len(sequence))
	return nil
}

func replay(ctx context.Context, setup Setup, path string) (found int, err error) {
	file, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	sequence, err := parseRequests(file)
	if err != nil {
		return 0, err
	}
	setup.RestartEvery = 0
	session, err := NewSession(ctx, setup)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, session.Close()) }()
	diff, err := session.Run(ctx, sequence)
	if diff != nil {
		fmt.Println(diff)
		return 1, err
	}
	fmt.Printf("%d requests, no difference\n", len(sequence))
	return 0, err
}
