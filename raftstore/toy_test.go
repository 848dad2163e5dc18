package raftstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/wal"
)

// toy is a machine that keeps the committed commands in a list. What persist was called on
// survives a crash.
type toy struct {
	note    func(format string, args ...any) // prints what happens
	queue   []string                         // to be proposed
	applied wal.Position
	state   []string
	role    Role
	busy    bool
	long    func() // to be detached in the next Work

	durable      wal.Position
	durableState []string
	conf         *raftpb.ConfState

	truncate    uint64 // to be asked for in the next Work
	checkpoints bool   // lives in memory: state is in the log's checkpoint
	checkpoint  bool   // to be written in the next Work
	dropped     int
	reads       []string
	onApply     func(index, term uint64, data string)
	installed   int
	onRole      func(Role)
	readStates  []raft.ReadState
}

func (t *toy) say(format string, args ...any) {
	if t.note != nil {
		t.note(format, args...)
	}
}

// Update implements StateMachine.
func (t *toy) Update(h Handle, u Update) {
	if u.Installed != nil {
		t.installed++
		t.say("installed %d/%d: %s", u.Installed.Index, u.Installed.Term, strings.Join(t.state, " "))
	}
	if r := u.Role; r != nil {
		t.role = *r
		if t.onRole != nil {
			t.onRole(*r)
		}
		if r.Leading {
			t.say("leads term %d from %d", r.Term, r.Open)
		} else {
			t.say("follows %d in term %d", r.Leader, r.Term)
		}
	}
	for _, rs := range u.ReadStates {
		t.readStates = append(t.readStates, rs)
		t.say("read %q at %d", rs.RequestCtx, rs.Index)
	}
	if u.Committed != h.Committed() {
		panic("toy: an update with an old commit index")
	}
	for i, e := range u.Appended {
		if i > 0 && e.GetIndex() != u.Appended[i-1].GetIndex()+1 {
			panic("toy: a hole in Appended")
		}
	}
}

// Work implements StateMachine.
func (t *toy) Work(h Handle) bool {
	for t.applied.Index < h.Committed() {
		es, err := h.Entries(t.applied.Index+1, h.Committed()+1, 1<<20)
		if err != nil {
			panic(err)
		}
		for _, e := range es {
			t.applied = wal.Position{Index: e.GetIndex(), Term: e.GetTerm()}
			if len(e.GetData()) > 0 && e.GetType() == raftpb.EntryNormal {
				t.state = append(t.state, string(e.GetData()))
			}
			if t.onApply != nil {
				t.onApply(e.GetIndex(), e.GetTerm(), string(e.GetData()))
			}
		}
	}
	for _, ctx := range t.reads {
		h.ReadIndex([]byte(ctx))
	}
	t.reads = nil
	for _, q := range t.queue {
		last := h.LastIndex()
		index, term, err := h.Propose([]byte(q))
		switch {
		case errors.Is(err, ErrDropped):
			t.dropped++
			t.say("dropped %q", q)
			if h.LastIndex() != last {
				panic("toy: a dropped proposal was appended")
			}
		case err != nil:
			panic(err)
		default:
			if got, ok := h.TermAt(index); h.LastIndex() == index && (!ok || got != term) {
				panic(fmt.Sprintf("toy: proposal at %d/%d, the log has %d", index, term, got))
			}
			t.say("proposed %q at %d/%d", q, index, term)
		}
	}
	t.queue = nil
	if t.long != nil {
		h.Detach(t.long)
		t.long = nil
	}
	if t.truncate > 0 {
		h.Truncate(t.truncate)
		t.truncate = 0
	}
	if t.checkpoint {
		t.checkpoint = false
		h.Checkpoint(t.applied.Index, t.applied.Term, []byte(strings.Join(t.state, " ")))
	}
	return false
}

// Idle implements StateMachine.
func (t *toy) Idle() bool { return !t.busy && len(t.queue) == 0 }

// persist makes the state durable.
func (t *toy) persist(conf *raftpb.ConfState) {
	t.durable, t.durableState, t.conf = t.applied, append([]string(nil), t.state...), conf
}

type toySource struct {
	meta SnapshotMeta
	data string
}

func (s *toySource) Meta() SnapshotMeta { return s.meta }
func (s *toySource) WriteTo(_ context.Context, w io.Writer) error {
	_, err := io.WriteString(w, s.data)
	return err
}
func (s *toySource) Close() error { return nil }

// Snapshot implements StateMachine.
func (t *toy) Snapshot() (SnapshotSource, error) {
	return &toySource{meta: SnapshotMeta{Index: t.applied.Index, Term: t.applied.Term}, data: strings.Join(t.state, " ")}, nil
}

type toySink struct {
	bytes.Buffer
	t      *toy
	meta   SnapshotMeta
	closed bool
}

func (s *toySink) Install() error {
	s.t.state = strings.Fields(s.String())
	s.t.applied = wal.Position{Index: s.meta.Index, Term: s.meta.Term}
	s.t.persist(s.meta.ConfState)
	return nil
}
func (s *toySink) Close() error { s.closed = true; return nil }

type toyCheckpointSink struct{ toySink }

func (s *toyCheckpointSink) Checkpoint() []byte { return []byte(strings.Join(s.t.state, " ")) }

// Receive implements StateMachine.
func (t *toy) Receive(meta SnapshotMeta) (SnapshotSink, error) {
	if t.checkpoints {
		return &toyCheckpointSink{toySink{t: t, meta: meta}}, nil
	}
	return &toySink{t: t, meta: meta}, nil
}
