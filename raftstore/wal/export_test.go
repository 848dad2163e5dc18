package wal

// Totals returns the counters, also after Close.
func (l *Log) Totals() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stats
}
