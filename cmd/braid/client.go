package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"braid/cmd/internal/admin"
	"braid/cmd/internal/bench"
)

// clientFlags say which nodes to ask and how; they have etcdctl's names, and like etcdctl's they
// are read from ETCDCTL_... variables too.
type clientFlags struct {
	endpoints          []string
	tls                transport.TLSInfo
	insecureSkipVerify bool
	timeout            time.Duration
	output             string
}

func (f *clientFlags) register(cmd *cobra.Command) {
	fs := cmd.PersistentFlags()
	cmd.SetGlobalNormalizationFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name == "endpoint" {
			name = "endpoints"
		}
		return pflag.NormalizedName(name)
	})
	fs.StringSliceVar(&f.endpoints, "endpoints", []string{"127.0.0.1:2379"}, "nodes to ask, tried in turn")
	fs.StringVar(&f.tls.TrustedCAFile, "cacert", "", "verify certificates of servers using this CA bundle")
	fs.StringVar(&f.tls.CertFile, "cert", "", "identify the client using this TLS certificate file")
	fs.StringVar(&f.tls.KeyFile, "key", "", "identify the client using this TLS key file")
	fs.BoolVar(&f.insecureSkipVerify, "insecure-skip-tls-verify", false, "skip server certificate verification")
	fs.DurationVar(&f.timeout, "command-timeout", 5*time.Second, "timeout of the command")
	fs.StringVarP(&f.output, "write-out", "o", "table", "output format: table or json")
}

// environment fills in flags that were not given from ETCDCTL_... variables.
func (f *clientFlags) environment(fs *pflag.FlagSet) error {
	var errs []error
	fs.VisitAll(func(fl *pflag.Flag) {
		key := "ETCDCTL_" + strings.ToUpper(strings.ReplaceAll(fl.Name, "-", "_"))
		if v := os.Getenv(key); v != "" && !fl.Changed && fl.Name != "write-out" {
			if err := fl.Value.Set(v); err != nil {
				errs = append(errs, fmt.Errorf("%s=%q: %w", key, v, err))
			}
		}
	})
	if f.output != "table" && f.output != "json" {
		errs = append(errs, fmt.Errorf("--write-out must be table or json, not %q", f.output))
	}
	return errors.Join(errs...)
}

// target turns an endpoint of etcdctl's forms into a gRPC target and says whether to use TLS.
func (f *clientFlags) target(endpoint string) (target string, secure bool, err error) {
	scheme, rest, found := strings.Cut(endpoint, "://")
	if !found {
		scheme, rest = "", endpoint
	}
	if rest == "" {
		return "", false, fmt.Errorf("%q is not an endpoint", endpoint)
	}
	switch scheme {
	case "":
		return "passthrough:///" + rest, f.tls.CertFile != "" || f.tls.TrustedCAFile != "" || f.insecureSkipVerify, nil
	case "http":
		return "passthrough:///" + rest, false, nil
	case "https":
		return "passthrough:///" + rest, true, nil
	case "unix":
		return "unix:" + rest, false, nil
	case "unixs":
		return "unix:" + rest, true, nil
	}
	return "", false, fmt.Errorf("%q: the scheme must be http, https, unix or unixs", endpoint)
}

func (f *clientFlags) dial(endpoint string) (*grpc.ClientConn, error) {
	target, secure, err := f.target(endpoint)
	if err != nil {
		return nil, err
	}
	creds := insecure.NewCredentials()
	if secure {
		tc, err := f.tls.ClientConfig()
		if err != nil {
			return nil, err
		}
		tc.InsecureSkipVerify = f.insecureSkipVerify
		creds = credentials.NewTLS(tc)
	}
	return grpc.NewClient(target, grpc.WithTransportCredentials(creds))
}

// with calls fn with a client of the first endpoint that answers.
func (f *clientFlags) with(cmd *cobra.Command, fn func(ctx context.Context, c *admin.Client) error) error {
	if err := f.environment(cmd.Flags()); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), f.timeout)
	defer cancel()
	var errs []error
	for _, ep := range f.endpoints {
		conn, err := f.dial(ep)
		if err != nil {
			return err
		}
		err = fn(ctx, admin.NewClient(conn))
		_ = conn.Close() // nothing is written through it any more
		switch status.Code(err) {
		case codes.OK:
			return nil
		case codes.Unavailable:
			text := status.Convert(err).Message()
			if reason, failed := bench.ConnectionError(text); failed {
				text = "no connection: " + reason
			}
			errs = append(errs, fmt.Errorf("%s: %s", ep, text))
		case codes.Unimplemented:
			return fmt.Errorf("%s does not serve braid's admin service: is it a braid node?", ep)
		default:
			return fmt.Errorf("%s: %s", ep, status.Convert(err).Message())
		}
	}
	return errors.Join(errs...)
}
