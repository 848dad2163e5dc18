package router

import (
	"sync"

	"braid/mvcc"
)

const (
	// countsMax and countKeyMax bound what is remembered: pagers at one time, and how long their
	// keys may be. When it is full the oldest goes, and its pager's next page is counted anew.
	countsMax   = 1024
	countKeyMax = 1 << 10
)

// counts remembers, for answers that a limit has cut, how many keys are left behind the last one
// at the answer's revision. A client that pages through a range asks for exactly that next, and
// etcd's count is that of all keys from the page's start on: without this every page would cost
// what the whole range costs. What is remembered of a revision never changes.
type counts struct {
	mu    sync.Mutex
	left  map[countKey]int64
	order [countsMax]countKey // ring of what is in left, the oldest at next
	next  int
}

// countKey names a range at a revision.
type countKey struct {
	start, end string
	toEnd      bool // of the key space; end is empty
	rev        mvcc.Revision
}

func countKeyOf(span mvcc.Span, rev mvcc.Revision) countKey {
	return countKey{start: string(span.Start), end: string(span.End), toEnd: span.End == nil, rev: rev}
}

// get returns the number of keys of a span at a revision, if it is known.
func (c *counts) get(span mvcc.Span, rev mvcc.Revision) (int64, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.left) == 0 {
		return 0, false
	}
	n, ok := c.left[countKeyOf(span, rev)]
	return n, ok
}

// put notes it.
func (c *counts) put(span mvcc.Span, rev mvcc.Revision, n int64) {
	if len(span.Start)+len(span.End) > countKeyMax {
		return
	}
	key := countKeyOf(span, rev)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left == nil {
		c.left = make(map[countKey]int64)
	}
	if _, known := c.left[key]; known {
		return
	}
	delete(c.left, c.order[c.next])
	c.order[c.next] = key
	c.next = (c.next + 1) % countsMax
	c.left[key] = n
}
