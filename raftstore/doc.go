// Package raftstore runs Raft groups: many of them on one store, each replicating the log of one
// state machine, whose commands it does not understand.
//
// It is not a consensus algorithm (that is go.etcd.io/raft), not a log format (package wal), not
// a network (package transport). It is what lies between: the order in which a log is written,
// acknowledged, handed to its machine, cut and replaced by a snapshot.
//
// Group is the core: one raft.RawNode with its log and its machine, a value without goroutine,
// clock or socket. Process takes an Input and fills an Output; the Store and the simulator drive
// the same Process. Store is the shell: a fixed pool of workers, each group owned by at most one
// worker at a time, a tick that touches only groups that are awake, goroutines only for
// snapshots.
//
// The life of a group: NewGroup reconciles the log with the position of the state engine (D2);
// Process steps messages, ticks and durability reports into raft, appends what raft wants
// appended (visible at once, durable later), tells the machine what changed (Update) and lets it
// work (Work); responses that promise durability leave after the log says so, all other messages
// at once. A group with nothing to do falls asleep and costs nothing (B12). A group whose state
// is missing votes and keeps its log, and waits for a snapshot (D4, B6).
package raftstore
