package node

import (
	"context"
	"errors"
	"slices"
	"time"

	"braid/mvcc"
	"braid/raftstore/raftid"
	"braid/raftstore/transport"
	"braid/region/regionpb"
)

const (
	// pastPatience bounds one look at the history of regions elsewhere, whatever becomes of the stores
	// that have them. The stream ends then, and the client begins again behind what it has.
	pastPatience = 5 * time.Second
	// pastCall bounds the answer of one store before another is asked.
	pastCall = time.Second
	// pastRetry is the pause after no store could answer.
	pastRetry = 20 * time.Millisecond
	// pastBytesMin is the least that is asked for at once when many regions share followBytes.
	pastBytesMin = 64 << 10
)

// watchHistory is the history of all regions: of those here from the engine, of the others from stores
// that have them, page by page.
type watchHistory struct{ n *Node }

// past is what one region elsewhere has brought and was not passed on yet.
type past struct {
	s      *remoteSource
	events []mvcc.Version
	end    mvcc.Revision // the events through here were fetched
}

// Events implements watchsvc.History.
func (w watchHistory) Events(ctx context.Context, from, to mvcc.Revision, span mvcc.Span, fn func(v *mvcc.Version) error) error {
	far := w.n.elsewhere.touching(span)
	if len(far) == 0 {
		return w.n.engine.Events(ctx, from, to, span, fn)
	}
	pages := make([]past, len(far))
	for i, s := range far {
		pages[i] = past{s: s, end: from - 1}
	}
	q := pastQuery{span: span, to: to, bytesHint: max(followBytes/len(far), pastBytesMin)}
	var merged []*mvcc.Version
	for from <= to {
		// A step goes as far as all regions' pages do.
		upto := to
		for i := range pages {
			p := &pages[i]
			if p.end < from {
				q.from = from
				if err := w.fill(ctx, p, q); err != nil {
					return err
				}
			}
			upto = min(upto, p.end)
		}
		merged = merged[:0]
		for i := range pages {
			p := &pages[i]
			n := 0
			for n < len(p.events) && p.events[n].Mod <= upto {
				merged = append(merged, &p.events[n])
				n++
			}
			p.events = p.events[n:]
		}
		slices.SortFunc(merged, byPosition)
		if err := w.mergeHere(ctx, from, upto, span, merged, fn); err != nil {
			return err
		}
		from = upto + 1
	}
	return nil
}

// mergeHere passes on events from elsewhere and those of the regions here, in order.
func (w watchHistory) mergeHere(ctx context.Context, from, to mvcc.Revision, span mvcc.Span, far []*mvcc.Version, fn func(v *mvcc.Version) error) error {
	err := w.n.engine.Events(ctx, from, to, span, func(v *mvcc.Version) error {
		for len(far) > 0 && byPosition(far[0], v) < 0 {
			if err := fn(far[0]); err != nil {
				return err
			}
			far = far[1:]
		}
		return fn(v)
	})
	for ; err == nil && len(far) > 0; far = far[1:] {
		err = fn(far[0])
	}
	return err
}

// fill fetches a region's next page.
func (w watchHistory) fill(ctx context.Context, p *past, q pastQuery) error {
	a, err := w.ask(ctx, p.s, methodPast, q, q.from-1)
	if err != nil {
		return err
	}
	p.events, p.end = a.events, min(a.end, q.to)
	return nil
}

// Get implements watchsvc.History.
func (w watchHistory) Get(ctx context.Context, key []byte, at mvcc.Revision) (mvcc.Version, bool, error) {
	far := w.n.elsewhere.touching(mvcc.Key(key))
	if len(far) == 0 {
		return w.n.engine.Get(key, at)
	}
	a, err := w.ask(ctx, far[0], methodGet, pastQuery{span: mvcc.Span{Start: key}, from: at, to: at}, 0)
	switch {
	case errors.Is(err, regionpb.ErrorOf(regionpb.Compacted)):
		return mvcc.Version{}, false, nil // the hub sees the floor
	case err != nil || len(a.events) == 0:
		return mvcc.Version{}, false, err
	}
	return a.events[0], true, nil
}

// ask puts a question about a region's past to the stores that have it, beginning with the one that
// is followed, until one is complete through the first revision that is asked for.
func (w watchHistory) ask(ctx context.Context, s *remoteSource, m transport.Method, q pastQuery, after mvcc.Revision) (*pastAnswer, error) {
	patient, cancel := context.WithTimeout(ctx, pastPatience)
	defer cancel()
	q.region = s.id
	data := q.append(nil)
	s.e.mu.Lock()
	first := s.at
	s.e.mu.Unlock()
	for {
		for i := range s.peers {
			peer := s.peers[(first+i)%len(s.peers)]
			if !w.n.net.Alive(peer) {
				continue
			}
			a, err := w.askStore(patient, peer, m, data, after)
			switch {
			case ctx.Err() != nil:
				return nil, ctx.Err()
			case err != nil || a.state == followAbsent:
				continue
			case a.state == pastGone:
				s.raise(a.floor)
				return nil, regionpb.ErrorOf(regionpb.Compacted)
			case a.end >= q.from:
				s.raise(a.floor)
				return a, nil
			}
		}
		select {
		case <-time.After(pastRetry):
		case <-patient.Done():
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			return nil, regionpb.ErrorOf(regionpb.NotComplete)
		}
	}
}

func (w watchHistory) askStore(ctx context.Context, store raftid.StoreID, m transport.Method, data []byte, after mvcc.Revision) (*pastAnswer, error) {
	ctx, cancel := context.WithTimeout(ctx, pastCall)
	defer cancel()
	answer, err := w.n.stores.call(ctx, store, m, data)
	if err != nil {
		return nil, err
	}
	return decodePastAnswer(answer, after)
}
