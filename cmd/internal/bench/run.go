package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Options say how a load is sent.
type Options struct {
	Clients     int           // that send concurrently
	Connections int           // that they share
	Rate        float64       // requests per second of an open loop; 0: closed loop
	WarmUp      time.Duration // before the measured time
	Duration    time.Duration // of the measured time; 0: until Count
	Count       int64         // requests in the measured time; 0: no limit
	Timeout     time.Duration // of a request
	// Fill puts the keys that are missing in the key space before a load that reads.
	Fill bool
}

// Limits of the options.
const (
	clientsMax     = 100_000
	connectionsMax = 10_000
)

// Validate says what is wrong with the options.
func (o *Options) Validate() error {
	var errs []error
	if o.Clients < 1 || o.Clients > clientsMax {
		errs = append(errs, fmt.Errorf("there must be between 1 and %d clients, not %d", clientsMax, o.Clients))
	}
	if o.Connections < 1 || o.Connections > connectionsMax {
		errs = append(errs, fmt.Errorf("there must be between 1 and %d connections, not %d", connectionsMax, o.Connections))
	}
	if o.Rate < 0 || o.WarmUp < 0 || o.Duration < 0 || o.Count < 0 {
		errs = append(errs, errors.New("rate, warm-up, duration and count cannot be negative"))
	}
	if o.Duration == 0 && o.Count == 0 {
		errs = append(errs, errors.New("a duration or a count is needed"))
	}
	if o.Timeout <= 0 {
		errs = append(errs, errors.New("the timeout of a request must be above zero"))
	}
	return errors.Join(errs...)
}

// Progress is what a run has done so far.
type Progress struct {
	Phase     string        // filling, warming up, measuring
	Done      float64       // share of the phase, 0 to 1
	PerSecond float64       // of late
	P99       time.Duration // of late
	Failed    int64
}

// Observer is told about a run while it goes on, by the goroutine that called Run. Any of its
// functions may be nil.
type Observer struct {
	Progress func(Progress)
	// Begin is called when the measured time begins, End when it ends; an error ends the run.
	Begin, End func() error
}

// progressInterval is how often an observer is told.
const progressInterval = 200 * time.Millisecond

// Phases of a run.
const (
	PhaseFill    = "filling"
	PhaseWarmUp  = "warming up"
	PhaseMeasure = "measuring"
)

// run is one run of a load. Clients read what is set before they start, and the atomics.
type run struct {
	load    *Load
	opts    Options
	target  Target
	observe Observer
	pace    pace
	rec     *recorder
	wheel   wheel
	shares  []share
	event   int           // the recorder's kind of watch events
	base    time.Time     // all times of a run are since then
	begin   time.Duration // when the clients started

	// Times since base in nanoseconds; never is not reached.
	from, to atomic.Int64  // the measured time
	tickets  atomic.Int64  // requests of an open loop that were taken
	counted  atomic.Int64  // requests that began in the measured time
	stop     chan struct{} // closed when no further request is to be sent
}

// never is a time that no run reaches.
const never = int64(1) << 62

// share is a share of the mix with its kind and its places in the recorder.
type share struct {
	*kind
	first, second int
}

// Run sends a load and reports what it took. When ctx ends early the report covers what was
// measured until then; an error means that there is nothing to report.
func Run(ctx context.Context, target Target, load Load, opts Options, observe Observer) (*Report, error) {
	load.Defaults()
	opts.Connections = min(opts.Connections, max(opts.Clients, 1))
	if err := errors.Join(load.Validate(), opts.Validate()); err != nil {
		return nil, err
	}
	r := &run{load: &load, opts: opts, target: target, observe: observe, pace: pace{opts.Rate}, wheel: newWheel(load.Mix),
		base: time.Now(), stop: make(chan struct{})}
	r.from.Store(never)
	r.to.Store(never)
	var names []string
	reads := false
	for _, s := range load.Mix {
		k := kindOf(s.Kind)
		reads = reads || k.reads
		sh := share{kind: k, first: len(names)}
		names = append(names, k.name)
		if k.second != "" {
			sh.second = len(names)
			names = append(names, k.second)
		}
		r.shares = append(r.shares, sh)
	}
	if load.Watchers > 0 {
		r.event = len(names)
		names = append(names, eventKind)
	}
	r.rec = newRecorder(names)

	conns, err := target.dial(ctx, opts.Connections)
	if err != nil {
		return nil, err
	}
	defer closeAll(conns)
	if reads && opts.Fill {
		if err := fill(ctx, conns, &load, observe.Progress); err != nil {
			return nil, err
		}
	}
	return r.measure(ctx, conns)
}

