package compare

import (
	"context"
	"fmt"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"braid/cmd/internal/admin"
	"braid/cmd/internal/bench"
)

// placement says on which node are the client's connection, the regions' leaders and the placement
// group's leader. Nodes of one machine are alike, so of the 27 placements on three nodes only which
// of the three roles coincide matters.
type placement struct {
	name               string
	client, region, pd int     // indices of nodes
	weight             float64 // of the 27
}

var threeNodes = []placement{
	{"client, region and pd on one node", 0, 0, 0, 3},
	{"client with region, pd elsewhere", 0, 0, 1, 6},
	{"client with pd, region elsewhere", 0, 1, 0, 6},
	{"region with pd, client elsewhere", 0, 1, 1, 6},
	{"all on different nodes", 0, 1, 2, 6},
}

// oneGroup are the placements where one leader is both.
var oneGroup = []placement{
	{"client, region and pd on one node", 0, 0, 0, 1},
	{"region with pd, client elsewhere", 0, 1, 1, 2},
}

// placements measures the puts of one client, over all placements on three nodes.
func placements(ctx context.Context, s *side) ([]value, error) {
	if s.nodes != 3 {
		r, err := s.run(ctx, s.load(one("put")), 1, 1, s.seconds(4))
		if err != nil {
			return nil, err
		}
		return []value{
			{name: "put p50, one client", unit: "ms", value: r.Kind("put").Latency.P50, goal: s.goal(2.2, 1.1), failed: r.Failed()},
			{name: "put p99, one client", unit: "ms", value: r.Kind("put").Latency.P99},
			{name: "syncs per put and node, one client", unit: "", value: r.syncs / float64(max(r.count(), 1)) / float64(s.nodes)},
		}, nil
	}
	all := oneGroup
	if s.system.Name == Multi {
		all = threeNodes
	}
	var values []value
	var mean, weights, syncs float64
	var count, failed int64
	for _, p := range all {
		if err := s.place(ctx, p); err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
		t := s.target()
		t.Endpoints = t.Endpoints[p.client : p.client+1]
		o := bench.Options{Clients: 1, Connections: 1, WarmUp: s.seconds(1), Duration: s.seconds(3), Timeout: 30 * time.Second}
		r, err := s.observe(ctx, func(ob bench.Observer) (*bench.Report, error) {
			return bench.Run(ctx, t, s.load(one("put")), o, ob)
		})
		if err != nil {
			return nil, err
		}
		p50 := r.Kind("put").Latency.P50
		mean, weights = mean+p50*p.weight, weights+p.weight
		syncs, count, failed = syncs+r.syncs, count+r.count(), failed+r.Failed()
		values = append(values, value{name: "put p50, one client: " + p.name, unit: "ms", value: p50})
	}
	return append([]value{
		{name: "put p50, one client, mean over all placements", unit: "ms", value: mean / weights, goal: 2.2, failed: failed},
		{name: "syncs per put and node, one client", unit: "", value: syncs / float64(max(count, 1)) / float64(s.nodes)},
	}, values...), nil
}

// placeTimeout bounds the wait for leaders to be where they are asked to be.
const placeTimeout = 20 * time.Second

// place moves leaders.
func (s *side) place(ctx context.Context, p placement) error {
	ctx, cancel := context.WithTimeout(ctx, placeTimeout)
	defer cancel()
	if s.system.Name == Etcd {
		return s.placeEtcd(ctx, p.region)
	}
	conn, err := grpc.NewClient("passthrough:///"+s.target().Endpoints[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	c := admin.NewClient(conn)
	pd, err := c.PD(ctx)
	if err != nil {
		return err
	}
	store := func(node int) uint64 {
		for _, st := range pd.Stores {
			if st.Name == s.state.Nodes[node].Name {
				return st.ID
			}
		}
		return 0
	}
	return until(ctx, func() (bool, error) {
		done := true
		if !pd.SingleGroup {
			err := c.EachRegion(ctx, func(r *admin.Region) error {
				if want := store(p.region); r.LeaderStore != want {
					done = false
					_ = c.TransferRegion(ctx, r.ID, want) // asked again until it is there
				}
				return nil
			})
			if err != nil {
				return false, err
			}
		}
		now, err := c.PD(ctx)
		if err != nil {
			return false, err
		}
		if want := store(p.pd); now.LeaderStore != want {
			done = false
			_ = c.TransferPD(ctx, want) // likewise
		}
		return done, nil
	})
}

// placeEtcd moves etcd's leader.
func (s *side) placeEtcd(ctx context.Context, node int) error {
	endpoints := s.target().Endpoints
	c, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: 5 * time.Second})
	if err != nil {
		return err
	}
	defer c.Close()
	var ids []uint64
	for _, ep := range endpoints {
		st, err := c.Status(ctx, ep)
		if err != nil {
			return err
		}
		ids = append(ids, st.Header.MemberId)
	}
	return until(ctx, func() (bool, error) {
		st, err := c.Status(ctx, endpoints[node])
		if err != nil {
			return false, err
		}
		if st.Leader == ids[node] {
			return true, nil
		}
		at := slices.Index(ids, st.Leader)
		if at < 0 {
			return false, nil // an election is going on
		}
		leader, err := clientv3.New(clientv3.Config{Endpoints: endpoints[at : at+1], DialTimeout: 5 * time.Second})
		if err != nil {
			return false, err
		}
		defer leader.Close()
		_, _ = leader.MoveLeader(ctx, ids[node]) // asked again until it is there
		return false, nil
	})
}

// until calls fn until it says true or fails, or ctx ends.
func until(ctx context.Context, fn func() (bool, error)) error {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := fn()
		if ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("the leaders do not move: %w", ctx.Err())
		}
	}
}
