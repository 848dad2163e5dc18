package node

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"braid/cmd/internal/orderlog"
	"braid/mvcc"
	"braid/pd"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/region"
	"braid/region/regionpb"
)

// openOrderLog opens the record of the committed order, before anything can be applied.
func (n *Node) openOrderLog() error {
	if !n.cfg.SingleGroup && !slices.Contains(n.pdVoters(), n.self) {
		return errors.New("--experimental-committed-order: every node that records needs a member of the placement group")
	}
	positions, err := n.engine.Positions()
	if err != nil {
		return fmt.Errorf("reading the replicas' positions: %w", err)
	}
	fresh := true
	for id, data := range positions {
		if isProgress(id) {
			continue
		}
		pos, err := regionpb.DecodePosition(data)
		if err != nil {
			return fmt.Errorf("position of region %d: %w", id, err)
		}
		fresh = fresh && pos.Item == 0
	}
	n.order, err = orderlog.Open(orderlog.Config{DataDir: n.cfg.DataDir, Fresh: fresh, Sparse: n.cfg.SingleGroup, Logger: n.log, Fatal: n.fail})
	if err != nil {
		return fmt.Errorf("the record of the committed order: %w", err)
	}
	if n.cfg.SingleGroup {
		n.order.PDStarted(math.MaxUint64) // its events come with the entries
	}
	n.onClose(func(context.Context) error { return n.order.Close() })
	return nil
}

// recorded makes a replica tell the record what it applies.
func (h *hosted) recorded(cfg *region.Config) {
	r, o := h.owner.node.order, &cfg.Observer
	o.Applied = func(index, _ uint64, it *pdpb.Item, e *regionpb.Entry, rev mvcc.Revision, void bool) {
		r.Applied(h.id, index, it, e, rev, void)
	}
	o.Decided = func(it *pdpb.Item, p *regionpb.Prepared, d pdpb.Decision) { r.Decided(h.id, it, p, d) }
	installed := o.Installed
	o.Installed = func(p *region.Position) {
		r.Installed(fmt.Sprintf("region %d", h.id))
		if installed != nil {
			installed(p)
		}
	}
}

// recordEvents records what the placement machine decided in a cut.
func recordEvents(r *orderlog.Recorder, e *pd.Entry, res pd.Result) {
	if res.Cut == nil || e.Cut == nil {
		return
	}
	for i := range e.Cut.Events {
		if ev := &e.Cut.Events[i]; ev.Kind == order.EventCompact && res.Cut.Events[i].Outcome == order.Done {
			r.Compacted(res.Cut.Mark.Cut, i, ev.Rev)
		}
	}
	r.PDApplied(res.Cut.Mark.Cut)
}

// completeThrough waits until every region of the store is complete here through a cut.
func (n *Node) completeThrough(ctx context.Context, cut pdpb.Cut) error {
	select {
	case <-n.regions.ready:
	case <-ctx.Done():
		return ctx.Err()
	}
	here, elsewhere := n.regions.local(n.oracle.Directory().Regions)
	if len(elsewhere) > 0 {
		return fmt.Errorf("region %d has no replica on this node", elsewhere[0].ID)
	}
	for i := range here {
		if err := n.regions.await(ctx, here[i].ID, cut); err != nil {
			return err
		}
	}
	return nil
}
