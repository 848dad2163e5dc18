package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
	"go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"

	"braid/cmd/tests/proc"
)

// recordLag is how long nodes may be behind the first whose record is whole.
const recordLag = 3 * time.Second

// record reads the committed order that the nodes recorded, once it holds the final put. All nodes
// must have recorded the same: a record may be the beginning of another (a snapshot took the place
// of entries there), and at least one must be whole.
func (r *round) record(ctx context.Context) ([]model.EtcdRequest, error) {
	ctx, cancel := context.WithTimeout(ctx, collectTimeout)
	defer cancel()
	var dirs []string
	for _, n := range r.cluster.Nodes {
		dirs = append(dirs, n.DataDir())
	}
	records := make([][]*raftpb.Entry, nodes)
	var since time.Time // the first was whole
	err := proc.Poll(ctx, 100*time.Millisecond, func() (bool, error) {
		r.ended = 0
		for i, dir := range dirs {
			// Read while it is written, a log may end within a record; the next look sees it whole.
			_, entries, err := report.ReadAllWALEntries(zap.NewNop(), walDir(dir))
			if err == nil {
				records[i] = entries
			}
			if !holdsFinalPut(records[i]) {
				r.ended++
			}
		}
		if r.ended < nodes && since.IsZero() {
			since = time.Now()
		}
		return r.ended == 0 || !since.IsZero() && time.Since(since) > recordLag, nil
	})
	if err != nil {
		return nil, fmt.Errorf("the final put is in no node's record: %w", err)
	}
	if err := sameOrder(records); err != nil {
		return nil, err
	}
	requests, err := report.PersistedRequests(r.log, dirs)
	if err != nil {
		return nil, err
	}
	r.spread = r.profile.spread(requests)
	return requests, nil
}

func walDir(dataDir string) string { return dataDir + "/member/wal" }

func holdsFinalPut(entries []*raftpb.Entry) bool {
	return slices.ContainsFunc(entries, func(e *raftpb.Entry) bool { return bytes.Contains(e.GetData(), []byte(finalKey)) })
}

// sameOrder says where two records differ that are not one the beginning of the other.
func sameOrder(records [][]*raftpb.Entry) error {
	longest := slices.MaxFunc(records, func(a, b []*raftpb.Entry) int { return len(a) - len(b) })
	var errs []error
	for i, entries := range records {
		for k, e := range entries {
			if e.GetIndex() != uint64(k+1) {
				errs = append(errs, fmt.Errorf("record of node %d: entry %d is called %d", i+1, k+1, e.GetIndex()))
				break
			}
			if !bytes.Equal(e.GetData(), longest[k].GetData()) {
				errs = append(errs, fmt.Errorf("record of node %d differs at entry %d: %q, elsewhere %q", i+1, k+1, e.GetData(), longest[k].GetData()))
				break
			}
		}
	}
	return errors.Join(errs...)
}
