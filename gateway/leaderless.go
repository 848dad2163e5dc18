package gateway

import (
	"context"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/metadata"
)

// leaderlessMax is how many election timeouts a stream that requires a leader survives without one, as
// in etcd: opening it anew costs more than refusing one.
const leaderlessMax = 3

// requiresLeader says whether a client would rather have an error than wait for a leader.
func requiresLeader(ctx context.Context) bool {
	v := metadata.ValueFromIncomingContext(ctx, rpctypes.MetadataRequireLeaderKey)
	return len(v) > 0 && v[0] == rpctypes.MetadataHasLeader
}

// leaderless tells running streams that there has been no leader for too long. One goroutine looks,
// for all of them.
type leaderless struct {
	mu sync.Mutex
	ch chan struct{} // closed when it is so, and replaced for later streams; guarded by mu
}

// channel is closed when a stream has to end for want of a leader; nil when it does not require one.
func (l *leaderless) channel(ctx context.Context) <-chan struct{} {
	if !requiresLeader(ctx) {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ch == nil {
		l.ch = make(chan struct{})
	}
	return l.ch
}

// end ends the streams that wait.
func (l *leaderless) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ch != nil {
		close(l.ch)
		l.ch = nil
	}
}

// watchLeader looks for a leader until the server stops.
func (s *Server) watchLeader() {
	tick := time.NewTicker(s.cfg.ElectionTimeout)
	defer tick.Stop()
	for missed := 0; ; {
		select {
		case <-tick.C:
		case <-s.stopping:
			return
		}
		if s.cfg.Cluster.Leader() != 0 {
			missed = 0
		} else if missed++; missed >= leaderlessMax {
			s.leaderless.end()
		}
	}
}
