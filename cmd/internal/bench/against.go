package bench

import (
	"context"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// Versus is the result of rounds that two stores took in turn.
type Versus struct {
	Names  [2]string    `json:"names"`
	Rounds [2][]*Report `json:"rounds"`
}

// Measure is a way to measure a load: Run, or one of the loads with a course of their own.
type Measure func(context.Context, Target, Load, Options, Observer) (*Report, error)

// Against measures a load at two stores in turn, so that a slow spell of the machine hits both. The
// store that begins changes from round to round. An interrupted run reports whole rounds only.
func Against(ctx context.Context, names [2]string, targets [2]Target, load Load, opts Options, rounds int, measure Measure, observe func(round, side int) Observer) (*Versus, error) {
	v := &Versus{Names: names}
	for round := range rounds {
		var pair [2]*Report
		for i := range 2 {
			side := (round + i) % 2
			r, err := measure(ctx, targets[side], load, opts, observe(round, side))
			if ctx.Err() != nil && len(v.Rounds[0]) > 0 {
				return v, nil
			}
			if err != nil {
				return nil, fmt.Errorf("%s, round %d: %w", names[side], round+1, err)
			}
			pair[side] = r
			if ctx.Err() != nil && i == 0 {
				return nil, fmt.Errorf("interrupted before both stores were measured once")
			}
		}
		for side, r := range pair {
			v.Rounds[side] = append(v.Rounds[side], r)
		}
		if ctx.Err() != nil {
			return v, nil
		}
	}
	return v, nil
}

// Spread is the middle of some values, the least, and the most.
type Spread struct {
	Median float64 `json:"median"`
	Least  float64 `json:"least"`
	Most   float64 `json:"most"`
}

// SpreadOf sums values up; zero for none.
func SpreadOf(values []float64) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	v := slices.Sorted(slices.Values(values))
	n := len(v)
	return Spread{Median: (v[(n-1)/2] + v[n/2]) / 2, Least: v[0], Most: v[n-1]}
}

// RatioOf is the spread of the ratios of values of the same round; rounds without a value do not
// count.
func RatioOf(a, b []float64) Spread {
	var ratios []float64
	for i := range min(len(a), len(b)) {
		if a[i] > 0 && b[i] > 0 {
			ratios = append(ratios, a[i]/b[i])
		}
	}
	return SpreadOf(ratios)
}

// versusColumns are the numbers that are compared of each kind.
var versusColumns = []struct {
	name   string
	of     func(KindReport) float64
	format func(float64) string
}{
	{"per second", func(k KindReport) float64 { return k.PerSecond }, FormatNumber},
	{"p50", func(k KindReport) float64 { return k.Latency.P50 }, formatMS},
	{"p90", func(k KindReport) float64 { return k.Latency.P90 }, formatMS},
	{"p99", func(k KindReport) float64 { return k.Latency.P99 }, formatMS},
	{"p99.9", func(k KindReport) float64 { return k.Latency.P999 }, formatMS},
	{"max", func(k KindReport) float64 { return k.Latency.Max }, formatMS},
}

// Print writes the comparison for people: medians, and the ratios of the rounds with their spread.
func (v *Versus) Print(w io.Writer) error {
	first := v.Rounds[0][0]
	fmt.Fprintf(w, "%s: %d clients on %d connections, %d rounds of %.1f s in turn\n", first.Load, first.Clients, first.Connections, len(v.Rounds[0]), first.Seconds)
	for side, name := range v.Names {
		fmt.Fprintf(w, "%s: %s\n", letter(side), name)
	}
	fmt.Fprintln(w)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "\t\tA\tB\tA/B\tleast\tmost")
	for i, k := range first.Kinds {
		for _, c := range versusColumns {
			var values [2][]float64
			for side, rounds := range v.Rounds {
				for _, r := range rounds {
					values[side] = append(values[side], c.of(r.Kinds[i]))
				}
			}
			ratio := RatioOf(values[0], values[1])
			if ratio.Median == 0 {
				continue
			}
			fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%.2f\t%.2f\t%.2f\n", k.Kind, c.name,
				c.format(SpreadOf(values[0]).Median), c.format(SpreadOf(values[1]).Median), ratio.Median, ratio.Least, ratio.Most)
		}
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for side, rounds := range v.Rounds {
		failed := int64(0)
		var warnings []string
		for _, r := range rounds {
			failed += r.Failed()
			warnings = append(warnings, r.Warnings...)
		}
		if len(warnings) > 0 { // those of other rounds are much the same
			fmt.Fprintf(w, "\n%s: warning: %s\n", letter(side), warnings[0])
		}
		if failed > 0 {
			fmt.Fprintf(w, "\n%s: %d requests failed; -o json says why\n", letter(side), failed)
		}
	}
	return nil
}
