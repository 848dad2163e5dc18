package routertest

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// crossState is what the store knows of attempts over several regions, guarded by Store.mu: the
// plainest locks there are, one list for the whole store.
type crossState struct {
	freed    *sync.Cond // signalled whenever a lock ends
	last     pdpb.AttemptID
	held     map[pdpb.AttemptID]map[pdpb.RegionID][]regionpb.LockSpan
	prepared map[pdpb.AttemptID]map[pdpb.RegionID]*regionpb.PrepareRequest
	ended    map[pdpb.AttemptID]mvcc.Revision // 0: aborted
}

func (c *crossState) init(mu *sync.Mutex) {
	c.freed = sync.NewCond(mu)
	c.held = map[pdpb.AttemptID]map[pdpb.RegionID][]regionpb.LockSpan{}
	c.prepared = map[pdpb.AttemptID]map[pdpb.RegionID]*regionpb.PrepareRequest{}
	c.ended = map[pdpb.AttemptID]mvcc.Revision{}
}

// await waits until no other attempt's lock is in the way. Called with the mutex held.
func (c *crossState) await(ctx context.Context, self pdpb.AttemptID, spans []regionpb.LockSpan) error {
	stop := context.AfterFunc(ctx, func() {
		c.freed.L.Lock()
		defer c.freed.L.Unlock()
		c.freed.Broadcast()
	})
	defer stop()
	for c.conflict(self, spans) {
		if err := ctx.Err(); err != nil {
			return err
		}
		c.freed.Wait()
	}
	return nil
}

func (c *crossState) conflict(self pdpb.AttemptID, spans []regionpb.LockSpan) bool {
	for id, regions := range c.held {
		for _, held := range regions {
			for _, h := range held {
				for _, s := range spans {
					both := h.Span.Intersect(s.Span)
					if id != self && (h.Exclusive || s.Exclusive) && !both.Empty() {
						return true
					}
				}
			}
		}
	}
	return false
}

// Attempt implements router.Oracle.
func (s *Store) Attempt(ctx context.Context, _ bool) (pdpb.AttemptID, error) {
	if err := s.fail(ctx, "attempt"); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cross.last++
	return s.cross.last, nil
}

// Abort implements router.Oracle.
func (s *Store) Abort(ctx context.Context, id pdpb.AttemptID) (mvcc.Revision, error) {
	if err := s.fail(ctx, "abort"); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.cross.ended[id]; !ok {
		s.end(id, 0)
	}
	if rev := s.cross.ended[id]; rev > 0 {
		return rev, nil
	}
	return 0, regionpb.ErrorOf(regionpb.Aborted)
}

// Abandon implements router.Oracle.
func (s *Store) Abandon(id pdpb.AttemptID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.cross.ended[id]; !ok {
		s.end(id, 0)
	}
}

func (s *Store) end(id pdpb.AttemptID, rev mvcc.Revision) {
	s.cross.ended[id] = rev
	delete(s.cross.held, id)
	delete(s.cross.prepared, id)
	s.cross.freed.Broadcast()
}

// Lock implements router.Stores.
func (s *Store) Lock(ctx context.Context, _ pdpb.Descriptor, req *regionpb.LockRequest) (regionpb.LockGrant, error) {
	if err := s.fail(ctx, "lock"); err != nil {
		return regionpb.LockGrant{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range req.Locks {
		if err := s.region(req.Region, req.Epoch, l.Span); err != nil {
			return regionpb.LockGrant{}, err
		}
	}
	if req.Now && s.cross.conflict(req.Attempt, req.Locks) {
		return regionpb.LockGrant{}, regionpb.ErrorOf(regionpb.LockBusy)
	}
	if err := s.cross.await(ctx, req.Attempt, req.Locks); err != nil {
		return regionpb.LockGrant{}, err
	}
	if s.cross.held[req.Attempt] == nil {
		s.cross.held[req.Attempt] = map[pdpb.RegionID][]regionpb.LockSpan{}
	}
	s.cross.held[req.Attempt][req.Region] = req.Locks
	return regionpb.LockGrant{ID: regionpb.LockID{Term: 1, Seq: uint64(req.Attempt)}}, nil
}

// Release implements router.Stores.
func (s *Store) Release(_ pdpb.Descriptor, req *regionpb.ReleaseRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.cross.held[req.Attempt], req.Region)
	s.cross.freed.Broadcast()
}

// Prepare implements router.Stores.
func (s *Store) Prepare(ctx context.Context, _ pdpb.Descriptor, req *regionpb.PrepareRequest) (mvcc.Revision, error) {
	if err := s.fail(ctx, "prepare"); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	id := req.Attempt
	if s.cross.held[id][req.Region] == nil {
		return 0, regionpb.ErrorOf(regionpb.LockLost)
	}
	if s.cross.prepared[id] == nil {
		s.cross.prepared[id] = map[pdpb.RegionID]*regionpb.PrepareRequest{}
	}
	s.cross.prepared[id][req.Region] = req
	if len(s.cross.prepared[id]) == len(req.Participants) {
		s.commit(id)
	}
	stop := context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.cross.freed.Broadcast()
	})
	defer stop()
	for {
		if rev, ok := s.cross.ended[id]; ok && rev > 0 {
			return rev, nil
		} else if ok {
			return 0, regionpb.ErrorOf(regionpb.Aborted)
		}
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		s.cross.freed.Wait()
	}
}

func (s *Store) commit(id pdpb.AttemptID) {
	s.rev++
	s.cut++
	var list []mvcc.Version
	for _, req := range s.cross.prepared[id] {
		for i, f := range req.Effects {
			v := mvcc.Version{Key: bytes.Clone(f.Key), Mod: s.rev, Sub: req.Subs[i]}
			if !f.Delete {
				v.Value, v.Lease, v.Version, v.Create = f.Value, f.Lease, f.Version, f.Create
				if f.CreateKind == regionpb.CreateNew {
					v.Create = s.rev
				}
			}
			list = append(list, v)
		}
	}
	slices.SortFunc(list, func(a, b mvcc.Version) int { return cmp.Compare(a.Sub, b.Sub) })
	for _, v := range list {
		s.history[string(v.Key)] = append(s.history[string(v.Key)], v)
	}
	s.end(id, s.rev)
}

// locksOf is what a transaction of one region has to wait for.
func locksOf(dst []regionpb.LockSpan, req *pb.TxnRequest) []regionpb.LockSpan {
	for _, c := range req.Compare {
		dst = append(dst, regionpb.LockSpan{Span: spanOf(c.Key, c.RangeEnd)})
	}
	for _, op := range slices.Concat(req.Success, req.Failure) {
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			dst = append(dst, regionpb.LockSpan{Span: spanOf(o.RequestRange.Key, o.RequestRange.RangeEnd)})
		case *pb.RequestOp_RequestPut:
			dst = append(dst, regionpb.LockSpan{Span: mvcc.Key(o.RequestPut.Key), Exclusive: true})
		case *pb.RequestOp_RequestDeleteRange:
			dst = append(dst, regionpb.LockSpan{Span: spanOf(o.RequestDeleteRange.Key, o.RequestDeleteRange.RangeEnd), Exclusive: true})
		case *pb.RequestOp_RequestTxn:
			dst = locksOf(dst, o.RequestTxn)
		}
	}
	return dst
}
