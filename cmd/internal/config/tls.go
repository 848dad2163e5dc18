package config

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/url"
	"path/filepath"
	"slices"

	"go.etcd.io/etcd/client/pkg/v3/tlsutil"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.uber.org/zap"
)

// Prepare makes the TLS settings ready for transport.NewListener and for dialing: it creates the
// certificates of --auto-tls and --peer-auto-tls below the data directory, sets cipher suites and
// versions, and has refused connections logged. The logger is handed on through Log. It is called once, after Validate and before the
// node is started; a configuration without TLS needs it for the log lines only.
func (c *Config) Prepare(lg *zap.Logger) error {
	c.log = lg
	if err := c.prepare(lg, &c.ClientTLS, c.ClientAutoTLS, "client", slices.Concat(c.ListenClientURLs, c.ListenClientHTTPURLs)); err != nil {
		return err
	}
	return c.prepare(lg, &c.PeerTLS, c.PeerAutoTLS, "peer", c.ListenPeerURLs)
}

func (c *Config) prepare(lg *zap.Logger, t *transport.TLSInfo, auto bool, side string, listen []url.URL) error {
	switch {
	case auto && !t.Empty():
		lg.Warn("ignoring " + side + " auto TLS since certs given")
	case auto:
		hosts := make([]string, len(listen))
		for i, u := range listen {
			hosts[i] = u.Host
		}
		made, err := transport.SelfCert(lg, filepath.Join(c.DataDir, "fixtures", side), hosts, c.SelfSignedCertValidity)
		if err != nil {
			return fmt.Errorf("cannot create a certificate for --%s: %w", map[string]string{"client": "auto-tls", "peer": "peer-auto-tls"}[side], err)
		}
		*t = made
	}
	if !t.Empty() {
		for _, u := range listen {
			if !Secure(u) {
				lg.Warn("scheme is http or unix while key and cert files are present; ignoring key and cert files",
					zap.String(side+"-url", u.String()))
			}
		}
	}
	suites, err := tlsutil.GetCipherSuites(c.CipherSuites)
	if err != nil {
		return err
	}
	t.CipherSuites = suites
	if t.MinVersion, err = tlsutil.GetTLSVersion(c.TLSMinVersion); err != nil {
		return err
	}
	if t.MaxVersion, err = tlsutil.GetTLSVersion(c.TLSMaxVersion); err != nil {
		return err
	}
	t.Logger = lg
	t.HandshakeFailure = logRejected(lg, "rejected connection on "+side+" endpoint")
	return nil
}

// logRejected logs a failed handshake with what is known of the other side. A connection that was
// merely closed (a port probe) is logged at debug level.
func logRejected(lg *zap.Logger, msg string) func(*tls.Conn, error) {
	return func(conn *tls.Conn, err error) {
		log := lg.Warn
		if errors.Is(err, io.EOF) {
			log = lg.Debug
		}
		state := conn.ConnectionState()
		fields := []zap.Field{zap.String("remote-addr", conn.RemoteAddr().String()), zap.String("server-name", state.ServerName)}
		if len(state.PeerCertificates) > 0 {
			cert := state.PeerCertificates[0]
			ips := make([]string, len(cert.IPAddresses))
			for i, ip := range cert.IPAddresses {
				ips[i] = ip.String()
			}
			fields = append(fields, zap.Strings("ip-addresses", ips), zap.Strings("dns-names", cert.DNSNames))
		}
		log(msg, append(fields, zap.Error(err))...)
	}
}
