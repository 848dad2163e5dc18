package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"braid/cmd/internal/admin"
	"braid/cmd/internal/cluster"
	"braid/cmd/internal/config"
)

// TestMain lets the test binary play the program itself, over the real node or over one that only
// waits or fails.
func TestMain(m *testing.M) {
	switch how := os.Getenv("BRAID_TEST_NODE"); how {
	case "":
		os.Exit(m.Run())
	case "real":
		os.Exit(run(os.Args[1:]))
	default:
		playStart()
		startNode = func(ctx context.Context, _ *config.Config) (server, error) {
			switch how {
			case "in use":
				_, err := net.Listen("tcp", os.Getenv("BRAID_TEST_ADDR"))
				return nil, err
			case "no quorum":
				fmt.Fprintln(os.Stderr, "starting")
				<-ctx.Done()
				return nil, ctx.Err()
			case "hangs":
				fmt.Fprintln(os.Stderr, "starting")
				select {}
			}
			n := &idleNode{done: make(chan error, 1)}
			if how == "fails" || how == "fails and hangs" {
				n.done <- errors.New("wal: sync failed: input/output error")
				n.hangs = how != "fails"
			}
			return n, nil
		}
		os.Exit(run(os.Args[1:]))
	}
}

type idleNode struct {
	done  chan error
	hangs bool // Stop does not return
}

func (n *idleNode) Done() <-chan error { return n.done }

func (n *idleNode) Stop(context.Context) error {
	if n.hangs {
		select {}
	}
	return nil
}

// program runs the test binary as braid.
func program(t *testing.T, how string, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, args...)
	cmd.Env = append(os.Environ(), "BRAID_TEST_NODE="+how)
	cmd.Dir = t.TempDir()
	return cmd
}

// startUntil starts a program, returns when it has said something, and gives what else it says; all
// of it goes into stderr too.
func startUntil(t *testing.T, cmd *exec.Cmd, stderr io.Writer, words string) io.Reader {
	t.Helper()
	pipe, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	out := io.TeeReader(pipe, stderr)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.Contains(lines.Text(), words) {
	}
	return out
}

func TestExitStatus(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	t.Setenv("BRAID_TEST_ADDR", busy.Addr().String())
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		how, args      string
		status         int
		stdout, stderr string
	}{
		{"idle", "--version", 0, "etcd Version: 3.7.3\n", ""},
		{"idle", "--help", 0, "--listen-client-urls", ""},
		{"idle", "--dta-dir=x", 2, "", "braid: unknown flag --dta-dir; did you mean --data-dir?"},
		{"idle", "--max-txn-ops=x", 2, "", `braid: invalid value "x" for flag -max-txn-ops`},
		{"idle", "--name=a positional", 2, "", `"positional" is not a valid flag`},
		{"idle", "regoin list", 2, "", "unknown command \"regoin\"; did you mean region?\n"},
		{"idle", "run", 2, "", `unknown command "run"; a node is started with flags alone`},
		{"idle", "region list --endpont=x", 2, "", "unknown flag --endpont; did you mean --endpoints?"},
		{"idle", "bench put --client 3", 2, "", "unknown flag --client; did you mean --clients?"},
		{"idle", "cluster start extra", 2, "", `not "extra"`},
		{"idle", "cluster start extra -- --name=x", 2, "", `not "extra"`},
		{"idle", "cluster start --single-group --region-split-keys=a", 2, "", "exclude each other"},
		{"idle", "region lits", 2, "", "did you mean list?"},
		{"idle", "region", 2, "", "needs a subcommand"},
		{"idle", "region transfer 5", 2, "", "takes 2 argument(s)"},
		{"idle", "region transfer x y", 2, "", "is not a region id"},
		{"idle", "pd status --endpoints=127.0.0.1:1", 1, "", "braid: 127.0.0.1:1: "},
		{"idle", "cluster status", 1, "", "no cluster here (start one with: braid cluster start)"},
		{"idle", "cluster status --dir=x", 1, "", "no cluster here (start one with: braid cluster start --dir x)"},
		{"idle", "--quota-backend-bytes=5", 1, "", "--quota-backend-bytes=5 is refused"},
		{"idle", "--listen-client-urls=http://127.0.0.1:1", 1, "", "braid: --advertise-client-urls is required when --listen-client-urls is set explicitly"},
		{"idle", "--log-outputs=" + file + "/x", 1, "", "braid: --log-outputs: "},
		{"in use", "", 1, "", "address already in use; another process uses the port"},
		{"fails", "", 1, "", "braid: wal: sync failed: input/output error"},
		{"fails and hangs", "", 1, "", "input/output error; stop: not done after 4s"},
	} {
		cmd := program(t, tc.how, strings.Fields(tc.args)...)
		if tc.args == "" {
			cmd.Args = cmd.Args[:1]
		}
		var stdout, stderr strings.Builder
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		err := cmd.Run()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if got := cmd.ProcessState.ExitCode(); got != tc.status {
			t.Errorf("braid %s (%s): status %d, want %d\n%s", tc.args, tc.how, got, tc.status, stderr.String())
		}
		if !strings.Contains(stdout.String(), tc.stdout) || !strings.Contains(stderr.String(), tc.stderr) {
			t.Errorf("braid %s (%s): stdout %q stderr %q, want %q and %q", tc.args, tc.how, stdout.String(), stderr.String(), tc.stdout, tc.stderr)
		}
		plain := 0
		for _, line := range strings.Split(strings.TrimSpace(stderr.String()), "\n") {
			if line != "" && !strings.HasPrefix(line, "{") {
				plain++
			}
		}
		if want := min(tc.status, 1); plain != want {
			t.Errorf("braid %s (%s): %d plain lines on stderr, want %d:\n%s", tc.args, tc.how, plain, want, stderr.String())
		}
	}
}

