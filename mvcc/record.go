package mvcc

import (
	"bytes"
	"cmp"
	"fmt"
)

// RecordKind is what a record of the system space is. The numbers are on disk.
type RecordKind byte

const (
	// RecordLease is a lease, at the place that follows from its id.
	RecordLease RecordKind = 'L'
	// RecordRegistered says that a region may attach keys to a lease whose record is elsewhere. It
	// lies at the start of the region's span.
	RecordRegistered RecordKind = 'R'
)

// RecordKinds are all of them, ascending.
var RecordKinds = [...]RecordKind{RecordLease, RecordRegistered}

// RecordKey names a record of the system space. Records have no revision and no history. A record
// belongs to the region whose span contains At, so that records are spread, split and moved as
// user keys are.
type RecordKey struct {
	Kind RecordKind
	At   []byte
	ID   int64 // tells records of one kind and place apart
}

// Compare orders keys by kind, place and id.
func (k RecordKey) Compare(o RecordKey) int {
	return cmp.Or(cmp.Compare(k.Kind, o.Kind), bytes.Compare(k.At, o.At), cmp.Compare(uint64(k.ID), uint64(o.ID)))
}

// String prints the key in one line.
func (k RecordKey) String() string { return fmt.Sprintf("%c %q %x", k.Kind, k.At, uint64(k.ID)) }
