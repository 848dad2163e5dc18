package gateway

import (
	"os"
	"sync"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
)

// kind is what a metric of etcd's is.
type kind byte

const (
	counterKind kind = iota
	gaugeKind
	histogramKind
)

// silent are metrics of parts of etcd that do not exist here, or not yet: its bbolt file, its
// snapshot files, its old store, its proxy, and steps that are not told apart here. They read zero,
// because dashboards, alerts and etcd's own tests look for the names. Who builds such a part takes
// its names out of this list.
var silent = map[string]kind{
	"etcd_debugging_auth_revision":                                                  gaugeKind,
	"etcd_debugging_disk_backend_commit_rebalance_duration_seconds":                 histogramKind,
	"etcd_debugging_disk_backend_commit_spill_duration_seconds":                     histogramKind,
	"etcd_debugging_disk_backend_commit_write_duration_seconds":                     histogramKind,
	"etcd_debugging_lease_granted_total":                                            counterKind,
	"etcd_debugging_lease_renewed_total":                                            counterKind,
	"etcd_debugging_lease_revoked_total":                                            counterKind,
	"etcd_debugging_lease_ttl_total":                                                histogramKind,
	"etcd_debugging_mvcc_db_compaction_keys_total":                                  counterKind,
	"etcd_debugging_mvcc_db_compaction_last":                                        gaugeKind,
	"etcd_debugging_mvcc_db_compaction_pause_duration_milliseconds":                 histogramKind,
	"etcd_debugging_mvcc_db_compaction_total_duration_milliseconds":                 histogramKind,
	"etcd_debugging_mvcc_index_compaction_pause_duration_milliseconds":              histogramKind,
	"etcd_debugging_mvcc_total_put_size_in_bytes":                                   gaugeKind,
	"etcd_debugging_server_lease_expired_total":                                     counterKind,
	"etcd_debugging_server_watch_send_loop_control_stream_duration_seconds":         histogramKind,
	"etcd_debugging_server_watch_send_loop_progress_duration_seconds":               histogramKind,
	"etcd_debugging_server_watch_send_loop_watch_stream_duration_per_event_seconds": histogramKind,
	"etcd_debugging_server_watch_send_loop_watch_stream_duration_seconds":           histogramKind,
	"etcd_debugging_snap_save_marshalling_duration_seconds":                         histogramKind,
	"etcd_debugging_snap_save_total_duration_seconds":                               histogramKind,
	"etcd_debugging_store_expires_total":                                            counterKind,
	"etcd_debugging_store_watch_requests_total":                                     counterKind,
	"etcd_debugging_store_watchers":                                                 gaugeKind,
	"etcd_disk_backend_commit_duration_seconds":                                     histogramKind,
	"etcd_disk_backend_defrag_duration_seconds":                                     histogramKind,
	"etcd_disk_backend_snapshot_duration_seconds":                                   histogramKind,
	"etcd_disk_defrag_inflight":                                                     gaugeKind,
	"etcd_disk_wal_write_duration_seconds":                                          histogramKind,
	"etcd_grpc_proxy_cache_hits_total":                                              gaugeKind,
	"etcd_grpc_proxy_cache_keys_total":                                              gaugeKind,
	"etcd_grpc_proxy_cache_misses_total":                                            gaugeKind,
	"etcd_grpc_proxy_events_coalescing_total":                                       counterKind,
	"etcd_grpc_proxy_watchers_coalescing_total":                                     gaugeKind,
	"etcd_mvcc_db_open_read_transactions":                                           gaugeKind,
	"etcd_mvcc_hash_duration_seconds":                                               histogramKind,
	"etcd_server_apply_duration_seconds":                                            histogramKind,
	"etcd_server_heartbeat_send_failures_total":                                     counterKind,
	"etcd_server_learner_promote_successes":                                         counterKind,
	"etcd_server_range_duration_seconds":                                            histogramKind,
	"etcd_server_read_indexes_failed_total":                                         counterKind,
	"etcd_server_slow_read_indexes_total":                                           counterKind,
	"etcd_server_snapshot_apply_in_progress_total":                                  gaugeKind,
	"etcd_snap_db_fsync_duration_seconds":                                           histogramKind,
	"etcd_snap_db_save_total_duration_seconds":                                      histogramKind,
	"etcd_snap_fsync_duration_seconds":                                              histogramKind,
}

// silentCollectors returns one collector for each silent metric.
func silentCollectors() []prometheus.Collector {
	const help = "Always zero: a part of etcd that does not exist here."
	var list []prometheus.Collector
	for name, k := range silent {
		switch k {
		case counterKind:
			list = append(list, prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help}))
		case gaugeKind:
			list = append(list, prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help}))
		case histogramKind:
			list = append(list, prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: []float64{1}}))
		}
	}
	return list
}

// openFiles counts the file descriptors of this process at the moment of a scrape; the limit is 0
// where the system does not tell.
func openFiles() float64 {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return float64(len(entries))
}

func openFilesMax() float64 {
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		return 0
	}
	return float64(l.Cur)
}

// processCollectors are the gauges that etcd has beside Prometheus' own of the process.
func processCollectors() []prometheus.Collector {
	return []prometheus.Collector{
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "os_fd_used", Help: "The number of open file descriptors."}, openFiles),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "os_fd_limit", Help: "The limit of open file descriptors."}, openFilesMax),
	}
}

// leaderChanges counts changes of the placement group's leader as they show from one scrape to the
// next: its raft term rises with each election, so none is missed in between.
type leaderChanges struct {
	mu    sync.Mutex
	term  uint64
	count uint64
}

func (l *leaderChanges) see(term uint64) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.term == 0 {
		l.term, l.count = term, min(term, 1) // the first leader is a change too
	}
	if term > l.term {
		l.count += term - l.term
		l.term = term
	}
	return l.count
}
