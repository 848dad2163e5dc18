package leasesvc

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// TestScripts runs testdata. Times are in seconds; `at` moves the clock and prints what is to be done.
//
//	new [extend=] [ending=] [no-extend]
//	lead region= term=        loaded region= term=      end region=
//	load region= term= id= ttl= [remaining=]            a record that was read
//	change region= id= ttl= [remaining=] [keys=] [as=]  a record that was applied; without ttl it is gone; as is
//	                                  its grant, here and below,
//	                                  keys is where keys of it are, besides its own region
//	renew region= id= [asked=never]   left region= id= [asked=never]   a quorum has just confirmed the term
//	                                  of the last "lead", unless it was not asked
//	confirm region= term=             it confirms the term now
//	failed region= term= id= [as=]    an Expire that failed
//	recorded region= term= id= [as=]  a Checkpoint that is over
//	at t=
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var c *Core
		var now time.Duration
		terms := map[pdpb.RegionID]uint64{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			n := func(key string) (v int64) {
				if d.HasArg(key) {
					var f float64
					d.ScanArgs(t, key, &f)
					v = int64(f)
				}
				return v
			}
			region, term, id := pdpb.RegionID(n("region")), uint64(n("term")), n("id")
			rec := &regionpb.LeaseRecord{Grant: uint64(n("as")), TTL: n("ttl"), Remaining: n("remaining")}
			if !d.HasArg("ttl") {
				rec = nil
			}
			if d.HasArg("keys") {
				var at string
				d.ScanArgs(t, "keys", &at)
				rec.Spans = []mvcc.Span{mvcc.Key([]byte(at))}
			}
			names := [...]string{"elsewhere", "unknown", "renewed", "wait", "unconfirmed"}
			if (d.Cmd == "renew" || d.Cmd == "left") && !d.HasArg("asked") {
				c.Confirmed(region, terms[region], now)
			}
			switch d.Cmd {
			case "new":
				now = 0
				c = New(Options{Extend: time.Duration(n("extend")) * time.Second, EndingMax: int(n("ending")), SortMax: int(n("sort"))})
				c.NoExtend = d.HasArg("no-extend")
			case "lead":
				c.Lead(region, term)
				terms[region] = term
			case "confirm":
				c.Confirmed(region, term, now)
			case "load":
				c.Loaded(region, term, id, rec, now)
			case "loaded":
				c.LoadedAll(region, term)
			case "end":
				c.End(region)
			case "change":
				c.Changed(region, id, rec, now)
			case "renew":
				out, ttl, undo := c.Renew(region, id, now)
				if undo.Kind != 0 {
					return fmt.Sprintf("first %s\n", &undo)
				}
				return fmt.Sprintf("%s ttl=%d\n", names[out], ttl)
			case "left":
				out, left := c.Remaining(region, id, now)
				return fmt.Sprintf("%s %v\n", names[out], left)
			case "failed":
				c.Ended(Action{Kind: Expire, Region: region, Term: term, ID: id, Grant: uint64(n("as"))}, now)
			case "recorded":
				c.Ended(Action{Kind: Checkpoint, Region: region, Term: term, ID: id, Grant: uint64(n("as"))}, now)
			case "at":
				var f float64
				d.ScanArgs(t, "t", &f)
				now = time.Duration(f * float64(time.Second))
				var b strings.Builder
				for _, a := range c.Tick(now, nil) {
					fmt.Fprintln(&b, &a)
				}
				return b.String()
			default:
				t.Fatalf("unknown command %s", d.Cmd)
			}
			return ""
		})
	})
}

