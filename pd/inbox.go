package pd

import (
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// taken is the content of the inbox at one moment.
type taken struct {
	reports []pdpb.Report
	events  []request
	streams []streamRequest
	pull    bool
	tick    bool
}

// take empties the inbox. Requests for read points go straight to the batch: they arrived before
// whatever confirmation is started next.
func (r *Replica) take() taken {
	r.in.mu.Lock()
	t := taken{reports: r.in.reports, events: r.in.events, streams: r.in.streams, pull: r.in.pull, tick: r.in.tick}
	reads := r.in.reads
	r.in.reports, r.in.events, r.in.streams, r.in.reads = nil, nil, nil, nil
	r.in.pull, r.in.tick = false, false
	r.in.mu.Unlock()
	for _, done := range reads {
		if r.role.Leading {
			r.reads.Add(done)
		} else {
			r.answerRead(done, pdpb.ReadPoint{}, r.notLeader())
		}
	}
	return t
}

// Report takes reports from another store. Any goroutine. When the inbox is full the rest is
// dropped and it returns false: reports are repeated until they are seen (P4).
func (r *Replica) Report(reports []pdpb.Report) bool {
	r.in.mu.Lock()
	room := max(r.cfg.Limits.ReportsMax-len(r.in.reports), 0)
	r.in.reports = append(r.in.reports, reports[:min(room, len(reports))]...)
	r.in.mu.Unlock()
	r.cfg.Wake()
	return room >= len(reports)
}

// ReportsReady implements order.Member.
func (r *Replica) ReportsReady() {
	r.in.mu.Lock()
	first := !r.in.pull
	r.in.pull = true
	r.in.mu.Unlock()
	if first {
		r.cfg.Wake()
	}
}

// ReadPoint implements order.Member. done is called once, from the owner's goroutine or from
// within this call, and must not block.
func (r *Replica) ReadPoint(done func(pdpb.ReadPoint, error)) {
	r.in.mu.Lock()
	if r.in.nReads >= r.cfg.Limits.ReadsMax {
		r.in.mu.Unlock()
		done(pdpb.ReadPoint{}, order.ErrOverloaded)
		return
	}
	r.in.nReads++
	r.in.reads = append(r.in.reads, done)
	r.in.mu.Unlock()
	r.cfg.Wake()
}

func (r *Replica) answerRead(done readReply, p pdpb.ReadPoint, err error) {
	r.in.mu.Lock()
	r.in.nReads--
	r.in.mu.Unlock()
	done(p, err)
}

// Propose implements order.Member. done is called once, as in ReadPoint.
func (r *Replica) Propose(e order.Event, done func(order.EventResult, error)) {
	r.in.mu.Lock()
	if r.in.nEvents >= r.cfg.Limits.ProposalsMax {
		r.in.mu.Unlock()
		done(order.EventResult{}, order.ErrOverloaded)
		return
	}
	r.in.nEvents++
	r.in.events = append(r.in.events, request{e, done})
	r.in.mu.Unlock()
	r.cfg.Wake()
}

func (r *Replica) answerEvent(q request, res order.EventResult, err error) {
	r.in.mu.Lock()
	r.in.nEvents--
	r.in.mu.Unlock()
	q.done(res, err)
}

// Subscribe implements order.Member.
func (r *Replica) Subscribe(from raftid.StoreID, s *order.Subscribe) {
	r.stream(streamRequest{from: from, subscribe: s})
}

// WantMark implements order.Member.
func (r *Replica) WantMark(from raftid.StoreID, session uint64, cut pdpb.Cut) {
	r.stream(streamRequest{from: from, session: session, cut: cut})
}

func (r *Replica) stream(s streamRequest) {
	r.in.mu.Lock()
	ok := len(r.in.streams) < r.cfg.Limits.StreamReqsMax
	if ok {
		r.in.streams = append(r.in.streams, s)
	}
	r.in.mu.Unlock()
	if ok {
		r.cfg.Wake()
	}
}

// Tick tells that the idle interval passed (100 ms to 1 s): streams get a mark even when nothing
// happened, which shows lost frames and a member that is alive; seals that wait are cut. Any
// goroutine.
func (r *Replica) Tick() {
	r.in.mu.Lock()
	r.in.tick = true
	r.in.mu.Unlock()
	r.cfg.Wake()
}

// Serve answers one request of another store's client; the transport calls it for each of
// order.Methods. It does not block; reply is called once, perhaps later.
func (r *Replica) Serve(m order.Method, from raftid.StoreID, payload []byte, reply func([]byte, error)) {
	answer := func(p *order.Reply) {
		p.Role = r.Status().Role
		reply(order.AppendReply(nil, m, p), nil)
	}
	switch m {
	case order.MethodReports:
		reports, err := order.DecodeReports(payload)
		if err != nil {
			reply(nil, err)
			return
		}
		if role := r.Status().Role; !role.Leading {
			answer(&order.Reply{Err: &order.NotLeaderError{Leader: role.Leader, Term: role.Term}})
			return
		}
		if !r.Report(reports) {
			answer(&order.Reply{Err: order.ErrOverloaded})
			return
		}
		answer(&order.Reply{})
	case order.MethodReadPoint:
		r.ReadPoint(func(p pdpb.ReadPoint, err error) { answer(&order.Reply{ReadPoint: p, Err: err}) })
	case order.MethodPropose:
		e, err := order.DecodeEvent(payload)
		if err != nil {
			reply(nil, err)
			return
		}
		r.Propose(e, func(res order.EventResult, err error) {
			if res.Outcome != order.Done {
				err = nil // the outcome tells it
			}
			answer(&order.Reply{Result: res, Err: err})
		})
	case order.MethodSubscribe:
		s, err := order.DecodeSubscribe(payload)
		if err != nil {
			reply(nil, err)
			return
		}
		r.Subscribe(from, s)
		answer(&order.Reply{})
	case order.MethodMark:
		session, cut, err := order.DecodeMarkRequest(payload)
		if err != nil {
			reply(nil, err)
			return
		}
		r.WantMark(from, session, cut)
		answer(&order.Reply{})
	case order.MethodDirectory:
		d := r.Directory()
		if d == nil {
			answer(&order.Reply{Directory: &order.Directory{}})
			return
		}
		answer(&order.Reply{Directory: d})
	case order.MethodForward:
		r.forward(from, payload, reply)
	default:
		reply(nil, order.ErrInvalid)
	}
}

// forward passes a request on to the leader, once (S5).
func (r *Replica) forward(from raftid.StoreID, payload []byte, reply func([]byte, error)) {
	m, inner, err := order.DecodeForward(payload)
	if err != nil {
		reply(nil, err)
		return
	}
	role := r.Status().Role
	if role.Leading || role.Leader == 0 || r.cfg.Net == nil {
		r.Serve(m, from, inner, reply)
		return
	}
	r.cfg.Net.Call(role.Leader, m, inner, reply)
}
