package region

import (
	"bytes"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// keySet is the key ranges of requests that had to be put off.
type keySet struct {
	list [][2][]byte // key and range end as in etcd
	n    int         // requests
}

// blockedMax bounds the requests that wait for a number; when it is reached, everything behind
// them waits too.
const blockedMax = 64

func (s *keySet) len() int   { return s.n }
func (s *keySet) full() bool { return s.n >= blockedMax }

func (s *keySet) add(txn *pb.TxnRequest) {
	s.n++
	ranges(txn, func(key, end []byte) bool {
		s.list = append(s.list, [2][]byte{key, end})
		return true
	})
}

// touches says whether txn names a key of the set.
func (s *keySet) touches(txn *pb.TxnRequest) bool {
	if len(s.list) == 0 {
		return false
	}
	return !ranges(txn, func(key, end []byte) bool {
		for i := range s.list {
			if overlap(key, end, s.list[i][0], s.list[i][1]) {
				return false
			}
		}
		return true
	})
}

func overlap(k1, e1, k2, e2 []byte) bool { return startsBefore(k1, k2, e2) && startsBefore(k2, k1, e1) }

// startsBefore says whether key is below the end of the range that starts at start.
func startsBefore(key, start, end []byte) bool {
	s, single := spanOf(start, end)
	if single {
		return bytes.Compare(key, start) <= 0
	}
	return s.End == nil || bytes.Compare(key, s.End) < 0
}
