package config

import (
	"net/url"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
)

const (
	defaultPeerURL   = "http://localhost:2380"
	defaultClientURL = "http://localhost:2379"

	defaultLogRotation = `{"maxsize": 100, "maxage": 0, "maxbackups": 0, "localtime": false, "compress": false}`

	// electionMsMax is etcd's upper limit of --election-timeout.
	electionMsMax = 50000

	// timerSlackMax bounds --timer-slack: heartbeats, elections and the ends of leases are late by as much.
	timerSlackMax = 10 * time.Millisecond
)

// Reasons shared by several rows.
const (
	whyBolt      = "the state is not kept in a bbolt file"
	whySnapshots = "the log is cut as soon as the state engine has made it durable; there are no snapshot files"
	whyDiscovery = "discovery is not built yet; list the members in --initial-cluster"
	whyTuneDisc  = "it tunes discovery, which is not built yet"
	whyTracing   = "it tunes tracing, which is not built yet"
	whyAuth      = "users and roles are not built yet"
	whyMembers   = "members cannot be added or removed yet, so there is nothing to check"
	whyHashCheck = "replicas are not compared in the background yet"
	whyOldName   = "etcd accepts and ignores this name too"
)

// Table lists every flag, in the order of the help text.
var Table = []Flag{
	// Member.
	{Name: "name", Default: "default", Usage: "Human-readable name for this member.",
		value: text(func(c *Config) *string { return &c.Name })},
	{Name: "data-dir", Usage: "Path to the data directory (default: <name>.braid).",
		value: text(func(c *Config) *string { return &c.DataDir })},
	{Name: "wal-dir", Fate: Later, Why: "a separate directory for the log is not supported yet; it lies in --data-dir",
		Usage: "Path to the dedicated wal directory."},
	{Name: "listen-peer-urls", Kind: List, Default: defaultPeerURL, Usage: "URLs to listen on for peer traffic.",
		value: urls(func(c *Config) *[]url.URL { return &c.ListenPeerURLs }, false)},
	{Name: "listen-client-urls", Kind: List, Default: defaultClientURL, Usage: "URLs to listen on for client traffic, gRPC and HTTP on one port.",
		value: urls(func(c *Config) *[]url.URL { return &c.ListenClientURLs }, false)},
	{Name: "listen-client-http-urls", Kind: List, Usage: "URLs to listen on for HTTP-only client traffic. Enabling this flag removes HTTP from --listen-client-urls.",
		value: urls(func(c *Config) *[]url.URL { return &c.ListenClientHTTPURLs }, true)},
	{Name: "listen-metrics-urls", Kind: List, Usage: "URLs to listen on for the metrics and health endpoints, besides the client URLs.",
		value: urls(func(c *Config) *[]url.URL { return &c.ListenMetricsURLs }, true)},
	{Name: "heartbeat-interval", Kind: Uint, Default: "100", Usage: "Time (in milliseconds) of a heartbeat interval.",
		value: number(func(c *Config) *uint { return &c.HeartbeatMs }, 32)},
	{Name: "election-timeout", Kind: Uint, Default: "1000", Usage: "Time (in milliseconds) for an election to time out.",
		value: number(func(c *Config) *uint { return &c.ElectionMs }, 32)},
	{Name: "initial-election-tick-advance", Kind: Bool, Default: "true", Fate: Inert, Why: "elections of a starting node are not fast-forwarded by ticks here",
		Usage: "Whether to fast-forward initial election ticks on boot."},
	{Name: "max-txn-ops", Kind: Uint, Default: "128", Usage: "Maximum number of operations permitted in a transaction.",
		value: number(func(c *Config) *uint { return &c.MaxTxnOps }, 32)},
	{Name: "max-request-bytes", Kind: Uint, Default: "1572864", Usage: "Maximum client request size in bytes the server will accept.",
		value: number(func(c *Config) *uint { return &c.MaxRequestBytes }, 31)},
	{Name: "max-concurrent-streams", Kind: Uint, Default: "4294967295", Usage: "Maximum concurrent streams that each client can open at a time.",
		value: number(func(c *Config) *uint32 { return &c.MaxConcurrentStreams }, 32)},
	{Name: "grpc-keepalive-min-time", Kind: Duration, Default: "5s", Usage: "Minimum interval that a client should wait before pinging the server.",
		value: interval(func(c *Config) *time.Duration { return &c.GRPCKeepAliveMinTime })},
	{Name: "grpc-keepalive-interval", Kind: Duration, Default: "2h0m0s", Usage: "Interval of server-to-client pings that check whether a connection is alive (0 to disable).",
		value: interval(func(c *Config) *time.Duration { return &c.GRPCKeepAliveInterval })},
	{Name: "grpc-keepalive-timeout", Kind: Duration, Default: "20s", Usage: "Additional wait before closing a non-responsive connection (0 to disable).",
		value: interval(func(c *Config) *time.Duration { return &c.GRPCKeepAliveTimeout })},
	{Name: "socket-reuse-port", Kind: Bool, Default: "false", Usage: "Set SO_REUSEPORT on listeners.",
		value: boolean(func(c *Config) *bool { return &c.SocketOpts.ReusePort })},
	{Name: "socket-reuse-address", Kind: Bool, Default: "false", Usage: "Set SO_REUSEADDR on listeners.",
		value: boolean(func(c *Config) *bool { return &c.SocketOpts.ReuseAddress })},
	{Name: "pre-vote", Kind: Bool, Default: "true", Fate: Inert, Why: "raft's PreVote is always on here",
		Usage: "Enable the raft Pre-Vote algorithm."},

	// Clustering.
	{Name: "initial-advertise-peer-urls", Kind: List, Default: defaultPeerURL, Usage: "This member's peer URLs to advertise to the rest of the cluster.",
		value: urls(func(c *Config) *[]url.URL { return &c.InitialAdvertisePeerURLs }, false)},
	{Name: "advertise-client-urls", Kind: List, Default: defaultClientURL, Usage: "This member's client URLs to advertise to the public.",
		value: urls(func(c *Config) *[]url.URL { return &c.AdvertiseClientURLs }, true)},
	{Name: "initial-cluster", Usage: "Initial cluster, as NAME=URL[,NAME=URL...] (default: this member alone).",
		value: urlsMap(func(c *Config) *types.URLsMap { return &c.InitialCluster })},
	{Name: "initial-cluster-state", Default: ClusterNew, Usage: "Initial cluster state: new or existing. Ignored once the data directory has been initialised.",
		value: oneOf(func(c *Config) *string { return &c.InitialClusterState }, ClusterNew, ClusterExisting)},
	{Name: "initial-cluster-token", Default: "etcd-cluster", Usage: "Token that tells clusters with equal URLs apart.",
		value: text(func(c *Config) *string { return &c.InitialClusterToken })},

	{Name: "feature-gates", Usage: "NAME=BOOL[,NAME=BOOL...] of etcd's feature gates. SetMemberLocalAddr makes peers be dialed from the first advertised peer address that is no loopback; the others have no effect.",
		note: idleGateNote, value: field[map[string]bool]{func(c *Config) *map[string]bool { return &c.FeatureGates }, featureGates, formatGates}},

	// Regions: our own flags.
	{Name: "region-split-keys", Kind: List, Usage: `Keys at which a new store is split into regions: KEY[,KEY...]; 0x... is hexadecimal, \xNN a byte, \, a comma. Ignored by a store that exists.`,
		value: splitKeys(func(c *Config) *[][]byte { return &c.SplitKeys })},
	{Name: "single-group", Kind: Bool, Default: "false", Usage: "Run a new store as one raft group that numbers its own entries. The choice is stored; a later start must agree with it.",
		value: boolean(func(c *Config) *bool { return &c.SingleGroup })},
	{Name: "experimental-committed-order", Kind: Bool, Default: "false", hidden: true,
		Usage: "For tests only: record the committed order as a write-ahead log of etcd's in the data directory, from a store's first start on.",
		value: boolean(func(c *Config) *bool { return &c.CommittedOrder })},

	// Security.
	{Name: "cert-file", Usage: "Path to the client server TLS cert file.",
		value: text(func(c *Config) *string { return &c.ClientTLS.CertFile })},
	{Name: "key-file", Usage: "Path to the client server TLS key file.",
		value: text(func(c *Config) *string { return &c.ClientTLS.KeyFile })},
	{Name: "client-cert-file", Usage: "Path to an explicit client TLS cert file; otherwise the cert file is used where client auth is required.",
		value: text(func(c *Config) *string { return &c.ClientTLS.ClientCertFile })},
	{Name: "client-key-file", Usage: "Path to the key of --client-cert-file.",
		value: text(func(c *Config) *string { return &c.ClientTLS.ClientKeyFile })},
	{Name: "client-cert-auth", Kind: Bool, Default: "false", Usage: "Enable client cert authentication.",
		value: boolean(func(c *Config) *bool { return &c.ClientTLS.ClientCertAuth })},
	{Name: "client-crl-file", Usage: "Path to the client certificate revocation list file.",
		value: text(func(c *Config) *string { return &c.ClientTLS.CRLFile })},
	{Name: "client-cert-allowed-hostname", Kind: List, Usage: "Allowed SAN hostnames for client cert authentication.",
		value: list(func(c *Config) *[]string { return &c.ClientTLS.AllowedHostnames })},
	{Name: "trusted-ca-file", Usage: "Path to the client server TLS trusted CA cert file.",
		value: text(func(c *Config) *string { return &c.ClientTLS.TrustedCAFile })},
	{Name: "auto-tls", Kind: Bool, Default: "false", Usage: "Client TLS using generated certificates.",
		value: boolean(func(c *Config) *bool { return &c.ClientAutoTLS })},
	{Name: "peer-cert-file", Usage: "Path to the peer server TLS cert file.",
		value: text(func(c *Config) *string { return &c.PeerTLS.CertFile })},
	{Name: "peer-key-file", Usage: "Path to the peer server TLS key file.",
		value: text(func(c *Config) *string { return &c.PeerTLS.KeyFile })},
	{Name: "peer-client-cert-file", Usage: "Path to an explicit peer client TLS cert file; otherwise the peer cert file is used.",
		value: text(func(c *Config) *string { return &c.PeerTLS.ClientCertFile })},
	{Name: "peer-client-key-file", Usage: "Path to the key of --peer-client-cert-file.",
		value: text(func(c *Config) *string { return &c.PeerTLS.ClientKeyFile })},
	{Name: "peer-client-cert-auth", Kind: Bool, Default: "false", Usage: "Enable peer client cert authentication.",
		value: boolean(func(c *Config) *bool { return &c.PeerTLS.ClientCertAuth })},
	{Name: "peer-trusted-ca-file", Usage: "Path to the peer server TLS trusted CA file.",
		value: text(func(c *Config) *string { return &c.PeerTLS.TrustedCAFile })},
	{Name: "peer-cert-allowed-cn", Kind: List, Usage: "Allowed CNs for inter-peer TLS authentication.",
		value: list(func(c *Config) *[]string { return &c.PeerTLS.AllowedCNs })},
	{Name: "peer-cert-allowed-hostname", Kind: List, Usage: "Allowed SAN hostnames for inter-peer TLS authentication.",
		value: list(func(c *Config) *[]string { return &c.PeerTLS.AllowedHostnames })},
	{Name: "peer-auto-tls", Kind: Bool, Default: "false", Usage: "Peer TLS using generated certificates.",
		value: boolean(func(c *Config) *bool { return &c.PeerAutoTLS })},
	{Name: "peer-crl-file", Usage: "Path to the peer certificate revocation list file.",
		value: text(func(c *Config) *string { return &c.PeerTLS.CRLFile })},
	{Name: "peer-skip-client-san-verification", Kind: Bool, Default: "false", Usage: "Skip verification of the SAN field in client certificates of peers.",
		value: boolean(func(c *Config) *bool { return &c.PeerTLS.SkipClientSANVerify })},
	{Name: "self-signed-cert-validity", Kind: Uint, Default: "1", Usage: "Validity of generated certificates, in years.",
		value: number(func(c *Config) *uint { return &c.SelfSignedCertValidity }, 16)},
	{Name: "cipher-suites", Kind: List, Usage: "Supported TLS cipher suites, by Go's names (empty: Go chooses).",
		value: list(func(c *Config) *[]string { return &c.CipherSuites })},
	{Name: "tls-min-version", Default: "TLS1.2", Usage: "Minimum TLS version: TLS1.2 or TLS1.3.",
		value: oneOf(func(c *Config) *string { return &c.TLSMinVersion }, "TLS1.2", "TLS1.3")},
	{Name: "tls-max-version", Usage: "Maximum TLS version: TLS1.2 or TLS1.3 (empty: Go chooses).",
		value: oneOf(func(c *Config) *string { return &c.TLSMaxVersion }, "", "TLS1.2", "TLS1.3")},
	{Name: "cors", Kind: List, Default: "*", Usage: "Allowed origins for cross-origin resource sharing (* means all).",
		value: list(func(c *Config) *[]string { return &c.CORS })},
	{Name: "host-whitelist", Kind: List, Default: "*", Usage: "Acceptable host names of HTTP requests if the server is not secure (* means all).",
		value: list(func(c *Config) *[]string { return &c.HostWhitelist })},

	// Logging.
	{Name: "logger", Default: "zap", Usage: "Only zap is supported.",
		value: oneOf(func(c *Config) *string { return &c.Logger }, "zap")},
	{Name: "log-outputs", Kind: List, Default: "default", Usage: "stdout, stderr, systemd/journal, or file paths; default is stderr.",
		value: list(func(c *Config) *[]string { return &c.LogOutputs })},
	{Name: "log-level", Default: "info", Usage: "debug, info, warn, error, panic or fatal.",
		value: oneOf(func(c *Config) *string { return &c.LogLevel }, "debug", "info", "warn", "error", "dpanic", "panic", "fatal")},
	{Name: "log-format", Default: "json", Usage: "json or console.",
		value: oneOf(func(c *Config) *string { return &c.LogFormat }, "json", "console")},
	{Name: "enable-log-rotation", Kind: Bool, Default: "false", Usage: "Enable rotation of a single log-outputs file.",
		value: boolean(func(c *Config) *bool { return &c.EnableLogRotation })},
	{Name: "log-rotation-config-json", Default: defaultLogRotation, Usage: "Settings of the log rotation, as JSON.",
		value: text(func(c *Config) *string { return &c.LogRotationJSON })},

	// Serving.
	{Name: "enable-pprof", Kind: Bool, Default: "false", Usage: `Serve runtime profiles at client URL + "/debug/pprof/".`,
		value: boolean(func(c *Config) *bool { return &c.EnablePprof })},
	{Name: "metrics", Default: "basic", Usage: "Detail of the exported metrics: basic or extensive (adds gRPC latency histograms).",
		value: oneOf(func(c *Config) *string { return &c.Metrics }, "basic", "extensive")},
	{Name: "enable-grpc-gateway", Kind: Bool, Default: "true", Usage: "Serve the JSON mapping of the API below /v3/.",
		value: inverted(func(c *Config) *bool { return &c.DisableJSON })},
	{Name: "warning-unary-request-duration", Kind: Duration, Default: "300ms", Usage: "Time after which a unary request is reported as slow.",
		value: duration(func(c *Config) *time.Duration { return &c.WarnUnaryRequest })},
	{Name: "watch-progress-notify-interval", Kind: Duration, Default: "0s", Usage: "Interval of periodic watch progress notifications; 0 means 10 minutes.",
		value: duration(func(c *Config) *time.Duration { return &c.WatchProgressNotifyInterval })},
	{Name: "auto-compaction-retention", Default: "0", Usage: "History that automatic compaction keeps: a duration (a plain number is hours) or a number of revisions; 0 means none is done.",
		value: text(func(c *Config) *string { return &c.AutoCompactionRetention })},
	{Name: "auto-compaction-mode", Default: "periodic", Usage: "What --auto-compaction-retention counts: periodic or revision.",
		value: text(func(c *Config) *string { return &c.AutoCompactionMode })},
	{Name: "unsafe-no-fsync", Kind: Bool, Default: "false", Usage: "Do not sync the log. Unsafe: a crash of the machine loses data.",
		value: boolean(func(c *Config) *bool { return &c.UnsafeNoFsync })},
	{Name: "timer-slack", Kind: Duration, Default: "1ms", Usage: "How late the kernel may wake threads of this process (Linux), so that wake-ups fall together: less CPU for timers that are this much less exact; at most 10ms, 0 leaves what the process was started with.",
		value: slack(func(c *Config) *time.Duration { return &c.TimerSlack })},

	// Refused until built.
	{Name: "quota-backend-bytes", Kind: Int, Default: "0", also: []string{"-1"}, Fate: Later, Why: "a quota is not built yet; 0 and -1 both mean no limit here",
		Usage: "Limit of the stored bytes."},
	{Name: "auth-token", Default: "simple", Fate: Later, Why: whyAuth, Usage: "Auth token options."},
	{Name: "bcrypt-cost", Kind: Uint, Default: "10", Fate: Later, Why: whyAuth, Usage: "Cost factor of password hashing."},
	{Name: "auth-token-ttl", Kind: Uint, Default: "300", Fate: Later, Why: whyAuth, Usage: "Lifetime of an auth token in seconds."},
	{Name: "force-new-cluster", Kind: Bool, Default: "false", Fate: Later, Why: "recovery from a lost quorum is not built yet",
		Usage: "Force a new one-member cluster."},
	{Name: "discovery-endpoints", Kind: List, Fate: Later, Why: whyDiscovery, Usage: "V3 discovery: endpoints of the discovery service."},
	{Name: "discovery-token", Fate: Later, Why: whyDiscovery, Usage: "V3 discovery: token of the cluster to bootstrap."},
	{Name: "discovery-srv", Fate: Later, Why: whyDiscovery, Usage: "DNS domain used to bootstrap the initial cluster."},
	{Name: "discovery-srv-name", Fate: Later, Why: whyDiscovery, Usage: "Service name to query when using DNS discovery."},
	{Name: "enable-distributed-tracing", Kind: Bool, Default: "false", Fate: Later, Why: "tracing is not built yet", Usage: "Enable tracing with OpenTelemetry."},

	// Accepted without effect.
	{Name: "warning-apply-duration", Kind: Duration, Default: "100ms", Fate: Inert, Why: "applying is not timed per request; see the metrics",
		Usage: "Time after which an apply is reported as slow."},
	{Name: "strict-reconfig-check", Kind: Bool, Default: "true", Fate: Inert, Why: whyMembers, Usage: "Reject reconfigurations that would lose quorum."},
	{Name: "max-learners", Kind: Int, Default: "1", Fate: Inert, Why: whyMembers, Usage: "Maximum number of learners."},
	{Name: "snapshot-count", Kind: Uint, Default: "10000", Fate: Inert, Why: whySnapshots, Usage: "Committed transactions that trigger a snapshot."},
	{Name: "snapshot-catchup-entries", Kind: Uint, Default: "5000", Fate: Inert, Why: whySnapshots, Usage: "Entries kept for a slow follower."},
	{Name: "max-snapshots", Kind: Uint, Default: "5", Fate: Inert, Why: whySnapshots, note: deprecated("--max-snapshots is deprecated in 3.6 and will be decommissioned in 3.8."), Usage: "Snapshot files to retain."},
	{Name: "max-wals", Kind: Uint, Default: "5", Fate: Inert, Why: "segments of the log are recycled, not retained", Usage: "Wal files to retain."},
	{Name: "backend-bbolt-freelist-type", Fate: Inert, Why: whyBolt, Usage: "Freelist type of bbolt."},
	{Name: "backend-batch-interval", Kind: Duration, Default: "0s", Fate: Inert, Why: whyBolt, Usage: "Time before a backend commit."},
	{Name: "backend-batch-limit", Kind: Int, Default: "0", Fate: Inert, Why: whyBolt, Usage: "Operations before a backend commit."},
	{Name: "bootstrap-defrag-threshold-megabytes", Kind: Uint, Default: "0", Fate: Inert, Why: whyBolt, Usage: "Defragment at start."},
	{Name: "memory-mlock", Kind: Bool, Default: "false", Fate: Inert, Why: whyBolt, Usage: "Keep the database in RAM."},
	{Name: "compaction-batch-limit", Kind: Int, Default: "0", Fate: Inert, Why: "removal of compacted versions is paced by itself", Usage: "Revisions deleted per compaction batch."},
	{Name: "compaction-sleep-interval", Kind: Duration, Default: "0s", Fate: Inert, Why: "removal of compacted versions is paced by itself", Usage: "Pause between compaction batches."},
	{Name: "corrupt-check-time", Kind: Duration, Default: "0s", Fate: Inert, Why: whyHashCheck, Usage: "Interval of corruption checks."},
	{Name: "compact-hash-check-time", Kind: Duration, Default: "1m0s", Fate: Inert, Why: whyHashCheck, Usage: "Interval of compaction hash checks."},
	{Name: "downgrade-check-time", Kind: Duration, Default: "5s", Fate: Inert, Why: "there is no older version to go back to", Usage: "Interval of downgrade checks."},
	{Name: "raft-read-timeout", Kind: Duration, Default: "5s", Fate: Inert, Why: "peers talk over gRPC streams with their own keepalive", Usage: "Read timeout of peer connections."},
	{Name: "raft-write-timeout", Kind: Duration, Default: "5s", Fate: Inert, Why: "peers talk over gRPC streams with their own keepalive", Usage: "Write timeout of peer connections."},
	{Name: "v2-deprecation", Default: "write-only-drop-data", Fate: Inert, choices: []string{"write-only", "write-only-skip-check", "write-only-drop-data", "gone"}, Why: "there is no v2 store",
		note: deprecated("--v2-deprecation is deprecated and scheduled for removal in v3.8. The default value is enforced, ignoring user input."), Usage: "Stage of the v2 store's removal."},
	{Name: "discovery-fallback", Default: "exit", Fate: Inert, choices: []string{"exit", "proxy"}, Why: whyTuneDisc, Usage: "exit or proxy."},
	{Name: "discovery-dial-timeout", Kind: Duration, Default: "2s", Fate: Inert, Why: whyTuneDisc, Usage: "V3 discovery: dial timeout."},
	{Name: "discovery-request-timeout", Kind: Duration, Default: "5s", Fate: Inert, Why: whyTuneDisc, Usage: "V3 discovery: request timeout."},
	{Name: "discovery-keepalive-time", Kind: Duration, Default: "2s", Fate: Inert, Why: whyTuneDisc, Usage: "V3 discovery: keepalive time."},
	{Name: "discovery-keepalive-timeout", Kind: Duration, Default: "6s", Fate: Inert, Why: whyTuneDisc, Usage: "V3 discovery: keepalive timeout."},
	{Name: "discovery-insecure-transport", Kind: Bool, Default: "true", Fate: Inert, Why: whyTuneDisc, Usage: "V3 discovery: no transport security."},
	{Name: "discovery-insecure-skip-tls-verify", Kind: Bool, Default: "false", Fate: Inert, Why: whyTuneDisc, Usage: "V3 discovery: skip certificate verification."},
	{Name: "discovery-cert", Fate: Inert, Why: whyTuneDisc, Usage: "V3 discovery: client cert."},
	{Name: "discovery-key", Fate: Inert, Why: whyTuneDisc, Usage: "V3 discovery: client key."},
	{Name: "discovery-cacert", Fate: Inert, Why: whyTuneDisc, Usage: "V3 discovery: CA bundle."},
	{Name: "discovery-user", Fate: Inert, Why: whyTuneDisc, Usage: "V3 discovery: user."},
	{Name: "discovery-password", Fate: Inert, Why: whyTuneDisc, Usage: "V3 discovery: password."},
	{Name: "distributed-tracing-address", Default: "localhost:4317", Fate: Inert, Why: whyTracing, Usage: "Address of the collector."},
	{Name: "distributed-tracing-service-name", Default: "etcd", Fate: Inert, Why: whyTracing, Usage: "Service name in traces."},
	{Name: "distributed-tracing-instance-id", Fate: Inert, Why: whyTracing, Usage: "Instance id in traces."},
	{Name: "distributed-tracing-sampling-rate", Kind: Int, Default: "0", Fate: Inert, Why: whyTracing, Usage: "Samples per million spans."},

	// Names that etcd itself accepts and ignores.
	{Name: "cluster-active-size", Fate: Inert, Why: whyOldName},
	{Name: "cluster-remove-delay", Fate: Inert, Why: whyOldName},
	{Name: "cluster-sync-interval", Fate: Inert, Why: whyOldName},
	{Name: "config", Fate: Inert, Why: whyOldName},
	{Name: "force", Fate: Inert, Why: whyOldName},
	{Name: "max-result-buffer", Fate: Inert, Why: whyOldName},
	{Name: "max-retry-attempts", Fate: Inert, Why: whyOldName},
	{Name: "peer-heartbeat-interval", Fate: Inert, Why: whyOldName},
	{Name: "peer-election-timeout", Fate: Inert, Why: whyOldName},
	{Name: "retry-interval", Fate: Inert, Why: whyOldName},
	{Name: "snapshot", Fate: Inert, Why: whyOldName},
	{Name: "v", Fate: Inert, Why: whyOldName},
	{Name: "vv", Fate: Inert, Why: whyOldName},
	{Name: "test.coverprofile", Fate: Inert, Why: whyOldName},
	{Name: "test.outputdir", Fate: Inert, Why: whyOldName},

	// Handled by Parse itself.
	{Name: "config-file", Usage: "Path to a YAML file with flag names as keys. When given, other flags and environment variables are ignored."},
	{Name: "version", Kind: Bool, Default: "false", Usage: "Print the version and exit."},
}

// byName finds a row of the table.
var byName = func() map[string]*Flag {
	m := make(map[string]*Flag, len(Table))
	for i := range Table {
		m[Table[i].Name] = &Table[i]
	}
	return m
}()

// Lookup returns the flag of that name, nil when there is none.
func Lookup(name string) *Flag { return byName[name] }

// tableDefaults applies the default of every row to an empty Config.
func tableDefaults() *Config {
	c := &Config{}
	for i := range Table {
		f := &Table[i]
		if f.value == nil || f.Default == "" {
			continue
		}
		if err := f.value.set(c, f.Default); err != nil {
			panic("config: bad default of --" + f.Name + ": " + err.Error()) // a test walks the table
		}
	}
	return c
}
