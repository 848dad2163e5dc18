package region

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"

	"braid/mvcc"
	"braid/region/regionpb"
)

// readLeases reads records of leases from applied state, they have no revision; or the keys that were
// attached to a lease at a revision.
func (r *Replica) readLeases(req *regionpb.ReadRequest, rev mvcc.Revision) (*regionpb.ReadResponse, error) {
	resp := &regionpb.ReadResponse{}
	bytesMax := int64(r.lim.ReadBytesMax)
	if req.MaxBytes > 0 {
		bytesMax = min(bytesMax, req.MaxBytes)
	}
	if len(req.Of) > 0 {
		return r.readLeasesOf(req, bytesMax)
	}
	var page kvPage
	var size int64
	// take adds one thing that lies at a place, which no other does, unless the page is full.
	take := func(at, key, value []byte) bool {
		if len(page.kvs) > 0 && (size >= bytesMax || len(page.kvs) >= r.lim.ReadKeysMax) {
			resp.More, resp.Resume = true, bytes.Clone(at)
			return false
		}
		page.add(&mvcc.Version{Key: key, Value: value}, false)
		size += int64(len(key) + len(value) + 32)
		return true
	}
	var err error
	switch {
	case req.Leases && req.Lease != 0:
		start := r.Applied().Descriptor.Span.Start
		for _, k := range [...]mvcc.RecordKey{regionpb.LeaseKey(req.Lease), regionpb.RegisteredKey(start, req.Lease)} {
			var ok bool
			if _, ok, err = r.cfg.Engine.Record(k); ok && err == nil && r.Applied().Descriptor.Span.Contains(k.At) {
				take(k.At, nil, nil)
				break
			}
		}
	case req.Leases:
		var id [8]byte
		err = r.cfg.Engine.Records(mvcc.RecordLease, req.Span, func(k mvcc.RecordKey, value []byte) bool {
			binary.BigEndian.PutUint64(id[:], uint64(k.ID))
			return take(k.At, id[:], value)
		})
	default:
		var keys [][]byte
		var resume []byte
		keys, resume, err = r.attachedAt(req.Lease, req.Span, rev)
		for i := range keys {
			if !take(keys[i], keys[i], nil) {
				break
			}
		}
		if resume != nil && !resp.More {
			resp.More, resp.Resume = true, resume
		}
	}
	if err != nil {
		return nil, fmt.Errorf("region %d: reading leases: %w", r.id, err)
	}
	resp.KVs = page.kvs
	return resp, nil
}

// readLeasesOf reads the records of leases, or the keys of a span that are attached to them, from applied
// state. A page that is full ends with the last lease that has its whole answer on it.
func (r *Replica) readLeasesOf(req *regionpb.ReadRequest, bytesMax int64) (*regionpb.ReadResponse, error) {
	resp := &regionpb.ReadResponse{Count: int64(len(req.Of))}
	var page kvPage
	var size int64
	if req.Leases {
		keys := make([]mvcc.RecordKey, len(req.Of))
		for i, id := range req.Of {
			keys[i] = regionpb.LeaseKey(id)
		}
		var id [8]byte
		err := r.cfg.Engine.Lookup(keys, func(i int, value []byte) {
			if !req.Span.Contains(keys[i].At) || int64(i) >= resp.Count {
				return
			}
			if len(page.kvs) > 0 && (size >= bytesMax || len(page.kvs) >= r.lim.ReadKeysMax) {
				resp.Count = int64(i)
				return
			}
			binary.BigEndian.PutUint64(id[:], uint64(req.Of[i]))
			page.add(&mvcc.Version{Key: id[:], Value: value}, false)
			size += int64(len(value) + 40)
		})
		if err != nil {
			return nil, fmt.Errorf("region %d: reading leases: %w", r.id, err)
		}
		resp.KVs = page.kvs
		return resp, nil
	}
	answered, whole := 0, 0 // leases that have all of their keys on the page, and their keys
	err := r.cfg.Engine.Attached(req.Of, req.Span, func(lease int64, key []byte) bool {
		if lease != req.Of[answered] {
			whole = len(page.kvs)
			for req.Of[answered] != lease {
				answered++
			}
		}
		if size >= bytesMax || len(page.kvs) >= r.lim.ReadKeysMax {
			resp.Count = int64(answered)
			return false
		}
		page.add(&mvcc.Version{Key: key, Lease: lease}, false)
		size += int64(len(key) + 40)
		return true
	})
	if err != nil {
		return nil, fmt.Errorf("region %d: reading keys of leases: %w", r.id, err)
	}
	if resp.Count < int64(len(req.Of)) {
		page.kvs = page.kvs[:whole]
	}
	resp.KVs = page.kvs
	return resp, nil
}

// attachedAt returns keys of a span that were attached to a lease at a revision, in order, and where
// it stopped, if it did before the end. The engine's index says what is attached now; what has changed
// since the revision is looked up in history, so that regions that are read one after another, while
// keys move between leases, together show one revision.
func (r *Replica) attachedAt(lease int64, span mvcc.Span, rev mvcc.Revision) (keys [][]byte, resume []byte, err error) {
	err = r.cfg.Engine.Attached([]int64{lease}, span, func(_ int64, key []byte) bool {
		if len(keys) == r.lim.ReadKeysMax {
			resume = bytes.Clone(key)
			span.End = resume
			return false
		}
		keys = append(keys, bytes.Clone(key))
		return true
	})
	if err != nil || r.Applied().Floor > rev {
		return nil, nil, err // the caller finds that the revision is compacted
	}
	// After the index, so that nothing is missed of what it shows.
	var changed [][]byte
	if err = r.cfg.Engine.Events(context.Background(), rev+1, mvcc.Latest, span, func(v *mvcc.Version) error {
		changed = append(changed, bytes.Clone(v.Key))
		return nil
	}); err != nil || len(changed) == 0 {
		return keys, resume, err
	}
	slices.SortFunc(changed, bytes.Compare)
	changed = slices.CompactFunc(changed, bytes.Equal)
	keys = slices.DeleteFunc(keys, func(k []byte) bool {
		_, ok := slices.BinarySearchFunc(changed, k, bytes.Compare)
		return ok
	})
	for _, k := range changed {
		v, ok, err := r.cfg.Engine.Get(k, rev)
		if err != nil {
			return nil, nil, err
		}
		if ok && !v.Tombstone() && v.Lease == lease {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, bytes.Compare)
	return keys, resume, nil
}
