package node

import (
	"path/filepath"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// snapshotDir is where snapshots for clients are made. What is in it belongs to one life of the process.
func (n *Node) snapshotDir() string { return filepath.Join(n.cfg.DataDir, "snapshots") }

// snapshotSpace is how many bytes are free there.
func (n *Node) snapshotSpace() (uint64, error) {
	usage, err := vfs.Default.GetDiskUsage(n.cfg.DataDir)
	return usage.AvailBytes, err
}
