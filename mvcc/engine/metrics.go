package engine

// LogicalBytes is the sum of mvcc.Version.LogicalSize over all versions: what users see as the
// size of the database. It does not depend on when Pebble compacts, shrinks with GC, and is as
// exact after a crash as the versions themselves.
func (e *Engine) LogicalBytes() int64 { return e.logical.Load() }

// LiveKeys is the number of keys that exist now.
func (e *Engine) LiveKeys() int64 { return e.live.Load() }

// count changes the totals in memory by what has just become visible.
func (e *Engine) count(t totals) {
	e.logical.Add(t.bytes)
	e.live.Add(t.keys)
}

// DiskBytes is the size of Pebble's files.
func (e *Engine) DiskBytes() int64 { return int64(e.db.Metrics().DiskSpaceUsage()) }

// Metrics is the engine's state in numbers.
type Metrics struct {
	LogicalBytes   int64
	LiveKeys       int64
	DiskBytes      int64
	MemTableBytes  int64
	MemTables      int64 // the one that takes writes and those that wait for their flush
	L0Sublevels    int64
	ReadAmp        int64
	CacheBytes     int64
	CacheHits      int64
	CacheMisses    int64
	Flushes        int64
	FlushedBytes   int64
	Compactions    int64
	CompactedBytes int64
	CompactionDebt int64 // estimated bytes that compactions still have to move
	WriteStalls    int64
	Stalled        bool
}

// Metrics reads the numbers; it costs some ten microseconds.
func (e *Engine) Metrics() Metrics {
	m := e.db.Metrics()
	out := Metrics{
		LogicalBytes:   e.LogicalBytes(),
		LiveKeys:       e.LiveKeys(),
		DiskBytes:      int64(m.DiskSpaceUsage()),
		MemTableBytes:  int64(m.MemTable.Size),
		MemTables:      m.MemTable.Count,
		L0Sublevels:    int64(m.Levels[0].Sublevels),
		ReadAmp:        int64(m.ReadAmp()),
		CacheBytes:     m.BlockCache.Size,
		CacheHits:      m.BlockCache.Hits,
		CacheMisses:    m.BlockCache.Misses,
		Flushes:        m.Flush.Count,
		Compactions:    m.Compact.Count,
		CompactionDebt: int64(m.Compact.EstimatedDebt),
		WriteStalls:    e.pressure.total.Load(),
		Stalled:        e.Stalled(),
	}
	for i := range m.Levels {
		out.FlushedBytes += int64(m.Levels[i].TableBytesFlushed)
		out.CompactedBytes += int64(m.Levels[i].TableBytesCompacted)
	}
	return out
}
