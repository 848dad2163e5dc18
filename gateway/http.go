package gateway

import (
	"context"
	"encoding/json"
	"expvar"
	"fmt"
	"io"
	"log"
	"math"
	"net"
	"net/http"
	"net/http/pprof"
	"strconv"
	"strings"
	"time"

	gw "github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	pbgw "go.etcd.io/etcd/api/v3/etcdserverpb/gw"
	"go.etcd.io/etcd/api/v3/version"
	electiongw "go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb/gw"
	lockgw "go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb/gw"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
)

// buildHTTP builds what answers to HTTP on the client port: health, version, metrics and the JSON
// form of the API.
func (s *Server) buildHTTP() error {
	mux := http.NewServeMux()
	s.handlePages(mux)
	mux.HandleFunc("/version", s.serveVersion)
	mux.HandleFunc("/debug/vars", s.serveVars)
	if s.cfg.Pprof {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	if !s.cfg.DisableJSON {
		if err := s.handleJSON(mux); err != nil {
			return err
		}
	}
	s.http = &http.Server{
		Handler:           s.access(mux),
		ReadHeaderTimeout: 5 * time.Minute,
		ErrorLog:          log.New(io.Discard, "", 0), // what clients do wrong is not our news
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: int(min(s.cfg.MaxConcurrentStreams, math.MaxInt32))},
	}
	return nil
}

func (s *Server) handlePages(mux *http.ServeMux) {
	mux.HandleFunc("/health", s.serveHealth)
	s.handleChecks(mux, "livez", s.livez())
	s.handleChecks(mux, "readyz", s.readyz())
	mux.Handle("/metrics", promhttp.InstrumentMetricHandler(s.cfg.Registry, promhttp.HandlerFor(s.cfg.Registry, promhttp.HandlerOpts{})))
}

// MetricsHandler answers /metrics and the health pages only, for listeners of their own.
func (s *Server) MetricsHandler() http.Handler {
	mux := http.NewServeMux()
	s.handlePages(mux)
	return mux
}

func (s *Server) serveVersion(w http.ResponseWriter, r *http.Request) {
	if !onlyGet(w, r) {
		return
	}
	v := version.Versions{Server: version.Version, Cluster: s.cfg.Cluster.ClusterVersion(), Storage: s.cfg.Cluster.StorageVersion()}
	if v.Cluster == "" {
		v.Cluster = "not_decided"
	}
	if v.Storage == "" {
		v.Storage = "unknown"
	}
	body, err := json.Marshal(&v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(body)
}

// serveVars is etcd's page of what the process publishes through expvar, with the raft status that
// etcd publishes there. Nothing is registered process-wide.
func (s *Server) serveVars(w http.ResponseWriter, r *http.Request) {
	if !onlyGet(w, r) {
		return
	}
	c := s.cfg.Cluster
	raft, err := json.Marshal(map[string]any{
		"id": strconv.FormatUint(c.MemberID(), 16), "lead": strconv.FormatUint(c.Leader(), 16),
		"term": c.RaftTerm(), "commit": c.RaftIndex(), "applied": c.RaftAppliedIndex(),
	})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	fmt.Fprintf(w, "{\n%q: %s", "raft.status", raft)
	expvar.Do(func(kv expvar.KeyValue) { fmt.Fprintf(w, ",\n%q: %s", kv.Key, kv.Value) })
	fmt.Fprint(w, "\n}\n")
}

// handleJSON installs etcd's JSON mapping. Its requests go to the gRPC server through a pipe, so
// that they pass the same limits, checks and metrics.
func (s *Server) handleJSON(mux *http.ServeMux) error {
	conn, err := grpc.NewClient("passthrough:///gateway",
		grpc.WithContextDialer(s.dialPipe),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.MaxCallSendMsgSize(math.MaxInt32)),
	)
	if err != nil {
		return fmt.Errorf("gateway: %w", err)
	}
	s.json = conn
	routes := gw.NewServeMux(gw.WithMarshalerOption(gw.MIMEWildcard, &gw.HTTPBodyMarshaler{
		Marshaler: &gw.JSONPb{
			MarshalOptions:   protojson.MarshalOptions{UseProtoNames: true},
			UnmarshalOptions: protojson.UnmarshalOptions{DiscardUnknown: true},
		},
	}))
	for _, register := range []func(context.Context, *gw.ServeMux, *grpc.ClientConn) error{
		pbgw.RegisterKVHandler, pbgw.RegisterWatchHandler, pbgw.RegisterLeaseHandler,
		pbgw.RegisterClusterHandler, pbgw.RegisterMaintenanceHandler, pbgw.RegisterAuthHandler,
		lockgw.RegisterLockHandler, electiongw.RegisterElectionHandler,
	} {
		if err := register(context.Background(), routes, conn); err != nil {
			return fmt.Errorf("gateway: %w", err)
		}
	}
	mux.Handle("/v3/", routes)
	return nil
}

// dialPipe connects to the gRPC server of this process.
func (s *Server) dialPipe(ctx context.Context, _ string) (net.Conn, error) {
	client, server := net.Pipe()
	if !s.grpcConns.deliver(server) {
		client.Close()
		server.Close()
		return nil, net.ErrClosed
	}
	return client, nil
}

// access is what every HTTP request passes first: gRPC that came over a connection whose client
// also speaks HTTP/1.1, the old prefix of the JSON paths, the host names that plain HTTP accepts,
// and the headers that let browsers in.
func (s *Server) access(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
			s.grpc.ServeHTTP(w, r)
			return
		}
		if rest, ok := strings.CutPrefix(r.URL.Path, "/v3beta/"); ok {
			r.URL.Path = "/v3/" + rest
		}
		if r.TLS == nil {
			if host := hostOf(r.Host); !anyOf(s.cfg.HostWhitelist, host) {
				// Otherwise a web page could reach a server inside by rebinding its own name.
				http.Error(w, fmt.Sprintf("the host %q is not among the accepted ones (see --host-whitelist)", host), http.StatusMisdirectedRequest)
				return
			}
		}
		if origin := r.Header.Get("Origin"); anyOf(s.cfg.CORS, "*") {
			allowOrigin(w, "*")
		} else if anyOf(s.cfg.CORS, origin) {
			allowOrigin(w, origin)
		}
		if r.Method == http.MethodOptions {
			w.WriteHeader(http.StatusOK)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func allowOrigin(w http.ResponseWriter, origin string) {
	w.Header().Add("Access-Control-Allow-Methods", "POST, GET, OPTIONS, PUT, DELETE")
	w.Header().Add("Access-Control-Allow-Origin", origin)
	w.Header().Add("Access-Control-Allow-Headers", "accept, content-type, authorization")
}

func hostOf(hostport string) string {
	if host, _, err := net.SplitHostPort(hostport); err == nil {
		return host
	}
	return hostport
}
