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
	mu      sync.Mutex
	streams map[*ledStream]struct{} // guarded by mu
}

// ledStream is a stream that requires a leader.
type ledStream struct {
	led    func() bool   // whether what the stream needs beside the placement group has leaders; may be nil
	missed int           // looks in a row that found none; guarded by leaderless.mu
	ended  chan struct{} // closed when there were too many
}

// channel is closed when a stream has to end for want of a leader: of the placement group, or of what
// led speaks for. It is nil when the stream does not require one. done must be called in the end.
func (l *leaderless) channel(ctx context.Context, led func() bool) (ended <-chan struct{}, done func()) {
	if !requiresLeader(ctx) {
		return nil, func() {}
	}
	st := &ledStream{led: led, ended: make(chan struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.streams == nil {
		l.streams = map[*ledStream]struct{}{}
	}
	l.streams[st] = struct{}{}
	return st.ended, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.streams, st)
	}
}

// look ends the streams that have missed a leader too often. leader says whether the placement group
// has one.
func (l *leaderless) look(leader bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for st := range l.streams {
		if leader && (st.led == nil || st.led()) {
			st.missed = 0
		} else if st.missed++; st.missed >= leaderlessMax {
			close(st.ended)
			delete(l.streams, st)
		}
	}
}

// watchLeader looks for leaders until the server stops.
func (s *Server) watchLeader() {
	tick := time.NewTicker(s.cfg.ElectionTimeout)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			s.leaderless.look(s.cfg.Cluster.Leader() != 0)
		case <-s.stopping:
			return
		}
	}
}
