package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/anishathalye/porcupine"
	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
)

// TestSettle has histories with unanswered writes beside a recorded order. A write is "KEY=VALUE" or
// "-KEY", or several of them with spaces between; an operation is sent and answered at given times.
func TestSettle(t *testing.T) {
	type op struct {
		write          string
		call, answered int64
		revision       int64 // 0: there was no answer
	}
	for _, tc := range []struct {
		name   string
		ops    []op
		record []string
		kept   []int // of the unanswered ones, by index into ops
		err    string
	}{
		{name: "a put that is recorded, and one that is not",
			ops:    []op{{"a=1", 1, 2, 0}, {"a=2", 3, 4, 0}},
			record: []string{"a=2"}, kept: []int{1}},
		{name: "of two deletions one is left, and any will do",
			ops:    []op{{"a=1", 1, 2, 2}, {"-a", 3, 4, 0}, {"-a", 5, 6, 0}},
			record: []string{"a=1", "-a"}, kept: []int{1}},
		{name: "an answered deletion is the recorded one",
			ops:    []op{{"a=1", 1, 2, 2}, {"-a", 3, 8, 0}, {"-a", 5, 6, 3}},
			record: []string{"a=1", "-a"}},
		{name: "sent when later things had been answered",
			ops:    []op{{"a=1", 1, 2, 2}, {"-a", 3, 4, 0}, {"a=2", 5, 6, 4}, {"-a", 7, 8, 0}},
			record: []string{"a=1", "-a", "a=2"}, kept: []int{1}},
		{name: "two entries, and the first took the only deletion that could be the second",
			ops:    []op{{"a=1", 1, 2, 2}, {"-a", 3, 4, 0}, {"a=2", 5, 6, 4}, {"-a -b", 7, 8, 0}},
			record: []string{"a=1", "-a", "a=2", "-a"}, kept: []int{1, 3}},
		{name: "a transaction that deletes something that is not there",
			ops:    []op{{"a=1", 1, 2, 2}, {"-a -b", 3, 4, 0}},
			record: []string{"a=1", "-a"}, kept: []int{1}},
		{name: "executed twice",
			ops:    []op{{"a=1", 1, 2, 2}, {"-a", 3, 4, 3}, {"a=2", 5, 6, 4}},
			record: []string{"a=1", "-a", "a=2", "-a"}, err: "nobody's request"},
		{name: "executed before it was sent",
			ops:    []op{{"a=1", 1, 2, 2}, {"a=2", 3, 4, 4}, {"-a", 5, 6, 0}},
			record: []string{"a=1", "-a", "a=2"}, err: "nobody's request"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var ops []porcupine.Operation
			for i, o := range tc.ops {
				response := model.MaybeEtcdResponse{Error: "timeout"}
				if o.revision > 0 {
					results := make([]model.EtcdOperationResult, len(strings.Fields(o.write)))
					for k, w := range strings.Fields(o.write) {
						if strings.HasPrefix(w, "-") {
							results[k].Deleted = 1
						}
					}
					response = model.MaybeEtcdResponse{EtcdResponse: model.EtcdResponse{Revision: o.revision, Txn: &model.TxnResponse{Results: results}}}
				}
				ops = append(ops, porcupine.Operation{ClientId: i, Input: writing(o.write), Call: o.call, Return: o.answered, Output: response})
			}
			var requests []model.EtcdRequest
			for _, w := range tc.record {
				requests = append(requests, writing(w))
			}
			settled, executed, err := settle([]report.ClientReport{{KeyValue: ops}}, requests)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Fatalf("error %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var kept []int
			for _, op := range settled[0].KeyValue {
				if unanswered(&op) {
					kept = append(kept, op.ClientId)
				}
			}
			if !slices.Equal(kept, tc.kept) || executed != len(tc.kept) {
				t.Errorf("kept %v (%d executed), want %v", kept, executed, tc.kept)
			}
		})
	}
}

// writing is a transaction without compares.
func writing(s string) model.EtcdRequest {
	txn := &model.TxnRequest{}
	for _, w := range strings.Fields(s) {
		op := model.EtcdOperation{Type: model.DeleteOperation, Delete: model.DeleteOptions{Key: strings.TrimPrefix(w, "-")}}
		if key, value, ok := strings.Cut(w, "="); ok {
			op = model.EtcdOperation{Type: model.PutOperation, Put: model.PutOptions{Key: key, Value: model.ToValueOrHash(value)}}
		}
		txn.OperationsOnSuccess = append(txn.OperationsOnSuccess, op)
	}
	return model.EtcdRequest{Type: model.Txn, Txn: txn}
}
