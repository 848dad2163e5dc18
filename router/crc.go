package router

import "braid/mvcc"

// HashRecord stands for one version of one key in a hash of the store: its place in the order and
// the checksum of what etcd hashes for it. Values need not travel (C-3).
type HashRecord struct {
	Rev mvcc.Revision
	Sub int64
	Len int    // bytes that the checksum covers
	CRC uint32 // CRC-32C of these bytes
}

// Sum makes the record of a version.
func Sum(r *mvcc.HashRecord) HashRecord {
	return HashRecord{Rev: r.Mod, Sub: r.Sub, Len: len(r.Key) + len(r.Value), CRC: mvcc.HashUpdate(0, r)}
}
