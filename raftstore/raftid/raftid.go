// Package raftid holds the identifiers that cross package borders. It is a leaf: it imports
// nothing, and every package may import it.
package raftid

import "fmt"

// GroupID names a raft group. It is unique in a cluster and never reused.
type GroupID uint64

// PDGroup is the placement group, which orders and describes all others. Regions are numbered
// from FirstRegion on; a region's raft group has the region's number.
const (
	PDGroup     GroupID = 1
	FirstRegion GroupID = 2
)

// StoreID names a node's store. It equals the node's etcd member id.
type StoreID uint64

// String prints the id as etcd prints member ids.
func (s StoreID) String() string { return fmt.Sprintf("%x", uint64(s)) }

// ReplicaID names a replica of a group: its raft node id. Unique in its group and never reused.
type ReplicaID uint64
