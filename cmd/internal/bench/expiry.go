package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
// the names of the keys and the time to live, the options the clients that grant, their connections
// and the timeout.
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
	var wg sync.WaitGroup
	defer wg.Wait()
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
	// Leases may end while others are granted, so the watcher's answers get their time as they come.
	ends := make(chan keyEnd, leases)
	watched := make(chan error, 1)
	wg.Go(func() { watched <- receiveEnds(watchCtx, events, ends) })
	due := make([]time.Time, leases) // by key number; written before the key is put
	if err := grantAll(ctx, conns, &load, opts, due, observe.Progress); err != nil {
		return nil, err
	}
	allGranted := time.Now()
	granted := allGranted.Sub(began)
	r := newRecorder([]string{expiryKind})
	numbers := make(map[string]int64, leases)
	for n := range leases {
		numbers[k.Key(n)] = n
	}
	grace := time.NewTimer(time.Duration(load.LeaseTTL)*time.Second + expiryGrace)
	defer grace.Stop()
	var gone int64
	var first, last, end time.Time
	var s series
	interrupted := false
wait:
	for gone < leases {
		select {
		case err := <-watched:
			if ctx.Err() != nil {
				interrupted = true
				break wait
			}
			return nil, fmt.Errorf("the watcher ended: %w", err)
		case e := <-ends:
			if gone == 0 {
				first, last = e.at, e.at
			}
			gone, end = gone+1, e.at
			r.add(0, outcome{latency: max(e.at.Sub(due[numbers[e.key]]), 0), timed: true, ended: true})
			if e.at.Sub(last) > progressInterval {
				s.add(r.roll(last.Sub(first), e.at.Sub(first)))
				last = e.at
			}
			if observe.Progress != nil && gone%64 == 0 {
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
		if gone < leases {
			end = time.Now()
		}
		rep.Seconds = end.Sub(first).Seconds()
		s.add(r.roll(last.Sub(first), end.Sub(first)))
	}
	if slices.MinFunc(due, time.Time.Compare).Before(allGranted) {
		rep.Warnings = append(rep.Warnings, fmt.Sprintf("granting took %s, and leases were due before it was over, so they did not end together; see --ttl",
			granted.Round(time.Millisecond)))
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

// keyEnd is when the watcher learned that a key is gone.
type keyEnd struct {
	key string
	at  time.Time
}

// receiveEnds notes when keys end, until the watch does. The channel has room for all of them.
func receiveEnds(ctx context.Context, events clientv3.WatchChan, ends chan<- keyEnd) error {
	for resp := range events {
		if err := resp.Err(); err != nil {
			return err
		}
		now := time.Now()
		for _, e := range resp.Events {
			if e.Type != clientv3.EventTypeDelete {
				continue
			}
			select {
			case ends <- keyEnd{string(e.Kv.Key), now}:
			case <-ctx.Done(): // somebody else deletes the keys too
				return ctx.Err()
			}
		}
	}
	return errors.New("no more answers come")
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
