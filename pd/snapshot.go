package pd

import (
	"context"
	"fmt"
	"io"

	"braid/raftstore"
)

// checkpoint writes the state into the log store now and then; the log is truncated there. It is
// not written while nothing was applied, so an idle member writes nothing.
func (r *Replica) checkpoint(h raftstore.Handle) {
	if r.applied-r.lastCheck < r.cfg.Limits.CheckpointEvery && r.logBytes < r.cfg.Limits.CheckpointBytes {
		return
	}
	r.lastCheck, r.logBytes = r.applied, 0
	h.Checkpoint(r.applied, r.appliedTerm, r.machine.AppendState(nil))
}

// Snapshot implements raftstore.StateMachine. The state is encoded at once: it is small, and the
// machine moves on.
func (r *Replica) Snapshot() (raftstore.SnapshotSource, error) {
	return &snapshotSource{
		meta: raftstore.SnapshotMeta{Index: r.applied, Term: r.appliedTerm},
		data: r.machine.AppendState(nil),
	}, nil
}

type snapshotSource struct {
	meta raftstore.SnapshotMeta
	data []byte
}

func (s *snapshotSource) Meta() raftstore.SnapshotMeta { return s.meta }

// WriteTo implements raftstore.SnapshotSource.
func (s *snapshotSource) WriteTo(ctx context.Context, w io.Writer) error {
	const chunkBytes = 256 << 10
	for data := s.data; len(data) > 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := w.Write(data[:min(len(data), chunkBytes)])
		if err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

func (s *snapshotSource) Close() error {
	s.data = nil
	return nil
}

// snapshotBytesMax bounds an incoming snapshot; pd's state is about 150 bytes a region.
const snapshotBytesMax = 1 << 30

// Receive implements raftstore.StateMachine.
func (r *Replica) Receive(meta raftstore.SnapshotMeta) (raftstore.SnapshotSink, error) {
	return &snapshotSink{r: r, meta: meta}, nil
}

type snapshotSink struct {
	r    *Replica
	meta raftstore.SnapshotMeta
	data []byte
}

var _ raftstore.CheckpointSink = (*snapshotSink)(nil)

func (s *snapshotSink) Write(p []byte) (int, error) {
	if len(s.data)+len(p) > snapshotBytesMax {
		return 0, fmt.Errorf("pd: snapshot of more than %d bytes", snapshotBytesMax)
	}
	s.data = append(s.data, p...)
	return len(p), nil
}

// Install implements raftstore.SnapshotSink. The group is parked, so the replica's state may be
// replaced from here; raftstore makes it durable together with the reset of the log.
func (s *snapshotSink) Install() error {
	m, err := LoadMachine(s.data, s.r.mutants.Mutants)
	if err != nil {
		return err
	}
	if m.Core().Mark().Cut < s.r.machine.Core().Mark().Cut {
		return fmt.Errorf("pd: snapshot at %d is older (cut %d) than what is here (cut %d)", s.meta.Index, m.Core().Mark().Cut, s.r.machine.Core().Mark().Cut)
	}
	s.r.machine, s.r.applied, s.r.appliedTerm = m, s.meta.Index, s.meta.Term
	s.r.lastCheck, s.r.logBytes = s.meta.Index, 0
	return nil
}

// Checkpoint implements raftstore.CheckpointSink.
func (s *snapshotSink) Checkpoint() []byte { return s.data }

func (s *snapshotSink) Close() error { return nil }
