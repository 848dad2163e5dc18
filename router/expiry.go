package router

import (
	"sync/atomic"
	"time"
)

// expiries tells requests that their time is up without a timer for each: those that begin at about the
// same time share a channel. A timer and a child of its context were a fortieth of the CPU of a put.
type expiries struct {
	after   time.Duration
	current atomic.Pointer[expiry]
}

type expiry struct {
	over  chan struct{} // closed when the time of all that use it is up
	until time.Time     // for requests that begin before
}

// expirySteps is the part of its time by which a request may get more.
const expirySteps = 64

// of returns a channel that is closed when the time of a request that begins now is up, or a little
// later.
func (e *expiries) of(now time.Time) <-chan struct{} {
	for {
		x := e.current.Load()
		if x != nil && now.Before(x.until) {
			return x.over
		}
		next := &expiry{over: make(chan struct{}), until: now.Add(e.after / expirySteps)}
		if e.current.CompareAndSwap(x, next) {
			time.AfterFunc(e.after+e.after/expirySteps, func() { close(next.over) })
			return next.over
		}
	}
}
