// Package routertest is a whole store in a map, behind the interfaces that the router is built on:
// the plainest thing that answers as regions do, for tests of the router and of the gateway. It is
// cut into regions only on the outside; inside there is one map and one mutex. It is slow on
// purpose wherever being clever could hide a mistake.
package routertest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/region/regionpb"
	"braid/router"
)

// Store is the whole store. Its methods implement router.Oracle and router.Stores.
type Store struct {
	// Fail, when set, is asked before each call ("readpoint", "read", "write", "hash",
	// "compact"); an error that it returns is the call's answer, and nothing was done. Set it
	// before use.
	Fail func(op string) error
	// ReplyBytesMax bounds replies to reads; 0 is no bound. At least one key is returned.
	ReplyBytesMax int64
	// Leases, when set, is asked for the records of leases, all of which lie in the first region, for
	// each reading of them. Set it before use.
	Leases func() []regionpb.Lease

	mu       sync.Mutex
	regions  []pdpb.Descriptor
	version  uint64
	history  map[string][]mvcc.Version // oldest first
	rev      mvcc.Revision
	floor    mvcc.Revision
	hashes   map[mvcc.Revision]pdpb.CompactHash
	cut      pdpb.Cut
	reads    int
	largest  int64 // bytes of the largest reply
	overtake bool  // the next read finds its versions removed
	cross    crossState
}

// New returns an empty store of len(splits)+1 regions, divided at the given keys.
func New(splits ...string) *Store {
	s := &Store{history: make(map[string][]mvcc.Version), hashes: make(map[mvcc.Revision]pdpb.CompactHash), rev: 1, floor: -1, cut: 1, version: 1}
	s.cross.init(&s.mu)
	slices.Sort(splits)
	var start []byte
	for i, k := range append(splits, "") {
		d := pdpb.Descriptor{ID: raftid.FirstRegion + raftid.GroupID(i), Epoch: 1, Span: mvcc.Span{Start: start}}
		if i < len(splits) {
			d.Span.End = []byte(k)
		}
		start = d.Span.End
		s.regions = append(s.regions, d)
	}
	return s
}

// Split divides the region that holds key, as a split would: both parts have a new epoch.
func (s *Store) Split(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	regions := slices.Clone(s.regions)
	for i, d := range regions {
		if d.Span.Contains([]byte(key)) && string(d.Span.Start) != key {
			right := d
			right.ID = raftid.FirstRegion + raftid.GroupID(len(regions))
			right.Epoch++
			right.Span.Start = []byte(key)
			regions[i].Epoch++
			regions[i].Span.End = []byte(key)
			s.regions = slices.Insert(regions, i+1, right)
			s.version++
			return
		}
	}
}

// Alive returns what is alive in etcd's range at a revision, in key order.
func (s *Store) Alive(key, end []byte, rev mvcc.Revision) []mvcc.Version {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.alive(spanOf(key, end), rev)
}

// Attach attaches the newest version of a key to a lease, as if it had been put so.
func (s *Store) Attach(key string, lease int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.history[key]
	h[len(h)-1].Lease = lease
}

// Overtake makes the next read fail as if removal of old versions had been faster.
func (s *Store) Overtake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.overtake = true
}

// Reads returns the number of reads and the bytes of the largest reply so far.
func (s *Store) Reads() (n int, largest int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reads, s.largest
}

func (s *Store) fail(ctx context.Context, op string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if s.Fail != nil {
		return s.Fail(op)
	}
	return nil
}

