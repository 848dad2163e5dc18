package node

import (
	"context"
	"errors"
	"hash/crc32"
	"io"
	"iter"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
	"braid/router"
)

// hashBlock is how many records a stream hands over at a time.
const hashBlock = 512

var errRemoteHash = errors.New("braid: HashKV needs a replica of every region on the node that is asked")

// Hash implements router.Stores. The revision index is one for the whole store, so all that is
// here is one stream, in one walk.
func (s *stores) Hash(ctx context.Context, list []pdpb.Descriptor, req router.HashRequest) ([]router.HashStream, error) {
	here, elsewhere := s.node.regions.local(list)
	if len(elsewhere) > 0 {
		return nil, errRemoteHash
	}
	for i := range here {
		if err := s.node.regions.await(ctx, here[i].ID, req.Cut); err != nil {
			return nil, err
		}
	}
	view, err := s.node.engine.Snapshot()
	if err != nil {
		return nil, err
	}
	// Versions that etcd would have collected count only in a store without a living key.
	alive := false
	err = view.Scan(mvcc.Span{}, req.At, mvcc.ScanOptions{KeysOnly: true}, func(*mvcc.Version) bool {
		alive = true
		return false
	})
	if err != nil {
		return nil, errors.Join(err, view.Close())
	}
	// The floor must not have passed the request's: what it removed is missing (C1).
	for i := range here {
		if h := s.node.regions.get(here[i].ID); h == nil || h.Applied().Floor > max(req.Floor, req.At) {
			return nil, errors.Join(regionpb.ErrorOf(regionpb.Compacted), view.Close())
		}
	}
	hs := &hashStream{}
	hs.next, hs.stop = iter.Pull2(func(yield func([]router.HashRecord, error) bool) {
		block := make([]router.HashRecord, 0, hashBlock)
		_, err := view.HashSpan(ctx, mvcc.Span{}, req.At, req.Floor, func(r *mvcc.HashRecord) error {
			if r.IfEmpty && alive {
				return nil
			}
			sum := crc32.Update(crc32.Update(0, castagnoli, r.Key), castagnoli, r.Value)
			block = append(block, router.HashRecord{Rev: r.Mod, Sub: r.Sub, Len: len(r.Key) + len(r.Value), CRC: sum})
			if len(block) == hashBlock {
				if !yield(block, nil) {
					return errStopHash
				}
				block = block[:0]
			}
			return nil
		})
		if errors.Is(err, errStopHash) {
			return
		}
		if err == nil && len(block) > 0 && !yield(block, nil) {
			return
		}
		if err != nil {
			yield(nil, err)
		}
	})
	hs.close = func() error {
		hs.stop()
		return view.Close()
	}
	return []router.HashStream{hs}, nil
}

var (
	errStopHash = errors.New("node: hash stopped")
	castagnoli  = crc32.MakeTable(crc32.Castagnoli)
)

// hashStream pulls blocks out of one walk of the revision index.
type hashStream struct {
	next  func() ([]router.HashRecord, error, bool)
	stop  func()
	close func() error
}

func (h *hashStream) Next(context.Context) ([]router.HashRecord, error) {
	block, err, ok := h.next()
	if !ok {
		return nil, io.EOF
	}
	return block, err
}

func (h *hashStream) Close() error { return h.close() }
