package node

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"braid/pd"
	"braid/pd/order"
	"braid/raftstore/raftid"
	"braid/raftstore/transport"
)

// metrics are the node's own, named braid_<package>_..., beside the gateway's.
type metrics struct {
	n         *Node
	syncTime  prometheus.Histogram
	fsyncTime prometheus.Histogram // the same under etcd's name and in its buckets
	syncBytes prometheus.Counter
	syncCount prometheus.Counter
	// etcd's name for syncBytes, which is a gauge there.
	writtenGauge prometheus.Gauge
	cutTime      prometheus.Histogram
	cutRegions   prometheus.Histogram
	cutBytes     prometheus.Histogram
	cutRevs      prometheus.Histogram
	verdicts     *prometheus.CounterVec
	peerSent     *prometheus.CounterVec
	peerRecv     *prometheus.CounterVec
	peerFailed   *prometheus.CounterVec
	peerDrops    *prometheus.CounterVec

	// The verdicts' counters, so that the hot path does not look labels up.
	byVerdict [8]prometheus.Counter
}

func newMetrics(n *Node) *metrics {
	hist := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets})
	}
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	seconds := prometheus.ExponentialBuckets(0.0001, 2, 16)
	counts := prometheus.ExponentialBuckets(1, 2, 16)
	m := &metrics{
		n:            n,
		syncTime:     hist("braid_raftstore_wal_sync_duration_seconds", "Time of one write and sync of the log, which covers all groups that had something to write.", seconds),
		syncBytes:    prometheus.NewCounter(prometheus.CounterOpts{Name: "braid_raftstore_wal_written_bytes_total", Help: "Bytes written to the log."}),
		syncCount:    prometheus.NewCounter(prometheus.CounterOpts{Name: "braid_raftstore_wal_records_total", Help: "Records written to the log."}),
		writtenGauge: prometheus.NewGauge(prometheus.GaugeOpts{Name: "etcd_disk_wal_write_bytes_total", Help: "Bytes written to the log."}),
		cutTime:      hist("braid_pd_cut_duration_seconds", "Time from proposing a cut to applying it, on pd's leader.", seconds),
		cutRegions:   hist("braid_pd_cut_regions", "Regions in a cut.", counts),
		cutBytes:     hist("braid_pd_cut_bytes", "Size of a cut in pd's log.", prometheus.ExponentialBuckets(32, 2, 16)),
		cutRevs:      hist("braid_pd_cut_revisions", "Revisions that a cut gave out.", counts),
		verdicts:     vec("braid_pd_reports_total", "Reports of regions by what they were worth.", "verdict"),
		peerSent:     vec("etcd_network_peer_sent_bytes_total", "The total number of bytes sent to peers.", "To"),
		peerRecv:     vec("etcd_network_peer_received_bytes_total", "The total number of bytes received from peers.", "From"),
		peerFailed:   vec("etcd_network_peer_sent_failures_total", "The total number of send failures from peers.", "To"),
		peerDrops:    vec("braid_raftstore_transport_dropped_total", "Frames that found their queue full or their peer away.", "To"),
	}
	for v := range m.byVerdict {
		m.byVerdict[v] = m.verdicts.WithLabelValues(order.Verdict(v).String())
	}
	m.fsyncTime = hist("etcd_disk_wal_fsync_duration_seconds", "Time of one write and sync of the log.", prometheus.ExponentialBuckets(0.001, 2, 14))
	n.registry.MustRegister(m.fsyncTime, m.writtenGauge, m.syncTime, m.syncBytes, m.syncCount, m.cutTime, m.cutRegions, m.cutBytes, m.cutRevs,
		m.verdicts, m.peerSent, m.peerRecv, m.peerFailed, m.peerDrops)
	return m
}

func (m *metrics) onSync(d time.Duration, records, bytes int) {
	m.syncTime.Observe(d.Seconds())
	m.fsyncTime.Observe(d.Seconds())
	m.syncCount.Add(float64(records))
	m.syncBytes.Add(float64(bytes))
	m.writtenGauge.Add(float64(bytes))
}

