package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"braid/cmd/tests/proc"
)

const (
	idleRegions = 1000
	idleSettle  = 10 * time.Second
	idleMeasure = 30 * time.Second
)

// measureIdle writes to every region of a cluster once, waits, and then measures what the cluster
// costs while nobody uses it.
func measureIdle(ctx context.Context, o options, programs []program) (text string, err error) {
	p := programs[0]
	if p.name != "braid" {
		return "", errors.New("mode idle is about braid's regions")
	}
	keys := make([]string, idleRegions-1)
	for i := range keys {
		keys[i] = fmt.Sprintf("k%04d", i+1)
	}
	p.args = []string{"--region-split-keys=" + strings.Join(keys, ",")}
	cluster, stop, err := startCluster(ctx, o, p, o.nodes)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, stop()) }()
	conns, closeAll, err := dial(cluster, 1)
	if err != nil {
		return "", err
	}
	for i := range idleRegions {
		if _, err := conns[0].Put(ctx, fmt.Sprintf("k%04d", i), "v"); err != nil {
			closeAll()
			return "", err
		}
	}
	closeAll()
	if err := proc.Wait(ctx, idleSettle); err != nil {
		return "", err
	}
	counters := func() (u usage, messages float64, err error) {
		if u, err = used(ctx, cluster, p); err != nil {
			return u, 0, err
		}
		for _, n := range cluster.Nodes {
			m, err := metric(ctx, n.Client, "braid_raftstore_messages_sent_total")
			if err != nil {
				return u, 0, err
			}
			messages += m
		}
		return u, messages, nil
	}
	before, sent, err := counters()
	if err != nil {
		return "", err
	}
	began := time.Now()
	if err := proc.Wait(ctx, idleMeasure); err != nil {
		return "", err
	}
	took := time.Since(began)
	after, sentAfter, err := counters()
	if err != nil {
		return "", err
	}
	rss := int64(0)
	for _, n := range cluster.Nodes {
		b, err := n.RSS()
		if err != nil {
			return "", err
		}
		rss = max(rss, b)
	}
	var out strings.Builder
	fmt.Fprintf(&out, "%d nodes, %d regions, %s after a write to each of them, over %s, two reads of all metrics included.\n\n", o.nodes, idleRegions, idleSettle, idleMeasure)
	out.WriteString("| raft messages | syncs | CPU of all nodes | memory of the largest |\n|---|---|---|---|\n")
	fmt.Fprintf(&out, "| %.0f | %.0f | %.1f %% of a core | %d MiB |\n", sentAfter-sent, after.syncs-before.syncs,
		(after.cpu-before.cpu).Seconds()/took.Seconds()*100, rss/mib)
	return out.String(), nil
}
