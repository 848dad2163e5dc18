// Package gateway speaks etcd's v3 API to clients: its gRPC services, its JSON mapping, its health
// pages and its metrics, on one port as etcd does.
//
// It is the edge and nothing else. It checks what can be checked without data, measures and limits,
// fills in headers and gives every error etcd's code and text; what a request does is decided by
// the KV it is given (the router), and what the cluster looks like by the Cluster it is given (the
// node). It holds no data and knows nothing of regions.
//
// Its life: New builds the services; Serve runs them on a listener, as often as there are
// listeners; Stop ends everything that Serve started and waits for it. Requests run on gRPC's own
// goroutines. The only state that changes is in the limits and the metrics, both of atomic
// counters.
//
// Auth is registered and answers Unimplemented, but for Authenticate: it is off.
package gateway

import (
	"context"
	"errors"
	"math"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"braid/router"
	"braid/watchsvc"
)

// KV executes requests that have passed the static checks. *router.Router is one. Responses carry
// headers with nothing but the revision.
type KV interface {
	Range(ctx context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error)
	RangeStream(ctx context.Context, req *pb.RangeRequest, send func(*pb.RangeResponse) error) error
	Put(ctx context.Context, req *pb.PutRequest) (*pb.PutResponse, error)
	DeleteRange(ctx context.Context, req *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error)
	Txn(ctx context.Context, req *pb.TxnRequest) (*pb.TxnResponse, error)
	Compact(ctx context.Context, req *pb.CompactionRequest) (*pb.CompactionResponse, error)
	HashKV(ctx context.Context, rev int64) (router.KVHash, error)
	Export(ctx context.Context, to router.Export) error
}

// Cluster is what the gateway needs to know of the node and its cluster. Only Members may take
// time; the others answer from memory, from any goroutine. Where etcd means its one raft group,
// the placement group is meant here, as this node knows it.
type Cluster interface {
	ClusterID() uint64
	MemberID() uint64
	// Members lists the members; linearizable asks for a confirmed list.
	Members(ctx context.Context, linearizable bool) ([]*pb.Member, error)
	// Leader is the member that leads the placement group, 0 when unknown.
	Leader() uint64
	RaftTerm() uint64
	RaftIndex() uint64
	RaftAppliedIndex() uint64
	// Revision is the newest revision this node knows, CompactRevision the compaction floor.
	Revision() int64
	CompactRevision() int64
	// DBSize is the size of the data in bytes, logical ones, and how much of it is in use.
	DBSize() (total, inUse int64)
	// Keys is the number of keys of the replicas on this node.
	Keys() int64
	// DBSizeQuota is the limit of the total; 0 means etcd's default.
	DBSizeQuota() int64
	// Alarms lists the raised alarms.
	Alarms() []*pb.AlarmMember
	IsLearner() bool
	// ClusterVersion and StorageVersion look like "3.7.0"; empty while not decided.
	ClusterVersion() string
	StorageVersion() string
}

// Config is what New needs; of the limits zero means the default.
type Config struct {
	KV      KV
	Cluster Cluster
	Leases  Leases        // nil: there are no Lease, Lock and Election services
	Watches *watchsvc.Hub // nil: Watch answers Unimplemented
	Logger  *zap.Logger   // nil: none

	// Registry receives the metrics and is what /metrics shows. Nil: a new one.
	Registry *prometheus.Registry
	// ExtensiveMetrics adds histograms of the handling time of every gRPC method.
	ExtensiveMetrics bool

	MaxRequestBytes      int    // of a write as etcd would propose it; default 1.5 MiB
	MaxTxnOps            int    // default 128
	MaxConcurrentStreams uint32 // per connection; default no limit
	// MaxInFlight and MaxInFlightBytes bound the requests being executed and the bytes of the
	// writes among them. Beyond, requests are refused with "too many requests". Defaults 20,000
	// and 256 MiB.
	MaxInFlight      int
	MaxInFlightBytes int64
	// RequestTimeout is the router's; health checks use it. Default 7 s.
	RequestTimeout time.Duration
	// WarnDuration is how long a unary request may take before it is logged. Default 300 ms.
	WarnDuration time.Duration

	// ProgressNotifyInterval is how often a watcher that asked for it is told how far it is;
	// default 10 minutes, at least 100 ms. ElectionTimeout is the cluster's: a stream that
	// requires a leader ends after three without one. Default 1 s.
	ProgressNotifyInterval time.Duration
	ElectionTimeout        time.Duration

	// SnapshotDir is where snapshots are made, in folders that are removed afterwards; the system's
	// temporary directory by default. SnapshotSpace says how many bytes are free there; nil: enough.
	SnapshotDir   string
	SnapshotSpace func() (uint64, error)

	// ServerOptions are added to gRPC's, for keepalive parameters say.
	ServerOptions []grpc.ServerOption
	// Register adds further services to the client port. May be nil.
	Register func(grpc.ServiceRegistrar)

	DisableJSON bool // no /v3/ paths
	Pprof       bool // /debug/pprof/
	// HostWhitelist are the Host names that plain HTTP accepts; empty, or holding "*": any.
	HostWhitelist []string
	// CORS are the accepted origins; empty, or holding "*": any.
	CORS []string
}