// measure starts watchers and clients, lets them warm up, measures, and waits for all of them.
func (r *run) measure(ctx context.Context, conns []*clientv3.Client) (report *Report, err error) {
	began := time.Now()
	if r.load.Watchers > 0 {
		unwatch, err := r.watch(ctx, conns)
		if err != nil {
			return nil, err
		}
		defer unwatch()
	}
	clients, err := r.clients(ctx, conns)
	if err != nil {
		return nil, err
	}
	if r.opts.WarmUp == 0 { // the first request counts
		if err := r.beginMeasuring(); err != nil {
			return nil, err
		}
	}
	r.begin = time.Since(r.base)
	sent := make(chan struct{})
	var wg sync.WaitGroup
	for _, c := range clients {
		wg.Go(func() { r.send(ctx, c) })
	}
	go func() { wg.Wait(); close(sent) }()
	series, interrupted, err := r.watchClock(ctx, sent)
	close(r.stop)
	<-sent
	for _, c := range clients {
		for _, s := range r.shares {
			if s.end != nil {
				s.end(c)
			}
		}
	}
	if err != nil {
		return nil, err
	}
	return r.report(began, series, interrupted), nil
}

// beginMeasuring begins the measured time.
func (r *run) beginMeasuring() error {
	if r.observe.Begin != nil {
		if err := r.observe.Begin(); err != nil {
			return err
		}
	}
	r.from.Store(int64(time.Since(r.base)))
	return nil
}

// clients makes the senders and prepares them.
func (r *run) clients(ctx context.Context, conns []*clientv3.Client) ([]*client, error) {
	next := new(atomic.Int64)
	values := newValues(r.load.ValueSize)
	clients := make([]*client, r.opts.Clients)
	for i := range clients {
		conn := conns[i%len(conns)]
		c := &client{id: i, load: r.load, conn: conn, kv: clientv3.NewKV(conn), values: values,
			choose: r.load.Keys.Chooser(uint64(i), next), rng: rand.New(rand.NewPCG(uint64(i), 1)), seen: map[int64]int64{}}
		clients[i] = c
	}
	for _, s := range r.shares {
		if s.begin == nil {
			continue
		}
		errs := make([]error, len(clients))
		var wg sync.WaitGroup
		for i, c := range clients {
			wg.Go(func() {
				beginCtx, cancel := context.WithTimeout(ctx, r.opts.Timeout)
				defer cancel()
				errs[i] = s.begin(beginCtx, c)
			})
		}
		wg.Wait()
		for _, err := range errs {
			if err != nil {
				return nil, fmt.Errorf("preparing %s: %s", s.name, errorText(err))
			}
		}
	}
	return clients, nil
}

// watchClock leads the run through its phases and tells the observer, until the time is up, all
// requests were sent, or ctx ends.
func (r *run) watchClock(ctx context.Context, sent <-chan struct{}) (s *series, interrupted bool, err error) {
	s = &series{}
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	timer := time.NewTimer(r.opts.WarmUp)
	defer timer.Stop()
	phase, began := PhaseWarmUp, time.Now()
	measure := func() {
		phase, began = PhaseMeasure, r.base.Add(time.Duration(r.from.Load()))
		timer.Stop()
		if r.opts.Duration > 0 {
			timer.Reset(r.opts.Duration)
		}
	}
	if r.from.Load() != never {
		measure()
	}
	var last time.Duration // end of the series
	roll := func() {
		now := time.Since(began)
		if phase == PhaseMeasure && now > last {
			p := r.rec.roll(last, now)
			last = now
			r.tell(phase, began, p)
			s.add(p)
		} else {
			r.tell(phase, began, point{})
		}
	}
	end := func() error {
		if phase != PhaseMeasure {
			return nil
		}
		r.to.Store(int64(time.Since(r.base)))
		roll()
		if r.observe.End != nil {
			return r.observe.End()
		}
		return nil
	}
	for {
		select {
		case <-tick.C:
			roll()
		case <-timer.C:
			if phase == PhaseMeasure {
				return s, false, end()
			}
			if err := r.beginMeasuring(); err != nil {
				return s, false, err
			}
			measure()
		case <-sent: // by their number
			return s, false, end()
		case <-ctx.Done():
			return s, true, end()
		}
	}
}

