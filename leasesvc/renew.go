package leasesvc

import (
	"context"
	"errors"
	"time"

	"braid/pd/pdpb"
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
const forget Outcome = Unconfirmed + 1

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
		case forget: // whichever lease has the id now: all of its time is never too little
			if err := s.cfg.Store.LeaseCheckpoint(ctx, []regionpb.LeaseLeft{{ID: q.id}}, 0); err != nil {
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
	a, confirmed := s.answerLocked(q)
	if a.out != Wait {
		return a, confirmed
	}
	ch := make(chan struct{})
	s.mu.waiting[q.id] = append(s.mu.waiting[q.id], ch)
	return a, ch
}

// answerLocked answers a question from the core. With Unconfirmed comes a channel that is closed when
// the region's term is confirmed; it is not when that fails.
func (s *Service) answerLocked(q request) (a answer, confirmed chan struct{}) {
	d, ok := s.cfg.Store.LeaseHome(q.id)
	if !ok {
		return answer{out: Elsewhere}, nil
	}
	now := s.now()
	switch q.kind {
	case askRemaining:
		out, left := s.mu.core.Remaining(d.ID, q.id, now)
		a = answer{out, int64(left)}
	default:
		out, ttl, undo := s.mu.core.Renew(d.ID, q.id, now)
		if a = (answer{out, ttl}); undo.Kind == Checkpoint {
			a = answer{out: forget}
		}
	}
	if s.mu.core.ConfirmSoon(d.ID, now) {
		s.confirmLocked(d.ID)
	}
	if a.out == Unconfirmed {
		confirmed = s.mu.confirming[d.ID]
	}
	return a, confirmed
}

// confirmLocked has a region's term confirmed (L6), unless that is under way. One round lets renewals
// pass for as long as an election takes, so that it costs two messages and not one for each.
func (s *Service) confirmLocked(region pdpb.RegionID) {
	if s.mu.confirming[region] != nil {
		return
	}
	done := make(chan struct{})
	s.mu.confirming[region] = done
	started := s.goLocked(func() {
		ctx, cancel := context.WithTimeout(s.ctx, callTimeout)
		defer cancel()
		asked := s.now()
		term, err := s.cfg.Cluster.Confirm(ctx, region)
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.mu.confirming, region)
		if err == nil && term != 0 {
			s.mu.core.Confirmed(region, term, asked)
			close(done)
		}
	})
	if !started {
		delete(s.mu.confirming, region)
	}
}

func isCode(err error, code regionpb.Code) bool {
	var re *regionpb.Error
	return errors.As(err, &re) && re.Code == code
}
