package compare

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"braid/cmd/internal/bench"
	"braid/cmd/internal/cluster"
	"braid/cmd/internal/freeport"
)

// Names of systems.
const (
	Multi  = "multi"  // braid, many raft groups
	Single = "single" // braid, one raft group
	Etcd   = "etcd"
)

// System is a program in a mode.
type System struct {
	Name   string // Multi, Single or Etcd
	Binary string
}

// args are the flags of its nodes.
func (s System) args(splits []string) []string {
	switch {
	case s.Name == Single:
		return []string{"--single-group"}
	case s.Name == Etcd:
		return []string{"--quota-backend-bytes=8589934592"} // room for the larger loads
	case len(splits) == 0:
		return nil
	}
	return []string{"--region-split-keys=" + strings.Join(splits, ",")}
}

// servers is a running cluster of a system.
type servers struct {
	system System
	dir    string
	opts   cluster.Options
	state  *cluster.State
}

// start starts nodes of a system with their data below dir.
func start(ctx context.Context, sys System, nodes int, dir string, splits []string) (*servers, error) {
	base, err := freeport.Range(2 * nodes)
	if err != nil {
		return nil, err
	}
	s := &servers{system: sys, dir: dir, opts: cluster.Options{Dir: dir, Nodes: nodes, BasePort: base, Binary: sys.Binary, Args: sys.args(splits), Out: io.Discard}}
	if s.state, err = cluster.Start(ctx, s.opts); err != nil {
		return nil, fmt.Errorf("starting %s: %w", sys.Name, errors.Join(err, os.RemoveAll(dir)))
	}
	return s, nil
}

// stop ends the nodes and removes their data; it does its work also when the run was interrupted.
func (s *servers) stop() error {
	err := s.kill() // nothing of theirs is needed any more
	return errors.Join(err, os.RemoveAll(s.dir))
}

// kill is kill -9 for all nodes; it returns when they have gone.
func (s *servers) kill() error {
	for _, n := range s.state.Nodes {
		if !n.Process.Alive() {
			continue
		}
		if err := syscall.Kill(n.Process.PID, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("%s of %s: %w", n.Name, s.system.Name, err)
		}
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	gone := time.Now().Add(goneTimeout)
	for _, n := range s.state.Nodes {
		// A process whose first thread has ended may still have others in a system call, a sync for
		// example, and they keep its ports.
		for n.Process.Alive() || !free(n.Client) || !free(n.Peer) {
			if time.Now().After(gone) {
				return fmt.Errorf("%s of %s was killed and still holds its ports after %s", n.Name, s.system.Name, goneTimeout)
			}
			<-tick.C
		}
	}
	return nil
}

// goneTimeout bounds the wait for killed processes to let go of their ports.
const goneTimeout = 30 * time.Second

// free says whether nobody listens on the port of a URL.
func free(url string) bool {
	l, err := net.Listen("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		return false
	}
	return l.Close() == nil
}

// restart starts killed nodes again and says how long it took until all were ready.
func (s *servers) restart(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	state, err := cluster.Start(ctx, s.opts)
	if err != nil {
		return 0, fmt.Errorf("restarting %s: %w", s.system.Name, err)
	}
	s.state = state
	return time.Since(began), nil
}

func (s *servers) target() bench.Target {
	var t bench.Target
	for _, n := range s.state.Nodes {
		t.Endpoints = append(t.Endpoints, strings.TrimPrefix(n.Client, "http://"))
	}
	return t
}

// usage is what the servers have used so far, all nodes together.
type usage struct {
	cpu   time.Duration
	syncs float64
	rss   int64 // bytes, now
}

func (s *servers) usage(ctx context.Context) (u usage, err error) {
	for _, n := range s.state.Nodes {
		cpu, err := processCPU(n.Process.PID)
		if err != nil {
			return u, err
		}
		rss, err := processRSS(n.Process.PID)
		if err != nil {
			return u, err
		}
		syncs, err := counter(ctx, n.Client+"/metrics", "braid_raftstore_wal_sync_duration_seconds_count", "etcd_disk_wal_fsync_duration_seconds_count")
		if err != nil {
			return u, err
		}
		u.cpu, u.rss, u.syncs = u.cpu+cpu, u.rss+rss, u.syncs+syncs
	}
	return u, nil
}

// ticksPerSecond is the unit of /proc's times, the same on every port of Linux that Go has.
const ticksPerSecond = 100

// processCPU is the user and system time that a process has used.
func processCPU(pid int) (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	return parseCPU(string(stat))
}

// parseCPU reads a line of /proc/PID/stat.
func parseCPU(stat string) (time.Duration, error) {
	// The second field is the program's name in brackets and may contain spaces.
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc stat line with %d fields", len(fields))
	}
	var ticks int64
	for _, f := range fields[11:13] { // utime, stime
		t, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += t
	}
	return time.Duration(ticks) * time.Second / ticksPerSecond, nil
}

