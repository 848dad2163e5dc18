package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"braid/gateway"
)

// pages serves metrics and health on listeners of their own, as in etcd also while there is no quorum
// and nothing is served to clients.
type pages struct {
	handler atomic.Pointer[http.Handler] // nil while starting
	servers []*http.Server               // written by the start only
}

func (p *pages) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if h := p.handler.Load(); h != nil {
		(*h).ServeHTTP(w, r)
		return
	}
	gateway.NotReady().ServeHTTP(w, r)
}

// ready says who answers from now on.
func (p *pages) ready(h http.Handler) { p.handler.Store(&h) }

// stop waits for requests in progress; it may be called more than once.
func (p *pages) stop(ctx context.Context) error {
	var errs []error
	for _, srv := range p.servers {
		errs = append(errs, srv.Shutdown(ctx))
	}
	return errors.Join(errs...)
}

func (n *Node) servePages(listeners []boundListener) {
	for _, l := range listeners {
		srv := &http.Server{Handler: &n.pages, ReadHeaderTimeout: 10 * time.Second}
		n.pages.servers = append(n.pages.servers, srv)
		n.wg.Go(func() {
			if err := srv.Serve(l.Listener); err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
				n.fail(fmt.Errorf("serving metrics on %s: %w", l.Addr(), err))
			}
		})
	}
	n.onClose(n.pages.stop)
}