func (c *Config) fill() error {
	if c.KV == nil || c.Cluster == nil {
		return errors.New("gateway: Config.KV and Config.Cluster are required")
	}
	if c.Logger == nil {
		c.Logger = zap.NewNop()
	}
	if c.Registry == nil {
		c.Registry = prometheus.NewRegistry()
	}
	if c.MaxRequestBytes <= 0 {
		c.MaxRequestBytes = 1536 << 10
	}
	if c.MaxTxnOps <= 0 {
		c.MaxTxnOps = 128
	}
	if c.MaxConcurrentStreams == 0 {
		c.MaxConcurrentStreams = math.MaxUint32
	}
	if c.MaxInFlight <= 0 {
		c.MaxInFlight = 20_000
	}
	if c.MaxInFlightBytes <= 0 {
		c.MaxInFlightBytes = 256 << 20
	}
	if c.RequestTimeout <= 0 {
		c.RequestTimeout = 7 * time.Second
	}
	if c.WarnDuration <= 0 {
		c.WarnDuration = 300 * time.Millisecond
	}
	if c.SnapshotDir == "" {
		c.SnapshotDir = os.TempDir()
	}
	if c.ProgressNotifyInterval <= 0 {
		c.ProgressNotifyInterval = progressIntervalDefault
	}
	c.ProgressNotifyInterval = max(c.ProgressNotifyInterval, progressIntervalMin)
	if c.ElectionTimeout <= 0 {
		c.ElectionTimeout = time.Second
	}
	return nil
}

// grpcOverheadBytes is what a message may be larger than the request limit, as in etcd.
const grpcOverheadBytes = 512 << 10

// streamWorkers are goroutines kept for requests: a new one for each request would grow its stack
// again each time. More requests than that at one time get goroutines of their own.
const streamWorkers = 1024

// Windows for what clients send. They are fixed, because gRPC finds the size of a window that grows by
// pings: nearly one for each request of a connection with few requests at a time, two more system
// calls on either side. A request of the greatest size needs two round trips; a connection cannot have
// us hold more than its window of what has not been read yet.
const (
	streamWindowBytes = 1 << 20
	connWindowBytes   = 4 << 20
)

// Server is the gateway of one node.
type Server struct {
	cfg     Config
	header  header
	limits  limits
	metrics *metrics

	grpc       *grpc.Server
	grpcConns  *connListener // connections that speak gRPC
	health     *health.Server
	http       *http.Server
	httpConns  *connListener // connections that speak HTTP
	json       *grpc.ClientConn
	locks      *clientv3.Client // of the Lock and Election services
	serving    sync.WaitGroup   // the two servers above, and who looks for a leader
	stopping   chan struct{}    // closed when Stop begins: watches end
	receivers  sync.WaitGroup   // of watch streams
	leaderless leaderless
	snapshots  chan struct{} // one place for each that is being made or sent

	mu struct {
		sync.Mutex
		stopped   bool
		listeners map[net.Listener]struct{}
		sniffing  map[net.Conn]struct{}
	}
	accepting sync.WaitGroup // Serve calls and the connections being looked at; grows under mu
}

// New builds a gateway. It accepts nothing yet; Stop must be called in the end.
func New(cfg Config) (*Server, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	s := &Server{
		cfg:       cfg,
		header:    header{cluster: cfg.Cluster},
		limits:    limits{requestsMax: int64(cfg.MaxInFlight), bytesMax: cfg.MaxInFlightBytes},
		grpcConns: newConnListener(),
		httpConns: newConnListener(),
		stopping:  make(chan struct{}),
		snapshots: make(chan struct{}, snapshotsMax),
	}
	s.mu.listeners = make(map[net.Listener]struct{})
	s.mu.sniffing = make(map[net.Conn]struct{})
	var err error
	if s.metrics, err = newMetrics(&cfg, &s.limits); err != nil {
		return nil, err
	}
	if err := s.buildGRPC(); err != nil {
		return nil, err
	}
	if err := s.buildHTTP(); err != nil {
		return nil, err
	}
	s.serving.Go(func() { s.serveOn("grpc", s.grpc.Serve(s.grpcConns)) })
	s.serving.Go(func() { s.serveOn("http", s.http.Serve(s.httpConns)) })
	s.serving.Go(s.watchLeader)
	return s, nil
}

