package node

import (
	"fmt"

	"go.etcd.io/raft/v3"
	"go.uber.org/zap"

	"braid/raftstore/raftid"
)

// raftLogger gives raft's messages to the node's log. With many groups its everyday talk is for
// debugging; what is wrong keeps its level.
type raftLogger struct{ log *zap.SugaredLogger }

func (n *Node) raftLogger(group raftid.GroupID) raft.Logger {
	return raftLogger{n.log.With(zap.Uint64("group", uint64(group))).Sugar()}
}

func (l raftLogger) Debug(v ...any)            { l.log.Debug(v...) }
func (l raftLogger) Debugf(f string, v ...any) { l.log.Debugf(f, v...) }
func (l raftLogger) Info(v ...any)             { l.log.Debug(v...) }
func (l raftLogger) Infof(f string, v ...any)  { l.log.Debugf(f, v...) }
func (l raftLogger) Warning(v ...any)          { l.log.Debug(v...) }
func (l raftLogger) Warningf(f string, v ...any) {
	l.log.Debugf(f, v...)
}
func (l raftLogger) Error(v ...any)            { l.log.Error(v...) }
func (l raftLogger) Errorf(f string, v ...any) { l.log.Errorf(f, v...) }

// Fatal and Panic are raft's broken invariants: the group panics, the store reports it and the
// node stops.
func (l raftLogger) Fatal(v ...any)            { panic(fmt.Sprint(v...)) }
func (l raftLogger) Fatalf(f string, v ...any) { panic(fmt.Sprintf(f, v...)) }
func (l raftLogger) Panic(v ...any)            { panic(fmt.Sprint(v...)) }
func (l raftLogger) Panicf(f string, v ...any) { panic(fmt.Sprintf(f, v...)) }
