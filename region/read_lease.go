package region

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"braid/mvcc"
	"braid/region/regionpb"
)

// readLeases reads records of leases, or the keys that are attached to one, from applied state.
func (r *Replica) readLeases(req *regionpb.ReadRequest) (*regionpb.ReadResponse, error) {
	resp := &regionpb.ReadResponse{}
	bytesMax := int64(r.lim.ReadBytesMax)
	if req.MaxBytes > 0 {
		bytesMax = min(bytesMax, req.MaxBytes)
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
		err = r.cfg.Engine.Attached(req.Lease, req.Span, func(key []byte) bool {
			return take(key, key, nil)
		})
	}
	if err != nil {
		return nil, fmt.Errorf("region %d: reading leases: %w", r.id, err)
	}
	resp.KVs = page.kvs
	return resp, nil
}
