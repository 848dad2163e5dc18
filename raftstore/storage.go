package raftstore

import (
	"fmt"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
)

// storage shows a group's log to raft.
type storage struct{ g *Group }

// InitialState implements raft.Storage.
func (s storage) InitialState() (*raftpb.HardState, *raftpb.ConfState, error) {
	h := s.g.hard
	return &raftpb.HardState{Term: new(h.Term), Vote: new(uint64(h.Vote)), Commit: new(h.Commit)}, cloneConf(s.g.conf), nil
}

// Entries implements raft.Storage.
func (s storage) Entries(lo, hi, maxSize uint64) ([]*raftpb.Entry, error) {
	if lo < s.g.log.FirstIndex() {
		return nil, raft.ErrCompacted
	}
	if hi > s.g.log.LastIndex()+1 {
		return nil, raft.ErrUnavailable
	}
	return s.g.log.Entries(lo, hi, maxSize)
}

// Term implements raft.Storage.
func (s storage) Term(i uint64) (uint64, error) {
	start := s.g.log.Start()
	switch {
	case i == start.Index:
		return start.Term, nil
	case i < start.Index:
		return 0, raft.ErrCompacted
	}
	term, ok := s.g.log.TermAt(i)
	if !ok {
		return 0, raft.ErrUnavailable
	}
	return term, nil
}

// LastIndex implements raft.Storage.
func (s storage) LastIndex() (uint64, error) { return s.g.log.LastIndex(), nil }

// FirstIndex implements raft.Storage.
func (s storage) FirstIndex() (uint64, error) { return s.g.log.FirstIndex(), nil }

// Snapshot implements raft.Storage: it pins the machine's state. Raft calls it only to send the
// result at once, so the pins and the MsgSnaps that follow pair up in order.
func (s storage) Snapshot() (*raftpb.Snapshot, error) {
	snap, src, err := s.g.pin()
	if err != nil {
		return nil, err
	}
	s.g.pinned = append(s.g.pinned, src)
	return snap, nil
}

// quietLogger drops everything but panics.
type quietLogger struct{}

func (quietLogger) Debug(...any)                   {}
func (quietLogger) Debugf(string, ...any)          {}
func (quietLogger) Info(...any)                    {}
func (quietLogger) Infof(string, ...any)           {}
func (quietLogger) Warning(...any)                 {}
func (quietLogger) Warningf(string, ...any)        {}
func (quietLogger) Error(...any)                   {}
func (quietLogger) Errorf(string, ...any)          {}
func (quietLogger) Fatal(v ...any)                 { panic(fmt.Sprint(v...)) }
func (quietLogger) Fatalf(format string, v ...any) { panic(fmt.Sprintf(format, v...)) }
func (quietLogger) Panic(v ...any)                 { panic(fmt.Sprint(v...)) }
func (quietLogger) Panicf(format string, v ...any) { panic(fmt.Sprintf(format, v...)) }
