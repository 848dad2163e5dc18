package node

import (
	"context"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region"
	"braid/router"
	"braid/watchsvc"
)

// openWatches starts the hub that all replicas of this node feed, and what is heard of others.
func (n *Node) openWatches() {
	n.followed, n.elsewhere = newFollows(), newElsewhere(n)
	n.watches = watchsvc.NewHub(watchsvc.Options{
		History: watchHistory{n},
		Current: n.current,
		Demand:  n.demandMark,
	})
	n.onClose(func(context.Context) error { n.watches.Close(); return nil })
}

// current is the newest revision this node has heard of, be it only in an answer that it passed on: who
// got it and begins to watch here has no use for what came before, as in etcd, where a member answers
// after applying.
func (n *Node) current() mvcc.Revision {
	rev := n.oracle.Mark().Rev
	if r := n.router.Load(); r != nil {
		rev = max(rev, r.Told())
	}
	return rev
}

// demandMark asks pd's stream for a mark as new as the newest item that any replica here has
// applied, so that quiet regions become complete through it (S4). In single-group mode there is
// one region, which is complete through what it has applied.
func (n *Node) demandMark() {
	if n.regions.order == nil {
		return
	}
	var newest pdpb.Cut
	for _, h := range n.regions.all() {
		newest = max(newest, h.Applied().Cut)
	}
	n.regions.order.WantMark(newest)
	n.wantRevision(n.current())
	n.elsewhere.moved()
}

// wantRevision asks for a mark at or above a revision of which somebody has told, so that there is a
// cut that gave it.
func (n *Node) wantRevision(rev mvcc.Revision) {
	if n.regions.order == nil {
		return
	}
	if mark := n.oracle.Mark(); rev > mark.Rev {
		n.regions.order.WantMark(mark.Cut + 1)
	}
}

// markMoved is called when pd's stream has brought a mark.
func (n *Node) markMoved() {
	n.watches.Poke()
	n.followed.wake()
	n.elsewhere.moved()
}

// watchSource is a replica as the hub sees it.
type watchSource struct{ h *hosted }

// CompleteThrough implements watchsvc.Source.
func (s watchSource) CompleteThrough() mvcc.Revision { return s.h.Replica.CompleteThrough() }

// Led implements watchsvc.Source.
func (s watchSource) Led() bool {
	leader, here := s.h.Leader()
	return here || leader != 0
}

// Watched implements watchsvc.Source: a replica here feeds the hub in any case.
func (s watchSource) Watched(bool) {}

// Floor implements watchsvc.Source: what compactions refuse, or what a snapshot's sender had
// removed already (C1).
func (s watchSource) Floor() mvcc.Revision {
	return max(s.h.Applied().Floor, s.h.owner.node.oracle.Mark().Floor)
}

// watched makes a replica feed the hub. The returned function must be called once the replica
// exists and before its group runs.
func (h *hosted) watched(cfg *region.Config) (attach func()) {
	told := h.owner.node.followed
	cfg.Observer.Events = func(events []mvcc.Version, through mvcc.Revision) {
		h.feed.Events(events, through)
		told.wake()
	}
	cfg.Observer.Installed = func(p *region.Position) {
		h.feed.Reset(p.Revision)
		told.wake()
	}
	span, through := cfg.Position.Descriptor.Span, cfg.Position.Revision
	return func() { h.feed = h.owner.node.watches.Attach(span, through, watchSource{h}) }
}

// watchedOracle tells the hub of compactions that this node acknowledges: pd's stream may bring
// the floor a moment later, and a watch that the client starts now must obey it.
type watchedOracle struct {
	router.Oracle
	hub *watchsvc.Hub
}

// Compact implements router.Oracle.
func (o watchedOracle) Compact(ctx context.Context, rev int64, hash pdpb.CompactHash) (mvcc.Revision, error) {
	at, err := o.Oracle.Compact(ctx, rev, hash)
	if err == nil {
		o.hub.Compacted(mvcc.Revision(rev))
	}
	return at, err
}

// cutOff says whether this node has heard of no leader of the placement group for so long that it
// must not claim to know one.
func (n *Node) cutOff() bool {
	if n.regions.order == nil {
		return false
	}
	_, still := n.regions.order.StandsStillSince()
	return still
}
