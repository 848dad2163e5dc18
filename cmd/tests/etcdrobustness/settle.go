package main

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/anishathalye/porcupine"
	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
)

// settle leaves out the writes without an answer that had no effect, and says how many had one.
//
// The suite leaves them out too, where a unique value shows that they are not in the recorded order.
// A deletion has no value: as long as several clients delete the same key, the suite takes each
// unanswered one for executed at an unknown time or never, and two dozen of them keep its search
// busy for ever. The record has more to say than that. Every entry of it was somebody's request: an
// answered one's, whose revision says which, or else an unanswered one's that was sent early enough
// and would have done exactly what the entry did. So many unanswered requests had an effect as there
// are entries left; the others had none.
//
// This makes the search narrower and never wider. The model allows every unanswered request to have
// had no effect, so an order that explains the history without it explains the history with it. An
// entry that was nobody's request is an error.
func settle(reports []report.ClientReport, requests []model.EtcdRequest) (settled []report.ClientReport, executed int, err error) {
	s, err := newStates(requests, reports)
	if err != nil {
		return nil, 0, err
	}
	kept, err := s.match(reports)
	if err != nil {
		return nil, 0, err
	}
	settled = slices.Clone(reports)
	for i := range settled {
		settled[i].KeyValue = nil
		for k := range reports[i].KeyValue {
			op := &reports[i].KeyValue[k]
			if !unanswered(op) || kept[op] {
				settled[i].KeyValue = append(settled[i].KeyValue, *op)
			}
		}
	}
	return settled, len(kept), nil
}

// unanswered says whether an operation wanted to write and its client does not know what became of it.
func unanswered(op *porcupine.Operation) bool {
	request := op.Input.(model.EtcdRequest)
	return op.Output.(model.MaybeEtcdResponse).Error != "" && !request.IsRead() && request.Type != model.Defragment
}

// match finds an unanswered write for each entry that no answered request made.
func (s *states) match(reports []report.ClientReport) (map[*porcupine.Operation]bool, error) {
	var writes []*porcupine.Operation // without an answer
	owned := make([]bool, len(s.entries))
	for i := range reports {
		for k := range reports[i].KeyValue {
			op := &reports[i].KeyValue[k]
			if unanswered(op) {
				writes = append(writes, op)
			} else if e := s.madeBy(op); e >= 0 {
				owned[e] = true
			}
		}
	}
	slices.SortFunc(writes, func(a, b *porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) })
	floors := answeredBefore(writes, reports)

	// A maximum matching, entry by entry. Any that is complete will do: a request without an answer
	// may be executed arbitrarily late.
	maker := make([]int, len(writes)) // of which entry, or -1
	for i := range maker {
		maker[i] = -1
	}
	could := map[int][]int{} // by entry: the writes that could have made it
	var find func(e int, seen []bool) bool
	find = func(e int, seen []bool) bool {
		for _, w := range could[e] {
			if seen[w] {
				continue
			}
			seen[w] = true
			if maker[w] < 0 || find(maker[w], seen) {
				maker[w] = e
				return true
			}
		}
		return false
	}
	for e := range s.entries {
		entry := &s.entries[e]
		if owned[e] || entry.request.Type == model.LeaseGrant {
			continue // who has no answer to a grant does not know its lease, and cannot use it
		}
		for w, op := range writes {
			if floors[w] <= entry.before.Revision && entry.by(op.Input.(model.EtcdRequest)) {
				could[e] = append(could[e], w)
			}
		}
		if !find(e, make([]bool, len(writes))) {
			return nil, fmt.Errorf("entry %d of the recorded order, %s, after revision %d, was nobody's request",
				e+1, describe(entry.request), entry.before.Revision)
		}
	}
	kept := map[*porcupine.Operation]bool{}
	for w, e := range maker {
		if e >= 0 {
			kept[writes[w]] = true
		}
	}
	return kept, nil
}

// answeredBefore is, for each write, the highest revision of any answer that came before the write
// was sent. writes are in the order in which they were sent.
func answeredBefore(writes []*porcupine.Operation, reports []report.ClientReport) []int64 {
	var answers []*porcupine.Operation
	for i := range reports {
		for k := range reports[i].KeyValue {
			if op := &reports[i].KeyValue[k]; op.Output.(model.MaybeEtcdResponse).Error == "" {
				answers = append(answers, op)
			}
		}
	}
	slices.SortFunc(answers, func(a, b *porcupine.Operation) int { return cmp.Compare(a.Return, b.Return) })
	floors := make([]int64, len(writes))
	var highest int64
	next := 0
	for w, op := range writes {
		for ; next < len(answers) && answers[next].Return < op.Call; next++ {
			highest = max(highest, answers[next].Output.(model.MaybeEtcdResponse).Revision)
		}
		floors[w] = highest
	}
	return floors
}

func describe(r model.EtcdRequest) string {
	return model.NonDeterministicModel(nil).DescribeOperation(r, model.MaybeEtcdResponse{Persisted: true})
}
