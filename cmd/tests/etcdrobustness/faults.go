package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"braid/cmd/tests/control"
	"braid/cmd/tests/proc"
)

// fault is what a round does to its cluster.
type fault string

const (
	killLeader      fault = "kill -9 a region's leader"
	killOracle      fault = "kill -9 the oracle's leader"
	killAny         fault = "kill -9 a node"
	killAll         fault = "kill -9 all nodes"
	stopLeader      fault = "stop a region's leader"
	stopOracle      fault = "stop the oracle's leader"
	stopAny         fault = "stop a node"
	transfers       fault = "leader transfers"
	partitionLeader fault = "partition a region's leader"
	partitionOracle fault = "partition the oracle's leader"
	partitionPair   fault = "partition two nodes"
	partitionOneWay fault = "partition one way"
)

// faults in the order in which rounds take them.
var faults = []fault{
	killLeader, partitionOracle, transfers, killOracle, partitionLeader, stopOracle,
	killAny, partitionPair, stopLeader, killAll, partitionOneWay, stopAny,
}

func (f fault) partition() bool { return strings.HasPrefix(string(f), "partition") }

// downTime is how long a fault lasts: longer than an election.
const downTime = 1500 * time.Millisecond

// inject does the round's fault and repairs it.
func (r *round) inject(ctx context.Context, now control.Leaders) error {
	regions := now.Regions()
	victim := r.rng.IntN(nodes)
	switch r.fault {
	case killLeader, stopLeader, partitionLeader:
		victim = now[regions[r.rng.IntN(len(regions))]].Node
	case killOracle, stopOracle, partitionOracle:
		victim = now[control.Oracle].Node
	}
	node := r.cluster.Nodes[victim]
	other, third := (victim+1)%nodes, (victim+2)%nodes
	readyCtx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	switch r.fault {
	case killLeader, killOracle, killAny:
		if err := node.Kill(); err != nil {
			return err
		}
		if err := proc.Wait(ctx, downTime); err != nil {
			return err
		}
		return node.Start(readyCtx)
	case killAll:
		if err := r.cluster.Kill(); err != nil {
			return err
		}
		return r.cluster.Start(readyCtx)
	case stopLeader, stopOracle, stopAny:
		if err := node.Pause(); err != nil {
			return err
		}
		return errors.Join(proc.Wait(ctx, downTime), node.Resume())
	case partitionLeader, partitionOracle:
		return r.cut(ctx, [][2]int{{victim, other}, {other, victim}, {victim, third}, {third, victim}})
	case partitionPair:
		return r.cut(ctx, [][2]int{{victim, other}, {other, victim}})
	case partitionOneWay:
		return r.cut(ctx, [][2]int{{victim, other}, {victim, third}})
	case transfers:
		for range 4 {
			now, err := r.mover.Find(ctx)
			if err != nil {
				return err
			}
			groups := append(now.Regions(), control.Oracle)
			if err := r.mover.Move(ctx, now, groups[r.rng.IntN(len(groups))]); err != nil {
				return err
			}
			if err := proc.Wait(ctx, 400*time.Millisecond); err != nil {
				return err
			}
		}
		return nil
	}
	return fmt.Errorf("unknown fault %q", r.fault)
}

// cut drops the packets of these directions for a while.
func (r *round) cut(ctx context.Context, ways [][2]int) error {
	for _, w := range ways {
		if err := r.net.Cut(w[0], w[1]); err != nil {
			return errors.Join(err, r.net.Heal())
		}
	}
	return errors.Join(proc.Wait(ctx, downTime), r.net.Heal())
}
