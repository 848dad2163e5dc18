package router

import (
	"context"
	"math/rand/v2"
	"time"
)

// backoff is the series of pauses between the attempts of one request: doubling from min to max,
// each shortened by up to a half at random so that many requests that failed together do not
// come back together.
type backoff struct {
	next, max time.Duration
}

func (r *Router) backoff() backoff { return backoff{next: r.opts.RetryMin, max: r.opts.RetryMax} }

// wait pauses, and returns the error of ctx when that ends first.
func (b *backoff) wait(ctx context.Context) error {
	d := b.next - time.Duration(rand.Int64N(int64(b.next)/2+1))
	b.next = min(2*b.next, b.max)
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
