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
	replay, err := newStates(requests, reports)
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
	first   model.EtcdState
	entries []entry
	made    []int // by revision: the entry that made it; -1 for the first two
}

// entry is one request of the recorded order, with the states that it found and left.
type entry struct {
	request       model.EtcdRequest
	before, after model.EtcdState
}

// newStates replays the recorded order. The states know all keys that the record or a client names,
// so that any client's request can be tried on them.
func newStates(requests []model.EtcdRequest, reports []report.ClientReport) (*states, error) {
	named := slices.Clone(requests)
	for i := range reports {
		for _, op := range reports[i].KeyValue {
			if r := op.Input.(model.EtcdRequest); !r.IsRead() {
				named = append(named, r)
			}
		}
	}
	first, err := model.NewReplay(named).StateForRevision(1)
	if err != nil {
		return nil, err
	}
	s := &states{first: first, made: []int{-1, -1}}
	state := first
	for _, r := range requests {
		next, _ := state.Step(r)
		if next.Revision != state.Revision {
			s.made = append(s.made, len(s.entries))
		}
		s.entries = append(s.entries, entry{request: r, before: state, after: next})
		state = next
	}
	return s, nil
}

// answers says whether the model's answer to a request, at the revision of the response or as the
// request that made it, is the response.
func (s *states) answers(request model.EtcdRequest, response model.MaybeEtcdResponse) bool {
	if response.Revision >= int64(len(s.made)) {
		return false
	}
	found := []model.EtcdState{s.first}
	if e := s.made[response.Revision]; e >= 0 {
		found = []model.EtcdState{s.entries[e].after, s.entries[e].before}
	}
	for _, state := range found {
		if _, want := state.Step(request); model.Match(response, want) {
			return true
		}
	}
	return false
}

// madeBy is the entry that an answered write made, -1 if it changed nothing or is none.
func (s *states) madeBy(op *porcupine.Operation) int {
	request, response := op.Input.(model.EtcdRequest), op.Output.(model.MaybeEtcdResponse)
	if response.Error != "" || response.ClientError != "" || request.IsRead() {
		return -1
	}
	switch request.Type {
	case model.Txn:
		if response.Revision <= 0 || response.Revision >= int64(len(s.made)) {
			return -1
		}
		if e := s.made[response.Revision]; e >= 0 && s.entries[e].by(request) {
			if _, want := s.entries[e].before.Step(request); model.Match(response, want) {
				return e
			}
		}
		return -1
	case model.LeaseRevoke, model.Compact: // each once, and their answers do not say where
		return slices.IndexFunc(s.entries, func(e entry) bool { return e.request.Type == request.Type && e.by(request) })
	}
	return -1
}

// by says whether a request, in the place of the entry's, would have done the same.
func (e *entry) by(request model.EtcdRequest) bool {
	if (request.Type == model.Compact) != (e.request.Type == model.Compact) {
		return false
	}
	next, _ := e.before.Step(request)
	return next.Equal(e.after)
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
