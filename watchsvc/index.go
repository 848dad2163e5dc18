package watchsvc

import (
	"bytes"
	"math/rand/v2"

	"braid/mvcc"
)

// index finds the watchers whose span holds a key: those of a single key by a map, the others by
// an interval tree (a treap by (start, end), each node knowing the greatest end below it), so that
// an event costs the watchers it matches and the logarithm of the spans.
type index struct {
	keys map[string]*watcherSet
	root *spanNode
}

// watcherSet is the watchers of one span, in an order that does not depend on chance. Each knows
// its place, so it is in one set at a time from which it is removed.
type watcherSet []*watcher

func (s *watcherSet) add(w *watcher) {
	w.at = len(*s)
	*s = append(*s, w)
}

func (s *watcherSet) remove(w *watcher) {
	list := *s
	last := len(list) - 1
	list[w.at], list[last].at = list[last], w.at
	list[last] = nil
	*s = list[:last]
}

type spanNode struct {
	span        mvcc.Span
	watchers    watcherSet
	prio        uint32
	left, right *spanNode
	maxEnd      []byte // nil: no bound
}

// single says whether a span is that of one key.
func single(s mvcc.Span) bool {
	n := len(s.Start)
	return len(s.End) == n+1 && s.End[n] == 0 && bytes.Equal(s.End[:n], s.Start)
}

func (x *index) add(w *watcher) {
	if single(w.span) {
		if x.keys == nil {
			x.keys = map[string]*watcherSet{}
		}
		set := x.keys[string(w.span.Start)]
		if set == nil {
			set = &watcherSet{}
			x.keys[string(w.span.Start)] = set
		}
		set.add(w)
		return
	}
	x.root = x.root.insert(w)
}

func (x *index) remove(w *watcher) {
	if single(w.span) {
		set := x.keys[string(w.span.Start)]
		if set.remove(w); len(*set) == 0 {
			delete(x.keys, string(w.span.Start))
		}
		return
	}
	x.root = x.root.remove(w)
}

// match calls fn with every watcher whose span holds the key. fn must not change the index.
func (x *index) match(key []byte, fn func(*watcher)) {
	if set := x.keys[string(key)]; set != nil {
		for _, w := range *set {
			fn(w)
		}
	}
	x.root.stab(key, fn)
}

// each calls fn with every watcher.
func (x *index) each(fn func(*watcher)) {
	for _, set := range x.keys {
		for _, w := range *set {
			fn(w)
		}
	}
	x.root.each(fn)
}

// compareEnd orders ends, nil being above all.
func compareEnd(a, b []byte) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return 1
	case b == nil:
		return -1
	}
	return bytes.Compare(a, b)
}

func compareSpan(a, b mvcc.Span) int {
	if c := bytes.Compare(a.Start, b.Start); c != 0 {
		return c
	}
	return compareEnd(a.End, b.End)
}

func (n *spanNode) update() *spanNode {
	n.maxEnd = n.span.End
	for _, c := range [...]*spanNode{n.left, n.right} {
		if c != nil && compareEnd(c.maxEnd, n.maxEnd) > 0 {
			n.maxEnd = c.maxEnd
		}
	}
	return n
}

func (n *spanNode) insert(w *watcher) *spanNode {
	if n == nil {
		n = &spanNode{span: w.span, prio: rand.Uint32(), maxEnd: w.span.End}
		n.watchers.add(w)
		return n
	}
	switch c := compareSpan(w.span, n.span); {
	case c == 0:
		n.watchers.add(w)
		return n
	case c < 0:
		if n.left = n.left.insert(w); n.left.prio > n.prio {
			l := n.left
			n.left, l.right = l.right, n.update()
			n.update()
			return l.update()
		}
	default:
		if n.right = n.right.insert(w); n.right.prio > n.prio {
			r := n.right
			n.right, r.left = r.left, n.update()
			n.update()
			return r.update()
		}
	}
	return n.update()
}

func (n *spanNode) remove(w *watcher) *spanNode {
	if n == nil {
		return nil
	}
	switch c := compareSpan(w.span, n.span); {
	case c < 0:
		n.left = n.left.remove(w)
	case c > 0:
		n.right = n.right.remove(w)
	default:
		if n.watchers.remove(w); len(n.watchers) == 0 {
			return join(n.left, n.right)
		}
		return n
	}
	return n.update()
}

// join makes one tree of two, all spans of a being below those of b.
func join(a, b *spanNode) *spanNode {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	case a.prio > b.prio:
		a.right = join(a.right, b)
		return a.update()
	}
	b.left = join(a, b.left)
	return b.update()
}

func (n *spanNode) stab(key []byte, fn func(*watcher)) {
	for n != nil {
		if n.maxEnd != nil && bytes.Compare(key, n.maxEnd) >= 0 {
			return
		}
		n.left.stab(key, fn)
		if bytes.Compare(key, n.span.Start) < 0 {
			return
		}
		if n.span.End == nil || bytes.Compare(key, n.span.End) < 0 {
			for _, w := range n.watchers {
				fn(w)
			}
		}
		n = n.right
	}
}

func (n *spanNode) each(fn func(*watcher)) {
	for ; n != nil; n = n.right {
		n.left.each(fn)
		for _, w := range n.watchers {
			fn(w)
		}
	}
}
