package engine

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
)

// Pebble stops writers outright when memtables or L0 sublevels reach their limit, for seconds on
// a slow disk. The engine says so earlier, so that apply can slow down and raft's flow control
// does the rest.
const (
	memTablesHigh   = memTablesMax - 1
	l0SublevelsHigh = l0SublevelsMax * 2 / 3
)

// pressure is the engine's distance from a write stall. Fields are atomic: writers read them.
type pressure struct {
	stalls  atomic.Int64 // stalls that Pebble is in now (0 or 1)
	total   atomic.Int64 // stalls since Open
	high    atomic.Bool  // above the high marks when last looked at
	written atomic.Int64 // bytes committed since last looked at
	growing atomic.Bool  // memtables have not reached their full size
}

func (p *pressure) stall(begin bool) {
	if begin {
		p.stalls.Add(1)
		p.total.Add(1)
	} else {
		p.stalls.Add(-1)
	}
}

// Stalled says whether writers should hold back: Pebble stalls, or is close to it.
func (e *Engine) Stalled() bool { return e.pressure.high.Load() || e.pressure.stalls.Load() > 0 }

// wrote counts committed bytes and has the pressure looked at every eighth of a memtable, more
// often while memtables grow.
func (e *Engine) wrote(n int64) {
	step := e.o.MemTableBytes / 8
	if e.pressure.growing.Load() {
		step = min(step, growthStepBytes)
	}
	if e.pressure.written.Add(n) >= step {
		e.pressure.written.Store(0)
		e.notify.kick()
	}
}

// Pebble's memtables begin with 256 KiB and double, and none is flushed before all together have
// half a full one. Until then a get would look into eight of them, which costs more than all else
// in the evaluation of a put; so the engine has them flushed when they are growthTablesMax.
const (
	growthTablesMax = 3
	growthStepBytes = 128 << 10
)

// growth flushes memtables that are many and small.
func (e *Engine) growth(m *pebble.Metrics) {
	if !e.pressure.growing.Load() {
		return
	}
	if int64(m.MemTable.Size) >= e.o.MemTableBytes {
		e.pressure.growing.Store(false)
		return
	}
	if m.MemTable.Count < growthTablesMax || m.Flush.NumInProgress > 0 {
		return
	}
	if _, err := e.db.AsyncFlush(); err != nil {
		e.fail(fmt.Errorf("engine: flush: %w", err))
	}
}

func (e *Engine) onFlushEnd(info pebble.FlushInfo) {
	if info.Err == nil {
		e.notify.flushed.Store(true)
	}
	e.notify.kick()
}

// onNotify runs on the notifier's goroutine: Pebble forbids calls into it from its callbacks.
func (e *Engine) onNotify(flushed bool) {
	m := e.db.Metrics()
	e.growth(m)
	e.pressure.high.Store(m.MemTable.Count >= memTablesHigh || m.Levels[0].Sublevels >= l0SublevelsHigh)
	if flushed && e.o.OnFlush != nil {
		e.o.OnFlush()
	}
}

// notifier is a goroutine that wakes up for kicks; kicks during a call are served by one more.
type notifier struct {
	fn      func(flushed bool)
	flushed atomic.Bool
	wake    chan struct{} // of one element: a kick that finds it full is already served
	quit    chan struct{}
	wg      sync.WaitGroup
}

func (n *notifier) init(fn func(flushed bool)) {
	n.fn, n.wake, n.quit = fn, make(chan struct{}, 1), make(chan struct{})
}

func (n *notifier) start() {
	n.wg.Add(1)
	go func() {
		defer n.wg.Done()
		for {
			select {
			case <-n.wake:
				n.fn(n.flushed.Swap(false))
			case <-n.quit:
				return
			}
		}
	}()
}

func (n *notifier) kick() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// stop waits for a running call.
func (n *notifier) stop() {
	close(n.quit)
	n.wg.Wait()
}