func (m *metrics) pd() pd.Metrics {
	return pd.Metrics{
		Cut: func(s pd.CutStats) {
			if s.Latency > 0 {
				m.cutTime.Observe(s.Latency.Seconds())
			}
			m.cutRegions.Observe(float64(s.Parts))
			m.cutBytes.Observe(float64(s.Bytes))
			m.cutRevs.Observe(float64(s.Revisions))
		},
		Verdict: func(v order.Verdict) {
			if int(v) < len(m.byVerdict) {
				m.byVerdict[v].Inc()
			}
		},
	}
}

func (m *metrics) transport() transport.Metrics {
	type pair struct{ sent, recv, failed, dropped prometheus.Counter }
	known := make(map[raftid.StoreID]pair, len(m.n.members))
	for _, p := range m.n.members {
		l := strconv.FormatUint(p.ID, 16)
		known[raftid.StoreID(p.ID)] = pair{m.peerSent.WithLabelValues(l), m.peerRecv.WithLabelValues(l),
			m.peerFailed.WithLabelValues(l), m.peerDrops.WithLabelValues(l)}
	}
	return transport.Metrics{
		Sent:     func(to raftid.StoreID, bytes int) { count(known[to].sent, bytes) },
		Received: func(from raftid.StoreID, bytes int) { count(known[from].recv, bytes) },
		Failed:   func(to raftid.StoreID) { count(known[to].failed, 1) },
		Dropped:  func(to raftid.StoreID, _ transport.Kind) { count(known[to].dropped, 1) },
	}
}

func count(c prometheus.Counter, n int) {
	if c != nil {
		c.Add(float64(n))
	}
}

// registerStore adds what is read from the running parts at each scrape.
func (m *metrics) registerStore() { m.n.registry.MustRegister(&storeCollector{m.n}) }

// storeCollector reads the parts' counters when asked.
type storeCollector struct{ n *Node }

var (
	descKnownPeers  = prometheus.NewDesc("etcd_network_known_peers", "The current number of known peers.", []string{"Local", "Remote"}, nil)
	descActivePeers = prometheus.NewDesc("etcd_network_active_peers", "The current number of peers that are up.", []string{"Local", "Remote"}, nil)
	descRegionIndex = prometheus.NewDesc("braid_region_applied_index", "Applied raft index of a replica.", []string{"region"}, nil)
	descRegionRev   = prometheus.NewDesc("braid_region_revision", "Last revision applied by a replica.", []string{"region"}, nil)
	descRegionWrite = prometheus.NewDesc("braid_region_writes_total", "Revisions applied by a replica.", []string{"region"}, nil)
	descRegionCross = prometheus.NewDesc("braid_region_cross_commits_total", "Revisions applied by a replica that belong to transactions over several regions.", []string{"region"}, nil)
	descLeading     = prometheus.NewDesc("braid_region_leaders", "Regions led by this node.", nil, nil)
	descOverlay     = prometheus.NewDesc("braid_region_overlay_bytes", "Bytes of effects that are proposed and have no revision yet, all regions.", nil, nil)
	descOverlayKeys = prometheus.NewDesc("braid_region_overlay_keys", "Keys with such effects.", nil, nil)
	descEvaluated   = prometheus.NewDesc("braid_region_evaluations_total", "Commands evaluated on this node.", nil, nil)
	descDeferred    = prometheus.NewDesc("braid_region_deferred_total", "Evaluations that had to wait for a revision.", nil, nil)
	descApplied     = prometheus.NewDesc("braid_region_applied_total", "Commands applied on this node.", nil, nil)
	descSeals       = prometheus.NewDesc("braid_region_seals_total", "Entries that only sealed order items.", nil, nil)
	descLag         = prometheus.NewDesc("braid_order_lag_entries", "Entries on this store that wait for their place in the order.", nil, nil)
	descCut         = prometheus.NewDesc("braid_order_cut", "Newest cut that reached this store.", nil, nil)
	descHeld        = prometheus.NewDesc("braid_pd_items_held", "Order items that no region has sealed.", nil, nil)
	descGroups      = prometheus.NewDesc("braid_raftstore_groups", "Raft groups of this store.", []string{"state"}, nil)
	descMessages    = prometheus.NewDesc("braid_raftstore_messages_sent_total", "Raft messages sent to other stores.", nil, nil)
	descSnapshots   = prometheus.NewDesc("braid_raftstore_snapshots_total", "Snapshots by what became of them.", []string{"result"}, nil)
	descSegments    = prometheus.NewDesc("braid_raftstore_wal_segments", "Segments of the log that are in use.", nil, nil)
	descRewritten   = prometheus.NewDesc("braid_raftstore_wal_rewritten_bytes_total", "Bytes of live records moved out of old segments.", nil, nil)
	descEngine      = prometheus.NewDesc("braid_mvcc_engine_bytes", "Sizes of the state engine.", []string{"kind"}, nil)
	descStalls      = prometheus.NewDesc("braid_mvcc_engine_write_stalls_total", "Times the engine stalled writers.", nil, nil)
)

