package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// eventKind is the name under which deliveries to watchers are reported: the time from when the
// put was meant to start until the watcher has the event.
const eventKind = "watch event"

// watch starts the watchers and waits until all of them are there; unwatch ends them.
func (r *run) watch(ctx context.Context, conns []*clientv3.Client) (unwatch func(), err error) {
	watchCtx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	unwatch = func() { cancel(); wg.Wait() }
	chans := make([]clientv3.WatchChan, r.load.Watchers)
	k := &r.load.Keys
	for i := range chans {
		part, parts := int64(i%r.load.WatchParts), int64(r.load.WatchParts)
		from, to := k.Space*part/parts, k.Space*(part+1)/parts
		chans[i] = conns[i%len(conns)].Watch(watchCtx, k.Key(from), clientv3.WithRange(k.end(to)), clientv3.WithCreatedNotify())
	}
	timeout := time.NewTimer(r.opts.Timeout)
	defer timeout.Stop()
	for i, ch := range chans {
		select {
		case resp, ok := <-ch:
			if err := resp.Err(); !ok || err != nil {
				unwatch()
				return nil, fmt.Errorf("watcher %d cannot be made: %w", i, err)
			}
		case <-timeout.C:
			unwatch()
			return nil, fmt.Errorf("only %d of %d watchers were made in %s", i, len(chans), r.opts.Timeout)
		}
	}
	for i, ch := range chans {
		wg.Go(func() { r.receive(watchCtx, i, ch) })
	}
	return unwatch, nil
}

// receive is the life of a watcher.
func (r *run) receive(ctx context.Context, id int, ch clientv3.WatchChan) {
	for resp := range ch {
		now := time.Since(r.base)
		if err := resp.Err(); err != nil && ctx.Err() == nil {
			r.rec.add(id, outcome{kind: r.event, ended: r.inside(now), err: "watch: " + errorText(err)})
			continue
		}
		for _, e := range resp.Events {
			if e.Type != clientv3.EventTypePut || len(e.Kv.Value) < stampSize {
				continue
			}
			began := time.Duration(binary.BigEndian.Uint64(e.Kv.Value))
			r.rec.add(id, outcome{kind: r.event, latency: now - began, timed: int64(began) >= r.from.Load(), ended: r.inside(now), event: true})
		}
	}
}