// tell reports progress to the observer.
func (r *run) tell(phase string, began time.Time, p point) {
	if r.observe.Progress == nil {
		return
	}
	pr := Progress{Phase: phase, Failed: p.failed}
	limit := r.opts.WarmUp
	if phase == PhaseMeasure {
		limit = r.opts.Duration
	}
	if limit > 0 {
		pr.Done = float64(time.Since(began)) / float64(limit)
	}
	if r.opts.Count > 0 && phase == PhaseMeasure {
		pr.Done = max(pr.Done, float64(r.counted.Load())/float64(r.opts.Count))
	}
	pr.Done = min(pr.Done, 1)
	if p.latency != nil && p.to > p.from {
		pr.PerSecond = float64(p.latency.TotalCount()) / (p.to - p.from).Seconds()
		pr.P99 = time.Duration(p.latency.ValueAtQuantile(99))
	}
	r.observe.Progress(pr)
}

// A client whose request failed waits before the next one, longer each time, so that a store that
// refuses at once is not flooded.
const (
	pauseMin = 5 * time.Millisecond
	pauseMax = time.Second
)

// send is the life of a client.
func (r *run) send(ctx context.Context, c *client) {
	timer := time.NewTimer(0)
	<-timer.C
	defer timer.Stop()
	wait := func(d time.Duration) bool {
		if d <= 0 {
			return true
		}
		timer.Reset(d)
		select {
		case <-timer.C:
			return true
		case <-r.stop:
		case <-ctx.Done():
		}
		return false
	}
	pause := time.Duration(0)
	for {
		select {
		case <-r.stop:
			return
		case <-ctx.Done():
			return
		default:
		}
		began := time.Since(r.base)
		if r.pace.open() {
			began = r.begin + r.pace.due(r.tickets.Add(1)-1)
			if !wait(began - time.Since(r.base)) {
				r.tickets.Add(-1)
				return
			}
		}
		if int64(began) >= r.from.Load() {
			if n := r.counted.Add(1); r.opts.Count > 0 && n > r.opts.Count {
				r.counted.Add(-1)
				return
			}
		}
		s := &r.shares[r.wheel.at(c.rng.IntN(r.wheel.total()))]
		c.stamp = int64(began)
		if r.one(ctx, c, s, began) {
			pause = 0
			continue
		}
		pause = min(max(2*pause, pauseMin), pauseMax)
		if !wait(pause) {
			return
		}
	}
}

// one sends a request and records what became of it; false when it failed.
func (r *run) one(ctx context.Context, c *client, s *share, began time.Duration) bool {
	reqCtx, cancel := context.WithTimeout(ctx, r.opts.Timeout)
	second, err := s.send(reqCtx, c)
	cancel()
	now := time.Since(r.base)
	if err != nil && ctx.Err() != nil {
		return true // the run was interrupted, and it with it
	}
	o := outcome{kind: s.first, latency: now - began, timed: int64(began) >= r.from.Load(), ended: r.inside(now)}
	if r.opts.Count > 0 {
		o.ended = o.ended && o.timed // what was under way when the measured time began is not of the number
	}
	if second {
		o.kind = s.second
	}
	if err != nil {
		o.err = errorText(err)
	}
	r.rec.add(c.id, o)
	return err == nil
}

// inside says whether a time is in the measured time.
func (r *run) inside(at time.Duration) bool {
	return int64(at) >= r.from.Load() && int64(at) <= r.to.Load()
}

// report sums the run up.
func (r *run) report(began time.Time, s *series, interrupted bool) *Report {
	rep := &Report{Load: r.load.Name, Endpoints: r.target.Endpoints, Began: began, Clients: r.opts.Clients,
		Connections: r.opts.Connections, Rate: r.opts.Rate, Interrupted: interrupted, Series: s.report()}
	if from := r.from.Load(); from != never {
		rep.Seconds = time.Duration(r.to.Load() - from).Seconds()
	}
	kinds, errs := r.rec.totals()
	for i, k := range kinds {
		rep.Kinds = append(rep.Kinds, summary(r.rec.kinds[i], k, rep.Seconds))
	}
	rep.Errors = errs
	if r.pace.open() && !interrupted && r.opts.Count == 0 {
		rep.Unsent = max(r.pace.scheduled(time.Duration(r.to.Load())-r.begin)-r.tickets.Load(), 0)
	}
	return rep
}
