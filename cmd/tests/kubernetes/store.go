package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"braid/cmd/tests/proc"
)

// store is three nodes whose /registry is split into many regions.
type store struct {
	cluster *proc.Cluster
	client  *clientv3.Client
	// seconds are those for which there is a boundary: a load whose namespace is named after one of
	// them has its objects in two regions.
	seconds []int64
}

const (
	startTimeout = time.Minute
	// loadWithin is how many seconds after the start of the store a load may begin and still find a
	// boundary in the midst of its objects; it costs a region for each.
	loadWithin = 40
	// progressEvery is how often the watch caches are told how far they are, as Kubernetes' own
	// installers have it. A cache without events would otherwise fall behind the compactions.
	progressEvery = "5s"
)

// kinds are boundaries between kinds of objects.
var kinds = []string{"/registry/b", "/registry/configmaps/a", "/registry/d", "/registry/events", "/registry/m", "/registry/p", "/registry/s"}

// loadNamespace is the namespace of a load that begins in a second.
func loadNamespace(second int64) string { return fmt.Sprintf("load-%d", second) }

// startStore starts the nodes. For a load of n objects it puts boundaries in the midst of the
// objects: their keys have the second in them in which the load begins, which is not known yet, so
// there is one for every second in which it may.
func startStore(ctx context.Context, o options, n int) (s *store, err error) {
	s = &store{}
	splits := slices.Clone(kinds)
	if n > 0 {
		first := time.Now().Unix() + 3
		for second := first; second < first+loadWithin; second++ {
			s.seconds = append(s.seconds, second)
			splits = append(splits, fmt.Sprintf("/registry/configmaps/%s/cm-%06d", loadNamespace(second), n/2))
		}
	}
	s.cluster, err = proc.NewCluster(o.braid, o.dir, 3,
		"--region-split-keys="+strings.Join(splits, ","), "--watch-progress-notify-interval="+progressEvery)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := s.cluster.Start(ctx); err != nil {
		return nil, errors.Join(err, s.cluster.Kill())
	}
	s.client, err = clientv3.New(clientv3.Config{Endpoints: s.cluster.Endpoints(), Logger: zap.NewNop()})
	if err != nil {
		return nil, errors.Join(err, s.cluster.Kill())
	}
	return s, nil
}

func (s *store) stop() error { return errors.Join(s.client.Close(), s.cluster.Kill()) }

// keys lists the keys with a prefix.
func (s *store) keys(ctx context.Context, prefix string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	resp, err := s.client.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return nil, err
	}
	var keys []string
	for _, kv := range resp.Kvs {
		keys = append(keys, string(kv.Key))
	}
	return keys, nil
}

// count counts the keys with a prefix.
func (s *store) count(ctx context.Context, prefix string) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	resp, err := s.client.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		return 0, err
	}
	return resp.Count, nil
}

// split says whether some load so far began in a second for which there is a boundary.
func (s *store) split(ctx context.Context) (bool, error) {
	namespaces, err := s.keys(ctx, "/registry/namespaces/load-")
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(s.seconds, func(second int64) bool {
		return slices.Contains(namespaces, "/registry/namespaces/"+loadNamespace(second))
	}), nil
}

// killer kills one node after another and starts it again, until its context ends.
type killer struct {
	cluster *proc.Cluster
	killed  int
}

const (
	// down is how long a killed node stays away: longer than an election takes, shorter than an
	// operator is.
	down = 3 * time.Second
	// between is how long all nodes run then.
	between = 7 * time.Second
)

// once kills the next node and starts it again.
func (k *killer) once(ctx context.Context) error {
	n := k.cluster.Nodes[k.killed%len(k.cluster.Nodes)]
	if err := n.Kill(); err != nil {
		return err
	}
	k.killed++
	fmt.Printf("  %s %s was killed\n", time.Now().Format(time.TimeOnly), n.Name)
	_ = proc.Wait(ctx, down) // also at the end all nodes run
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), startTimeout)
	defer cancel()
	return n.Start(ctx)
}

// run kills until ctx ends, which is not an error.
func (k *killer) run(ctx context.Context) error {
	for proc.Wait(ctx, between) == nil {
		if err := k.once(ctx); err != nil {
			return err
		}
	}
	return nil
}
