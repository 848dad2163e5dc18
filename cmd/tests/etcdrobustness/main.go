// Command etcdrobustness runs the traffic of etcd's robustness suite against three real braid
// processes, does a fault in the midst of it, and hands what the clients and watchers saw to that
// suite's validators, unmodified: linearization of all requests against its model (revisions
// included), every guarantee of watches, and reads of the past against a replay.
//
// The validators learn what became of unanswered requests, and what watchers had to see, from the
// committed order that each node records in the format of etcd's write-ahead log
// (--experimental-committed-order); etcd's own reader reads it. That the nodes recorded the same
// order is checked first.
//
// The key space is split so that the keys of each traffic profile lie in five regions. Nodes live
// in network namespaces, which need root; without them (-loopback) there are no partitions.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"braid/cmd/tests/etcdbin"
	"braid/cmd/tests/netns"
)

func main() {
	var o options
	flag.IntVar(&o.rounds, "rounds", 30, "number of rounds of each profile")
	flag.StringVar(&o.profile, "profile", "", "run only profiles whose name contains this")
	flag.StringVar(&o.fault, "fault", "", "do only faults whose name contains this")
	flag.StringVar(&o.binary, "binary", "", "braid binary (default: built from this repository)")
	flag.Uint64Var(&o.seed, "seed", uint64(time.Now().UnixNano()%1e9), "seed of the first round: which fault, which victim")
	flag.StringVar(&o.dir, "dir", "", "folder for data and reports (default: a temporary one)")
	flag.BoolVar(&o.loopback, "loopback", false, "no network namespaces, and so no partitions")
	flag.BoolVar(&o.keepGoing, "keep-going", false, "go on after a failed round")
	flag.DurationVar(&o.limit, "limit", 0, "begin no round after this long (0: no limit)")
	flag.IntVar(&o.slowMax, "slow", 3, "how many rounds in a row may be too slow to count")
	check := flag.String("check", "", "judge the report of a round in this folder again, and exit")
	flag.Parse()
	if *check != "" {
		if err := recheck(*check); err != nil {
			fmt.Fprintln(os.Stderr, "etcdrobustness:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	failed, err := run(ctx, o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "etcdrobustness:", err)
		os.Exit(2)
	}
	if failed > 0 {
		os.Exit(1)
	}
}

type options struct {
	rounds    int
	profile   string
	fault     string
	binary    string
	seed      uint64
	dir       string
	loopback  bool
	keepGoing bool
	limit     time.Duration
	slowMax   int
}

func run(ctx context.Context, o options) (failed int, err error) {
	if o.binary == "" {
		if o.binary, err = etcdbin.Braid(); err != nil {
			return 0, err
		}
	}
	if o.dir == "" {
		if o.dir, err = os.MkdirTemp("", "braid-etcdrobustness-"); err != nil {
			return 0, err
		}
	}
	var chosen []fault
	for _, f := range faults {
		if strings.Contains(string(f), o.fault) && !(o.loopback && f.partition()) {
			chosen = append(chosen, f)
		}
	}
	if len(chosen) == 0 {
		return 0, fmt.Errorf("no fault is called %q", o.fault)
	}
	var net *netns.Net
	if o.loopback {
		fmt.Println("nodes share the loopback interface; no partitions")
	} else {
		if net, err = netns.New(nodes); err != nil {
			return 0, fmt.Errorf("%w (-loopback does without)", err)
		}
		defer func() {
			if cerr := net.Close(); err == nil {
				err = cerr
			}
		}()
		fmt.Println("each node in a network namespace of its own")
	}
	started := time.Now()
	any := false
	for _, p := range profiles {
		if !strings.Contains(p.name, o.profile) {
			continue
		}
		any = true
		var total tally
		slow := 0
		for i := 0; total.rounds < o.rounds && ctx.Err() == nil && (o.limit == 0 || time.Since(started) < o.limit); i++ {
			seed := o.seed + uint64(i)
			r := &round{bin: o.binary, net: net, profile: p, seed: seed, fault: chosen[seed%uint64(len(chosen))]}
			r.dir = filepath.Join(o.dir, fmt.Sprintf("%s-%d", p.name, seed))
			err := r.run(ctx)
			if ctx.Err() != nil {
				break
			}
			fmt.Printf("%s %d, seed %d, %s: %s\n", p.name, total.rounds+1, seed, r.fault, r.line())
			if err != nil {
				failed++
				total.rounds++
				fmt.Printf("  FAILED: %v\n  files: %s\n  again: -rounds 1 -profile %s -seed %d -fault %q\n", err, r.dir, p.name, seed, r.fault)
				if !o.keepGoing {
					return failed, nil
				}
				continue
			}
			if err := os.RemoveAll(r.dir); err != nil {
				return failed, err
			}
			if r.writesPerSecond < writesMin {
				// A busy machine proves nothing, and nothing against the store.
				if slow++; slow > o.slowMax {
					return failed, fmt.Errorf("%d rounds in a row with fewer than %d acknowledged writes/s before the fault", slow, writesMin)
				}
				fmt.Println("  too slow to count; again")
				continue
			}
			slow = 0
			total.add(r)
		}
		fmt.Println(total.line(p))
		if bad := total.idle(p); total.rounds > 0 && bad != "" {
			return failed, fmt.Errorf("%s: %s", p.name, bad)
		}
	}
	if !any {
		return failed, fmt.Errorf("no profile is called %q", o.profile)
	}
	fmt.Printf("%s, %d failed\n", time.Since(started).Round(time.Second), failed)
	return failed, nil
}