// TestNeverEarly moves leases between leaders at random, renews some and checks that none is ended
// before its time to live has passed since the last renewal that was answered, or since its grant. A
// deposed leader may not hear of it for a long time, as one that was stopped and goes on.
func TestNeverEarly(t *testing.T) {
	early := func(seed uint64, noExtend, noConfirm bool) (bad int) {
		const election = 2 * time.Second
		rng := rand.New(rand.NewPCG(seed, 1))
		type state struct {
			ttl    time.Duration
			until  time.Duration // promised to the client
			record *regionpb.LeaseRecord
		}
		leases := map[int64]*state{}
		newCore := func() *Core {
			c := New(Options{Extend: election, CheckpointEvery: 7 * time.Second})
			c.NoExtend, c.NoConfirm = noExtend, noConfirm
			return c
		}
		cores := [2]*Core{newCore(), newCore()}
		term, leader, old, oldUntil := uint64(1), 0, -1, time.Duration(0)
		cores[0].Lead(1, term)
		cores[0].LoadedAll(1, term)
		id := int64(0)
		for now := time.Duration(0); now < 300*time.Second; now += 200 * time.Millisecond {
			if old >= 0 && now > oldUntil {
				cores[old].End(1)
				old = -1
			}
			switch rng.IntN(20) {
			case 0:
				id++
				ttl := int64(3 + rng.IntN(30))
				leases[id] = &state{ttl: seconds(ttl), until: now + seconds(ttl), record: &regionpb.LeaseRecord{TTL: ttl}}
				cores[leader].Changed(1, id, leases[id].record, now)
			case 1:
				if old < 0 && rng.IntN(4) == 0 { // leadership moves; the old leader does not know yet
					old, oldUntil = leader, now+time.Duration(rng.Int64N(int64(10*election)))
					leader = 1 - leader
					term++
					cores[leader].Lead(1, term)
					for id, l := range leases {
						cores[leader].Loaded(1, term, id, l.record, now)
					}
					cores[leader].LoadedAll(1, term)
				}
			default:
				if id == 0 {
					continue
				}
				asked := leader
				if old >= 0 && rng.IntN(2) == 0 {
					asked = old
				}
				l := leases[1+rng.Int64N(id)]
				if l == nil {
					continue
				}
				for k, v := range leases {
					if v == l {
						out, _, undo := cores[asked].Renew(1, k, now)
						if out == Unconfirmed && asked == leader { // nobody confirms the old one
							cores[leader].Confirmed(1, term, now)
							out, _, undo = cores[asked].Renew(1, k, now)
						}
						if undo.Kind != 0 && asked == leader {
							l.record = &regionpb.LeaseRecord{TTL: l.record.TTL}
							cores[leader].Changed(1, k, l.record, now)
							out, _, undo = cores[asked].Renew(1, k, now)
						}
						if out == Renewed && undo.Kind == 0 {
							l.until = now + l.ttl
						}
					}
				}
			}
			for _, a := range cores[leader].Tick(now, nil) {
				switch l := leases[a.ID]; {
				case a.Kind == Checkpoint:
					l.record = &regionpb.LeaseRecord{TTL: l.record.TTL, Remaining: a.Remaining}
					cores[leader].Changed(1, a.ID, l.record, now)
					cores[leader].Ended(a, now)
				case l != nil:
					if now < l.until {
						bad++
					}
					delete(leases, a.ID)
					cores[leader].Changed(1, a.ID, nil, now)
				}
			}
		}
		return bad
	}
	extends, confirms := 0, 0
	for seed := range uint64(40) {
		if n := early(seed, false, false); n > 0 {
			t.Errorf("seed %d: %d leases ended early", seed, n)
		}
		extends += early(seed, true, false)
		confirms += early(seed, false, true)
	}
	if extends == 0 {
		t.Error("a leader that extends nothing was not caught")
	}
	if confirms == 0 {
		t.Error("leaders that renew without being confirmed were not caught")
	}
}

// TestCheckpointOverdue lets a Checkpoint take longer than the interval: the next one waits, and time
// goes on.
func TestCheckpointOverdue(t *testing.T) {
	c := New(Options{CheckpointEvery: time.Minute})
	c.Lead(7, 1)
	c.LoadedAll(7, 1)
	c.Changed(7, 1, &regionpb.LeaseRecord{TTL: 3600}, 0)
	first := c.Tick(time.Minute, nil)
	if len(first) != 1 || first[0].Kind != Checkpoint {
		t.Fatalf("after a minute: %v", first)
	}
	if got := c.Tick(3*time.Minute, nil); len(got) != 0 {
		t.Errorf("while the first is on its way: %v", got)
	}
	c.Ended(first[0], 3*time.Minute)
	if got := c.Tick(4*time.Minute, nil); len(got) != 1 || got[0].Kind != Checkpoint {
		t.Errorf("after it has ended: %v", got)
	}
}

