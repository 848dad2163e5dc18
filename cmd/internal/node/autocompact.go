package node

import (
	"context"
	"errors"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap"

	"braid/cmd/internal/autocompact"
	"braid/region/regionpb"
)

// compactionTimeout bounds one compaction of the store by itself; the next look tries again.
const compactionTimeout = 10 * time.Second

// compactLoop compacts the store by itself, on the node where the placement group is led. The others
// remember revisions, so that they can go on when leadership moves.
func (n *Node) compactLoop(p autocompact.Policy) {
	core, origin := autocompact.New(p), time.Now()
	look := func() {
		leader, _ := n.oracle.Leader()
		at := core.Tick(time.Since(origin), int64(n.oracle.Mark().Rev), leader == n.self)
		if at == 0 {
			return
		}
		ctx, cancel := context.WithTimeout(n.ctx, compactionTimeout)
		defer cancel()
		_, err := n.router.Load().Compact(ctx, &pb.CompactionRequest{Revision: at})
		if err != nil && !errors.Is(err, regionpb.ErrorOf(regionpb.Compacted)) {
			n.log.Warn("automatic compaction failed", zap.Int64("revision", at), zap.Error(err))
			return
		}
		core.Done(at, time.Since(origin))
		n.log.Info("automatic compaction", zap.Int64("revision", at), zap.String("mode", string(p.Mode)))
	}
	for {
		look()
		t := time.NewTimer(core.Next() - time.Since(origin))
		select {
		case <-t.C:
		case <-n.ctx.Done():
			t.Stop()
			return
		}
	}
}
