// Command bench compares braid with etcd on one machine and writes the result as a markdown table.
//
//	bench -mode compare [-- FLAGS]   braid bench compare, with braid and etcd built here: the table of
//	                   docs/bench/compare.md
//	bench -mode puts   three nodes each (-nodes), 256 clients putting (-clients), rounds in turn: puts
//	                   per second, syncs of the log per put and node, CPU time of the servers per
//	                   1,000 puts
//	bench -mode load   one node each, two million keys: time from start to ready and memory after a
//	                   kill -9
//	bench -mode idle   three braid nodes with 1,000 regions: raft messages and CPU while nobody uses
//	                   them
//	bench -mode txns   three braid nodes with five regions, one client: how long a put, a read and
//	                   transactions of ten puts in one and over five regions take
//	bench -mode keepalives   -rate keepalives per second of -leases leases: CPU time of the servers per
//	                   1,000, latency
//	bench -mode leases one node each, -leases leases of an hour: memory, what a put and a grant take
//	                   meanwhile, restart
//
// Clients and servers share the machine, so the numbers are good for the ratio and for nothing else.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"braid/cmd/tests/etcdbin"
	"braid/cmd/tests/proc"
)

// program is one of the two that are compared.
type program struct {
	name       string
	bin        string
	args       []string
	syncMetric string // counts syncs of the log
}

type options struct {
	mode        string
	braid, etcd string
	nodes       int
	rounds      int
	duration    time.Duration
	clients     int
	conns       int
	valueBytes  int
	keys        int
	leases      int
	rate        int
	split       string
	only        string
	out         string
	dir         string
	profiles    string
}

const (
	warmUp       = 3 * time.Second
	startTimeout = time.Minute
)

