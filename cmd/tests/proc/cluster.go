package proc

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"
)

// Cluster is a set of nodes that know each other from --initial-cluster.
type Cluster struct {
	Nodes []*Node
}

// Place is where a node lives: its addresses and, if need be, what its command is put behind.
type Place struct {
	Client, Peer string // host:port
	Wrap         []string
}

// NewCluster prepares size nodes named n1, n2, ... of one program below dir, on free loopback
// addresses; args go to each.
func NewCluster(bin, dir string, size int, args ...string) (*Cluster, error) {
	addrs, err := FreeAddrs(2 * size)
	if err != nil {
		return nil, err
	}
	places := make([]Place, size)
	for i := range places {
		places[i] = Place{Client: addrs[2*i], Peer: addrs[2*i+1]}
	}
	return NewClusterAt(bin, dir, places, args...), nil
}

// NewClusterAt is NewCluster with a node in each place.
func NewClusterAt(bin, dir string, places []Place, args ...string) *Cluster {
	c := &Cluster{}
	var members []string
	for i, p := range places {
		name := fmt.Sprintf("n%d", i+1)
		c.Nodes = append(c.Nodes, New(Config{
			Name: name, Bin: bin, Dir: filepath.Join(dir, name), Client: p.Client, Peer: p.Peer, Wrap: p.Wrap, Args: args,
		}))
		members = append(members, name+"=http://"+p.Peer)
	}
	for _, n := range c.Nodes {
		n.InitialCluster = strings.Join(members, ",")
	}
	return c
}

// Start launches all nodes together (none is ready before a quorum runs) and waits for all.
func (c *Cluster) Start(ctx context.Context) error {
	for _, n := range c.Nodes {
		if err := n.Launch(); err != nil {
			return err
		}
	}
	for _, n := range c.Nodes {
		if err := n.WaitReady(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Kill ends all nodes at once, paused ones too.
func (c *Cluster) Kill() error {
	var errs []error
	for _, n := range c.Nodes {
		errs = append(errs, n.Kill())
	}
	return errors.Join(errs...)
}

// Endpoints lists the client addresses in node order.
func (c *Cluster) Endpoints() []string {
	var endpoints []string
	for _, n := range c.Nodes {
		endpoints = append(endpoints, n.Endpoint())
	}
	return endpoints
}

// Poll calls check at once and then every interval until it returns true or an error, or ctx ends.
func Poll(ctx context.Context, interval time.Duration, check func() (bool, error)) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		if ok, err := check(); err != nil || ok {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Wait lets d pass, or less when ctx ends first.
func Wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
