package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"braid/cmd/tests/proc"
)

// renewals is what one round of keepalives shows.
type renewals struct {
	perSecond       float64
	cpuSecondsPer1k float64 // of all servers together
	p50, p99        time.Duration
}

// leaseTTL is longer than a round: what a keepalive costs does not depend on it.
const leaseTTL = 120

// compareKeepAlives runs the programs in turn.
func compareKeepAlives(ctx context.Context, o options, programs []program) (string, error) {
	samples := map[string][]renewals{}
	for round := range o.rounds {
		for i := range programs {
			p := programs[(i+round)%len(programs)]
			s, err := keepAlives(ctx, o, p)
			if err != nil {
				return "", fmt.Errorf("%s, round %d: %w", p.name, round+1, err)
			}
			fmt.Printf("round %d %s: %.0f keepalives/s, %.4f CPU s per 1,000, p50 %s, p99 %s\n", round+1, p.name, s.perSecond, s.cpuSecondsPer1k,
				s.p50.Round(10*time.Microsecond), s.p99.Round(10*time.Microsecond))
			samples[p.name] = append(samples[p.name], s)
		}
	}
	var out strings.Builder
	fmt.Fprintf(&out, "%d nodes, %d leases with a key each, renewed in turn at %d/s through %d streams on %d connections, %d rounds of %s in turn; medians, and the least and most of the rounds.\n\n",
		o.nodes, o.leases, o.rate, o.clients, o.conns, o.rounds, o.duration)
	out.WriteString("| | keepalives/s | server CPU s per 1,000 | p50 | p99 |\n|---|---|---|---|---|\n")
	cpu := func(s renewals) float64 { return s.cpuSecondsPer1k }
	for _, p := range programs {
		cell := func(format string, of func(renewals) float64) string { return cellOf(samples[p.name], format, of) }
		fmt.Fprintf(&out, "| %s | %s | %s | %s ms | %s ms |\n", p.name, cell("%.0f", func(s renewals) float64 { return s.perSecond }), cell("%.4f", cpu),
			cell("%.2f", func(s renewals) float64 { return s.p50.Seconds() * 1000 }), cell("%.2f", func(s renewals) float64 { return s.p99.Seconds() * 1000 }))
	}
	return out.String(), nil
}

// keepAlives runs one round on a fresh cluster.
func keepAlives(ctx context.Context, o options, p program) (s renewals, err error) {
	cluster, stop, err := startCluster(ctx, o, p, o.nodes)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	conns, closeAll, err := dial(cluster, o.conns)
	if err != nil {
		return s, err
	}
	defer closeAll()
	if _, err := grantAll(ctx, conns, o.leases, leaseTTL, true); err != nil {
		return s, err
	}
	workCtx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var measuring atomic.Bool
	latencies := make([][]time.Duration, o.clients)
	var wg sync.WaitGroup
	began := time.Now()
	for i := range o.clients {
		stream, err := pb.NewLeaseClient(conns[i%len(conns)].ActiveConnection()).LeaseKeepAlive(workCtx)
		if err != nil {
			return s, err
		}
		sent := make(chan time.Time, 1024) // answers come in the order of what was sent
		wg.Go(func() {
			defer close(sent)
			// The streams take turns, each a lease of its own share at a time.
			every := time.Second * time.Duration(o.clients) / time.Duration(o.rate)
			due := began.Add(every * time.Duration(i) / time.Duration(o.clients))
			for id := i + 1; workCtx.Err() == nil; due = due.Add(every) {
				if proc.Wait(workCtx, time.Until(due)) != nil {
					return
				}
				select {
				case sent <- due:
				case <-workCtx.Done():
					return
				}
				if err := stream.Send(&pb.LeaseKeepAliveRequest{ID: int64(id)}); err != nil {
					return // the receiver knows why
				}
				if id += o.clients; id > o.leases {
					id = i + 1
				}
			}
		})
		wg.Go(func() {
			for from := range sent {
				r, err := stream.Recv()
				if err == nil && r.TTL <= 0 {
					err = fmt.Errorf("lease %d has ended", r.ID)
				}
				if err != nil {
					if workCtx.Err() == nil {
						cancel(err)
					}
					return
				}
				if measuring.Load() {
					latencies[i] = append(latencies[i], time.Since(from))
				}
			}
		})
	}
	var before, after usage
	measured := time.Duration(0)
	if err = proc.Wait(workCtx, warmUp); err == nil {
		if before, err = used(ctx, cluster, p); err == nil {
			profiled := profiles(workCtx, o, p, cluster)
			from := time.Now()
			measuring.Store(true)
			err = proc.Wait(workCtx, o.duration)
			measuring.Store(false)
			measured = time.Since(from)
			if err = errors.Join(err, profiled()); err == nil {
				after, err = used(ctx, cluster, p)
			}
		}
	}
	failure := context.Cause(workCtx)
	cancel(nil)
	wg.Wait()
	if err = errors.Join(err, failure); err != nil {
		return s, err
	}
	all := slices.Sorted(slices.Values(slices.Concat(latencies...)))
	if len(all) == 0 {
		return s, errors.New("no keepalive was answered")
	}
	return renewals{
		perSecond: float64(len(all)) / measured.Seconds(), cpuSecondsPer1k: (after.cpu - before.cpu).Seconds() / float64(len(all)) * 1000,
		p50: all[len(all)/2], p99: all[len(all)*99/100],
	}, nil
}

