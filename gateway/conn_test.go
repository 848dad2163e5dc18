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
	go func() { served <- f.server.Serve(l, &tls.Config{Certificates: []tls.Certificate{cert}}) }()
	defer func() {
		l.Close()
		if err := <-served; err == nil {
			t.Error("Serve of a closed listener ended without an error")
		}
	}()
	addr := l.Addr().String()

	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"https://" + addr}, TLS: &tls.Config{RootCAs: pool}, DialTimeout: 5 * time.Second})
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
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
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
	if err := f.server.Serve(l, nil); err == nil {
		t.Error("Serve after Stop")
	}
}
