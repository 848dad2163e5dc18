package compare

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"braid/cmd/internal/bench"
)

// Table is what a comparison found.
type Table struct {
	Machine string   `json:"machine"`
	Date    string   `json:"date"`
	Runs    []string `json:"runs"` // commands that measured it
	Rows    []*Row   `json:"rows"`
}

// Row is one number of all systems.
type Row struct {
	Nodes  int    `json:"nodes"`
	Stage  string `json:"stage"`
	Name   string `json:"name"`
	Unit   string `json:"unit"`
	Higher bool   `json:"higher_is_better"`
	// Goal is what braid's value, with many groups, should be as a multiple of etcd's: at least or
	// at most, as Higher says; 0: none. With Absolute it is a bound of the value itself.
	Goal     float64              `json:"goal,omitempty"`
	Absolute bool                 `json:"absolute,omitempty"`
	Values   map[string][]float64 `json:"values"` // by system, one a round
	Failed   map[string]int64     `json:"failed,omitempty"`
}

// Load reads a table that was kept; a new one when there is no such file.
func Load(path string) (*Table, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &Table{}, nil
	}
	if err != nil {
		return nil, err
	}
	t := &Table{}
	if err := json.Unmarshal(b, t); err != nil {
		return nil, fmt.Errorf("%s is not a table of a comparison: %w", path, err)
	}
	return t, nil
}

