package gateway

import (
	"github.com/prometheus/client_golang/prometheus"

	"braid/watchsvc"
)

// watchCollector shows the hub's counts of the moment of the scrape under etcd's names.
type watchCollector struct{ hub *watchsvc.Hub }

var (
	descStreams  = desc("etcd_debugging_mvcc_watch_stream_total", "Total number of watch streams.")
	descWatchers = desc("etcd_debugging_mvcc_watcher_total", "Total number of watchers.")
	descSlow     = desc("etcd_debugging_mvcc_slow_watcher_total", "Total number of unsynced slow watchers.")
	descPending  = desc("etcd_debugging_mvcc_pending_events_total", "Total number of pending events to be sent.")
	descEvents   = desc("etcd_debugging_mvcc_events_total", "Total number of events sent by this member.")
)

func (c *watchCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descStreams, descWatchers, descSlow, descPending, descEvents} {
		ch <- d
	}
}

func (c *watchCollector) Collect(ch chan<- prometheus.Metric) {
	var st watchsvc.Stats
	if c.hub != nil {
		st = c.hub.Stats()
	}
	for _, g := range []struct {
		desc  *prometheus.Desc
		value int64
	}{{descStreams, st.Streams}, {descWatchers, st.Watchers}, {descSlow, st.Behind}, {descPending, st.PendingEvents}} {
		ch <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, float64(g.value))
	}
	ch <- prometheus.MustNewConstMetric(descEvents, prometheus.CounterValue, float64(st.Events))
}
