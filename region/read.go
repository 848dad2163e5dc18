package region

import (
	"bytes"
	"context"
	"fmt"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// appliedWaiter waits until an item, an index or a cut is applied. Whoever waits does so on its
// own goroutine; apply closes woken.
type appliedWaiter struct {
	item, index uint64
	cut         pdpb.Cut
	rev         mvcc.Revision
	woken       chan struct{}
}

// Read reads the region at a revision (S3). Any goroutine, any replica; it waits, until ctx ends,
// for this replica to be complete through the cut that the request names. Replies are bounded;
// their error is a *regionpb.Error, ctx's, or the engine's.
func (r *Replica) Read(ctx context.Context, req *regionpb.ReadRequest) (*regionpb.ReadResponse, error) {
	if !r.completeFor(req) {
		if err := r.awaitComplete(ctx, req.Cut); err != nil {
			return nil, err
		}
	}
	return r.readNow(req)
}

// TryRead is Read for who cannot wait: NotComplete when this replica is not complete yet.
func (r *Replica) TryRead(req *regionpb.ReadRequest) (*regionpb.ReadResponse, error) {
	if !r.completeFor(req) {
		return nil, regionpb.ErrorOf(regionpb.NotComplete)
	}
	return r.readNow(req)
}

// completeFor says whether everything of this region that was ordered at or before the request's
// cut is applied here: either it has been found so before, or the stream says so for its mark and
// its newest item of then is applied (S2).
func (r *Replica) completeFor(req *regionpb.ReadRequest) bool {
	r.mu.Lock()
	through, item, held := r.mu.through, r.mu.applied.Item, r.mu.wanted-1
	r.mu.Unlock()
	if req.Cut <= through {
		return true
	}
	if r.cfg.Order == nil {
		return false
	}
	if m := r.cfg.Mutants.StoreMark; m != nil {
		return m().Cut >= req.Cut && item >= held
	}
	mark, newest, ok := r.cfg.Order.State(r.id)
	if r.cfg.Mutants.LRevision {
		return ok && mark.Rev >= req.Rev && item >= newest
	}
	return ok && mark.Cut >= req.Cut && item >= newest
}

// awaitComplete waits for what completeFor wants.
func (r *Replica) awaitComplete(ctx context.Context, cut pdpb.Cut) error {
	if r.cfg.Order == nil {
		// Single-group: the cut is this group's own, and applying it is completeness.
		return r.awaitApplied(ctx, appliedWaiter{cut: cut})
	}
	if err := r.cfg.Order.WaitMark(ctx, r.id, cut); err != nil {
		if ctx.Err() != nil {
			return err
		}
		return regionpb.ErrorOf(regionpb.NotComplete) // the stream has stopped
	}
	mark, newest, ok := r.cfg.Order.State(r.id)
	if !ok || mark.Cut < cut {
		return regionpb.ErrorOf(regionpb.NotComplete) // unsubscribed since
	}
	return r.awaitApplied(ctx, appliedWaiter{item: newest})
}

// WaitRevision waits until this replica has applied a revision of its own. Any goroutine.
func (r *Replica) WaitRevision(ctx context.Context, rev mvcc.Revision) error {
	return r.awaitApplied(ctx, appliedWaiter{rev: rev})
}

// awaitApplied waits on the caller's goroutine until w is reached.
func (r *Replica) awaitApplied(ctx context.Context, w appliedWaiter) error {
	r.mu.Lock()
	if r.mu.stopped {
		r.mu.Unlock()
		return ErrStopped
	}
	if r.mu.reached(&w) {
		r.mu.Unlock()
		return nil
	}
	w.woken = make(chan struct{})
	r.mu.waiters = append(r.mu.waiters, w)
	r.mu.Unlock()
	select {
	case <-w.woken:
	case <-ctx.Done():
		r.forget(w.woken)
		return ctx.Err()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.stopped {
		return ErrStopped
	}
	return nil
}

func (s *shared) reached(w *appliedWaiter) bool {
	return s.applied.Item >= w.item && s.applied.Index >= w.index && s.through >= w.cut && s.applied.Revision >= w.rev
}

func (r *Replica) forget(woken chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.mu.waiters {
		if r.mu.waiters[i].woken == woken {
			r.mu.waiters = append(r.mu.waiters[:i], r.mu.waiters[i+1:]...)
			return
		}
	}
}

func (r *Replica) readNow(req *regionpb.ReadRequest) (*regionpb.ReadResponse, error) {
	r.mu.Lock()
	applied, now, stopped := r.mu.applied, r.mu.vouched, r.mu.stopped
	r.mu.Unlock()
	if stopped {
		return nil, ErrStopped
	}
	if !applied.Descriptor.Span.Covers(req.Span) {
		return nil, &regionpb.Error{Code: regionpb.EpochMismatch, Descriptor: &applied.Descriptor}
	}
	rev := req.Rev
	switch {
	case rev <= 0:
		rev = now
	case req.Cut == 0 && rev > now:
		return nil, regionpb.ErrorOf(regionpb.FutureRevision)
	}
	resp, err := r.readAt(req, applied.Descriptor.Span, rev)
	if err != nil {
		return nil, err
	}
	// The floor is checked after the state was read: it is raised before the first removal, so
	// if it is not above rev now, nothing that was read can have been removed (C1).
	if floor := r.Applied().Floor; rev < floor {
		if req.Rev <= 0 {
			// A snapshot is being installed: nobody asked for what is compacted.
			return nil, regionpb.ErrorOf(regionpb.NotComplete)
		}
		return nil, regionpb.ErrorOf(regionpb.Compacted)
	}
	resp.Rev, resp.Now = rev, max(now, rev)
	return resp, nil
}

// readAt reads applied state at rev; whole is the region's span.
func (r *Replica) readAt(req *regionpb.ReadRequest, whole mvcc.Span, rev mvcc.Revision) (*regionpb.ReadResponse, error) {
	if req.Leases || req.Lease != 0 || len(req.Of) > 0 {
		return r.readLeases(req, rev)
	}
	resp := &regionpb.ReadResponse{}
	if req.CountOnly {
		n, err := r.countAt(whole, req.Span, rev)
		if err != nil {
			return nil, err
		}
		resp.Count = n
		return resp, nil
	}
	bytesMax := int64(r.lim.ReadBytesMax)
	if req.MaxBytes > 0 {
		bytesMax = min(bytesMax, req.MaxBytes)
	}
	if len(req.Keys) > 0 {
		return r.readKeys(req, rev, bytesMax)
	}
	var (
		size  int64
		seen  int64 // living keys met, matching or not
		page  kvPage
		rest  = req.Span // what was not scanned
		ended = true
	)
	err := r.cfg.Engine.Scan(req.Span, rev, mvcc.ScanOptions{KeysOnly: req.KeysOnly || req.NoValues}, func(v *mvcc.Version) bool {
		match := !(req.MinMod != 0 && v.Mod < req.MinMod || req.MaxMod != 0 && v.Mod > req.MaxMod ||
			req.MinCreate != 0 && v.Create < req.MinCreate || req.MaxCreate != 0 && v.Create > req.MaxCreate)
		if match {
			if req.Limit > 0 && int64(len(page.kvs)) >= req.Limit {
				resp.LimitHit = true
			} else if len(page.kvs) > 0 && (size >= bytesMax || len(page.kvs) >= r.lim.ReadKeysMax) {
				resp.More = true
			}
			if resp.LimitHit || resp.More {
				ended = false
				rest.Start = bytes.Clone(v.Key)
				return false
			}
			kv := page.add(v, req.KeysOnly)
			size += int64(len(kv.Key) + len(kv.Value) + 32)
		}
		seen++
		return true
	})
	if err != nil {
		return nil, fmt.Errorf("region %d: scanning: %w", r.id, err)
	}
	resp.KVs = page.kvs
	if resp.More {
		resp.Resume = rest.Start
	}
	if req.WantCount {
		resp.Count = seen
		if !ended {
			n, err := r.countAt(whole, rest, rev)
			if err != nil {
				return nil, err
			}
			resp.Count += n
		}
	}
	return resp, nil
}

// readKeys reads single keys.
func (r *Replica) readKeys(req *regionpb.ReadRequest, rev mvcc.Revision, bytesMax int64) (*regionpb.ReadResponse, error) {
	resp := &regionpb.ReadResponse{}
	var page kvPage
	var size int64
	for _, key := range req.Keys {
		if !req.Span.Contains(key) {
			return nil, fmt.Errorf("region %d: key %q is not in the span %v that was asked for", r.id, key, req.Span)
		}
		if len(page.kvs) > 0 && (size >= bytesMax || len(page.kvs) >= r.lim.ReadKeysMax) {
			resp.More, resp.Resume = true, bytes.Clone(key)
			break
		}
		v, ok, err := r.cfg.Engine.Get(key, rev)
		if err != nil {
			return nil, fmt.Errorf("region %d: reading a key: %w", r.id, err)
		}
		if ok && !v.Tombstone() {
			if req.NoValues {
				v.Value = nil
			}
			kv := page.add(&v, req.KeysOnly)
			size += int64(len(kv.Key) + len(kv.Value) + 32)
		}
	}
	resp.KVs = page.kvs
	return resp, nil
}

// kvPage collects key-values with few allocations: structs in blocks, bytes in chunks.
type kvPage struct {
	kvs   []*mvccpb.KeyValue
	block []mvccpb.KeyValue
	chunk []byte
}

func (p *kvPage) add(v *mvcc.Version, keysOnly bool) *mvccpb.KeyValue {
	if len(p.block) == 0 {
		p.block = make([]mvccpb.KeyValue, min(max(len(p.kvs), 1), 256))
	}
	kv := &p.block[0]
	p.block = p.block[1:]
	kv.Key = p.copy(v.Key)
	kv.ModRevision, kv.CreateRevision, kv.Version = int64(v.Mod), int64(v.Create), v.Version
	if !keysOnly {
		kv.Value, kv.Lease = p.copy(v.Value), v.Lease
	}
	p.kvs = append(p.kvs, kv)
	return kv
}

func (p *kvPage) copy(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	if cap(p.chunk)-len(p.chunk) < len(b) {
		p.chunk = make([]byte, 0, max(len(b), min(max(2*cap(p.chunk), 128), 64<<10)))
	}
	at := len(p.chunk)
	p.chunk = append(p.chunk, b...)
	return p.chunk[at:len(p.chunk):len(p.chunk)]
}
