package bench

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Report is the result of a run. Times are in milliseconds.
type Report struct {
	Load        string           `json:"load"`
	Endpoints   []string         `json:"endpoints"`
	Began       time.Time        `json:"began"`
	Clients     int              `json:"clients"`
	Connections int              `json:"connections"`
	Rate        float64          `json:"rate,omitempty"`    // of an open loop, per second
	Seconds     float64          `json:"seconds"`           // measured, after warming up
	Interrupted bool             `json:"interrupted"`       // it was ended early
	Unsent      int64            `json:"unsent,omitempty"`  // due in an open loop, and not sent before the end
	Kinds       []KindReport     `json:"kinds"`             // one a kind of request, in the order of the load
	Errors      map[string]int64 `json:"errors"`            // by text
	Figures     []Figure         `json:"figures,omitempty"` // what else a load measures
	Warnings    []string         `json:"warnings,omitempty"`
	Series      []Point          `json:"series"`
}

// KindReport is what one kind of request, or of event, took.
type KindReport struct {
	Kind      string  `json:"kind"`
	Count     int64   `json:"count"` // answered in the measured time
	PerSecond float64 `json:"per_second"`
	Latency   Latency `json:"latency_ms"`
	// Distribution is the latency below which a share of the requests stayed.
	Distribution []Quantile `json:"distribution"`
}

// Latency sums a distribution up.
type Latency struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p99.9"`
	Max  float64 `json:"max"`
}

// Quantile is a point of a distribution.
type Quantile struct {
	Percent float64 `json:"percent"`
	MS      float64 `json:"ms"`
}

// Figure is a number with a name that is not a rate or a latency of requests.
type Figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
}

// Point is a stretch of a run.
type Point struct {
	From      float64 `json:"from"` // seconds since the begin of the measured time
	To        float64 `json:"to"`
	PerSecond float64 `json:"per_second"`
	P50       float64 `json:"p50_ms"`
	P99       float64 `json:"p99_ms"`
	Failed    int64   `json:"failed"`
}

func ms(ns int64) float64 { return float64(ns) / 1e6 }

// summary turns what was recorded of a kind into its report.
func summary(kind string, k kindRecord, seconds float64) KindReport {
	h := k.latency
	r := KindReport{Kind: kind, Count: k.ended}
	if seconds > 0 {
		r.PerSecond = float64(k.ended) / seconds
	}
	if h.TotalCount() == 0 {
		return r
	}
	r.Latency = latencyOf(h)
	for _, b := range h.CumulativeDistribution() {
		r.Distribution = append(r.Distribution, Quantile{b.Quantile, ms(b.ValueAt)})
	}
	return r
}

func latencyOf(h *hdrhistogram.Histogram) Latency {
	return Latency{
		Mean: h.Mean() / 1e6,
		P50:  ms(h.ValueAtQuantile(50)), P90: ms(h.ValueAtQuantile(90)), P99: ms(h.ValueAtQuantile(99)),
		P999: ms(h.ValueAtQuantile(99.9)), Max: ms(h.Max()),
	}
}

func (s *series) report() []Point {
	points := make([]Point, len(s.points))
	for i, p := range s.points {
		points[i] = Point{From: p.from.Seconds(), To: p.to.Seconds(), Failed: p.failed}
		if span := p.to - p.from; span > 0 {
			points[i].PerSecond = float64(p.latency.TotalCount()) / span.Seconds()
		}
		if p.latency.TotalCount() > 0 {
			points[i].P50, points[i].P99 = ms(p.latency.ValueAtQuantile(50)), ms(p.latency.ValueAtQuantile(99))
		}
	}
	return points
}

// Kind returns the report of a kind; zero when the load has none of the name.
func (r *Report) Kind(name string) KindReport {
	for _, k := range r.Kinds {
		if k.Kind == name {
			return k
		}
	}
	return KindReport{Kind: name}
}

// Figure returns a figure by name; zero when there is none.
func (r *Report) Figure(name string) float64 {
	for _, f := range r.Figures {
		if f.Name == name {
			return f.Value
		}
	}
	return 0
}

// Failed is the number of requests that failed.
func (r *Report) Failed() (sum int64) {
	for _, n := range r.Errors {
		sum += n
	}
	return sum
}

// Succeeded says whether any request did.
func (r *Report) Succeeded() bool {
	return slices.ContainsFunc(r.Kinds, func(k KindReport) bool { return k.Count > 0 || k.Latency.Max > 0 })
}

// Print writes the report for people.
func (r *Report) Print(w io.Writer) error {
	loop := "closed loop"
	if r.Rate > 0 {
		loop = fmt.Sprintf("open loop of %g per second", r.Rate)
	}
	ended := ""
	if r.Interrupted {
		ended = ", interrupted"
	}
	fmt.Fprintf(w, "%s at %s: %d clients on %d connections, %s, %.1f s measured%s\n\n",
		r.Load, strings.Join(r.Endpoints, ","), r.Clients, r.Connections, loop, r.Seconds, ended)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "\tcount\tper second\tmean\tp50\tp90\tp99\tp99.9\tmax\t")
	for _, k := range r.Kinds {
		l := k.Latency
		fmt.Fprintf(tw, "%s\t%d\t%.1f\t%s\t%s\t%s\t%s\t%s\t%s\t\n", k.Kind, k.Count, k.PerSecond,
			formatMS(l.Mean), formatMS(l.P50), formatMS(l.P90), formatMS(l.P99), formatMS(l.P999), formatMS(l.Max))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if len(r.Figures) > 0 {
		fmt.Fprintln(w)
	}
	for _, f := range r.Figures {
		fmt.Fprintf(w, "%s: %s %s\n", f.Name, FormatNumber(f.Value), f.Unit)
	}
	if r.Unsent > 0 {
		fmt.Fprintf(w, "\n%d requests were due and could not be sent: the store, or %d clients, cannot keep up with the rate\n", r.Unsent, r.Clients)
	}
	for _, warning := range r.Warnings {
		fmt.Fprintf(w, "\nwarning: %s\n", warning)
	}
	if len(r.Errors) == 0 {
		_, err := fmt.Fprintln(w, "\nno errors")
		return err
	}
	fmt.Fprintln(w, "\nerrors:")
	texts := slices.SortedFunc(maps.Keys(r.Errors), func(a, b string) int {
		if r.Errors[a] != r.Errors[b] {
			return int(min(max(r.Errors[b]-r.Errors[a], -1), 1))
		}
		return strings.Compare(a, b)
	})
	for _, text := range texts {
		if _, err := fmt.Fprintf(w, "%8d  %s\n", r.Errors[text], text); err != nil {
			return err
		}
	}
	return nil
}

// formatMS prints milliseconds with three significant digits and a unit.
func formatMS(v float64) string {
	switch {
	case v == 0:
		return "-"
	case v < 1:
		return fmt.Sprintf("%.0fµs", v*1000)
	case v < 10:
		return fmt.Sprintf("%.2fms", v)
	case v < 100:
		return fmt.Sprintf("%.1fms", v)
	case v < 1000:
		return fmt.Sprintf("%.0fms", v)
	}
	return fmt.Sprintf("%.2fs", v/1000)
}

// FormatNumber prints a number with about three significant digits.
func FormatNumber(v float64) string {
	switch abs := max(v, -v); {
	case v == 0:
		return "0"
	case abs < 0.1:
		return fmt.Sprintf("%.4f", v)
	case abs < 10:
		return fmt.Sprintf("%.3f", v)
	case abs < 100:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}
