package gateway_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/bbolt"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"braid/gateway"
	"braid/region/regionpb"
)

// startSnapshots serves a store of three regions with some keys, and says where files are made.
func startSnapshots(t *testing.T, space func() (uint64, error)) (*fixture, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "snapshots")
	f := start(t, func(c *gateway.Config) { c.SnapshotDir, c.SnapshotSpace = dir, space }, "g", "p")
	f.store.ReplyBytesMax = 64 << 10
	for i := range 40 {
		f.put(t, fmt.Sprintf("%c%d", 'a'+i%26, i), strings.Repeat("v", 5000))
	}
	return f, dir
}

func (f *fixture) put(t *testing.T, key, value string) {
	t.Helper()
	if _, err := pb.NewKVClient(f.conn).Put(t.Context(), &pb.PutRequest{Key: []byte(key), Value: []byte(value)}); err != nil {
		t.Error(err)
	}
}

// save receives a snapshot and checks its messages.
func (f *fixture) save(t *testing.T) ([]byte, error) {
	t.Helper()
	stream, err := pb.NewMaintenanceClient(f.conn).Snapshot(t.Context(), &pb.SnapshotRequest{})
	if err != nil {
		return nil, err
	}
	var all []byte
	var last *pb.SnapshotResponse
	for left := uint64(0); ; {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if resp.Header != nil || resp.Version != "3.7.0" {
			t.Errorf("header %v, version %q", resp.Header, resp.Version)
		}
		switch n := uint64(len(resp.Blob)); {
		case last == nil && n != 32<<10:
			t.Errorf("the first message has %d bytes", n)
		case last != nil && left == 0 && n != sha256.Size, last != nil && left > 0 && resp.RemainingBytes != left-n:
			t.Errorf("%d bytes of %d, %d remain", n, left, resp.RemainingBytes)
		}
		left, last = resp.RemainingBytes, resp
		all = append(all, resp.Blob...)
	}
	if len(all)%512 != sha256.Size {
		t.Fatalf("%d bytes", len(all))
	}
	data := all[:len(all)-sha256.Size]
	if sum := sha256.Sum256(data); !bytes.Equal(sum[:], last.Blob) || last.RemainingBytes != 0 {
		t.Errorf("checksum %x, the data's is %x; %d bytes remain", last.Blob, sum, last.RemainingBytes)
	}
	return data, nil
}

// read returns what a file has in its buckets of keys and leases, and its revision.
func read(t *testing.T, data []byte) (kvs map[string]*mvccpb.KeyValue, leases, rev int64) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "db")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	kvs = map[string]*mvccpb.KeyValue{}
	if err := db.View(func(tx *bbolt.Tx) error {
		rev = int64(binary.BigEndian.Uint64(tx.Bucket([]byte("meta")).Get([]byte("finishedCompactRev"))))
		leases = int64(tx.Bucket([]byte("lease")).Stats().KeyN)
		return tx.Bucket([]byte("key")).ForEach(func(k, v []byte) error {
			kv := &mvccpb.KeyValue{}
			if err := proto.Unmarshal(v, kv); err != nil {
				return err
			}
			if mod := int64(binary.BigEndian.Uint64(k)); mod != kv.ModRevision || mod > rev || kvs[string(kv.Key)] != nil {
				t.Errorf("%v at %d of %d", kv, mod, rev)
			}
			kvs[string(kv.Key)] = kv
			return nil
		})
	}); err != nil {
		t.Fatal(err)
	}
	return kvs, leases, rev
}

