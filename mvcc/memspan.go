package mvcc

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"slices"
)

// GCStats says what one collection did.
type GCStats struct {
	Visited  int64 // revision index records looked at
	Removed  int64 // versions removed, tombstones included
	Bytes    int64 // LogicalSize of what was removed
	Complete bool  // the walk reached its end
}

// MemSpan is the content of a span at one moment, as a Go value: what a region snapshot is to the
// simulator. It is immutable.
type MemSpan struct {
	Span     Span
	versions []*Version
	records  []memRecord
	bare     bool // without index records
}

// WithoutIndex is the same state as rule R2 forbids it to travel: its revisions have no index
// records. For tests that show that this is noticed.
func (m *MemSpan) WithoutIndex() *MemSpan {
	return &MemSpan{Span: m.Span, versions: m.versions, records: m.records, bare: true}
}

// All yields the versions by key, newest first. They must not be changed.
func (m *MemSpan) All() iter.Seq[*Version] { return slices.Values(m.versions) }

// Len is the number of versions.
func (m *MemSpan) Len() int { return len(m.versions) }

// ExportSpan pins every version of span together with the visible position of a group.
func (s *MemStore) ExportSpan(group uint64, span Span) (data *MemSpan, position []byte) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	data = &MemSpan{Span: span, versions: s.live.spanVersions(span)}
	for _, kind := range RecordKinds {
		data.records = append(data.records, s.live.spanRecords(kind, span)...)
	}
	return data, s.live.positions[group]
}

// ImportKind says how an import behaves towards a crash. Pebble has both behaviours without its
// log, and which one strikes depends on whether the import overlaps a memtable (A7); rule D3 is
// safe under either.
type ImportKind int

const (
	// ImportVolatile leaves the import in memory: a crash before the next Flush loses it.
	ImportVolatile ImportKind = iota
	// ImportAhead makes the import durable at once, ahead of earlier batches that are not.
	ImportAhead
)

// ImportSpan replaces a span and a group's position in one step. Only Flush, ImportSpan, Flush is
// the order that rule D3 allows; InstallSpan does that.
func (s *MemStore) ImportSpan(group uint64, data *MemSpan, position []byte, kind ImportKind) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.live.replace(group, data, position); err != nil {
		return err
	}
	if kind == ImportAhead {
		return s.disk.replace(group, data, position)
	}
	return nil
}

// InstallSpan replaces a span and a group's position durably, as rule D3 demands: what was
// applied before is flushed first, and the import is durable when InstallSpan returns.
func (s *MemStore) InstallSpan(group uint64, data *MemSpan, position []byte) error {
	s.Flush()
	if err := s.ImportSpan(group, data, position, ImportVolatile); err != nil {
		return err
	}
	s.Flush()
	return nil
}

func (s *memState) replace(group uint64, data *MemSpan, position []byte) error {
	for _, v := range s.spanVersions(data.Span) {
		s.remove(v)
	}
	for _, v := range data.versions {
		if err := s.put(v); err != nil {
			return err
		}
		if data.bare {
			s.events.Delete(v)
		}
	}
	for _, kind := range RecordKinds {
		for _, r := range s.spanRecords(kind, data.Span) {
			s.records.Delete(r)
		}
	}
	for _, r := range data.records {
		s.setRecord(r)
	}
	s.positions[group] = append([]byte{}, position...)
	return nil
}

// GC removes the versions of span that a compaction at `to` makes unreachable. It keeps, for each
// key, the newest version <= to, unless that is a tombstone below `to`; a tombstone exactly at
// `to` stays. `from` is where the last complete collection ended: nothing below it is superseded
// but by a record in [from, to].
func (s *MemStore) GC(span Span, from, to Revision) GCStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := GCStats{Complete: true}
	var dead []*Version
	s.live.events.AscendGreaterOrEqual(&Version{Mod: from}, func(e *Version) bool {
		if e.Mod > to {
			return false
		}
		if !span.Contains(e.Key) {
			return true
		}
		st.Visited++
		first := true
		s.live.versions.AscendGreaterOrEqual(&Version{Key: e.Key, Mod: to}, func(v *Version) bool {
			if !bytes.Equal(v.Key, e.Key) || (first && v.Mod != e.Mod) {
				return false // the walk meets the key again at its newest version <= to
			}
			if !first || (v.Tombstone() && v.Mod < to) {
				dead = append(dead, v)
			}
			first = false
			return true
		})
		return true
	})
	for _, v := range dead {
		st.Removed++
		st.Bytes += v.LogicalSize()
		s.live.remove(v)
	}
	return st
}

// Events implements Reader.
func (s *MemStore) Events(_ context.Context, from, to Revision, span Span, fn func(v *Version) error) error {
	var found []*Version
	s.mu.RLock()
	s.live.events.AscendGreaterOrEqual(&Version{Mod: from}, func(e *Version) bool {
		if e.Mod > to {
			return false
		}
		if span.Contains(e.Key) {
			found = append(found, e)
		}
		return true
	})
	s.mu.RUnlock()
	for _, v := range found {
		if err := fn(v); err != nil {
			return err
		}
	}
	return nil
}

// CheckIndex verifies that the revision index and the versions hold the same events (R3), in the
// visible and in the durable state.
func (s *MemStore) CheckIndex() error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, st := range []*memState{&s.live, &s.disk} {
		if n, m := st.versions.Len(), st.events.Len(); n != m {
			return fmt.Errorf("mvcc: %d versions, %d index records", n, m)
		}
		var err error
		st.versions.Ascend(func(v *Version) bool {
			if e, ok := st.events.Get(v); !ok || e != v {
				err = fmt.Errorf("mvcc: %v has no index record", v)
			}
			return err == nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
