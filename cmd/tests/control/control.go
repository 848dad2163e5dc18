// Package control looks at and moves the leaders of a running cluster, as an operator would: through
// the binary's own admin commands, or through etcd's Maintenance service.
package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"braid/cmd/tests/proc"
)

// Leaders is who leads what at a moment, by node index, with the term: the region's number or
// Oracle as key. etcd has one group only, which is Oracle.
type Leaders map[string]Leader

// Leader is the leader of one group. Node is -1 when it is not known.
type Leader struct {
	Node int
	Term uint64
}

// Oracle names the group that numbers revisions.
const Oracle = "oracle"

// ChangedSince lists the groups whose leader or term differs from an earlier look.
func (l Leaders) ChangedSince(before Leaders) []string {
	var changed []string
	for _, group := range slices.Sorted(maps.Keys(l)) {
		old, now := before[group], l[group]
		if now.Node >= 0 && (now.Node != old.Node || now.Term > old.Term) {
			changed = append(changed, group)
		}
	}
	return changed
}

// Known says whether every group has a leader.
func (l Leaders) Known() bool {
	for _, leader := range l {
		if leader.Node < 0 {
			return false
		}
	}
	return len(l) > 0
}

// Regions lists the groups that hold keys.
func (l Leaders) Regions() []string {
	groups := slices.Sorted(maps.Keys(l))
	if len(groups) == 1 {
		return groups
	}
	return slices.DeleteFunc(groups, func(g string) bool { return g == Oracle })
}

// Control looks at and moves leaders of a running cluster.
type Control interface {
	// Leaders asks the given node.
	Leaders(ctx context.Context, node int) (Leaders, error)
	// Transfer moves group's leadership to a node; the move may be refused.
	Transfer(ctx context.Context, group string, from Leader, to int) error
}

// Etcd controls an etcd. It works through etcd's own Maintenance service.
type Etcd struct{ Cluster *proc.Cluster }

func (Etcd) dial(endpoint string) (*grpc.ClientConn, error) {
	return grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

func (c Etcd) status(ctx context.Context, node int) (*pb.StatusResponse, error) {
	conn, err := c.dial(c.Cluster.Nodes[node].Endpoint())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return pb.NewMaintenanceClient(conn).Status(ctx, &pb.StatusRequest{}, grpc.WaitForReady(true))
}

func (c Etcd) Leaders(ctx context.Context, node int) (Leaders, error) {
	asked, err := c.status(ctx, node)
	if err != nil {
		return nil, err
	}
	leader := Leader{Node: -1, Term: asked.RaftTerm}
	for i, n := range c.Cluster.Nodes {
		if !n.Running() {
			continue
		}
		if s, err := c.status(ctx, i); err == nil && s.Header.MemberId == asked.Leader {
			leader.Node = i
		}
	}
	return Leaders{Oracle: leader}, nil
}

func (c Etcd) Transfer(ctx context.Context, _ string, from Leader, to int) error {
	target, err := c.status(ctx, to)
	if err != nil {
		return err
	}
	conn, err := c.dial(c.Cluster.Nodes[from.Node].Endpoint())
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = pb.NewMaintenanceClient(conn).MoveLeader(ctx, &pb.MoveLeaderRequest{TargetID: target.Header.MemberId})
	return err
}

// Braid controls a braid. It works through the binary's own admin commands, as an operator would.
type Braid struct{ Cluster *proc.Cluster }

func (c Braid) run(ctx context.Context, node int, args ...string) ([]byte, error) {
	n := c.Cluster.Nodes[node]
	cmd := exec.CommandContext(ctx, n.Bin, append(args, "--endpoints="+n.Endpoint())...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("braid %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return out, nil
}

// jsonNumber accepts 64-bit integers as numbers and, as protobuf's JSON has them, as strings.
type jsonNumber uint64

func (n *jsonNumber) UnmarshalJSON(data []byte) error {
	v, err := strconv.ParseUint(strings.Trim(string(data), `"`), 0, 64)
	*n = jsonNumber(v)
	return err
}

// pdStatus is what is read of `braid pd status -o json`.
type pdStatus struct {
	LeaderStore jsonNumber `json:"leaderStore"`
	Term        jsonNumber `json:"term"`
	Stores      []struct {
		ID   jsonNumber `json:"id"`
		Name string     `json:"name"`
	} `json:"stores"`
}

// regionList is what is read of `braid region list -o json`.
type regionList struct {
	Regions []struct {
		ID          jsonNumber `json:"id"`
		LeaderStore jsonNumber `json:"leaderStore"`
		Term        jsonNumber `json:"term"`
	} `json:"regions"`
}

func (c Braid) pd(ctx context.Context, node int) (*pdStatus, error) {
	out, err := c.run(ctx, node, "pd", "status", "-o", "json")
	if err != nil {
		return nil, err
	}
	pd := &pdStatus{}
	if err := json.Unmarshal(out, pd); err != nil {
		return nil, fmt.Errorf("braid pd status: %w: %s", err, out)
	}
	return pd, nil
}

// nodeOf finds the node of a store by the name it registered.
func (c Braid) nodeOf(pd *pdStatus, store jsonNumber) int {
	for _, s := range pd.Stores {
		if s.ID == store && store != 0 {
			return slices.IndexFunc(c.Cluster.Nodes, func(n *proc.Node) bool { return n.Name == s.Name })
		}
	}
	return -1
}

func (c Braid) Leaders(ctx context.Context, node int) (Leaders, error) {
	pd, err := c.pd(ctx, node)
	if err != nil {
		return nil, err
	}
	out, err := c.run(ctx, node, "region", "list", "-o", "json")
	if err != nil {
		return nil, err
	}
	list := regionList{}
	if err := json.Unmarshal(out, &list); err != nil {
		return nil, fmt.Errorf("braid region list: %w: %s", err, out)
	}
	if len(list.Regions) == 0 {
		return nil, errors.New("braid region list shows no regions")
	}
	leaders := Leaders{Oracle: {c.nodeOf(pd, pd.LeaderStore), uint64(pd.Term)}}
	for _, r := range list.Regions {
		leaders[fmt.Sprint(r.ID)] = Leader{c.nodeOf(pd, r.LeaderStore), uint64(r.Term)}
	}
	return leaders, nil
}

func (c Braid) Transfer(ctx context.Context, group string, from Leader, to int) error {
	var err error
	store := c.Cluster.Nodes[to].Name
	if group == Oracle {
		_, err = c.run(ctx, from.Node, "pd", "transfer", store)
	} else {
		_, err = c.run(ctx, from.Node, "region", "transfer", group, store)
	}
	return err
}
