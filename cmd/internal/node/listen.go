package node

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/url"
	"slices"

	etcdtransport "go.etcd.io/etcd/client/pkg/v3/transport"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"braid/cmd/internal/config"
	"braid/gateway"
)

// boundListener is a listener and, where it speaks TLS, the configuration for it.
type boundListener struct {
	net.Listener
	tls *tls.Config
}

// listen binds a URL. The handshake is left to whoever serves the listener.
func (n *Node) listen(u url.URL, info *etcdtransport.TLSInfo) (b boundListener, err error) {
	if b.Listener, err = n.bind(u); err != nil || !config.Secure(u) {
		return b, err
	}
	b.tls, err = serverTLS(u, info)
	return b, err
}

// bind opens a URL's socket, which lives as long as the node.
func (n *Node) bind(u url.URL) (net.Listener, error) {
	l, err := etcdtransport.NewListenerWithOpts(config.Address(u), plainScheme(u.Scheme), etcdtransport.WithSocketOpts(&n.cfg.SocketOpts))
	if err != nil {
		return nil, fmt.Errorf("cannot listen on %s: %w", u.String(), err)
	}
	n.onClose(func(context.Context) error {
		// Closed by its server already, if that was started.
		_ = l.Close()
		return nil
	})
	return l, nil
}

// serverTLS is the configuration for a URL with TLS.
func serverTLS(u url.URL, info *etcdtransport.TLSInfo) (*tls.Config, error) {
	if info.Empty() {
		return nil, fmt.Errorf("cannot listen on %s: no certificate is configured", u.String())
	}
	c, err := info.ServerConfig()
	if err != nil {
		return nil, fmt.Errorf("cannot listen on %s: %w", u.String(), err)
	}
	info.ConfigureCRLVerification(c)
	return c, nil
}

func plainScheme(scheme string) string {
	switch scheme {
	case "unix", "unixs":
		return "unix"
	}
	return "http"
}

func (n *Node) listenAll(urls []url.URL, info *etcdtransport.TLSInfo) ([]boundListener, error) {
	var ls []boundListener
	for _, u := range urls {
		l, err := n.listen(u, info)
		if err != nil {
			return nil, err
		}
		ls = append(ls, l)
	}
	return ls, nil
}

// clientPort is a listener for clients.
type clientPort struct {
	net.Listener
	port gateway.Port
}

// listenClients binds the clients' listeners, one for each address: an address that is given with
// and without TLS takes both.
func (n *Node) listenClients() ([]clientPort, error) {
	var ports []clientPort
	at := map[string]int{} // in ports, by address
	for i, u := range slices.Concat(n.cfg.ListenClientURLs, n.cfg.ListenClientHTTPURLs) {
		k, bound := at[config.Address(u)]
		if !bound {
			l, err := n.bind(u)
			if err != nil {
				return nil, err
			}
			onlyHTTP := i >= len(n.cfg.ListenClientURLs)
			k = len(ports)
			ports = append(ports, clientPort{l, gateway.Port{
				OnlyHTTP: onlyHTTP, OnlyGRPC: !onlyHTTP && len(n.cfg.ListenClientHTTPURLs) > 0,
			}})
			if _, port, err := net.SplitHostPort(u.Host); err != nil || port != "0" {
				at[config.Address(u)] = k // port 0 is another one each time
			}
		}
		if !config.Secure(u) {
			ports[k].port.Plain = true
			continue
		}
		var err error
		if ports[k].port.TLS, err = serverTLS(u, &n.cfg.ClientTLS); err != nil {
			return nil, err
		}
	}
	return ports, nil
}

// listenPeers binds the peers' listeners. On TCP etcd's own listener does their handshakes, below
// gRPC: it compares the addresses in a peer's certificate with where the peer calls from, unless
// --peer-skip-client-san-verification, and refuses revoked certificates.
func (n *Node) listenPeers() ([]boundListener, error) {
	var ls []boundListener
	for _, u := range n.cfg.ListenPeerURLs {
		if u.Scheme != "https" || n.cfg.PeerTLS.Empty() {
			l, err := n.listen(u, &n.cfg.PeerTLS)
			if err != nil {
				return nil, err
			}
			ls = append(ls, l)
			continue
		}
		l, err := etcdtransport.NewListenerWithOpts(u.Host, u.Scheme, etcdtransport.WithSocketOpts(&n.cfg.SocketOpts), etcdtransport.WithTLSInfo(&n.cfg.PeerTLS))
		if err != nil {
			return nil, fmt.Errorf("cannot listen on %s: %w", u.String(), err)
		}
		n.onClose(func(context.Context) error {
			// Closed by its server already, if that was started.
			_ = l.Close()
			return nil
		})
		ls = append(ls, boundListener{Listener: l})
	}
	return ls, nil
}

// listenMetrics binds the pages' own listeners, whose handshakes are done below HTTP.
func (n *Node) listenMetrics() ([]boundListener, error) {
	ls, err := n.listenAll(n.cfg.ListenMetricsURLs, &n.cfg.ClientTLS)
	for i := range ls {
		if ls[i].tls != nil {
			ls[i].Listener = tls.NewListener(ls[i].Listener, ls[i].tls)
		}
	}
	return ls, err
}

// keepaliveOptions are gRPC's for client connections, as etcd sets them.
func keepaliveOptions(cfg *config.Config) []grpc.ServerOption {
	var opts []grpc.ServerOption
	if cfg.GRPCKeepAliveMinTime > 0 {
		opts = append(opts, grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: cfg.GRPCKeepAliveMinTime}))
	}
	if cfg.GRPCKeepAliveInterval > 0 && cfg.GRPCKeepAliveTimeout > 0 {
		opts = append(opts, grpc.KeepaliveParams(keepalive.ServerParameters{Time: cfg.GRPCKeepAliveInterval, Timeout: cfg.GRPCKeepAliveTimeout}))
	}
	return opts
}

func urlStrings(urls []url.URL) []string {
	s := make([]string, len(urls))
	for i := range urls {
		s[i] = urls[i].String()
	}
	return s
}
