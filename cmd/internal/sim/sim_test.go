package sim

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/cryptotest"
	"time"
)

var (
	seeds    = flag.Int("sim.seeds", 30, "how many seeds TestSeeds runs")
	firstOne = flag.Uint64("sim.seed", 1, "the first seed; with -sim.seeds=1 the one to replay")
	steps    = flag.Int("sim.steps", 3000, "steps of a run, before healing")
	aimFlag  = flag.String("sim.aim", "all", "the aim of the schedules: all, or one of the names in aims; empty is the plain one")
	mutant   = flag.String("sim.mutant", "", "drop this rule")
	trace    = flag.Bool("sim.trace", false, "print every step of the run")
	hunt     = flag.Int("sim.hunt", 200, "how many seeds TestMutants may use for each mutant")
)

// run is Run with raft's election jitter taken from the seed too.
func run(t *testing.T, cfg Config) Result {
	cryptotest.SetGlobalRandom(t, cfg.Seed)
	if *trace {
		cfg.Trace = os.Stdout
	}
	return Run(cfg)
}

func replayCommand(cfg Config) string {
	return fmt.Sprintf("go test ./cmd/internal/sim -run TestSeeds -sim.seeds=1 -sim.seed=%d -sim.steps=%d -sim.aim=%q -sim.mutant=%q -sim.trace", cfg.Seed, cfg.Steps, cfg.Aim, cfg.Mutant)
}

func TestSeeds(t *testing.T) {
	var total Stats
	began := time.Now()
	for i := range *seeds {
		cfg := Config{Seed: *firstOne + uint64(i), Steps: *steps, Aim: *aimFlag, Mutant: *mutant}
		if *aimFlag == "all" {
			cfg.Aim = aimNames[int(cfg.Seed)%len(aimNames)]
		}
		res := run(t, cfg)
		total.Add(res.Stats)
		if res.Err != nil {
			t.Errorf("seed %d: %v\nreplay: %s\n%v", cfg.Seed, res.Err, replayCommand(cfg), res.Stats)
			if *mutant == "" {
				return
			}
		}
		if n := i + 1; n%250 == 0 && n < *seeds {
			t.Logf("%d seeds, the last is %d, %v", n, cfg.Seed, time.Since(began).Round(time.Second))
		}
	}
	t.Logf("%d seeds from %d in %v\n%v", *seeds, *firstOne, time.Since(began).Round(time.Millisecond), total)
}

// TestReplay shows that a seed repeats exactly.
func TestReplay(t *testing.T) {
	for _, seed := range [...]uint64{1, 7, 20, 25, 37, 42} { // of aims that reach what is rare
		cfg := Config{Seed: seed, Steps: 3000, Aim: aimNames[int(seed)%len(aimNames)]}
		a := run(t, cfg)
		b := run(t, cfg)
		if a.Hash != b.Hash || a.Stats != b.Stats {
			t.Errorf("seed %d: two runs differ: %x %v, %x %v", seed, a.Hash, a.Stats, b.Hash, b.Stats)
		}
	}
}

// TestMutants drops one rule at a time and wants each loss noticed, by a symptom of that rule.
func TestMutants(t *testing.T) {
	for _, m := range Mutants {
		if *mutant != "" && *mutant != m.Name {
			continue
		}
		began, caught := time.Now(), false
		for i := range *hunt {
			cfg := Config{Seed: *firstOne + uint64(i), Steps: *steps, Mutant: m.Name, Aim: m.Aim}
			res := run(t, cfg)
			if res.Err == nil {
				continue
			}
			text := res.Err.Error()
			if caught = slices.ContainsFunc(m.Symptoms, func(s string) bool { return strings.Contains(text, s) }); caught {
				t.Logf("%-16s %-4s seed %d, %v: %.400s", m.Name, m.Rule, i+1, time.Since(began).Round(time.Millisecond), text)
				break
			}
			t.Logf("%-16s %-4s seed %d, not a symptom: %.300s", m.Name, m.Rule, i+1, text)
		}
		if !caught {
			t.Errorf("%s: %d schedules of aim %q did not notice that rule %s is gone (%v)", m.Name, *hunt, m.Aim, m.Rule, time.Since(began).Round(time.Millisecond))
		}
	}
}
