// Package pd is the placement group: the raft group that orders everything in the store (its
// cuts give out the revisions) and knows what is in it (regions, stores, the compaction floor).
//
//   - Machine is the replicated state, Entry what its log holds.
//   - Replica drives a Machine in a raft group: it takes reports, read-point requests and
//     proposals, and feeds order items to the stores that subscribe.
//
// It is not a region: it keeps no user data, lives in memory with a periodic checkpoint in the
// raft log, and never touches the state engine. Clients reach it through order.Client.
//
// State is owned by the worker that drives the group (raftstore calls Update and Work); what
// other goroutines hand in goes through the inbox.
//
// Life of a request: another goroutine puts it into the inbox and wakes the group; Work takes the
// inbox, applies what was committed, feeds streams, and proposes the next cut or asks raft to
// confirm the quorum; the answer is given from Work when the entry or the confirmation is applied.
//
// Rule names (P1, S2 ...) are those of docs/ordering.md.
package pd

import "braid/raftstore/raftid"

const firstRegion = raftid.FirstRegion
