package cluster

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"braid/cmd/internal/freeport"
)

func init() {
	if os.Getenv("CLUSTER_TEST_NODE") == "headless" {
		runtime.LockOSThread() // TestMain runs on the process's first thread
	}
}

// TestMain lets the test binary play the node that a cluster is made of.
func TestMain(m *testing.M) {
	switch os.Getenv("CLUSTER_TEST_NODE") {
	case "":
	case "headless": // a process of which the first thread has gone, which still has its port
		lis, err := net.Listen("tcp", os.Args[1])
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println("listening")
		go func() {
			defer lis.Close()
			time.Sleep(time.Minute) // longer than the test needs, so that nothing is left for ever
			os.Exit(0)
		}()
		syscall.Syscall(syscall.SYS_EXIT, 0, 0, 0)
	default:
		os.Exit(playNode(os.Args[1:]))
	}
	os.Exit(m.Run())
}

// playNode answers /readyz on the client URL until SIGTERM; with --fail it gives up at once, with
// --stubborn it ignores SIGTERM.
func playNode(args []string) int {
	fs := flag.NewFlagSet("node", flag.ContinueOnError)
	client := fs.String("listen-client-urls", "", "")
	for _, name := range []string{"name", "data-dir", "advertise-client-urls", "listen-peer-urls", "initial-advertise-peer-urls",
		"initial-cluster", "initial-cluster-token", "initial-cluster-state"} {
		fs.String(name, "", "")
	}
	failing, stubborn := fs.Bool("fail", false, ""), fs.Bool("stubborn", false, "")
	why := fs.String("why", "", "")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	if *failing {
		for i := range 10 {
			fmt.Fprintf(os.Stderr, "line %d\n", i)
		}
		fmt.Fprint(os.Stderr, *why)
		return 1
	}
	u, err := url.Parse(*client)
	if err != nil {
		return 1
	}
	lis, err := net.Listen("tcp", u.Host)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	http.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	served := make(chan error, 1)
	go func() { served <- http.Serve(lis, nil) }()
	for {
		select {
		case <-served:
			return 1
		case <-term:
			if !*stubborn {
				return 0
			}
		}
	}
}

func options(t *testing.T, dir string, args ...string) Options {
	t.Helper()
	t.Setenv("CLUSTER_TEST_NODE", "1")
	bin, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	port, err := freeport.Range(4)
	if err != nil {
		t.Fatal(err)
	}
	return Options{Dir: dir, Nodes: 2, BasePort: port, Binary: bin, Args: args, Out: &strings.Builder{}}
}

func TestStartStopAndAgain(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	o := options(t, dir)
	t.Setenv("ETCD_NAME", "must not reach the nodes")
	s, err := Start(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = Stop(context.Background(), dir, &strings.Builder{}) })
	for _, n := range s.Nodes {
		if !n.Process.Alive() || Ready(ctx, n.Client) != nil {
			t.Errorf("%s does not run: %+v", n.Name, n.Process)
		}
	}
	if _, err := Start(ctx, o); err != nil {
		t.Errorf("starting a running cluster again: %v", err)
	}
	if got := o.Out.(*strings.Builder).String(); strings.Count(got, "already runs") != 2 {
		t.Errorf("printed %q", got)
	}
	other := o
	other.Nodes, other.Given.Nodes = 3, true
	if _, err := Start(ctx, other); err == nil || !strings.Contains(err.Error(), "it has 2 nodes") {
		t.Errorf("another size: %v", err)
	}
	var out strings.Builder
	if n, err := Stop(ctx, dir, &out); err != nil || n != 2 {
		t.Errorf("stopped %d, %v: %s", n, err, out.String())
	}
	if n, err := Stop(ctx, dir, &out); err != nil || n != 0 {
		t.Errorf("stopped %d nodes of a stopped cluster, %v", n, err)
	}
	if s, err = Start(ctx, o); err != nil || len(s.Nodes) != 2 {
		t.Errorf("starting it again: %v", err)
	}
}

// TestHeadless: a process is there for as long as one of its threads is, because its ports are.
func TestHeadless(t *testing.T) {
	if _, err := os.Stat("/proc/self/stat"); err != nil {
		t.Skip("threads are told apart with /proc only: ", err)
	}
	port, err := freeport.Range(1)
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, addr)
	cmd.Env = append(os.Environ(), "CLUSTER_TEST_NODE=headless")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill() // gone already when the test went well
		_ = cmd.Wait()         // killed
	}()
	h, err := handleOf(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	state := func() string {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Fields(string(b)[strings.LastIndexByte(string(b), ')')+1:])[0]
	}
	await := func(what string, ok func() bool) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); !ok(); runtime.Gosched() {
			if time.Now().After(deadline) {
				t.Fatalf("in vain waited until %s", what)
			}
		}
	}
	await("the first thread has gone", func() bool { return state() == "Z" })
	if l, err := net.Listen("tcp", addr); err == nil {
		l.Close()
		t.Fatal("the port is free: this process is no case of what is tested")
	}
	if !h.Alive() {
		t.Error("counts as gone while its port is in use")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	await("it has gone", func() bool { return !h.Alive() })
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal("gone, and its port is not free: ", err)
	}
	l.Close()
}

