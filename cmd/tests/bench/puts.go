package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"braid/cmd/tests/proc"
)

// sample is what one round of puts shows.
type sample struct {
	putsPerSecond   float64
	syncsPerPut     float64 // and node
	cpuSecondsPer1k float64 // of all servers together
	p50, p99        time.Duration
}

// comparePuts runs the programs in turn, so that a slow spell of the machine hits both.
func comparePuts(ctx context.Context, o options, programs []program) (string, error) {
	samples := map[string][]sample{}
	for round := range o.rounds {
		for i := range programs {
			p := programs[(i+round)%len(programs)]
			s, err := puts(ctx, o, p)
			if err != nil {
				return "", fmt.Errorf("%s, round %d: %w", p.name, round+1, err)
			}
			fmt.Printf("round %d %s: %.0f puts/s, %.3f syncs per put and node, %.3f CPU s per 1,000 puts, p50 %s, p99 %s\n",
				round+1, p.name, s.putsPerSecond, s.syncsPerPut, s.cpuSecondsPer1k, s.p50.Round(10*time.Microsecond), s.p99.Round(10*time.Microsecond))
			samples[p.name] = append(samples[p.name], s)
		}
	}
	var out strings.Builder
	fmt.Fprintf(&out, "%d nodes, %d clients on %d connections, %d B values, %d rounds of %s in turn; medians, and the least and most of the rounds.\n\n", o.nodes, o.clients, o.conns, o.valueBytes, o.rounds, o.duration)
	out.WriteString("| | puts/s | syncs per put and node | CPU s per 1,000 puts | p50 | p99 |\n|---|---|---|---|---|---|\n")
	for _, p := range programs {
		all := samples[p.name]
		cell := func(format string, of func(sample) float64) string { return cellOf(all, format, of) }
		fmt.Fprintf(&out, "| %s | %s | %s | %s | %s ms | %s ms |\n", p.name,
			cell("%.0f", func(s sample) float64 { return s.putsPerSecond }),
			cell("%.3f", func(s sample) float64 { return s.syncsPerPut }),
			cell("%.3f", func(s sample) float64 { return s.cpuSecondsPer1k }),
			cell("%.1f", func(s sample) float64 { return s.p50.Seconds() * 1000 }),
			cell("%.1f", func(s sample) float64 { return s.p99.Seconds() * 1000 }))
	}
	if len(programs) == 2 {
		rate := func(s sample) float64 { return s.putsPerSecond }
		fmt.Fprintf(&out, "\n%s / %s: %.2f\n", programs[0].name, programs[1].name,
			median(samples[programs[0].name], rate)/median(samples[programs[1].name], rate))
	}
	return out.String(), nil
}

// cellOf is a cell of a table: the median of the rounds, their least and their most.
func cellOf[S any](samples []S, format string, of func(S) float64) string {
	v := sorted(samples, of)
	return fmt.Sprintf(format+" ("+format+"–"+format+")", median(samples, of), v[0], v[len(v)-1])
}

func median[S any](samples []S, of func(S) float64) float64 {
	v := sorted(samples, of)
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

func sorted[S any](samples []S, of func(S) float64) (v []float64) {
	for _, s := range samples {
		v = append(v, of(s))
	}
	slices.Sort(v)
	return v
}

// usage is the servers' counters at a moment.
type usage struct {
	cpu   time.Duration
	syncs float64
}

// puts runs one round on a fresh cluster.
func puts(ctx context.Context, o options, p program) (s sample, err error) {
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

	workCtx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var mu sync.Mutex
	var latencies []time.Duration // guarded by mu; of puts that ended in the measured time
	measuring := false            // guarded by mu
	value := strings.Repeat("v", o.valueBytes)
	var wg sync.WaitGroup
	for i := range o.clients {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 7))
			kv := clientv3.NewKV(conns[i%len(conns)])
			for workCtx.Err() == nil {
				from := time.Now()
				if _, err := kv.Put(workCtx, key(rng.IntN(o.keys)), value); err != nil {
					if workCtx.Err() == nil {
						cancel(err)
					}
					return
				}
				took := time.Since(from)
				mu.Lock()
				if measuring {
					latencies = append(latencies, took)
				}
				mu.Unlock()
			}
		})
	}
	measure := func(on bool) {
		mu.Lock()
		defer mu.Unlock()
		measuring = on
	}
	measured, before, after := time.Duration(0), usage{}, usage{}
	if err = proc.Wait(workCtx, warmUp); err == nil {
		if before, err = used(ctx, cluster, p); err == nil {
			profiled := profiles(workCtx, o, p, cluster)
			from := time.Now()
			measure(true)
			err = proc.Wait(workCtx, o.duration)
			measure(false)
			measured = time.Since(from)
			err = errors.Join(err, profiled())
			if err == nil {
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
	n := float64(len(latencies))
	if n == 0 {
		return s, errors.New("no put was answered")
	}
	slices.Sort(latencies)
	return sample{
		putsPerSecond:   n / measured.Seconds(),
		syncsPerPut:     (after.syncs - before.syncs) / n / float64(len(cluster.Nodes)),
		cpuSecondsPer1k: (after.cpu - before.cpu).Seconds() / n * 1000,
		p50:             latencies[len(latencies)/2],
		p99:             latencies[len(latencies)*99/100],
	}, nil
}

// profiles takes a CPU profile of every server over the measured time, if that is wanted; the
// returned function waits for them.
func profiles(ctx context.Context, o options, p program, c *proc.Cluster) (wait func() error) {
	if o.profiles == "" {
		return func() error { return nil }
	}
	failed := make([]error, len(c.Nodes))
	var wg sync.WaitGroup
	for i, n := range c.Nodes {
		wg.Go(func() {
			failed[i] = save(ctx, fmt.Sprintf("http://%s/debug/pprof/profile?seconds=%d", n.Client, int(o.duration.Seconds())),
				filepath.Join(o.profiles, fmt.Sprintf("%s-%d.pb.gz", p.name, i+1)))
		})
	}
	return func() error {
		wg.Wait()
		return errors.Join(failed...)
	}
}

// save downloads a page into a file.
func save(ctx context.Context, url, path string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, resp.Body)
	return errors.Join(err, file.Close())
}

// used sums the counters of all nodes.
func used(ctx context.Context, c *proc.Cluster, p program) (usage, error) {
	var u usage
	for _, n := range c.Nodes {
		cpu, err := n.CPU()
		if err != nil {
			return u, err
		}
		syncs, err := metric(ctx, n.Client, p.syncMetric)
		if err != nil {
			return u, err
		}
		u.cpu += cpu
		u.syncs += syncs
	}
	return u, nil
}

// metric reads a counter from a node's /metrics, summed over its labels.
func metric(ctx context.Context, addr, name string) (sum float64, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	found := false
	lines := bufio.NewReader(resp.Body)
	for {
		line, err := lines.ReadString('\n')
		if rest, ok := strings.CutPrefix(line, name); ok && (rest[0] == ' ' || rest[0] == '{') {
			fields := strings.Fields(rest[strings.LastIndexByte(rest, '}')+1:])
			v, perr := strconv.ParseFloat(fields[0], 64)
			if perr != nil {
				return 0, perr
			}
			sum, found = sum+v, true
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return 0, err
		}
	}
	if !found {
		return 0, fmt.Errorf("%s has no metric %s", addr, name)
	}
	return sum, nil
}