// grantAll grants leases 1 to n from many clients, and puts a key with each if asked to. It returns how
// many were granted per second.
func grantAll(ctx context.Context, conns []*clientv3.Client, n int, ttl int64, keys bool) (float64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	const clients = 256
	from := time.Now()
	var next atomic.Int64
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			c := conns[i%len(conns)]
			leases := pb.NewLeaseClient(c.ActiveConnection())
			for id := next.Add(1); id <= int64(n) && ctx.Err() == nil; id = next.Add(1) {
				_, err := leases.LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: id, TTL: ttl})
				if err == nil && keys {
					_, err = c.Put(ctx, key(int(id)), "v", clientv3.WithLease(clientv3.LeaseID(id)))
				}
				if err != nil {
					cancel(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return float64(n) / time.Since(from).Seconds(), context.Cause(ctx)
}

// crowd is what very many leases cost.
type crowd struct {
	grantsPerSecond     float64
	rssBefore, rssAfter int64
	grant, put          [2]time.Duration // p50 and p99 of one client while they live
	idle                float64          // cores used while nobody asks for anything
	ready, firstTTL     time.Duration    // from exec, after kill -9
	rssRestarted        int64
}

// compareCrowds measures one node of each program with -leases leases of an hour.
func compareCrowds(ctx context.Context, o options, programs []program) (string, error) {
	var out strings.Builder
	fmt.Fprintf(&out, "One node, %d leases of an hour without keys, granted by 256 clients; then one client that puts and grants in turn; then nobody for %s; then kill -9 and start.\n\n", o.leases, o.duration)
	out.WriteString("| | grants/s | memory before, after | put p50, p99 | grant p50, p99 | idle, cores | start to ready | to a time to live | memory then |\n|---|---|---|---|---|---|---|---|---|\n")
	ms := func(d [2]time.Duration) string {
		return fmt.Sprintf("%.2f, %.2f ms", d[0].Seconds()*1000, d[1].Seconds()*1000)
	}
	for _, p := range programs {
		c, err := gather(ctx, o, p)
		if err != nil {
			return "", fmt.Errorf("%s: %w", p.name, err)
		}
		fmt.Fprintf(&out, "| %s | %.0f | %d, %d MiB | %s | %s | %.3f | %.2f s | %.2f s | %d MiB |\n", p.name, c.grantsPerSecond, c.rssBefore/mib, c.rssAfter/mib,
			ms(c.put), ms(c.grant), c.idle, c.ready.Seconds(), c.firstTTL.Seconds(), c.rssRestarted/mib)
	}
	return out.String(), nil
}

func gather(ctx context.Context, o options, p program) (c crowd, err error) {
	cluster, stop, err := startCluster(ctx, o, p, 1)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	n := cluster.Nodes[0]
	if c.rssBefore, err = n.RSS(); err != nil {
		return c, err
	}
	conns, closeAll, err := dial(cluster, 8)
	if err != nil {
		return c, err
	}
	defer closeAll()
	if c.grantsPerSecond, err = grantAll(ctx, conns, o.leases, 3600, false); err != nil {
		return c, err
	}
	if err := proc.Wait(ctx, warmUp); err != nil {
		return c, err
	}
	if c.rssAfter, err = n.RSS(); err != nil {
		return c, err
	}
	var puts, grants []time.Duration
	for i := range 1000 {
		from := time.Now()
		if _, err := conns[0].Put(ctx, key(i), "v"); err != nil {
			return c, err
		}
		puts = append(puts, time.Since(from))
		from = time.Now()
		if _, err := conns[0].Grant(ctx, 3600); err != nil {
			return c, err
		}
		grants = append(grants, time.Since(from))
	}
	quantiles := func(d []time.Duration) [2]time.Duration {
		slices.Sort(d)
		return [2]time.Duration{d[len(d)/2], d[len(d)*99/100]}
	}
	c.put, c.grant = quantiles(puts), quantiles(grants)
	before, err := n.CPU()
	if err != nil {
		return c, err
	}
	if err := proc.Wait(ctx, o.duration); err != nil {
		return c, err
	}
	after, err := n.CPU()
	if err != nil {
		return c, err
	}
	c.idle = (after - before).Seconds() / o.duration.Seconds()
	if err := n.Kill(); err != nil {
		return c, err
	}
	from := time.Now()
	startCtx, cancel := context.WithTimeout(ctx, 5*startTimeout)
	defer cancel()
	if err := n.Start(startCtx); err != nil {
		return c, err
	}
	c.ready = time.Since(from)
	again, closeAgain, err := dial(cluster, 1)
	if err != nil {
		return c, err
	}
	defer closeAgain()
	r, err := again[0].TimeToLive(startCtx, clientv3.LeaseID(o.leases))
	if err != nil {
		return c, err
	}
	if r.TTL <= 0 {
		return c, fmt.Errorf("lease %d has %d s left", o.leases, r.TTL)
	}
	c.firstTTL = time.Since(from)
	c.rssRestarted, err = n.RSS()
	return c, err
}
