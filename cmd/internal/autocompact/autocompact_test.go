package autocompact

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	for in, want := range map[[2]string]string{
		{"periodic", "0"}: "{periodic 0s 0}", {"periodic", ""}: "{periodic 0s 0}", {"periodic", "1"}: "{periodic 1h0m0s 0}",
		{"periodic", "30m"}: "{periodic 30m0s 0}", {"revision", "1000"}: "{revision 0s 1000}", {"revision", "0"}: "{revision 0s 0}",
		{"revision", "1us"}: "{revision 0s 1000}",
		{"periodic", "-1"}:  "error", {"periodic", "x"}: "error", {"", "1"}: "error", {"often", "1"}: "error", {"periodic", "-5s"}: "error",
	} {
		p, err := Parse(in[0], in[1])
		got := fmt.Sprint(p)
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("%v: %s (%v), want %s", in, got, err, want)
		}
	}
}

// run lets a store get one revision a second, and prints when it is compacted and at what.
func run(t *testing.T, mode, retention string, until time.Duration, acts func(now time.Duration) bool, fails func(now time.Duration) bool) string {
	t.Helper()
	p, err := Parse(mode, retention)
	if err != nil || !p.Enabled() {
		t.Fatal(p, err)
	}
	c := New(p)
	var out []string
	step := min(p.Every(), time.Second)
	for now := time.Duration(0); now <= until; now += step {
		if at := c.Tick(now, int64(now/time.Second), acts(now)); at > 0 {
			if fails(now) {
				out = append(out, fmt.Sprintf("%v: fails", now))
				continue
			}
			c.Done(at, now)
			out = append(out, fmt.Sprintf("%v: %d", now, at))
		}
	}
	return strings.Join(out, ", ")
}

// TestTimes follows etcd's description of its compactor.
func TestTimes(t *testing.T) {
	always := func(time.Duration) bool { return true }
	never := func(time.Duration) bool { return false }
	for _, c := range []struct {
		mode, retention string
		until           time.Duration
		acts, fails     func(time.Duration) bool
		want            string
	}{
		// Nothing for the first period; then the revision of a period ago, which at the first two looks
		// after it is still 0.
		{"periodic", "10s", 35 * time.Second, always, never, "12s: 1, 22s: 11, 32s: 21"},
		{"periodic", "24h", 27 * time.Hour, always, never, "24h12m0s: 360, 25h12m0s: 3960, 26h12m0s: 7560"},
		// What fails is tried again after a tenth.
		{"periodic", "10s", 15 * time.Second, always, func(now time.Duration) bool { return now < 13*time.Second }, "12s: fails, 13s: 2"},
		// A node that begins to act has remembered revisions meanwhile.
		{"periodic", "10s", 26 * time.Second, func(now time.Duration) bool { return now > 24*time.Second }, never, "25s: 14"},
		{"revision", "100", 11 * time.Minute, always, never, "5m0s: 200, 10m0s: 500"},
		{"revision", "1000", 11 * time.Minute, always, never, ""},
	} {
		if got := run(t, c.mode, c.retention, c.until, c.acts, c.fails); got != c.want {
			t.Errorf("%s %s: %s, want %s", c.mode, c.retention, got, c.want)
		}
	}
}
