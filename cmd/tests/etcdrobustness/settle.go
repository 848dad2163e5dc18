package main

import (
	"slices"

	"github.com/anishathalye/porcupine"
	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
)

// settle leaves out unanswered requests that certainly had no effect: they put a value that nobody
// else puts, and the recorded order does not hold it. The suite does so itself, except for
// transactions that also delete: as long as anybody has deleted the same key, it takes them for
// executed at an unknown time, and a dozen of them keep its search busy for ever.
func settle(reports []report.ClientReport, requests []model.EtcdRequest) []report.ClientReport {
	sent, recorded := map[model.PutOptions]int{}, map[model.PutOptions]bool{}
	for i := range reports {
		for _, op := range reports[i].KeyValue {
			eachPut(op.Input.(model.EtcdRequest), func(p model.PutOptions) { sent[p]++ })
		}
	}
	for _, r := range requests {
		eachPut(r, func(p model.PutOptions) { recorded[p] = true })
	}
	settled := slices.Clone(reports)
	for i := range settled {
		settled[i].KeyValue = slices.DeleteFunc(slices.Clone(settled[i].KeyValue), func(op porcupine.Operation) bool {
			if op.Output.(model.MaybeEtcdResponse).Error == "" {
				return false
			}
			missing := false
			request := op.Input.(model.EtcdRequest)
			if request.Type == model.Txn && len(request.Txn.OperationsOnFailure) > 0 && writes(request.Txn.OperationsOnFailure) {
				return false // it may have taken the branch without the put
			}
			eachPut(request, func(p model.PutOptions) { missing = missing || sent[p] == 1 && !recorded[p] })
			return missing
		})
	}
	return settled
}

func eachPut(r model.EtcdRequest, f func(model.PutOptions)) {
	if r.Type != model.Txn {
		return
	}
	for _, op := range r.Txn.AllOperations() {
		if op.Type == model.PutOperation {
			f(op.Put)
		}
	}
}

func writes(ops []model.EtcdOperation) bool {
	return slices.ContainsFunc(ops, func(op model.EtcdOperation) bool { return op.Type != model.RangeOperation })
}
