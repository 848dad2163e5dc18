package raftstore

import (
	"context"
	"errors"
	"fmt"
	"io"

	"go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"

	"braid/raftstore/raftid"
	"braid/raftstore/raftwire"
)

// errUnwanted refuses a snapshot that is of no use at the receiver now.
var errUnwanted = errors.New("raftstore: snapshot is not wanted")

// errBusy refuses a snapshot because too many are on their way.
var errBusy = errors.New("raftstore: too many snapshots at once")

func (s *Store) acquireSnapshot() bool {
	select {
	case s.out <- struct{}{}:
		return true
	default:
		return false
	}
}

func (s *Store) releaseSnapshot() { <-s.out }

// sendSnapshot streams pinned state in a goroutine of its own; their number is bounded by the
// slots that the groups acquired.
func (s *Store) sendSnapshot(r *replica, snap OutgoingSnapshot) {
	to := raftid.ReplicaID(snap.Message.GetTo())
	finish := func(err error) {
		if cerr := snap.Source.Close(); err == nil {
			err = cerr
		}
		s.releaseSnapshot()
		if err != nil {
			s.stats.snapshotsFailed.Add(1)
			s.log.Info("snapshot was not sent", zap.Uint64("group", uint64(r.id)), zap.Uint64("to", uint64(to)), zap.Error(err))
		} else {
			s.stats.snapshotsSent.Add(1)
		}
		r.post(func(m *mail) { m.in.Sent = append(m.in.Sent, SnapshotSent{To: to, OK: err == nil}) })
	}
	store, ok := r.storeOf(to)
	if !ok || s.cfg.Transport == nil {
		finish(fmt.Errorf("raftstore: no store is known for replica %d", to))
		return
	}
	header := raftwire.AppendMessage([]byte{raftwire.Version}, snap.Message)
	if !s.task(func() {
		finish(s.cfg.Transport.SendSnapshot(s.ctx, store, r.id, header, func(w io.Writer) error {
			return snap.Source.WriteTo(s.ctx, w)
		}))
	}) {
		finish(ErrClosed)
	}
}

// receiveSnapshot stages an incoming snapshot on the stream's goroutine and hands it to the
// group.
func (s *Store) receiveSnapshot(_ context.Context, from raftid.StoreID, group raftid.GroupID, header []byte, in io.Reader) error {
	if len(header) == 0 || header[0] != raftwire.Version {
		return fmt.Errorf("%w: snapshot header", raftwire.ErrMalformed)
	}
	m, err := raftwire.DecodeMessage(header[1:])
	if err != nil {
		return err
	}
	if !s.enter() {
		return ErrClosed
	}
	defer s.taskDone()
	r := s.replica(group)
	if r == nil {
		return ErrUnknownGroup
	}
	meta := snapshotMeta(m)
	if m.GetType() != raftpb.MsgSnap || meta.Index == 0 {
		return errUnwanted
	}
	if !r.status().WantsSnapshot(meta.Index) {
		r.post(func(ml *mail) { ml.in.Messages = append(ml.in.Messages, ProbeOf(m)) })
		return errUnwanted
	}
	select {
	case s.in <- struct{}{}:
		defer func() { <-s.in }()
	default:
		return errBusy
	}
	if !r.beginStaging() {
		return errBusy
	}
	sink, err := r.machine.Receive(meta)
	if err != nil {
		r.endStaging()
		return err
	}
	if _, err := io.Copy(sink, in); err != nil {
		r.endStaging()
		s.closeSink(r, sink)
		return err
	}
	s.log.Info("snapshot received", zap.Uint64("group", uint64(group)), zap.Stringer("from", from), zap.Uint64("index", meta.Index))
	handed := false
	r.post(func(ml *mail) {
		ml.in.Staged = &Staged{Message: m, Sink: sink}
		handed = true
	})
	if !handed {
		s.closeSink(r, sink)
		r.endStaging()
		return ErrUnknownGroup
	}
	return nil
}

// installSnapshot replaces the machine's state in a goroutine of its own; the group is parked
// until it ends.
func (s *Store) installSnapshot(r *replica, st *Staged) {
	ok := s.task(func() {
		err := st.Sink.Install()
		if err == nil {
			s.stats.snapshotsInstalled.Add(1)
		}
		r.post(func(m *mail) { m.in.Installed = &Installed{Sink: st.Sink, Err: err} })
	})
	if !ok {
		s.closeSink(r, st.Sink) // closing: the log is not reset, the leader will send it again
	}
}

func (s *Store) closeSink(r *replica, sink SnapshotSink) {
	if err := sink.Close(); err != nil {
		s.log.Warn("closing a staged snapshot", zap.Uint64("group", uint64(r.id)), zap.Error(err))
	}
}
