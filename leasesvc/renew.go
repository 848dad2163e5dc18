package leasesvc

import (
	"context"
	"errors"
	"time"

	"braid/region/regionpb"
)

// requestKind is what is asked of the node that keeps a lease's time.
type requestKind byte

const (
	askRenew requestKind = iota + 1
	askRemaining
)

// request is one question, on this node or in a batch.
type request struct {
	kind requestKind
	id   int64
}

// answer is its answer: seconds of a renewal, nanoseconds of what is left.
type answer struct {
	out   Outcome
	value int64
}

// forget is an answer beside the core's outcomes: what is recorded must be taken back first.
const forget Outcome = Wait + 1

// pauseMax bounds the time between two looks while nothing is heard.
const pauseMax = 100 * time.Millisecond

// Renew gives a lease its full time to live again, without a round of raft, and returns that in
// seconds. A lease that is being ended is waited for.
func (s *Service) Renew(ctx context.Context, id int64) (int64, error) {
	for {
		out, ttl, err := s.ask(ctx, request{askRenew, id})
		if err != nil {
			return 0, err
		}
		if out == Renewed {
			return ttl, nil
		}
		// A leader that was deposed and does not know it may not know the lease either, and a client
		// that hears of its end gives up: so that is confirmed.
		rec, _, _, err := s.cfg.Store.LeaseLook(ctx, id, false)
		if err != nil {
			return 0, err
		}
		if rec == nil {
			return 0, ErrNotFound
		}
	}
}

// ask puts a question to the node that keeps the lease's time, wherever that is, until it is
// answered with Renewed or Unknown.
func (s *Service) ask(ctx context.Context, q request) (Outcome, int64, error) {
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, pauseMax) {
		a := answer{out: Elsewhere}
		var changed chan struct{}
		if d, ok := s.cfg.Store.LeaseHome(q.id); ok {
			leader, here := s.cfg.Cluster.Leader(&d)
			switch {
			case here:
				a, changed = s.here(q)
			case leader != 0:
				a = s.peers.ask(ctx, leader, q)
			}
		}
		switch a.out {
		case Renewed, Unknown:
			return a.out, a.value, nil
		case forget:
			if err := s.cfg.Store.LeaseCheckpoint(ctx, q.id, 0, 0); err != nil && !isCode(err, regionpb.LeaseNotFound) {
				return 0, 0, err
			}
			continue
		}
		t := time.NewTimer(pause)
		select {
		case <-changed:
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return 0, 0, ctx.Err()
		case <-s.ctx.Done():
			t.Stop()
			return 0, 0, regionpb.ErrorOf(regionpb.Stopped)
		}
		t.Stop()
	}
}

// here answers a question from this node's timers. When it has to wait, the channel is closed once
// there may be an answer.
func (s *Service) here(q request) (answer, chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.answerLocked(q)
	if a.out != Wait {
		return a, nil
	}
	ch := make(chan struct{})
	s.mu.waiting[q.id] = append(s.mu.waiting[q.id], ch)
	return a, ch
}

func (s *Service) answerLocked(q request) answer {
	d, ok := s.cfg.Store.LeaseHome(q.id)
	if !ok {
		return answer{out: Elsewhere}
	}
	if q.kind == askRemaining {
		out, left := s.mu.core.Remaining(d.ID, q.id, s.now())
		return answer{out, int64(left)}
	}
	out, ttl, undo := s.mu.core.Renew(d.ID, q.id, s.now())
	if undo.Kind == Checkpoint {
		return answer{out: forget}
	}
	return answer{out, ttl}
}

func isCode(err error, code regionpb.Code) bool {
	var re *regionpb.Error
	return errors.As(err, &re) && re.Code == code
}
