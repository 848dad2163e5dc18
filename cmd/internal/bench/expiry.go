package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// expiryKind is the name under which an expiry storm reports how late keys of leases vanish.
const expiryKind = "expiry"

// expiryGrace is how long a store may take for all leases of a storm after the last is due.
const expiryGrace = 2 * time.Minute

// Expiry grants leases, puts a key with each, lets all of them expire, and measures from when a
// lease was due, by its grant's answer, until a watcher learns that its key is gone. The load says
// the keys, their values and the time to live.
func Expiry(ctx context.Context, target Target, load Load, opts Options, leases int64, observe Observer) (*Report, error) {
	load.Name, load.Mix = fmt.Sprintf("expiry of %d leases", leases), []Share{{"put", 1}}
	load.Keys.Space = leases
	load.Defaults()
	if leases < 1 {
		return nil, errors.New("at least one lease is needed")
	}
	if err := load.Keys.Validate(); err != nil {
		return nil, err
	}
	conns, err := target.dial(ctx, min(opts.Connections, opts.Clients))
	if err != nil {
		return nil, err
	}
	defer closeAll(conns)
	began := time.Now()
	watchCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	k := &load.Keys
	events := conns[0].Watch(watchCtx, k.Key(0), clientv3.WithRange(k.end(leases)), clientv3.WithCreatedNotify())
	select {
	case resp, ok := <-events:
		if err := resp.Err(); !ok || err != nil {
			return nil, fmt.Errorf("the watcher cannot be made: %w", err)
		}
	case <-time.After(opts.Timeout):
		return nil, errors.New("the watcher was not made in time")
	}
	due := make([]time.Time, leases) // by key number; written before the key is put
	if err := grantAll(ctx, conns, &load, opts, due, observe.Progress); err != nil {
		return nil, err
	}
	granted := time.Since(began)
	r := newRecorder([]string{expiryKind})
	numbers := make(map[string]int64, leases)
	for n := range leases {
		numbers[k.Key(n)] = n
	}
	grace := time.NewTimer(time.Duration(load.LeaseTTL)*time.Second + expiryGrace)
	defer grace.Stop()
	var gone int64
	var first, last time.Time
	var s series
	interrupted := false
wait:
	for gone < leases {
		select {
		case resp, ok := <-events:
			if err := resp.Err(); err != nil || !ok {
				if ctx.Err() != nil {
					interrupted = true
					break wait
				}
				return nil, fmt.Errorf("the watcher ended: %w", err)
			}
			now := time.Now()
			for _, e := range resp.Events {
				if e.Type != clientv3.EventTypeDelete {
					continue
				}
				if gone == 0 {
					first, last = now, now
				}
				gone++
				r.add(0, outcome{latency: max(now.Sub(due[numbers[string(e.Kv.Key)]]), 0), timed: true, ended: true})
			}
			if !first.IsZero() && now.Sub(last) > progressInterval {
				s.add(r.roll(last.Sub(first), now.Sub(first)))
				last = now
			}
			if observe.Progress != nil {
				observe.Progress(Progress{Phase: "waiting for expiry", Done: float64(gone) / float64(leases)})
			}
		case <-grace.C:
			break wait
		case <-ctx.Done():
			interrupted = true
			break wait
		}
	}
	rep := &Report{Load: load.Name, Endpoints: target.Endpoints, Began: began, Clients: opts.Clients, Connections: len(conns), Interrupted: interrupted}
	if !first.IsZero() {
		rep.Seconds = time.Since(first).Seconds()
		s.add(r.roll(last.Sub(first), time.Since(first)))
	}
	rep.Series = s.report()
	kinds, errs := r.totals()
	if left := leases - gone; left > 0 && !interrupted {
		errs[fmt.Sprintf("leases that had not expired %s after they were due", expiryGrace)] = left
	}
	rep.Errors = errs
	rep.Kinds = []KindReport{summary(expiryKind, kinds[0], rep.Seconds)}
	rep.Figures = []Figure{{"grants and puts", float64(leases) / granted.Seconds(), "/s"}}
	return rep, nil
}

// grantAll grants a lease for each key and puts the key with it.
func grantAll(ctx context.Context, conns []*clientv3.Client, l *Load, opts Options, due []time.Time, progress func(Progress)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var wg sync.WaitGroup
	var mu sync.Mutex
	for i := range opts.Clients {
		conn := conns[i%len(conns)]
		wg.Go(func() {
			for ctx.Err() == nil {
				n := next.Add(1) - 1
				if n >= int64(len(due)) {
					return
				}
				lease, err := conn.Grant(ctx, l.LeaseTTL)
				if err == nil {
					due[n] = time.Now().Add(time.Duration(lease.TTL) * time.Second)
					_, err = conn.Put(ctx, l.Keys.Key(n), "", clientv3.WithLease(lease.ID))
				}
				if err != nil {
					cancel(fmt.Errorf("granting leases: %w", err))
					return
				}
				if progress != nil && n%64 == 0 {
					mu.Lock()
					progress(Progress{Phase: "granting", Done: float64(n) / float64(len(due))})
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}
