package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"braid/mvcc"
)

// Import takes in the stream of one span. Its life: NewImport, Write until the stream ends,
// Install while the group is parked, Close. Until Install nothing of it is visible; tables lie in
// a folder of their own, which Close (or the next Open) removes. It belongs to one goroutine.
type Import struct {
	e     *Engine
	group uint64
	span  mvcc.Span
	dir   string

	in    streamReader
	data  tables // versions
	fresh follow // what follows from them, and records of the system space
	err   error  // sticky

	last     []byte // last key taken
	scratch  []byte
	totals   spanTotals // of the new versions
	maxMod   int64
	versions int64

	// Tests leave out a step of D3 to see a crash find it, and act just before the ingest.
	skipLastFlush bool
	beforeIngest  func()
}

// NewImport prepares to replace span, and the position of group, by a stream of the same span.
func (e *Engine) NewImport(group uint64, span mvcc.Span) (*Import, error) {
	if span.Empty() {
		return nil, fmt.Errorf("engine: import of empty span %v", span)
	}
	i := &Import{e: e, group: group, span: span}
	i.dir = e.o.FS.PathJoin(e.o.Dir, fmt.Sprintf("%s%d-%d", importPrefix, group, e.importSeq.Add(1)))
	if err := e.o.FS.MkdirAll(i.dir, 0o755); err != nil {
		return nil, fmt.Errorf("engine: import: %w", err)
	}
	i.in.head, i.in.add = i.checkSpan, i.add
	i.data = i.newTables("data")
	i.fresh = i.newFollow("fresh", slotSortBytes)
	return i, nil
}

func (i *Import) newTables(kind string) tables {
	fs := i.e.o.FS
	return tables{fs: fs, popt: i.e.popt, format: i.e.db.TableFormat(), max: tableBytesMax,
		name: func(n int) string { return fs.PathJoin(i.dir, fmt.Sprintf("%s-%d.sst", kind, n)) }}
}

// follow collects the parts of a state that are not in the order of versions: the revision index,
// the index of leases, and records of the system space.
type follow struct {
	index, leases, records slotSorter
	key                    []byte // last one whose newest version was met
}

func (i *Import) newFollow(kind string, bytesMax int64) follow {
	sorter := func(what string) slotSorter {
		return slotSorter{t: i.newTables(kind + "-" + what), bytesMax: bytesMax}
	}
	return follow{index: sorter("index"), leases: sorter("leases"), records: sorter("records")}
}

func (f *follow) setBytesMax(n int64) {
	f.index.bytesMax, f.leases.bytesMax, f.records.bytesMax = n, n, n
}

// version takes a version; those of a key come newest first.
func (f *follow) version(v *mvcc.Version) error {
	newest := f.key == nil || !bytes.Equal(f.key, v.Key)
	f.key = append(f.key[:0], v.Key...)
	if newest && v.Lease != 0 {
		if err := f.leases.add(appendLeaseKey(nil, v.Lease, v.Key), []byte{plain1}); err != nil {
			return err
		}
	}
	return f.index.add(appendIndexKey(nil, v.Mod, v.Sub), append([]byte{plain1}, v.Key...))
}

// Write takes a part of the stream. After an error the import is of no more use.
func (i *Import) Write(p []byte) (int, error) {
	if i.err == nil {
		i.err = i.in.write(p)
	}
	if i.err != nil {
		return 0, fmt.Errorf("engine: import %v: %w", i.span, i.err)
	}
	return len(p), nil
}

func (i *Import) checkSpan(s mvcc.Span) error {
	if !s.Covers(i.span) || !i.span.Covers(s) {
		return fmt.Errorf("%w: it holds %v", ErrStream, s)
	}
	return nil
}

// add stages one version.
func (i *Import) add(key, value []byte) error {
	if bytes.Compare(key, i.last) <= 0 {
		return fmt.Errorf("%w: %v after %v", ErrStream, prettyKey(key), prettyKey(i.last))
	}
	i.last = append(i.last[:0], key...)
	if key[0] == spaceSystem {
		k, err := decodeRecordKey(key)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStream, err)
		}
		if !i.span.Contains(k.At) {
			return fmt.Errorf("%w: record %v lies outside", ErrStream, k)
		}
		return i.fresh.records.add(key, value)
	}
	var v mvcc.Version
	var err error
	if v.Key, v.Mod, i.scratch, err = decodeVersionKey(key, i.scratch); err != nil {
		return fmt.Errorf("%w: %w", ErrStream, err)
	}
	if err := decodeValue(value, &v); err != nil {
		return fmt.Errorf("%w: %w", ErrStream, err)
	}
	if err := v.Check(); err != nil {
		return fmt.Errorf("%w: %w", ErrStream, err)
	}
	if !i.span.Contains(v.Key) {
		return fmt.Errorf("%w: key %q lies outside", ErrStream, v.Key)
	}
	i.versions++
	i.totals.add(&v)
	i.maxMod = max(i.maxMod, int64(v.Mod))
	if err := i.data.set(key, value); err != nil {
		return err
	}
	return i.fresh.version(&v)
}

