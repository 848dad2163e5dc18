package process

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"braid/cmd/tests/proc"
)

// braid runs a subcommand of the program under test.
func braid(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(within(t, 60*time.Second), binary(t), args...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func mustBraid(t *testing.T, args ...string) string {
	t.Helper()
	out, err := braid(t, args...)
	if err != nil {
		t.Fatalf("braid %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return out
}

// TestTransferCommands moves the leadership of a region and of the placement group to each node in
// turn, asking another one; what the commands say afterwards is what the nodes say, and writes go
// on. A store or a region that does not exist is an error.
func TestTransferCommands(t *testing.T) {
	if !isBraid(t) {
		t.Skip("etcd has no such commands")
	}
	c := cluster(t, 3)
	cl := client(t, c.Endpoints()...)
	type entry struct {
		ID          uint64 `json:"id"`
		LeaderStore uint64 `json:"leaderStore"`
	}
	var regions []entry
	list := func(n *proc.Node) {
		t.Helper()
		var out struct {
			Regions []entry `json:"regions"`
		}
		if err := json.Unmarshal([]byte(mustBraid(t, "region", "list", "--endpoints="+n.Endpoint(), "--write-out=json")), &out); err != nil {
			t.Fatal(err)
		}
		regions = out.Regions
	}
	list(c.Nodes[0])
	if len(regions) != 7 {
		t.Fatalf("%d regions, want 7", len(regions))
	}
	region := regions[3].ID
	for i, to := range c.Nodes {
		asked := "--endpoints=" + c.Nodes[(i+1)%3].Endpoint()
		if out := mustBraid(t, "region", "transfer", strconv.FormatUint(region, 10), to.Name, asked); !strings.Contains(out, fmt.Sprintf("region %d is led by %s", region, to.Name)) {
			t.Errorf("region transfer says %q", out)
		}
		if out := mustBraid(t, "pd", "transfer", to.Name, asked); !strings.Contains(out, "the placement group is led by "+to.Name) {
			t.Errorf("pd transfer says %q", out)
		}
		leader := uint64(0)
		if err := proc.Poll(within(t, 10*time.Second), 50*time.Millisecond, func() (bool, error) {
			st, err := cl.Status(t.Context(), to.Endpoint())
			if err != nil {
				return false, err
			}
			leader = st.Header.MemberId
			return st.Leader == leader, nil
		}); err != nil {
			t.Errorf("%s was made leader of the placement group and says that another one is: %v", to.Name, err)
		}
		list(to)
		if got := regions[3]; got.ID != region || got.LeaderStore != leader {
			t.Errorf("region %d is led by %x, want %x", got.ID, got.LeaderStore, leader)
		}
		for _, key := range []string{"a", "g", "z"} {
			if _, err := cl.Put(within(t, 10*time.Second), key, to.Name); err != nil {
				t.Errorf("put %s after the transfer to %s: %v", key, to.Name, err)
			}
		}
	}
	for _, args := range [][]string{{"region", "transfer", "99999", "n1"}, {"region", "transfer", fmt.Sprint(region), "nobody"}, {"pd", "transfer", "nobody"}} {
		out, err := braid(t, append(args, "--endpoints="+c.Nodes[0].Endpoint())...)
		if err == nil || !strings.HasPrefix(out, "braid: ") || strings.Count(strings.TrimSpace(out), "\n") != 0 {
			t.Errorf("braid %v: %v, %q", args, err, out)
		}
	}
}

// TestClusterCommand starts a cluster of three as a user would, uses it, stops it, and finds the
// data when it is started again.
func TestClusterCommand(t *testing.T) {
	if !isBraid(t) {
		t.Skip("etcd has no such command")
	}
	addrs, err := proc.FreeAddrs(1)
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := strings.Cut(strings.TrimPrefix(addrs[0], "http://"), ":")
	dir := "--dir=" + filepath.Join(t.TempDir(), "c")
	t.Cleanup(func() { _, _ = braid(t, "cluster", "stop", dir) })
	out := mustBraid(t, "cluster", "start", "--nodes", "3", "--base-port", port, "--region-split-keys=m", dir)
	if !strings.Contains(out, "3 nodes are ready") {
		t.Fatalf("cluster start says %s", out)
	}
	_, rest, found := strings.Cut(out, "ETCDCTL_ENDPOINTS=")
	if !found {
		t.Fatalf("cluster start names no endpoints: %s", out)
	}
	endpoints := strings.Split(strings.Fields(rest)[0], ",")
	if len(endpoints) != 3 {
		t.Fatalf("endpoints %v", endpoints)
	}
	if _, err := client(t, endpoints...).Put(within(t, 10*time.Second), "k", "v"); err != nil {
		t.Fatal(err)
	}
	if out := mustBraid(t, "cluster", "status", dir); strings.Count(out, "ready") != 3 || strings.Contains(out, "not ready") {
		t.Errorf("cluster status says %s", out)
	}
	mustBraid(t, "cluster", "stop", dir)
	if out := mustBraid(t, "cluster", "status", dir); strings.Count(out, "stopped") != 3 {
		t.Errorf("after the stop cluster status says %s", out)
	}
	mustBraid(t, "cluster", "start", dir)
	resp, err := client(t, endpoints[2]).Get(within(t, 10*time.Second), "k")
	if err != nil || len(resp.Kvs) != 1 || string(resp.Kvs[0].Value) != "v" {
		t.Errorf("after the restart: %v, %v", resp, err)
	}
	mustBraid(t, "cluster", "stop", dir)
}

// TestHealthService: a node that serves says so in gRPC's health service, as etcd does.
func TestHealthService(t *testing.T) {
	n := cluster(t, 1).Nodes[0]
	conn, err := grpc.NewClient(strings.TrimPrefix(n.Endpoint(), "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	resp, err := grpc_health_v1.NewHealthClient(conn).Check(within(t, 5*time.Second), &grpc_health_v1.HealthCheckRequest{})
	if err != nil || resp.Status != grpc_health_v1.HealthCheckResponse_SERVING {
		t.Errorf("health: %v, %v", resp, err)
	}
	if _, err := grpc_health_v1.NewHealthClient(conn).Check(within(t, 5*time.Second), &grpc_health_v1.HealthCheckRequest{Service: "nobody"}); status.Code(err).String() != "NotFound" {
		t.Errorf("health of an unknown service: %v", err)
	}
}

// TestMeaninglessFlags: a flag of etcd's that has no meaning here is accepted with a warning that
// names it, and the node serves.
func TestMeaninglessFlags(t *testing.T) {
	if !isBraid(t) {
		t.Skip("they have one in etcd")
	}
	n := node(t, func(c *proc.Config) { c.Args = append(c.Args, "--snapshot-count=5000") })
	start(t, n.Start)
	log := n.LogTail()
	warned := false
	for _, line := range strings.Split(log, "\n") {
		warned = warned || strings.Contains(line, `"level":"warn"`) && strings.Contains(line, "snapshot-count")
	}
	if !warned {
		t.Errorf("no warning:\n%s", log)
	}
}
