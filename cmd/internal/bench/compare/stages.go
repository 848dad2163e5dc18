package compare

import (
	"context"
	"fmt"
	"slices"
	"time"

	"braid/cmd/internal/bench"
)

// Regions is how many regions the key space has where braid has many groups.
const Regions = 8

// stage is a part of a suite.
type stage struct {
	name  string
	about string
	// group names the clusters that it shares with its neighbours of the same group and space.
	group string
	space func(p params) int64 // keys of the key space, which regions divide evenly
	// once says that one round is all, because a round destroys or needs a fresh cluster.
	once bool
	// prepare, when not nil, runs once a cluster before the first round.
	prepare func(ctx context.Context, s *side) error
	measure func(ctx context.Context, s *side) ([]value, error)
}

// value is one number of a round.
type value struct {
	name     string
	unit     string
	value    float64
	higher   bool
	goal     float64
	absolute bool
	failed   int64
}

// params are what a suite is scaled by.
type params struct {
	nodes int
	scale float64
}

// secondsMin is the shortest time that is measured.
const secondsMin = 1.0

// seconds scales a time; it stays long enough to mean something.
func (p params) seconds(full float64) time.Duration {
	return time.Duration(max(full*p.scale, secondsMin) * float64(time.Second))
}

// count scales a number.
func (p params) count(full, least int64) int64 { return max(int64(float64(full)*p.scale), least) }

// goal picks the goal of three nodes or of one.
func (p params) goal(three, one float64) float64 {
	if p.nodes == 1 {
		return one
	}
	return three
}

// side is a system in a stage.
type side struct {
	*servers
	params
	space int64
	show  func(bench.Progress)
}

// result is a report with what the servers used meanwhile.
type result struct {
	*bench.Report
	cpu   time.Duration
	syncs float64
}

// load is a load over the stage's key space.
func (s *side) load(mix ...bench.Share) bench.Load {
	l := bench.Load{Mix: mix, Keys: bench.Keys{Space: s.space, Size: 16}, ValueSize: 256}
	l.RangeKeys = min(1000, s.space)
	l.Defaults()
	return l
}

func one(kind string) bench.Share { return bench.Share{Kind: kind, Weight: 1} }

// run measures a load at the servers.
func (s *side) run(ctx context.Context, l bench.Load, clients, conns int, duration time.Duration, change ...func(*bench.Options)) (*result, error) {
	o := bench.Options{Clients: clients, Connections: conns, WarmUp: min(duration/2, 2*time.Second), Duration: duration, Timeout: 30 * time.Second, Fill: true}
	for _, c := range change {
		c(&o)
	}
	return s.observe(ctx, func(ob bench.Observer) (*bench.Report, error) { return bench.Run(ctx, s.target(), l, o, ob) })
}

// observe runs something that measures and adds up what the servers used.
func (s *side) observe(ctx context.Context, measure func(bench.Observer) (*bench.Report, error)) (*result, error) {
	var before, after usage
	rep, err := measure(bench.Observer{Progress: s.show,
		Begin: func() (err error) { before, err = s.usage(ctx); return err },
		End:   func() (err error) { after, err = s.usage(ctx); return err }})
	if ctx.Err() != nil {
		return nil, ctx.Err() // half a round is no round
	}
	if err != nil {
		return nil, err
	}
	return &result{rep, after.cpu - before.cpu, after.syncs - before.syncs}, nil
}

// count is what was answered of all kinds but events.
func (r *result) count() (n int64) {
	for _, k := range r.Kinds {
		if k.Kind != "watch event" {
			n += k.Count
		}
	}
	return n
}

func (r *result) perSecond() float64 { return float64(r.count()) / r.Seconds }

// cpuPer1000 is the servers' CPU seconds per 1,000 of n.
func (r *result) cpuPer1000(n int64) float64 {
	if n == 0 {
		return 0
	}
	return r.cpu.Seconds() / float64(n) * 1000
}

func rate(r *bench.Options, perSecond float64) { r.Rate = perSecond }

// mainSpace is the key space of most stages.
func mainSpace(p params) int64 { return p.count(100_000, 20_000) }