// TestCheckpointsSpread: what many leases have left is recorded over half an interval after an election,
// and of no more than a number at a time; what found no room comes later.
func TestCheckpointsSpread(t *testing.T) {
	const n, most = 30_000, 200
	c := New(Options{CheckpointEvery: 5 * time.Minute, RecordingMax: most})
	c.Lead(7, 1)
	for id := range int64(n) {
		c.Loaded(7, 1, id, &regionpb.LeaseRecord{TTL: 3600}, 0)
	}
	c.LoadedAll(7, 1)
	recorded := map[int64]int{}
	for now := time.Duration(0); now <= 5*time.Minute+time.Second; now += 500 * time.Millisecond {
		list := c.Tick(now, nil)
		if len(list) > most || len(list) > 0 && now < 149*time.Second {
			t.Fatalf("%d at %v", len(list), now)
		}
		for _, a := range list {
			recorded[a.ID]++
		}
		// Those of every other tick take until the next one.
		if again := c.Tick(now, nil); now%time.Second == 0 && len(list) == most && len(again) != 0 {
			t.Fatalf("%d more at %v, while %d are on their way", len(again), now, len(list))
		}
		for _, a := range list {
			c.Ended(a, now)
		}
	}
	if len(recorded) != n {
		t.Errorf("%d of %d leases were recorded", len(recorded), n)
	}
	for id, times := range recorded {
		if times != 1 {
			t.Fatalf("lease %d was recorded %d times in an interval", id, times)
		}
	}
}

// TestEndFailsAgain: the pauses after ends that fail grow, up to a longest one, and however often they
// have failed.
func TestEndFailsAgain(t *testing.T) {
	c := New(Options{RetryAfter: time.Second, RetryMax: 10 * time.Second})
	c.Lead(7, 1)
	c.LoadedAll(7, 1)
	c.Changed(7, 1, &regionpb.LeaseRecord{TTL: 60}, 0)
	var pauses []time.Duration
	now, failed := time.Minute, time.Minute
	for len(pauses) < 300 {
		if now > time.Minute+time.Hour {
			t.Fatalf("pauses %v, and then none that ends", pauses)
		}
		list := c.Tick(now, nil)
		if len(list) > 1 || len(list) == 1 && list[0].Alone != (len(pauses) > 0) {
			t.Fatalf("%v at %v", list, now)
		}
		for _, a := range list {
			pauses = append(pauses, now-failed)
			c.Ended(a, now)
			failed = now
		}
		now += time.Second
	}
	for i, want := range []time.Duration{0, 1, 2, 4, 8, 10, 10} {
		if pauses[i] != want*time.Second {
			t.Fatalf("pauses %v", pauses[:7])
		}
	}
	if last := pauses[len(pauses)-1]; last != 10*time.Second {
		t.Errorf("the last pause was %v", last)
	}
	// A new leader begins anew.
	c.Lead(7, 2)
	c.Loaded(7, 2, 1, &regionpb.LeaseRecord{TTL: 60}, now)
	if list := c.Tick(now+time.Hour, nil); len(list) != 1 || list[0].Alone {
		t.Errorf("after an election: %v", list)
	}
}

// TestGroupsLeaveNothing moves leases between groups in every state, ends them, and looks at what is left.
func TestGroupsLeaveNothing(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 2))
		c := New(Options{EndingMax: 3, RetryAfter: time.Second, RetryMax: 2 * time.Second})
		c.Lead(7, 1)
		c.LoadedAll(7, 1)
		record := func() *regionpb.LeaseRecord {
			rec := &regionpb.LeaseRecord{TTL: 5}
			if n := rng.IntN(3); n > 0 {
				rec.Spans = []mvcc.Span{mvcc.Key([]byte{'a' + byte(n)})}
			}
			return rec
		}
		var under []Action
		for id := range int64(60) {
			c.Changed(7, id, record(), 0)
		}
		now := 4 * time.Second
		for c.Len(7) > 0 {
			now += 100 * time.Millisecond
			if now > 10*time.Minute {
				t.Fatalf("seed %d: %d leases are left", seed, c.Len(7))
			}
			under = c.Tick(now, under)
			for id := range c.homes[7].leases {
				if rng.IntN(40) == 0 {
					c.Changed(7, id, record(), now)
				}
			}
			rng.Shuffle(len(under), func(i, j int) { under[i], under[j] = under[j], under[i] })
			for n := rng.IntN(4); n > 0 && len(under) > 0; n-- {
				if rng.IntN(3) == 0 {
					c.Ended(under[0], now)
				} else {
					c.Changed(7, under[0].ID, nil, now)
				}
				under = under[1:]
			}
		}
		for _, g := range c.homes[7].groups {
			if g.ending != 0 {
				t.Fatalf("seed %d: %d of no lease are being ended", seed, g.ending)
			}
		}
		if c.Tick(now, nil); len(c.homes[7].groups) != 0 || len(c.waiting) != 0 || len(c.homes[7].queue) != 0 {
			t.Fatalf("seed %d: left are groups %v, waiting %v", seed, c.homes[7].groups, c.waiting)
		}
	}
}

