package node

import (
	"bytes"
	"context"
	"errors"
	"io"
	"iter"
	"slices"

	"braid/mvcc"
	"braid/mvcc/engine"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/raftstore/transport"
	"braid/region/regionpb"
	"braid/router"
)

// methodHash asks a store for hash records of regions that live there.
const methodHash transport.Method = 66

const (
	hashBlock = 512   // records that a local stream hands over at a time
	hashPage  = 16384 // records in one answer to another store, a few hundred kilobytes
)

// Hash implements router.Stores. The revision index is one for the whole store, so what is here is
// one stream, in one walk; what lives elsewhere is one stream of each store that is asked.
func (s *stores) Hash(ctx context.Context, list []pdpb.Descriptor, req router.HashRequest) ([]router.HashStream, error) {
	here, elsewhere := s.node.regions.local(list)
	remote, err := s.hashElsewhere(elsewhere, req)
	if err != nil {
		return nil, err
	}
	ids := make([]pdpb.RegionID, len(here))
	for i := range here {
		ids[i] = here[i].ID
	}
	local, err := s.hashHere(ctx, ids, req)
	if err != nil {
		return nil, err
	}
	streams := []router.HashStream{local}
	// Versions that etcd would have collected count only in a store without a living key.
	alive := req.Alive
	if !alive {
		alive, err = local.anyAlive()
	}
	for i := 0; i < len(remote) && err == nil && !alive; i++ {
		alive, err = remote[i].anyAlive(ctx)
	}
	if err != nil {
		return streams, err // the router closes them
	}
	local.begin(ctx, alive)
	for _, r := range remote {
		r.req.alive = alive
		streams = append(streams, r)
	}
	return streams, nil
}

// hashElsewhere divides regions among stores that have them: the first peer that is up.
func (s *stores) hashElsewhere(list []pdpb.Descriptor, req router.HashRequest) ([]*remoteHash, error) {
	var streams []*remoteHash
	for _, d := range list {
		i := slices.IndexFunc(d.Peers, func(p pdpb.Peer) bool { return s.node.net.Alive(p.Store) })
		if i < 0 {
			return nil, regionpb.ErrorOf(regionpb.RegionNotFound)
		}
		store := d.Peers[i].Store
		j := slices.IndexFunc(streams, func(r *remoteHash) bool { return r.store == store })
		if j < 0 {
			j = len(streams)
			streams = append(streams, &remoteHash{s: s, store: store, req: hashQuery{HashRequest: req}})
		}
		streams[j].req.regions = append(streams[j].req.regions, d.ID)
	}
	return streams, nil
}

// hashView is pinned state of some of the regions here.
type hashView struct {
	req   router.HashRequest
	view  *engine.Snapshot
	spans []mvcc.Span // in order, no two overlap
}

// pinHash waits until the regions are complete and pins their state.
func (s *stores) pinHash(ctx context.Context, ids []pdpb.RegionID, req router.HashRequest) (*hashView, error) {
	for _, id := range ids {
		if err := s.node.regions.await(ctx, id, req.Cut); err != nil {
			return nil, err
		}
	}
	view, err := s.node.engine.Snapshot()
	if err != nil {
		return nil, err
	}
	v := &hashView{req: req, view: view}
	for _, id := range ids {
		h := s.node.regions.get(id)
		// Removal must not have passed the request's floor when the state was pinned (C1).
		if h == nil || h.Applied().Floor > max(req.Floor, 0) {
			return nil, errors.Join(regionpb.ErrorOf(regionpb.Compacted), view.Close())
		}
		v.spans = append(v.spans, h.Descriptor().Span)
	}
	slices.SortFunc(v.spans, func(a, b mvcc.Span) int { return bytes.Compare(a.Start, b.Start) })
	return v, nil
}

// covers says whether a key lies in one of the regions.
func (v *hashView) covers(key []byte) bool {
	i, found := slices.BinarySearchFunc(v.spans, key, func(s mvcc.Span, k []byte) int { return bytes.Compare(s.Start, k) })
	if !found {
		i--
	}
	return i >= 0 && v.spans[i].Contains(key)
}

// anyAlive says whether any key of the regions is alive at the request's revision.
func (v *hashView) anyAlive() (alive bool, err error) {
	for i := 0; i < len(v.spans) && err == nil && !alive; i++ {
		err = v.view.Scan(v.spans[i], v.req.At, mvcc.ScanOptions{KeysOnly: true}, func(*mvcc.Version) bool {
			alive = true
			return false
		})
	}
	return alive, err
}