// processRSS is the resident memory of a process, bytes.
func processRSS(pid int) (int64, error) {
	statm, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(statm))
	if len(fields) < 2 {
		return 0, fmt.Errorf("/proc statm line %q", statm)
	}
	pages, err := strconv.ParseInt(fields[1], 10, 64)
	return pages * int64(os.Getpagesize()), err
}

// counter reads the first of the named metrics that a node has, summed over its labels.
func counter(ctx context.Context, url string, names ...string) (float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	sums, err := sumMetrics(resp.Body, names)
	if err != nil {
		return 0, err
	}
	for _, name := range names {
		if v, ok := sums[name]; ok {
			return v, nil
		}
	}
	return 0, fmt.Errorf("%s has none of the metrics %s", url, strings.Join(names, ", "))
}

// sumMetrics reads Prometheus' text format.
func sumMetrics(r io.Reader, names []string) (map[string]float64, error) {
	sums := map[string]float64{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		for _, name := range names {
			rest, ok := strings.CutPrefix(lines.Text(), name)
			if !ok || rest == "" || rest[0] != ' ' && rest[0] != '{' {
				continue
			}
			fields := strings.Fields(rest[strings.LastIndexByte(rest, '}')+1:])
			if len(fields) == 0 {
				return nil, fmt.Errorf("metric line %q", lines.Text())
			}
			v, err := strconv.ParseFloat(fields[0], 64)
			if err != nil {
				return nil, err
			}
			sums[name] += v
		}
	}
	return sums, lines.Err()
}

// device is the block device below a directory.
type device struct{ major, minor uint64 }

// deviceOf finds the device that holds dir.
func deviceOf(dir string) (device, error) {
	var st syscall.Stat_t
	if err := syscall.Stat(dir, &st); err != nil {
		return device{}, err
	}
	// glibc's encoding of dev_t.
	dev := uint64(st.Dev)
	return device{major: dev>>8&0xfff | dev>>32&^0xfff, minor: dev&0xff | dev>>12&^0xff}, nil
}

// written is how many bytes the device has been given to write, by everybody.
func (d device) written() (int64, error) {
	stats, err := os.ReadFile("/proc/diskstats")
	if err != nil {
		return 0, err
	}
	return parseWritten(string(stats), d)
}

// parseWritten reads /proc/diskstats.
func parseWritten(stats string, d device) (int64, error) {
	for line := range strings.Lines(stats) {
		f := strings.Fields(line)
		if len(f) < 10 || f[0] != strconv.FormatUint(d.major, 10) || f[1] != strconv.FormatUint(d.minor, 10) {
			continue
		}
		const sector = 512 // bytes, in this file always
		sectors, err := strconv.ParseInt(f[9], 10, 64)
		return sectors * sector, err
	}
	return 0, fmt.Errorf("/proc/diskstats has no device %d:%d: the directory is not on a disk of its own kind (tmpfs, overlay); use --dir", d.major, d.minor)
}

// freshDir makes a new directory for a cluster.
func freshDir(dir, name string) (string, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	d, err := os.MkdirTemp(dir, name+"-")
	return filepath.Clean(d), err
}
