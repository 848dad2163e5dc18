package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	pollInterval = 20 * time.Millisecond
	// readyTimeout bounds the wait for a cluster that is being started.
	readyTimeout = 60 * time.Second
	// stopTimeout is how long a node may take to stop before it is killed.
	stopTimeout = 10 * time.Second
)

// Options describe a cluster to start.
type Options struct {
	Dir      string
	Nodes    int
	BasePort int      // node i serves clients on BasePort+2i and peers on the port above
	Binary   string   // the program to run
	Args     []string // further flags of every node
	Out      io.Writer
	// Given says which of Nodes, BasePort and Args were asked for explicitly; a cluster that
	// exists already is not changed by the others' defaults.
	Given struct{ Nodes, BasePort, Args bool }
}

// Start starts the nodes that do not run yet and waits until all of them are ready. When one
// fails to become ready, those that this call started are stopped again.
func Start(ctx context.Context, o Options) (*State, error) {
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, err
	}
	o.Dir = dir
	s, err := Load(dir)
	switch {
	case errors.Is(err, ErrNone), err == nil && s.Untried && !s.anyAlive(): // what failed may be asked for otherwise
		if s, err = plan(o); err != nil {
			return nil, err
		}
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	default:
		if err := s.sameAs(o); err != nil {
			return nil, err
		}
		s.Binary = o.Binary
	}
	if err := s.portsFree(); err != nil {
		return nil, err // before the state is written, so that another base port can be tried
	}
	if err := s.save(dir); err != nil {
		return nil, err
	}
	var mine []*child
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if n.Process.Alive() {
			fmt.Fprintf(o.Out, "%s already runs (process %d)\n", n.Name, n.Process.PID)
			continue
		}
		c, err := s.launch(dir, n)
		if err != nil {
			return nil, errors.Join(err, s.stopChildren(dir, mine))
		}
		mine = append(mine, c)
		if err := s.save(dir); err != nil {
			return nil, errors.Join(err, s.stopChildren(dir, mine))
		}
		fmt.Fprintf(o.Out, "%s started (process %d), log %s\n", n.Name, n.Process.PID, filepath.Join(dir, n.Log))
	}
	if err := s.waitReady(ctx, dir, mine, o.Out); err != nil {
		return nil, errors.Join(err, s.stopChildren(dir, mine))
	}
	return s, nil
}

func (s *State) anyAlive() bool {
	return slices.ContainsFunc(s.Nodes, func(n Node) bool { return n.Process.Alive() })
}

// sameAs refuses options that contradict a cluster that exists.
func (s *State) sameAs(o Options) error {
	want, err := plan(o)
	if err != nil {
		return err
	}
	var diff []string
	if o.Given.Nodes && len(s.Nodes) != o.Nodes {
		diff = append(diff, fmt.Sprintf("it has %d nodes", len(s.Nodes)))
	}
	if o.Given.BasePort && s.Nodes[0].Client != want.Nodes[0].Client {
		diff = append(diff, "it serves clients from "+s.Nodes[0].Client)
	}
	if o.Given.Args && !slices.Equal(s.Args, o.Args) {
		diff = append(diff, fmt.Sprintf("its nodes have the flags %q", s.Args))
	}
	if len(diff) > 0 {
		return fmt.Errorf("%s holds a cluster already: %s; start it without these flags, or use another --dir", o.Dir, strings.Join(diff, ", "))
	}
	return nil
}

// portsFree checks the ports of the nodes that do not run. A stranger on one of them would not
// only make a node fail: it could also answer in its place.
func (s *State) portsFree() error {
	for _, n := range s.Nodes {
		if n.Process.Alive() {
			continue
		}
		for _, u := range []string{n.Client, n.Peer} {
			l, err := net.Listen("tcp", strings.TrimPrefix(u, "http://"))
			if err != nil {
				return fmt.Errorf("%s cannot be started: %w; another process uses the port: stop it, or start a cluster with another --base-port and --dir", n.Name, err)
			}
			if err := l.Close(); err != nil {
				return err
			}
		}
	}
	return nil
}

// child is a process that this call started.
type child struct {
	node    *Node
	exited  chan error // receives what Wait says, once
	logFrom int64      // where its part of the log begins
}

