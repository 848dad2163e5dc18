package order

import (
	"encoding/binary"

	"braid/mvcc"
	"braid/pd/pdpb"
)

// hashesMax is how many hashes of compactions are remembered, as in etcd.
const hashesMax = 10

// hashes are what the store hashed to at the revisions of compactions, just before each of them,
// ascending by revision. A compaction removes what such a hash was taken of, and HashKV at its
// revision must not change by it; so whoever asked for the compaction hashed first, and pd, whose
// answer is the same for all members, keeps the result.
type hashes []pdpb.CompactHash

// remember keeps the hash that came with a compaction which moved the floor away from where it was
// when the hash was taken. Another compaction in between has removed part of that.
func (h *hashes) remember(x pdpb.CompactHash, floor mvcc.Revision) {
	if x.Rev <= 0 || x.Floor != floor {
		return
	}
	*h = append(*h, x)
	if len(*h) > hashesMax {
		*h = (*h)[:copy(*h, (*h)[1:])]
	}
}

func (h hashes) find(rev mvcc.Revision) (pdpb.CompactHash, bool) {
	for _, x := range h {
		if x.Rev == rev {
			return x, true
		}
	}
	return pdpb.CompactHash{}, false
}

func (h hashes) append(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(len(h)))
	for _, x := range h {
		b = x.Append(b)
	}
	return b
}

func readHashes(d *pdpb.Dec) (h hashes) {
	for n := d.Len(3); n > 0 && d.Err() == nil; n-- {
		h = append(h, d.CompactHash())
	}
	if len(h) > hashesMax {
		d.Fail("%d hashes of compactions", len(h))
	}
	return h
}
