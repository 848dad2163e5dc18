package router

import (
	"context"
	"fmt"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// endless is a store of one region, with a lease that has so many keys that one reply after the other comes.
type endless struct {
	Oracle
	Stores
	keys int // that were read
}

const endlessLease, endlessPage = 7, 100

func (s *endless) Regions() []pdpb.Descriptor { return []pdpb.Descriptor{{ID: 1}} }

func (s *endless) Read(_ context.Context, _ pdpb.Descriptor, req *regionpb.ReadRequest) (*regionpb.ReadResponse, error) {
	switch {
	case req.Leases:
		rec := regionpb.LeaseRecord{Grant: 1, TTL: 60}
		return &regionpb.ReadResponse{Count: 1, KVs: []*mvccpb.KeyValue{{Key: []byte("\x00\x00\x00\x00\x00\x00\x00\x07"), Value: rec.Append(nil)}}}, nil
	case len(req.Of) > 0:
		return &regionpb.ReadResponse{}, nil // none has all of its keys on a page
	}
	resp := &regionpb.ReadResponse{More: true}
	for range endlessPage {
		s.keys++
		resp.KVs = append(resp.KVs, &mvccpb.KeyValue{Key: fmt.Appendf(nil, "%08d", s.keys)})
	}
	resp.Resume = fmt.Appendf(nil, "%08d", s.keys+1)
	return resp, nil
}

// TestEndReadsNoMoreThanFits: of a lease with more keys than a region can prepare not all are read.
func TestEndReadsNoMoreThanFits(t *testing.T) {
	s := &endless{}
	r := New(s, s, Options{PartBytesMax: 10_000})
	j := &revokeJob{r: r, leases: []regionpb.LeaseLeft{{ID: endlessLease}}}
	parts := []participant{{region: s.Regions()[0], locks: []regionpb.LockSpan{{Lease: endlessLease, Exclusive: true}}}}
	_, err := j.evaluate(t.Context(), point{cut: 1, rev: 1}, parts)
	f := regionpb.Effect{Key: make([]byte, 8), Delete: true, Detach: endlessLease}
	if most := 10_000/f.Size() + endlessPage; codeOf(err) != regionpb.TooLarge || s.keys > most {
		t.Errorf("%v, %d keys were read, of which at most %d fit", err, s.keys, most)
	}
	if j.leases[0].Grant != 1 {
		t.Errorf("the end is of grant %d", j.leases[0].Grant)
	}
}