// walk calls fn with the records behind (rev, sub).
func (v *hashView) walk(ctx context.Context, alive bool, rev mvcc.Revision, sub int64, fn func(router.HashRecord) error) error {
	_, err := v.view.HashSpan(ctx, mvcc.Span{}, rev, v.req.At, v.req.Floor, func(r *mvcc.HashRecord) error {
		if r.IfEmpty && alive || r.Mod == rev && r.Sub <= sub || !v.covers(r.User) {
			return nil
		}
		return fn(router.Sum(r))
	})
	return err
}

var errStopHash = errors.New("node: hash stopped")

// localHash pulls blocks out of one walk of the revision index.
type localHash struct {
	*hashView
	next func() ([]router.HashRecord, error, bool)
	stop func()
}

func (s *stores) hashHere(ctx context.Context, ids []pdpb.RegionID, req router.HashRequest) (*localHash, error) {
	v, err := s.pinHash(ctx, ids, req)
	if err != nil {
		return nil, err
	}
	return &localHash{hashView: v}, nil
}

func (h *localHash) begin(ctx context.Context, alive bool) {
	h.next, h.stop = iter.Pull2(func(yield func([]router.HashRecord, error) bool) {
		block := make([]router.HashRecord, 0, hashBlock)
		err := h.walk(ctx, alive, 0, -1, func(r router.HashRecord) error {
			if block = append(block, r); len(block) == hashBlock {
				if !yield(block, nil) {
					return errStopHash
				}
				block = block[:0]
			}
			return nil
		})
		if errors.Is(err, errStopHash) || err == nil && len(block) > 0 && !yield(block, nil) {
			return
		}
		if err != nil {
			yield(nil, err)
		}
	})
}

// Next implements router.HashStream.
func (h *localHash) Next(context.Context) ([]router.HashRecord, error) {
	block, err, ok := h.next()
	if !ok {
		return nil, io.EOF
	}
	return block, err
}

// Close implements router.HashStream.
func (h *localHash) Close() error {
	if h.stop != nil {
		h.stop()
	}
	return h.view.Close()
}

// remoteHash asks another store page by page. Nothing is kept there between two pages: the records
// at one revision above one floor do not change, and a store whose collection passes the floor
// says so.
type remoteHash struct {
	s     *stores
	store raftid.StoreID
	req   hashQuery
	ended bool
}

func (r *remoteHash) ask(ctx context.Context, q *hashQuery) (*hashAnswer, error) {
	data, err := r.s.call(ctx, r.store, methodHash, q.append(nil))
	if err != nil {
		return nil, err
	}
	return decodeHashAnswer(data)
}

func (r *remoteHash) anyAlive(ctx context.Context) (bool, error) {
	q := r.req
	q.onlyAlive = true
	a, err := r.ask(ctx, &q)
	if err != nil {
		return false, err
	}
	return a.alive, nil
}

// Next implements router.HashStream.
func (r *remoteHash) Next(ctx context.Context) ([]router.HashRecord, error) {
	if r.ended {
		return nil, io.EOF
	}
	if r.req.rev == 0 {
		r.req.sub = -1
	}
	a, err := r.ask(ctx, &r.req)
	if err != nil {
		return nil, err
	}
	if n := len(a.records); n > 0 {
		r.req.rev, r.req.sub = a.records[n-1].Rev, a.records[n-1].Sub
	} else if !a.last {
		return nil, errBadHash
	}
	r.ended = a.last
	return a.records, nil
}

// Close implements router.HashStream.
func (r *remoteHash) Close() error { return nil }

// serveHash answers another store's query on a goroutine of its own, one of a bounded number.
func (s *stores) serveHash(ctx context.Context, _ raftid.StoreID, payload []byte, reply func([]byte, error)) {
	q, err := decodeHashQuery(payload)
	if err != nil {
		reply(nil, err)
		return
	}
	s.serve(func(err error) {
		var a hashAnswer
		if err == nil {
			a, err = s.hashPage(ctx, q)
		}
		reply(a.append(err))
	})
}

func (s *stores) hashPage(ctx context.Context, q *hashQuery) (a hashAnswer, err error) {
	v, err := s.pinHash(ctx, q.regions, q.HashRequest)
	if err != nil {
		return a, err
	}
	defer func() { err = errors.Join(err, v.view.Close()) }()
	if q.onlyAlive {
		a.alive, err = v.anyAlive()
		return a, err
	}
	a.last = true
	err = v.walk(ctx, q.alive, q.rev, q.sub, func(r router.HashRecord) error {
		if len(a.records) == hashPage {
			a.last = false
			return errStopHash
		}
		a.records = append(a.records, r)
		return nil
	})
	if errors.Is(err, errStopHash) {
		err = nil
	}
	return a, err
}
