package order

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"braid/mvcc"
	"braid/pd/pdpb"
)

// parseReport reads "r=2 from=10 upto=12 term=1 cum=2 sealed=0 runs=11:0:1,12:1:2". Without runs
// there is one, with stamp f (0). A fact reads "facts=11:0:7:2+3:w": index, stamp, attempt,
// participants, and w when the region writes.
func parseReport(t *testing.T, line string) pdpb.Report {
	t.Helper()
	var r pdpb.Report
	var stamp uint64
	runs := ""
	for _, f := range strings.Fields(line) {
		k, v, _ := strings.Cut(f, "=")
		if k == "runs" {
			runs = v
			continue
		}
		if k == "facts" {
			r.Facts = parseFacts(t, v)
			continue
		}
		n, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			t.Fatalf("report %q: %v", line, err)
		}
		switch k {
		case "r":
			r.Region = pdpb.RegionID(n)
		case "inc":
			r.Incarnation = uint32(n)
		case "from":
			r.From = n
		case "upto":
			r.Upto = n
		case "term":
			r.UptoTerm = n
		case "cum":
			r.Cum = n
		case "sealed":
			r.Sealed = n
		case "f":
			stamp = n
		default:
			t.Fatalf("report %q: field %q", line, k)
		}
	}
	if runs == "" && r.Upto > r.From {
		r.Runs = []pdpb.Run{{Index: r.Upto, Stamp: pdpb.Fence(stamp), Cum: r.Cum}}
	}
	for _, x := range strings.FieldsFunc(runs, func(c rune) bool { return c == ',' }) {
		var run pdpb.Run
		if _, err := fmt.Sscanf(x, "%d:%d:%d", &run.Index, &run.Stamp, &run.Cum); err != nil {
			t.Fatalf("run %q: %v", x, err)
		}
		r.Runs = append(r.Runs, run)
	}
	return r
}

func parseFacts(t *testing.T, v string) (list []pdpb.Fact) {
	t.Helper()
	for _, x := range strings.Split(v, ",") {
		var f pdpb.Fact
		part := strings.Split(x, ":")
		if _, err := fmt.Sscanf(strings.Join(part[:3], " "), "%d %d %d", &f.Index, &f.Stamp, &f.Attempt); err != nil {
			t.Fatalf("fact %q: %v", x, err)
		}
		for _, id := range strings.Split(part[3], "+") {
			n, err := strconv.ParseUint(id, 10, 64)
			if err != nil {
				t.Fatalf("fact %q: %v", x, err)
			}
			f.Participants = append(f.Participants, pdpb.RegionID(n))
		}
		f.Writes = len(part) > 4
		list = append(list, f)
	}
	return list
}

