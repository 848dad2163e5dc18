// Package proc starts store servers (braid or etcd: they take the same flags) as real processes on
// free loopback ports and does to them what an operator, a scheduler or a failing machine does:
// stop, kill, pause, continue, restart.
//
// It is not a cluster manager: it knows nothing of leaders or regions. A Node is owned by the
// goroutine that started it; its methods are called from there only, except Exited, Ready and
// LogTail, which any goroutine may use.
//
// Life of a node: New reserves ports and a folder; Start runs the process and waits for the line
// that both servers print when clients can connect; Kill, Pause and Term end or hold the process;
// Start again restarts it on the same ports and data.
package proc

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// ReadyLine is what braid and etcd log once clients are served.
const ReadyLine = "ready to serve client requests"

// logTailLines bounds what a node keeps in memory of its log; all of it is in the log file.
const logTailLines = 40

// Config says how to start one node. Bin, Dir and the addresses are required.
type Config struct {
	Name   string
	Bin    string
	Dir    string // holds data/ and the log file NAME.log
	Client string // host:port for clients
	Peer   string // host:port for peers
	// InitialCluster is the value of --initial-cluster; empty: this node alone.
	InitialCluster string
	// Token is the value of --initial-cluster-token; empty: the program's default.
	Token string
	// Args come after all other flags, so they win over them.
	Args []string
	Env  []string // added to a minimal environment
	// Wrap is a command that replaces itself by what follows it: `ip netns exec NAME`.
	Wrap []string
}

// Node is one server process and what it needs to be started again.
type Node struct {
	Config
	run *run // the last process started; nil before the first Start
}

// run is one process from exec to exit.
type run struct {
	cmd    *exec.Cmd
	ready  chan struct{} // closed when ReadyLine was seen
	exited chan struct{} // closed after Wait returned and the log is complete
	err    error         // of Wait; read after exited

	mu   sync.Mutex
	tail []string // guarded by mu: last lines of the log
}

// New returns a node that is not running yet.
func New(cfg Config) *Node { return &Node{Config: cfg} }

// Endpoint is the address for gRPC clients.
func (n *Node) Endpoint() string { return n.Client }

// DataDir is the folder given as --data-dir.
func (n *Node) DataDir() string { return filepath.Join(n.Dir, "data") }

// LogPath is the file that collects the output of all runs of this node.
func (n *Node) LogPath() string { return filepath.Join(n.Dir, n.Name+".log") }

// Flags returns the command line without the program.
func (n *Node) Flags() []string {
	cluster := n.InitialCluster
	if cluster == "" {
		cluster = n.Name + "=http://" + n.Peer
	}
	flags := []string{
		"--name=" + n.Name,
		"--data-dir=" + n.DataDir(),
		"--listen-client-urls=http://" + n.Client,
		"--advertise-client-urls=http://" + n.Client,
		"--listen-peer-urls=http://" + n.Peer,
		"--initial-advertise-peer-urls=http://" + n.Peer,
		"--initial-cluster=" + cluster,
		"--initial-cluster-state=new",
	}
	if n.Token != "" {
		flags = append(flags, "--initial-cluster-token="+n.Token)
	}
	return append(flags, n.Args...)
}

// Launch starts the process and returns at once.
func (n *Node) Launch() error {
	if n.Running() {
		return fmt.Errorf("%s is already running", n.Name)
	}
	if err := os.MkdirAll(n.Dir, 0o755); err != nil {
		return err
	}
	logFile, err := os.OpenFile(n.LogPath(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	words := append(append(slices.Clone(n.Wrap), n.Bin), n.Flags()...)
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Dir = n.Dir
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + n.Dir}, n.Env...)
	// A test program that dies must not leave servers behind.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StderrPipe()
	if err != nil {
		logFile.Close()
		return err
	}
	cmd.Stdout = cmd.Stderr
	if err := cmd.Start(); err != nil {
		logFile.Close()
		return err
	}
	r := &run{cmd: cmd, ready: make(chan struct{}), exited: make(chan struct{})}
	n.run = r
	go r.follow(out, logFile)
	return nil
}

// follow copies the log until the process has gone, then reaps it.
func (r *run) follow(out io.Reader, logFile *os.File) {
	defer close(r.exited)
	defer logFile.Close()
	lines := bufio.NewReader(out)
	ready := false
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			// The file is for people who look into a failure; a full disk must not stop the test.
			_, _ = logFile.WriteString(line)
			r.mu.Lock()
			r.tail = append(r.tail, strings.TrimRight(line, "\n"))
			if len(r.tail) > logTailLines {
				r.tail = r.tail[1:]
			}
			r.mu.Unlock()
			if !ready && strings.Contains(line, ReadyLine) {
				ready = true
				close(r.ready)
			}
		}
		if err != nil {
			break
		}
	}
	r.err = r.cmd.Wait()
}

