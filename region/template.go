package region

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"braid/mvcc"
)

// template is an answer whose revisions are filled in when the command's place in the order is
// known (E5). What an answer shows of ranges that depend on such revisions is finished then too.
type template struct {
	resp  *pb.TxnResponse
	fixes []fix
	late  []lateRange
}

// fix is a revision to fill in: num's, or, when num is nil, the last one given out before the
// command.
type fix struct {
	dst *int64
	num *number
}

// lateRange is a range whose filters or order depend on revisions that were not known when it
// was evaluated. It can wait because it decides nothing: no effect depends on it.
type lateRange struct {
	resp *pb.RangeResponse
	req  *pb.RangeRequest
	kvs  []*mvccpb.KeyValue
}

func (t *template) fix(dst *int64, num *number) { t.fixes = append(t.fixes, fix{dst, num}) }

// fill completes the answer; before is the last revision given out before the command. Numbers
// that fixes name belong to this command or to earlier ones of the same log, so they are known.
func (t *template) fill(before mvcc.Revision) *pb.TxnResponse {
	for i := range t.fixes {
		f := &t.fixes[i]
		switch {
		case f.num == nil:
			*f.dst = int64(before)
		case f.num.rev == 0:
			panic("region: an answer depends on a revision that was never given")
		default:
			*f.dst = int64(f.num.rev)
		}
	}
	for i := range t.late {
		l := &t.late[i]
		finishRange(l.resp, l.kvs, l.req)
	}
	return t.resp
}

// newTxnResponse makes a response with its header in one allocation.
func newTxnResponse() *pb.TxnResponse {
	a := &struct {
		resp pb.TxnResponse
		head pb.ResponseHeader
	}{}
	a.resp.Header = &a.head
	return &a.resp
}