func (s *Server) buildGRPC() error {
	var popts []grpcprom.ServerMetricsOption
	if s.cfg.ExtensiveMetrics {
		popts = append(popts, grpcprom.WithServerHandlingTimeHistogram())
	}
	prom := grpcprom.NewServerMetrics(popts...)
	s.cfg.Registry.MustRegister(prom)

	opts := []grpc.ServerOption{
		grpc.Creds(connCredentials{}),
		grpc.ForceServerCodecV2(newCountingCodec(s.metrics)),
		grpc.MaxRecvMsgSize(s.cfg.MaxRequestBytes + grpcOverheadBytes),
		grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.MaxConcurrentStreams(s.cfg.MaxConcurrentStreams),
		grpc.ChainUnaryInterceptor(prom.UnaryServerInterceptor(), s.unary),
		grpc.ChainStreamInterceptor(prom.StreamServerInterceptor(), s.stream),
		grpc.UnknownServiceHandler(unknownService),
		grpc.NumStreamWorkers(streamWorkers),
		grpc.StaticStreamWindowSize(streamWindowBytes),
		grpc.StaticConnWindowSize(connWindowBytes),
	}
	s.grpc = grpc.NewServer(append(opts, s.cfg.ServerOptions...)...)

	pb.RegisterKVServer(s.grpc, &kvServer{s: s})
	pb.RegisterMaintenanceServer(s.grpc, &maintenanceServer{s: s})
	pb.RegisterClusterServer(s.grpc, &clusterServer{s: s})
	pb.RegisterWatchServer(s.grpc, &watchServer{s: s})
	if s.cfg.Leases != nil {
		pb.RegisterLeaseServer(s.grpc, &leaseServer{s: s})
		if err := s.registerLocks(s.grpc); err != nil {
			return err
		}
	}
	pb.RegisterAuthServer(s.grpc, authServer{s: s})
	s.health = health.NewServer()
	healthpb.RegisterHealthServer(s.grpc, s.health)
	if s.cfg.Register != nil {
		s.cfg.Register(s.grpc)
	}
	prom.InitializeMetrics(s.grpc)
	return nil
}

// serveOn reports the end of one of the two servers, which is expected only after Stop.
func (s *Server) serveOn(what string, err error) {
	if err == nil || errors.Is(err, http.ErrServerClosed) || errors.Is(err, grpc.ErrServerStopped) || errors.Is(err, net.ErrClosed) {
		return
	}
	s.cfg.Logger.Error("client server ended", zap.String("server", what), zap.Error(err))
}

// Stop ends serving: no new connections, then a wait for requests in progress until ctx ends, then
// an end to whatever is left. It returns when everything the gateway started has ended, and may be
// called more than once.
func (s *Server) Stop(ctx context.Context) {
	s.health.Shutdown()
	s.mu.Lock()
	first := !s.mu.stopped
	s.mu.stopped = true
	for l := range s.mu.listeners {
		l.Close()
	}
	for c := range s.mu.sniffing {
		c.Close()
	}
	s.mu.Unlock()
	s.accepting.Wait()
	if !first {
		s.serving.Wait()
		s.receivers.Wait()
		return
	}
	// A watch has no end of its own to wait for; its client goes on elsewhere. So does who waits for
	// a lock.
	close(s.stopping)
	if s.locks != nil {
		s.locks.Close()
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.http.Shutdown(ctx); err != nil {
			s.http.Close()
		}
	})
	// The JSON gateway's own connection would keep the graceful stop waiting while HTTP
	// requests that use it are being finished, so it goes after them.
	wg.Wait()
	if s.json != nil {
		s.json.Close()
	}
	ended := make(chan struct{})
	wg.Go(func() {
		s.grpc.GracefulStop()
		close(ended)
	})
	select {
	case <-ended:
	case <-ctx.Done():
		s.grpc.Stop()
	}
	wg.Wait()
	s.serving.Wait()
	s.receivers.Wait()
}
