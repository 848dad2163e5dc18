package mvcc

import "bytes"

// memRecord is a record of the system space; a nil value in a batch removes it. Values are
// immutable and shared between states.
type memRecord struct {
	key   RecordKey
	value []byte
}

func (r memRecord) less(o memRecord) bool { return r.key.Compare(o.key) < 0 }

func (s *memState) setRecord(r memRecord) {
	if r.value == nil {
		s.records.Delete(r)
	} else {
		s.records.ReplaceOrInsert(r)
	}
}

// spanRecords returns the records of a kind that lie in span.
func (s *memState) spanRecords(kind RecordKind, span Span) []memRecord {
	var all []memRecord
	s.records.AscendGreaterOrEqual(memRecord{key: RecordKey{Kind: kind, At: span.Start}}, func(r memRecord) bool {
		if r.key.Kind != kind || (span.End != nil && bytes.Compare(r.key.At, span.End) >= 0) {
			return false
		}
		all = append(all, r)
		return true
	})
	return all
}

// Attached implements Reader, by looking at every key: the model of what the engine keeps an index
// for.
func (s *MemStore) Attached(leases []int64, span Span, fn func(lease int64, key []byte) bool) error {
	found := make(map[int64][][]byte, len(leases))
	for _, lease := range leases {
		found[lease] = nil
	}
	s.mu.RLock()
	s.live.visit(span, Latest, func(v *Version) bool {
		if keys, ok := found[v.Lease]; ok && !v.Tombstone() {
			found[v.Lease] = append(keys, v.Key)
		}
		return true
	})
	s.mu.RUnlock()
	for _, lease := range leases {
		for _, key := range found[lease] {
			if !fn(lease, key) {
				return nil
			}
		}
	}
	return nil
}

// Record implements Reader.
func (s *MemStore) Record(k RecordKey) ([]byte, bool, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	r, ok := s.live.records.Get(memRecord{key: k})
	return bytes.Clone(r.value), ok, nil
}

// Lookup implements Reader. fn runs without the store's lock and may use the store.
func (s *MemStore) Lookup(keys []RecordKey, fn func(i int, value []byte)) error {
	for i, k := range keys {
		if value, ok, _ := s.Record(k); ok {
			fn(i, value)
		}
	}
	return nil
}

// Records implements Reader. fn runs without the store's lock and may use the store.
func (s *MemStore) Records(kind RecordKind, span Span, fn func(k RecordKey, value []byte) bool) error {
	s.mu.RLock()
	all := s.live.spanRecords(kind, span)
	s.mu.RUnlock()
	for _, r := range all {
		if !fn(r.key, r.value) {
			break
		}
	}
	return nil
}

// Detach implements Batch. What is attached follows from the versions here.
func (b *memBatch) Detach(int64, []byte) error {
	if b.done {
		return ErrBatchDone
	}
	return nil
}

// SetRecord implements Batch.
func (b *memBatch) SetRecord(k RecordKey, value []byte) error {
	if b.done {
		return ErrBatchDone
	}
	k.At = bytes.Clone(k.At)
	if value != nil {
		value = append([]byte{}, value...)
	}
	b.records = append(b.records, memRecord{k, value})
	return nil
}
