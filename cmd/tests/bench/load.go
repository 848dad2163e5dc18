package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"braid/cmd/tests/proc"
)

// loaded is what a restart with many keys shows.
type loaded struct {
	keysPerSecond     float64
	diskBytes         int64
	rssLoaded         int64         // right after loading
	ready             time.Duration // from exec to the ready line, after kill -9
	firstRead         time.Duration // from exec to the answer of a linearizable read
	rssReady, rssRead int64         // at ready, and after counting all keys
}

const (
	loadBatch   = 100 // keys a transaction
	loadWriters = 64
	mib         = 1 << 20
)

func compareLoad(ctx context.Context, o options, programs []program) (string, error) {
	var out strings.Builder
	fmt.Fprintf(&out, "One node, %d keys with values of %d B, loaded by %d writers in transactions of %d; then kill -9 and start.\n\n", o.keys, o.valueBytes, loadWriters, loadBatch)
	out.WriteString("| | keys/s loaded | on disk | memory after loading | start to ready | start to first read | memory at ready | after counting all |\n|---|---|---|---|---|---|---|---|\n")
	for _, p := range programs {
		l, err := load(ctx, o, p)
		if err != nil {
			return "", fmt.Errorf("%s: %w", p.name, err)
		}
		fmt.Fprintf(&out, "| %s | %.0f | %d MiB | %d MiB | %.2f s | %.2f s | %d MiB | %d MiB |\n", p.name, l.keysPerSecond, l.diskBytes/mib,
			l.rssLoaded/mib, l.ready.Seconds(), l.firstRead.Seconds(), l.rssReady/mib, l.rssRead/mib)
	}
	return out.String(), nil
}

func load(ctx context.Context, o options, p program) (l loaded, err error) {
	cluster, stop, err := startCluster(ctx, o, p, 1)
	if err != nil {
		return l, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	n := cluster.Nodes[0]
	from := time.Now()
	if err := fill(ctx, o, cluster); err != nil {
		return l, err
	}
	l.keysPerSecond = float64(o.keys) / time.Since(from).Seconds()
	if l.rssLoaded, err = n.RSS(); err != nil {
		return l, err
	}
	if err := n.Kill(); err != nil {
		return l, err
	}
	if l.diskBytes, err = diskBytes(n.DataDir()); err != nil {
		return l, err
	}

	from = time.Now()
	startCtx, cancel := context.WithTimeout(ctx, 5*startTimeout)
	defer cancel()
	if err := n.Start(startCtx); err != nil {
		return l, err
	}
	l.ready = time.Since(from)
	if l.rssReady, err = n.RSS(); err != nil {
		return l, err
	}
	conns, closeAll, err := dial(cluster, 1)
	if err != nil {
		return l, err
	}
	defer closeAll()
	if _, err := conns[0].Get(startCtx, key(0)); err != nil {
		return l, err
	}
	l.firstRead = time.Since(from)
	resp, err := conns[0].Get(startCtx, "\x00", clientv3.WithFromKey(), clientv3.WithCountOnly())
	if err != nil {
		return l, err
	}
	if resp.Count != int64(o.keys) {
		return l, fmt.Errorf("%d keys were loaded, %d are there", o.keys, resp.Count)
	}
	l.rssRead, err = n.RSS()
	return l, err
}

// fill writes all keys once; a transaction stays within one letter, hence one region.
func fill(ctx context.Context, o options, c *proc.Cluster) error {
	conns, closeAll, err := dial(c, 8)
	if err != nil {
		return err
	}
	defer closeAll()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	value := strings.Repeat("v", o.valueBytes)
	const letters = 13
	perLetter := (o.keys + letters - 1) / letters
	batches := (perLetter + loadBatch - 1) / loadBatch
	var next atomic.Int64
	var wg sync.WaitGroup
	for i := range loadWriters {
		wg.Go(func() {
			for ctx.Err() == nil {
				batch := int(next.Add(1)) - 1
				if batch >= batches*letters {
					return
				}
				letter, first := batch%letters, batch/letters*loadBatch
				var ops []clientv3.Op
				for at := first; at < min(first+loadBatch, perLetter); at++ {
					if n := at*letters + letter; n < o.keys {
						ops = append(ops, clientv3.OpPut(key(n), value))
					}
				}
				if len(ops) == 0 {
					continue
				}
				if _, err := conns[i%len(conns)].Txn(ctx).Then(ops...).Commit(); err != nil {
					cancel(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

func diskBytes(dir string) (sum int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			sum += info.Size()
		}
		return err
	})
	return sum, err
}