// TestSignals starts the program, waits for what it prints, and stops it: it must end by the
// signal itself, also while it is still starting.
func TestSignals(t *testing.T) {
	for _, tc := range []struct {
		how, wait string
		sig       syscall.Signal
	}{
		{"idle", "braid is ready: clients connect to http://localhost:2379", syscall.SIGTERM},
		{"idle", "braid is ready", syscall.SIGINT},
		{"no quorum", "starting", syscall.SIGTERM},
	} {
		cmd := program(t, tc.how)
		var stdout, stderr strings.Builder
		cmd.Stdout = &stdout
		out := startUntil(t, cmd, &stderr, tc.wait)
		for range 2 { // the second one is an echo
			if err := cmd.Process.Signal(tc.sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
				t.Fatal(err)
			}
		}
		if _, err := io.Copy(io.Discard, out); err != nil {
			t.Fatal(err)
		}
		err := cmd.Wait()
		ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
		ended := ok && ws.Signaled() && ws.Signal() == tc.sig
		if signal.Ignored(tc.sig) {
			// A shell's background job is born deaf to SIGINT, and so is what it starts: the signal is
			// heeded, but nobody dies by it.
			ended = ok && ws.ExitStatus() == 128+int(tc.sig)
		}
		if !ended {
			t.Errorf("%s, %s: ended with %v, want by the signal\n%s", tc.how, tc.sig, err, stderr.String())
		}
		if tc.how == "idle" && !strings.Contains(stderr.String(), `"msg":"ready to serve client requests"`) {
			t.Errorf("harnesses look for etcd's words in:\n%s", stderr.String())
		}
		if stdout.Len() > 0 {
			t.Errorf("programs that read both streams expect log entries only, stdout has %q", stdout.String())
		}
	}
}

// TestSecondSignal: a node whose start hangs ends when it is told a second time.
func TestSecondSignal(t *testing.T) {
	cmd := program(t, "hangs")
	var stderr strings.Builder
	out := startUntil(t, cmd, &stderr, "starting")
	ended := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, out)
		ended <- errors.Join(err, cmd.Wait())
	}()
	again, late := time.NewTicker(100*time.Millisecond), time.NewTimer(time.Minute)
	defer again.Stop()
	defer late.Stop()
	for {
		select {
		case <-again.C:
			if err := cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
				t.Fatal(err)
			}
			continue
		case <-late.C:
			if err := cmd.Process.Kill(); err != nil {
				t.Error(err)
			}
			<-ended
		case <-ended:
		}
		break
	}
	if got := cmd.ProcessState.ExitCode(); got != exitError || !strings.Contains(stderr.String(), "cut short by a second signal") {
		t.Errorf("status %d\n%s", got, stderr.String())
	}
}

