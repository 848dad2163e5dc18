package router

import (
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc/etcdrule"
)

// A sorted and limited range has to see all keys, but need not keep them. Up to these bounds they
// are kept, so that equal ones come out in the very order that etcd's unstable sort gives them;
// beyond, only those that can still be in the answer.
const (
	keepKeysMax  = 4096
	keepBytesMax = 16 << 20
)

// collector gathers keys that arrive in key order and hands out the first limit of them in the
// wanted order. It keeps at most about the answer and the bounds above.
type collector struct {
	limit int64 // <= 0 is none
	order etcdrule.Order

	kvs   []*mvccpb.KeyValue
	bytes int   // of kvs, about; only when it may have to let go of some
	seen  int64 // all that were added
	cut   bool  // some were let go: ties are broken by key from then on
}

func (c *collector) add(kvs []*mvccpb.KeyValue) {
	c.seen += int64(len(kvs))
	if c.kvs == nil {
		c.kvs = kvs
	} else {
		c.kvs = append(c.kvs, kvs...)
	}
	if c.limit <= 0 || c.order.Natural() {
		return
	}
	for _, kv := range kvs {
		c.bytes += len(kv.Key) + len(kv.Value)
	}
	// Twice the limit, so that the sort is paid for by as many additions.
	if n := int64(len(c.kvs)); n/2 > c.limit && (n > keepKeysMax || c.bytes > keepBytesMax) {
		c.trim()
	}
}

// trim lets go of everything that cannot be among the first limit any more.
func (c *collector) trim() {
	c.cut = true
	c.sort()
	clear(c.kvs[c.limit:])
	c.kvs = c.kvs[:c.limit]
	c.bytes = 0
	for _, kv := range c.kvs {
		c.bytes += len(kv.Key) + len(kv.Value)
	}
}

func (c *collector) sort() {
	if c.cut {
		// Those kept so far are in front and lie below the new ones, so stability is order
		// by key.
		c.order.SortStable(c.kvs)
		return
	}
	c.order.Sort(c.kvs)
}

// result returns the answer, and whether the limit cut it.
func (c *collector) result() (kvs []*mvccpb.KeyValue, more bool) {
	c.sort()
	more = c.limit > 0 && c.seen > c.limit
	if more {
		c.kvs = c.kvs[:min(c.limit, int64(len(c.kvs)))]
	}
	return c.kvs, more
}
