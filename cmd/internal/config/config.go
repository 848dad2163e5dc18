// Package config turns etcd's command line, environment and YAML file into one flat Config that
// the node is assembled from.
//
// Every flag of etcd 3.7.3 and every flag of our own is one row of the table in table.go, with its
// type, default, usage and fate: implemented, inert (accepted with a warning, it has no meaning
// here) or later (refused until it is built, because ignoring it would break a promise). Parsing,
// the environment, the file, the help text and the dump at start all walk that table, so a flag
// cannot exist in one of them only.
//
// Life: Parse reads the sources, Fill completes the zero values, Validate reports everything that
// is wrong, Prepare creates self-signed certificates and fixes the TLS settings; after that the
// Config is read-only and may be shared. The package starts nothing and opens no socket.
package config

import (
	"fmt"
	"net"
	"net/url"
	"reflect"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/zap"

	"braid/cmd/internal/autocompact"
)

// States of --initial-cluster-state.
const (
	ClusterNew      = "new"
	ClusterExisting = "existing"
)

// Config is everything a node is started with. A zero number, string or list means its default,
// which Fill sets; every boolean is false by default. Nobody changes a Config after Prepare.
type Config struct {
	// Member.
	Name                 string
	DataDir              string // "" is <Name>.braid in the working directory
	ListenPeerURLs       []url.URL
	ListenClientURLs     []url.URL
	ListenClientHTTPURLs []url.URL // empty: HTTP on ListenClientURLs, which otherwise speak gRPC only
	ListenMetricsURLs    []url.URL // empty: metrics and health only on the client URLs
	HeartbeatMs          uint
	ElectionMs           uint
	MaxTxnOps            uint // per branch of a transaction
	MaxRequestBytes      uint // of one marshalled request
	MaxConcurrentStreams uint32
	SocketOpts           transport.SocketOpts

	// gRPC keepalive on the client URLs; 0 is the default, a negative interval or timeout
	// (written as 0 on the command line) switches it off.
	GRPCKeepAliveMinTime  time.Duration
	GRPCKeepAliveInterval time.Duration
	GRPCKeepAliveTimeout  time.Duration

	// Cluster.
	InitialAdvertisePeerURLs []url.URL
	AdvertiseClientURLs      []url.URL
	InitialCluster           types.URLsMap // nil: this member alone
	InitialClusterToken      string
	InitialClusterState      string
	FeatureGates             map[string]bool // those that were set; see PeerLocalAddr

	// Regions.
	SplitKeys   [][]byte // strictly ascending; used by the first start of a new store only
	SingleGroup bool
	// CommittedOrder records the committed order for checkers (orderlog); for tests.
	CommittedOrder bool

	// TLS.
	ClientTLS              transport.TLSInfo
	PeerTLS                transport.TLSInfo
	ClientAutoTLS          bool
	PeerAutoTLS            bool
	SelfSignedCertValidity uint // years
	CipherSuites           []string
	TLSMinVersion          string
	TLSMaxVersion          string

	// Logging.
	Logger            string
	LogLevel          string
	LogFormat         string
	LogOutputs        []string
	EnableLogRotation bool
	LogRotationJSON   string

	// Serving.
	EnablePprof bool
	Metrics     string // "basic" or "extensive"
	DisableJSON bool   // no JSON mapping below /v3/
	// HostWhitelist and CORS restrict plain HTTP; a list that holds "*" restricts nothing.
	HostWhitelist []string
	CORS          []string
	// WarnUnaryRequest is how long a unary request may take before it is logged.
	WarnUnaryRequest time.Duration

	// WatchProgressNotifyInterval is how often watchers that ask for it are told how far they are;
	// 0 is etcd's default.
	WatchProgressNotifyInterval time.Duration
	// AutoCompactionMode and AutoCompactionRetention are the flags as given; AutoCompaction reads them.
	AutoCompactionMode      string
	AutoCompactionRetention string

	// UnsafeNoFsync skips every sync of the log: for tests on slow disks; a crash of the machine
	// may lose acknowledged writes.
	UnsafeNoFsync bool
	// TimerSlack is how late the kernel may wake this process's threads; not positive: as inherited.
	TimerSlack time.Duration

	log *zap.Logger // set by Prepare

	// Inert holds the flags that were given but mean nothing here, by name.
	Inert map[string]string
}

