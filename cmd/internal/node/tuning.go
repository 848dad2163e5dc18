package node

import (
	"slices"
	"time"

	"braid/cmd/internal/config"
	"braid/raftstore/raftid"
	"braid/raftstore/wal"
	"braid/region"
)

// tuning are the sizes and times of a node that no flag sets. Tests make them tiny, so that what
// takes gigabytes or minutes in production happens in a second.
type tuning struct {
	segmentBytes  int64          // of the log; 0 is the log's default
	memTableBytes int64          // of the state engine; 0 is the engine's default
	limits        *region.Limits // of replicas; nil are the package's
	logFS         wal.FS         // below the log; nil is the operating system's
	// gcGrace is how long removal lags behind the logical floor, so that reads which took their
	// point before a compaction can finish (C2). One that still loses takes a new point.
	gcGrace time.Duration
	// gcChunkPause paces collection: after each chunk it rests as long as the chunk took, up to
	// this, so that it takes half a core at most.
	gcChunkPause time.Duration
	// collectEvery is how often the collector looks whether there is something to do.
	collectEvery time.Duration
	// idleFlush is how often a store with more than idleSegments live log segments flushes, so
	// that quiet groups do not keep old log for ever.
	idleFlush    time.Duration
	idleSegments int
	// refusedFor is how long a peer's refusal must have lasted to count: what it knows may be a
	// moment old.
	refusedFor time.Duration
	// localWait is how long serializable reads wait for this node's replicas; 0 is the router's default.
	localWait time.Duration
}

func defaultTuning() tuning {
	return tuning{
		gcGrace: 5 * time.Second, gcChunkPause: 20 * time.Millisecond, collectEvery: time.Second,
		idleFlush: 30 * time.Second, idleSegments: 2, refusedFor: 2 * time.Second,
	}
}

// memTableBytes is the size of the state engine's memtables, a little less on each member than on the one
// before. Replicas write the same, so with one size all of them would be full, flushed and compacted at one
// moment; like this most of the replicas of a group are free of that at any time.
func (n *Node) memTableBytes() int64 {
	if n.tuning.memTableBytes != 0 {
		return n.tuning.memTableBytes
	}
	at := slices.IndexFunc(n.members, func(m config.Member) bool { return raftid.StoreID(m.ID) == n.self })
	return memTableBytes - memTableBytes/2*int64(max(at, 0))/int64(len(n.members))
}

const memTableBytes = 64 << 20