func (c *storeCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descKnownPeers, descActivePeers, descRegionIndex, descRegionRev, descRegionWrite, descRegionCross, descLeading, descOverlay, descOverlayKeys, descEvaluated,
		descDeferred, descApplied, descSeals, descLag, descCut, descHeld, descGroups, descMessages, descSnapshots, descSegments,
		descRewritten, descEngine, descStalls} {
		ch <- d
	}
}

func (c *storeCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
	}
	self := strconv.FormatUint(uint64(c.n.self), 16)
	for _, p := range c.n.members { // etcd counts this member among those it knows
		remote := strconv.FormatUint(p.ID, 16)
		gauge(descKnownPeers, 1, self, remote)
		if remote != self && c.n.net.Alive(raftid.StoreID(p.ID)) {
			gauge(descActivePeers, 1, self, remote)
		}
	}
	var leading, overlay, keys, lag int
	var evaluated, deferred, applied, seals uint64
	for _, h := range c.n.regions.all() {
		id := strconv.FormatUint(uint64(h.id), 10)
		pos, st := h.Applied(), h.Stats()
		gauge(descRegionIndex, float64(pos.Index), id)
		gauge(descRegionRev, float64(pos.Revision), id)
		counter(descRegionWrite, float64(st.Writes), id)
		counter(descRegionCross, float64(st.Crossed), id)
		if h.Leading() {
			leading++
		}
		overlay += st.InflightSize
		keys += st.OverlayKeys
		lag += st.Window
		evaluated += st.Evaluated
		deferred += st.Deferred
		applied += st.Applied
		seals += st.Seals
	}
	gauge(descLeading, float64(leading))
	gauge(descOverlay, float64(overlay))
	gauge(descOverlayKeys, float64(keys))
	gauge(descLag, float64(lag))
	counter(descEvaluated, float64(evaluated))
	counter(descDeferred, float64(deferred))
	counter(descApplied, float64(applied))
	counter(descSeals, float64(seals))
	gauge(descCut, float64(c.n.oracle.Mark().Cut))
	gauge(descHeld, float64(c.n.oracle.Held()))
	s := c.n.store.Stats()
	gauge(descGroups, float64(s.Awake), "awake")
	gauge(descGroups, float64(s.Groups-s.Awake), "asleep")
	counter(descMessages, float64(s.Messages))
	counter(descSnapshots, float64(s.SnapshotsSent), "sent")
	counter(descSnapshots, float64(s.SnapshotsFailed), "failed")
	counter(descSnapshots, float64(s.SnapshotsInstalled), "installed")
	w := c.n.wal.Stats()
	gauge(descSegments, float64(w.Segments))
	counter(descRewritten, float64(w.Rewritten))
	e := c.n.engine.Metrics()
	gauge(descEngine, float64(e.LogicalBytes), "logical")
	gauge(descEngine, float64(e.DiskBytes), "disk")
	gauge(descEngine, float64(e.MemTableBytes), "memtable")
	gauge(descEngine, float64(e.CacheBytes), "cache")
	counter(descStalls, float64(e.WriteStalls))
}

// writesLogged bounds the regions that a stopping node names.
const writesLogged = 64

// logWrites says how the load of this run was spread over the regions: a line for each, those
// written to most first.
func (n *Node) logWrites() {
	all := n.regions.all()
	slices.SortFunc(all, func(a, b *hosted) int {
		return cmp.Or(cmp.Compare(b.Stats().Writes, a.Stats().Writes), cmp.Compare(a.id, b.id))
	})
	for _, h := range all[:min(len(all), writesLogged)] {
		st := h.Stats()
		n.log.Info("writes of a region", zap.Uint64("region", uint64(h.id)),
			zap.Uint64("writes", st.Writes), zap.Uint64("cross-region-commits", st.Crossed))
	}
}
