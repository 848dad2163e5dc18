package engine

import (
	"bytes"
	"errors"
	"fmt"
	"sync"

	"github.com/cockroachdb/pebble/v2"

	"braid/mvcc"
)

// batch is one set of writes. It belongs to one goroutine.
//
// A memtable looks for an entry's place from where the entry before went, so that neighbours cost a fraction
// of what others do. A put and its index record are none; so each space has a part of its own.
type batch struct {
	e     *Engine
	b     *pebble.Batch // versions and positions; with Commit all
	parts [partsMax]*pebble.Batch
	done  bool
	delta totals // what the batch changes
	// Slots are (Mod, Sub). Batches are normally written in slot order; only one that is not has
	// to look for a slot it used twice.
	lastMod, lastSub int64
	minMod           int64
	unordered        bool
}

const (
	partIndex = iota
	partLeases
	partRecords
	partsMax
)

// part returns the part of a space.
func (b *batch) part(i int) *pebble.Batch {
	if b.parts[i] == nil {
		b.parts[i] = b.e.db.NewBatch()
	}
	return b.parts[i]
}

// join puts the parts together.
func (b *batch) join() error {
	for _, p := range b.parts {
		if p == nil {
			continue
		}
		if err := b.b.Apply(p, nil); err != nil {
			return fmt.Errorf("engine: batch: %w", err)
		}
	}
	return nil
}

var batches = sync.Pool{New: func() any { return new(batch) }}

// NewBatch implements mvcc.Store.
func (e *Engine) NewBatch() mvcc.Batch {
	b := batches.Get().(*batch)
	*b = batch{e: e, b: e.db.NewBatch()}
	return b
}

// Put implements mvcc.Batch.
func (b *batch) Put(v *mvcc.Version) error {
	if b.done {
		return mvcc.ErrBatchDone
	}
	if err := v.Check(); err != nil {
		return err
	}
	n := versionKeyLen(v.Key)
	op := b.b.SetDeferred(n, valueLen(v))
	putVersionKey(op.Key, v.Key, v.Mod)
	putValue(op.Value, v)
	if err := op.Finish(); err != nil {
		return fmt.Errorf("engine: put %q: %w", v.Key, err)
	}
	op = b.part(partIndex).SetDeferred(indexKeyLen, 1+len(v.Key))
	appendIndexKey(op.Key[:0], v.Mod, v.Sub)
	op.Value[0] = plain1
	copy(op.Value[1:], v.Key)
	if err := op.Finish(); err != nil {
		return fmt.Errorf("engine: put %q: %w", v.Key, err)
	}
	if v.Lease != 0 {
		if err := b.attach(v.Lease, v.Key); err != nil {
			return err
		}
	}
	mod := int64(v.Mod)
	switch {
	case b.lastMod == 0:
		b.minMod = mod
	case mod < b.lastMod || (mod == b.lastMod && v.Sub <= b.lastSub):
		b.unordered = true
		b.minMod = min(b.minMod, mod)
	}
	if mod > b.lastMod || (mod == b.lastMod && v.Sub > b.lastSub) {
		b.lastMod, b.lastSub = mod, v.Sub // the highest slot so far
	}
	b.delta.put(v)
	return nil
}

// SetPosition implements mvcc.Batch.
func (b *batch) SetPosition(group uint64, position []byte) error {
	if b.done {
		return mvcc.ErrBatchDone
	}
	op := b.b.SetDeferred(positionKeyLn, 1+len(position))
	appendPositionKey(op.Key[:0], group)
	op.Value[0] = plain1
	copy(op.Value[1:], position)
	if err := op.Finish(); err != nil {
		return fmt.Errorf("engine: set position of group %d: %w", group, err)
	}
	return nil
}

