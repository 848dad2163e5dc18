package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	fillBatch       = 100     // keys a transaction, below every store's limit
	fillBytes       = 1 << 19 // values a transaction, likewise
	fillConcurrent  = 32
	fillConnections = 8
)

// fill writes the key space, unless all of it is there.
func fill(ctx context.Context, conns []*clientv3.Client, l *Load, progress func(Progress)) error {
	k := &l.Keys
	resp, err := conns[0].Get(ctx, k.Key(0), clientv3.WithRange(k.end(k.Space)), clientv3.WithCountOnly())
	if err != nil {
		return fmt.Errorf("counting the keys that are there: %w", err)
	}
	if resp.Count >= k.Space {
		return nil
	}
	return fillAll(ctx, conns, l, progress)
}

// fillAll writes each key of the space once, in transactions of neighbours.
func fillAll(ctx context.Context, conns []*clientv3.Client, l *Load, progress func(Progress)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	k := &l.Keys
	batch := int64(min(fillBatch, max(fillBytes/l.ValueSize, 1)))
	batches := (k.Space + batch - 1) / batch
	values := newValues(l.ValueSize)
	var next atomic.Int64
	var mu sync.Mutex // progress is for one goroutine
	var wg sync.WaitGroup
	for i := range fillConcurrent {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 2))
			for ctx.Err() == nil {
				n := next.Add(1) - 1
				if n >= batches {
					return
				}
				// Transactions are taken from all over the space in turn, so that all regions work.
				n = scatter(n, batches)
				var ops []clientv3.Op
				for key := n * batch; key < min((n+1)*batch, k.Space); key++ {
					ops = append(ops, clientv3.OpPut(k.Key(key), values.next(rng, 0)))
				}
				if _, err := conns[i%len(conns)].Txn(ctx).Then(ops...).Commit(); err != nil {
					cancel(fmt.Errorf("writing the key space: %w", err))
					return
				}
				if progress != nil {
					mu.Lock()
					progress(Progress{Phase: PhaseFill, Done: float64(next.Load()) / float64(batches)})
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// Fill writes each key of the load's key space once, whether it is there or not.
func Fill(ctx context.Context, target Target, load Load, progress func(Progress)) error {
	load.Defaults()
	if err := load.Validate(); err != nil {
		return err
	}
	conns, err := target.dial(ctx, fillConnections)
	if err != nil {
		return err
	}
	defer closeAll(conns)
	return fillAll(ctx, conns, &load, progress)
}
