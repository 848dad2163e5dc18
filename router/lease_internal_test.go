package router

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
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

// TestGranted: what the grants say is enough to end leases, unless one does not say all; a lease of another
// grant is passed over with its keys (L7), and one that has registered elsewhere needs more locks.
func TestGranted(t *testing.T) {
	low, high := pdpb.Descriptor{ID: 1, Span: mvcc.Span{End: []byte("m")}}, pdpb.Descriptor{ID: 2, Span: mvcc.Span{Start: []byte("m")}}
	homes := func(d pdpb.Descriptor, n int) (ids []int64) {
		for id := int64(1); len(ids) < n; id++ {
			if d.Span.Contains(regionpb.LeasePlace(id)) {
				ids = append(ids, id)
			}
		}
		return ids
	}
	ids := homes(low, 3) // recorded in the low region, with keys in both
	locks := []regionpb.LockSpan{{Lease: ids[0], Exclusive: true}, {Lease: ids[1], Exclusive: true}, {Lease: ids[2], Exclusive: true}}
	parts := []participant{{region: low, locks: locks}, {region: high, locks: locks}}
	record := func(i int, grant uint64, spans ...mvcc.Span) regionpb.Lease {
		return regionpb.Lease{ID: ids[i], Record: &regionpb.LeaseRecord{Grant: grant, TTL: 60, Spans: spans}}
	}
	grants := func() []regionpb.LockGrant {
		return []regionpb.LockGrant{
			{Whole: true, Records: []regionpb.Lease{record(1, 11, high.Span), record(0, 10, high.Span), record(2, 99)},
				Attached: []regionpb.Attachment{{Lease: ids[1], Key: []byte("b")}, {Lease: ids[2], Key: []byte("c")}, {Lease: ids[0], Key: []byte("a")}}},
			{Whole: true, Attached: []regionpb.Attachment{{Lease: ids[0], Key: []byte("z")}, {Lease: ids[1], Key: []byte("y")}}},
		}
	}
	job := func() *revokeJob {
		return &revokeJob{leases: []regionpb.LeaseLeft{{ID: ids[0], Grant: 10}, {ID: ids[1], Grant: 11}, {ID: ids[2], Grant: 12}}}
	}
	out, known, err := job().granted(parts, grants())
	var keys string
	for _, f := range out.effects {
		keys += string(f.Key)
	}
	if !known || err != nil || keys != "abyz" || len(out.records[0]) != 2 || len(out.records[1]) != 2 {
		t.Errorf("%v %v: keys %s, records %v", known, err, keys, out.records)
	}
	part := grants()
	part[1].Whole = false
	if _, known, err := job().granted(parts, part); known || err != nil {
		t.Errorf("a grant that does not say all is enough: %v", err)
	}
	if _, known, err := job().granted(parts[:1], grants()[:1]); !known || !errors.Is(err, errAgain) {
		t.Errorf("keys in a region that is not locked: %v %v", known, err)
	}
	gone := grants()
	gone[0].Records = gone[0].Records[2:]
	if _, _, err := job().granted(parts, gone); codeOf(err) != regionpb.LeaseNotFound {
		t.Errorf("all have ended: %v", err)
	}
}
