// Command kubernetes runs Kubernetes on real braid processes and judges what it made of them.
//
//	kubernetes [flags] CHECK...
//
//	storage       Kubernetes' own storage tests, a new store for each test
//	load          N objects created, listed, paged, watched, updated and deleted through a
//	              kube-apiserver; every count is judged
//	load2         the same with two of them, of which one is killed and started again
//	consistency   loads for ten minutes, seen by one more kube-apiserver that compares its caches
//	              with the store (KUBE_WATCHCACHE_CONSISTENCY_CHECKER)
//	controllers   a controller-manager, a scheduler and 300 pods on nodes whose kubelets are played
//
// All but storage run on three nodes with /registry split into some fifty regions, one boundary in
// the midst of the objects. With -kill the nodes are killed (-9) in turn meanwhile and started
// again. Wherever there is a kube-apiserver, its consistent reads must have been answered from its
// watch caches: a read that fell back to the store waited for three seconds in vain for word that
// the watched regions are complete.
//
// Kubernetes itself comes from outside. -suites is a program that is called as
//
//	SUITES storage BINARY          runs the storage tests against BINARY, which takes etcd's flags
//	SUITES load ENDPOINTS N        runs a kube-apiserver on port 16443 (token: admintoken) and the
//	SUITES load2 ENDPOINTS N       load; load2 has another one on port 16444
//
// with the folder for its logs in OUT; the load's own report is OUT/kload.log (judge.go reads it).
// -programs is a folder with kube-apiserver, kube-controller-manager and kube-scheduler, for
// consistency and controllers; docs/kubernetes.md says how to build them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"time"

	"braid/cmd/tests/etcdbin"
)

type options struct {
	check    string // the one that runs
	braid    string
	suites   string
	programs string
	dir      string
	n        int
	kill     bool
	duration time.Duration
	pods     int
}

// check is one of the things that can be asked for.
type check struct {
	name string
	run  func(context.Context, options) error
}

var checks = []check{
	{"storage", storage},
	{"load", load},
	{"load2", load},
	{"consistency", consistency},
	{"controllers", controllers},
}

func main() {
	var o options
	flag.StringVar(&o.braid, "braid", "", "braid binary (default: built from this repository)")
	flag.StringVar(&o.suites, "suites", os.Getenv("KUBERNETES_SUITES"), "program that runs Kubernetes' tests and the load")
	flag.StringVar(&o.programs, "programs", os.Getenv("KUBERNETES_PROGRAMS"), "folder with kube-apiserver, kube-controller-manager and kube-scheduler")
	flag.StringVar(&o.dir, "dir", "", "folder for data and logs (default: a temporary one, removed after success)")
	flag.IntVar(&o.n, "n", 10_000, "objects of a load")
	flag.BoolVar(&o.kill, "kill", false, "kill the nodes in turn meanwhile")
	flag.DurationVar(&o.duration, "duration", 10*time.Minute, "how long to load (consistency)")
	flag.IntVar(&o.pods, "pods", 100, "pods of each of three deployments (controllers)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, o, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "kubernetes:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, names []string) (err error) {
	if len(names) == 0 {
		flag.Usage()
		return errors.New("say what to check: storage, load, load2, consistency, controllers")
	}
	if o.braid == "" {
		o.braid, err = etcdbin.Braid()
	} else {
		o.braid, err = filepath.Abs(o.braid)
	}
	if err != nil {
		return err
	}
	keep := o.dir != ""
	if !keep {
		if o.dir, err = os.MkdirTemp("", "braid-kubernetes-"); err != nil {
			return err
		}
	}
	base := o.dir
	for _, name := range names {
		i := slices.IndexFunc(checks, func(c check) bool { return c.name == name })
		if i < 0 {
			return fmt.Errorf("there is no check %q", name)
		}
		if o.dir, err = filepath.Abs(filepath.Join(base, name)); err != nil {
			return err
		}
		if err := os.MkdirAll(base, 0o755); err != nil {
			return err
		}
		if err := os.Mkdir(o.dir, 0o755); err != nil {
			return fmt.Errorf("every check needs a new folder: %w", err)
		}
		started := time.Now()
		fmt.Printf("== %s%s\n", name, map[bool]string{true: ", nodes are killed"}[o.kill])
		o.check = name
		if err := checks[i].run(ctx, o); err != nil {
			return fmt.Errorf("%s: %w\nlogs: %s", name, err, o.dir)
		}
		fmt.Printf("%s: good, %s\n", name, time.Since(started).Round(time.Second))
	}
	if keep {
		return nil
	}
	return os.RemoveAll(base)
}
