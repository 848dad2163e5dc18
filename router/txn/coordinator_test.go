package txn

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"braid/mvcc"
	"braid/region/regionpb"
)

var kinds = [...]string{"?", "lock", "evaluate", "prepare", "release", "ask", "done"}

// play runs a coordinator of two participants on a script of events and prints what it wants after
// each, and how it ended.
func play(t *testing.T, eager bool, script string) string {
	t.Helper()
	c := New(2, eager)
	var out []string
	note := func(todo []Action) {
		s := ""
		for _, a := range todo {
			s += " " + kinds[a.Kind]
			if a.Kind == Lock || a.Kind == Prepare || a.Kind == Release {
				s += fmt.Sprint(a.Part)
			}
		}
		out = append(out, strings.TrimSpace(s))
	}
	note(c.Start())
	for _, word := range strings.Fields(script) {
		name, arg, _ := strings.Cut(word, "=")
		var err error
		rev := mvcc.Revision(0)
		switch arg {
		case "":
		case "9":
			rev = 9
		case "lost":
			err = errors.New("connection reset")
		case "notsent":
			err = fmt.Errorf("full: %w", ErrNotSent)
		default:
			err = regionpb.ErrorOf(map[string]regionpb.Code{"locklost": regionpb.LockLost, "aborted": regionpb.Aborted, "unknown": regionpb.Unknown,
				"many": regionpb.TooManyRequests, "compacted": regionpb.Compacted, "void": regionpb.VoidByFence, "epoch": regionpb.EpochMismatch,
				"busy": regionpb.LockBusy, "large": regionpb.TooLarge}[arg])
		}
		switch part := int(name[len(name)-1] - '0'); strings.TrimRight(name, "01") {
		case "locked":
			note(c.Locked(part, regionpb.LockID{Term: 1, Seq: 1}, err))
		case "writes":
			note(c.Evaluated([]bool{false, true}, err))
		case "nothing":
			note(c.Evaluated([]bool{false, false}, err))
		case "prepared":
			note(c.Prepared(part, rev, err))
		case "asked":
			note(c.Asked(rev, err))
		case "timeout":
			note(c.GiveUp(errors.New("late")))
		default:
			t.Fatalf("event %q", word)
		}
	}
	end := c.Result().Outcome.String()
	if c.Result().Outcome == Committed {
		end += fmt.Sprint(" ", c.Result().Rev)
	}
	return strings.Join(append(out, end), " | ")
}

func TestCoordinator(t *testing.T) {
	const locked = "lock0 | lock1 | evaluate | "
	const both = locked + "prepare0 prepare1 | "
	for _, x := range []struct{ script, want string }{
		{"locked0 locked1 writes prepared1=9 prepared0=9", both + "done |  | committed 9"},
		{"locked0 locked1 nothing", locked + "release0 release1 done | nothing"},
		{"locked0 locked1 nothing=compacted", locked + "release0 release1 done | failed"},
		// A lock that is refused ends the attempt; whether it was given all the same is not known.
		{"locked0 locked1=epoch", "lock0 | lock1 | release0 release1 done | retry"},
		{"locked0=lost", "lock0 | release0 done | retry"},
		{"locked0 locked1=many", "lock0 | lock1 | release0 release1 done | failed"},
		// One participant that is certainly not prepared is enough, whatever pd says or does not say.
		{"locked0 locked1 writes prepared0=locklost asked=aborted", both + "ask | done | retry"},
		{"locked0 locked1 writes prepared0=void asked=unknown", both + "ask | done | retry"},
		{"locked0 locked1 writes prepared1=notsent asked=lost prepared0=aborted", both + "ask | done |  | retry"},
		{"locked0 locked1 writes prepared0=aborted", both + "done | retry"},
		{"locked0 locked1 writes prepared0=many asked=aborted", both + "ask | done | failed"},
		// What would be the same again is the answer, whatever else comes before pd's.
		{"locked0 locked1 writes prepared0=large prepared1=aborted asked=aborted", both + "ask | done |  | failed"},
		{"locked0 locked1 writes prepared0=large prepared1=lost asked=aborted", both + "ask |  | done | failed"},
		{"locked0 locked1 writes prepared0=large prepared1=locklost asked=aborted", both + "ask |  | done | failed"},
		{"locked0 locked1 writes prepared0=locklost prepared1=large asked=aborted", both + "ask |  | done | failed"},
		{"locked0 locked1 writes prepared0=lost prepared1=large asked=aborted", both + " | ask | done | failed"},
		// An answer that is lost leaves it to the others to tell, and then to pd.
		{"locked0 locked1 writes prepared0=lost prepared1=9", both + " | done | committed 9"},
		{"locked0 locked1 writes prepared0=lost prepared1=unknown asked=9", both + " | ask | done | committed 9"},
		{"locked0 locked1 writes prepared0=lost prepared1=unknown asked=aborted", both + " | ask | done | retry"},
		{"locked0 locked1 writes prepared0=lost prepared1=unknown asked=unknown", both + " | ask | done | unknown"},
		// Time is up: before the prepares nothing can happen any more, after them everything can.
		{"locked0 timeout", "lock0 | lock1 | release0 release1 done | failed"},
		{"locked0 locked1 writes timeout prepared0=9", both + "done |  | unknown"},
	} {
		if got := play(t, false, x.script); got != x.want {
			t.Errorf("%s:\n got %s\nwant %s", x.script, got, x.want)
		}
	}
}

// TestEagerCoordinator: all locks are asked for at once, and an attempt that does not get them all
// ends when it knows of each.
func TestEagerCoordinator(t *testing.T) {
	for _, x := range []struct{ script, want string }{
		{"locked1 locked0 writes prepared1=9", "lock0 lock1 |  | evaluate | prepare0 prepare1 | done | committed 9"},
		{"locked0=busy locked1", "lock0 lock1 |  | release0 release1 done | retry"},
		{"locked0 locked1=lost", "lock0 lock1 |  | release0 release1 done | retry"},
		{"locked0=many locked1=busy", "lock0 lock1 |  | release0 release1 done | failed"},
		{"locked0=busy locked1=many", "lock0 lock1 |  | release0 release1 done | failed"},
		{"locked0=busy timeout locked1", "lock0 lock1 |  | release0 release1 done |  | failed"},
	} {
		if got := play(t, true, x.script); got != x.want {
			t.Errorf("%s:\n got %s\nwant %s", x.script, got, x.want)
		}
	}
}