// puts: a thousand clients.
func puts(ctx context.Context, s *side) ([]value, error) {
	r, err := s.run(ctx, s.load(one("put")), 1000, 100, s.seconds(8))
	if err != nil {
		return nil, err
	}
	n := float64(r.count())
	return []value{
		{name: "server CPU per 1,000 puts, 1,000 clients", unit: "s", value: r.cpuPer1000(r.count()), goal: s.goal(0.65, 0.6), failed: r.Failed()},
		{name: "puts, 1,000 clients", unit: "/s", value: r.perSecond(), higher: true, goal: 1.3},
		{name: "put p50, 1,000 clients", unit: "ms", value: r.Kind("put").Latency.P50},
		{name: "put p99, 1,000 clients", unit: "ms", value: r.Kind("put").Latency.P99, goal: 0.8},
		{name: "syncs per put and node, 1,000 clients", unit: "", value: r.syncs / n / float64(s.nodes)},
		{name: "syncs per second and node, 1,000 clients", unit: "/s", value: r.syncs / r.Seconds / float64(s.nodes)},
	}, nil
}

func gets(ctx context.Context, s *side) ([]value, error) {
	r, err := s.run(ctx, s.load(one("get")), 1000, 100, s.seconds(8))
	if err != nil {
		return nil, err
	}
	single, err := s.run(ctx, s.load(one("get")), 1, 1, s.seconds(3))
	if err != nil {
		return nil, err
	}
	stale, err := s.run(ctx, s.load(one("get-serializable")), 1000, 100, s.seconds(5))
	if err != nil {
		return nil, err
	}
	return []value{
		{name: "server CPU per 1,000 linearizable gets", unit: "s", value: r.cpuPer1000(r.count()), goal: 0.8, failed: r.Failed()},
		{name: "linearizable gets", unit: "/s", value: r.perSecond(), higher: true, goal: 1.1},
		{name: "linearizable get p99", unit: "ms", value: r.Kind("get").Latency.P99},
		{name: "linearizable get p50, one client", unit: "ms", value: single.Kind("get").Latency.P50, goal: s.goal(1.2, 1.1), failed: single.Failed()},
		{name: "serializable gets", unit: "/s", value: stale.perSecond(), higher: true, goal: 1.1, failed: stale.Failed()},
	}, nil
}

// casHot: 200 clients update 16 keys that lie in all regions.
func casHot(ctx context.Context, s *side) ([]value, error) {
	l := s.load(one("cas"))
	l.Keys.Space, l.Keys.Step, l.RangeKeys = 16, s.space/16, 1
	r, err := s.run(ctx, l, 200, 20, s.seconds(6))
	if err != nil {
		return nil, err
	}
	return []value{
		{name: "compare-and-put, 16 hot keys, 200 clients", unit: "/s", value: r.perSecond(), higher: true, goal: 1.2, failed: r.Failed()},
		{name: "of them successful", unit: "/s", value: r.Kind("cas").PerSecond, higher: true},
		{name: "compare-and-put p99", unit: "ms", value: r.Kind("cas").Latency.P99},
	}, nil
}

func ranges(ctx context.Context, s *side) ([]value, error) {
	l := s.load(one("range"))
	l.RangeKeys = min(10_000, s.space)
	r, err := s.run(ctx, l, 4, 4, s.seconds(6))
	if err != nil {
		return nil, err
	}
	l.Mix = []bench.Share{one("stream")}
	streamed, err := s.run(ctx, l, 4, 4, s.seconds(4))
	if err != nil {
		return nil, err
	}
	l.Mix, l.Page = []bench.Share{one("list")}, 500
	paged, err := s.run(ctx, l, 4, 4, s.seconds(4))
	if err != nil {
		return nil, err
	}
	return []value{
		{name: "ranges of 10,000 keys, 4 clients", unit: "/s", value: r.perSecond(), higher: true, goal: 1, failed: r.Failed()},
		{name: "the same as a stream", unit: "/s", value: streamed.perSecond(), higher: true, failed: streamed.Failed()},
		{name: "the same in pages of 500", unit: "/s", value: paged.perSecond(), higher: true, failed: paged.Failed()},
	}, nil
}

// kubernetes is the mix of an API server.
func kubernetes(ctx context.Context, s *side) ([]value, error) {
	l := s.load(bench.Share{Kind: "list", Weight: 2}, bench.Share{Kind: "get", Weight: 58}, bench.Share{Kind: "cas", Weight: 40})
	l.RangeKeys, l.Watchers, l.WatchParts = min(500, s.space), 200, 20
	r, err := s.run(ctx, l, 100, 10, s.seconds(8))
	if err != nil {
		return nil, err
	}
	return []value{
		{name: "Kubernetes mix, 200 watches", unit: "/s", value: r.perSecond(), higher: true, goal: 1.2, failed: r.Failed()},
		{name: "server CPU per 1,000 requests of the mix", unit: "s", value: r.cpuPer1000(r.count())},
	}, nil
}

