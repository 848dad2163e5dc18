package main

import (
	"bytes"
	"sort"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// spread says how many regions a request touches.
type spread int

const (
	oneRegion spread = iota
	// arguable: more than one only if ranges that can hold no key are counted.
	arguable
	manyRegions
)

// splits are the keys at which a store's regions begin, in order; none: one region.
type splits [][]byte

func newSplits(keys []string) splits {
	s := make(splits, len(keys))
	for i, k := range keys {
		s[i] = []byte(k)
	}
	return s
}

// region is the position of the region that holds key.
func (s splits) region(key []byte) int {
	return sort.Search(len(s), func(i int) bool { return bytes.Compare(s[i], key) > 0 })
}

// writeSpread classifies a request: a write that touches several regions is what the store of many
// is asked for. Reads always are oneRegion here.
func (s splits) writeSpread(r Request) spread {
	f := footprint{splits: s, sure: map[int]bool{}, all: map[int]bool{}}
	switch m := r.Msg.(type) {
	case *pb.DeleteRangeRequest:
		f.writes = true
		f.add(m.Key, m.RangeEnd)
	case *pb.TxnRequest:
		f.txn(m)
	}
	switch {
	case !f.writes || len(f.all) < 2:
		return oneRegion
	case len(f.sure) < 2:
		return arguable
	default:
		return manyRegions
	}
}

// footprint collects the regions of all keys and ranges of a request, of both branches: which one
// is taken is not known when the request is routed.
type footprint struct {
	splits    splits
	writes    bool
	sure, all map[int]bool
}

func (f *footprint) txn(t *pb.TxnRequest) {
	for _, c := range t.Compare {
		f.add(c.Key, c.RangeEnd)
	}
	for _, ops := range [][]*pb.RequestOp{t.Success, t.Failure} {
		for _, op := range ops {
			switch o := op.Request.(type) {
			case *pb.RequestOp_RequestRange:
				f.add(o.RequestRange.Key, o.RequestRange.RangeEnd)
			case *pb.RequestOp_RequestPut:
				f.writes = true
				f.add(o.RequestPut.Key, nil)
			case *pb.RequestOp_RequestDeleteRange:
				f.writes = true
				f.add(o.RequestDeleteRange.Key, o.RequestDeleteRange.RangeEnd)
			case *pb.RequestOp_RequestTxn:
				f.txn(o.RequestTxn)
			}
		}
	}
}

func (f *footprint) add(key, end []byte) {
	first := f.splits.region(key)
	last, empty := first, false
	switch {
	case len(end) == 0:
	case len(end) == 1 && end[0] == 0: // all keys from key on
		last = len(f.splits)
	case bytes.Compare(key, end) >= 0:
		empty = true
	default:
		last = f.splits.region(end)
		// A range that ends where a region begins does not touch it.
		if last > 0 && bytes.Equal(end, f.splits[last-1]) {
			last--
		}
	}
	for region := first; region <= last; region++ {
		f.all[region] = true
		if !empty {
			f.sure[region] = true
		}
	}
}
