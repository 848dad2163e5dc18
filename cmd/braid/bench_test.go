package main

import (
	"bufio"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"braid/cmd/internal/bench"
	"braid/cmd/internal/bench/compare"
	"braid/cmd/internal/cluster"
	"braid/cmd/internal/freeport"
)

// startStore runs a store of one node and returns its endpoint.
func startStore(t *testing.T) string {
	t.Helper()
	t.Setenv("BRAID_TEST_NODE", "real")
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	port, err := freeport.Range(2)
	if err != nil {
		t.Fatal(err)
	}
	s, err := cluster.Start(t.Context(), cluster.Options{Dir: dir, Nodes: 1, BasePort: port, Binary: exe, Args: []string{"--region-split-keys=0000000000000500"}, Out: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := cluster.Stop(context.Background(), dir, t.Output()); err != nil {
			t.Error(err)
		}
	})
	return strings.TrimPrefix(s.Nodes[0].Client, "http://")
}

// benchJSON runs braid bench and reads its report; piped as it is, stderr must stay empty.
func benchJSON(t *testing.T, into any, args ...string) {
	t.Helper()
	cmd := program(t, "real", append([]string{"bench"}, append(args, "-o", "json")...)...)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%q: %v\n%s", args, err, stderr.String())
	}
	if stderr.Len() > 0 {
		t.Errorf("%q writes to stderr: %q", args, stderr.String())
	}
	if err := json.Unmarshal([]byte(stdout.String()), into); err != nil {
		t.Fatalf("%q: %v\n%s", args, err, stdout.String())
	}
}

func TestBenchLoads(t *testing.T) {
	ep := "--endpoints=" + startStore(t)
	picture := filepath.Join(t.TempDir(), "picture.svg")
	small := []string{ep, "--clients=4", "--conns=2"}
	count := []string{"--count=20"}
	keys := append(count, "--keys=1000")
	for _, tc := range []struct {
		args  []string
		more  []string
		kinds string
	}{
		{[]string{"put", "--plot=" + picture}, keys, "put"},
		{[]string{"put", "--keys=5"}, count, "put"}, // fewer than a transaction of txn has
		{[]string{"get"}, keys, "get"},
		{[]string{"get", "--serializable", "--dist=zipf"}, keys, "get-serializable"},
		{[]string{"range", "--as=list", "--range-keys=20", "--page=7"}, keys, "list"},
		{[]string{"delete", "--dist=hot"}, keys, "delete"},
		{[]string{"txn", "--txn-parts=2"}, keys, "txn"},
		{[]string{"mixed", "put=1,count=1,keys=1,range=1,stream=1", "--rate=200", "--watchers=3"}, keys, "put count keys range stream watch event"},
		{[]string{"watch", "--watchers=4", "--rate=100"}, keys, "put watch event"},
		{[]string{"catch-up", "--behind=200", "--rate=50", "--duration=30s", "--warm-up=0s"}, []string{"--keys=1000"}, "put before put meanwhile"},
		{[]string{"lease", "grant"}, count, "lease-grant"},
		{[]string{"lease", "keepalive"}, count, "keepalive"},
		{[]string{"lease", "expiry", "--leases=5", "--ttl=1"}, nil, "expiry"},
	} {
		var r bench.Report
		benchJSON(t, &r, append(append(append([]string{}, tc.args...), small...), tc.more...)...)
		var kinds []string
		total, events := int64(0), int64(0)
		for _, k := range r.Kinds {
			kinds = append(kinds, k.Kind)
			if k.Kind == "watch event" {
				events += k.Count
			} else {
				total += k.Count
			}
		}
		if got := strings.Join(kinds, " "); got != tc.kinds || total == 0 || len(r.Errors) > 0 || r.Interrupted {
			t.Errorf("%q: kinds %q, want %q; %d requests, errors %v", tc.args, got, tc.kinds, total, r.Errors)
		}
		if len(tc.more) > 0 && tc.more[0] == count[0] && total != 20 {
			t.Errorf("%q: %d requests, want 20", tc.args, total)
		}
		if tc.args[0] == "watch" && events > total {
			t.Errorf("%d events of %d puts reached watchers, each of which watches a part of its own", events, total)
		}
	}
	if b, err := os.ReadFile(picture); err != nil || xml.Unmarshal(b, new(struct{})) != nil {
		t.Errorf("the picture: %v\n%s", err, b)
	}
	var v bench.Versus
	benchJSON(t, &v, append(append([]string{"put"}, small...), "--count=20", "--against="+strings.TrimPrefix(ep, "--endpoints="), "--rounds=2")...)
	if len(v.Rounds[0]) != 2 || len(v.Rounds[1]) != 2 || v.Rounds[1][1].Kind("put").Count == 0 {
		t.Errorf("%+v", v)
	}
}

// TestBenchInterrupted ends a run early: what was measured is printed all the same.
func TestBenchInterrupted(t *testing.T) {
	ep := startStore(t)
	cmd := program(t, "real", "bench", "put", "--endpoints="+ep, "--warm-up=0s", "--duration=1h", "--clients=2", "--watchers=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	interruptOnceItPuts(t, ep, cmd)
	text := ""
	for lines := bufio.NewScanner(out); lines.Scan(); {
		text += lines.Text() + "\n"
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if !strings.Contains(text, "interrupted") || !strings.Contains(text, "put  ") || !strings.Contains(text, "no errors") {
		t.Errorf("printed\n%s", text)
	}
}

// interruptOnceItPuts waits until a load has put keys, and interrupts it.
func interruptOnceItPuts(t *testing.T, ep string, cmd *exec.Cmd) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{ep}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := until(ctx, func() (bool, error) {
		resp, err := c.Get(ctx, "\x00", clientv3.WithFromKey(), clientv3.WithCountOnly())
		return err == nil && resp.Count > 0, err
	}); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatal(err)
	}
}

