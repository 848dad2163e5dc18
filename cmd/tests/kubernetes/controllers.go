package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"braid/cmd/tests/proc"
)

const (
	crowd       = "crowd" // the namespace
	deployments = 3
	fakeNodes   = 3
	// stepTimeout bounds a step of the check; each takes seconds on a machine that is not busy.
	stepTimeout = 5 * time.Minute
)

// controllers lets a controller-manager and a scheduler make pods, scale them down and delete them.
// These programs compare revisions of objects that lie in different regions, and watch all of them.
func controllers(ctx context.Context, o options) (err error) {
	if o.pods*deployments > fakeNodes*podsPerNode {
		return fmt.Errorf("%d nodes have no room for %d pods", fakeNodes, o.pods*deployments)
	}
	s, err := startStore(ctx, o, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	c, err := startAPI(ctx, o, s.cluster.Endpoints())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.stop()) }()
	if err := c.startControllers(o); err != nil {
		return err
	}
	k := &kubelets{api: c.api}
	for i := range fakeNodes {
		k.nodes = append(k.nodes, fmt.Sprintf("fake-%d", i+1))
	}
	if err := k.register(ctx); err != nil {
		return err
	}
	beside, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	var kubeletErr, killErr error
	m := meter{api: c.api}
	kill := killer{cluster: s.cluster}
	wg.Go(func() { kubeletErr = k.run(beside) })
	wg.Go(func() { m.run(beside) })
	if o.kill {
		wg.Go(func() { killErr = kill.run(beside) })
	}
	err = live(ctx, o, c)
	stop()
	wg.Wait()
	if err := errors.Join(err, kubeletErr, killErr, m.judge()); err != nil {
		return err
	}
	if o.kill {
		fmt.Printf("nodes killed: %d\n", kill.killed)
	}
	return nothingLeft(ctx, s)
}

// live is what happens to the pods.
func live(ctx context.Context, o options, c *control) error {
	base := "/apis/apps/v1/namespaces/" + crowd + "/deployments"
	name := func(i int) string { return fmt.Sprintf("d%d", i+1) }
	if err := persist(ctx, c, http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": crowd}}); err != nil {
		return err
	}
	total := deployments * o.pods
	err := step(ctx, c, fmt.Sprintf("%d pods run", total), func(ctx context.Context) error {
		for i := range deployments {
			labels := object{"app": name(i)}
			err := persist(ctx, c, http.MethodPost, base, object{
				"metadata": object{"name": name(i)},
				"spec": object{
					"replicas": o.pods, "selector": object{"matchLabels": labels},
					"template": object{"metadata": object{"labels": labels}, "spec": object{"containers": []object{{"name": "c", "image": "none"}}}},
				},
			})
			if err != nil {
				return err
			}
		}
		return await(ctx, c, func(ctx context.Context) (bool, error) { return running(ctx, c, total) })
	})
	if err != nil {
		return err
	}
	fewer := max(o.pods/3, 1)
	err = step(ctx, c, fmt.Sprintf("%d are left after scaling down", deployments*fewer), func(ctx context.Context) error {
		for i := range deployments {
			if err := persist(ctx, c, http.MethodPatch, base+"/"+name(i), object{"spec": object{"replicas": fewer}}); err != nil {
				return err
			}
		}
		return await(ctx, c, func(ctx context.Context) (bool, error) { return running(ctx, c, deployments*fewer) })
	})
	if err != nil {
		return err
	}
	err = step(ctx, c, "deployments, sets and pods are gone", func(ctx context.Context) error {
		for i := range deployments {
			if err := persist(ctx, c, http.MethodDelete, base+"/"+name(i), object{"propagationPolicy": "Foreground"}); err != nil {
				return err
			}
		}
		return await(ctx, c, func(ctx context.Context) (bool, error) {
			for _, path := range []string{base, "/apis/apps/v1/namespaces/" + crowd + "/replicasets", "/api/v1/namespaces/" + crowd + "/pods"} {
				var left list[struct{}]
				if err := c.api.do(ctx, http.MethodGet, path, nil, &left); err != nil || len(left.Items) > 0 {
					return false, nil // asked again
				}
			}
			return true, nil
		})
	})
	if err != nil {
		return err
	}
	return step(ctx, c, "the namespace is gone", func(ctx context.Context) error {
		path := "/api/v1/namespaces/" + crowd
		if err := persist(ctx, c, http.MethodDelete, path, nil); err != nil {
			return err
		}
		return await(ctx, c, func(ctx context.Context) (bool, error) {
			return isStatus(c.api.do(ctx, http.MethodGet, path, nil, nil), http.StatusNotFound), nil
		})
	})
}

// running says whether exactly want pods are there, all of them bound and running and none ending.
// More bound pods than a node has room for are an error: the scheduler counted with old data.
func running(ctx context.Context, c *control, want int) (bool, error) {
	var pods list[pod]
	if err := c.api.do(ctx, http.MethodGet, "/api/v1/namespaces/"+crowd+"/pods", nil, &pods); err != nil {
		return false, nil // asked again
	}
	settled := len(pods.Items) == want
	bound := map[string]int{}
	for _, p := range pods.Items {
		bound[p.Spec.NodeName]++
		settled = settled && p.Status.Phase == "Running" && p.Spec.NodeName != "" && p.Metadata.DeletionTimestamp == ""
	}
	for node, n := range bound {
		if node != "" && n > podsPerNode {
			return false, fmt.Errorf("%d pods are bound to %s", n, node)
		}
	}
	return settled, nil
}

// step runs f within the limit of a step and prints how long it took.
func step(ctx context.Context, c *control, what string, f func(context.Context) error) error {
	started := time.Now()
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	if err := f(ctx); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	fmt.Printf("%-48s %6.1f s\n", what, time.Since(started).Seconds())
	return c.alive()
}

// await polls check while all programs run.
func await(ctx context.Context, c *control, check func(context.Context) (bool, error)) error {
	return proc.Poll(ctx, 500*time.Millisecond, func() (bool, error) {
		if err := c.alive(); err != nil {
			return false, err
		}
		return check(ctx)
	})
}

// persist sends a request until it is answered by success, or by what says that an earlier try
// succeeded; a node that is killed takes answers with it.
func persist(ctx context.Context, c *control, method, path string, in any) error {
	first := true
	return await(ctx, c, func(ctx context.Context) (bool, error) {
		err := c.api.do(ctx, method, path, in, nil)
		again := !first
		first = false
		switch {
		case err == nil,
			again && method == http.MethodPost && isStatus(err, http.StatusConflict),
			again && method == http.MethodDelete && isStatus(err, http.StatusNotFound, http.StatusConflict):
			return true, nil
		case isStatus(err, http.StatusBadRequest, http.StatusForbidden, http.StatusUnprocessableEntity):
			return false, err
		}
		return false, nil
	})
}

// nothingLeft looks into the store itself for what belonged to the namespace.
func nothingLeft(ctx context.Context, s *store) error {
	keys, err := s.keys(ctx, "/registry/")
	if err != nil {
		return err
	}
	var left []string
	for _, key := range keys {
		if strings.Contains(key, "/"+crowd+"/") || strings.HasSuffix(key, "/"+crowd) {
			left = append(left, key)
		}
	}
	fmt.Printf("keys below /registry: %d, of the namespace: %d\n", len(keys), len(left))
	if len(left) > 0 {
		return fmt.Errorf("left in the store: %s", strings.Join(left, ", "))
	}
	return nil
}