// launch starts one node, detached from this process and its terminal.
func (s *State) launch(dir string, n *Node) (*child, error) {
	log, err := os.OpenFile(filepath.Join(dir, n.Log), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close() // the child has its own copy
	info, err := log.Stat()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(s.Binary, s.args(dir, n)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = withoutETCD(os.Environ())
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", n.Name, err)
	}
	c := &child{node: n, exited: make(chan error, 1), logFrom: info.Size()}
	go func() { c.exited <- cmd.Wait() }() // ends with the child, or with this process
	h, err := handleOf(cmd.Process.Pid)
	if err != nil {
		return nil, c.failed(dir, "ended at once: "+exitText(<-c.exited))
	}
	n.Process = h
	return c, nil
}

// withoutETCD drops variables that would configure the nodes behind the state file's back.
func withoutETCD(environ []string) []string {
	return slices.DeleteFunc(environ, func(kv string) bool { return strings.HasPrefix(kv, "ETCD_") })
}

// waitReady waits until every node answers /readyz, reporting each as it becomes ready.
func (s *State) waitReady(ctx context.Context, dir string, mine []*child, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	begin := time.Now()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	waiting := make([]*Node, 0, len(s.Nodes))
	for i := range s.Nodes {
		waiting = append(waiting, &s.Nodes[i])
	}
	for {
		for _, c := range mine {
			select {
			case err := <-c.exited:
				c.exited <- err
				return c.failed(dir, "ended before it was ready: "+exitText(err))
			default:
			}
		}
		var still []*Node
		for _, n := range waiting {
			if err := Ready(ctx, n.Client); err != nil {
				still = append(still, n)
				continue
			}
			if s.Untried {
				s.Untried = false
				if err := s.save(dir); err != nil {
					return err
				}
			}
			fmt.Fprintf(out, "%s ready after %s: %s\n", n.Name, time.Since(begin).Round(10*time.Millisecond), n.Client)
		}
		if waiting = still; len(waiting) == 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			c := &child{node: waiting[0]} // unless it is ours, whose part of the log begins later
			if i := slices.IndexFunc(mine, func(m *child) bool { return m.node == waiting[0] }); i >= 0 {
				c = mine[i]
			}
			return c.failed(dir, fmt.Sprintf("is not ready after %s", time.Since(begin).Round(time.Second)))
		}
	}
}

func exitText(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}

// Ready asks a node whether it serves requests.
func Ready(ctx context.Context, client string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, client+"/readyz", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4096))
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", resp.Status, strings.TrimSpace(string(body)))
	}
	return nil
}

const (
	tailBytes = 64 << 10 // how much of a log is looked at
	tailLines = 5        // and shown
)

// NodeError says that a node did not become ready.
type NodeError struct {
	Node string
	What string
	Log  string   // path
	Last []string // the last lines that this run wrote there, unless What has said it all
}

func (e *NodeError) Error() string {
	return fmt.Sprintf("%s %s (its log is %s)", e.Node, e.What, e.Log)
}

// failed is the error of a node that is not ready: with what the program said last, if that was why it
// ended, else with the end of the log.
func (c *child) failed(dir, what string) error {
	e := &NodeError{Node: c.node.Name, What: what, Log: filepath.Join(dir, c.node.Log)}
	lines := lastLines(e.Log, c.logFrom)
	if n := len(lines); n > 0 {
		if why, ok := strings.CutPrefix(lines[n-1], "braid: "); ok {
			e.What += ": " + why
			return e
		}
	}
	e.Last = lines
	return e
}

// lastLines are those at the end of a log, none from before an offset.
func lastLines(path string, from int64) []string {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil // there is a better error to report
	}
	b = b[min(from, int64(len(b))):]
	if len(b) > tailBytes {
		b = b[len(b)-tailBytes:]
	}
	lines := strings.FieldsFunc(string(b), func(r rune) bool { return r == '\n' })
	return lines[max(0, len(lines)-tailLines):]
}

// Stop stops the nodes that run and returns how many those were. Data and state file stay, so
// that the cluster can be started again.
func Stop(ctx context.Context, dir string, out io.Writer) (int, error) {
	s, err := Load(dir)
	if err != nil {
		return 0, err
	}
	var running []*Node
	for i := range s.Nodes {
		if n := &s.Nodes[i]; n.Process.Alive() {
			running = append(running, n)
		}
	}
	err = s.stopNodes(ctx, dir, running, out)
	return len(running), err
}

func (s *State) stopChildren(dir string, mine []*child) error {
	var ns []*Node
	for _, c := range mine {
		ns = append(ns, c.node)
	}
	return s.stopNodes(context.Background(), dir, ns, io.Discard)
}

// stopNodes asks all of them to stop, waits, and kills those that do not.
func (s *State) stopNodes(ctx context.Context, dir string, ns []*Node, out io.Writer) error {
	var errs []error
	send := func(n *Node, sig syscall.Signal) {
		if err := n.Process.signal(sig); err != nil && !errors.Is(err, errGone) {
			errs = append(errs, fmt.Errorf("%s: %w", n.Name, err))
		}
	}
	for _, n := range ns {
		send(n, syscall.SIGTERM)
	}
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	if !allGone(ctx, ns) {
		for _, n := range ns {
			if n.Process.Alive() {
				fmt.Fprintf(out, "%s does not stop; killing it\n", n.Name)
				send(n, syscall.SIGKILL)
			}
		}
		kctx, kcancel := context.WithTimeout(context.Background(), stopTimeout)
		defer kcancel()
		allGone(kctx, ns)
	}
	for _, n := range ns {
		if n.Process.Alive() {
			errs = append(errs, fmt.Errorf("%s (process %d) cannot be stopped", n.Name, n.Process.PID))
			continue
		}
		n.Process = Handle{}
		fmt.Fprintf(out, "%s stopped\n", n.Name)
	}
	return errors.Join(append(errs, s.save(dir))...)
}

// allGone waits until none of the processes runs; false when ctx ends first.
func allGone(ctx context.Context, ns []*Node) bool {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if !slices.ContainsFunc(ns, func(n *Node) bool { return n.Process.Alive() }) {
			return true
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
	}
}
