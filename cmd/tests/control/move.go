package control

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"braid/cmd/tests/proc"
)

// leaderTimeout bounds how long a group may be without a leader, or a transfer may take.
const leaderTimeout = 20 * time.Second

// Mover finds and moves leaders, patiently: elections and refusals are waited for.
type Mover struct {
	Control
	Cluster *proc.Cluster
	Rand    *rand.Rand
}

// Find asks until all groups have a leader; any running node may answer.
func (m *Mover) Find(ctx context.Context) (Leaders, error) {
	ctx, cancel := context.WithTimeout(ctx, leaderTimeout)
	defer cancel()
	var found Leaders
	var last error
	node := m.Rand.IntN(len(m.Cluster.Nodes))
	err := proc.Poll(ctx, 200*time.Millisecond, func() (bool, error) {
		node = (node + 1) % len(m.Cluster.Nodes)
		if !m.Cluster.Nodes[node].Running() {
			return false, nil
		}
		askCtx, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		found, last = m.Leaders(askCtx, node)
		return last == nil && found.Known(), nil
	})
	if err != nil {
		return nil, fmt.Errorf("looking for leaders (%v): %w", found, errors.Join(last, err))
	}
	return found, nil
}

// Move moves one group to another node and waits until it is there.
func (m *Mover) Move(ctx context.Context, now Leaders, group string) error {
	ctx, cancel := context.WithTimeout(ctx, leaderTimeout)
	defer cancel()
	from := now[group]
	to := (from.Node + 1 + m.Rand.IntN(len(m.Cluster.Nodes)-1)) % len(m.Cluster.Nodes)
	var last error
	err := proc.Poll(ctx, 300*time.Millisecond, func() (bool, error) {
		// Refused or overtaken by an election: look again and repeat.
		if last = m.Transfer(ctx, group, from, to); last != nil {
			if now, err := m.Find(ctx); err == nil {
				from = now[group]
			}
			return from.Node == to, nil
		}
		now, err := m.Find(ctx)
		if err == nil {
			from = now[group]
		}
		return err == nil && from.Node == to, nil
	})
	if err != nil {
		return fmt.Errorf("moving group %s to %s: %w", group, m.Cluster.Nodes[to].Name, errors.Join(last, err))
	}
	return nil
}

// EnsureChange returns the groups whose leader has changed since an earlier look, after a transfer
// if there were none.
func (m *Mover) EnsureChange(ctx context.Context, before Leaders) ([]string, error) {
	now, err := m.Find(ctx)
	if err != nil {
		return nil, err
	}
	if changed := now.ChangedSince(before); len(changed) > 0 {
		return changed, nil
	}
	groups := now.Regions()
	if err := m.Move(ctx, now, groups[m.Rand.IntN(len(groups))]); err != nil {
		return nil, err
	}
	if now, err = m.Find(ctx); err != nil {
		return nil, err
	}
	changed := now.ChangedSince(before)
	if len(changed) == 0 {
		return nil, errors.New("no leader changed in this round")
	}
	return changed, nil
}
