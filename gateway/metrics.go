package gateway

import (
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/version"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// clientVersionsMax bounds the label values that clients may create by what they send.
const clientVersionsMax = 64

// metrics are those of etcd's names that have a meaning here, so that its dashboards and alerts
// work. They live in the registry of the Config and nowhere else. Where etcd counts what a member
// applies, operations of clients of this gateway are counted, because no member applies everything.
type metrics struct {
	ranges, puts, deletes, txns prometheus.Counter

	sentBytes, receivedBytes      prometheus.Counter
	healthSuccess, healthFailures prometheus.Counter
	slow, failed                  prometheus.Counter // requests that took long, writes whose fate is unknown
	hashes                        prometheus.Histogram
	checks                        *prometheus.GaugeVec
	checksTotal                   *prometheus.CounterVec

	durations map[string][2]prometheus.Observer // by full method; [1] for success
	clients   *prometheus.CounterVec
	known     sync.Map // clientKey -> prometheus.Counter

	mu struct {
		sync.Mutex
		versions int // distinct client versions seen
	}
}

type clientKey struct{ kind, version string }

func newMetrics(cfg *Config, limits *limits) (*metrics, error) {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := &metrics{
		ranges:         counter("etcd_mvcc_range_total", "Total number of ranges of clients of this member."),
		puts:           counter("etcd_mvcc_put_total", "Total number of puts of clients of this member."),
		deletes:        counter("etcd_mvcc_delete_total", "Total number of deletes of clients of this member."),
		txns:           counter("etcd_mvcc_txn_total", "Total number of transactions of more than one operation of clients of this member."),
		sentBytes:      counter("etcd_network_client_grpc_sent_bytes_total", "The total number of bytes sent to grpc clients."),
		receivedBytes:  counter("etcd_network_client_grpc_received_bytes_total", "The total number of bytes received from grpc clients."),
		healthSuccess:  counter("etcd_server_health_success", "The total number of successful health checks"),
		healthFailures: counter("etcd_server_health_failures", "The total number of failed health checks"),
		slow:           counter("etcd_server_slow_apply_total", "The total number of unary requests that took longer than is normal."),
		failed:         counter("etcd_server_proposals_failed_total", "The total number of writes that ended without an answer: no leader, or timed out."),
		hashes: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "etcd_mvcc_hash_rev_duration_seconds", Help: "The time that HashKV took.", Buckets: prometheus.ExponentialBuckets(.01, 2, 15)}),
		checks: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "etcd_server_healthcheck", Help: "The result of each kind of healthcheck."}, []string{"type", "name"}),
		checksTotal: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "etcd_server_healthchecks_total", Help: "The total number of each kind of healthcheck."}, []string{"type", "name", "status"}),
		clients: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "etcd_server_client_requests_total", Help: "The total number of client requests per client version."},
			[]string{"type", "client_api_version"}),
	}
	durations := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "etcd_server_request_duration_seconds", Help: "Response latency distribution in seconds for each type.",
		Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
	}, []string{"type", "success"})
	m.durations = make(map[string][2]prometheus.Observer)
	for method, name := range map[string]string{
		pb.KV_Range_FullMethodName: "Range", pb.KV_Put_FullMethodName: "Put", pb.KV_DeleteRange_FullMethodName: "DeleteRange",
		pb.KV_Txn_FullMethodName: "Txn", pb.KV_Compact_FullMethodName: "Compaction",
	} {
		m.durations[method] = [2]prometheus.Observer{
			durations.WithLabelValues(name, "false"), durations.WithLabelValues(name, "true"),
		}
	}
	err := register(cfg.Registry,
		m.ranges, m.puts, m.deletes, m.txns, m.sentBytes, m.receivedBytes, m.healthSuccess, m.healthFailures,
		m.slow, m.failed, m.hashes, m.checks, m.checksTotal, m.clients, durations, &clusterCollector{cluster: cfg.Cluster}, &watchCollector{hub: cfg.Watches},
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "etcd_server_proposals_pending", Help: "The current number of requests being executed."},
			func() float64 { return float64(limits.requests.Load()) }))
	err = errors.Join(err, register(cfg.Registry, processCollectors()...), register(cfg.Registry, silentCollectors()...))
	if err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	// The node may have registered these for itself.
	for _, c := range []prometheus.Collector{collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})} {
		var already prometheus.AlreadyRegisteredError
		if err := cfg.Registry.Register(c); err != nil && !errors.As(err, &already) {
			return nil, fmt.Errorf("gateway: %w", err)
		}
	}
	return m, nil
}

func register(r *prometheus.Registry, list ...prometheus.Collector) error {
	for _, c := range list {
		if err := r.Register(c); err != nil {
			return err
		}
	}
	return nil
}

func (m *metrics) observe(method string, err error, took time.Duration) {
	o, found := m.durations[method]
	if !found {
		return
	}
	if err == nil {
		o[1].Observe(took.Seconds())
		return
	}
	o[0].Observe(took.Seconds())
	if code := status.Code(err); method != pb.KV_Range_FullMethodName && (code == codes.Unavailable || code == codes.DeadlineExceeded) {
		m.failed.Inc()
	}
}

