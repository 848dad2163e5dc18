package process

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/client/pkg/v3/types"
	clientv3 "go.etcd.io/etcd/client/v3"
	clientsnapshot "go.etcd.io/etcd/client/v3/snapshot"
	etcdutl "go.etcd.io/etcd/etcdutl/v3/snapshot"
	"go.etcd.io/etcd/server/v3/storage/backend"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
	"go.etcd.io/etcd/server/v3/storage/schema"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"braid/cmd/tests/etcdbin"
	"braid/cmd/tests/proc"
)

// TestSnapshotIntoEtcd saves a snapshot while keys are being written, reads the file by etcd's own
// storage, restores it, starts an etcd on it and compares it with the store at the snapshot's revision.
func TestSnapshotIntoEtcd(t *testing.T) {
	if !isBraid(t) {
		t.Skip("the program under test is not braid, and the snapshots are braid's")
	}
	t.Run("three nodes, many regions", func(t *testing.T) {
		testSnapshot(t, cluster(t, 3), func(n *proc.Node, path string) error {
			v, err := clientsnapshot.SaveWithVersion(within(t, time.Minute), zap.NewNop(), clientv3.Config{Endpoints: []string{n.Endpoint()}}, path)
			if err == nil && v != "3.7.0" {
				err = fmt.Errorf("version %q", v)
			}
			return err
		})
	})
	t.Run("one group", func(t *testing.T) {
		n := node(t, func(c *proc.Config) { c.Args = []string{"--single-group"} })
		start(t, n.Start)
		// What a killed process left behind goes at the next start.
		if err := n.Kill(); err != nil {
			t.Fatal(err)
		}
		left := filepath.Join(n.DataDir(), "snapshots", "db-1")
		if err := os.MkdirAll(left, 0o700); err != nil {
			t.Fatal(err)
		}
		start(t, n.Start)
		if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", left, err)
		}
		testSnapshot(t, &proc.Cluster{Nodes: []*proc.Node{n}}, func(n *proc.Node, path string) error {
			etcdctl(t, n, "snapshot", "save", path)
			return nil
		})
	})
}

// fillForSnapshot writes keys all over the key space, some in transactions, some twice, some with
// leases; deletes some, and compacts.
func fillForSnapshot(t *testing.T, c *clientv3.Client) {
	t.Helper()
	ctx := within(t, time.Minute)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var leases []clientv3.LeaseID
	for i := range 4 {
		l, err := c.Grant(ctx, int64(1000+i))
		must(err)
		leases = append(leases, l.ID)
	}
	key := func(i int) string { return fmt.Sprintf("%c/%04d", 'a'+i%14, i) }
	for i := range 300 {
		var opts []clientv3.OpOption
		if i%5 == 0 {
			opts = append(opts, clientv3.WithLease(leases[i%3]))
		}
		_, err := c.Put(ctx, key(i), fmt.Sprint("value ", i), opts...)
		must(err)
	}
	for i := 0; i < 280; i += 7 {
		_, err := c.Txn(ctx).Then(clientv3.OpPut(key(i), "again"), clientv3.OpDelete(key(i+1)),
			clientv3.OpPut(key(i+2), "again", clientv3.WithLease(leases[1])), clientv3.OpPut(key(i+3), "and again")).Commit()
		must(err)
	}
	_, err := c.Revoke(ctx, leases[2])
	must(err)
	got, err := c.Get(ctx, "a")
	must(err)
	_, err = c.Compact(ctx, got.Header.Revision-10)
	must(err)
}

