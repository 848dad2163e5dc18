// Command robustness proves, round by round, that a cluster of three real processes stays
// linearizable while its nodes are killed (-9), stopped and continued and its leaders moved.
//
// A round starts a fresh cluster, runs concurrent clients, does one fault, and hands what the
// clients saw, together with the store's past read revision by revision, to three checkers:
//
//   - order: the store's own numbering, checked exactly (see CheckOrder);
//   - keys: porcupine over each key alone, without trust in revisions (CheckKeys);
//   - etcd: the checker of etcd's robustness suite, model and replay (CheckEtcd).
//
// Rounds that are too slow or in which no leader changed fail. The history of a failed round is
// kept; -check runs the checkers on such a file again.
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
)

func main() {
	rounds := flag.Int("rounds", 50, "number of rounds")
	binary := flag.String("binary", "", "braid binary (default: built from this repository)")
	etcd := flag.Bool("etcd", false, "test etcd "+etcdbin.Version+" instead: the baseline")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()%1e9), "seed of the first round")
	only := flag.String("fault", "", "use only faults whose name contains this")
	dir := flag.String("dir", "", "folder for data and histories (default: a temporary one)")
	plant := flag.String("plant", "", "plant a fault in the clients: stale or retry; the run must then fail")
	file := flag.String("check", "", "run the checkers on this history file and exit")
	keepGoing := flag.Bool("keep-going", false, "go on after a failed round")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	failed, err := run(ctx, *rounds, *binary, *etcd, *seed, *only, *dir, Plant(*plant), *file, *keepGoing)
	if err != nil {
		fmt.Fprintln(os.Stderr, "robustness:", err)
		os.Exit(2)
	}
	if failed > 0 {
		os.Exit(1)
	}
}

func run(ctx context.Context, rounds int, binary string, etcd bool, seed uint64, only, dir string, plant Plant, file string, keepGoing bool) (failed int, err error) {
	if file != "" {
		return recheck(file)
	}
	if etcd {
		binary, err = etcdbin.Etcd()
	} else if binary == "" {
		binary, err = etcdbin.Braid()
	}
	if err != nil {
		return 0, err
	}
	if dir == "" {
		if dir, err = os.MkdirTemp("", "braid-robustness-"); err != nil {
			return 0, err
		}
	}
	var chosen []Fault
	for _, f := range faults {
		if strings.Contains(string(f), only) {
			chosen = append(chosen, f)
		}
	}
	if len(chosen) == 0 {
		return 0, fmt.Errorf("no fault is called %q", only)
	}
	started := time.Now()
	var total RoundResult
	done := 0
	for i := range rounds {
		cfg := RoundConfig{Bin: binary, Regions: !etcd, Seed: seed + uint64(i), Fault: chosen[(seed+uint64(i))%uint64(len(chosen))], Plant: plant}
		cfg.Dir = filepath.Join(dir, fmt.Sprint("round-", cfg.Seed))
		result, err := RunRound(ctx, cfg)
		if ctx.Err() != nil {
			break
		}
		bad := err != nil || len(result.Violations) > 0
		fmt.Printf("round %d, seed %d, %s: ", i+1, cfg.Seed, cfg.Fault)
		if result != nil {
			fmt.Println(result.Line())
			total.add(result)
		}
		done++
		if bad {
			failed++
			if err != nil {
				fmt.Println("  FAILED:", err)
			} else {
				for _, v := range result.Violations {
					fmt.Println("  VIOLATION", v)
				}
			}
			fmt.Printf("  again: go run ./robustness -rounds 1 -seed %d -fault %q\n", cfg.Seed, cfg.Fault)
		}
		note, err := keep(cfg.Dir, bad)
		if err != nil {
			return failed, err
		}
		if bad {
			fmt.Println(" ", note)
			if !keepGoing {
				break
			}
		}
	}
	fmt.Printf("%d rounds in %s, %d failed: %d calls, %d writes, %d over several regions, %d unknown outcomes, at least %.0f acked writes/s before a fault, leader changes in groups: %d\n",
		done, time.Since(started).Round(time.Second), failed, total.Ops, total.Writes, total.Spread, total.Unknown, total.AckedPerSecond, len(total.Changed))
	return failed, nil
}

// add sums up; of the rates it keeps the lowest.
func (res *RoundResult) add(r *RoundResult) {
	res.Ops += r.Ops
	res.Writes += r.Writes
	res.Spread += r.Spread
	res.Unknown += r.Unknown
	res.Changed = append(res.Changed, r.Changed...)
	if res.AckedPerSecond == 0 || r.AckedPerSecond < res.AckedPerSecond {
		res.AckedPerSecond = r.AckedPerSecond
	}
}

func recheck(file string) (int, error) {
	h, err := LoadHistory(file)
	if err != nil {
		return 0, err
	}
	failed := 0
	for _, checker := range checkers {
		violations := checker.check(h)
		failed += len(violations)
		fmt.Printf("%s: %d violations in %d calls\n", checker.name, len(violations), len(h.Ops))
		for _, v := range violations {
			fmt.Println("  ", v)
		}
	}
	return failed, nil
}