// countClient counts a request by the API version its client claims.
func (m *metrics) countClient(kind, client string) {
	key := clientKey{kind, client}
	if c, ok := m.known.Load(key); ok {
		c.(prometheus.Counter).Inc()
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.versions >= clientVersionsMax {
		m.clients.WithLabelValues(kind, "other").Inc()
		return
	}
	c := m.clients.WithLabelValues(kind, client)
	if _, raced := m.known.LoadOrStore(key, c); !raced {
		m.mu.versions++
	}
	c.Inc()
}

// countTxn counts what a transaction did, by its response.
func (m *metrics) countTxn(resp *pb.TxnResponse) {
	if n := m.countOps(resp); n > 1 {
		m.txns.Inc()
	}
}

func (m *metrics) countOps(resp *pb.TxnResponse) int {
	n := 0
	for _, op := range resp.Responses {
		n++
		switch o := op.Response.(type) {
		case *pb.ResponseOp_ResponseRange:
			m.ranges.Inc()
		case *pb.ResponseOp_ResponsePut:
			m.puts.Inc()
		case *pb.ResponseOp_ResponseDeleteRange:
			m.deletes.Inc()
		case *pb.ResponseOp_ResponseTxn:
			n += m.countOps(o.ResponseTxn) - 1
		}
	}
	return n
}

// clusterCollector shows what the Cluster says at the moment of the scrape.
type clusterCollector struct {
	cluster Cluster
	changes leaderChanges
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

var (
	descHasLeader = desc("etcd_server_has_leader", "Whether or not a leader exists. 1 is existence, 0 is not.")
	descIsLeader  = desc("etcd_server_is_leader", "Whether or not this member is a leader. 1 if is, 0 otherwise.")
	descIsLearner = desc("etcd_server_is_learner", "Whether or not this member is a learner. 1 if is, 0 otherwise.")
	descChanges   = desc("etcd_server_leader_changes_seen_total", "The number of leader changes seen, of the placement group.")
	descVersion   = desc("etcd_server_version", "Which version is running. 1 for 'server_version' label with current version.", "server_version")
	descGoVersion = desc("etcd_server_go_version", "Which Go version server is running with. 1 for 'server_go_version' label with current version.", "server_go_version")
	descID        = desc("etcd_server_id", "Server or member ID in hexadecimal format. 1 for 'server_id' label with current ID.", "server_id")
	descCluster   = desc("etcd_cluster_version", "Which version is running. 1 for 'cluster_version' label with current cluster version", "cluster_version")
	descQuota     = desc("etcd_server_quota_backend_bytes", "Current backend storage quota size in bytes.")
	descCommitted = desc("etcd_server_proposals_committed_total", "The total number of consensus proposals committed, in the placement group.")
	descApplied   = desc("etcd_server_proposals_applied_total", "The total number of consensus proposals applied, in the placement group.")
	descSize      = desc("etcd_mvcc_db_total_size_in_bytes", "Total size of the data in bytes.")
	descInUse     = desc("etcd_mvcc_db_total_size_in_use_in_bytes", "Total size of the data logically in use in bytes.")
	descRevision  = desc("etcd_debugging_mvcc_current_revision", "The current revision of store.")
	descKeys      = desc("etcd_debugging_mvcc_keys_total", "Total number of keys.")
	descFloor     = desc("etcd_debugging_mvcc_compact_revision", "The revision of the last compaction in store.")
)

func (c *clusterCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descHasLeader, descIsLeader, descIsLearner, descChanges, descVersion, descGoVersion, descID, descCluster, descQuota,
		descCommitted, descApplied, descSize, descInUse, descRevision, descFloor, descKeys,
	} {
		ch <- d
	}
}

func (c *clusterCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	yes := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	leader := c.cluster.Leader()
	gauge(descHasLeader, yes(leader != 0))
	gauge(descIsLeader, yes(leader != 0 && leader == c.cluster.MemberID()))
	gauge(descIsLearner, yes(c.cluster.IsLearner()))
	ch <- prometheus.MustNewConstMetric(descChanges, prometheus.CounterValue, float64(c.changes.see(c.cluster.RaftTerm())))
	gauge(descVersion, 1, version.Version)
	gauge(descGoVersion, 1, runtime.Version())
	gauge(descID, 1, strconv.FormatUint(c.cluster.MemberID(), 16))
	if v := c.cluster.ClusterVersion(); v != "" {
		gauge(descCluster, 1, version.Cluster(v))
	}
	quota := c.cluster.DBSizeQuota()
	if quota == 0 {
		quota = quotaBytesDefault
	}
	gauge(descQuota, float64(quota))
	gauge(descCommitted, float64(c.cluster.RaftIndex()))
	gauge(descApplied, float64(c.cluster.RaftAppliedIndex()))
	total, inUse := c.cluster.DBSize()
	gauge(descSize, float64(total))
	gauge(descInUse, float64(inUse))
	gauge(descRevision, float64(c.cluster.Revision()))
	gauge(descFloor, float64(c.cluster.CompactRevision()))
	gauge(descKeys, float64(c.cluster.Keys()))
}