func nothingLeft(t *testing.T, dir string) {
	t.Helper()
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestSnapshot(t *testing.T) {
	f, dir := startSnapshots(t, nil)
	f.store.Leases = func() []regionpb.Lease {
		return []regionpb.Lease{{ID: 7, Record: &regionpb.LeaseRecord{Grant: 1, TTL: 60}}}
	}
	want := f.store.Alive([]byte{0}, []byte{0}, 41)
	// What is written while the file is made must not be in it.
	var once atomic.Bool
	f.store.Fail = func(op string) error {
		if n, _ := f.store.Reads(); op == "read" && n > 6 && !once.Swap(true) {
			f.put(t, "a0", "later")
			f.put(t, "zz", "later")
		}
		return nil
	}
	data, err := f.save(t)
	if err != nil {
		t.Fatal(err)
	}
	kvs, leases, rev := read(t, data)
	if !once.Load() || rev != 41 || leases != 1 || len(kvs) != len(want) || len(want) != 40 {
		t.Fatalf("%d keys of %d at %d, %d leases", len(kvs), len(want), rev, leases)
	}
	for _, v := range want {
		kv := kvs[string(v.Key)]
		if !bytes.Equal(kv.GetValue(), v.Value) || kv.CreateRevision != int64(v.Create) || kv.ModRevision != int64(v.Mod) || kv.Version != v.Version {
			t.Errorf("%v, want %v", kv, &v)
		}
	}
	nothingLeft(t, dir)
}

// TestSnapshotBeginsAgain removes versions in the middle: the file is of the newer revision, whole.
func TestSnapshotBeginsAgain(t *testing.T) {
	f, dir := startSnapshots(t, nil)
	var once atomic.Bool
	f.store.Fail = func(op string) error {
		if n, _ := f.store.Reads(); op == "read" && n > 7 && !once.Swap(true) {
			f.put(t, "a0", "newer")
			f.store.Overtake()
		}
		return nil
	}
	data, err := f.save(t)
	if err != nil {
		t.Fatal(err)
	}
	kvs, _, rev := read(t, data)
	if a := kvs["a0"]; rev != 42 || len(kvs) != 40 || string(a.GetValue()) != "newer" || a.GetModRevision() != 42 {
		t.Errorf("%d keys at %d, a0 is %v", len(kvs), rev, a)
	}
	nothingLeft(t, dir)
}

func TestSnapshotOvertakenForGood(t *testing.T) {
	f, dir := startSnapshots(t, nil)
	f.store.Fail = func(op string) error {
		if op == "read" {
			return regionpb.ErrorOf(regionpb.Compacted)
		}
		return nil
	}
	if _, err := f.save(t); status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), "compaction passed") {
		t.Error(err)
	}
	nothingLeft(t, dir)
}

func TestSnapshotWithoutSpace(t *testing.T) {
	f, dir := startSnapshots(t, func() (uint64, error) { return 1 << 20, nil })
	if _, err := f.save(t); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "no space") {
		t.Error(err)
	}
	nothingLeft(t, dir)
}

// TestSnapshotsAreFew holds two in the middle: a third one is refused. Canceled by their clients, they
// leave nothing and give their places back.
func TestSnapshotsAreFew(t *testing.T) {
	f, dir := startSnapshots(t, nil)
	var holds atomic.Bool
	holds.Store(true)
	held := make(chan struct{}, 100)
	release := make(chan struct{})
	f.store.Fail = func(op string) error {
		if op == "read" && holds.Load() {
			held <- struct{}{}
			<-release
		}
		return nil
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 2 {
		if _, err := pb.NewMaintenanceClient(f.conn).Snapshot(ctx, &pb.SnapshotRequest{}); err != nil {
			t.Fatal(err)
		}
		<-held
	}
	if _, err := f.save(t); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "2 snapshots already") {
		t.Error(err)
	}
	cancel()
	holds.Store(false)
	close(release)
	deadline := time.Now().Add(time.Minute)
	for {
		if _, err := f.save(t); err == nil {
			break
		} else if status.Code(err) != codes.ResourceExhausted || time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	for left, err := os.ReadDir(dir); err != nil || len(left) > 0; left, err = os.ReadDir(dir) {
		if time.Now().After(deadline) {
			t.Fatalf("left: %v, %v", left, err)
		}
	}
}

// TestSnapshotEndsWithServer stops a server whose snapshot would go on trying for a minute.
func TestSnapshotEndsWithServer(t *testing.T) {
	f, dir := startSnapshots(t, nil)
	trying := make(chan struct{})
	var once sync.Once
	f.store.Fail = func(op string) error {
		if op != "read" {
			return nil
		}
		once.Do(func() { close(trying) })
		return regionpb.ErrorOf(regionpb.NotComplete)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := f.save(t)
		ended <- err
	}()
	<-trying
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	f.server.Stop(ctx)
	if err := <-ended; !strings.Contains(fmt.Sprint(err), "server stopped") || ctx.Err() != nil {
		t.Error(err, ctx.Err())
	}
	nothingLeft(t, dir)
}
