package mvcc

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/google/btree"
)

// ErrSlotTaken says that a batch writes an event at a (revision, sub) that belongs to another
// key (R1). Two transactions were given one revision: the store must stop, not overwrite.
var ErrSlotTaken = errors.New("mvcc: revision slot is taken by another key")

// ErrBatchDone says that a batch was used after Commit or Close.
var ErrBatchDone = errors.New("mvcc: batch is already committed or closed")

// MemStore is a Store in memory: the plainest implementation of the contract, kept as the model
// that the engine is compared with and as the engine of the simulator, which creates, flushes and
// crashes thousands of them. It has the engine's durability, without a disk: a batch is visible
// at once and survives Crash only after Flush.
//
// State lives in copy-on-write trees, so that Flush, Crash and an import are O(1) in the amount
// of data. All methods may be called from any goroutine; mu guards everything.
type MemStore struct {
	mu   sync.RWMutex
	live memState // visible
	disk memState // what Crash returns to
}

// memState is one state of the store. Versions are immutable and shared between states.
type memState struct {
	versions  *btree.BTreeG[*Version] // by key, then newest first
	events    *btree.BTreeG[*Version] // by (Mod, Sub): the revision index
	records   *btree.BTreeG[memRecord]
	positions map[uint64][]byte // never mutated in place once shared; see batch commit
	logical   int64             // sum of LogicalSize over versions
}

// memDegree is the fan-out of the trees: small, because a write after a Flush copies the nodes on
// its path.
const memDegree = 16

// NewMemStore returns an empty store.
func NewMemStore() *MemStore {
	s := &MemStore{live: memState{
		versions:  btree.NewG(memDegree, versionLess),
		events:    btree.NewG(memDegree, eventLess),
		records:   btree.NewG(memDegree, memRecord.less),
		positions: map[uint64][]byte{},
	}}
	s.disk = s.live.clone()
	return s
}

func versionLess(a, b *Version) bool {
	if c := bytes.Compare(a.Key, b.Key); c != 0 {
		return c < 0
	}
	return a.Mod > b.Mod
}

func eventLess(a, b *Version) bool {
	if a.Mod != b.Mod {
		return a.Mod < b.Mod
	}
	return a.Sub < b.Sub
}

func (s *memState) clone() memState {
	return memState{versions: s.versions.Clone(), events: s.events.Clone(), records: s.records.Clone(),
		positions: maps.Clone(s.positions), logical: s.logical}
}

// put adds a version and its index record. It reports a slot that belongs to another key.
func (s *memState) put(v *Version) error {
	if old, ok := s.events.Get(v); ok && !bytes.Equal(old.Key, v.Key) {
		return fmt.Errorf("%w: revision %d.%d holds %q, wanted by %q", ErrSlotTaken, v.Mod, v.Sub, old.Key, v.Key)
	}
	if old, ok := s.versions.ReplaceOrInsert(v); ok {
		s.logical -= old.LogicalSize()
		s.events.Delete(old) // a rewrite may move the event within its revision
	}
	s.events.ReplaceOrInsert(v)
	s.logical += v.LogicalSize()
	return nil
}

func (s *memState) remove(v *Version) {
	if old, ok := s.versions.Delete(v); ok {
		s.events.Delete(old)
		s.logical -= old.LogicalSize()
	}
}

// visit calls fn with the newest version <= at of each key of span, tombstones included.
func (s *memState) visit(span Span, at Revision, fn func(v *Version) bool) {
	var done *Version // whose key needs no further version
	s.versions.AscendGreaterOrEqual(&Version{Key: span.Start, Mod: Latest}, func(v *Version) bool {
		if span.End != nil && bytes.Compare(v.Key, span.End) >= 0 {
			return false
		}
		if v.Mod > at || (done != nil && bytes.Equal(done.Key, v.Key)) {
			return true
		}
		done = v
		return fn(v)
	})
}

// spanVersions returns every version of span, by key and newest first.
func (s *memState) spanVersions(span Span) []*Version {
	var all []*Version
	s.versions.AscendGreaterOrEqual(&Version{Key: span.Start, Mod: Latest}, func(v *Version) bool {
		if span.End != nil && bytes.Compare(v.Key, span.End) >= 0 {
			return false
		}
		all = append(all, v)
		return true
	})
	return all
}

