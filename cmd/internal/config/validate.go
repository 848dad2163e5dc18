package config

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"

	"go.etcd.io/etcd/client/pkg/v3/tlsutil"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/client/pkg/v3/types"
)

// Errors with etcd's texts, which its own test programs look for.
var (
	errAdvertise  = errors.New("--advertise-client-urls is required when --listen-client-urls is set explicitly")
	errMetricsTLS = errors.New("client TLS key/cert (--cert-file, --key-file) must be provided for metrics secure url")
)

// Validate reports everything that is wrong with a filled-in configuration, joined into one error
// (errors.Join), nil when nothing is. It reads no file and opens no socket; the name service is
// asked only when advertised and listed peer URLs differ in their spelling.
func (c *Config) Validate() error {
	var errs []error
	add := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	if c.Name == "" {
		add(errors.New("--name must not be empty"))
	}
	add(bindable("listen-peer-urls", c.ListenPeerURLs))
	add(bindable("listen-client-urls", c.ListenClientURLs))
	add(bindable("listen-client-http-urls", c.ListenClientHTTPURLs))
	for _, u := range c.ListenClientHTTPURLs {
		if slices.ContainsFunc(c.ListenClientURLs, func(v url.URL) bool { return Address(u) == Address(v) }) {
			add(fmt.Errorf("cannot bind both --listen-client-urls and --listen-client-http-urls on the same url %s", u.String()))
		}
	}
	add(bindable("listen-metrics-urls", c.ListenMetricsURLs))
	if err := reachable(c.InitialAdvertisePeerURLs); err != nil {
		add(fmt.Errorf(`--initial-advertise-peer-urls %q must be "host:port" (%w)`, types.URLs(c.InitialAdvertisePeerURLs), err))
	}
	if err := reachable(c.AdvertiseClientURLs); err != nil {
		add(fmt.Errorf(`--advertise-client-urls %q must be in the format "host:port", "unix:/path/to/socket" or "unixs:/path/to/socket" (%w)`,
			types.URLs(c.AdvertiseClientURLs), err))
	}
	if len(c.AdvertiseClientURLs) == 0 {
		add(errAdvertise)
	}
	if c.HeartbeatMs == 0 || 5*c.HeartbeatMs > c.ElectionMs {
		add(fmt.Errorf("--election-timeout[%vms] should be at least as 5 times as --heartbeat-interval[%vms]", c.ElectionMs, c.HeartbeatMs))
	}
	if c.ElectionMs > electionMsMax {
		add(fmt.Errorf("--election-timeout[%vms] is too long, and should be set less than %vms", c.ElectionMs, electionMsMax))
	}
	if c.TimerSlack > timerSlackMax {
		add(fmt.Errorf("--timer-slack[%v] must not be more than %v: leases end and elections begin this much later", c.TimerSlack, timerSlackMax))
	}
	if _, err := c.AutoCompaction(); err != nil {
		add(err)
	}
	for i := 1; i < len(c.SplitKeys); i++ {
		if string(c.SplitKeys[i-1]) >= string(c.SplitKeys[i]) {
			add(errors.New("--region-split-keys must be strictly ascending"))
			break
		}
	}
	if c.SingleGroup && len(c.SplitKeys) > 0 {
		add(errors.New("--single-group and --region-split-keys exclude each other: one group holds all keys"))
	}
	errs = append(errs, c.checkCluster()...)
	errs = append(errs, c.checkTLS()...)
	return errors.Join(errs...)
}

// bindable refuses names: a socket is bound to an address.
func bindable(flag string, us []url.URL) error {
	for _, u := range us {
		if isUnix(u) {
			continue
		}
		host, _, err := net.SplitHostPort(u.Host)
		if err != nil {
			return fmt.Errorf("--%s: %w", flag, err)
		}
		if host != "localhost" && net.ParseIP(host) == nil {
			return fmt.Errorf("--%s: expected IP in URL for binding (%s)", flag, u.String())
		}
	}
	return nil
}

func reachable(us []url.URL) error {
	for _, u := range us {
		if isUnix(u) {
			continue
		}
		host, _, err := net.SplitHostPort(u.Host)
		if err != nil {
			return err
		}
		if host == "" {
			return fmt.Errorf("unexpected empty host (%s)", u.String())
		}
	}
	return nil
}

func isUnix(u url.URL) bool { return u.Scheme == "unix" || u.Scheme == "unixs" }

// Address is where a URL's socket is bound.
func Address(u url.URL) string {
	if isUnix(u) {
		return u.Host + u.Path
	}
	return u.Host
}

// Secure says whether connections to the URL use TLS.
func Secure(u url.URL) bool { return u.Scheme == "https" || u.Scheme == "unixs" }

func (c *Config) checkTLS() (errs []error) {
	minV, err := tlsutil.GetTLSVersion(c.TLSMinVersion)
	if err != nil {
		errs = append(errs, err)
	}
	maxV, err := tlsutil.GetTLSVersion(c.TLSMaxVersion)
	if err != nil {
		errs = append(errs, err)
	}
	if maxV != 0 && minV > maxV {
		errs = append(errs, fmt.Errorf("min version (%s) is greater than max version (%s)", c.TLSMinVersion, c.TLSMaxVersion))
	}
	if minV == tls.VersionTLS13 && len(c.CipherSuites) > 0 {
		errs = append(errs, errors.New("cipher suites cannot be configured when only TLS1.3 is enabled"))
	}
	if _, err := tlsutil.GetCipherSuites(c.CipherSuites); err != nil {
		errs = append(errs, fmt.Errorf("--cipher-suites: %w", err))
	}
	errs = append(errs, pairs("", &c.ClientTLS)...)
	errs = append(errs, pairs("peer-", &c.PeerTLS)...)
	if c.ClientTLS.Empty() && !c.ClientAutoTLS {
		for _, u := range slices.Concat(c.ListenClientURLs, c.ListenClientHTTPURLs) {
			if Secure(u) {
				errs = append(errs, fmt.Errorf("TLS key/cert (--cert-file, --key-file) must be provided for client url %s with HTTPS scheme", u.String()))
			}
		}
		for _, u := range c.ListenMetricsURLs {
			if Secure(u) {
				errs = append(errs, fmt.Errorf("%w %s", errMetricsTLS, u.String()))
			}
		}
	}
	if c.PeerTLS.Empty() && !c.PeerAutoTLS {
		for _, u := range c.ListenPeerURLs {
			if Secure(u) {
				errs = append(errs, fmt.Errorf("TLS key/cert (--peer-cert-file, --peer-key-file) must be provided for peer url %s with HTTPS scheme", u.String()))
			}
		}
	}
	return errs
}

// pairs checks that certificates and keys come together.
func pairs(prefix string, t *transport.TLSInfo) (errs []error) {
	if (t.CertFile == "") != (t.KeyFile == "") {
		errs = append(errs, fmt.Errorf("--%scert-file and --%skey-file must both be present or both absent (cert: %q, key: %q)", prefix, prefix, t.CertFile, t.KeyFile))
	}
	if (t.ClientCertFile == "") != (t.ClientKeyFile == "") {
		errs = append(errs, fmt.Errorf("--%sclient-cert-file and --%sclient-key-file must both be present or both absent (cert: %q, key: %q)", prefix, prefix, t.ClientCertFile, t.ClientKeyFile))
	}
	return errs
}

// OneLine prints the errors of Validate in one line.
func OneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
