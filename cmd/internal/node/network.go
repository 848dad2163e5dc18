package node

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
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
	t, err := transport.New(transport.Config{
		Self: n.self, ClusterID: n.cfg.ClusterID(), Peers: urls, TLS: dial, Logger: n.log, Metrics: n.metrics.transport(),
	})
	if err != nil {
		return err
	}
	n.net = t
	n.onClose(func(context.Context) error { t.Close(); return nil })
	return nil
}

// servePeers lets the other stores in and goes to meet them. Everything that handles frames and
// calls is registered by now.
func (n *Node) servePeers(peers []boundListener) {
	n.net.Start()
	for _, l := range peers {
		opts := []grpc.ServerOption{
			grpc.MaxRecvMsgSize(math.MaxInt32), grpc.MaxSendMsgSize(math.MaxInt32),
			grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
		}
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