// Get implements Reader.
func (s *MemStore) Get(key []byte, at Revision) (Version, bool, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var found *Version
	s.live.versions.AscendGreaterOrEqual(&Version{Key: key, Mod: at}, func(v *Version) bool {
		if bytes.Equal(v.Key, key) {
			found = v
		}
		return false
	})
	if found == nil {
		return Version{}, false, nil
	}
	return *found.clone(), true, nil
}

// Scan implements Reader. fn runs without the store's lock and may use the store.
func (s *MemStore) Scan(span Span, at Revision, opts ScanOptions, fn func(v *Version) bool) error {
	var found []*Version
	s.mu.RLock()
	s.live.visit(span, at, func(v *Version) bool {
		if !v.Tombstone() {
			found = append(found, v)
		}
		return true
	})
	s.mu.RUnlock()
	for _, v := range found {
		c := *v
		if opts.KeysOnly {
			c.Value = nil
		}
		if !fn(&c) {
			return nil
		}
	}
	return nil
}

// Count implements Reader.
func (s *MemStore) Count(span Span, at Revision) (int64, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var n int64
	s.live.visit(span, at, func(v *Version) bool {
		if !v.Tombstone() {
			n++
		}
		return true
	})
	return n, nil
}

// Positions returns the visible position of every group.
func (s *MemStore) Positions() map[uint64][]byte {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return maps.Clone(s.live.positions)
}

// Position returns the visible position of a group.
func (s *MemStore) Position(group uint64) ([]byte, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	p, ok := s.live.positions[group]
	return p, ok
}

// DurablePosition returns the position of a group that a crash would come back to (D6).
func (s *MemStore) DurablePosition(group uint64) ([]byte, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	p, ok := s.disk.positions[group]
	return p, ok
}

// LogicalBytes is the sum of LogicalSize over all versions.
func (s *MemStore) LogicalBytes() int64 {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.live.logical
}

// Flush makes everything visible durable.
func (s *MemStore) Flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.disk = s.live.clone()
}

// Crash returns what a restart after a crash finds: the state at the last Flush, whole batches
// only. The old store stays usable by whoever still holds it, and shares nothing mutable.
func (s *MemStore) Crash() *MemStore {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &MemStore{live: s.disk.clone(), disk: s.disk.clone()}
}

// NewBatch implements Store.
func (s *MemStore) NewBatch() Batch { return &memBatch{s: s} }

// memBatch collects writes; it belongs to one goroutine until Commit.
type memBatch struct {
	s         *MemStore
	versions  []*Version
	records   []memRecord
	positions map[uint64][]byte
	done      bool
}

func (b *memBatch) Put(v *Version) error {
	if b.done {
		return ErrBatchDone
	}
	if err := v.Check(); err != nil {
		return err
	}
	b.versions = append(b.versions, v.clone())
	return nil
}

func (b *memBatch) SetPosition(group uint64, position []byte) error {
	if b.done {
		return ErrBatchDone
	}
	if b.positions == nil {
		b.positions = make(map[uint64][]byte, 1)
	}
	b.positions[group] = append([]byte{}, position...)
	return nil
}

// Commit makes the batch visible. After ErrSlotTaken a part of it may be; the caller stops then.
func (b *memBatch) Commit() error {
	if b.done {
		return ErrBatchDone
	}
	b.done = true
	b.s.mu.Lock()
	defer b.s.mu.Unlock()
	for _, v := range b.versions {
		if err := b.s.live.put(v); err != nil {
			return err
		}
	}
	for _, r := range b.records {
		b.s.live.setRecord(r)
	}
	maps.Copy(b.s.live.positions, b.positions)
	return nil
}

func (b *memBatch) Close() error {
	b.done = true
	b.versions, b.records, b.positions = nil, nil, nil
	return nil
}

// String prints the visible state, one version a line, then the records and the positions.
func (s *MemStore) String() string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var b bytes.Buffer
	s.live.versions.Ascend(func(v *Version) bool {
		fmt.Fprintln(&b, v)
		return true
	})
	s.live.records.Ascend(func(r memRecord) bool {
		fmt.Fprintf(&b, "record %v: %q\n", r.key, r.value)
		return true
	})
	for _, g := range slices.Sorted(maps.Keys(s.live.positions)) {
		fmt.Fprintf(&b, "position %d: %q\n", g, s.live.positions[g])
	}
	return b.String()
}
