package region

import (
	"bytes"

	"github.com/google/btree"

	"braid/mvcc"
	"braid/region/regionpb"
)

// number is the revision of a command: unknown from evaluation until apply. Every unknown one is
// above every known one.
type number struct {
	rev mvcc.Revision // 0 while unknown
}

// revision is a version's mod or create revision: a known one, or a number to come.
type revision struct {
	rev mvcc.Revision
	num *number
}

func known(r mvcc.Revision) revision { return revision{rev: r} }

// value returns the revision, false while it is unknown.
func (r revision) value() (mvcc.Revision, bool) {
	if r.num == nil {
		return r.rev, true
	}
	return r.num.rev, r.num.rev != 0
}

// pending is a version that has been evaluated and not applied. A deletion has Version 0.
type pending struct {
	mod     revision
	create  revision
	version int64
	lease   int64
	value   []byte
}

func (p *pending) tombstone() bool { return p.version == 0 }

// node holds a key's newest pending version.
type node struct {
	key   []byte
	cur   pending
	entry uint64 // raft index of the entry it is of; 0 while that entry is being built
	live  bool   // in the tree
}

type undo struct {
	n     *node
	cur   pending
	entry uint64
	live  bool
}

// overlay is what the leader sees above applied state (architecture 4): the newest pending
// version of each key that an entry in flight writes. Only the group's owner uses it.
//
// While an entry is built its writes are undoable (mark, rollback); commit gives them the
// entry's index, and prune forgets them when that entry is applied. What a key had pending
// before is not kept: nobody may read it any more, and a later entry's rollback restores it.
type overlay struct {
	tree *btree.BTreeG[*node]
	log  []undo // writes since the last commit
	// fifo holds, per committed entry in log order, the nodes it wrote.
	fifo []overlayEntry
	head int
	free [][]*node // emptied lists of fifo, for reuse
	key  node      // search key, so that a lookup allocates nothing

	records recordOverlay
	leased  leaseOverlay
}

type overlayEntry struct {
	index uint64
	nodes []*node
}

func newOverlay() *overlay {
	return &overlay{tree: btree.NewG(32, func(a, b *node) bool { return bytes.Compare(a.key, b.key) < 0 })}
}

// get returns the key's pending version, nil when it has none.
func (o *overlay) get(key []byte) *pending {
	if o.tree.Len() == 0 {
		return nil
	}
	if n := o.find(key); n != nil {
		return &n.cur
	}
	return nil
}

func (o *overlay) find(key []byte) *node {
	o.key.key = key
	n, _ := o.tree.Get(&o.key)
	o.key.key = nil
	return n
}

// put makes p the key's newest version. The key is kept.
func (o *overlay) put(key []byte, p pending) {
	n := o.find(key)
	if n == nil {
		n = &node{key: key}
		o.tree.ReplaceOrInsert(n)
	}
	o.log = append(o.log, undo{n: n, cur: n.cur, entry: n.entry, live: n.live})
	n.cur, n.entry, n.live = p, 0, true
	if p.lease != 0 {
		o.leased.put(p.lease, n.key)
	}
}

// attached appends the keys that pending versions attach to a lease; some may come twice.
func (o *overlay) attached(id int64, dst []regionpb.Attachment) []regionpb.Attachment {
	for _, key := range o.leased.byLease[id] {
		if p := o.get(key); p != nil && !p.tombstone() && p.lease == id {
			dst = append(dst, regionpb.Attachment{Lease: id, Key: key})
		}
	}
	return dst
}

// span appends the nodes of s to dst in key order.
func (o *overlay) span(s mvcc.Span, dst []*node) []*node {
	if o.tree.Len() == 0 || s.Empty() {
		return dst
	}
	o.tree.AscendGreaterOrEqual(&node{key: s.Start}, func(n *node) bool {
		if s.End != nil && bytes.Compare(n.key, s.End) >= 0 {
			return false
		}
		dst = append(dst, n)
		return true
	})
	return dst
}

// any says whether a key of s has a pending version.
func (o *overlay) any(s mvcc.Span) (found bool) {
	if o.tree.Len() == 0 || s.Empty() {
		return false
	}
	o.key.key = s.Start
	o.tree.AscendGreaterOrEqual(&o.key, func(n *node) bool {
		found = s.End == nil || bytes.Compare(n.key, s.End) < 0
		return false
	})
	o.key.key = nil
	return found
}

// undoKeptMax is the longest list of writes whose room is kept for the next entry: one that deletes
// a million keys must not cost its memory for ever.
const undoKeptMax = 16 << 10

// overlayMark is a point to roll back to.
type overlayMark struct{ keys, records, leased int }

// mark returns a point to roll back to, before the next commit.
func (o *overlay) mark() overlayMark {
	return overlayMark{len(o.log), len(o.records.log), len(o.leased.log)}
}

// rollback undoes every write since mark.
func (o *overlay) rollback(mark overlayMark) {
	o.records.rollback(mark.records)
	o.leased.rollback(mark.leased)
	for i := len(o.log) - 1; i >= mark.keys; i-- {
		u := &o.log[i]
		u.n.cur, u.n.entry, u.n.live = u.cur, u.entry, u.live
		if !u.live {
			o.tree.Delete(u.n)
		}
		*u = undo{}
	}
	o.log = o.log[:mark.keys]
}

// commit makes the writes since the last commit those of the entry at index.
func (o *overlay) commit(index uint64) {
	o.records.commit(index)
	o.leased.commit(index)
	if len(o.log) == 0 {
		return
	}
	var nodes []*node
	if k := len(o.free); k > 0 {
		nodes, o.free = o.free[k-1], o.free[:k-1]
	}
	for i := range o.log {
		o.log[i].n.entry = index
		nodes = append(nodes, o.log[i].n)
		o.log[i] = undo{}
	}
	o.log = o.log[:0]
	if cap(o.log) > undoKeptMax {
		o.log = nil
	}
	o.fifo = append(o.fifo, overlayEntry{index: index, nodes: nodes})
}

// prune forgets what entries through index wrote: it is in applied state now.
func (o *overlay) prune(index uint64) {
	o.records.prune(index)
	o.leased.prune(index)
	for o.head < len(o.fifo) && o.fifo[o.head].index <= index {
		e := &o.fifo[o.head]
		for i, n := range e.nodes {
			if n.live && n.entry != 0 && n.entry <= index {
				n.live = false
				o.tree.Delete(n)
			}
			e.nodes[i] = nil
		}
		if len(o.free) < 64 && cap(e.nodes) <= 1024 {
			o.free = append(o.free, e.nodes[:0])
		}
		e.nodes = nil
		o.head++
	}
	if o.head == len(o.fifo) {
		o.fifo, o.head = o.fifo[:0], 0
	} else if o.head > 256 && o.head*2 > len(o.fifo) {
		n := copy(o.fifo, o.fifo[o.head:])
		clear(o.fifo[n:])
		o.fifo, o.head = o.fifo[:n], 0
	}
}

// reset forgets everything: leadership was lost (E2) or a fence was raised (F3).
func (o *overlay) reset() {
	o.records.reset()
	o.leased.reset()
	o.tree.Clear(false)
	clear(o.log)
	clear(o.fifo)
	o.log, o.fifo, o.head = o.log[:0], o.fifo[:0], 0
}

// len is the number of keys with a pending version.
func (o *overlay) len() int { return o.tree.Len() }
