package leasesvc

import "container/heap"

// queue is a heap of leases by when they are due, and then by id, so that what is done does not depend on
// what else has come and gone.
type queue []*lease

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].before(q[j]) }
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

// Push implements heap.Interface.
func (q *queue) Push(x any) {
	l := x.(*lease)
	l.index = len(*q)
	*q = append(*q, l)
}

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	old := *q
	l := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	l.index = -1
	return l
}

func (q *queue) set(l *lease) {
	if l.index < 0 {
		heap.Push(q, l)
	} else {
		heap.Fix(q, l.index)
	}
}

func (q *queue) remove(l *lease) {
	if l.index >= 0 {
		heap.Remove(q, l.index)
	}
}

// before says whether a lease is due before another, or has the lower id.
func (l *lease) before(o *lease) bool { return l.due < o.due || l.due == o.due && l.id < o.id }

// homeQueue is a heap of homes with leases in their queues, by the first one of each.
type homeQueue []*home

func (q homeQueue) Len() int           { return len(q) }
func (q homeQueue) Less(i, j int) bool { return q[i].queue[0].before(q[j].queue[0]) }
func (q homeQueue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

// Push implements heap.Interface.
func (q *homeQueue) Push(x any) {
	h := x.(*home)
	h.index = len(*q)
	*q = append(*q, h)
}

// Pop implements heap.Interface.
func (q *homeQueue) Pop() any {
	old := *q
	h := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	h.index = -1
	return h
}

// set takes a home, whose queue is not empty, to its place.
func (q *homeQueue) set(h *home) {
	if h.index < 0 {
		heap.Push(q, h)
	} else {
		heap.Fix(q, h.index)
	}
}

// remove takes a home out. Its queue may be empty already, so it is not compared with others before it is
// out of the way: heap.Remove moves it to the end first.
func (q *homeQueue) remove(h *home) {
	if h.index >= 0 {
		heap.Remove(q, h.index)
	}
}
