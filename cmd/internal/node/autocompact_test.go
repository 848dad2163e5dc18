package node

import (
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/cmd/internal/config"
)

// TestAutoCompaction lets a store compact itself, through a restart of the node that does it: old
// revisions are refused on all nodes, and the versions are removed.
func TestAutoCompaction(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, shape := range []func(*config.Config){splitAt("b"), singleGroupMode} {
		c := newCluster(t, 3, shape, func(c *config.Config) { c.AutoCompactionMode, c.AutoCompactionRetention = "periodic", "500ms" })
		c.start(c.nodes...)
		for round := range 2 {
			var rev int64
			for i := range 100 {
				rev = c.nodes[i%3].put("a", strings.Repeat("x", 2000))
			}
			for _, n := range c.nodes {
				c.eventually("history is refused and removed", func() bool {
					n.put("b", "") // a revision that is newer than what is waited for
					_, err := n.kv.Range(within(t), &pb.RangeRequest{Key: []byte("a"), Revision: rev - 1})
					return err != nil && n.n.engine.LogicalBytes() < 40_000
				})
			}
			if round == 0 {
				leader, _ := c.nodes[0].n.oracle.Leader()
				for _, n := range c.nodes {
					if n.n.self == leader {
						c.restart(n)
						break
					}
				}
			}
		}
		c.stop(c.nodes...)
	}
}
