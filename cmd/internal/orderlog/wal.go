package orderlog

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// The format of etcd's write-ahead log (its packages storage/wal and walpb), as far as a reader
// needs it. A file is a sequence of frames: eight bytes of length, little-endian, whose top byte
// counts the zero bytes that pad the record to a multiple of eight (with its high bit set), then
// the record {1: type, 2: crc, 3: data}. The crc runs over the data of all records so far.
const (
	walMetadata = 1
	walEntry    = 2
	walState    = 3
	walCRC      = 4
	walSnapshot = 5

	walName = "0000000000000000-0000000000000000.wal" // the first segment, from index 0
	// walTerm is the term of all entries, so that the records of all nodes are equal.
	walTerm = 1
)

// walWriter writes one segment of any length.
type walWriter struct {
	file  *os.File
	crc   uint32
	index uint64 // of the last entry
	buf   []byte
}

// createWAL writes the beginning of a log in place of what is there.
func createWAL(dir string) (*walWriter, error) {
	path := filepath.Join(dir, walName)
	file, err := os.OpenFile(path+".new", os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	w := &walWriter{file: file}
	w.record(walCRC, nil)
	w.record(walMetadata, nil)
	w.record(walSnapshot, []byte{1 << 3, 0, 2 << 3, 0}) // of nothing: index 0, term 0
	err = w.flush()
	if err == nil {
		// A reader finds the old file or the new one.
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return w, nil
}

// record adds a record to the buffer. nil data is left out of the record, as etcd does.
func (w *walWriter) record(kind uint64, data []byte) {
	w.crc = crc32.Update(w.crc, castagnoli, data)
	at := len(w.buf)
	w.buf = append(w.buf, make([]byte, 8)...)
	w.buf = protowire.AppendVarint(protowire.AppendTag(w.buf, 1, protowire.VarintType), kind)
	w.buf = protowire.AppendVarint(protowire.AppendTag(w.buf, 2, protowire.VarintType), uint64(w.crc))
	if data != nil {
		w.buf = protowire.AppendBytes(protowire.AppendTag(w.buf, 3, protowire.BytesType), data)
	}
	n := uint64(len(w.buf) - at - 8)
	length := n
	if pad := -n & 7; pad > 0 {
		length |= (0x80 | pad) << 56
		w.buf = append(w.buf, make([]byte, pad)...)
	}
	binary.LittleEndian.PutUint64(w.buf[at:], length)
}

// append adds one committed entry for each request.
func (w *walWriter) append(requests []request) error {
	if len(requests) == 0 {
		return nil
	}
	for i := range requests {
		data, err := proto.Marshal(internalRequest(w.index+1, &requests[i]))
		if err != nil {
			return err
		}
		w.index++
		entry, err := proto.Marshal(&raftpb.Entry{
			Term: proto.Uint64(walTerm), Index: proto.Uint64(w.index), Type: raftpb.EntryNormal.Enum(), Data: data,
		})
		if err != nil {
			return err
		}
		w.record(walEntry, entry)
	}
	state, err := proto.Marshal(&raftpb.HardState{Term: proto.Uint64(walTerm), Vote: proto.Uint64(0), Commit: proto.Uint64(w.index)})
	if err != nil {
		return err
	}
	w.record(walState, state)
	return w.flush()
}

func (w *walWriter) flush() error {
	_, err := w.file.Write(w.buf)
	w.buf = w.buf[:0]
	if err != nil {
		return fmt.Errorf("orderlog: %w", err)
	}
	return nil
}

func (w *walWriter) close() error { return w.file.Close() }

// internalRequest is a request that would have had the same effect on an etcd.
func internalRequest(id uint64, q *request) *pb.InternalRaftRequest {
	r := &pb.InternalRaftRequest{Header: &pb.RequestHeader{ID: id}}
	switch {
	case q.kind == kindCompaction:
		r.Compaction = &pb.CompactionRequest{Revision: int64(q.compact)}
	case q.kind == kindLeaseSet:
		r.LeaseGrant = &pb.LeaseGrantRequest{ID: q.lease, TTL: q.ttl}
	case q.kind == kindLeaseEnd:
		// As in etcd, also when its time was up. Which keys go with it follows from the puts before.
		r.LeaseRevoke = &pb.LeaseRevokeRequest{ID: q.lease}
	case len(q.changes) == 1 && q.changes[0].delete:
		r.DeleteRange = &pb.DeleteRangeRequest{Key: q.changes[0].key}
	case len(q.changes) == 1:
		r.Put = q.changes[0].put()
	default:
		r.Txn = &pb.TxnRequest{}
		for i := range q.changes {
			op := &pb.RequestOp{}
			if c := &q.changes[i]; c.delete {
				op.Request = &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: c.key}}
			} else {
				op.Request = &pb.RequestOp_RequestPut{RequestPut: c.put()}
			}
			r.Txn.Success = append(r.Txn.Success, op)
		}
	}
	return r
}

func (c *change) put() *pb.PutRequest {
	return &pb.PutRequest{Key: c.key, Value: c.value, Lease: c.lease}
}