// Install replaces the span's versions and index records and the group's position in one step, and
// returns when that is durable. Before it, the span's old state is untouched; a crash inside
// leaves the old state or the new one, never a mixture. The group must be parked: no batch of it
// may commit from before Install until it returns. Collections of the span are voided.
//
// Rule D3, and why. Without a log Pebble makes an ingest durable at once, ahead of earlier
// batches, when it overlaps no memtable; and only queues it in memory when it does (A7). So the
// engine is flushed before: what the ingest must not overtake is on disk. It is flushed after, and
// the position is read back from durable state only: the caller resets its log on that word.
func (i *Import) Install(position []byte) error {
	if i.err == nil && !i.in.done() {
		i.err = fmt.Errorf("%w: cut short after %d versions", ErrStream, i.versions)
	}
	if i.err == nil {
		i.e.installs.begin(i.span)
		i.err = i.install(position)
		i.e.installs.end(i.span)
	}
	if i.err != nil {
		return fmt.Errorf("engine: install %v for group %d: %w", i.span, i.group, i.err)
	}
	i.err = errors.New("already installed")
	return nil
}

func (i *Import) install(position []byte) error {
	e := i.e
	if err := i.data.closeTable(); err != nil {
		return err
	}
	if err := e.Flush(); err != nil {
		return err
	}
	rest := i.newTables("rest")
	delta, err := i.stageRest(&rest, position)
	if err != nil {
		return err
	}
	if i.beforeIngest != nil {
		i.beforeIngest()
	}
	// Visible slots are looked up from the moment they are visible.
	raise(&e.maxMod, i.maxMod)
	span := pebble.KeyRange{Start: appendUserLower(nil, i.span), End: appendUserUpper(nil, i.span)}
	paths := append(append([]string{}, rest.paths...), i.data.paths...)
	if _, err := e.db.IngestAndExcise(context.Background(), paths, nil, nil, span); err != nil {
		return err
	}
	e.count(delta)
	if i.skipLastFlush {
		return nil
	}
	if err := e.Flush(); err != nil {
		return err
	}
	durable, ok, err := e.DurablePosition(i.group)
	if err != nil {
		return err
	}
	if !ok || !bytes.Equal(durable, position) {
		return errors.New("position is not durable after a flush")
	}
	return nil
}

// stageRest stages all but the versions: the change of the totals, the position, the records of the
// system space, and what follows from the versions (R3): what is new, and the removal of what was
// there before. It returns the change of the totals.
func (i *Import) stageRest(t *tables, position []byte) (delta totals, err error) {
	defer func() { err = errors.Join(err, t.closeTable()) }()
	stale := i.newFollow("stale", i.fresh.index.bytesMax)
	var old spanTotals
	var v mvcc.Version
	err = i.e.eachVersion(i.span, func(key, value []byte) error {
		if v.Key, v.Mod, i.scratch, err = decodeVersionKey(key, i.scratch); err != nil {
			return err
		}
		if err := decodeValue(value, &v); err != nil {
			return err
		}
		old.add(&v)
		return stale.version(&v)
	})
	for _, kind := range mvcc.RecordKinds {
		if err == nil {
			err = i.e.eachRecord(kind, i.span, func(key, value []byte) (bool, error) { return true, stale.records.add(key, nil) })
		}
	}
	if err != nil {
		return totals{}, err
	}
	// In the order of the spaces.
	if err := mergeSlots(t, &i.fresh.leases, &stale.leases); err != nil {
		return totals{}, err
	}
	delta = i.totals.totals
	delta.subtract(old.totals)
	if err := t.merge(keyTotals, appendSum(nil, delta)); err != nil {
		return totals{}, err
	}
	pos := append([]byte{plain1}, position...)
	if err := t.set(appendPositionKey(nil, i.group), pos); err != nil {
		return totals{}, err
	}
	if err := mergeSlots(t, &i.fresh.index, &stale.index); err != nil {
		return totals{}, err
	}
	return delta, mergeSlots(t, &i.fresh.records, &stale.records)
}

// mergeSlots writes the fresh records, and the removal of stale ones that are not fresh.
func mergeSlots(t *tables, fresh, stale *slotSorter) (err error) {
	f, err := fresh.iterate()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	s, err := stale.iterate()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	fp, fok, err := f.next()
	if err != nil {
		return err
	}
	sp, sok, err := s.next()
	if err != nil {
		return err
	}
	for fok || sok {
		c := bytes.Compare(fp.key, sp.key)
		takeFresh := fok && (!sok || c <= 0)
		dropStale := sok && (!fok || c >= 0)
		if takeFresh {
			err = t.set(fp.key, fp.value)
		} else {
			err = t.delete(sp.key)
		}
		if err == nil && takeFresh {
			fp, fok, err = f.next()
		}
		if err == nil && dropStale {
			sp, sok, err = s.next()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Close removes what was staged. Installed tables have links of their own.
func (i *Import) Close() error {
	err := i.data.closeTable()
	if i.err == nil {
		i.err = errors.New("closed")
	}
	if err = errors.Join(err, i.e.o.FS.RemoveAll(i.dir)); err != nil {
		return fmt.Errorf("engine: import: %w", err)
	}
	return nil
}
