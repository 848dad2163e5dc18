// Package wal is a store's write-ahead log: one physical log on disk, in which every raft group
// of the store has a logical log of its own, with its own entries, hard state, checkpoint, start
// and tombstones. One sync makes durable what all groups have appended meanwhile, which is what
// makes many groups cheap.
//
// It is not a raft implementation and does not know what an entry means; it decides nothing about
// what may be truncated (D6) or reset (D2, D3). It has no copy of the data beyond a bounded cache.
//
// A Log owns its directory, files and goroutines. A GroupLog is changed and read by its group's
// owner; see there. The life of a record:
//
//   - GroupLog.Append changes the group in memory, where reads see it at once, and queues the
//     record. It never waits for the disk.
//   - The writer, one goroutine, takes all that is queued up to a limit, encodes it as one batch,
//     writes and syncs it once, lets the index point to it, and calls each Done.
//   - GroupLog.Entries reads from the cache, or by offset from the segment, verified.
//   - A record dies by being truncated, overwritten or replaced. A segment without live records is
//     recycled, oldest first; what stragglers still have in it is written again at the head.
//   - Open reads the log once, oldest segment to end, and rebuilds all of it. Its time follows the
//     length of the log: 64 MiB segments read at disk speed.
//
// # Limits
//
// Memory: 24 bytes for each entry that the log holds (TestSlotBytes), Options.CacheBytes of recent
// entries, what is queued, the last checkpoint of each group, one batch. Queue: Append cannot
// refuse, since raft cannot take back what it hands out. QueuedBytes and Full show how far the disk
// is behind; who feeds raft stops at Full, so the queue is bounded by Options.QueueBytesMax plus what
// is then under way. A batch: Options.BatchBytesMax, or one larger record (B9: bulk in front of the
// placement group's records is bounded; SetPriority puts those first). A record may be larger than
// a segment, up to 2 GiB; its segment's file then grows and is not recycled. Disk: about twice what
// is live plus Options.SegmentsKept segments, and up to five more that wait for use.
//
// # Why a crash is safe
//
// The file system promises what FS says: after a crash each 512-byte sector of unsynced data is
// there or not, on its own; names are durable after SyncDir.
//
// All or nothing, and a prefix. A batch is one checksummed unit, written and synced before the next
// is begun. So at most the last batch is not synced, nothing in it was acknowledged, and recovery
// takes it whole or cuts it whole. Recovery ends at the first place where no valid batch continues
// the log. Without priorities batches hold the records of all groups in the order of Append, so what
// is recovered is a prefix of that order over all groups: shared fsync needs this (an entry and the
// cut that numbers it are in one log, entry first). With SetPriority it holds within each group.
//
// Torn or damaged (B10). Each batch's header says through where the log was known to be synced when
// it was written, which may be in the segment before. Where reading ends, everything behind is
// searched for headers: if any says that this place had been synced, something was lost that may
// have been acknowledged, and Open fails with the file and the offset (CorruptError). If none does,
// it was the tail. A clean stop writes an empty batch, so that the last records are vouched for too.
// Every header also names the oldest segment that the log needs, so that a missing file is noticed.
//
// No old content for new. A header is valid only in the segment and at the offset that it names, in
// the log whose random id it carries, so what a recycled segment held before is never taken for new.
// Each names the checksum of the header before it, and holds a random number of the run that wrote
// it: a batch that a recovery has cut off can never follow what was written after that, nor can any
// user's bytes pass for a batch. Batches begin at sectors, so no synced sector is written again.
//
// Recycling. A segment is freed when (1) every record in it is dead, (2) everything that made it so
// is durable, and (3) a durable batch has named a later segment as the oldest. For (2) the writer
// remembers, when it finds the segment without live records, the last record queued by then, and
// names the later segment first in a batch after which none up to that one is queued: an entry is
// counted dead in the same critical section that queues what killed it. So a lazy truncation, which
// has no sync of its own, is in the log before anything that it forgot is gone. Segments are freed
// in order only. The file gets its new name durably before its old content is touched.
//
// Any suffix is enough. Since segments go oldest first, recovery always replays a suffix of one
// history, with the same outcome as the whole: all that had its last word in a freed segment was
// dead, or was said again later. What a record kills (by truncation, overwriting, reset, destroy)
// lies before it, so a killer is gone only after its victims. While replaying, a group may lack
// entries whose rewrite comes further on; at the end every group must be without a hole, or Open
// fails.
//
// Rewriting resurrects nothing. A rewrite is pushed under the group's lock after checking that each
// entry is still the log's own and still lies where it was read, and it carries the hard state, start,
// checkpoint and tombstones only if their last word lies in the segment to be freed. So at its place
// in the log it states what is true there. What is appended later lies behind it and wins on replay
// as it did in memory; what was appended before it is already taken into account, although it may
// itself still be queued. It replaces only what it names, so it cuts no newer tail off. When it is
// durable, entries that are still at the old place point to the new one; the others died meanwhile.
//
// Failure. After a failed write or sync, a full disk among them, nothing is acknowledged any more and
// OnFatal is told, once; what the kernel does with the pages is unknown, so there is no retry. After
// the restart the last batch is read, and written and synced once more before it counts: it may have
// been read from pages that the kernel wrongly takes for clean.
package wal
