package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestPace(t *testing.T) {
	p := pace{rate: 1000}
	for n, want := range map[int64]time.Duration{0: 0, 1: time.Millisecond, 1000: time.Second, 3_600_000: time.Hour} {
		if got := p.due(n); got != want {
			t.Errorf("request %d is due at %s, want %s", n, got, want)
		}
	}
	for _, rate := range []float64{0.5, 3, 7, 1000, 12345.6} {
		p := pace{rate: rate}
		for _, at := range []time.Duration{0, 1, time.Millisecond, time.Second, time.Minute} {
			n := p.scheduled(at)
			if n > 0 && p.due(n-1) >= at || p.due(n) < at {
				t.Errorf("rate %g: %d requests before %s; the last is due at %s, the next at %s", rate, n, at, p.due(n-1), p.due(n))
			}
		}
	}
	if (pace{}).open() {
		t.Error("a loop without a rate is closed")
	}
}

func TestMix(t *testing.T) {
	mix, err := ParseMix("put=1,get=9")
	if err != nil || formatMix(mix) != "put=1,get=9" {
		t.Fatal(mix, err)
	}
	w := newWheel(mix)
	counts := make([]int, 2)
	for n := range w.total() {
		counts[w.at(n)]++
	}
	if counts[0] != 1 || counts[1] != 9 {
		t.Errorf("shares %d", counts)
	}
	for _, s := range []string{"", "put", "put=0", "put=x", "put=1,put=2", "put=1,"} {
		if mix, err := ParseMix(s); err == nil {
			t.Errorf("%q gives %v", s, mix)
		}
	}
}