// Start launches the process and waits until it says it is ready. An exit before that is an error
// with the end of the log.
func (n *Node) Start(ctx context.Context) error {
	if err := n.Launch(); err != nil {
		return err
	}
	return n.WaitReady(ctx)
}

// WaitReady waits for the ready line of the run that Launch started.
func (n *Node) WaitReady(ctx context.Context) error {
	select {
	case <-n.run.ready:
		return nil
	case <-n.run.exited:
		return fmt.Errorf("%s exited before it was ready (%v):\n%s", n.Name, n.run.err, n.LogTail())
	case <-ctx.Done():
		return fmt.Errorf("%s not ready: %w:\n%s", n.Name, ctx.Err(), n.LogTail())
	}
}

// Running says whether a process was started that has not exited.
func (n *Node) Running() bool {
	if n.run == nil {
		return false
	}
	select {
	case <-n.run.exited:
		return false
	default:
		return true
	}
}

// Exited is closed when the current process has ended and its log is complete.
func (n *Node) Exited() <-chan struct{} { return n.run.exited }

// ExitCode waits for the end of the process; -1 means it was ended by a signal.
func (n *Node) ExitCode(ctx context.Context) (int, error) {
	select {
	case <-n.run.exited:
		return n.run.cmd.ProcessState.ExitCode(), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("%s still runs: %w", n.Name, ctx.Err())
	}
}

// LogTail returns the last lines of the current run's output.
func (n *Node) LogTail() string {
	if n.run == nil {
		return ""
	}
	n.run.mu.Lock()
	defer n.run.mu.Unlock()
	return strings.Join(n.run.tail, "\n")
}

// Kill is kill -9: the process gets no chance to finish anything. It waits for the exit.
func (n *Node) Kill() error {
	if !n.Running() {
		return nil
	}
	if err := n.run.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-n.run.exited
	return nil
}

// Term sends SIGTERM and waits for the exit; when ctx ends first the process is killed and ctx's
// error returned.
func (n *Node) Term(ctx context.Context) error {
	if !n.Running() {
		return nil
	}
	if err := n.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-n.run.exited:
		return nil
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("%s ignores SIGTERM: %w", n.Name, ctx.Err()), n.Kill())
	}
}

// Pause stops the process (SIGSTOP): to its peers a machine that hangs, with all connections open.
func (n *Node) Pause() error { return n.Signal(syscall.SIGSTOP) }

// Resume lets a paused process continue.
func (n *Node) Resume() error { return n.Signal(syscall.SIGCONT) }

// Signal sends sig to the running process.
func (n *Node) Signal(sig syscall.Signal) error {
	err := n.run.cmd.Process.Signal(sig)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// PID is the id of the current process.
func (n *Node) PID() int { return n.run.cmd.Process.Pid }

// CPU is the user and system time the current process has used.
func (n *Node) CPU() (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.PID()))
	if err != nil {
		return 0, err
	}
	// The second field is the program's name in brackets and may contain spaces.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("unexpected /proc stat line of %s", n.Name)
	}
	var ticks int64
	for _, field := range fields[11:13] { // utime, stime
		t, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += t
	}
	const ticksPerSecond = 100 // USER_HZ, the same on every Linux port Go supports
	return time.Duration(ticks) * time.Second / ticksPerSecond, nil
}

// RSS is the resident memory of the current process, bytes.
func (n *Node) RSS() (int64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", n.PID()))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("no VmRSS for %s", n.Name)
}

// FreeAddrs returns n different loopback addresses that nobody listened on a moment ago. Their ports
// lie below the range of outgoing connections, so that none of those takes the place of a process
// that is killed and started again.
func FreeAddrs(n int) ([]string, error) {
	const lowest, end = 12_000, 32_000
	addrs := make([]string, 0, n)
	listeners := make([]net.Listener, 0, n)
	defer func() {
		for _, l := range listeners {
			l.Close()
		}
	}()
	for tries := 0; len(addrs) < n; tries++ {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", lowest+rand.IntN(end-lowest)))
		if err != nil && tries > 100*n {
			return nil, err
		} else if err != nil {
			continue
		}
		listeners = append(listeners, l)
		addrs = append(addrs, l.Addr().String())
	}
	return addrs, nil
}
