package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/tests/v3/robustness/client"
	"go.etcd.io/etcd/tests/v3/robustness/identity"
	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
	"go.etcd.io/etcd/tests/v3/robustness/traffic"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"braid/cmd/tests/control"
	"braid/cmd/tests/proc"
)

const (
	beforeFault = 2 * time.Second
	afterFault  = time.Second
	quiet       = 1500 * time.Millisecond
	windowsMax  = 4 // of beforeFault, to get up to speed
	keyCount    = 10
	finalKey    = "tombstone" // as in the suite
)

// drive runs the profile's traffic through the fault and returns what clients and watchers saw. It
// does what the suite's runScenario and SimulateTraffic do; those are tied to its own way of
// starting processes.
func (r *round) drive(ctx context.Context) ([]report.ClientReport, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	before, err := r.mover.Find(ctx)
	if err != nil {
		return nil, err
	}
	base, ids := time.Now(), identity.NewIDProvider()
	clients, watchers := client.NewSet(ids, base), client.NewSet(ids, base)
	defer clients.Close()
	defer watchers.Close()
	endpoints := r.cluster.Endpoints()

	// Watchers of everything, one at each node, until they have seen the last revision.
	last := make(chan int64, 1)
	var group errgroup.Group
	group.Go(func() error {
		return client.CollectClusterWatchEvents(ctx, client.CollectClusterWatchEventsParam{
			Lg: r.log, Endpoints: endpoints, MaxRevisionChan: last, ClientSet: watchers,
		})
	})
	maxRevision, err := r.traffic(ctx, before, base, clients)
	if err == nil {
		// Requests that their clients gave up may still be executed. The watchers are to see them,
		// or else the validators would have to guess when that was.
		r.revision, err = r.standstill(ctx, maxRevision)
		last <- r.revision
	}
	close(last)
	done := make(chan error, 1)
	go func() { done <- group.Wait() }()
	select {
	case werr := <-done:
		err = errors.Join(err, werr)
	case <-time.After(collectTimeout):
		cancel()
		err = errors.Join(err, fmt.Errorf("after %s the watchers have not seen revision %d", collectTimeout, maxRevision), <-done)
	}
	if err != nil {
		return nil, err
	}
	reports := slices.Concat(clients.Reports(), watchers.Reports())
	for i := range reports {
		for _, w := range reports[i].Watch {
			for _, resp := range w.Responses {
				r.events += len(resp.Events)
			}
		}
	}
	return reports, nil
}

// traffic starts the clients, does the fault and stops the clients.
func (r *round) traffic(ctx context.Context, before control.Leaders, base time.Time, clients *client.ClientSet) (int64, error) {
	load, tf, endpoints := r.profile.load, r.profile.traffic, r.cluster.Endpoints()
	limiter := rate.NewLimiter(rate.Limit(load.KeyValue.MaximalQPS), load.KeyValue.BurstableQPS)
	if err := traffic.CheckEmptyDatabaseAtStart(ctx, r.log, endpoints, clients); err != nil {
		return 0, err
	}
	var wg sync.WaitGroup
	finish := make(chan struct{})
	stop := sync.OnceFunc(func() { close(finish); wg.Wait() })
	defer stop()
	keys, pods := traffic.NewKeyStore(keyCount, "key"), traffic.NewKubernetesStorage()
	began := time.Since(base)
	err := traffic.SimulateKeyValueTraffic(ctx, &wg, load.KeyValue, endpoints, clients, tf, traffic.RunTrafficLoopParam{
		QPSLimiter: limiter, IDs: clients.IdentityProvider(), LeaseIDStorage: identity.NewLeaseIDStorage(),
		NonUniqueRequestConcurrencyLimiter: traffic.NewConcurrencyLimiter(load.KeyValue.MaxNonUniqueRequestConcurrency),
		KeyStore:                           keys, Storage: pods, Finish: finish,
	})
	if err == nil {
		err = traffic.SimulateWatchTraffic(ctx, &wg, load.Watch, endpoints, clients, tf, traffic.RunWatchLoopParam{
			Config: *load.Watch, QPSLimiter: limiter, KeyStore: keys, Storage: pods, Finish: finish, Logger: r.log,
		})
	}
	if err == nil {
		err = traffic.SimulateCompactionTraffic(ctx, &wg, load.Compaction, endpoints, clients, tf, traffic.RunCompactLoopParam{
			Period: load.Compaction.Period, Finish: finish,
		})
	}
	if err != nil {
		return 0, err
	}
	if err := r.warm(ctx); err != nil {
		return 0, err
	}
	faulted := time.Since(base)
	if err := r.inject(ctx, before); err != nil {
		return 0, fmt.Errorf("%s: %w", r.fault, err)
	}
	if err := proc.Wait(ctx, afterFault); err != nil {
		return 0, err
	}
	if r.changed, err = r.mover.EnsureChange(ctx, before); err != nil {
		return 0, err
	}
	if err := proc.Wait(ctx, afterFault/2); err != nil {
		return 0, err
	}
	stop()
	stopped := time.Since(base)
	if err := r.finalPut(ctx, clients); err != nil {
		return 0, err
	}
	reports := clients.Reports()
	r.count(reports, began, faulted, stopped)
	return report.OperationsMaxRevision(reports), nil
}

