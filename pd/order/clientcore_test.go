package order

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

func (r *Request) testString() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v to %v", r.Method, r.To)
	if r.Via != 0 {
		fmt.Fprintf(&b, " via %v", r.Via)
	}
	if s := r.Subscribe; s != nil {
		fmt.Fprintf(&b, " session=%d", s.Session)
		for _, id := range s.Remove {
			fmt.Fprintf(&b, " -r%d", id)
		}
		for _, a := range s.Add {
			fmt.Fprintf(&b, " +r%d>%d", a.Region, a.Have)
		}
		if s.Close {
			b.WriteString(" close")
		}
	}
	if r.Method == MethodMark {
		fmt.Fprintf(&b, " session=%d cut=%d", r.Session, r.Cut)
	}
	if r.Event != nil {
		fmt.Fprintf(&b, " %v", r.Event)
	}
	return b.String()
}

// TestClientCore runs scripts over a ClientCore. After each command it prints what the core wants
// done. A request is named by its method in "answer" and "fail": one of each is in flight.
func TestClientCore(t *testing.T) {
	datadriven.Walk(t, "testdata/client", func(t *testing.T, path string) {
		var c *ClientCore
		var reports map[pdpb.RegionID]pdpb.Report // what replicas here would report
		inFlight := map[string]uint64{}
		now := time.Duration(0)
		ms := func(s string) time.Duration {
			n, err := strconv.Atoi(s)
			if err != nil {
				t.Fatal(err)
			}
			return time.Duration(n) * time.Millisecond
		}
		build := func() (built []pdpb.Report) {
			for _, id := range c.Reporting(nil) {
				if r, ok := reports[id]; ok && c.Wants(&r) {
					built = append(built, r)
				}
			}
			return built
		}
		output := func(b *strings.Builder) string {
			o := c.Take()
			if o.SendReports {
				built := build()
				if req, ok := c.Reported(built); ok {
					inFlight[req.Method.String()] = req.ID
					fmt.Fprintf(b, "%s\n", req.testString())
					for i := range built {
						fmt.Fprintf(b, "  %v\n", &built[i])
					}
				}
			}
			if o.PullLocal {
				b.WriteString("pull\n")
			}
			for i := range o.Requests {
				inFlight[o.Requests[i].Method.String()] = o.Requests[i].ID
				fmt.Fprintf(b, "%s\n", o.Requests[i].testString())
			}
			for _, token := range o.Expired {
				fmt.Fprintf(b, "expired %d\n", token)
			}
			return b.String()
		}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var b strings.Builder
			num := func(key string) (n uint64) {
				if d.HasArg(key) {
					d.ScanArgs(t, key, &n)
				}
				return n
			}
			region := pdpb.RegionID(num("r"))
			switch d.Cmd {
			case "new":
				o := ClientOptions{Self: raftid.StoreID(num("self")), Session: num("session"), BatchMax: int(num("batch"))}
				for _, a := range d.CmdArgs {
					if a.Key == "members" {
						for _, v := range a.Vals {
							n, _ := strconv.Atoi(v)
							o.Members = append(o.Members, raftid.StoreID(n))
						}
					}
				}
				c, reports, now = NewClientCore(o), map[pdpb.RegionID]pdpb.Report{}, 0
			case "register":
				c.Register(region, num("have"))
			case "unregister":
				c.Unregister(region)
			case "down":
				c.Down(raftid.StoreID(num("store")))
			case "role":
				c.SetRole(Role{Term: num("term"), Leader: raftid.StoreID(num("leader"))})
			case "report":
				for _, line := range strings.Split(d.Input, "\n") {
					line, leads := strings.CutSuffix(line, " leads")
					r := parseReport(t, line)
					reports[r.Region] = r
					c.Changed(r.Region, leads)
				}
			case "pull":
				built := build()
				c.Pulled(built)
				for i := range built {
					fmt.Fprintf(&b, "  %v\n", &built[i])
				}
			case "frame":
				f := &Frame{Session: num("session"), Seq: num("seq"), Dir: num("dir")}
				f.Role = Role{Term: num("term"), Leader: raftid.StoreID(num("leader"))}
				f.Mark = pdpb.Mark{Cut: pdpb.Cut(num("cut")), Rev: mvcc.Revision(num("rev"))}
				for _, line := range strings.Split(d.Input, "\n") {
					var id, n, upto uint64
					if k, _ := fmt.Sscanf(line, "ack r%d newest=%d upto=%d", &id, &n, &upto); k == 3 {
						f.Acks = append(f.Acks, Ack{pdpb.RegionID(id), n, upto})
					}
					if k, _ := fmt.Sscanf(line, "item r%d #%d upto=%d", &id, &n, &upto); k == 3 {
						f.Items = append(f.Items, pdpb.Item{Region: pdpb.RegionID(id), N: n, Upto: upto})
					}
				}
				g, err := DecodeFrame(f.Append(nil))
				if err != nil || g.String() != f.String() {
					t.Fatalf("frame changed by encoding: %v\n%v\n%v", err, f, g)
				}
				items, ok := c.Frame(raftid.StoreID(num("from")), g)
				if !ok {
					b.WriteString("not taken\n")
					break
				}
				for i := range items {
					fmt.Fprintf(&b, "deliver r%d #%d\n", items[i].Region, items[i].N)
				}
			case "state":
				for id := pdpb.RegionID(2); id < 6; id++ {
					if c.subs[id] != nil {
						mark, newest, ok := c.State(id)
						fmt.Fprintf(&b, "r%d cut=%d newest=%d ok=%v\n", id, mark.Cut, newest, ok)
					}
				}
				since, still := c.StandsStillSince()
				fmt.Fprintf(&b, "newest [%v] following %v still=%v", c.Newest(), c.stream.member, still)
				if still {
					fmt.Fprintf(&b, " since %v", since)
				}
				b.WriteByte('\n')
			case "want-mark":
				c.WantMark(pdpb.Cut(num("cut")))
			case "want-read":
				c.WantRead(true)
			case "refetch":
				c.Refetch(region, num("have"))
			case "propose":
				e := Event{Kind: EventAllocIDs, N: 1}
				if d.HasArg("compact") {
					e = Event{Kind: EventCompact, Rev: mvcc.Revision(num("compact"))}
				}
				if !c.Propose(e, num("token")) {
					b.WriteString("refused\n")
				}
			case "answer", "fail":
				m := d.CmdArgs[0].Key
				id := inFlight[m]
				delete(inFlight, m)
				var r *Reply
				var err error
				if d.Cmd == "fail" {
					err = ErrTimeout
				} else {
					r = &Reply{Role: Role{Term: num("term"), Leader: raftid.StoreID(num("leader"))}}
					if d.HasArg("not-leader") {
						r.Err = &NotLeaderError{}
					}
				}
				if m == "read-point" {
					c.readsWaiting = d.HasArg("more")
				}
				token, read := c.Done(id, r, err)
				if token != 0 {
					fmt.Fprintf(&b, "finished %d\n", token)
				}
				if read {
					b.WriteString("read ended\n")
				}
			case "tick":
				now += ms(d.CmdArgs[0].Key)
				c.Tick(now)
			default:
				t.Fatalf("unknown command %q", d.Cmd)
			}
			return output(&b)
		})
	})
}