// two is a backend of two regions whose leaders move at once.
type two struct {
	leader   [2]uint64
	pdLeader uint64
}

func (b *two) Regions(context.Context, []byte, int) ([]admin.Region, bool, error) {
	peers := []admin.Peer{{Replica: 1, Store: 0xa1}, {Replica: 2, Store: 0xb2}}
	return []admin.Region{
		{ID: 2, End: []byte("m"), Peers: peers, LeaderStore: b.leader[0], Epoch: 1, Term: 5, AppliedIndex: 17, Revision: 40},
		{ID: 3, Start: []byte("m"), Peers: peers, LeaderStore: b.leader[1], Epoch: 1, Term: 6, AppliedIndex: 21, Revision: 40, ItemsRetained: 1},
	}, false, nil
}

func (b *two) TransferRegion(_ context.Context, region, store uint64) error {
	if region < 2 || region > 3 {
		return fmt.Errorf("region %d: %w", region, admin.ErrNotFound)
	}
	b.leader[region-2] = store
	return nil
}

func (b *two) PD(context.Context) (admin.PD, error) {
	return admin.PD{ClusterID: 0xc1, LeaderStore: b.pdLeader, Term: 2, Cut: 9, Revision: 40, CompactRevision: -1, Regions: 2, Stores: []admin.Store{
		{ID: 0xa1, Name: "n1", PeerURLs: []string{"http://127.0.0.1:2380"}, PDVoter: true, Alive: true}, {ID: 0xb2, Name: "n2", PDVoter: true}}}, nil
}

func (b *two) TransferPD(_ context.Context, store uint64) error {
	b.pdLeader = store
	return nil
}

func TestAdminCommands(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	admin.Register(s, &two{leader: [2]uint64{0xa1, 0xa1}, pdLeader: 0xa1})
	served := make(chan error, 1)
	go func() { served <- s.Serve(lis) }()
	defer func() {
		s.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	// A dead endpoint first: the next one is asked.
	eps := "--endpoint=127.0.0.1:1,http://" + lis.Addr().String()
	for _, tc := range []struct {
		args   string
		status int
		want   string
	}{
		{"region list", 0, "REGION  START    END    LEADER  REPLICAS  EPOCH  TERM  APPLIED  REVISION  RETAINED\n" +
			"2       (first)  \"m\"    n1      n1,n2     1      5     17       40        0\n" +
			"3       \"m\"      (end)  n1      n1,n2     1      6     21       40        1\n"},
		{"region transfer 3 n2", 0, "region 3 is led by n2\n"},
		{"region transfer 2 b2", 0, "region 2 is led by n2\n"},
		{"region transfer 2 161", 0, "region 2 is led by n1\n"},
		{"region transfer 2 n2", 0, "region 2 is led by n2\n"},
		{"region list -o json", 0, `"leaderStore": 178`},
		{"region transfer 9 n2", 1, "region 9: not found"},
		{"region transfer 3 n9", 1, `no store has the name or id "n9"`},
		{"pd transfer n2", 0, "the placement group is led by n2\n"},
		{"pd status", 0, "c1       multi-group  n2"},
		{"pd status -o json", 0, `"cut": 9`},
		{"pd status -o xml", 1, "--write-out must be table or json"},
	} {
		var stdout, stderr strings.Builder
		got := runCommand(append(strings.Fields(tc.args), eps), &stdout, &stderr)
		if got != tc.status || !strings.Contains(stdout.String()+stderr.String(), tc.want) {
			t.Errorf("braid %s: status %d\n%s%s\nwant %d and\n%s", tc.args, got, stdout.String(), stderr.String(), tc.status, tc.want)
		}
	}
}

func TestExplainCluster(t *testing.T) {
	for size, want := range map[int]string{1: "\n1 node is ready. Use it with etcdctl:", 3: "\n3 nodes are ready. Use them with etcdctl:"} {
		var b strings.Builder
		if err := explainCluster(&b, &cluster.State{Nodes: make([]cluster.Node, size)}, "d"); err != nil || !strings.Contains(b.String(), want) || !strings.Contains(b.String(), "braid cluster stop --dir d\n") {
			t.Errorf("%d: %v\n%s", size, err, b.String())
		}
	}
}