func testSnapshot(t *testing.T, cluster *proc.Cluster, save func(n *proc.Node, path string) error) {
	last := cluster.Nodes[len(cluster.Nodes)-1]
	c := client(t, cluster.Endpoints()...)
	ctx := within(t, 2*time.Minute)
	fillForSnapshot(t, c)

	// Somebody goes on writing, two keys at one revision, until the file is there.
	saved, written := make(chan struct{}), make(chan error, 1)
	go func() {
		for i := 0; ; i++ {
			select {
			case <-saved:
				written <- nil
				return
			default:
			}
			v := fmt.Sprint(i)
			if _, err := c.Txn(ctx).Then(clientv3.OpPut("a/moving", v), clientv3.OpPut("m/moving", v)).Commit(); err != nil {
				written <- err
				return
			}
		}
	}()
	path := filepath.Join(t.TempDir(), "snapshot.db")
	err := save(last, path)
	close(saved)
	if werr := <-written; err != nil || werr != nil {
		t.Fatal(err, werr)
	}
	if left, err := os.ReadDir(filepath.Join(last.DataDir(), "snapshots")); err != nil || len(left) > 0 {
		t.Errorf("left on the node: %v, %v", left, err)
	}

	rev := readByEtcd(t, path, len(cluster.Nodes))
	want, err := c.Get(ctx, "\x00", clientv3.WithFromKey(), clientv3.WithRev(rev))
	if err != nil {
		t.Fatal(err)
	}
	status, err := etcdutl.NewV3(zap.NewNop()).Status(path)
	if err != nil || status.TotalKey != len(want.Kvs) || status.Version != "3.7.0" || status.Revision > rev {
		t.Errorf("status %+v, %v; %d keys at %d", status, err, len(want.Kvs), rev)
	}

	e := etcdFrom(t, path)
	ec := client(t, e.Endpoint())
	got, err := ec.Get(ctx, "\x00", clientv3.WithFromKey())
	if err != nil {
		t.Fatal(err)
	}
	if got.Header.Revision != rev || len(got.Kvs) != len(want.Kvs) || len(got.Kvs) < 200 {
		t.Errorf("etcd has %d keys at %d, want %d at %d", len(got.Kvs), got.Header.Revision, len(want.Kvs), rev)
	}
	for i := range min(len(got.Kvs), len(want.Kvs)) {
		if !proto.Equal(got.Kvs[i], want.Kvs[i]) {
			t.Fatalf("etcd has %v, want %v", got.Kvs[i], want.Kvs[i])
		}
	}
	if _, err := ec.Get(ctx, "a", clientv3.WithRev(rev-1)); !errors.Is(err, rpctypes.ErrCompacted) {
		t.Errorf("a read below the snapshot: %v", err)
	}
	put, err := ec.Put(ctx, "a/new", "")
	if err != nil || put.Header.Revision != rev+1 {
		t.Errorf("the first put is at %d, want %d: %v", put.Header.GetRevision(), rev+1, err)
	}
	compareLeases(t, c, ec)
}

