// Package cluster runs a cluster of several nodes on one machine, for trying things out: each node
// is an ordinary process of a given binary with a data directory and two ports of its own, all
// described by a state file in the cluster's directory.
//
// The state file is the only memory: `start` writes it before the first process is started,
// `status` and `stop` read it, and `start` on a stopped cluster brings the same nodes up again.
// A process is signalled only after its identity (process id and the moment it was started) has
// been compared with the state file, so that a recycled process id is never hit.
package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// DefaultDir is where a cluster lies when nothing else is said.
const DefaultDir = "braid-cluster"

const (
	stateFile   = "cluster.json"
	stateFormat = 1

	// nodesMax bounds a local cluster; more of them would only compete for the same disk.
	nodesMax = 15
)

// Node is one process of the cluster.
type Node struct {
	Name    string `json:"name"`
	Client  string `json:"client_url"`
	Peer    string `json:"peer_url"`
	DataDir string `json:"data_dir"` // relative to the cluster's directory
	Log     string `json:"log"`      // likewise
	Process Handle `json:"process"`  // zero when it is stopped
}

// State is what the state file holds.
type State struct {
	Format int      `json:"format"`
	Token  string   `json:"token"`
	Binary string   `json:"binary"`
	Args   []string `json:"args"` // further flags of every node
	Nodes  []Node   `json:"nodes"`
	// Untried is set until a node has been ready: nothing that was asked for has worked yet.
	Untried bool `json:"untried,omitempty"`
}

// ErrNone is returned when a directory holds no cluster.
var ErrNone = errors.New("no cluster here")

// DirFlag is how a command names the directory, "" for the default.
func DirFlag(dir string) string {
	if dir == DefaultDir {
		return ""
	}
	return " --dir " + dir
}

// Load reads the state of the cluster in dir.
func Load(dir string) (*State, error) {
	path := filepath.Join(dir, stateFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w (start one with: braid cluster start%s)", dir, ErrNone, DirFlag(dir))
	}
	if err != nil {
		return nil, err
	}
	s := &State{}
	if err := json.Unmarshal(b, s); err != nil {
		return nil, fmt.Errorf("%s is damaged: %w", path, err)
	}
	if s.Format != stateFormat {
		return nil, fmt.Errorf("%s has version %d and this binary reads version %d", path, s.Format, stateFormat)
	}
	return s, nil
}

// save replaces the state file at once, so that an interrupted command leaves a readable one.
func (s *State) save(dir string) error {
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(dir, stateFile)
	if err := os.WriteFile(path+".tmp", append(b, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// plan describes a new cluster.
func plan(o Options) (*State, error) {
	if o.Nodes < 1 || o.Nodes > nodesMax {
		return nil, fmt.Errorf("--nodes must be between 1 and %d", nodesMax)
	}
	if o.BasePort < 1 || o.BasePort+2*o.Nodes > 65536 {
		return nil, fmt.Errorf("--base-port must leave room for %d ports below 65536", 2*o.Nodes)
	}
	abs, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, err
	}
	s := &State{Format: stateFormat, Binary: o.Binary, Args: o.Args, Untried: true,
		// The directory in the token keeps two local clusters apart should their ports ever meet.
		Token: "local " + abs}
	for i := range o.Nodes {
		name := fmt.Sprintf("n%d", i+1)
		s.Nodes = append(s.Nodes, Node{
			Name:    name,
			Client:  fmt.Sprintf("http://127.0.0.1:%d", o.BasePort+2*i),
			Peer:    fmt.Sprintf("http://127.0.0.1:%d", o.BasePort+2*i+1),
			DataDir: name + ".braid",
			Log:     name + ".log",
		})
	}
	return s, nil
}

// args is the command line of one node.
func (s *State) args(dir string, n *Node) []string {
	var members []string
	for _, m := range s.Nodes {
		members = append(members, m.Name+"="+m.Peer)
	}
	return append([]string{
		"--name=" + n.Name,
		"--data-dir=" + filepath.Join(dir, n.DataDir),
		"--listen-client-urls=" + n.Client,
		"--advertise-client-urls=" + n.Client,
		"--listen-peer-urls=" + n.Peer,
		"--initial-advertise-peer-urls=" + n.Peer,
		"--initial-cluster=" + strings.Join(members, ","),
		"--initial-cluster-token=" + s.Token,
		"--initial-cluster-state=new",
	}, s.Args...)
}

// Endpoints lists the client URLs, separated by commas, as etcdctl takes them.
func (s *State) Endpoints() string {
	var eps []string
	for _, n := range s.Nodes {
		eps = append(eps, n.Client)
	}
	return strings.Join(eps, ",")
}
