package node

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"braid/raftstore/raftid"
	"braid/raftstore/transport"
)

// openNetwork builds the transport between stores. It neither dials nor accepts before servePeers.
func (n *Node) openNetwork(peers []boundListener) error {
	urls := make(map[raftid.StoreID][]string, len(n.members))
	for _, m := range n.members {
		urls[raftid.StoreID(m.ID)] = m.PeerURLs
	}
	var dial *tls.Config
	if !n.cfg.PeerTLS.Empty() {
		var err error
		if dial, err = n.cfg.PeerTLS.ClientConfig(); err != nil {
			return fmt.Errorf("TLS between peers: %w", err)
		}
	}
	down := downAfter(time.Duration(n.cfg.ElectionMs) * time.Millisecond)
	t, err := transport.New(transport.Config{
		PingInterval: down / 4, DownAfter: down,
		Self: n.self, ClusterID: n.cfg.ClusterID(), Peers: urls, TLS: dial, LocalAddr: n.cfg.PeerLocalAddr(), Logger: n.log, Metrics: n.metrics.transport(),
		// A store that numbers its entries itself must not vote with one that waits for cuts (A16).
		Terms: n.mode().String() + " mode",
		Fresh: n.fresh.Load, Admit: n.admit, Refused: n.refusals.note,
	})
	if err != nil {
		return err
	}
	n.net = t
	n.onClose(func(context.Context) error { t.Close(); return nil })
	return nil
}

// downAfter is how long a store may be missed before it counts as down, and its leaders are replaced: an
// election timeout, as in etcd. A second at least, because more than one group depends on it, and
// two at most, because who waits for a store that hangs should not wait longer.
func downAfter(election time.Duration) time.Duration {
	return min(max(election, time.Second), 2*time.Second)
}

// servePeers lets the other stores in and goes to meet them. Everything that handles frames and
// calls is registered by now.
func (n *Node) servePeers(peers []boundListener) {
	n.net.Start()
	for _, l := range peers {
		opts := append(transport.ServerOptions(),
			grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}))
		if l.tls != nil {
			cfg := l.tls.Clone()
			cfg.NextProtos = []string{"h2"}
			opts = append(opts, grpc.Creds(credentials.NewTLS(cfg)))
		}
		srv := grpc.NewServer(opts...)
		n.net.Register(srv)
		n.onClose(func(context.Context) error { srv.Stop(); return nil })
		n.wg.Go(func() {
			if err := srv.Serve(l.Listener); err != nil && n.ctx.Err() == nil && !errors.Is(err, grpc.ErrServerStopped) {
				n.fail(fmt.Errorf("serving peers on %s: %w", l.Addr(), err))
			}
		})
	}
}

// admit refuses a store that comes without any history when the cluster knows one of it: its log and
// with it its votes are lost, and it could vote a second time (A7). Once it is a member, a store
// cannot come back empty; that takes a change of members.
func (n *Node) admit(from raftid.StoreID) error {
	if n.oracle == nil {
		return nil
	}
	d := n.oracle.Directory()
	if d == nil {
		return nil
	}
	for _, s := range d.Stores {
		if s.ID == from && len(s.ClientURLs) > 0 {
			return fmt.Errorf("member %s (%s) has already been bootstrapped, and its data directory is empty: start it with its old --data-dir", from, s.Name)
		}
	}
	return nil
}

// refusals are the peers that refuse this node at present.
type refusals struct {
	mu     sync.Mutex
	byPeer map[raftid.StoreID]refusal
}

type refusal struct {
	reason string
	since  time.Time
}

func (r *refusals) note(peer raftid.StoreID, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	old, ok := r.byPeer[peer]
	switch {
	case reason == "":
		delete(r.byPeer, peer)
	case !ok || old.reason != reason:
		if r.byPeer == nil {
			r.byPeer = map[raftid.StoreID]refusal{}
		}
		r.byPeer[peer] = refusal{reason, time.Now()}
	}
}

// hopeless returns an error when so many of the members refuse this node that it cannot be part of a
// quorum.
func (r *refusals) hopeless(members int, after time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	count, reason := 0, ""
	for _, f := range r.byPeer {
		if time.Since(f.since) >= after {
			count++
			reason = f.reason
		}
	}
	if members-count >= members/2+1 || count == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d members refuse this node: %s", count, members, reason)
}
