package router

import (
	"bytes"
	"sort"

	"braid/mvcc"
	"braid/pd/pdpb"
)

// rangeSpan translates etcd's (key, range_end): no end is the one key, an end of one zero byte is
// everything from key on, and an end that is not above key is an empty range.
func rangeSpan(key, end []byte) mvcc.Span {
	switch {
	case len(end) == 0:
		return mvcc.Key(key)
	case len(end) == 1 && end[0] == 0:
		return mvcc.Span{Start: key}
	}
	return mvcc.Span{Start: key, End: end}
}

// find returns the region that holds key. The search relies on the order that Oracle promises.
func find(regions []pdpb.Descriptor, key []byte) (*pdpb.Descriptor, bool) {
	i := sort.Search(len(regions), func(i int) bool { return bytes.Compare(regions[i].Span.Start, key) > 0 })
	if i == 0 || !regions[i-1].Span.Contains(key) {
		return nil, false
	}
	return &regions[i-1], true
}

// overlapping returns the regions that share keys with span, as a part of the directory's slice.
func overlapping(regions []pdpb.Descriptor, span mvcc.Span) []pdpb.Descriptor {
	if span.Empty() {
		return nil
	}
	lo := sort.Search(len(regions), func(i int) bool {
		end := regions[i].Span.End
		return end == nil || bytes.Compare(end, span.Start) > 0
	})
	hi := len(regions)
	if span.End != nil {
		hi = sort.Search(len(regions), func(i int) bool { return bytes.Compare(regions[i].Span.Start, span.End) >= 0 })
	}
	if lo >= hi {
		return nil
	}
	return regions[lo:hi]
}
