package router

import (
	"fmt"

	lru "github.com/hashicorp/golang-lru/v2"

	"braid/mvcc"
)

const (
	// countsMax and countKeyMax bound what is remembered: pagers at one time, and how long their
	// keys may be. When it is full, whoever has not asked for the longest time pays for the next page.
	countsMax   = 1024
	countKeyMax = 1 << 10
)

// counts remembers, for answers that a limit has cut, how many keys are left behind the last one
// at the answer's revision. A client that pages through a range asks for exactly that next, and
// etcd's count is that of all keys from the page's start on: without this every page would cost
// what the whole range costs. What is remembered of a revision never changes.
type counts struct{ left *lru.Cache[countKey, int64] }

func newCounts() counts {
	left, err := lru.New[countKey, int64](countsMax)
	if err != nil {
		panic(fmt.Sprintf("router: a cache of %d counts: %v", countsMax, err))
	}
	return counts{left}
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
func (c counts) get(span mvcc.Span, rev mvcc.Revision) (int64, bool) {
	if c.left.Len() == 0 {
		return 0, false // most stores have no pagers, and need no key for nothing
	}
	return c.left.Get(countKeyOf(span, rev))
}

// put notes it.
func (c counts) put(span mvcc.Span, rev mvcc.Revision, n int64) {
	if len(span.Start)+len(span.End) <= countKeyMax {
		c.left.Add(countKeyOf(span, rev), n)
	}
}
