package main

import (
	"fmt"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/tests/v3/robustness/identity"
	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
	"go.etcd.io/etcd/tests/v3/robustness/validate"
	"go.uber.org/zap"
)

// CheckEtcd hands the history to etcd's own robustness checker: its model of etcd under porcupine,
// over all keys at once with header revisions, compactions and reads of the past, and its check of
// those reads by replay.
//
// etcd's suite gives that checker the list of requests the server persisted, from etcd's log files,
// to find out what became of writes without an answer. Here that is known from the store's past, as
// CheckOrder explains it; so this runs only on histories whose every revision has a known maker. A
// write without an answer is left out if it made no revision; else the checker is told its revision
// ("persisted", in its terms) and the time by which it had been seen. The list itself, for the
// replay, is the makers of the revisions in order. It holds no compactions: their place among the
// revisions is not recorded, and the replay of reads of the past does not need it.
func CheckEtcd(h *History, timeout time.Duration) []string {
	order := newOrderCheck(h)
	outcomes, known := order.outcomes()
	if !known {
		return []string{"not run: the order of writes is not clear"}
	}
	reports, requests := reportsOf(h, outcomes)
	var persisted []model.EtcdRequest
	for rev := 2; rev < len(h.States); rev++ {
		persisted = append(persisted, requests[order.writer[rev]])
	}
	result := validate.ValidateAndReturnVisualize(zap.NewNop(), validate.Config{ExpectRevisionUnique: true}, reports, persisted, timeout)
	if err := result.Error(); err != nil {
		return []string{err.Error()}
	}
	return nil
}

// reportsOf converts the history to etcd's form: a report per client, and each call's request.
func reportsOf(h *History, outcomes map[*Op]outcome) ([]report.ClientReport, map[*Op]model.EtcdRequest) {
	ids := identity.NewIDProvider()
	byClient := map[int][]*Op{}
	clients := 0
	for _, op := range h.Ops {
		byClient[op.Client] = append(byClient[op.Client], op)
		clients = max(clients, op.Client+1)
	}
	requests := map[*Op]model.EtcdRequest{}
	var reports []report.ClientReport
	for client := range clients {
		ops := byClient[client]
		slices.SortFunc(ops, func(a, b *Op) int { return int(a.Call - b.Call) })
		history := model.NewAppendableHistory(ids)
		var converted []*Op
		for _, op := range ops {
			if op.Serializable() {
				continue // the checker has no place for reads that may be behind
			}
			appendOp(history, op)
			converted = append(converted, op)
		}
		r := report.ClientReport{ClientID: client}
		for i, call := range history.Operations() {
			op := converted[i]
			requests[op] = call.Input.(model.EtcdRequest)
			if o, unanswered := outcomes[op]; unanswered {
				if o.rev == 0 {
					continue
				}
				call.Output = model.MaybeEtcdResponse{Persisted: true, PersistedRevision: o.rev}
				call.Return = int64(o.by)
			}
			r.KeyValue = append(r.KeyValue, call)
		}
		reports = append(reports, r)
	}
	return reports, requests
}

func appendOp(history *model.AppendableHistory, op *Op) {
	var err error
	if !op.OK() {
		err = fmt.Errorf("%s", op.Err)
	}
	switch r := op.Req.(type) {
	case *pb.RangeRequest:
		resp, _ := op.Resp.(*pb.RangeResponse)
		history.AppendRange(string(r.Key), string(r.RangeEnd), r.Revision, r.Limit, r.KeysOnly, op.Call, op.Return, (*clientv3.GetResponse)(resp), err)
	case *pb.PutRequest:
		resp, _ := op.Resp.(*pb.PutResponse)
		history.AppendPut(string(r.Key), string(r.Value), op.Call, op.Return, (*clientv3.PutResponse)(resp), err)
	case *pb.DeleteRangeRequest:
		resp, _ := op.Resp.(*pb.DeleteRangeResponse)
		if len(r.RangeEnd) > 0 {
			ops, answer := deleteEach(r, resp)
			history.AppendTxn(nil, ops, nil, op.Call, op.Return, answer, err)
			return
		}
		history.AppendDelete(string(r.Key), op.Call, op.Return, (*clientv3.DeleteResponse)(resp), err)
	case *pb.CompactionRequest:
		resp, _ := op.Resp.(*pb.CompactionResponse)
		history.AppendCompact(r.Revision, op.Call, op.Return, (*clientv3.CompactResponse)(resp), err)
	case *pb.TxnRequest:
		resp, _ := op.Resp.(*pb.TxnResponse)
		var cmps []clientv3.Cmp
		for _, c := range r.Compare {
			cmps = append(cmps, clientv3.FromCompare(c))
		}
		history.AppendTxn(cmps, clientOps(r.Success), clientOps(r.Failure), op.Call, op.Return, (*clientv3.TxnResponse)(resp), err)
	}
}

// deleteEach says in terms of etcd's model, which deletes single keys only, what a delete of a range
// is: a transaction that deletes each of its keys.
func deleteEach(r *pb.DeleteRangeRequest, resp *pb.DeleteRangeResponse) ([]clientv3.Op, *clientv3.TxnResponse) {
	var ops []clientv3.Op
	for _, key := range keysIn(r) {
		ops = append(ops, clientv3.OpDelete(key))
	}
	if resp == nil {
		return ops, nil
	}
	answer := &clientv3.TxnResponse{Header: resp.Header, Succeeded: true}
	for _, key := range keysIn(r) {
		answer.Responses = append(answer.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseDeleteRange{
			ResponseDeleteRange: &pb.DeleteRangeResponse{Deleted: *deletedOf(r, resp, key)}}})
	}
	return ops, answer
}

func clientOps(ops []*pb.RequestOp) []clientv3.Op {
	var out []clientv3.Op
	for _, op := range ops {
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			out = append(out, clientv3.OpGet(string(o.RequestRange.Key)))
		case *pb.RequestOp_RequestPut:
			out = append(out, clientv3.OpPut(string(o.RequestPut.Key), string(o.RequestPut.Value)))
		case *pb.RequestOp_RequestDeleteRange:
			out = append(out, clientv3.OpDelete(string(o.RequestDeleteRange.Key)))
		}
	}
	return out
}
