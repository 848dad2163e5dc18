package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"braid/cmd/internal/freeport"
)

// realNode is the program over the real node, on ports of its own.
type realNode struct {
	t      *testing.T
	client string // URL
	args   []string
	cmd    *exec.Cmd
	stderr *bytes.Buffer
	drain  chan error
}

func newRealNode(t *testing.T, scheme string, extra ...string) *realNode {
	t.Helper()
	port, err := freeport.Range(2)
	if err != nil {
		t.Fatal(err)
	}
	n := &realNode{t: t, client: fmt.Sprintf("%s://127.0.0.1:%d", scheme, port)}
	peer := fmt.Sprintf("http://127.0.0.1:%d", port+1)
	n.args = append([]string{"--data-dir=" + filepath.Join(t.TempDir(), "data"), "--listen-client-urls=" + n.client, "--advertise-client-urls=" + n.client,
		"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer, "--initial-cluster=default=" + peer}, extra...)
	return n
}

// start runs the program until it says that it is ready.
func (n *realNode) start(extra ...string) {
	n.t.Helper()
	n.cmd = program(n.t, "real", append(n.args, extra...)...)
	n.stderr = &bytes.Buffer{}
	pipe, err := n.cmd.StderrPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	out := io.TeeReader(pipe, n.stderr)
	if err := n.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	cmd := n.cmd
	n.t.Cleanup(func() { _ = cmd.Process.Kill() }) // gone already when the test went well
	watchdog := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
	defer watchdog.Stop()
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if strings.Contains(lines.Text(), "braid is ready") {
			n.drain = make(chan error, 1)
			go func() {
				_, err := io.Copy(io.Discard, out)
				n.drain <- err
			}()
			return
		}
	}
	_ = n.cmd.Wait()
	n.t.Fatalf("the node did not become ready:\n%s", n.stderr)
}

func (n *realNode) kill() {
	n.t.Helper()
	if err := n.cmd.Process.Kill(); err != nil {
		n.t.Fatal(err)
	}
	<-n.drain
	_ = n.cmd.Wait() // killed
}

// post calls the JSON mapping of the API.
func (n *realNode) post(path, body string) string {
	n.t.Helper()
	c := &http.Client{Timeout: time.Minute, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	resp, err := c.Post(n.client+path, "application/json", strings.NewReader(body))
	if err != nil {
		n.t.Fatalf("%v\n%s", err, n.stderr)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		n.t.Fatalf("%s: %s, %v\n%s", path, resp.Status, err, b)
	}
	return strings.ReplaceAll(string(b), " ", "")
}

const (
	putHello = `{"key":"aGVsbG8=","value":"d29ybGQ="}`
	getHello = `{"key":"aGVsbG8="}`
)

// TestNodeSurvivesKill writes, kills the process, and reads what was acknowledged.
func TestNodeSurvivesKill(t *testing.T) {
	n := newRealNode(t, "http", "--region-split-keys=a,m")
	n.start()
	if got := n.post("/v3/kv/put", putHello); !strings.Contains(got, `"revision":"2"`) {
		t.Errorf("the first put of a store answers %s", got)
	}
	n.kill()
	n.start()
	if got := n.post("/v3/kv/range", getHello); !strings.Contains(got, `"value":"d29ybGQ="`) || !strings.Contains(got, `"mod_revision":"2"`) {
		t.Errorf("after kill -9: %s", got)
	}
	var list strings.Builder
	if status := runCommand([]string{"region", "list", "--endpoints", n.client}, &list, &list); status != 0 || strings.Count(list.String(), "\n") != 4 {
		t.Errorf("braid region list: %d\n%s", status, list.String())
	}
	n.kill()

	// The same directory under flags that describe another store, and in another mode.
	for _, tc := range []struct{ flags, want string }{
		{"--initial-cluster-token=another", "belongs to cluster"},
		{"--name=other --initial-cluster=other=http://127.0.0.1:1 --initial-advertise-peer-urls=http://127.0.0.1:1", "belongs to cluster"},
		{"--single-group", "exclude each other"},
		{"--region-split-keys= --single-group", "holds a store in multi-group mode"},
	} {
		cmd := program(t, "real", append(n.args, strings.Fields(tc.flags)...)...)
		out, err := cmd.CombinedOutput()
		if err == nil || cmd.ProcessState.ExitCode() != exitError || !strings.Contains(string(out), tc.want) {
			t.Errorf("%s: %v\n%s\nwant %q", tc.flags, err, out, tc.want)
		}
	}
}

// TestNodeWithAutoTLS serves clients with a certificate of its own making.
func TestNodeWithAutoTLS(t *testing.T) {
	n := newRealNode(t, "https", "--auto-tls")
	n.start()
	if got := n.post("/v3/kv/put", putHello); !strings.Contains(got, `"revision":"2"`) {
		t.Errorf("got %s", got)
	}
	var status strings.Builder
	if got := runCommand([]string{"pd", "status", "--insecure-skip-tls-verify", "--endpoints", n.client}, &status, &status); got != 0 {
		t.Errorf("braid pd status over TLS: %d\n%s", got, status.String())
	}
	n.kill()
}