// Save keeps the table in a file.
func (t *Table) Save(path string) error {
	b, err := json.MarshalIndent(t, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".tmp", append(b, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// drop removes the rows of a stage, which has been measured anew.
func (t *Table) drop(nodes int, stage string) {
	t.Rows = slices.DeleteFunc(t.Rows, func(r *Row) bool { return r.Nodes == nodes && r.Stage == stage })
}

// add enters a value of a round.
func (t *Table) add(nodes int, stage, system string, v value) {
	i := slices.IndexFunc(t.Rows, func(r *Row) bool { return r.Nodes == nodes && r.Stage == stage && r.Name == v.name })
	if i < 0 {
		i = len(t.Rows)
		t.Rows = append(t.Rows, &Row{Nodes: nodes, Stage: stage, Name: v.name, Unit: v.unit, Higher: v.higher,
			Goal: v.goal, Absolute: v.absolute, Values: map[string][]float64{}})
	}
	r := t.Rows[i]
	r.Values[system] = append(r.Values[system], v.value)
	if v.failed > 0 {
		if r.Failed == nil {
			r.Failed = map[string]int64{}
		}
		r.Failed[system] += v.failed
	}
}

// sort puts rows into the order of the suite; rows of a stage stay as they are.
func (t *Table) sort(suite []stage) {
	place := func(r *Row) int {
		return slices.IndexFunc(suite, func(s stage) bool { return s.name == r.Stage })
	}
	slices.SortStableFunc(t.Rows, func(a, b *Row) int {
		if a.Nodes != b.Nodes {
			return b.Nodes - a.Nodes
		}
		return place(a) - place(b)
	})
}

// Met says whether the goal was met; ok is false when there is none or a value is missing.
func (r *Row) Met() (met, ok bool) {
	v := r.Against(Etcd).Median
	if r.Absolute {
		v = bench.SpreadOf(r.Values[Multi]).Median
	}
	if r.Goal == 0 || v == 0 {
		return false, false
	}
	if r.Higher {
		return v >= r.Goal, true
	}
	return v <= r.Goal, true
}

// Against is the spread of the ratios of multi to another system, round by round.
func (r *Row) Against(system string) bench.Spread {
	return bench.RatioOf(r.Values[Multi], r.Values[system])
}

// withEtcd says whether etcd was measured; without it there is nothing that a goal is a multiple of.
func (t *Table) withEtcd() bool {
	return slices.ContainsFunc(t.Rows, func(r *Row) bool { return len(r.Values[Etcd]) > 0 })
}

// cells are the columns of a row behind its name.
func (r *Row) cells(etcd bool) []string {
	cells := []string{r.Unit}
	systems := []string{Multi, Single}
	if etcd {
		systems = append(systems, Etcd)
	}
	for _, system := range systems {
		cell := "-"
		if values := r.Values[system]; len(values) > 0 {
			s := bench.SpreadOf(values)
			cell = bench.FormatNumber(s.Median)
			if len(values) > 1 {
				cell += fmt.Sprintf(" (%s–%s)", bench.FormatNumber(s.Least), bench.FormatNumber(s.Most))
			}
			if n := r.Failed[system]; n > 0 {
				cell += fmt.Sprintf(", %d failed", n)
			}
		}
		cells = append(cells, cell)
	}
	ratio := func(s bench.Spread) string {
		switch {
		case s.Median == 0:
			return "-"
		case s.Least == s.Most:
			return fmt.Sprintf("%.2f", s.Median)
		}
		return fmt.Sprintf("%.2f (%.2f–%.2f)", s.Median, s.Least, s.Most)
	}
	if !etcd {
		return append(cells, ratio(r.Against(Single)))
	}
	goal := ""
	if r.Goal > 0 {
		sign, of := "≤ ", "×"
		if r.Higher {
			sign = "≥ "
		}
		if r.Absolute {
			of = ""
		}
		goal = fmt.Sprintf("%s%g%s", sign, r.Goal, of)
		switch met, ok := r.Met(); {
		case !ok:
			goal += " ?"
		case met:
			goal += " met"
		default:
			goal += " missed"
		}
	}
	return append(cells, ratio(r.Against(Etcd)), goal, ratio(r.Against(Single)))
}

func headings(etcd bool) []string {
	if !etcd {
		return []string{"", "unit", "multi-group", "single-group", "multi/single"}
	}
	return []string{"", "unit", "multi-group", "single-group", "etcd", "multi/etcd", "goal", "multi/single"}
}

// Print writes the table for people.
func (t *Table) Print(w io.Writer) error {
	fmt.Fprintf(w, "%s, %s: medians (least–most)\n", t.Date, t.Machine)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	nodes, etcd := 0, t.withEtcd()
	for _, r := range t.Rows {
		if r.Nodes != nodes {
			nodes = r.Nodes
			fmt.Fprintf(tw, "\n%s\n%s\n", nodesText(nodes), strings.Join(headings(etcd), "\t"))
		}
		fmt.Fprintf(tw, "%s\t%s\n", r.Name, strings.Join(r.cells(etcd), "\t"))
	}
	return tw.Flush()
}

// Markdown writes the table for a document.
func (t *Table) Markdown(w io.Writer) error {
	nodes, etcd := 0, t.withEtcd()
	head := headings(etcd)
	for _, r := range t.Rows {
		if r.Nodes != nodes {
			nodes = r.Nodes
			fmt.Fprintf(w, "\n### %s\n\n| %s |\n|%s\n", nodesText(nodes), strings.Join(head, " | "), strings.Repeat("---|", len(head)))
		}
		if _, err := fmt.Fprintf(w, "| %s | %s |\n", r.Name, strings.Join(r.cells(etcd), " | ")); err != nil {
			return err
		}
	}
	fmt.Fprintf(w, "\n%s, %s. Medians of the rounds, the least and the most in brackets; ratios are of values of the same round. Measured by:\n\n", t.Date, t.Machine)
	for _, run := range t.Runs {
		if _, err := fmt.Fprintf(w, "    %s\n", run); err != nil {
			return err
		}
	}
	return nil
}

func nodesText(n int) string {
	if n == 1 {
		return "1 node"
	}
	return fmt.Sprintf("%d nodes", n)
}

// Plot draws the ratios to etcd, or to a single group when etcd was not measured.
func (t *Table) Plot(w io.Writer) error {
	var bars []bench.Bars
	for _, r := range t.Rows {
		bar := bench.Bars{Name: fmt.Sprintf("%s, %s", r.Name, nodesText(r.Nodes))}
		if t.withEtcd() {
			if r.Absolute {
				continue
			}
			met, ok := r.Met()
			bar.Spread, bar.Goal = r.Against(Etcd), r.Goal
			bar.Good = met || !ok && (bar.Spread.Median >= 1) == r.Higher
		} else {
			bar.Spread = r.Against(Single)
			bar.Good = (bar.Spread.Median >= 1) == r.Higher
		}
		if bar.Spread.Median > 0 {
			bars = append(bars, bar)
		}
	}
	title := "braid with many groups, as a multiple of a single group"
	if t.withEtcd() {
		title = "braid with many groups, as a multiple of etcd"
	}
	return bench.PlotRatios(w, title, bars)
}
