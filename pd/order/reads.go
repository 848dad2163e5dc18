package order

import "encoding/binary"

// Reads batches requests for read points (S1). One confirmation of the quorum is in flight at a
// time; requests that arrive meanwhile wait for the next one, because a confirmation says
// nothing about what was acknowledged after it began. T identifies a request to the owner. It is
// pure; its owner calls it from one goroutine. Its owner bounds the number of requests.
type Reads[T any] struct {
	waiting    []T
	confirming []T
	round      uint64 // of the confirmation in flight; grows for ever
	confirmed  []confirmedReads[T]
}

// confirmedReads waits until the state machine is applied through index.
type confirmedReads[T any] struct {
	index uint64
	reqs  []T
}

// Add takes a request.
func (r *Reads[T]) Add(req T) { r.waiting = append(r.waiting, req) }

// Pending is the number of unanswered requests.
func (r *Reads[T]) Pending() int {
	n := len(r.waiting) + len(r.confirming)
	for i := range r.confirmed {
		n += len(r.confirmed[i].reqs)
	}
	return n
}

// Start begins a confirmation when requests wait and none is in flight. The context goes to
// raft's ReadIndex and comes back in Confirmed. The caller has checked that it leads and has
// applied its opening entry (A13).
func (r *Reads[T]) Start() (context []byte, ok bool) {
	if len(r.waiting) == 0 || len(r.confirming) > 0 {
		return nil, false
	}
	r.round++
	r.waiting, r.confirming = r.confirming[:0], r.waiting
	return binary.BigEndian.AppendUint64(nil, r.round), true
}

// InFlight returns the context of the confirmation in flight.
func (r *Reads[T]) InFlight() (context []byte, ok bool) {
	if len(r.confirming) == 0 {
		return nil, false
	}
	return binary.BigEndian.AppendUint64(nil, r.round), true
}

// Confirmed takes raft's answer: the state applied through index is a read point for the
// requests of that confirmation. Answers to an earlier one are ignored.
func (r *Reads[T]) Confirmed(context []byte, index uint64) {
	if len(context) != 8 || binary.BigEndian.Uint64(context) != r.round || len(r.confirming) == 0 {
		return
	}
	r.confirmed = append(r.confirmed, confirmedReads[T]{index, r.confirming})
	r.confirming = nil
}

// Ready calls answer for every request whose index is applied. A state later than the confirmed
// index will do as well: it is committed too.
func (r *Reads[T]) Ready(applied uint64, answer func(T)) {
	n := 0
	for n < len(r.confirmed) && r.confirmed[n].index <= applied {
		for _, req := range r.confirmed[n].reqs {
			answer(req)
		}
		n++
	}
	r.confirmed = r.confirmed[n:]
}

// Fail hands back every unanswered request: leadership is lost.
func (r *Reads[T]) Fail(answer func(T)) {
	for i := range r.confirmed {
		for _, req := range r.confirmed[i].reqs {
			answer(req)
		}
	}
	for _, req := range r.confirming {
		answer(req)
	}
	for _, req := range r.waiting {
		answer(req)
	}
	r.waiting, r.confirming, r.confirmed = nil, nil, nil
	r.round++ // a late answer to the old confirmation means nothing now
}
