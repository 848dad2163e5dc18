package node

import (
	"context"
	"time"

	"braid/leasesvc"
	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/raftstore/transport"
	"braid/region"
	"braid/region/regionpb"
	"braid/router"
)

// methodLeases carries questions about the time of leases.
const methodLeases transport.Method = 38

// leaseCluster is the node as the lease service sees it.
type leaseCluster struct{ n *Node }

// Leader implements leasesvc.Cluster.
func (c leaseCluster) Leader(d *pdpb.Descriptor) (raftid.StoreID, bool) {
	return c.n.stores.leader(c.n.regions.get(d.ID), d)
}

// Call implements leasesvc.Cluster.
func (c leaseCluster) Call(ctx context.Context, to raftid.StoreID, batch []byte) ([]byte, error) {
	return c.n.net.Call(ctx, to, methodLeases, batch)
}

// Confirm implements leasesvc.Cluster.
func (c leaseCluster) Confirm(ctx context.Context, id pdpb.RegionID) (uint64, error) {
	h := c.n.regions.get(id)
	if h == nil {
		return 0, nil
	}
	type answer struct {
		term uint64
		err  error
	}
	answered := make(chan answer, 1)
	h.ConfirmLeader(func(term uint64, err error) { answered <- answer{term, err} })
	select {
	case a := <-answered:
		return a.term, a.err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// KeepAwake implements leasesvc.Cluster.
func (c leaseCluster) KeepAwake(id pdpb.RegionID, on bool) {
	if h := c.n.regions.get(id); h != nil {
		h.KeepAwake(on)
		if on {
			h.wake()
		}
	}
}

// openLeases starts the lease service. It comes before the first replica, which tells it of terms.
func (n *Node) openLeases() {
	election := time.Duration(n.cfg.ElectionMs) * time.Millisecond
	n.leases = leasesvc.NewService(leasesvc.Config{
		Store: leaseStore{n}, Cluster: leaseCluster{n},
		// The record of the committed order is in etcd's terms, where each lease ends at a revision of its own.
		OneByOne: n.cfg.SingleGroup || n.cfg.CommittedOrder,
		Options:  leasesvc.Options{Extend: election},
		// etcd's: one and a half election timeouts, in whole seconds.
		MinTTL: int64((3*election/2 + time.Second - 1) / time.Second),
	})
	n.onClose(func(context.Context) error { n.leases.Close(); return nil })
}

// serveLeases answers another node; it never waits.
func (n *Node) serveLeases(_ context.Context, _ raftid.StoreID, payload []byte, reply func([]byte, error)) {
	reply(n.leases.Serve(payload))
}

// leaseStore is the router, which is made after the replicas.
type leaseStore struct{ n *Node }

func (s leaseStore) router() (*router.Router, error) {
	if r := s.n.router.Load(); r != nil {
		return r, nil
	}
	return nil, regionpb.ErrorOf(regionpb.NotLeader)
}

// LeaseGrant implements leasesvc.Store.
func (s leaseStore) LeaseGrant(ctx context.Context, id, ttl int64) (mvcc.Revision, error) {
	r, err := s.router()
	if err != nil {
		return 0, err
	}
	return r.LeaseGrant(ctx, id, ttl)
}

// LeaseRevoke implements leasesvc.Store.
func (s leaseStore) LeaseRevoke(ctx context.Context, id int64) (mvcc.Revision, error) {
	r, err := s.router()
	if err != nil {
		return 0, err
	}
	return r.LeaseRevoke(ctx, id)
}

// LeaseExpire implements leasesvc.Store.
func (s leaseStore) LeaseExpire(ctx context.Context, list []regionpb.LeaseLeft, term uint64, spans []mvcc.Span) error {
	r, err := s.router()
	if err != nil {
		return err
	}
	return r.LeaseExpire(ctx, list, term, spans)
}

// LeaseCheckpoint implements leasesvc.Store.
func (s leaseStore) LeaseCheckpoint(ctx context.Context, left []regionpb.LeaseLeft, term uint64) error {
	r, err := s.router()
	if err != nil {
		return err
	}
	return r.LeaseCheckpoint(ctx, left, term)
}

// LeaseLook implements leasesvc.Store.
func (s leaseStore) LeaseLook(ctx context.Context, id int64, keys bool) (*regionpb.LeaseRecord, [][]byte, mvcc.Revision, error) {
	r, err := s.router()
	if err != nil {
		return nil, nil, 0, err
	}
	return r.LeaseLook(ctx, id, keys)
}

// Leases implements leasesvc.Store.
func (s leaseStore) Leases(ctx context.Context) ([]regionpb.Lease, mvcc.Revision, error) {
	r, err := s.router()
	if err != nil {
		return nil, 0, err
	}
	return r.Leases(ctx)
}

// LeaseHome implements leasesvc.Store.
func (s leaseStore) LeaseHome(id int64) (pdpb.Descriptor, bool) {
	r, err := s.router()
	if err != nil {
		return pdpb.Descriptor{}, false
	}
	return r.LeaseHome(id)
}

// leased makes a replica tell the lease service what it applies and when it leads.
func (h *hosted) leased(cfg *region.Config) {
	n, span := h.owner.node, cfg.Position.Descriptor.Span
	cfg.Observer.Leases = func(changes []region.LeaseChange) {
		for i := range changes {
			n.leases.Changed(h.id, changes[i].ID, changes[i].Record)
		}
	}
	cfg.Observer.LeaseTerm = func(term uint64) {
		if term == 0 {
			n.leases.End(h.id)
			return
		}
		n.leases.Lead(h.id, term, func(ctx context.Context, fn func(id int64, rec *regionpb.LeaseRecord)) error {
			return n.readLeases(ctx, span, fn)
		})
	}
}

// readLeases reads the records of leases in a span as they are applied.
func (n *Node) readLeases(ctx context.Context, span mvcc.Span, fn func(id int64, rec *regionpb.LeaseRecord)) error {
	var bad error
	err := n.engine.Records(mvcc.RecordLease, span, func(k mvcc.RecordKey, value []byte) bool {
		rec, err := regionpb.DecodeLeaseRecord(append([]byte(nil), value...))
		if err == nil {
			err = ctx.Err()
		}
		if bad = err; bad != nil {
			return false
		}
		fn(k.ID, rec)
		return true
	})
	if err == nil {
		err = bad
	}
	if err != nil && ctx.Err() == nil {
		n.fail(err)
	}
	return err
}
