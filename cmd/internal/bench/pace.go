package bench

import "time"

// pace is the schedule of a run. In a closed loop every client sends its next request when the
// last one was answered. In an open loop request n is meant to start n/rate after the begin,
// whether the store keeps up or not; its latency is measured from there, so that a stall delays,
// and lengthens, everything that was due in it (no coordinated omission).
type pace struct {
	rate float64 // requests per second of all clients; 0: closed loop
}

// open says whether the schedule is an open loop.
func (p pace) open() bool { return p.rate > 0 }

// due is when request n is meant to start, since the begin.
func (p pace) due(n int64) time.Duration {
	return time.Duration(float64(n) / p.rate * float64(time.Second))
}

// scheduled is how many requests are due before a time since the begin.
func (p pace) scheduled(at time.Duration) int64 {
	if at <= 0 {
		return 0
	}
	n := int64(at.Seconds() * p.rate)
	for n > 0 && p.due(n-1) >= at {
		n--
	}
	for p.due(n) < at {
		n++
	}
	return n
}
