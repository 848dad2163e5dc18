// Package order is the revision oracle: it turns what regions report as committed into cuts, and
// cuts into the order items by which every replica numbers its entries.
//
//   - Core is the replicated part: a cut goes in, order items come out, the same on every member
//     of pd. It owns the revision, the fence and the compaction floor.
//   - Cutter is the leader's part: it keeps the newest report of each region and decides when the
//     next cut is proposed and what is in it.
//   - Reads batches requests for read points around confirmations of the quorum.
//   - ClientCore decides for one store what it subscribes to, reports, asks and repeats; Client
//     is its shell.
//
// It is not a network, not a raft group (package pd drives Core with one) and knows nothing of
// what an entry of a region means. Core, Cutter, Reads and ClientCore are pure: no goroutine,
// clock, randomness or IO; their owner calls them from one goroutine or under one lock.
//
// Life of a write: its region commits an entry; a replica reports it; the Cutter takes the report
// into a cut; pd's group commits the cut; Core makes an item of it on every member; a member
// feeds it to the stores that subscribe to the region; the Client delivers it to the replica,
// which applies the entry; later its region seals the item, reports that, and Core forgets it.
//
// Rule names (P1, F2, S1 ...) are those of docs/ordering.md.
package order

import (
	"errors"
	"fmt"

	"braid/raftstore/raftid"
)

// Errors of the oracle. All of them leave it to the caller whether to try again.
var (
	// ErrNoLeader: no leader of pd is known, and none appeared in time. Nothing was executed.
	ErrNoLeader = errors.New("order: pd has no leader")
	// ErrTimeout: the caller's context ended first. A proposal may still be executed.
	ErrTimeout = errors.New("order: timed out")
	// ErrUnknown: the proposal may have been executed, now or later (E6).
	ErrUnknown = errors.New("order: outcome unknown")
	// ErrCompacted: Compact of a revision at or below the floor.
	ErrCompacted = errors.New("order: revision already compacted")
	// ErrFutureRevision: Compact of a revision that was not given out yet.
	ErrFutureRevision = errors.New("order: future revision")
	// ErrOverloaded: a bounded queue is full. Nothing was executed.
	ErrOverloaded = errors.New("order: too many requests")
	// ErrAborted: the attempt is aborted, for ever.
	ErrAborted = errors.New("order: attempt aborted")
	// ErrForgotten: the attempt was decided, one way or the other, and forgotten since.
	ErrForgotten = errors.New("order: attempt forgotten")
	// ErrClosed: the client or replica was closed.
	ErrClosed = errors.New("order: closed")
	// ErrNotSubscribed: the region has no replica registered here.
	ErrNotSubscribed = errors.New("order: region not registered here")
	// ErrInvalid: pd's state forbids the request; repeating it does not help.
	ErrInvalid = errors.New("order: invalid request")
)

// NotLeaderError says that a pd member does not lead. Nothing was executed.
type NotLeaderError struct {
	Leader raftid.StoreID // whom to ask; zero when unknown
	Term   uint64         // as of this term of pd's group
}

func (e *NotLeaderError) Error() string {
	if e.Leader == 0 {
		return "order: not pd's leader"
	}
	return fmt.Sprintf("order: not pd's leader (leader %s)", e.Leader)
}

// Role is what a pd member knows of pd's leadership.
type Role struct {
	Term    uint64
	Leader  raftid.StoreID // zero when unknown
	Leading bool           // it is this member
}

// Mutants drop rules on purpose, so that tests can prove that they would be noticed. The zero
// value drops none; nothing but tests may set one.
type Mutants struct {
	// Delta: cuts carry differences instead of cumulative counts (P1, A12).
	Delta bool
	// NoFence: a raised fence is announced, but entries stamped before it stay valid (F2).
	NoFence bool
	// PerStoreMark: a mark counts for every region of the store, acknowledged or not (S2).
	PerStoreMark bool
	// EarlyRead: read points before the opening entry is applied (A13).
	EarlyRead bool
	// ForgetAll: an item is forgotten as soon as it was made (P4).
	ForgetAll bool
	// DecisionsFirst: decisions come before the entries of their cut (P3).
	DecisionsFirst bool
	// FactsAsLevel: a prepared attempt counts whenever a report lists it, not once as a fact of an
	// interval (P2, A4).
	FactsAsLevel bool
	// DecidedMax, when it is not zero, is how many decisions are remembered. It drops no rule: with
	// a short memory tests reach what happens to forgotten attempts.
	DecidedMax int
}
