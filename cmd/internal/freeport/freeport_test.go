package freeport

import (
	"fmt"
	"net"
	"testing"
)

// TestRange: ranges do not overlap, have no port that is in use, and lie where no outgoing
// connection is given its port.
func TestRange(t *testing.T) {
	first, err := Range(1)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", first+2))
	if err == nil {
		defer l.Close()
	}
	given := map[int]bool{first: true, first + 2: true}
	for range 20 {
		p, err := Range(4)
		if err != nil {
			t.Fatal(err)
		}
		for i := p; i < p+4; i++ {
			if given[i] || i < lowest || i >= end {
				t.Errorf("%d is in use, or given twice, or out of range", i)
			}
			given[i] = true
		}
	}
	if _, err := Range(end); err == nil {
		t.Error("more ports than there are")
	}
}
