package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/cmd/internal/config"
	"braid/raftstore/wal"
)

// brokenFS is a disk whose syncs fail from some moment on.
type brokenFS struct {
	wal.FS
	broken atomic.Bool
}

type brokenFile struct {
	wal.File
	fs *brokenFS
}

func (f *brokenFS) Create(name string) (wal.File, error) {
	file, err := f.FS.Create(name)
	return brokenFile{file, f}, err
}

func (f *brokenFS) Open(name string) (wal.File, error) {
	file, err := f.FS.Open(name)
	return brokenFile{file, f}, err
}

func (f brokenFile) Sync() error {
	if f.fs.broken.Load() {
		return fmt.Errorf("fdatasync: %w", syscall.EIO)
	}
	return f.File.Sync()
}

// TestFailedSync breaks the disk under writers: nothing is acknowledged that was not synced, the node
// says in one line what failed and ends, and on a disk that works again everything acknowledged is
// there at its revision.
func TestFailedSync(t *testing.T) {
	for _, mode := range []string{"regions", "single-group"} {
		t.Run(mode, func(t *testing.T) {
			shape := splitAt("h", "p")
			if mode == "single-group" {
				shape = singleGroupMode
			}
			c := newCluster(t, 1, shape, func(c *config.Config) { c.UnsafeNoFsync = false })
			fs := &brokenFS{FS: wal.OS}
			c.tune.logFS = fs
			c.start(c.nodes...)
			n := c.nodes[0]
			var mu sync.Mutex
			acked := map[string]int64{}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			enough := make(chan struct{})
			var once sync.Once
			var wg sync.WaitGroup
			for w := range 6 {
				wg.Go(func() {
					for i := 0; ctx.Err() == nil; i++ {
						key := fmt.Sprintf("%c%d-%d", "akz"[w%3], w, i)
						resp, err := n.kv.Put(ctx, &pb.PutRequest{Key: []byte(key), Value: []byte(key)})
						if err != nil {
							return
						}
						mu.Lock()
						if acked[key] = resp.Header.Revision; len(acked) >= 60 {
							once.Do(func() { close(enough) })
						}
						mu.Unlock()
					}
				})
			}
			select {
			case <-enough:
			case <-ctx.Done():
				t.Fatal("no 60 writes")
			}
			fs.broken.Store(true)
			var failed error
			select {
			case failed = <-n.n.Done():
			case <-time.After(patience):
				t.Fatal("the node goes on without syncs")
			}
			if !errors.Is(failed, syscall.EIO) || !strings.Contains(failed.Error(), "the log cannot be written") || strings.Contains(failed.Error(), "\n") {
				t.Errorf("the node says %v", failed)
			}
			sctx, scancel := context.WithTimeout(context.Background(), patience)
			defer scancel()
			_ = n.n.Stop(sctx) // the log says again that it is broken
			n.n = nil
			cancel()
			wg.Wait()
			if err := n.conn.Close(); err != nil {
				t.Error(err)
			}

			fs.broken.Store(false)
			c.start(n)
			for key, rev := range acked {
				resp, err := n.kv.Range(within(t), &pb.RangeRequest{Key: []byte(key)})
				if err != nil || len(resp.Kvs) != 1 || resp.Kvs[0].ModRevision != rev || string(resp.Kvs[0].Value) != key {
					t.Fatalf("%s, acknowledged at revision %d: %v, %v", key, rev, resp, err)
				}
			}
			c.stop(n)
		})
	}
}
