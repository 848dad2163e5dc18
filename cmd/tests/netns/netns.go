// Package netns gives each node of a test cluster a network namespace of its own and cuts the ways
// between them. Packets between two namespaces that are cut off from each other vanish, as behind
// a failed switch: connections stay open and hear nothing. The host, where clients and admin
// commands run, reaches every namespace all the time.
//
// It needs Linux, root and the ip command. A Net is owned by one goroutine. What a program that was
// killed left behind is removed by the next New.
package netns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// Net is a bridge with a namespace for each node on it. Nodes are numbered from 0.
type Net struct {
	prefix string // of all names
	subnet string // first three numbers of the addresses
	size   int
}

const (
	prefix = "brd" // of names: an interface's has at most 15 characters
	// nowhere is an address of the link layer that nobody has.
	nowhere = "02:00:00:00:00:01"
)

// New makes the bridge and size namespaces.
func New(size int) (*Net, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("netns: needs root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		return nil, fmt.Errorf("netns: %w", err)
	}
	sweep()
	pid := os.Getpid()
	n := &Net{prefix: fmt.Sprintf("%s%d", prefix, pid), subnet: fmt.Sprintf("10.213.%d", pid%250+1), size: size}
	if err := n.make(); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

func (n *Net) make() error {
	bridge := n.prefix + "b"
	steps := [][]string{
		{"link", "add", bridge, "type", "bridge"},
		{"addr", "add", n.subnet + ".254/24", "dev", bridge},
		{"link", "set", bridge, "up"},
	}
	for i := range n.size {
		ns, veth := n.name(i), fmt.Sprintf("%sv%d", n.prefix, i)
		steps = append(steps,
			[]string{"netns", "add", ns},
			[]string{"link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", ns},
			[]string{"link", "set", veth, "master", bridge, "up"},
			[]string{"-n", ns, "link", "set", "lo", "up"},
			[]string{"-n", ns, "addr", "add", n.Addr(i) + "/24", "dev", "eth0"},
			[]string{"-n", ns, "link", "set", "eth0", "up"},
		)
	}
	for _, s := range steps {
		if err := ip(s...); err != nil {
			return err
		}
	}
	return nil
}

func (n *Net) name(i int) string { return fmt.Sprintf("%sn%d", n.prefix, i) }

// Addr is the address of node i.
func (n *Net) Addr(i int) string { return fmt.Sprintf("%s.%d", n.subnet, i+1) }

// Wrap is what to put before a command so that it runs in the namespace of node i. The process is
// replaced by the command.
func (n *Net) Wrap(i int) []string { return []string{"ip", "netns", "exec", n.name(i)} }

// Cut drops all packets from node i to node j. Cutting both directions is a partition.
func (n *Net) Cut(i, j int) error {
	return ip("-n", n.name(i), "neigh", "replace", n.Addr(j), "lladdr", nowhere, "nud", "permanent", "dev", "eth0")
}

// Heal ends every cut.
func (n *Net) Heal() error {
	var errs []error
	for i := range n.size {
		errs = append(errs, ip("-n", n.name(i), "neigh", "flush", "nud", "permanent", "dev", "eth0"))
	}
	return errors.Join(errs...)
}

// Close removes everything. No process may run in the namespaces any more.
func (n *Net) Close() error {
	var errs []error
	for i := range n.size {
		errs = append(errs, ip("netns", "del", n.name(i)))
	}
	return errors.Join(append(errs, ip("link", "del", n.prefix+"b"))...)
}

// sweep removes what programs left behind that are gone. What cannot be removed is in nobody's way:
// names and addresses depend on the process.
func sweep() {
	out, err := exec.Command("ip", "-br", "link", "show", "type", "bridge").Output()
	if err != nil {
		return
	}
	for line := range strings.Lines(string(out)) {
		name, _, _ := strings.Cut(line, " ")
		pid, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(name, prefix), "b"))
		if err != nil || !strings.HasPrefix(name, prefix) || !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			continue
		}
		_ = ip("link", "del", name)
		spaces, err := exec.Command("ip", "netns", "list").Output()
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(spaces)) {
			if ns, _, _ := strings.Cut(strings.TrimSpace(line), " "); strings.HasPrefix(ns, fmt.Sprintf("%s%dn", prefix, pid)) {
				_ = ip("netns", "del", ns)
			}
		}
	}
}

func ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