// TestTickIsShort: however many leases are due, one call looks at so many, and the next ones at the others.
func TestTickIsShort(t *testing.T) {
	const n = 5*tickMax + 1
	c := New(Options{EndingMax: n})
	c.Lead(7, 1)
	c.LoadedAll(7, 1)
	for id := range int64(n) {
		c.Changed(7, id, &regionpb.LeaseRecord{TTL: 60}, 0)
	}
	calls, total := 0, 0
	for total < n && calls < 100 {
		list := c.Tick(time.Minute, nil)
		if len(list) > tickMax {
			t.Fatalf("%d ends by one call", len(list))
		}
		calls, total = calls+1, total+len(list)
	}
	if calls != 6 || total != n {
		t.Errorf("%d ends by %d calls", total, calls)
	}
}

// TestHomesLeaveNothing lets terms of several regions come and go, with leases whose time is up, that wait,
// are being ended or recorded: what is due is looked at in order, and what a term leaves behind is in nobody's
// way.
func TestHomesLeaveNothing(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 3))
		c := New(Options{CheckpointEvery: 4 * time.Second, EndingMax: 2, RecordingMax: 3})
		var under []Action
		term := uint64(0)
		for now := time.Duration(0); now < 100*time.Second; now += 100 * time.Millisecond {
			region := pdpb.RegionID(1 + rng.IntN(4))
			switch rng.IntN(12) {
			case 0:
				term++
				c.Lead(region, term)
				c.LoadedAll(region, term)
			case 1:
				c.End(region)
			case 2, 3:
				if i := rng.IntN(len(under) + 1); i < len(under) {
					c.Ended(under[i], now)
					under = append(under[:i], under[i+1:]...)
				}
			case 4:
				if i := rng.IntN(len(under) + 1); i < len(under) && under[i].Kind == Expire && c.Stands(&under[i]) {
					c.Changed(under[i].Region, under[i].ID, nil, now)
				}
			default:
				c.Changed(region, rng.Int64N(200), &regionpb.LeaseRecord{Grant: 1, TTL: rng.Int64N(20)}, now)
			}
			under = c.Tick(now, under)
			queued, recording := 0, 0
			for id, h := range c.homes {
				recording += h.recording
				if (h.index >= 0) != (len(h.queue) > 0) || h.index >= 0 && c.next[h.index] != h {
					t.Fatalf("seed %d: region %d has place %d of %d, and %d leases", seed, id, h.index, len(c.next), len(h.queue))
				}
				if len(h.queue) > 0 {
					queued++
					due := h.queue[0].due
					if c.next[0].queue[0].due > due {
						t.Fatalf("seed %d: region %d comes first, and one of region %d is due before", seed, c.next[0].id, id)
					}
				}
			}
			if queued != len(c.next) || recording != c.recording || recording > c.o.RecordingMax {
				t.Fatalf("seed %d: %d regions of %d are waited for, %d leases of %d recorded", seed, len(c.next), queued, c.recording, recording)
			}
		}
		for region := range pdpb.RegionID(5) {
			c.End(region)
		}
		if len(c.next) != 0 || len(c.waiting) != 0 || c.recording != 0 || c.Total() != 0 {
			t.Fatalf("seed %d: left are %d regions, %d groups, %d recorded", seed, len(c.next), len(c.waiting), c.recording)
		}
	}
}
