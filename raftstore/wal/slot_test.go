package wal

import (
	"testing"
	"unsafe"
)

// TestSlotBytes: memory for each entry the log holds is what the package comment says.
func TestSlotBytes(t *testing.T) {
	if got := unsafe.Sizeof(slot{}); got != 24 {
		t.Errorf("%d bytes", got)
	}
}