// parseCut reads a report or an event from each line.
func parseCut(t *testing.T, input string) *CutProposal {
	p := &CutProposal{}
	for _, line := range strings.Split(input, "\n") {
		f := strings.Fields(line)
		switch {
		case len(f) == 0:
		case f[0] == "fence":
			p.Events = append(p.Events, Event{Kind: EventRaiseFence})
		case f[0] == "compact":
			n, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			p.Events = append(p.Events, Event{Kind: EventCompact, Rev: mvcc.Revision(n)})
		case f[0] == "abort":
			n, err := strconv.ParseUint(f[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			p.Events = append(p.Events, Event{Kind: EventAbort, Attempt: pdpb.AttemptID(n)})
		default:
			p.Parts = append(p.Parts, parseReport(t, line))
		}
	}
	return p
}

func addRegions(c *Core, input string) {
	for _, line := range strings.Split(input, "\n") {
		var d pdpb.Descriptor
		if n, _ := fmt.Sscanf(line, "%d/%d %d@%d", &d.ID, &d.Incarnation, &d.StartIndex, &d.StartTerm); n == 4 {
			c.AddRegion(&d)
		}
	}
}

// reload sends the state through its encoding, so that scripts check it on the way.
func reload(t *testing.T, c *Core) *Core {
	t.Helper()
	b := c.AppendState(nil)
	n, rest, err := LoadState(b)
	if err != nil || len(rest) != 0 {
		t.Fatalf("state does not load: %v, %d bytes left", err, len(rest))
	}
	if n.String() != c.String() {
		t.Fatalf("state changed by encoding:\n%s%s", c, n)
	}
	n.Mutants = c.Mutants
	return n
}

func TestCore(t *testing.T) {
	datadriven.Walk(t, "testdata/core", func(t *testing.T, path string) {
		s := &coreScript{core: NewCore()}
		datadriven.RunTest(t, path, s.run)
	})
}

type coreScript struct{ core *Core }

func (s *coreScript) run(t *testing.T, d *datadriven.TestData) string {
	switch d.Cmd {
	case "new":
		s.core = NewCore()
		if d.HasArg("remember") {
			d.ScanArgs(t, "remember", &s.core.Mutants.DecidedMax)
		}
		addRegions(s.core, d.Input)
		return s.core.String()
	case "cut":
		p := parseCut(t, d.Input)
		b := p.Append(nil)
		dec := pdpb.NewDec(b)
		q := ReadProposal(dec)
		if err := dec.Done(); err != nil || q.String() != p.String() {
			t.Fatalf("proposal changed by encoding: %v\n%s%s", err, p, q)
		}
		res := s.core.Apply(q)
		s.core = reload(t, s.core)
		return res.String()
	case "judge":
		r := parseReport(t, d.Input)
		return s.core.Judge(&r).String() + "\n"
	case "items":
		var id, have uint64
		d.ScanArgs(t, "r", &id)
		d.ScanArgs(t, "have", &have)
		var b strings.Builder
		for _, it := range s.core.AppendItems(nil, pdpb.RegionID(id), have) {
			fmt.Fprintf(&b, "%v\n", &it)
		}
		return b.String()
	case "state":
		return s.core.String()
	}
	t.Fatalf("unknown command %q", d.Cmd)
	return ""
}

func TestCutter(t *testing.T) {
	datadriven.Walk(t, "testdata/cutter", func(t *testing.T, path string) {
		var (
			core   *Core
			cutter *Cutter
			log    []*CutProposal // proposed, not applied
			last   uint64         // index of the last log entry
			done   uint64         // applied
		)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "new":
				var o CutterOptions
				if d.HasArg("in-flight") {
					d.ScanArgs(t, "in-flight", &o.InFlightMax)
				}
				if d.HasArg("parts") {
					d.ScanArgs(t, "parts", &o.PartsMax)
				}
				core, cutter = NewCore(), NewCutter(o, Mutants{})
				log, last, done = nil, 0, 0
				addRegions(core, d.Input)
				return ""
			case "lead": // the opening entry is appended
				var term uint64
				d.ScanArgs(t, "term", &term)
				last++
				log = append(log, nil)
				cutter.Role(true, term, last)
				return fmt.Sprintf("open=%d\n", last)
			case "follow": // what was not applied is lost
				var term uint64
				d.ScanArgs(t, "term", &term)
				if d.HasArg("lose") {
					last, log = done, nil
				}
				cutter.Role(false, term, 0)
				return ""
			case "offer":
				var b strings.Builder
				for _, line := range strings.Split(d.Input, "\n") {
					r := parseReport(t, line)
					fmt.Fprintf(&b, "%v\n", cutter.Offer(core, &r))
				}
				return b.String()
			case "tick":
				cutter.Tick()
				return ""
			case "next":
				p, ok := cutter.Next(core, parseCut(t, d.Input).Events)
				if !ok {
					return "nothing\n"
				}
				if d.HasArg("dropped") {
					cutter.Undo(p)
					return "dropped\n" + p.String()
				}
				last++
				log = append(log, p)
				cutter.Proposed(p, last)
				return fmt.Sprintf("index=%d\n%s", last, p)
			case "apply":
				if len(log) == 0 {
					return "nothing\n"
				}
				p := log[0]
				log = log[1:]
				done++
				out := "opened\n"
				if p != nil {
					res := core.Apply(p)
					out = res.String()
				}
				cutter.Applied(done)
				return out
			case "pending":
				return fmt.Sprintf("%v in-flight=%d\n", cutter.Pending(), cutter.InFlight())
			}
			t.Fatalf("unknown command %q", d.Cmd)
			return ""
		})
	})
}