func watches(ctx context.Context, s *side) ([]value, error) {
	fan := s.load(one("put"))
	fan.Watchers = 1000
	f, err := s.run(ctx, fan, 8, 20, s.seconds(8), func(o *bench.Options) { rate(o, 20) })
	if err != nil {
		return nil, err
	}
	l := s.load(one("put"))
	l.Watchers, l.WatchParts = 100, 100
	r, err := s.run(ctx, l, 100, 10, s.seconds(8), func(o *bench.Options) { rate(o, 1000) })
	if err != nil {
		return nil, err
	}
	events := f.Kind("watch event")
	return []value{
		{name: "server CPU per 1,000 events to 1,000 watchers", unit: "s", value: f.cpuPer1000(events.Count), goal: 0.7, failed: f.Failed()},
		{name: "events to 1,000 watchers", unit: "/s", value: events.PerSecond, higher: true},
		{name: "watch latency p50 at 1,000 puts/s", unit: "ms", value: r.Kind("watch event").Latency.P50},
		{name: "watch latency p99 at 1,000 puts/s", unit: "ms", value: r.Kind("watch event").Latency.P99, goal: s.goal(1.5, 1.2), failed: r.Failed()},
	}, nil
}

// txns compares a transaction over regions with a put at the same store.
func txns(ctx context.Context, s *side) ([]value, error) {
	p, err := s.run(ctx, s.load(one("put")), 1, 1, s.seconds(3))
	if err != nil {
		return nil, err
	}
	l := s.load(one("txn"))
	l.TxnKeys, l.TxnParts = 10, 5
	t, err := s.run(ctx, l, 1, 1, s.seconds(3))
	if err != nil {
		return nil, err
	}
	many, err := s.run(ctx, l, 100, 10, s.seconds(5))
	if err != nil {
		return nil, err
	}
	times := 0.0
	if p50 := p.Kind("put").Latency.P50; p50 > 0 {
		times = t.Kind("txn").Latency.P50 / p50
	}
	return []value{
		{name: "10 puts over 5 regions, p50 as a multiple of one put's", unit: "×", value: times, goal: 3, absolute: true, failed: t.Failed()},
		{name: "10 puts over 5 regions, p50, one client", unit: "ms", value: t.Kind("txn").Latency.P50},
		{name: "10 puts over 5 regions, 100 clients", unit: "/s", value: many.perSecond(), higher: true, failed: many.Failed()},
	}, nil
}

// counts: the whole key space, with its keys written once and then ten times.
func counts(versions string, goal float64) func(context.Context, *side) ([]value, error) {
	return func(ctx context.Context, s *side) ([]value, error) {
		l := s.load(one("count"))
		l.RangeKeys = s.space
		r, err := s.run(ctx, l, 1, 1, s.seconds(5))
		if err != nil {
			return nil, err
		}
		return []value{{name: fmt.Sprintf("counts of %d keys, %s", s.space, versions), unit: "/s", value: r.perSecond(), higher: true, goal: goal, failed: r.Failed()}}, nil
	}
}

// rewrite writes every key nine more times.
func rewrite(ctx context.Context, s *side) error {
	for range 9 {
		if err := bench.Fill(ctx, s.target(), s.load(one("put")), s.show); err != nil {
			return err
		}
	}
	return nil
}

func catchUp(ctx context.Context, s *side) ([]value, error) {
	behind := s.count(500_000, 5_000)
	o := bench.Options{Clients: 256, Connections: 16, Rate: 500, WarmUp: time.Second, Duration: 2 * time.Minute, Timeout: 30 * time.Second}
	r, err := s.observe(ctx, func(ob bench.Observer) (*bench.Report, error) {
		return bench.CatchUp(ctx, s.target(), s.load(one("put")), o, behind, ob)
	})
	if err != nil {
		return nil, err
	}
	rise := 0.0
	if before := r.Kind("put before").Latency.P99; before > 0 {
		rise = r.Kind("put meanwhile").Latency.P99 / before
	}
	return []value{
		{name: fmt.Sprintf("a watcher catches up with %d revisions", behind), unit: "s", value: r.Figure(bench.CatchUpTime), goal: 1, failed: r.Failed()},
		{name: "put p99 meanwhile, as a multiple of before", unit: "×", value: rise, goal: 1},
	}, nil
}