// Default returns the configuration of a single node without any flag.
func Default() *Config {
	c := &Config{}
	c.Fill()
	return c
}

// Fill sets what is zero to its default. AdvertiseClientURLs is filled in only when
// ListenClientURLs was zero too: listening elsewhere without saying what to advertise is an error
// that Validate reports, as in etcd.
func (c *Config) Fill() {
	listenGiven := len(c.ListenClientURLs) > 0
	d := tableDefaults()
	cv, dv := reflect.ValueOf(c).Elem(), reflect.ValueOf(d).Elem()
	for i := range cv.NumField() {
		f := cv.Field(i)
		if !f.CanSet() || f.Kind() == reflect.Bool || f.Kind() == reflect.Struct || !f.IsZero() {
			continue
		}
		if listenGiven && cv.Type().Field(i).Name == "AdvertiseClientURLs" {
			continue
		}
		f.Set(dv.Field(i))
	}
	c.adoptDefaultHost()
	if c.DataDir == "" {
		c.DataDir = c.Name + ".braid"
	}
	if c.InitialCluster == nil {
		c.InitialCluster = types.URLsMap{c.Name: append(types.URLs(nil), c.InitialAdvertisePeerURLs...)}
	}
}

// adoptDefaultHost replaces an advertised "localhost" by the machine's own address when the node
// listens on every address, as etcd does: other nodes could not reach it otherwise.
func (c *Config) adoptDefaultHost() {
	adopt := func(advertise, listen []url.URL, def string) {
		if len(advertise) != 1 || len(listen) == 0 || advertise[0].String() != def ||
			listen[0].Hostname() != "0.0.0.0" {
			return
		}
		if host := outboundHost(); host != "" {
			advertise[0].Host = net.JoinHostPort(host, listen[0].Port())
		}
	}
	adopt(c.InitialAdvertisePeerURLs, c.ListenPeerURLs, defaultPeerURL)
	adopt(c.AdvertiseClientURLs, c.ListenClientURLs, defaultClientURL)
}

// outboundHost returns the source address of the default route, "" when there is none. Connecting
// a datagram socket only asks the routing table; nothing is sent.
func outboundHost() string {
	conn, err := net.Dial("udp4", "192.0.2.1:9") // TEST-NET-1, never assigned
	if err != nil {
		return ""
	}
	defer conn.Close()
	if a, ok := conn.LocalAddr().(*net.UDPAddr); ok {
		return a.IP.String()
	}
	return ""
}

// Log is the logger that Prepare was given; before that, one that discards everything.
func (c *Config) Log() *zap.Logger {
	if c.log == nil {
		return zap.NewNop()
	}
	return c.log
}

// ElectionTicks is the election timeout in heartbeats.
func (c *Config) ElectionTicks() int { return int(c.ElectionMs / c.HeartbeatMs) }

// NewCluster says whether the node may create a store in an empty data directory.
func (c *Config) NewCluster() bool { return c.InitialClusterState == ClusterNew }

// String prints every flag that has a meaning, in the order of the table, in one line.
func (c *Config) String() string {
	var b strings.Builder
	for _, f := range Table {
		if f.Fate != Implemented || f.value == nil {
			continue
		}
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		v := f.value.get(c)
		if v == "" || strings.ContainsAny(v, " \"") {
			v = fmt.Sprintf("%q", v)
		}
		b.WriteString(f.Name + "=" + v)
	}
	return b.String()
}

// Fields is String as log fields, followed by the inert flags that were given.
func (c *Config) Fields() []zap.Field {
	var fs []zap.Field
	for _, f := range Table {
		switch {
		case f.Fate == Implemented && f.value != nil:
			fs = append(fs, f.field(f.value.get(c)))
		case f.Fate == Inert:
			if v, ok := c.Inert[f.Name]; ok {
				fs = append(fs, f.field(v))
			}
		}
	}
	return fs
}

// AutoCompaction is when the store compacts itself.
func (c *Config) AutoCompaction() (autocompact.Policy, error) {
	return autocompact.Parse(c.AutoCompactionMode, c.AutoCompactionRetention)
}