// finalPut makes the last operation a success, which the validators need. In-flight requests of the
// stopped clients get a second to come to their end, as in the suite.
func (r *round) finalPut(ctx context.Context, clients *client.ClientSet) error {
	if err := proc.Wait(ctx, time.Second); err != nil {
		return err
	}
	c, err := clients.NewClient(r.cluster.Endpoints())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, collectTimeout)
	defer cancel()
	_, err = c.Put(ctx, finalKey, "true")
	if err != nil {
		err = fmt.Errorf("the last operation failed, and the validators need its success: %w", err)
	}
	return errors.Join(err, c.Close())
}

// standstill waits until nothing has been written for a while and returns the revision.
func (r *round) standstill(ctx context.Context, revision int64) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, collectTimeout)
	defer cancel()
	c, err := clientv3.New(clientv3.Config{Endpoints: r.cluster.Endpoints(), Logger: zap.NewNop()})
	if err != nil {
		return revision, err
	}
	defer c.Close()
	since := time.Now()
	err = proc.Poll(ctx, 200*time.Millisecond, func() (bool, error) {
		resp, err := c.Get(ctx, "key")
		if err != nil {
			return false, err
		}
		if resp.Header.Revision > revision {
			revision, since = resp.Header.Revision, time.Now()
		}
		return time.Since(since) > quiet, nil
	})
	return revision, err
}

// warm waits until the cluster is at its speed.
func (r *round) warm(ctx context.Context) error {
	c, err := clientv3.New(clientv3.Config{Endpoints: r.cluster.Endpoints(), Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	defer c.Close()
	revision := func() (int64, error) {
		ctx, cancel := context.WithTimeout(ctx, readyTimeout)
		defer cancel()
		resp, err := c.Get(ctx, "key")
		if err != nil {
			return 0, err
		}
		return resp.Header.Revision, nil
	}
	from, err := revision()
	if err != nil {
		return err
	}
	for range windowsMax {
		at := time.Now()
		if err := proc.Wait(ctx, beforeFault); err != nil {
			return err
		}
		to, err := revision()
		if err != nil {
			return err
		}
		if float64(to-from) >= 1.1*writesMin*time.Since(at).Seconds() {
			return nil
		}
		from = to
	}
	return nil
}

// count sums up what the clients did.
func (r *round) count(reports []report.ClientReport, began, faulted, stopped time.Duration) {
	writes := 0
	answered := []int64{int64(faulted)} // when writes were, from the fault on
	for i := range reports {
		for _, op := range reports[i].KeyValue {
			r.calls++
			request, response := op.Input.(model.EtcdRequest), op.Output.(model.MaybeEtcdResponse)
			if unanswered(&op) {
				r.unknown++
			}
			if response.Error != "" || response.ClientError != "" || request.IsRead() {
				continue
			}
			if request.Type == model.Compact {
				r.compactions++
				continue
			}
			if t := time.Duration(op.Call); t >= began && t <= faulted {
				writes++
			}
			if t := time.Duration(op.Return); t >= faulted && t <= stopped {
				answered = append(answered, op.Return)
			}
		}
	}
	r.writesPerSecond = float64(writes) / (faulted - began).Seconds()
	slices.Sort(answered)
	for i, t := range append(answered[1:], int64(stopped)) {
		r.pause = max(r.pause, time.Duration(t-answered[i]))
	}
}
