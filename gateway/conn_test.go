package gateway_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"net/http"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"braid/gateway"
)

// certificate makes a key and a certificate for the loopback address that signs itself.
func certificate(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(parsed)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

// TestTLS lets every kind of client in through one TLS port: gRPC on its own transport, gRPC from a
// client that offers HTTP/1.1 too, HTTP/2 and HTTP/1.1.
func TestTLS(t *testing.T) {
	f := start(t, nil)
	cert, pool := certificate(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() {
		served <- f.server.Serve(l, gateway.Port{TLS: &tls.Config{Certificates: []tls.Certificate{cert}}})
	}()
	defer func() {
		l.Close()
		if err := <-served; err == nil {
			t.Error("Serve of a closed listener ended without an error")
		}
	}()
	addr := l.Addr().String()

	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"https://" + addr}, TLS: &tls.Config{RootCAs: pool}, DialTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Put(t.Context(), "a", "1"); err != nil {
		t.Errorf("clientv3: %v", err)
	}

	both := credentials.NewTLS(&tls.Config{RootCAs: pool, NextProtos: []string{"h2", "http/1.1"}})
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(both))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	resp, err := pb.NewKVClient(conn).Range(t.Context(), &pb.RangeRequest{Key: []byte("a")})
	if err != nil || resp.Count != 1 {
		t.Errorf("gRPC inside the HTTP server: %v, %v", resp, err)
	}

	for _, force := range []bool{true, false} {
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, ForceAttemptHTTP2: force}
		resp, err := (&http.Client{Transport: tr}).Get("https://" + addr + "/health")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if want := map[bool]int{true: 2, false: 1}[force]; resp.ProtoMajor != want || resp.StatusCode != 200 {
			t.Errorf("HTTP/%d: %s, %s", want, resp.Proto, resp.Status)
		}
		tr.CloseIdleConnections()
	}

	// Plain text on a TLS port is refused, and so is TLS on a plain one.
	plain, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := pb.NewKVClient(plain).Range(ctx, &pb.RangeRequest{Key: []byte("a")}); err == nil {
		t.Error("plain text on a TLS port was served")
	}
	if _, err := tls.Dial("tcp", f.addr, &tls.Config{RootCAs: pool}); err == nil {
		t.Error("TLS on a plain port was served")
	}
}

// TestPorts asks for gRPC, HTTP, and HTTP over TLS on ports that serve some of them only.
func TestPorts(t *testing.T) {
	f := start(t, nil)
	cert, pool := certificate(t)
	config := &tls.Config{Certificates: []tls.Certificate{cert}}
	secure := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, DisableKeepAlives: true}}
	plain := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for name, tc := range map[string]struct {
		port                            gateway.Port
		grpc, grpcTLS, http, httpSecure bool
	}{
		"everything": {gateway.Port{TLS: config, Plain: true}, true, true, true, true},
		"TLS":        {gateway.Port{TLS: config}, false, true, false, true},
		"gRPC":       {gateway.Port{TLS: config, Plain: true, OnlyGRPC: true}, true, true, false, false},
		"plain gRPC": {gateway.Port{OnlyGRPC: true}, true, false, false, false},
		"plain HTTP": {gateway.Port{OnlyHTTP: true}, false, false, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			served := make(chan error, 1)
			go func() { served <- f.server.Serve(l, tc.port) }()
			defer func() {
				l.Close()
				<-served
			}()
			addr := l.Addr().String()
			get := func(c *http.Client, url string) bool {
				resp, err := c.Get(url)
				if err != nil {
					return false
				}
				resp.Body.Close()
				return resp.StatusCode == 200
			}
			call := func(creds credentials.TransportCredentials) bool {
				conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(creds))
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				_, err = pb.NewKVClient(conn).Range(t.Context(), &pb.RangeRequest{Key: []byte("a")})
				return err == nil
			}
			for what, pair := range map[string][2]bool{
				"gRPC":          {call(insecure.NewCredentials()), tc.grpc},
				"gRPC over TLS": {call(credentials.NewTLS(&tls.Config{RootCAs: pool})), tc.grpcTLS},
				"HTTP":          {get(plain, "http://"+addr+"/health"), tc.http},
				"HTTP over TLS": {get(secure, "https://"+addr+"/health"), tc.httpSecure},
			} {
				if pair[0] != pair[1] {
					t.Errorf("%s is served: %v, want %v", what, pair[0], pair[1])
				}
			}
		})
	}
}

// TestStop ends with requests in progress, silent connections and idle clients around.
func TestStop(t *testing.T) {
	f := start(t, nil)
	silent, err := net.Dial("tcp", f.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	if code, _, _ := fetch(t, "POST", "http://"+f.addr+"/v3/kv/range", `{"key":"YQ=="}`); code != 200 {
		t.Fatalf("JSON: %d", code)
	}
	inside, release := make(chan struct{}), make(chan struct{})
	f.store.Fail = func(op string) error {
		if op == "write" {
			close(inside)
			<-release
		}
		return nil
	}
	put := make(chan error, 1)
	go func() {
		_, err := pb.NewKVClient(f.conn).Put(context.Background(), &pb.PutRequest{Key: []byte("k")})
		put <- err
	}()
	<-inside
	stopped := make(chan struct{})
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		f.server.Stop(ctx)
		close(stopped)
	}()
	select {
	case <-stopped:
		t.Error("Stop did not wait for a request in progress")
	case <-time.After(50 * time.Millisecond):
	}
	close(release)
	if err := <-put; err != nil {
		t.Errorf("the request in progress: %v", err)
	}
	<-stopped
	if _, err := net.Dial("tcp", f.addr); err == nil {
		t.Error("the port is still open")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := f.server.Serve(l, gateway.Port{}); err == nil {
		t.Error("Serve after Stop")
	}
}
