// Package orderlog records the committed order of a store for checkers: every request that changed
// something, every beginning and end of a lease, and every compaction, in the order that the cuts gave them, as the write-ahead log of
// an etcd that had executed the same requests one after another. etcd's robustness suite reads
// that file to replay what a store did, and compares watches and old reads with the replay.
//
// It exists for tests. A node writes the record only when a hidden flag asks for it; it costs a
// file write for each applied entry and a question to pd for each batch, and it is never shortened.
//
// The record is made of what replicas apply, not of what watches deliver, so that a fault in the
// way to the watchers cannot hide itself. Its life:
//
//	Open      the journal of earlier lives is read; the log is written anew from it
//	Applied,  a replica is about to apply: what it is told goes into the journal before it can
//	Decided,  become durable in the engine (a kill -9 loses nothing that was written to a file)
//	Compacted
//	Run       once every region of the store is complete through a cut, all that was recorded at
//	          or below it is final: it is sorted (P3), numbered, and appended to the log
//
// The journal is the truth and the log is derived from it. What a replica repeats after a restart
// is recognised by its item (order items are numbered without holes) and skipped. A record that
// would have a hole is not written: a replica that was filled by a snapshot ends the record there,
// and the file stays a prefix of what the other nodes record. Any other hole is an error (ErrHole).
//
// The formats of etcd's log are written by hand (wal.go). etcd's own package would bring its server
// module, and with it process-wide metrics, into the product for the sake of a test.
//
// A Recorder may be used from any goroutine; its state is guarded by one mutex.
package orderlog

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"go.uber.org/zap"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// ErrHole says that the record lacks something that was ordered: the store was used without the
// record, or its order has a hole (I1).
var ErrHole = errors.New("orderlog: the record has a hole")

// Dir is where the record lies below a node's data directory: the place of etcd's own log.
const Dir = "member"

// Config says what a Recorder works for.
type Config struct {
	// DataDir is the node's.
	DataDir string
	// Fresh: the store has applied nothing yet. A record begins with its store.
	Fresh bool
	// Sparse: a region has order items of which the record is not told, those of the placement
	// machine's own commands in a single-group store. Holes show in the revisions only.
	Sparse bool
	// Logger may be nil.
	Logger *zap.Logger
	// Fatal is told what makes the record worthless; the process must stop. It must not block.
	Fatal func(error)
}

// Recorder keeps a node's record.
type Recorder struct {
	log    *zap.Logger
	fatal  func(error)
	sparse bool
	wake   chan struct{} // holds at most one: there is something new

	mu      sync.Mutex // guards all below
	journal *journal
	wal     *walWriter
	merge   merger
	regions map[pdpb.RegionID]place
	newest  pdpb.Cut // of anything recorded
	written pdpb.Cut // everything at or below it is in the log
	events  place    // the newest event of pd
	applied pdpb.Cut // cuts that this node's member of pd has applied, as far as it was told
	ended   bool     // by a snapshot
	failed  bool
}

// place is where a region's record ends: within an item, entries come before decisions (P3).
type place struct {
	item  uint64
	phase phase
	ord   uint64
}

func (p place) before(o place) bool {
	if p.item != o.item {
		return p.item < o.item
	}
	if p.phase != o.phase {
		return p.phase < o.phase
	}
	return p.ord < o.ord
}

// Open continues the record in a data directory, or begins one when the store is fresh.
func Open(cfg Config) (*Recorder, error) {
	r := &Recorder{log: cfg.Logger, fatal: cfg.Fatal, sparse: cfg.Sparse, wake: make(chan struct{}, 1), regions: map[pdpb.RegionID]place{}}
	if r.log == nil {
		r.log = zap.NewNop()
	}
	r.merge.last = 1 // a fresh store
	dir := filepath.Join(cfg.DataDir, Dir)
	if err := os.MkdirAll(filepath.Join(dir, "wal"), 0o700); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "order.journal")
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) && !cfg.Fresh {
		return nil, fmt.Errorf("%w: the store in %s was used without it; it can only begin with a new store", ErrHole, cfg.DataDir)
	}
	var err error
	if r.wal, err = createWAL(filepath.Join(dir, "wal")); err != nil {
		return nil, err
	}
	if r.journal, err = openJournal(path, r.replay); err != nil {
		return nil, errors.Join(err, r.wal.close())
	}
	if err := r.writeThrough(r.written); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	r.poke()
	return r, nil
}

// replay takes a frame of an earlier life.
func (r *Recorder) replay(f *frame) error {
	switch f.kind {
	case frameRegion:
		r.regions[f.region] = f.at
		r.add(f)
	case frameEvent:
		r.events = f.at
		r.add(f)
	case frameWritten:
		r.written = f.cut
	case frameEnded:
		r.ended = true
	}
	return nil
}

func (r *Recorder) add(f *frame) {
	r.newest = max(r.newest, f.cut)
	r.merge.add(f)
}