func TestLoadValidate(t *testing.T) {
	good := Load{Mix: []Share{{"put", 1}}}
	good.Defaults()
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*Load){
		"no request":      func(l *Load) { l.Mix = []Share{{"pat", 1}} },
		"nothing":         func(l *Load) { l.Mix = nil },
		"too short":       func(l *Load) { l.Keys.Size = 2 },
		"size of a value": func(l *Load) { l.ValueSize = -1 },
		"of a range":      func(l *Load) { l.RangeKeys = l.Keys.Space + 1 },
		"carry the time":  func(l *Load) { l.Watchers, l.ValueSize = 1, 4 },
		"parts of a tran": func(l *Load) { l.TxnParts = l.TxnKeys + 1 },
	} {
		bad := good
		change(&bad)
		if err := bad.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestTxnNumbersAreDistinctAndSpread(t *testing.T) {
	l := Load{Keys: Keys{Size: 8, Space: 1000}, TxnKeys: 10, TxnParts: 5}
	for _, drawn := range []int64{0, 199, 200, 999} {
		seen, parts := map[int64]bool{}, map[int64]int{}
		for _, n := range txnNumbers(drawn, &l) {
			if n < 0 || n >= 1000 || seen[n] {
				t.Fatalf("drawn %d: key %d", drawn, n)
			}
			seen[n] = true
			parts[n/200]++
		}
		if len(parts) != 5 || parts[0] != 2 {
			t.Errorf("drawn %d: %v", drawn, parts)
		}
	}
}

func TestRecorderAndSummary(t *testing.T) {
	r := newRecorder([]string{"put", "get"})
	for i := range 1000 {
		r.add(i, outcome{kind: 0, latency: time.Duration(i+1) * time.Millisecond, timed: true, ended: true})
	}
	r.add(3, outcome{kind: 0, latency: time.Hour, ended: true})              // began while warming up: counts, is not timed
	r.add(3, outcome{kind: 1, latency: 5 * time.Millisecond, timed: true})   // ended after the end
	r.add(3, outcome{kind: 1, latency: 5 * time.Millisecond})                // neither
	r.add(3, outcome{kind: 1, err: "Unavailable", timed: true, ended: true}) // failed
	p := r.roll(0, time.Second)
	if p.failed != 1 || p.latency.TotalCount() != 1001 {
		t.Errorf("window: %d failed, %d timed", p.failed, p.latency.TotalCount())
	}
	if again := r.roll(time.Second, 2*time.Second); again.failed != 0 || again.latency.TotalCount() != 0 {
		t.Error("a roll does not begin anew")
	}
	kinds, errs := r.totals()
	if errs["Unavailable"] != 1 || len(errs) != 1 {
		t.Error(errs)
	}
	put := summary("put", kinds[0], 2)
	if put.Count != 1001 || put.PerSecond != 500.5 {
		t.Errorf("%d puts, %g per second", put.Count, put.PerSecond)
	}
	near := func(what string, got, want float64) {
		if got < want*0.99 || got > want*1.01 {
			t.Errorf("%s is %g, want about %g", what, got, want)
		}
	}
	near("p50", put.Latency.P50, 500)
	near("p99", put.Latency.P99, 990)
	near("max", put.Latency.Max, 1000)
	if get := summary("get", kinds[1], 2); get.Count != 0 || get.Latency.P50 == 0 {
		t.Errorf("get: %+v", get)
	}
}

func TestErrorKindsAreBounded(t *testing.T) {
	r := newRecorder([]string{"put"})
	for i := range 10 * errorKindsMax {
		r.add(0, outcome{err: fmt.Sprint("error ", i), timed: true})
	}
	_, errs := r.totals()
	sum := int64(0)
	for _, n := range errs {
		sum += n
	}
	if len(errs) > errorKindsMax+1 || sum != 10*errorKindsMax || errs[otherErrors] == 0 {
		t.Errorf("%d texts, %d errors", len(errs), sum)
	}
}

func TestSeriesIsBoundedAndLosesNothing(t *testing.T) {
	var s series
	const n = 10*seriesMax + 7
	for i := range n {
		p := point{from: time.Duration(i) * time.Second, to: time.Duration(i+1) * time.Second, latency: newHistogram(2), failed: 1}
		record(p.latency, time.Millisecond)
		s.add(p)
	}
	if len(s.points) > seriesMax {
		t.Fatalf("%d points", len(s.points))
	}
	var count, failed int64
	last := time.Duration(0)
	for _, p := range s.points {
		if p.from != last {
			t.Errorf("a point begins at %s, the last ended at %s", p.from, last)
		}
		last = p.to
		count, failed = count+p.latency.TotalCount(), failed+p.failed
	}
	if count != n || failed != n || last != n*time.Second {
		t.Errorf("%d requests, %d failed, until %s", count, failed, last)
	}
	for _, p := range s.report() {
		if p.PerSecond != 1 {
			t.Errorf("%g per second", p.PerSecond)
		}
	}
}

func TestErrorText(t *testing.T) {
	for want, err := range map[string]error{
		"timeout of the client":              fmt.Errorf("x: %w", context.DeadlineExceeded),
		"ResourceExhausted: etcdserver: too": rpctypes.Error(rpctypes.ErrGRPCRequestTooManyRequests),
		"Unavailable: closing":               status.Error(codes.Unavailable, "closing {127.0.0.1:1234}"),
		"boom":                               errors.New("boom"),
		"connection refused":                 status.Error(codes.Unavailable, `connection error: desc = "transport: Error while dialing: dial tcp 127.0.0.1:1234: connect: connection refused"`),
		"missing port in address":            status.Error(codes.Unavailable, `last connection error: connection error: desc = "transport: Error while dialing: dial tcp: address x: missing port in address"`),
		"authentication handshake failed: x": status.Error(codes.Unavailable, `connection error: desc = "transport: authentication handshake failed: x"`),
	} {
		if got := errorText(err); !strings.HasPrefix(got, want) || strings.Contains(got, "1234") {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestFormat(t *testing.T) {
	for v, want := range map[float64]string{0: "-", 0.05: "50µs", 1.234: "1.23ms", 12.34: "12.3ms", 123.4: "123ms", 1234: "1.23s"} {
		if got := formatMS(v); got != want {
			t.Errorf("%g: %s, want %s", v, got, want)
		}
	}
	for v, want := range map[float64]string{0: "0", 0.0123: "0.0123", 1.234: "1.234", 12.34: "12.3", -1234: "-1234"} {
		if got := FormatNumber(v); got != want {
			t.Errorf("%g: %s, want %s", v, got, want)
		}
	}
}