// Commit implements mvcc.Batch. Nothing of the batch is visible after an error.
func (b *batch) Commit() error {
	if b.done {
		return mvcc.ErrBatchDone
	}
	b.done = true
	if err := b.checkSlots(); err != nil {
		return err
	}
	if err := b.join(); err != nil {
		return err
	}
	return b.e.commit(b.b, b.delta, b.lastMod)
}

// commit applies a Pebble batch together with its change of the totals.
func (e *Engine) commit(b *pebble.Batch, delta totals, maxMod int64) error {
	if delta != (totals{}) {
		if err := b.Merge(keyTotals, appendSum(nil, delta), nil); err != nil {
			return fmt.Errorf("engine: commit: %w", err)
		}
	}
	// Raised before the batch is visible: whoever sees a slot below maxMod looks it up.
	raise(&e.maxMod, maxMod)
	n := int64(b.Len())
	if err := b.Commit(pebble.NoSync); err != nil {
		return fmt.Errorf("engine: commit: %w", err)
	}
	e.count(delta)
	e.wrote(n)
	return nil
}

// Close implements mvcc.Batch.
func (b *batch) Close() error {
	if b.b == nil {
		return mvcc.ErrBatchDone
	}
	err := b.b.Close()
	for _, p := range b.parts {
		if p != nil {
			err = errors.Join(err, p.Close())
		}
	}
	*b = batch{done: true}
	return err
}

// checkSlots enforces R1: a slot of the revision index that belongs to another key is a stop.
// Slots above everything the store has ever seen are free; others are looked up. A slot that
// already holds the same key is a repetition, and does not count twice in the totals.
func (b *batch) checkSlots() (err error) {
	if b.unordered {
		if err := b.checkOwnSlots(); err != nil {
			return err
		}
	}
	maxMod := b.e.maxMod.Load()
	if b.lastMod == 0 || b.minMod > maxMod {
		return nil
	}
	it, err := b.e.db.NewIter(nil)
	if err != nil {
		return fmt.Errorf("engine: %w", err)
	}
	err = b.eachSlot(func(slot, record []byte) error {
		if rev, _, err := decodeIndexKey(slot); err != nil || int64(rev) > maxMod {
			return err
		}
		if !it.SeekPrefixGE(slot) {
			return nil
		}
		old, err := it.ValueAndErr()
		if err != nil {
			return err
		}
		if !bytes.Equal(old, record) {
			return slotTaken(slot, old, record)
		}
		return b.uncount(slot, record)
	})
	if err = errors.Join(err, it.Close()); err != nil {
		return fmt.Errorf("engine: check revision index: %w", err)
	}
	return nil
}

func slotTaken(slot, old, record []byte) error {
	return fmt.Errorf("%w: %v holds %q, wanted by %q", mvcc.ErrSlotTaken, prettyKey(slot), old[1:], record[1:])
}

// uncount takes the version that a repetition overwrites out of the totals.
func (b *batch) uncount(slot, record []byte) error {
	rev, _, err := decodeIndexKey(slot)
	if err != nil {
		return err
	}
	v, ok, err := b.e.Get(record[1:], rev)
	if err == nil && ok && v.Mod == rev {
		var t totals
		t.put(&v)
		b.delta.subtract(t)
	}
	return err
}

// checkOwnSlots finds a slot that the batch itself gives to two keys.
func (b *batch) checkOwnSlots() error {
	seen := make(map[string][]byte)
	return b.eachSlot(func(slot, record []byte) error {
		if old, ok := seen[string(slot)]; ok && !bytes.Equal(old, record) {
			return slotTaken(slot, old, record)
		}
		seen[string(slot)] = record
		return nil
	})
}

// eachSlot calls fn with the index records of the batch, in the order they were put.
func (b *batch) eachSlot(fn func(slot, record []byte) error) error {
	if b.parts[partIndex] == nil {
		return nil
	}
	r := b.parts[partIndex].Reader()
	for {
		_, key, value, ok, err := r.Next()
		if err != nil || !ok {
			return err
		}
		if err := fn(key, value); err != nil {
			return err
		}
	}
}
