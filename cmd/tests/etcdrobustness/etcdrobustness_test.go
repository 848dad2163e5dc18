package main

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
	"go.uber.org/zap"

	"braid/cmd/tests/etcdbin"
	"braid/cmd/tests/netns"
)

// TestPartition is a round of Kubernetes' traffic with the oracle's leader cut off, where namespaces
// can be made.
func TestPartition(t *testing.T) {
	net, err := netns.New(nodes)
	if err != nil {
		t.Skipf("network namespaces cannot be made here: %v", err)
	}
	defer func() {
		if err := net.Close(); err != nil {
			t.Error(err)
		}
	}()
	bin, err := etcdbin.Braid()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range profiles {
		if p.name != "KubernetesHigh" {
			continue
		}
		r := &round{bin: bin, net: net, profile: p, seed: 2, fault: partitionOracle, dir: t.TempDir()}
		if err := r.run(context.Background()); err != nil {
			t.Error(err)
		}
		t.Log(r.line())
	}
}

// TestRound runs a round, and then judges it with planted faults: each must be found.
func TestRound(t *testing.T) {
	bin, err := etcdbin.Braid()
	if err != nil {
		t.Fatal(err)
	}
	r := &round{bin: bin, profile: profiles[0], seed: 1, fault: killLeader, dir: t.TempDir()}
	if err := r.run(context.Background()); err != nil {
		t.Fatal(err)
	}
	t.Log(r.line())
	dir := filepath.Join(r.dir, reportDir)
	if err := recheck(dir); err != nil {
		t.Fatalf("judged again: %v", err)
	}
	load := func() ([]report.ClientReport, []model.EtcdRequest) {
		requests, err := report.LoadClusterPersistedRequests(zap.NewNop(), dir)
		if err != nil {
			t.Fatal(err)
		}
		reports, err := report.LoadClientReports(dir)
		if err != nil {
			t.Fatal(err)
		}
		return reports, requests
	}
	for _, tc := range []struct {
		name, want string
		plant      func([]report.ClientReport, []model.EtcdRequest) ([]report.ClientReport, []model.EtcdRequest)
	}{
		{"a request lost from the record", "", func(r []report.ClientReport, q []model.EtcdRequest) ([]report.ClientReport, []model.EtcdRequest) {
			return r, slices.Delete(q, len(q)/2, len(q)/2+1)
		}},
		{"an event lost", "Reliable", func(r []report.ClientReport, q []model.EtcdRequest) ([]report.ClientReport, []model.EtcdRequest) {
			w := busiest(r)
			w.Responses = slices.Delete(w.Responses, len(w.Responses)/2, len(w.Responses)/2+1)
			return r, q
		}},
		{"an event twice", "Unique", func(r []report.ClientReport, q []model.EtcdRequest) ([]report.ClientReport, []model.EtcdRequest) {
			w := busiest(r)
			w.Responses = slices.Insert(w.Responses, len(w.Responses)/2, w.Responses[len(w.Responses)/2])
			return r, q
		}},
		{"a stale read", "recorded order", func(r []report.ClientReport, q []model.EtcdRequest) ([]report.ClientReport, []model.EtcdRequest) {
			for i := range r {
				for k := range r[i].KeyValue {
					op := &r[i].KeyValue[k]
					request, response := op.Input.(model.EtcdRequest), op.Output.(model.MaybeEtcdResponse)
					if request.Type == model.Range && request.Range.Revision == 0 && response.Error == "" && len(response.Range.KVs) > 0 && response.Range.KVs[0].ModRevision > 2 {
						kvs := slices.Clone(response.Range.KVs)
						kvs[0].ModRevision--
						got := *response.Range
						got.KVs = kvs
						response.Range = &got
						op.Output = response
						return r, q
					}
				}
			}
			t.Fatal("no read")
			return r, q
		}},
	} {
		reports, requests := tc.plant(load())
		_, err := judge(zap.NewNop(), false, reports, requests)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

// busiest is the watch that was sent most, without what brought no events.
func busiest(reports []report.ClientReport) *model.WatchOperation {
	var most *model.WatchOperation
	for i := range reports {
		for k := range reports[i].Watch {
			w := &reports[i].Watch[k]
			w.Responses = slices.DeleteFunc(w.Responses, func(r model.WatchResponse) bool { return len(r.Events) == 0 })
			if most == nil || len(w.Responses) > len(most.Responses) {
				most = w
			}
		}
	}
	return most
}
