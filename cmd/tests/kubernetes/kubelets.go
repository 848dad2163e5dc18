package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"

	"braid/cmd/tests/proc"
)

// kubelets plays the kubelets of some nodes: it registers the nodes, renews their leases, says of
// every pod that was bound to one of them that it runs, and confirms deletions, which is what ends a
// pod for good. It runs nothing.
//
// Its life: register, then run until its context ends.
type kubelets struct {
	api   *api
	nodes []string
}

const (
	// podsPerNode is a kubelet's default.
	podsPerNode = 110
	// leaseEvery is how often a kubelet renews the lease of its node; after 40 s of silence the node
	// is taken for dead.
	leaseEvery = 10 * time.Second
	// kubeletWorkers is how many pods are dealt with at a time.
	kubeletWorkers = 8
)

func now() string { return time.Now().UTC().Format(time.RFC3339) }

func (k *kubelets) register(ctx context.Context) error {
	for _, name := range k.nodes {
		node := object{
			"metadata": object{"name": name, "labels": object{"kubernetes.io/hostname": name}},
			"status": object{
				"capacity":    object{"cpu": "64", "memory": "256Gi", "pods": fmt.Sprint(podsPerNode)},
				"allocatable": object{"cpu": "64", "memory": "256Gi", "pods": fmt.Sprint(podsPerNode)},
				"conditions": []object{{"type": "Ready", "status": "True", "reason": "KubeletReady",
					"lastHeartbeatTime": now(), "lastTransitionTime": now()}},
			},
		}
		if err := k.api.do(ctx, http.MethodPost, "/api/v1/nodes", node, nil); err != nil {
			return err
		}
	}
	return nil
}

// run does the kubelets' work until ctx ends, which is not an error. Requests that fail are tried
// again when the pod is seen next: kubelets do not give up because a server is away.
func (k *kubelets) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return k.heartbeat(ctx) })
	work := make(chan pod)
	for range kubeletWorkers {
		g.Go(func() error {
			for {
				select {
				case p := <-work:
					// A failure shows in the pod's state, and the next look at it tries again.
					_ = k.handle(ctx, p)
				case <-ctx.Done():
					return nil
				}
			}
		})
	}
	g.Go(func() error {
		for ctx.Err() == nil {
			// Whatever ends a watch, the list that follows sees what was missed.
			_ = k.follow(ctx, work)
			_ = proc.Wait(ctx, 100*time.Millisecond)
		}
		return nil
	})
	return g.Wait()
}

func (k *kubelets) heartbeat(ctx context.Context) error {
	for {
		for _, name := range k.nodes {
			path := "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
			spec := object{"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": time.Now().UTC().Format("2006-01-02T15:04:05.000000Z")}
			err := k.api.do(ctx, http.MethodPatch, path+"/"+name, object{"spec": spec}, nil)
			if isStatus(err, http.StatusNotFound) {
				_ = k.api.do(ctx, http.MethodPost, path, object{"metadata": object{"name": name}, "spec": spec}, nil)
			}
		}
		if err := proc.Wait(ctx, leaseEvery); err != nil {
			return nil
		}
	}
}

// relist is how long a watch is followed before everything is looked at anew, so that a pod whose
// request failed is not forgotten.
const relist = 10 * time.Second

// follow hands every pod that exists, and every one that changes, to work.
func (k *kubelets) follow(ctx context.Context, work chan<- pod) error {
	ctx, cancel := context.WithTimeout(ctx, relist)
	defer cancel()
	hand := func(p pod) error {
		select {
		case work <- p:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	var pods list[pod]
	if err := k.api.do(ctx, http.MethodGet, "/api/v1/pods", nil, &pods); err != nil {
		return err
	}
	for _, p := range pods.Items {
		if err := hand(p); err != nil {
			return err
		}
	}
	return k.api.watch(ctx, "/api/v1/pods?watch=1&resourceVersion="+pods.Metadata.ResourceVersion, func(kind string, p pod) error {
		switch kind {
		case "ADDED", "MODIFIED":
			return hand(p)
		case "DELETED":
			return nil
		}
		return errors.New("the watch ends: " + kind)
	})
}

// handle does what a kubelet has to do about a pod now, if anything.
func (k *kubelets) handle(ctx context.Context, p pod) error {
	path := fmt.Sprintf("/api/v1/namespaces/%s/pods/%s", p.Metadata.Namespace, p.Metadata.Name)
	switch {
	case p.Spec.NodeName == "":
		return nil
	case p.Metadata.DeletionTimestamp != "":
		return k.api.do(ctx, http.MethodDelete, path, object{
			"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0, "preconditions": object{"uid": p.Metadata.UID},
		}, nil)
	case p.Status.Phase == "Running":
		return nil
	}
	conditions := []object{}
	for _, kind := range []string{"PodScheduled", "Initialized", "ContainersReady", "Ready"} {
		conditions = append(conditions, object{"type": kind, "status": "True", "lastTransitionTime": now()})
	}
	return k.api.do(ctx, http.MethodPatch, path+"/status", object{
		"metadata": object{"uid": p.Metadata.UID},
		"status": object{
			"phase": "Running", "startTime": now(), "conditions": conditions,
			"containerStatuses": []object{{"name": "c", "image": "none", "imageID": "", "ready": true, "started": true,
				"restartCount": 0, "state": object{"running": object{"startedAt": now()}}}},
		},
	}, nil)
}
