// Package freeport finds ports for processes and tests that start servers, stop them and start them
// again. They lie below the range from which the system takes ports for outgoing connections, so
// that none of those takes the place of a server that is down for a moment.
package freeport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
)

const (
	lowest = 12_000
	end    = 32_000 // systems take from 32,768 or 49,152 on
)

var next struct {
	sync.Mutex
	port int // 0 before the first call
}

// Range returns the first of n ports in a row on which nobody listened on the loopback address a
// moment ago. One process gets none twice before it has had them all; where it begins is left to
// chance, because others look at the same time.
func Range(n int) (first int, err error) {
	next.Lock()
	defer next.Unlock()
	if next.port == 0 {
		next.port = lowest + rand.IntN(end-lowest)
	}
	for tried := 0; tried < end-lowest && n <= end-lowest; {
		if next.port+n > end {
			next.port = lowest
		}
		first, busy := next.port, 0
		for busy = first; busy < first+n; busy++ {
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", busy))
			if err != nil {
				break
			}
			if err := l.Close(); err != nil {
				return 0, fmt.Errorf("freeport: %w", err)
			}
		}
		tried += busy - first + 1
		if busy == first+n {
			next.port = busy
			return first, nil
		}
		next.port = busy + 1
	}
	return 0, fmt.Errorf("freeport: no %d ports in a row between %d and %d", n, lowest, end)
}