// diskBytes measures what the device writes, less what it writes when nothing is put.
func diskBytes(ctx context.Context, s *side) ([]value, error) {
	dev, err := deviceOf(s.dir)
	if err != nil {
		return nil, err
	}
	duration := s.seconds(10)
	quiet := func() (float64, error) { // bytes per second
		before, err := dev.written()
		if err != nil {
			return 0, err
		}
		select {
		case <-time.After(duration / 2):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
		after, err := dev.written()
		return float64(after-before) / (duration / 2).Seconds(), err
	}
	before, err := quiet()
	if err != nil {
		return nil, err
	}
	from, err := dev.written()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	l := s.load(one("put"))
	r, err := s.run(ctx, l, 256, 16, duration, func(o *bench.Options) { o.WarmUp = 0 })
	if err != nil {
		return nil, err
	}
	to, err := dev.written()
	if err != nil {
		return nil, err
	}
	took := time.Since(began)
	after, err := quiet()
	if err != nil {
		return nil, err
	}
	noise := (before + after) / 2
	put := float64(r.count()) * float64(l.Keys.Size+l.ValueSize)
	return []value{
		{name: "bytes written to the device per byte put", unit: "B", value: max(float64(to-from)-noise*took.Seconds(), 0) / put, goal: s.goal(0.7, 0.5), failed: r.Failed()},
		{name: "the device when nothing is put, per byte put in the same time", unit: "B", value: noise * took.Seconds() / put},
	}, nil
}

// memory loads many keys, kills all nodes and starts them again.
func memory(ctx context.Context, s *side) ([]value, error) {
	began := time.Now()
	if err := bench.Fill(ctx, s.target(), s.load(one("put")), s.show); err != nil {
		return nil, err
	}
	loaded := time.Since(began)
	u, err := s.usage(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.kill(); err != nil {
		return nil, err
	}
	took, err := s.restart(ctx)
	if err != nil {
		return nil, err
	}
	ready, err := s.usage(ctx)
	if err != nil {
		return nil, err
	}
	const mib = 1 << 20
	keys := fmt.Sprintf("%d keys: ", s.space)
	return []value{
		{name: keys + "loaded, 100 to a transaction", unit: "/s", value: float64(s.space) / loaded.Seconds(), higher: true},
		{name: keys + "resident memory of all nodes", unit: "MiB", value: float64(u.rss) / mib, goal: s.goal(0.5, 0.4)},
		{name: keys + "kill -9 to ready", unit: "s", value: took.Seconds(), goal: 0.2},
		{name: keys + "resident memory when ready", unit: "MiB", value: float64(ready.rss) / mib},
	}, nil
}

func fillSpace(ctx context.Context, s *side) error {
	return bench.Fill(ctx, s.target(), s.load(one("put")), s.show)
}

// Suites of loads.
var suites = map[string][]stage{
	"readme": {
		{name: "puts", about: "puts of 1,000 clients on 100 connections", group: "main", space: mainSpace, measure: puts},
		{name: "put-latency", about: "puts of one client, over all placements of client and leaders", group: "main", space: mainSpace, measure: placements},
		{name: "gets", about: "linearizable and serializable gets", group: "main", space: mainSpace, measure: gets},
		{name: "cas", about: "compare-and-put of hot keys", group: "main", space: mainSpace, measure: casHot},
		{name: "txn", about: "transactions over regions", group: "main", space: mainSpace, measure: txns},
		{name: "kubernetes", about: "lists, gets, compare-and-puts and watches", group: "main", space: mainSpace, measure: kubernetes},
		{name: "watch", about: "events to watchers", group: "main", space: mainSpace, measure: watches},
		{name: "range", about: "ranges of 10,000 keys", group: "range", space: mainSpace, prepare: fillSpace, measure: ranges},
		{name: "count", about: "the count of many keys, each written once", group: "count", space: func(p params) int64 { return p.count(1_000_000, 10_000) }, prepare: fillSpace, measure: counts("written once", 2)},
		{name: "count-versions", about: "the same, each written ten times", group: "count", space: func(p params) int64 { return p.count(1_000_000, 10_000) }, prepare: rewrite, measure: counts("written 10 times", 0)},
		{name: "catch-up", about: "a watcher far behind", group: "catch-up", space: mainSpace, once: true, measure: catchUp},
		{name: "disk", about: "bytes written to the device", group: "disk", space: mainSpace, measure: diskBytes},
		{name: "memory", about: "memory with many keys, and restart", group: "memory", space: func(p params) int64 { return p.count(2_000_000, 20_000) }, once: true, measure: memory},
	},
}

// Suites lists the names of the suites.
func Suites() []string {
	var names []string
	for n := range suites {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}