// TestBenchHelp looks at flags of loads that others do not have, and at their defaults.
func TestBenchHelp(t *testing.T) {
	for _, tc := range []struct{ args, has, hasNot string }{
		{"put", "--value-size --keys --watch-parts --count --against", "--ttl --range-keys --no-fill --txn-keys --serializable"},
		{"get", "--no-fill --serializable", "--watchers --ttl"},
		{"delete", "--dist", "--value-size --watchers"},
		{"watch", "default_1000 default_100 --watch-parts", "--no-fill default_1)"},
		{"catch-up", "default_2m0s default_1000", "--count --watchers"},
		{"lease grant", "--ttl default_60", "--keys --prefix --value-size"},
		{"lease expiry", "--leases --prefix default_10)", "--count --duration --keys --warm-up --rate --value-size"},
	} {
		out, err := program(t, "idle", append(append([]string{"bench"}, strings.Fields(tc.args)...), "--help")...).Output()
		if err != nil {
			t.Fatal(err)
		}
		text := strings.ReplaceAll(string(out), "default ", "default_")
		for _, flag := range strings.Fields(tc.has) {
			if !strings.Contains(text, flag) {
				t.Errorf("%s: %s is missing in\n%s", tc.args, flag, out)
			}
		}
		for _, flag := range strings.Fields(tc.hasNot) {
			if strings.Contains(text, flag+" ") || strings.HasSuffix(flag, ")") && strings.Contains(text, flag) {
				t.Errorf("%s: there is %s in\n%s", tc.args, flag, out)
			}
		}
	}
}

// TestBenchFails sends what no store accepts.
func TestBenchFails(t *testing.T) {
	ep := startStore(t)
	for _, more := range []string{"", "--against=" + ep} {
		cmd := program(t, "real", "bench", "put", "--endpoints="+ep, "--value-size=2000000", "--count=2", "--clients=1", "--rounds=1", more)
		if more == "" {
			cmd.Args = cmd.Args[:len(cmd.Args)-1]
		}
		var stdout, stderr strings.Builder
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		_ = cmd.Run() // the status says it
		if cmd.ProcessState.ExitCode() != exitError || !strings.HasPrefix(stderr.String(), "braid: no request succeeded at "+ep) || !strings.Contains(stdout.String(), "put") {
			t.Errorf("status %d, %q\n%s", cmd.ProcessState.ExitCode(), stderr.String(), stdout.String())
		}
	}
}

func TestBenchRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"bench":                         "needs a subcommand",
		"bench pot":                     "did you mean",
		"bench put --dist=gauss":        "there is no distribution",
		"bench put --clients=0":         "between 1 and",
		"bench put --key-size=3":        "too short",
		"bench put --rate=-1":           "cannot be negative",
		"bench put --endpoints=x://y":   "the scheme must be",
		"bench put --rounds=0":          "--rounds must be",
		"bench put -o=xml":              "must be table or json",
		"bench range --as=map":          "--as must be",
		"bench mixed":                   "takes 1 argument(s)",
		"bench mixed put":               "is not NAME=WEIGHT",
		"bench mixed pot=1":             "there is no request",
		"bench compare --suite=x":       "there is no suite",
		"bench compare --stages=pits":   "no stage",
		"bench compare --systems=etcd":  "say with --etcd",
		"bench compare --systems=x":     "there is no system",
		"bench compare --nodes=2":       "1, 3 or 5",
		"bench compare --etcd=/no/file": "no such file",
	} {
		cmd := program(t, "idle", strings.Fields(args)...)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		_ = cmd.Run() // the status says it
		if cmd.ProcessState.ExitCode() != exitUsage || !strings.Contains(stderr.String(), want) || strings.Count(stderr.String(), "\n") != 1 {
			t.Errorf("braid %s: status %d, %q, want %q", args, cmd.ProcessState.ExitCode(), stderr.String(), want)
		}
	}
	for args, want := range map[string]string{
		"bench put --endpoints=127.0.0.1:1": "braid: 127.0.0.1:1 does not answer: connection refused\n",
		"bench put --endpoints=foo":         "braid: foo does not answer: missing port in address\n",
		"pd status --endpoints=127.0.0.1:1": "braid: 127.0.0.1:1: no connection: connection refused\n",
		"pd status --endpoints=foo":         "braid: foo: no connection: missing port in address\n",
	} {
		out, err := program(t, "idle", strings.Fields(args)...).CombinedOutput()
		if err == nil || string(out) != want {
			t.Errorf("braid %s: %v: %s", args, err, out)
		}
	}
}

// TestCompare runs a stage on clusters of both modes.
func TestCompare(t *testing.T) {
	keep := filepath.Join(t.TempDir(), "table.json")
	cmd := program(t, "real", "bench", "compare", "--nodes=1", "--stages=cas", "--rounds=1", "--scale=0.01", "--keep="+keep, "-q")
	cmd.Env = append(cmd.Env, "TMPDIR="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	table, err := compare.Load(keep)
	if err != nil {
		t.Fatal(err)
	}
	if len(table.Rows) != 3 || len(table.Rows[0].Values[compare.Multi]) != 1 || table.Rows[0].Values[compare.Single][0] <= 0 {
		t.Errorf("%s", out)
	}
	if table.Runs[0] != "braid bench compare --nodes=1 --stages=cas --rounds=1 --scale=0.01 --keep=table.json -q" {
		t.Errorf("the table says %q", table.Runs[0])
	}
}
