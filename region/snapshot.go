package region

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"braid/raftstore"
	"braid/region/regionpb"
)

// A snapshot's stream is a header (version, length, position) and then the engine's own framing
// of the span's state. The position is the one that was in the engine when it was pinned, so the
// two belong together whatever was applied since.
const (
	snapshotV1        = 1
	positionBytesMax  = 256 << 20
	snapshotHeaderLen = 5
)

var errNoSnapshots = errors.New("region: no snapshot backend")

// Snapshot pins the applied state (raftstore.StateMachine).
func (r *Replica) Snapshot() (raftstore.SnapshotSource, error) {
	if r.cfg.Snapshots == nil {
		return nil, errNoSnapshots
	}
	pinned, err := r.cfg.Snapshots.Pin()
	if err != nil {
		return nil, fmt.Errorf("region %d: pinning its state: %w", r.id, err)
	}
	src, err := r.source(pinned)
	if err != nil {
		if cerr := pinned.Close(); cerr != nil {
			err = errors.Join(err, cerr)
		}
		return nil, err
	}
	return src, nil
}

func (r *Replica) source(pinned PinnedState) (*snapshotSource, error) {
	data, ok, err := pinned.Position(uint64(r.id))
	if err != nil || !ok {
		return nil, fmt.Errorf("region %d: pinned state without a position: %w", r.id, err)
	}
	p, err := regionpb.DecodePosition(data)
	if err != nil {
		return nil, fmt.Errorf("region %d: pinned position: %w", r.id, err)
	}
	if r.cfg.Mutants.SnapNoCum {
		p.Cum = 0
	}
	if r.cfg.Mutants.SnapNoPrepared {
		p.Prepared = nil
	}
	conf, err := ConfState(&p)
	if err != nil {
		return nil, err
	}
	return &snapshotSource{group: uint64(r.id), pos: p, conf: conf, pinned: pinned}, nil
}

// ConfState is the raft configuration of a position: the recorded one, else the descriptor's
// peers as voters.
func ConfState(p *Position) (*raftpb.ConfState, error) {
	c := &raftpb.ConfState{}
	if len(p.ConfState) > 0 {
		if err := proto.Unmarshal(p.ConfState, c); err != nil {
			return nil, fmt.Errorf("region %d: recorded configuration: %w", p.Descriptor.ID, err)
		}
		return c, nil
	}
	for _, peer := range p.Descriptor.Peers {
		c.Voters = append(c.Voters, uint64(peer.Replica))
	}
	return c, nil
}

type snapshotSource struct {
	group  uint64
	pos    Position
	conf   *raftpb.ConfState
	pinned PinnedState
}

func (s *snapshotSource) Meta() raftstore.SnapshotMeta {
	return raftstore.SnapshotMeta{Index: s.pos.Index, Term: s.pos.Term, ConfState: s.conf}
}

func (s *snapshotSource) WriteTo(ctx context.Context, w io.Writer) error {
	pos := s.pos.Append(nil)
	head := binary.BigEndian.AppendUint32([]byte{snapshotV1}, uint32(len(pos)))
	if _, err := w.Write(append(head, pos...)); err != nil {
		return err
	}
	return s.pinned.Export(ctx, s.pos.Descriptor.Span, w)
}

func (s *snapshotSource) Close() error { return s.pinned.Close() }

// Receive opens a sink for a snapshot (raftstore.StateMachine). Off the owner's goroutine.
func (r *Replica) Receive(meta raftstore.SnapshotMeta) (raftstore.SnapshotSink, error) {
	if r.cfg.Snapshots == nil {
		return nil, errNoSnapshots
	}
	return &snapshotSink{r: r, meta: meta}, nil
}

// snapshotSink reads the header, then stages the rest in the engine. One goroutine uses it.
type snapshotSink struct {
	r    *Replica
	meta raftstore.SnapshotMeta
	head []byte // until the position is complete
	pos  Position
	imp  StateImport
}

