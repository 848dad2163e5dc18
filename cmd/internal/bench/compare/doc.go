// Package compare measures stores side by side on one machine: braid with many raft groups, braid
// with a single one, and an etcd binary. It starts a cluster of each on loopback, runs a suite of
// loads against them in turn, and collects one table.
//
// A suite is a list of stages, a stage a few loads that need the same data. Run owns the clusters:
// it starts those of a stage's group together, lets them take rounds in turn, and stops them and
// removes their data before the next group. Servers are ordinary processes (package cluster); an
// interrupted run stops them too and keeps the rows of all whole rounds.
//
// Servers and clients share the machine, so the ratios mean something and the rates do not.
package compare
