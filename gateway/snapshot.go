package gateway

import (
	"context"
	"crypto/sha256"
	"errors"
	"hash"
	"syscall"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"braid/gateway/dbfile"
)

const (
	// snapshotChunkBytes is etcd's.
	snapshotChunkBytes = 32 << 10
	// snapshotsMax bounds the snapshots that are made or sent at one time; each has a file.
	snapshotsMax = 2
)

// Snapshot sends the store as the database file of an etcd that was compacted at the revision of the
// snapshot. The file is made first, from all regions, in a temporary folder.
func (m *maintenanceServer) Snapshot(_ *pb.SnapshotRequest, stream pb.Maintenance_SnapshotServer) error {
	select {
	case m.s.snapshots <- struct{}{}:
		defer func() { <-m.s.snapshots }()
	default:
		return status.Errorf(codes.ResourceExhausted, "braid: this member is making %d snapshots already", snapshotsMax)
	}
	log := m.s.cfg.Logger
	if p, ok := peer.FromContext(stream.Context()); ok {
		log = log.With(zap.String("remote", p.Addr.String()))
	}
	// It takes long, so it does not hold up the end of the server.
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	m.s.receivers.Go(func() {
		select {
		case <-m.s.stopping:
			cancel(rpctypes.ErrGRPCStopped)
		case <-ctx.Done():
		}
	})
	err := m.snapshot(ctx, stream, log)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	log.Warn("failed to send a database snapshot", zap.Error(err))
	return toStatus(snapshotError(err))
}

// snapshotError gives what can only happen to a snapshot its code.
func snapshotError(err error) error {
	if errors.Is(err, dbfile.ErrNoSpace) || errors.Is(err, syscall.ENOSPC) {
		return status.Errorf(codes.ResourceExhausted, "braid: no space for the snapshot in the data directory of this member: %v", err)
	}
	return err
}

func (m *maintenanceServer) snapshot(ctx context.Context, stream pb.Maintenance_SnapshotServer, log *zap.Logger) error {
	cfg, began := &m.s.cfg, time.Now()
	file, err := dbfile.New(cfg.SnapshotDir, cfg.SnapshotSpace)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := file.Close(); cerr != nil {
			log.Warn("failed to remove a database snapshot", zap.Error(cerr))
		}
	}()
	log.Info("making a database snapshot")
	if err := cfg.KV.Export(ctx, file); err != nil {
		return err
	}
	members, err := m.snapshotMembers(ctx)
	if err != nil {
		return err
	}
	version := cfg.Cluster.StorageVersion()
	meta := dbfile.Meta{Index: cfg.Cluster.RaftAppliedIndex(), Term: cfg.Cluster.RaftTerm(), Version: version, Members: members}
	if err := file.Finish(ctx, meta); err != nil {
		return err
	}
	log = log.With(zap.Int64("total-bytes", file.Size()), zap.String("storage-version", version))
	log.Info("sending database snapshot to client", zap.Duration("made-in", time.Since(began)))
	send := func(r *pb.SnapshotResponse) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return stream.Send(r)
	}
	out := &snapshotChunks{send: send, version: version, left: file.Size(), sum: sha256.New()}
	if _, err := file.WriteTo(out); err != nil {
		return err
	}
	if err := out.flush(); err != nil {
		return err
	}
	sum := out.sum.Sum(nil)
	log.Info("sending database sha256 checksum to client", zap.Int("checksum-size", len(sum)))
	if err := stream.Send(&pb.SnapshotResponse{Blob: sum, Version: version}); err != nil {
		return err
	}
	log.Info("successfully sent database snapshot to client", zap.Duration("took", time.Since(began)))
	return nil
}

func (m *maintenanceServer) snapshotMembers(ctx context.Context) ([]*pb.Member, error) {
	mctx, cancel := context.WithTimeout(ctx, m.s.cfg.RequestTimeout)
	defer cancel()
	members, err := m.s.cfg.Cluster.Members(mctx, true)
	return members, timeUp(err, mctx, ctx)
}

// snapshotChunks sends what is written to it in messages of one size but for the last.
type snapshotChunks struct {
	send    func(*pb.SnapshotResponse) error
	version string
	left    int64 // bytes that are still to be sent
	sum     hash.Hash
	buf     []byte
}

// Write implements io.Writer.
func (c *snapshotChunks) Write(b []byte) (int, error) {
	n := len(b)
	for len(b) > 0 {
		if c.buf == nil {
			c.buf = make([]byte, 0, snapshotChunkBytes)
		}
		k := min(len(b), snapshotChunkBytes-len(c.buf))
		c.buf, b = append(c.buf, b[:k]...), b[k:]
		if len(c.buf) == snapshotChunkBytes {
			if err := c.flush(); err != nil {
				return n - len(b), err
			}
		}
	}
	return n, nil
}

func (c *snapshotChunks) flush() error {
	if len(c.buf) == 0 {
		return nil
	}
	blob := c.buf
	c.buf = nil // gRPC may still have it when Send returns
	c.sum.Write(blob)
	c.left -= int64(len(blob))
	return c.send(&pb.SnapshotResponse{RemainingBytes: uint64(c.left), Blob: blob, Version: c.version})
}