// ReadPoint implements router.Oracle.
func (s *Store) ReadPoint(ctx context.Context) (pdpb.ReadPoint, error) {
	if err := s.fail(ctx, "readpoint"); err != nil {
		return pdpb.ReadPoint{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return pdpb.ReadPoint{Cut: s.cut, Rev: s.rev, Floor: s.floor}, nil
}

// Mark implements router.Oracle.
func (s *Store) Mark() pdpb.Mark {
	s.mu.Lock()
	defer s.mu.Unlock()
	return pdpb.Mark{Cut: s.cut, Rev: s.rev, Floor: s.floor}
}

// WaitRevision implements router.Oracle; the mark is always the newest one.
func (s *Store) WaitRevision(context.Context, mvcc.Revision) error { return nil }

// CompactHash implements router.Oracle.
func (s *Store) CompactHash(ctx context.Context, rev mvcc.Revision) (pdpb.CompactHash, error) {
	if err := s.fail(ctx, "compacthash"); err != nil {
		return pdpb.CompactHash{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hashes[rev], nil
}

// Compact implements router.Oracle.
func (s *Store) Compact(ctx context.Context, rev int64, hash pdpb.CompactHash) (mvcc.Revision, error) {
	if err := s.fail(ctx, "compact"); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch at := mvcc.Revision(rev); {
	case at <= s.floor:
		return 0, regionpb.ErrorOf(regionpb.Compacted)
	case at > s.rev:
		return 0, regionpb.ErrorOf(regionpb.FutureRevision)
	default:
		if hash.Rev == at && hash.Floor == s.floor {
			s.hashes[at] = hash
		}
		s.floor = at
		s.cut++
		return s.rev, nil
	}
}

// Regions implements router.Oracle.
func (s *Store) Regions() []pdpb.Descriptor {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.regions
}

// RegionsVersion implements router.Oracle.
func (s *Store) RegionsVersion() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.version
}

// region finds a region that a request names and may still name.
func (s *Store) region(id pdpb.RegionID, epoch uint64, span mvcc.Span) error {
	for _, d := range s.regions {
		if d.ID != id {
			continue
		}
		if d.Epoch != epoch {
			return &regionpb.Error{Code: regionpb.EpochMismatch, Descriptor: &d}
		}
		if !d.Span.Covers(span) {
			return fmt.Errorf("routertest: %v is outside of region %d, which is %v", span, id, d.Span)
		}
		return nil
	}
	return regionpb.ErrorOf(regionpb.RegionNotFound)
}

// at returns the version of a key that is alive at a revision.
func (s *Store) at(key string, rev mvcc.Revision) (mvcc.Version, bool) {
	var v mvcc.Version
	for _, x := range s.history[key] {
		if x.Mod <= rev {
			v = x
		}
	}
	return v, v.Version > 0
}

// alive returns what is alive in a span at a revision, in key order.
func (s *Store) alive(span mvcc.Span, rev mvcc.Revision) []mvcc.Version {
	var list []mvcc.Version
	for key := range s.history {
		if v, ok := s.at(key, rev); ok && span.Contains(v.Key) {
			list = append(list, v)
		}
	}
	slices.SortFunc(list, func(a, b mvcc.Version) int { return bytes.Compare(a.Key, b.Key) })
	return list
}

func keyValue(v mvcc.Version) *mvccpb.KeyValue {
	return &mvccpb.KeyValue{
		Key: v.Key, Value: v.Value, Lease: v.Lease, Version: v.Version,
		CreateRevision: int64(v.Create), ModRevision: int64(v.Mod),
	}
}

// Read implements router.Stores.
func (s *Store) Read(ctx context.Context, _ pdpb.Descriptor, req *regionpb.ReadRequest) (*regionpb.ReadResponse, error) {
	if err := s.fail(ctx, "read"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.region(req.Region, req.Epoch, req.Span); err != nil {
		return nil, err
	}
	if req.Cut > s.cut {
		return nil, regionpb.ErrorOf(regionpb.NotComplete)
	}
	if s.overtake {
		s.overtake = false
		return nil, regionpb.ErrorOf(regionpb.Compacted)
	}
	s.reads++
	rev := req.Rev
	if rev == 0 {
		rev = s.rev
	}
	resp := &regionpb.ReadResponse{Rev: rev, Now: s.rev}
	if req.Leases {
		if s.Leases != nil && len(req.Span.Start) == 0 {
			for _, l := range s.Leases() {
				resp.KVs = append(resp.KVs, &mvccpb.KeyValue{Key: binary.BigEndian.AppendUint64(nil, uint64(l.ID)), Value: l.Record.Append(nil)})
			}
		}
		return resp, nil
	}
	list := s.alive(req.Span, rev)
	if len(req.Keys) > 0 {
		list = slices.DeleteFunc(list, func(v mvcc.Version) bool {
			return !slices.ContainsFunc(req.Keys, func(k []byte) bool { return bytes.Equal(k, v.Key) })
		})
	}
	if req.WantCount || req.CountOnly {
		resp.Count = int64(len(list))
	}
	if req.CountOnly {
		return resp, nil
	}
	bound := req.MaxBytes
	if s.ReplyBytesMax > 0 {
		bound = min(bound, s.ReplyBytesMax)
	}
	var size int64
	for _, v := range list {
		kv := keyValue(v)
		if out := func(value, low, high mvcc.Revision) bool {
			return (low != 0 && value < low) || (high != 0 && value > high)
		}; out(v.Mod, req.MinMod, req.MaxMod) || out(v.Create, req.MinCreate, req.MaxCreate) {
			continue
		}
		if req.Limit > 0 && int64(len(resp.KVs)) == req.Limit {
			resp.LimitHit = true
			break
		}
		if req.KeysOnly {
			kv.Value, kv.Lease = nil, 0
		}
		n := int64(len(kv.Key) + len(kv.Value))
		if bound > 0 && len(resp.KVs) > 0 && size+n > bound {
			resp.More, resp.Resume = true, kv.Key
			break
		}
		size += n
		resp.KVs = append(resp.KVs, kv)
	}
	s.largest = max(s.largest, size)
	return resp, nil
}

// Hash implements router.Stores, with one stream for each region.
func (s *Store) Hash(ctx context.Context, regions []pdpb.Descriptor, req router.HashRequest) ([]router.HashStream, error) {
	if err := s.fail(ctx, "hash"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var streams []router.HashStream
	for _, d := range regions {
		if err := s.region(d.ID, d.Epoch, d.Span); err != nil {
			return streams, err
		}
		records, err := s.hash(d.Span, req)
		if err != nil {
			return streams, err
		}
		streams = append(streams, &hashStream{records: records})
	}
	return streams, nil
}

func (s *Store) hash(span mvcc.Span, req router.HashRequest) ([]router.HashRecord, error) {
	var list []mvcc.Version
	kept := req.At
	if !req.Alive && len(s.alive(mvcc.Span{}, req.At)) == 0 {
		kept = req.Floor // etcd then hashes whatever the compaction left
	}
	for key, versions := range s.history {
		if !span.Contains([]byte(key)) {
			continue
		}
		newest, _ := s.at(key, kept)
		for _, v := range versions {
			switch {
			case v.Mod > req.At:
			case v.Mod == req.Floor && v.Tombstone():
			case v.Mod <= req.Floor && (v.Mod != newest.Mod || v.Sub != newest.Sub || v.Tombstone()):
			default:
				list = append(list, v)
			}
		}
	}
	slices.SortFunc(list, func(a, b mvcc.Version) int { return cmp.Or(cmp.Compare(a.Mod, b.Mod), cmp.Compare(a.Sub, b.Sub)) })
	var rec mvcc.HashRecord
	var records []router.HashRecord
	for i := range list {
		rec.SetVersion(&list[i])
		records = append(records, router.Sum(&rec))
	}
	return records, nil
}

type hashStream struct{ records []router.HashRecord }

func (h *hashStream) Next(context.Context) ([]router.HashRecord, error) {
	if len(h.records) == 0 {
		return nil, io.EOF
	}
	n := min(3, len(h.records))
	block := h.records[:n]
	h.records = h.records[n:]
	return block, nil
}

func (h *hashStream) Close() error { return nil }

// Write implements router.Stores.
func (s *Store) Write(ctx context.Context, expired <-chan struct{}, d pdpb.Descriptor, req *regionpb.WriteRequest) (*pb.TxnResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-ctx.Done():
		case <-expired:
			cancel()
		}
	}()
	if err := s.fail(ctx, "write"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.region(req.Region, req.Epoch, mvcc.Span{End: []byte{}}); err != nil {
		return nil, err
	}
	if req.Cut > s.cut {
		return nil, regionpb.ErrorOf(regionpb.NotComplete)
	}
	if !within(d.Span, req.Txn) {
		return nil, fmt.Errorf("routertest: a transaction names keys outside of %v", d.Span)
	}
	if err := s.cross.await(ctx, 0, locksOf(nil, req.Txn)); err != nil {
		return nil, err
	}
	if req.IfWrites && s.writesNothing(req.Txn) {
		return nil, regionpb.ErrorOf(regionpb.WritesNothing)
	}
	return s.write(req.Txn)
}
