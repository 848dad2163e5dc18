// Package mvcc defines the revisioned state of a store: what a revision, a span and a version
// are, how state is read at a revision and written by batches, and the overlay through which a
// leader sees effects that have no revision yet. mvcc/engine implements Store over Pebble.
//
// The package knows nothing of raft, the network or clocks.
package mvcc

import (
	"bytes"
	"context"
	"fmt"
	"math"
)

// Revision counts the writing transactions of the whole store. A fresh store is at 1.
type Revision int64

// Latest reads the newest applied version, whatever its revision.
const Latest Revision = math.MaxInt64

// Span is the half-open range [Start, End) of user keys. A nil End means "no upper bound"; an
// empty non-nil End is an empty span. A nil or empty Start is the smallest key (the empty key).
type Span struct{ Start, End []byte }

// Key returns the span that holds exactly key.
func Key(key []byte) Span {
	return Span{Start: key, End: append(append(make([]byte, 0, len(key)+1), key...), 0)}
}

// Single returns the key of a span that can hold only one.
func (s Span) Single() (key []byte, ok bool) {
	n := len(s.Start)
	if len(s.End) != n+1 || s.End[n] != 0 || !bytes.Equal(s.Start, s.End[:n]) {
		return nil, false
	}
	return s.Start, true
}

// Contains says whether key lies in the span.
func (s Span) Contains(key []byte) bool {
	return bytes.Compare(key, s.Start) >= 0 && (s.End == nil || bytes.Compare(key, s.End) < 0)
}

// Empty says whether no key can lie in the span.
func (s Span) Empty() bool { return s.End != nil && bytes.Compare(s.Start, s.End) >= 0 }

// Intersect returns the keys that lie in both spans.
func (s Span) Intersect(o Span) Span {
	r := s
	if bytes.Compare(o.Start, r.Start) > 0 {
		r.Start = o.Start
	}
	if r.End == nil || (o.End != nil && bytes.Compare(o.End, r.End) < 0) {
		r.End = o.End
	}
	return r
}

// Covers says whether every key of o lies in s.
func (s Span) Covers(o Span) bool {
	if o.Empty() {
		return true
	}
	return bytes.Compare(o.Start, s.Start) >= 0 && (s.End == nil || (o.End != nil && bytes.Compare(o.End, s.End) <= 0))
}

// String prints the span in one line.
func (s Span) String() string {
	if s.End == nil {
		return fmt.Sprintf("[%q,+inf)", s.Start)
	}
	return fmt.Sprintf("[%q,%q)", s.Start, s.End)
}

// Version is one version of one key. A tombstone has Version 0 and only Key, Mod and Sub set.
type Version struct {
	Key     []byte
	Mod     Revision // the transaction that wrote it
	Sub     int64    // position among the events of Mod, from 0
	Create  Revision // Mod of the version that created the key
	Version int64    // 1 for the creating version; 0 marks a tombstone
	Lease   int64
	Value   []byte
}

// Tombstone says whether the version is a deletion.
func (v *Version) Tombstone() bool { return v.Version == 0 }

// ScanOptions narrow a Scan.
type ScanOptions struct {
	KeysOnly bool // Value is left nil; the other fields are filled in
}

// Reader reads applied versions. All methods may be called from any goroutine. Byte slices
// handed out belong to the caller for Get, and are valid only during the call for Scan.
type Reader interface {
	// Get returns the newest version of key with Mod <= at, a tombstone included; false when
	// there is none.
	Get(key []byte, at Revision) (Version, bool, error)
	// Scan calls fn with each key of span that is alive at the revision, in key order, until fn
	// returns false.
	Scan(span Span, at Revision, opts ScanOptions, fn func(v *Version) bool) error
	// Count returns the number of keys of span that are alive at the revision.
	Count(span Span, at Revision) (int64, error)
	// Attached calls fn with each key of span whose newest version names one of some leases, lease
	// after lease as they are given, each with its keys in order, until fn returns false. It is
	// quickest when ids ascend.
	Attached(leases []int64, span Span, fn func(lease int64, key []byte) bool) error
	// Events calls fn with every event of span whose revision lies in [from, to], both ends
	// included, in (Mod, Sub) order, from one state. `from` must not lie below the span's floor:
	// events there are partly gone. The slices are valid during the call.
	Events(ctx context.Context, from, to Revision, span Span, fn func(v *Version) error) error
	// Record returns a record of the system space, false when there is none.
	Record(k RecordKey) ([]byte, bool, error)
	// Lookup calls fn with each of some records that is there, by its place in keys, in their order.
	Lookup(keys []RecordKey, fn func(i int, value []byte)) error
	// Records calls fn with each record of a kind that lies in span, in order, until fn returns
	// false.
	Records(kind RecordKind, span Span, fn func(k RecordKey, value []byte) bool) error
}

// Batch is a set of writes that becomes visible, and later durable, as one.
type Batch interface {
	// Put adds a version (or tombstone) and its revision-index record. The slices are copied.
	// A version with a lease attaches its key to it.
	Put(v *Version) error
	// Detach says that the newest version of key, which this batch writes, does not name the lease
	// that the one before named.
	Detach(lease int64, key []byte) error
	// SetRecord writes a record of the system space; a nil value removes it. The slices are copied.
	SetRecord(k RecordKey, value []byte) error
	// SetPosition records the opaque applied position of a group.
	SetPosition(group uint64, position []byte) error
	// Commit makes the batch visible to readers. It does not make it durable: the raft log does.
	Commit() error
	// Close releases a batch; it must be called once, after Commit or instead of it.
	Close() error
}

// Store is the state of all replicas of one node.
type Store interface {
	Reader
	NewBatch() Batch
}