// compareLeases compares the leases of the store with those of an etcd, and ends one there.
func compareLeases(t *testing.T, c, ec *clientv3.Client) {
	t.Helper()
	ctx := within(t, time.Minute)
	ids := func(c *clientv3.Client) (ids []clientv3.LeaseID) {
		l, err := c.Leases(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range l.Leases {
			ids = append(ids, s.ID)
		}
		slices.Sort(ids)
		return ids
	}
	want := ids(c)
	if got := ids(ec); !slices.Equal(got, want) || len(want) != 3 {
		t.Fatalf("leases %x, want %x", got, want)
	}
	keys := 0
	for _, id := range want {
		w, err := c.TimeToLive(ctx, id, clientv3.WithAttachedKeys())
		if err != nil {
			t.Fatal(err)
		}
		g, err := ec.TimeToLive(ctx, id, clientv3.WithAttachedKeys())
		if err != nil {
			t.Fatal(err)
		}
		attached := func(keys [][]byte) (list []string) {
			for _, k := range keys {
				list = append(list, string(k))
			}
			slices.Sort(list)
			return list
		}
		if g.GrantedTTL != w.GrantedTTL || g.TTL < 900 || g.TTL > g.GrantedTTL || !slices.Equal(attached(g.Keys), attached(w.Keys)) {
			t.Errorf("lease %x: %+v, want %+v", id, g, w)
		}
		keys += len(g.Keys)
		if _, err := ec.Revoke(ctx, id); err != nil {
			t.Error(err)
		}
		for _, k := range g.Keys {
			if got, err := ec.Get(ctx, string(k)); err != nil || got.Count != 0 {
				t.Errorf("%q outlives its lease: %v, %v", k, got, err)
			}
		}
	}
	if keys == 0 {
		t.Error("no lease has a key")
	}
}

// readByEtcd reads a copy of a snapshot by etcd's own storage packages and returns its revision.
func readByEtcd(t *testing.T, path string, members int) int64 {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "db")
	if err := os.WriteFile(path, data[:len(data)-32], 0o600); err != nil {
		t.Fatal(err)
	}
	lg := zap.NewNop()
	be := backend.NewDefaultBackend(lg, path)
	defer be.Close()
	if err := schema.Validate(lg, be.ReadTx()); err != nil {
		t.Error(err)
	}
	if v := schema.ReadStorageVersion(be.ReadTx()); v == nil || v.String() != "3.7.0" {
		t.Errorf("storage version %v", v)
	}
	if index, term := schema.ReadConsistentIndex(be.ReadTx()); index == 0 || term == 0 {
		t.Errorf("index %d, term %d", index, term)
	}
	membership := schema.NewMembershipBackend(lg, be)
	list, removed := membership.MustReadMembersFromBackend()
	if len(list) != members || len(removed) != 0 || membership.ClusterVersionFromBackend().String() != "3.7.0" {
		t.Errorf("members %v, removed %v, cluster version %v", list, removed, membership.ClusterVersionFromBackend())
	}
	auth := schema.NewAuthBackend(lg, be).ReadTx()
	if auth.UnsafeReadAuthEnabled() || auth.UnsafeReadAuthRevision() != 1 {
		t.Errorf("auth is on, or at %d", auth.UnsafeReadAuthRevision())
	}
	tx := be.ReadTx()
	tx.RLock()
	defer tx.RUnlock()
	conf := schema.UnsafeConfStateFromBackend(lg, tx)
	for _, id := range conf.GetVoters() {
		if m := list[types.ID(id)]; m == nil || m.Name == "" || len(m.PeerURLs) != 1 || len(m.ClientURLs) != 1 {
			t.Errorf("voter %x is %+v", id, m)
		}
	}
	if len(conf.GetVoters()) != members {
		t.Errorf("configuration %v", conf)
	}
	finished, ok := mvcc.UnsafeReadFinishedCompact(tx)
	if scheduled, also := mvcc.UnsafeReadScheduledCompact(tx); !ok || !also || scheduled != finished {
		t.Errorf("compacted at %d, scheduled at %d", finished, scheduled)
	}
	if leases := schema.MustUnsafeGetAllLeases(tx); len(leases) != 3 {
		t.Errorf("leases %v", leases)
	}
	return finished
}

// etcdFrom starts an etcd on a restored snapshot.
func etcdFrom(t *testing.T, path string) *proc.Node {
	t.Helper()
	bin, err := etcdbin.Etcd()
	if err != nil {
		t.Fatal(err)
	}
	e := node(t, func(c *proc.Config) { c.Name, c.Bin, c.Token = "restored", bin, "restored" })
	peer := "http://" + e.Peer
	if err := etcdutl.NewV3(zap.NewNop()).Restore(etcdutl.RestoreConfig{
		SnapshotPath: path, Name: e.Name, OutputDataDir: e.DataDir(), PeerURLs: []string{peer},
		InitialCluster: e.Name + "=" + peer, InitialClusterToken: e.Token,
	}); err != nil {
		t.Fatal(err)
	}
	start(t, e.Start)
	return e
}
