package leasesvc

import (
	"context"
	"encoding/binary"
	"errors"
	"sync"
	"time"

	"braid/raftstore/raftid"
)

// Questions to another node travel in batches, one at a time and no more often than batchEvery: what
// comes meanwhile makes the next. So ten thousand renewals a second cost a few hundred messages, also
// where an answer takes less time than the next question. One that comes after a pause goes at once.

// batchMax bounds the questions of a batch, waitingMax those that wait for one; more are turned away
// and come again after a pause.
const (
	batchMax   = 4096
	waitingMax = 64 << 10
	// callTimeout bounds a batch, so that a node that is cut off does not hold up what comes later.
	callTimeout = 2 * time.Second
	// batchEvery is what a renewal may wait for others that go the same way: nothing to a lease of
	// seconds.
	batchEvery = 5 * time.Millisecond
)

type peers struct {
	s  *Service
	mu sync.Mutex
	// byID grows with the cluster's nodes and no further.
	byID map[raftid.StoreID]*peer
}

type peer struct {
	mu      sync.Mutex
	waiting []*asked
	sending bool
}

type asked struct {
	q    request
	done chan answer // buffered
}

func (p *peers) get(id raftid.StoreID) *peer {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.byID[id] == nil {
		p.byID[id] = &peer{}
	}
	return p.byID[id]
}

// ask puts a question to another node. An answer that does not come is Elsewhere: ask again.
func (p *peers) ask(ctx context.Context, to raftid.StoreID, q request) answer {
	to2 := p.get(to)
	a := &asked{q: q, done: make(chan answer, 1)}
	to2.mu.Lock()
	if len(to2.waiting) >= waitingMax {
		to2.mu.Unlock()
		return answer{out: Elsewhere}
	}
	to2.waiting = append(to2.waiting, a)
	if !to2.sending {
		p.s.mu.Lock()
		to2.sending = p.s.goLocked(func() { p.send(to, to2) })
		p.s.mu.Unlock()
	}
	to2.mu.Unlock()
	select {
	case r := <-a.done:
		return r
	case <-ctx.Done():
	case <-p.s.ctx.Done():
	}
	return answer{out: Elsewhere}
}

// send sends batches until nothing waits.
func (p *peers) send(to raftid.StoreID, q *peer) {
	tick := time.NewTicker(batchEvery)
	defer tick.Stop()
	for {
		q.mu.Lock()
		batch := q.waiting[:min(len(q.waiting), batchMax)]
		q.waiting = append([]*asked(nil), q.waiting[len(batch):]...)
		if len(batch) == 0 {
			q.sending = false
			q.mu.Unlock()
			return
		}
		q.mu.Unlock()
		var data []byte
		for _, a := range batch {
			data = binary.AppendVarint(append(data, byte(a.q.kind)), a.q.id)
		}
		ctx, cancel := context.WithTimeout(p.s.ctx, callTimeout)
		reply, err := p.s.cfg.Cluster.Call(ctx, to, data)
		cancel()
		answers, derr := decodeAnswers(reply, len(batch))
		for i, a := range batch {
			if err != nil || derr != nil {
				a.done <- answer{out: Elsewhere}
			} else {
				a.done <- answers[i]
			}
		}
		select {
		case <-tick.C:
		case <-p.s.ctx.Done(): // what waits is told by that
		}
	}
}

var errBatch = errors.New("leasesvc: malformed batch")

func decodeAnswers(data []byte, n int) ([]answer, error) {
	list := make([]answer, n)
	for i := range list {
		if len(data) < 2 || data[0] > byte(forget) {
			return nil, errBatch
		}
		v, k := binary.Varint(data[1:])
		if k <= 0 {
			return nil, errBatch
		}
		list[i] = answer{Outcome(data[0]), v}
		data = data[1+k:]
	}
	if len(data) != 0 {
		return nil, errBatch
	}
	return list, nil
}

// Serve answers a batch of another node, at once: what would have to wait is answered so, and comes
// again.
func (s *Service) Serve(batch []byte) ([]byte, error) {
	var out []byte
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := 0; len(batch) > 0; n++ {
		kind := requestKind(batch[0])
		id, k := binary.Varint(batch[1:])
		if k <= 0 || n >= batchMax || kind < askRenew || kind > askRemaining {
			return nil, errBatch
		}
		batch = batch[1+k:]
		a, _ := s.answerLocked(request{kind, id})
		out = binary.AppendVarint(append(out, byte(a.out)), a.value)
	}
	return out, nil
}
