// Package orderlogtest reads the record of the committed order, for tests.
package orderlogtest

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

const entryType = 2 // of etcd's records

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Read checks the framing of the record below a node's data directory and lists its entries, in
// order: "1 put a; 2 del b del c; 3 compact 7; ".
func Read(t *testing.T, dataDir string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dataDir, "member", "wal", "0000000000000000-0000000000000000.wal"))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	var crc uint32
	for len(b) > 0 {
		length := binary.LittleEndian.Uint64(b)
		n, pad := length&(1<<56-1), length>>56&0x7
		record := b[8 : 8+n]
		b = b[8+n+pad:]
		var kind, sum uint64
		var data []byte
		for len(record) > 0 {
			num, _, k := protowire.ConsumeTag(record)
			record = record[k:]
			switch num {
			case 1:
				kind, k = protowire.ConsumeVarint(record)
			case 2:
				sum, k = protowire.ConsumeVarint(record)
			case 3:
				data, k = protowire.ConsumeBytes(record)
			}
			record = record[k:]
		}
		if crc = crc32.Update(crc, castagnoli, data); uint64(crc) != sum {
			t.Fatalf("record of type %d has crc %x, want %x", kind, sum, crc)
		}
		if kind != entryType {
			continue
		}
		var e raftpb.Entry
		var r pb.InternalRaftRequest
		if err := proto.Unmarshal(data, &e); err != nil {
			t.Fatal(err)
		}
		if err := proto.Unmarshal(e.Data, &r); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&out, "%d", e.GetIndex())
		switch {
		case r.Put != nil:
			fmt.Fprintf(&out, " put %s", r.Put.Key)
		case r.DeleteRange != nil:
			fmt.Fprintf(&out, " del %s", r.DeleteRange.Key)
		case r.LeaseGrant != nil:
			fmt.Fprintf(&out, " grant %d", r.LeaseGrant.ID)
		case r.LeaseRevoke != nil:
			fmt.Fprintf(&out, " revoke %d", r.LeaseRevoke.ID)
		case r.Compaction != nil:
			fmt.Fprintf(&out, " compact %d", r.Compaction.Revision)
		}
		for _, op := range r.GetTxn().GetSuccess() {
			if p := op.GetRequestPut(); p != nil {
				fmt.Fprintf(&out, " put %s", p.Key)
			} else {
				fmt.Fprintf(&out, " del %s", op.GetRequestDeleteRange().GetKey())
			}
		}
		out.WriteString("; ")
	}
	return out.String()
}
