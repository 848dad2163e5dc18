package gateway

import "sync/atomic"

// limits counts what is being executed. When it is full, requests are refused with etcd's "too
// many requests" rather than queued: a client that is told can wait, memory cannot.
type limits struct {
	requestsMax, bytesMax int64

	requests atomic.Int64
	bytes    atomic.Int64 // of writes
}

// enter admits a request that holds so many bytes; leave must follow when it returns true. A
// single request is always admitted, whatever its size: that has a limit of its own.
func (l *limits) enter(bytes int) bool {
	if l.requests.Add(1) > l.requestsMax {
		l.requests.Add(-1)
		return false
	}
	if held := l.bytes.Add(int64(bytes)); bytes > 0 && held > l.bytesMax && held != int64(bytes) {
		l.leave(bytes)
		return false
	}
	return true
}

func (l *limits) leave(bytes int) {
	l.bytes.Add(-int64(bytes))
	l.requests.Add(-1)
}
