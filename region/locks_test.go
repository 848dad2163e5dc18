package region

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// parseSpans reads "w:a r:c-f": exclusive a, shared c up to f.
func parseSpans(t *testing.T, words []string) (list []regionpb.LockSpan) {
	t.Helper()
	for _, x := range words {
		mode, keys, ok := strings.Cut(x, ":")
		if !ok {
			t.Fatalf("span %q", x)
		}
		s := mvcc.Key([]byte(keys))
		if from, to, ok := strings.Cut(keys, "-"); ok {
			s = mvcc.Span{Start: []byte(from), End: []byte(to)}
		}
		list = append(list, regionpb.LockSpan{Span: s, Exclusive: mode == "w"})
	}
	return list
}

// TestLocks plays scripts on a lock table. After each command it prints the table.
func TestLocks(t *testing.T) {
	datadriven.Walk(t, "testdata/locks", func(t *testing.T, path string) {
		table := &lockTable{}
		var pending, aged []regionpb.LockSpan
		conflicts := func(with *[]regionpb.LockSpan) func([]regionpb.LockSpan) bool {
			return func(s []regionpb.LockSpan) bool { set := newSpanSet(*with); return set.conflicts(s) }
		}
		agedSince := 0
		rules := grantRules{withKeys: func(s []regionpb.LockSpan) ([]regionpb.LockSpan, []regionpb.Attachment, bool) { return s, nil, true }, inFlight: conflicts(&pending),
			goesFirst: func(s []regionpb.LockSpan, n int) bool { return conflicts(&aged)(s) && table.before(agedSince) <= n }}
		lim := TinyLimits
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			out := ""
			attempt := func(key string) pdpb.AttemptID {
				var n uint64
				if d.HasArg(key) {
					d.ScanArgs(t, key, &n)
				}
				return pdpb.AttemptID(n)
			}
			switch d.Cmd {
			case "begin":
				var prepared []regionpb.Prepared
				if d.Input != "" {
					prepared = append(prepared, regionpb.Prepared{Attempt: attempt("t"), Locks: parseSpans(t, strings.Fields(d.Input))})
				}
				table.begin(uint64(attempt("term")), prepared, &lim)
			case "end":
				for _, l := range table.end() {
					out += fmt.Sprintf("refused t%d\n", l.attempt)
				}
			case "lock":
				l := &lock{attempt: attempt("t"), age: attempt("age"), spans: parseSpans(t, strings.Fields(d.Input)), now: d.HasArg("now"), since: int(attempt("at"))}
				if l.age == 0 {
					l.age = l.attempt
				}
				if !table.request(l) {
					out += fmt.Sprintf("refused t%d\n", l.attempt)
				}
			case "pending": // what is evaluated and not applied
				pending = parseSpans(t, strings.Fields(d.Input))
			case "aged": // what a command touches that has waited long, and since when
				agedSince = int(attempt("at"))
				aged = parseSpans(t, strings.Fields(d.Input))
			case "prepare": // proposed, applied
				table.find(attempt("t")).state = lockPrepared
			case "release":
				table.release(attempt("t"))
			case "cancel":
				table.cancel(attempt("t"))
			case "fence":
				table.fence([]regionpb.Prepared{{Attempt: attempt("prepared")}}, false)
			case "tick":
				late, orphans := table.tick(int(attempt("n")), &lim)
				for _, l := range late {
					out += fmt.Sprintf("too late t%d\n", l.attempt)
				}
				for _, id := range orphans {
					out += fmt.Sprintf("abort t%d\n", id)
				}
			case "command": // must a command of one region wait?
				n := len(table.waiting)
				if d.HasArg("aged") {
					n = table.before(int(attempt("at")))
				}
				return fmt.Sprintf("waits: %v\n", table.inFront(parseSpans(t, strings.Fields(d.Input)), n))
			default:
				t.Fatalf("unknown command %q", d.Cmd)
			}
			granted, refused := table.grant(rules)
			for _, l := range granted {
				out += fmt.Sprintf("granted t%d %d/%d\n", l.attempt, l.id.Term, l.id.Seq)
			}
			for _, l := range refused {
				out += fmt.Sprintf("busy t%d\n", l.attempt)
			}
			return out + table.String()
		})
	})
}

// TestReleaseFindsRoom: with as many requests for locks as there is room for, a lock can be given up, and
// they count as locks from the moment they came.
func TestReleaseFindsRoom(t *testing.T) {
	h := newHost(1, testDesc, func(c *Config) { c.Limits = TinyLimits })
	h.lead(6)
	h.commit(h.log.LastIndex())
	var granted []pdpb.AttemptID
	refused := 0
	ask := func(attempt pdpb.AttemptID) {
		h.r.Lock(&Lock{Attempt: attempt, Age: attempt, Spans: parseSpans(t, []string{"w:k"}), Reply: func(_ regionpb.LockGrant, err error) {
			if err == nil {
				granted = append(granted, attempt)
			} else {
				refused++
			}
		}})
	}
	ask(1)
	if n := h.r.Stats().Locks; n != 1 {
		t.Errorf("%d locks while one is asked for", n)
	}
	h.work()
	for i := range TinyLimits.LocksMax {
		ask(pdpb.AttemptID(2 + i))
	}
	ask(100) // no room
	h.r.Release(1)
	if n := h.r.Stats().Locks; n != 1+TinyLimits.LocksMax {
		t.Errorf("%d locks, one held and %d asked for", n, TinyLimits.LocksMax)
	}
	h.work()
	// One finds no room in the table, which is full until the release is looked at.
	if len(granted) != 2 || granted[1] != 2 || refused != 2 {
		t.Errorf("granted %v, %d refused", granted, refused)
	}
	if n := h.r.Stats().Locks; n != TinyLimits.LocksMax-1 {
		t.Errorf("%d locks are left", n)
	}
}
