package compare

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"braid/cmd/internal/bench"
)

// Options say what to compare.
type Options struct {
	Systems []System
	Suite   string
	Stages  []string // of the suite; empty: all
	Nodes   []int    // sizes of the clusters, one after the other
	Rounds  int
	Scale   float64 // of times and amounts; 1 is what the suite was made for
	Dir     string  // for data; its device is the one whose writes are counted
	Command string  // that asked for it, for the table
	Bar     *bench.Bar
	// Note is called with a line about what was just measured.
	Note func(string)
}

// Validate says what is wrong with the options.
func (o *Options) Validate() error {
	var errs []error
	suite, ok := suites[o.Suite]
	if !ok {
		errs = append(errs, fmt.Errorf("there is no suite %q: %s", o.Suite, strings.Join(Suites(), ", ")))
	}
	for _, name := range o.Stages {
		if ok && !slices.ContainsFunc(suite, func(s stage) bool { return s.name == name }) {
			errs = append(errs, fmt.Errorf("suite %s has no stage %q: %s", o.Suite, name, strings.Join(StageNames(o.Suite), ", ")))
		}
	}
	for _, n := range o.Nodes {
		if n != 1 && n != 3 && n != 5 {
			errs = append(errs, fmt.Errorf("a cluster has 1, 3 or 5 nodes here, not %d", n))
		}
	}
	if o.Rounds < 1 {
		errs = append(errs, errors.New("at least one round is needed"))
	}
	if !(o.Scale > 0 && o.Scale <= 10) {
		errs = append(errs, errors.New("the scale must be above 0 and at most 10"))
	}
	if len(o.Systems) == 0 || len(o.Nodes) == 0 {
		errs = append(errs, errors.New("at least one system and one number of nodes is needed"))
	}
	return errors.Join(errs...)
}

// StageNames lists the stages of a suite.
func StageNames(suite string) []string {
	var names []string
	for _, s := range suites[suite] {
		names = append(names, s.name)
	}
	return names
}

// StageHelp has a line about each stage of a suite.
func StageHelp(suite string) string {
	text := ""
	for _, s := range suites[suite] {
		text += fmt.Sprintf("  %-15s %s\n", s.name, s.about)
	}
	return text
}

// Run measures the suite and enters the results into the table, in place of the rows that it had
// of the same stages. When ctx ends, or something fails, the table has what was measured before.
func Run(ctx context.Context, o Options, t *Table) error {
	if err := o.Validate(); err != nil {
		return err
	}
	t.Machine, t.Date = machine(), time.Now().UTC().Format(time.DateOnly)
	t.Runs = append(t.Runs, o.Command)
	suite := suites[o.Suite]
	defer t.sort(suite)
	for _, nodes := range o.Nodes {
		var group []stage
		for i, st := range suite {
			if len(o.Stages) == 0 || slices.Contains(o.Stages, st.name) {
				group = append(group, st)
			}
			last := i == len(suite)-1 || suite[i+1].group != st.group
			if !last || len(group) == 0 {
				continue
			}
			if err := o.runGroup(ctx, nodes, group, t); err != nil {
				return err
			}
			group = nil
		}
	}
	return nil
}

// runGroup starts a cluster of each system and runs stages on them.
func (o *Options) runGroup(ctx context.Context, nodes int, stages []stage, t *Table) (err error) {
	p := params{nodes: nodes, scale: o.Scale}
	space := stages[0].space(p)
	keys := bench.Keys{Size: 16, Space: space}
	var sides []*side
	defer func() {
		o.Bar.Clear()
		for _, s := range sides {
			err = errors.Join(err, s.stop())
		}
	}()
	for _, sys := range o.Systems {
		dir, err := freshDir(o.Dir, fmt.Sprintf("%s-%d", sys.Name, nodes))
		if err != nil {
			return err
		}
		srv, err := start(ctx, sys, nodes, dir, keys.Splits(Regions))
		if err != nil {
			return err
		}
		sides = append(sides, &side{servers: srv, params: p, space: space, show: o.Bar.Show})
	}
	for _, st := range stages {
		if err := o.runStage(ctx, st, sides, t); err != nil {
			return fmt.Errorf("%s, %s: %w", st.name, nodesText(nodes), err)
		}
	}
	return nil
}

// runStage lets the systems take rounds in turn; who begins changes from round to round.
func (o *Options) runStage(ctx context.Context, st stage, sides []*side, t *Table) error {
	nodes := sides[0].nodes
	if st.prepare != nil {
		for _, s := range sides {
			o.Bar.Title(fmt.Sprintf("%s, %s, %s", st.name, nodesText(nodes), s.system.Name))
			if err := st.prepare(ctx, s); err != nil {
				return fmt.Errorf("%s: %w", s.system.Name, err)
			}
		}
	}
	rounds := o.Rounds
	if st.once {
		rounds = 1
	}
	for round := range rounds {
		values := make([][]value, len(sides))
		for i := range sides {
			at := (i + round) % len(sides)
			s := sides[at]
			o.Bar.Title(fmt.Sprintf("%s, %s, round %d of %d, %s", st.name, nodesText(nodes), round+1, rounds, s.system.Name))
			began := time.Now()
			var err error
			if values[at], err = st.measure(ctx, s); err != nil {
				return fmt.Errorf("%s: %w", s.system.Name, err)
			}
			o.Bar.Clear()
			if o.Note != nil {
				first := values[at][0]
				o.Note(fmt.Sprintf("%s, %s, round %d, %s (%.0f s): %s %s %s", st.name, nodesText(nodes), round+1, s.system.Name,
					time.Since(began).Seconds(), first.name, bench.FormatNumber(first.value), first.unit))
			}
		}
		if round == 0 {
			t.drop(nodes, st.name) // and not before: an interrupted stage leaves what there was
		}
		// Whole rounds only, so that values of the same round stand side by side.
		for i, s := range sides {
			for _, v := range values[i] {
				t.add(nodes, st.name, s.system.Name, v)
			}
		}
	}
	return nil
}

// machine says in a line where the numbers come from.
func machine() string {
	model := runtime.GOARCH
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(info)) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	return fmt.Sprintf("%d cores (%s), servers and clients on the same machine", runtime.NumCPU(), model)
}
