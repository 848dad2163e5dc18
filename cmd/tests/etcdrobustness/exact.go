package main

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/anishathalye/porcupine"
	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
)

// exact compares every answer with the recorded order: an answer at revision R must be the model's
// at R, for a write the one that made R; and what was sent after another call had returned must not
// be ordered before it. The suite's search for a linearization comes to the same end, but when there
// is none it may search for hours and cannot say which answer was wrong.
func exact(reports []report.ClientReport, requests []model.EtcdRequest) error {
	replay, err := newStates(requests)
	if err != nil {
		return err
	}
	var ops []porcupine.Operation
	for i := range reports {
		for _, op := range reports[i].KeyValue {
			request, response := op.Input.(model.EtcdRequest), op.Output.(model.MaybeEtcdResponse)
			if response.Error != "" || response.ClientError != "" || response.Revision <= 0 || request.Type == model.Compact {
				continue
			}
			if request.Type == model.Range && request.Range.Revision != 0 {
				continue // the suite replays reads of the past
			}
			if !replay.answers(request, response) {
				return fmt.Errorf("client %d: %s is not what the recorded order gives at revision %d",
					op.ClientId, model.NonDeterministicModel(nil).DescribeOperation(op.Input, op.Output), response.Revision)
			}
			ops = append(ops, op)
		}
	}
	return realTime(ops)
}

// states are those of the model while the recorded order is replayed. The suite's own replay has one
// for each revision, the first; but leases begin and end without a revision.
type states struct {
	at     []model.EtcdState // by revision: as it was made
	before []model.EtcdState // by revision: what the request that made it found
}

func newStates(requests []model.EtcdRequest) (*states, error) {
	state, err := model.NewReplay(requests).StateForRevision(1)
	if err != nil {
		return nil, err
	}
	s := &states{at: []model.EtcdState{state, state}, before: []model.EtcdState{state, state}}
	for _, r := range requests {
		next, _ := state.Step(r)
		if next.Revision != state.Revision {
			s.at, s.before = append(s.at, next), append(s.before, state)
		}
		state = next
	}
	return s, nil
}

// answers says whether the model's answer to a request, at the revision of the response or as the
// request that made it, is the response.
func (s *states) answers(request model.EtcdRequest, response model.MaybeEtcdResponse) bool {
	if response.Revision >= int64(len(s.at)) {
		return false
	}
	for _, state := range []model.EtcdState{s.at[response.Revision], s.before[response.Revision]} {
		if _, want := state.Step(request); model.Match(response, want) {
			return true
		}
	}
	return false
}

// realTime finds a call that was sent after another had returned and answered from before it.
func realTime(ops []porcupine.Operation) error {
	revision := func(op *porcupine.Operation) int64 { return op.Output.(model.MaybeEtcdResponse).Revision }
	sent := slices.SortedFunc(slices.Values(ops), func(a, b porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) })
	returned := slices.SortedFunc(slices.Values(ops), func(a, b porcupine.Operation) int { return cmp.Compare(a.Return, b.Return) })
	var newest *porcupine.Operation // of what had returned
	next := 0
	for i := range sent {
		op := &sent[i]
		for ; next < len(returned) && returned[next].Return < op.Call; next++ {
			if newest == nil || revision(&returned[next]) > revision(newest) {
				newest = &returned[next]
			}
		}
		if newest != nil && revision(op) < revision(newest) {
			return fmt.Errorf("client %d: answered from revision %d, after client %d had been answered from %d", op.ClientId, revision(op), newest.ClientId, revision(newest))
		}
	}
	return nil
}