// Applied records an entry of a region at its place in the order: what Observer.Applied is told.
func (r *Recorder) Applied(id pdpb.RegionID, index uint64, it *pdpb.Item, e *regionpb.Entry, rev mvcc.Revision, void bool) {
	f := frame{kind: frameRegion, region: id, cut: it.Cut, at: place{it.N, phaseEntries, index}}
	if !void {
		for i := range e.Commands {
			if c := &e.Commands[i]; len(c.Effects) > 0 {
				rev++
			}
			f.take(e.Commands[i].Effects, nil, e.Commands[i].Records, rev)
		}
	}
	r.record(&f)
}

// Decided records the end of an attempt over several regions: what Observer.Decided is told.
func (r *Recorder) Decided(id pdpb.RegionID, it *pdpb.Item, p *regionpb.Prepared, d pdpb.Decision) {
	f := frame{kind: frameRegion, region: id, cut: it.Cut, at: place{it.N, phaseDecisions, uint64(d.Attempt)}}
	if d.Commit {
		f.at.phase = phaseCommits // pd numbers them by attempt
		f.take(p.Effects, p.Subs, p.Records, d.Rev)
	}
	r.record(&f)
}

// Compacted records a compaction that pd accepted as the n-th event of a cut.
func (r *Recorder) Compacted(cut pdpb.Cut, n int, rev mvcc.Revision) {
	r.record(&frame{kind: frameEvent, cut: cut, at: place{uint64(cut), phaseEvents, uint64(n)}, requests: []request{{kind: kindCompaction, compact: rev}}})
}

// record puts a frame into the journal, unless an earlier life did.
func (r *Recorder) record(f *frame) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended || r.failed {
		return
	}
	last := r.events
	if f.kind == frameRegion {
		last = r.regions[f.region]
	}
	if !last.before(f.at) {
		return
	}
	if f.kind == frameRegion && f.at.item > last.item+1 && !r.sparse {
		r.fail(fmt.Errorf("%w: item %d of region %d follows item %d", ErrHole, f.at.item, f.region, last.item))
		return
	}
	err := f.err
	if err == nil {
		err = r.journal.append(f)
	}
	if err != nil {
		r.fail(fmt.Errorf("orderlog: %w", err))
		return
	}
	if f.kind == frameRegion {
		r.regions[f.region] = f.at
	} else {
		r.events = f.at
	}
	f.own()
	r.add(f)
	r.poke()
}

// Installed ends the record: a snapshot replaced a region's state, or pd's, and what was ordered
// in between is not known here.
func (r *Recorder) Installed(what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended || r.failed {
		return
	}
	r.ended = true
	if err := r.journal.append(&frame{kind: frameEnded}); err != nil {
		r.fail(fmt.Errorf("orderlog: %w", err))
		return
	}
	r.log.Warn("the record of the committed order ends here: a snapshot came instead of entries", zap.String("of", what))
}

// PDApplied tells that this node's member of pd has applied a cut and that its events, if any,
// were recorded. Cuts are numbered without holes; one that is missing came in a snapshot.
func (r *Recorder) PDApplied(cut pdpb.Cut) {
	r.mu.Lock()
	hole := cut > r.applied && cut-r.applied > 1
	r.applied = max(r.applied, cut)
	r.mu.Unlock()
	if hole {
		r.Installed("the placement group")
	}
	r.poke()
}

// PDStarted tells what this node's member of pd had applied in earlier lives.
func (r *Recorder) PDStarted(cut pdpb.Cut) {
	r.mu.Lock()
	r.applied = max(r.applied, cut)
	r.mu.Unlock()
}

func (r *Recorder) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// fail is called with mu held.
func (r *Recorder) fail(err error) {
	r.failed = true
	r.fatal(err)
}

// Run writes the log until ctx ends. complete must return once every region of the store is
// complete here through the cut; its error, unless ctx has ended, is fatal.
func (r *Recorder) Run(ctx context.Context, complete func(context.Context, pdpb.Cut) error) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		}
		r.mu.Lock()
		through, done := min(r.newest, r.applied), r.written
		r.mu.Unlock()
		if through <= done {
			continue // the next cut of pd, or record, wakes it again
		}
		if err := complete(ctx, through); err != nil {
			if ctx.Err() == nil {
				r.mu.Lock()
				r.fail(fmt.Errorf("the record of the committed order cannot go on at cut %d: %w", through, err))
				r.mu.Unlock()
			}
			return
		}
		r.mu.Lock()
		if !r.ended && !r.failed {
			if err := r.advance(through); err != nil {
				r.fail(err)
			}
		}
		r.mu.Unlock()
	}
}

// advance is called with mu held.
func (r *Recorder) advance(through pdpb.Cut) error {
	if err := r.writeThrough(through); err != nil {
		return err
	}
	r.written = through
	return r.journal.append(&frame{kind: frameWritten, cut: through})
}

func (r *Recorder) writeThrough(cut pdpb.Cut) error {
	requests, err := r.merge.through(cut)
	if err != nil {
		return err
	}
	return r.wal.append(requests)
}

// Close closes the files. Nothing may be recorded after it, and Run must have returned.
func (r *Recorder) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = true
	return errors.Join(r.journal.close(), r.wal.close())
}