func TestFailedStartIsUndone(t *testing.T) {
	dir := t.TempDir()
	// The same flags give the same error, which holds nothing of the run before; other flags replace them.
	for _, tc := range []struct{ why, text, last string }{
		{"", "ended before it was ready: exit status 1 (its log is ", "line 5,line 6,line 7,line 8,line 9"},
		{"", "ended before it was ready: exit status 1 (its log is ", "line 5,line 6,line 7,line 8,line 9"},
		{"braid: it does not want to\n", "exit status 1: it does not want to (its log is ", ""},
	} {
		o := options(t, dir, "--fail", "--why="+tc.why)
		o.Given.Args = true
		_, err := Start(context.Background(), o)
		var failed *NodeError
		if !errors.As(err, &failed) || !strings.Contains(failed.Error(), tc.text) || strings.Join(failed.Last, ",") != tc.last {
			t.Errorf("%v, %+v, want %q and the end of the log %s", err, failed, tc.text, tc.last)
		}
	}
	s, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range s.Nodes {
		if n.Process.Alive() {
			t.Errorf("%s was left behind", n.Name)
		}
	}
	o := options(t, dir)
	o.Nodes, o.Given.Nodes = 1, true
	if s, err = Start(context.Background(), o); err != nil || len(s.Nodes) != 1 || len(s.Args) != 0 {
		t.Fatalf("nothing was ever ready, and other flags are refused: %+v, %v", s, err)
	}
	t.Cleanup(func() { _, _ = Stop(context.Background(), dir, &strings.Builder{}) })
	if _, err := Stop(context.Background(), dir, &strings.Builder{}); err != nil {
		t.Error(err)
	}
	o.Args, o.Given.Args = []string{"--stubborn"}, true
	if _, err := Start(context.Background(), o); err == nil || !strings.Contains(err.Error(), "holds a cluster already: its nodes have the flags") {
		t.Errorf("other flags for what was ready: %v", err)
	}
}

func TestPortInUse(t *testing.T) {
	dir := t.TempDir()
	o := options(t, dir)
	busy, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", o.BasePort+3))
	if err != nil {
		t.Skip("the port was taken meanwhile: ", err)
	}
	defer busy.Close()
	_, err = Start(context.Background(), o)
	if err == nil || !strings.Contains(err.Error(), "n2 cannot be started") || !strings.Contains(err.Error(), "--base-port") {
		t.Errorf("got %v", err)
	}
	if _, err := Load(dir); !errors.Is(err, ErrNone) {
		t.Errorf("a cluster that never started is remembered: %v", err)
	}
}

func TestStubbornNodeIsKilled(t *testing.T) {
	dir := t.TempDir()
	o := options(t, dir, "--stubborn")
	o.Nodes = 1
	if _, err := Start(context.Background(), o); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // do not wait for the grace time
	var out strings.Builder
	if n, err := Stop(ctx, dir, &out); err != nil || n != 1 || !strings.Contains(out.String(), "killing it") {
		t.Errorf("stopped %d, %v: %s", n, err, out.String())
	}
}

// TestOnlyOwnProcessesAreSignalled plays a recycled process id: the state file names a process
// that runs, but was started at another moment.
func TestOnlyOwnProcessesAreSignalled(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Skip("no sleep program: ", err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	h, err := handleOf(cmd.Process.Pid)
	if err != nil || !h.Alive() {
		t.Fatalf("%+v is not alive, %v", h, err)
	}
	dir := t.TempDir()
	s := &State{Format: stateFormat, Nodes: []Node{{Name: "n1", Process: Handle{PID: h.PID, Start: h.Start + "1"}}}}
	if err := s.save(dir); err != nil {
		t.Fatal(err)
	}
	if n, err := Stop(context.Background(), dir, &strings.Builder{}); err != nil || n != 0 {
		t.Errorf("stopped %d, %v", n, err)
	}
	if !h.Alive() {
		t.Error("a stranger's process was stopped")
	}
	if err := (Handle{PID: h.PID, Start: "x"}).signal(syscall.SIGKILL); !errors.Is(err, errGone) || !h.Alive() {
		t.Errorf("signal: %v", err)
	}
}

func TestState(t *testing.T) {
	dir := t.TempDir()
	if _, err := Load(dir); !errors.Is(err, ErrNone) || !strings.Contains(err.Error(), "braid cluster start --dir "+dir+")") {
		t.Errorf("empty directory: %v", err)
	}
	for _, bad := range []string{"{", `{"format": 99}`} {
		if err := os.WriteFile(filepath.Join(dir, stateFile), []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(dir); err == nil || errors.Is(err, ErrNone) {
			t.Errorf("%s: %v", bad, err)
		}
	}
	for _, o := range []Options{{Nodes: 0, BasePort: 1}, {Nodes: nodesMax + 1, BasePort: 1}, {Nodes: 3, BasePort: 65532}, {Nodes: 1}} {
		if _, err := plan(o); err == nil {
			t.Errorf("%+v: no error", o)
		}
	}
	s, err := plan(Options{Dir: dir, Nodes: 3, BasePort: 100, Args: []string{"--x"}})
	if err != nil {
		t.Fatal(err)
	}
	if got := s.Endpoints(); got != "http://127.0.0.1:100,http://127.0.0.1:102,http://127.0.0.1:104" {
		t.Errorf("endpoints %s", got)
	}
	args := strings.Join(s.args(dir, &s.Nodes[1]), " ")
	for _, want := range []string{"--name=n2", "--initial-cluster=n1=http://127.0.0.1:101,n2=http://127.0.0.1:103,n3=http://127.0.0.1:105", " --x"} {
		if !strings.Contains(args, want) {
			t.Errorf("%q is missing from %s", want, args)
		}
	}
}