func (s *snapshotSink) Write(b []byte) (int, error) {
	n := len(b)
	for s.imp == nil && len(b) > 0 {
		want := snapshotHeaderLen
		if len(s.head) >= snapshotHeaderLen {
			size := binary.BigEndian.Uint32(s.head[1:])
			if s.head[0] != snapshotV1 || size > positionBytesMax {
				return 0, fmt.Errorf("region %d: snapshot header of version %d, position of %d bytes", s.r.id, s.head[0], size)
			}
			want += int(size)
		}
		take := min(want-len(s.head), len(b))
		s.head, b = append(s.head, b[:take]...), b[take:]
		if len(s.head) == want && want > snapshotHeaderLen {
			if err := s.open(); err != nil {
				return 0, err
			}
		}
	}
	if len(b) > 0 {
		if _, err := s.imp.Write(b); err != nil {
			return 0, err
		}
	}
	return n, nil
}

// open checks the position and starts staging.
func (s *snapshotSink) open() error {
	p, err := regionpb.DecodePosition(s.head[snapshotHeaderLen:])
	if err != nil {
		return fmt.Errorf("region %d: snapshot: %w", s.r.id, err)
	}
	if p.Descriptor.ID != s.r.id || p.Index != s.meta.Index || p.Term != s.meta.Term {
		return fmt.Errorf("region %d: snapshot is of region %d at %d/%d, announced was %d/%d",
			s.r.id, p.Descriptor.ID, p.Index, p.Term, s.meta.Index, s.meta.Term)
	}
	if have := s.r.Applied(); behind(&p, &have) {
		return fmt.Errorf("region %d: snapshot at %d with items through %d is behind the applied %d and %d", s.r.id, p.Index, p.Item, have.Index, have.Item)
	}
	imp, err := s.r.cfg.Snapshots.Import(uint64(s.r.id), p.Descriptor.Span)
	if err != nil {
		return fmt.Errorf("region %d: staging a snapshot: %w", s.r.id, err)
	}
	s.pos, s.imp = p, imp
	return nil
}

// behind says whether state at a position lacks something that is applied. The index alone does
// not tell: an item that only decides attempts moves none, so a sender may have passed more of the
// log and fewer items. Going back would take from readers and watchers what they were given (I4, I7).
func behind(p, have *Position) bool { return p.Index < have.Index || p.Item < have.Item }

// Stale implements raftstore.StaleSink: what was applied since the stream was opened counts too.
func (s *snapshotSink) Stale() bool { return s.imp != nil && behind(&s.pos, &s.r.pos) }

// Install replaces the state durably (D3). The group is parked meanwhile; Update with Installed
// comes next.
func (s *snapshotSink) Install() error {
	if s.imp == nil {
		return fmt.Errorf("region %d: snapshot ended within its header", s.r.id)
	}
	// The sender may have removed versions that are still here. From the moment of the exchange
	// readers must know that, and the owner adopts the position only later (C1).
	s.r.mu.Lock()
	if !s.r.cfg.Mutants.SnapFloorLate {
		s.r.mu.applied.Floor = max(s.r.mu.applied.Floor, s.pos.Floor)
	}
	s.r.mu.Unlock()
	if err := s.imp.Install(s.pos.Append(nil)); err != nil {
		return fmt.Errorf("region %d: installing a snapshot: %w", s.r.id, err)
	}
	s.r.mu.Lock()
	p := s.pos
	s.r.mu.installed = &p
	s.r.mu.Unlock()
	return nil
}

func (s *snapshotSink) Close() error {
	if s.imp == nil {
		return nil
	}
	return s.imp.Close()
}

// install goes on from the state that a snapshot brought. The log was reset, so the fate of
// everything in flight here is unknown (E6).
func (r *Replica) install(meta *raftstore.SnapshotMeta) error {
	r.mu.Lock()
	p := r.mu.installed
	r.mu.installed = nil
	r.mu.Unlock()
	if p == nil || p.Index != meta.Index {
		return fmt.Errorf("%w: a snapshot at %d was installed that this replica did not stage", ErrDiverged, meta.Index)
	}
	for _, q := range r.inflight.drain() {
		q.fail(regionpb.ErrorOf(regionpb.Unknown))
	}
	if f := r.cfg.Observer.Installed; f != nil {
		f(p)
	}
	r.failDeciding()
	return r.adopt(*p)
}
