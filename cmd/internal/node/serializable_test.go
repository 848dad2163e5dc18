package node

import (
	"fmt"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/cmd/internal/config"
)

// TestSerializableReadsWhatWasAnswered writes through every node, wherever the region is led, and
// reads at once through the same node with a serializable request, which must not be behind the
// answer, as it never is with etcd.
func TestSerializableReadsWhatWasAnswered(t *testing.T) {
	for name, change := range map[string]func(*config.Config){"five regions": splitAt("d", "h", "m", "s"), "single group": singleGroupMode} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, 3, change)
			c.tune.localWait = 10 * time.Second // no replica is cut off here, only late
			c.start(c.nodes...)
			var wg sync.WaitGroup
			for i, n := range c.nodes {
				wg.Go(func() {
					for k := range 60 {
						key := fmt.Sprint(accounts[k%len(accounts)], i)
						put, err := n.kv.Put(t.Context(), &pb.PutRequest{Key: []byte(key), Value: []byte(fmt.Sprint(k))})
						if err != nil {
							t.Error(err)
							return
						}
						get, err := n.kv.Range(t.Context(), &pb.RangeRequest{Key: []byte(key), Serializable: true})
						if err != nil {
							t.Error(err)
							return
						}
						if get.Header.Revision < put.Header.Revision || len(get.Kvs) != 1 || get.Kvs[0].ModRevision != put.Header.Revision {
							t.Errorf("%s wrote %q at revision %d and then reads %v", n.cfg.Name, key, put.Header.Revision, get)
						}
					}
				})
			}
			wg.Wait()
		})
	}
}