func main() {
	var o options
	flag.StringVar(&o.mode, "mode", "puts", "puts, load, idle, txns, keepalives or leases")
	flag.StringVar(&o.braid, "braid", "", "braid binary (default: built from this repository)")
	flag.StringVar(&o.etcd, "etcd", "", "etcd binary (default: etcd "+etcdbin.Version+")")
	flag.IntVar(&o.nodes, "nodes", 3, "nodes of each program (mode puts)")
	flag.IntVar(&o.rounds, "rounds", 5, "rounds per program")
	flag.DurationVar(&o.duration, "duration", 10*time.Second, "measured time of a round, after warming up")
	flag.IntVar(&o.clients, "clients", 256, "concurrent clients")
	flag.IntVar(&o.conns, "conns", 16, "connections they share")
	flag.IntVar(&o.valueBytes, "value", 256, "bytes of a value")
	flag.IntVar(&o.keys, "keys", 2_000_000, "keys to load (mode load), keys written to (mode puts)")
	flag.IntVar(&o.leases, "leases", 10_000, "leases (modes keepalives and leases)")
	flag.IntVar(&o.rate, "rate", 10_000, "keepalives per second (mode keepalives)")
	flag.StringVar(&o.split, "region-split-keys", "b,d,f,h,j,l", "braid's regions")
	flag.StringVar(&o.only, "only", "", "run only this program, braid or etcd")
	flag.StringVar(&o.out, "out", "", "append the table to this file")
	flag.StringVar(&o.dir, "dir", "", "folder for data (default: a temporary one)")
	flag.StringVar(&o.profiles, "profiles", "", "keep CPU profiles of all servers in this folder (mode puts); the figures then include profiling")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	programs, err := o.programs()
	if err != nil {
		return err
	}
	if o.mode == "compare" {
		return compare(ctx, o)
	}
	if o.dir == "" {
		dir, err := os.MkdirTemp("", "braid-bench-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		o.dir = dir
	}
	var table string
	switch o.mode {
	case "puts":
		table, err = comparePuts(ctx, o, programs)
	case "load":
		table, err = compareLoad(ctx, o, programs)
	case "idle":
		table, err = measureIdle(ctx, o, programs)
	case "txns":
		table, err = measureTxns(ctx, o, programs)
	case "keepalives":
		table, err = compareKeepAlives(ctx, o, programs)
	case "leases":
		table, err = compareCrowds(ctx, o, programs)
	default:
		err = fmt.Errorf("no mode %q", o.mode)
	}
	if err != nil {
		return err
	}
	text := fmt.Sprintf("### %s: %s\n\n%s\n`go run ./bench %s`\n\n%s", o.mode, time.Now().UTC().Format(time.DateOnly), machine(), strings.Join(os.Args[1:], " "), table)
	fmt.Println(text)
	if o.out == "" {
		return nil
	}
	file, err := os.OpenFile(o.out, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = file.WriteString(text + "\n")
	return errors.Join(err, file.Close())
}

func (o *options) programs() ([]program, error) {
	var err error
	if o.braid == "" && o.only != "etcd" {
		if o.braid, err = etcdbin.Braid(); err != nil {
			return nil, err
		}
	}
	if o.etcd == "" && o.only != "braid" {
		if o.etcd, err = etcdbin.Etcd(); err != nil {
			return nil, err
		}
	}
	all := []program{
		{"braid", o.braid, []string{"--region-split-keys=" + o.split}, "braid_raftstore_wal_sync_duration_seconds_count"},
		{"etcd", o.etcd, []string{"--quota-backend-bytes=8589934592"}, "etcd_disk_wal_fsync_duration_seconds_count"},
	}
	var chosen []program
	for _, p := range all {
		if o.profiles != "" {
			p.args = append(p.args, "--enable-pprof")
		}
		if o.only == "" || o.only == p.name {
			chosen = append(chosen, p)
		}
	}
	return chosen, nil
}

// machine says in a line where the numbers come from.
func machine() string {
	model := runtime.GOARCH
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(info)) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	return fmt.Sprintf("%d cores (%s), servers and clients on the same machine; etcd %s.\n", runtime.NumCPU(), model, etcdbin.Version)
}

// startCluster starts size nodes of p in a fresh folder; stop ends them and removes their data.
func startCluster(ctx context.Context, o options, p program, size int) (c *proc.Cluster, stop func() error, err error) {
	dir, err := os.MkdirTemp(o.dir, p.name+"-")
	if err != nil {
		return nil, nil, err
	}
	c, err = proc.NewCluster(p.bin, dir, size, p.args...)
	if err != nil {
		return nil, nil, err
	}
	stop = func() error { return errors.Join(c.Kill(), os.RemoveAll(dir)) }
	startCtx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := c.Start(startCtx); err != nil {
		return nil, nil, errors.Join(err, stop())
	}
	return c, stop, nil
}

// dial makes the shared connections, spread over the nodes.
func dial(c *proc.Cluster, conns int) ([]*clientv3.Client, func(), error) {
	var clients []*clientv3.Client
	closeAll := func() {
		for _, client := range clients {
			_ = client.Close() // nothing is under way
		}
	}
	for i := range conns {
		client, err := clientv3.New(clientv3.Config{Endpoints: []string{c.Nodes[i%len(c.Nodes)].Endpoint()}, DialTimeout: 10 * time.Second, Logger: zap.NewNop()})
		if err != nil {
			closeAll()
			return nil, nil, err
		}
		clients = append(clients, client)
	}
	return clients, closeAll, nil
}

// key spreads n evenly over the letters, so that braid's regions share the load.
func key(n int) string {
	const letters = "abcdefghijklm"
	return fmt.Sprintf("%c/%010d", letters[n%len(letters)], n/len(letters))
}

// compare hands over to braid bench compare; its table goes to -out, and what it is made of and the
// picture beside it. Further arguments are flags of braid bench compare.
func compare(ctx context.Context, o options) error {
	if o.out == "" {
		return errors.New("mode compare needs -out FILE.md")
	}
	base := strings.TrimSuffix(o.out, ".md")
	args := append([]string{"bench", "compare", "--etcd=" + o.etcd, "--keep=" + base + ".json", "--plot=" + base + ".svg", "-o", "markdown"}, flag.Args()...)
	cmd := exec.CommandContext(ctx, o.braid, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // it stops its clusters
	var table strings.Builder
	cmd.Stdout, cmd.Stderr = &table, os.Stderr
	if err := cmd.Run(); err != nil {
		return err
	}
	return os.WriteFile(o.out, []byte("# Many groups, one group, etcd\n"+table.String()), 0o644)
}
