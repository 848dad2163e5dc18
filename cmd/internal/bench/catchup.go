package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Names of what CatchUp reports.
const (
	CatchUpTime   = "time to catch up"
	CatchUpEvents = "events per second while catching up"
	putBefore     = "put before"
	putDuring     = "put meanwhile"
)

// Puts are measured before the watcher comes for three times the warm-up, and at least for
// catchUpBaseMin.
const catchUpBaseMin = 500 * time.Millisecond

// CatchUp measures a watcher that resumes behind revisions in the past while puts go on at the
// rate of the options: the time until it has everything that had happened when it came, and the
// puts' latencies before and meanwhile. First it writes that many revisions, one put each.
func CatchUp(ctx context.Context, target Target, load Load, opts Options, behind int64, observe Observer) (*Report, error) {
	if behind < 1 {
		return nil, errors.New("the watcher must be at least one revision behind")
	}
	if opts.Rate <= 0 {
		return nil, errors.New("puts go on while the watcher catches up: a rate is needed")
	}
	load.Mix, load.Watchers = []Share{{"put", 1}}, 0
	load.Defaults()
	write := opts
	write.Rate, write.WarmUp, write.Duration, write.Count = 0, 0, 0, behind
	write.Clients = max(write.Clients, 256)
	progress := observe.Progress
	if progress != nil {
		progress = func(p Progress) { p.Phase = "writing history"; observe.Progress(p) }
	}
	history, err := Run(ctx, target, load, write, Observer{Progress: progress})
	if err != nil {
		return nil, err
	}
	if history.Failed() > 0 || history.Interrupted {
		return nil, fmt.Errorf("the history could not be written: %d puts failed", history.Failed())
	}
	conns, err := target.dial(ctx, 1)
	if err != nil {
		return nil, err
	}
	defer closeAll(conns)

	steady := opts
	steady.Count, steady.Duration = 0, max(3*opts.WarmUp, catchUpBaseMin)
	before, err := Run(ctx, target, load, steady, Observer{Progress: observe.Progress})
	if err != nil {
		return nil, err
	}
	steady.WarmUp, steady.Duration = 0, opts.Duration
	runCtx, caughtUp := context.WithCancel(ctx)
	defer caughtUp()
	type result struct {
		took   time.Duration
		events int64
		err    error
	}
	watched := make(chan result, 1)
	during, err := Run(runCtx, target, load, steady, Observer{
		Progress: observe.Progress,
		Begin: func() error {
			if observe.Begin != nil {
				if err := observe.Begin(); err != nil {
					return err
				}
			}
			go func() {
				took, events, err := catchUp(runCtx, conns[0], &load, behind)
				watched <- result{took, events, err}
				caughtUp()
			}()
			return nil
		},
		End: observe.End,
	})
	if err != nil {
		return nil, err
	}
	caughtUp() // when the duration was over first
	res := <-watched
	if res.err != nil {
		if ctx.Err() == nil && errors.Is(res.err, context.Canceled) {
			return nil, fmt.Errorf("the watcher had %d events after %s and had not caught up", res.events, opts.Duration)
		}
		return nil, res.err
	}
	rep := during
	rep.Load = fmt.Sprintf("catch-up of %d revisions", behind)
	rep.Interrupted = ctx.Err() != nil
	b, d := before.Kind("put"), during.Kind("put")
	b.Kind, d.Kind = putBefore, putDuring
	rep.Kinds = []KindReport{b, d}
	rep.Figures = []Figure{
		{CatchUpTime, res.took.Seconds(), "s"},
		{CatchUpEvents, float64(res.events) / res.took.Seconds(), "/s"},
	}
	return rep, nil
}

// catchUp watches from behind revisions ago until it has all of them.
func catchUp(ctx context.Context, conn *clientv3.Client, l *Load, behind int64) (took time.Duration, events int64, err error) {
	resp, err := conn.Get(ctx, l.Keys.Key(0), clientv3.WithCountOnly())
	if err != nil {
		return 0, 0, err
	}
	head := resp.Header.Revision
	began := time.Now()
	ch := conn.Watch(ctx, l.Keys.Key(0), clientv3.WithRange(l.Keys.end(l.Keys.Space)), clientv3.WithRev(max(head-behind+1, 1)))
	for resp := range ch {
		if err := resp.Err(); err != nil {
			return 0, events, err
		}
		events += int64(len(resp.Events))
		if n := len(resp.Events); n > 0 && resp.Events[n-1].Kv.ModRevision >= head {
			return time.Since(began), events, nil
		}
	}
	return 0, events, context.Cause(ctx)
}
