package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"braid/cmd/tests/proc"
)

// txnCalls is how many calls of each kind mode txns makes of each node, one after another.
const txnCalls = 200

// measureTxns measures what one client without company waits for: a put, a read, a transaction of
// ten puts in one region, and one of ten puts over five regions, in turn, through each node.
func measureTxns(ctx context.Context, o options, programs []program) (text string, err error) {
	p := programs[0]
	if p.name != "braid" {
		return "", errors.New("mode txns is about braid's regions")
	}
	p.args = []string{"--region-split-keys=b,d,f,h"}
	cluster, stop, err := startCluster(ctx, o, p, o.nodes)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, stop()) }()
	puts := func(letters string) (ops []clientv3.Op) {
		for i := range 10 {
			ops = append(ops, clientv3.OpPut(fmt.Sprintf("%c%d", letters[i%len(letters)], i), strings.Repeat("v", o.valueBytes)))
		}
		return ops
	}
	kinds := []struct {
		name string
		do   func(c *clientv3.Client, i int) error
	}{
		{"put", func(c *clientv3.Client, i int) error {
			_, err := c.Do(ctx, puts("acegi"[i%5 : i%5+1])[0])
			return err
		}},
		{"range of one key", func(c *clientv3.Client, i int) error {
			_, err := c.Get(ctx, "a0")
			return err
		}},
		{"10 puts, 1 region", func(c *clientv3.Client, i int) error {
			_, err := c.Txn(ctx).Then(puts("acegi"[i%5 : i%5+1])...).Commit()
			return err
		}},
		{"10 puts, 5 regions", func(c *clientv3.Client, _ int) error {
			_, err := c.Txn(ctx).Then(puts("acegi")...).Commit()
			return err
		}},
	}
	took := make([][]time.Duration, len(kinds))
	for _, n := range cluster.Nodes {
		conns, closeAll, err := dial(&proc.Cluster{Nodes: []*proc.Node{n}}, 1)
		if err != nil {
			return "", err
		}
		for i := range txnCalls + txnCalls/10 {
			for k, kind := range kinds {
				began := time.Now()
				if err := kind.do(conns[0], i); err != nil {
					closeAll()
					return "", fmt.Errorf("%s: %w", kind.name, err)
				}
				if i >= txnCalls/10 { // the first ones warm up
					took[k] = append(took[k], time.Since(began))
				}
			}
		}
		closeAll()
	}
	var b strings.Builder
	b.WriteString("| one client at a time | median, ms | 90 % below | median, of a put's |\n|---|---|---|---|\n")
	var put time.Duration
	for k, kind := range kinds {
		slices.Sort(took[k])
		median, high := took[k][len(took[k])/2], took[k][len(took[k])*9/10]
		if k == 0 {
			put = median
		}
		fmt.Fprintf(&b, "| %s | %.2f | %.2f | %.1f |\n", kind.name, ms(median), ms(high), float64(median)/float64(put))
	}
	return b.String(), nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
