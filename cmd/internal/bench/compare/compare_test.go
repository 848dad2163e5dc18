package compare

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"braid/cmd/internal/bench"
)

func TestParseCPU(t *testing.T) {
	got, err := parseCPU("17 (a (b) c) S 1 17 17 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 9 0 100 1 2")
	if err != nil || got != 3*time.Second {
		t.Error(got, err)
	}
	if _, err := parseCPU("17 (x) S 1"); err == nil {
		t.Error("a short line was read")
	}
	if cpu, err := processCPU(os.Getpid()); err != nil || cpu < 0 {
		t.Error(cpu, err)
	}
	if rss, err := processRSS(os.Getpid()); err != nil || rss < 1<<20 {
		t.Error(rss, err)
	}
}

func TestParseWritten(t *testing.T) {
	stats := "   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0\n 254       1 vda1 1 2 3 4 5 6 1000 8 0 1 2\n"
	if got, err := parseWritten(stats, device{254, 1}); err != nil || got != 512_000 {
		t.Error(got, err)
	}
	if _, err := parseWritten(stats, device{254, 2}); err == nil {
		t.Error("a device that is not there was read")
	}
}

func TestSumMetrics(t *testing.T) {
	text := "# HELP a_total x\na_total{x=\"1\"} 2\na_total{x=\"} 3\"} 3\na_total_more 7\nb 1.5e3\n"
	sums, err := sumMetrics(strings.NewReader(text), []string{"a_total", "b", "c"})
	if err != nil || sums["a_total"] != 5 || sums["b"] != 1500 || len(sums) != 2 {
		t.Error(sums, err)
	}
}

// TestInterruptedStage: rows that were measured before go when there are new ones for them.
func TestInterruptedStage(t *testing.T) {
	old := value{name: "rate", unit: "/s", value: 7, higher: true}
	table := &Table{}
	table.add(1, "gets", Multi, old)
	sides := []*side{{servers: &servers{system: System{Name: Multi}}, params: params{nodes: 1}}}
	o := Options{Rounds: 2, Bar: bench.NewBar(io.Discard)}
	rounds := 0
	st := stage{name: "gets", measure: func(context.Context, *side) ([]value, error) {
		if rounds--; rounds < 0 {
			return nil, context.Canceled
		}
		return []value{{name: "rate", unit: "/s", value: 9, higher: true}}, nil
	}}
	for _, c := range []struct {
		rounds int
		want   []float64
	}{{0, []float64{7}}, {1, []float64{9}}, {2, []float64{9, 9}}} {
		rounds = c.rounds
		if err := o.runStage(t.Context(), st, sides, table); (err == nil) != (c.rounds == 2) {
			t.Errorf("%d rounds: %v", c.rounds, err)
		}
		if got := table.Rows[0].Values[Multi]; len(table.Rows) != 1 || !slices.Equal(got, c.want) {
			t.Errorf("after %d rounds the row has %v, want %v", c.rounds, got, c.want)
		}
	}
}

func TestTable(t *testing.T) {
	table := &Table{Runs: []string{"braid bench compare"}}
	lower := func(v float64) value { return value{name: "cpu", unit: "s", value: v, goal: 0.65} }
	for i, v := range []float64{0.5, 0.6, 0.7} {
		table.add(3, "puts", Multi, lower(v))
		table.add(3, "puts", Etcd, lower(1))
		table.add(3, "puts", Single, lower(float64(i+1)))
	}
	table.add(1, "gets", Multi, value{name: "rate", unit: "/s", value: 90, higher: true, goal: 1.1, failed: 3})
	table.add(1, "gets", Etcd, value{name: "rate", unit: "/s", value: 100, higher: true, goal: 1.1})
	table.add(1, "txn", Multi, value{name: "times", unit: "×", value: 2.5, goal: 3, absolute: true})
	cpu := table.Rows[0]
	if s := cpu.Against(Etcd); s.Median != 0.6 || s.Least != 0.5 || s.Most != 0.7 {
		t.Errorf("ratios %+v", s)
	}
	for i, want := range []bool{true, false, true} {
		if met, ok := table.Rows[i].Met(); !ok || met != want {
			t.Errorf("%s: met %v, %v", table.Rows[i].Name, met, ok)
		}
	}
	for _, write := range []func(*strings.Builder) error{
		func(b *strings.Builder) error { return table.Print(b) },
		func(b *strings.Builder) error { return table.Markdown(b) },
	} {
		var out strings.Builder
		if err := write(&out); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"3 nodes", "1 node", "0.600 (0.500–0.700)", "0.60 (0.50–0.70)", "≤ 0.65× met", "≥ 1.1× missed", "≤ 3 met", "90.0, 3 failed"} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%q is missing in\n%s", want, out.String())
			}
		}
	}
	var picture strings.Builder
	if err := table.Plot(&picture); err != nil || !strings.Contains(picture.String(), "cpu, 3 nodes") {
		t.Error(err, picture.String())
	}

	path := filepath.Join(t.TempDir(), "table.json")
	if err := table.Save(path); err != nil {
		t.Fatal(err)
	}
	again, err := Load(path)
	if err != nil || len(again.Rows) != 3 || again.Rows[0].Values[Multi][1] != 0.6 {
		t.Error(again, err)
	}
	again.drop(1, "gets")
	if len(again.Rows) != 2 {
		t.Error("the stage is still there")
	}
	if none, err := Load(filepath.Join(t.TempDir(), "none")); err != nil || len(none.Rows) != 0 {
		t.Error(none, err)
	}
}

