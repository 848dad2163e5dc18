package engine

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
)

// Positions returns the visible position of every group. After Open it tells which replicas the
// store holds.
func (e *Engine) Positions() (map[uint64][]byte, error) { return positions(e.src, false) }

// DurablePositions returns what Positions would return after a crash now. Everything at or below
// these positions is in tables that are synced and named by the manifest: the logs may be cut
// there (D6).
func (e *Engine) DurablePositions() (map[uint64][]byte, error) { return positions(e.src, true) }

// Position returns the visible position of a group.
func (r reader) Position(group uint64) ([]byte, bool, error) { return position(r.src, group, false) }

// DurablePosition returns the position of a group that a crash now would come back to.
func (e *Engine) DurablePosition(group uint64) ([]byte, bool, error) {
	return position(e.src, group, true)
}

func positions(src source, durable bool) (all map[uint64][]byte, err error) {
	it, err := src.newIter(&pebble.IterOptions{LowerBound: []byte{spacePosition},
		UpperBound: []byte{spacePosition + 1}, OnlyReadGuaranteedDurable: durable})
	if err != nil {
		return nil, fmt.Errorf("engine: positions: %w", err)
	}
	all = make(map[uint64][]byte)
	for ok := it.First(); ok && err == nil; ok = it.Next() {
		var group uint64
		var p []byte
		if group, err = decodePositionKey(it.Key()); err == nil {
			p, err = positionValue(it)
			all[group] = p
		}
	}
	if err = errors.Join(err, it.Close()); err != nil {
		return nil, fmt.Errorf("engine: positions: %w", err)
	}
	return all, nil
}

func position(src source, group uint64, durable bool) (p []byte, ok bool, err error) {
	it, err := src.newIter(&pebble.IterOptions{OnlyReadGuaranteedDurable: durable})
	if err == nil {
		if ok = it.SeekPrefixGE(appendPositionKey(nil, group)); ok {
			p, err = positionValue(it)
		}
		err = errors.Join(err, it.Close())
	}
	if err != nil {
		return nil, false, fmt.Errorf("engine: position of group %d: %w", group, err)
	}
	return p, ok, nil
}

// positionValue copies the position that the iterator is on.
func positionValue(it *pebble.Iterator) ([]byte, error) {
	enc, err := it.ValueAndErr()
	if err != nil {
		return nil, err
	}
	p, err := decodePlain(enc)
	return append([]byte{}, p...), err
}

// raise lifts a maximum.
func raise(a *atomic.Int64, x int64) {
	for {
		old := a.Load()
		if old >= x || a.CompareAndSwap(old, x) {
			return
		}
	}
}