// TestTableWithoutEtcd has neither goals nor columns of what was not measured, and a picture all the same.
func TestTableWithoutEtcd(t *testing.T) {
	table := &Table{}
	table.add(1, "gets", Multi, value{name: "rate", unit: "/s", value: 90, higher: true, goal: 1.1})
	table.add(1, "gets", Single, value{name: "rate", unit: "/s", value: 100, higher: true, goal: 1.1})
	var text, markdown, picture strings.Builder
	if err := errors.Join(table.Print(&text), table.Markdown(&markdown), table.Plot(&picture)); err != nil {
		t.Fatal(err)
	}
	for _, out := range []string{text.String(), markdown.String()} {
		if strings.Contains(out, "goal") || strings.Contains(out, "≥") || strings.Contains(out, "etcd") || !strings.Contains(out, "0.90") {
			t.Error(out)
		}
	}
	for _, want := range []string{"rate, 1 node", "multiple of a single group", ">0.90<", "green: better;"} {
		if !strings.Contains(picture.String(), want) {
			t.Errorf("%q is missing in\n%s", want, picture.String())
		}
	}
}

// TestRowsFollowTheSuite measures stages out of order, as a table made in pieces has them.
func TestRowsFollowTheSuite(t *testing.T) {
	table := &Table{}
	for _, at := range []struct {
		nodes int
		stage string
	}{{1, "gets"}, {3, "memory"}, {1, "puts"}, {3, "puts"}} {
		table.add(at.nodes, at.stage, Multi, value{name: "x", value: 1})
	}
	table.sort(suites["readme"])
	var got []string
	for _, r := range table.Rows {
		got = append(got, nodesText(r.Nodes)+" "+r.Stage)
	}
	if want := []string{"3 nodes puts", "3 nodes memory", "1 node puts", "1 node gets"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestOptionsValidate(t *testing.T) {
	good := Options{Suite: "readme", Nodes: []int{1}, Rounds: 1, Scale: 1, Systems: []System{{Name: Multi}}}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*Options){
		"no suite":     func(o *Options) { o.Suite = "x" },
		"no stage":     func(o *Options) { o.Stages = []string{"pits"} },
		"1, 3 or 5":    func(o *Options) { o.Nodes = []int{2} },
		"one round":    func(o *Options) { o.Rounds = 0 },
		"the scale":    func(o *Options) { o.Scale = 0 },
		"at least one": func(o *Options) { o.Systems = nil },
	} {
		bad := good
		change(&bad)
		if err := bad.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestSuitesAreWhole checks what Run takes for granted: stages of a group stand together and share
// a key space, and the placements stand for all 27.
func TestSuitesAreWhole(t *testing.T) {
	for name, suite := range suites {
		seen := map[string]bool{}
		for i, st := range suite {
			p := params{nodes: 3, scale: 0.3}
			if i > 0 && suite[i-1].group == st.group {
				if suite[i-1].space(p) != st.space(p) {
					t.Errorf("%s: %s has another key space than its group", name, st.name)
				}
			} else if seen[st.group] {
				t.Errorf("%s: group %s is torn apart", name, st.group)
			}
			seen[st.group] = true
		}
	}
	weight := 0.0
	for _, p := range threeNodes {
		weight += p.weight
	}
	if weight != 27 {
		t.Errorf("placements stand for %g of 27", weight)
	}
}
