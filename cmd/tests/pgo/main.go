// Command pgo makes the profile by which the compiler optimises braid (profile-guided optimisation; the
// go command uses default.pgo beside a main package by itself).
//
// It starts three nodes, puts one load after another on them with "braid bench", takes CPU profiles of
// all nodes meanwhile and merges them. What the profile weighs is therefore what the loads below weigh:
// puts most, then reads, then the rest. A profile of older code is used as far as its lines still match,
// so it is made again when hot paths have changed, not with every commit.
//
//	go run ./pgo -out ../braid/default.pgo
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/google/pprof/profile"

	"braid/cmd/tests/etcdbin"
	"braid/cmd/tests/proc"
)

// loads are arguments of "braid bench", each for the same time.
var loads = [][]string{
	{"put", "--clients", "1000", "--conns", "100"},
	{"put", "--clients", "64", "--conns", "16"},
	{"mixed", "get=8,range=1,list=1,cas=4,txn=1,put=4,delete=1", "--clients", "200", "--conns", "50"},
	{"watch", "--watchers", "200", "--rate", "0"},
}

func main() {
	out := flag.String("out", "default.pgo", "the profile to write")
	duration := flag.Duration("duration", 15*time.Second, "time of each load")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *out, *duration); err != nil {
		fmt.Fprintln(os.Stderr, "pgo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out string, d time.Duration) (err error) {
	bin, err := etcdbin.Braid()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "braid-pgo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	cluster, err := proc.NewCluster(bin, dir, 3, "--enable-pprof", "--region-split-keys", "k000000000012500,k000000000025000,k000000000037500,k000000000050000,k000000000062500,k000000000075000,k000000000087500")
	if err != nil {
		return err
	}
	if err := cluster.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cluster.Kill()) }()
	var all []*profile.Profile
	for _, load := range loads {
		fmt.Println("braid bench", strings.Join(load, " "))
		args := append(append([]string{"bench"}, load...), "--endpoints", strings.Join(cluster.Endpoints(), ","),
			"--prefix", "k", "--warm-up", "2s", "--duration", (d + 4*time.Second).String())
		cmd := exec.CommandContext(ctx, bin, args...)
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			return err
		}
		profiles, err := take(ctx, cluster, d)
		if err = errors.Join(err, cmd.Wait()); err != nil {
			return err
		}
		all = append(all, profiles...)
	}
	merged, err := profile.Merge(all)
	if err != nil {
		return err
	}
	clean(merged)
	file, err := os.Create(out)
	if err != nil {
		return err
	}
	return errors.Join(merged.Write(file), file.Close())
}

// take profiles every node for a while, beginning after the load has.
func take(ctx context.Context, c *proc.Cluster, d time.Duration) ([]*profile.Profile, error) {
	if err := proc.Wait(ctx, 3*time.Second); err != nil {
		return nil, err
	}
	profiles, failed := make([]*profile.Profile, len(c.Nodes)), make([]error, len(c.Nodes))
	var wg sync.WaitGroup
	for i, n := range c.Nodes {
		wg.Go(func() {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%s/debug/pprof/profile?seconds=%d", n.Client, int(d.Seconds())), nil)
			if err != nil {
				failed[i] = err
				return
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				failed[i] = err
				return
			}
			defer resp.Body.Close()
			profiles[i], failed[i] = profile.Parse(resp.Body)
		})
	}
	wg.Wait()
	return profiles, errors.Join(failed...)
}

// clean takes out what says where the profile was made: the compiler looks at names of functions and at
// lines.
func clean(p *profile.Profile) {
	p.Comments, p.TimeNanos = nil, 0
	for _, m := range p.Mapping {
		m.File, m.BuildID = "", ""
	}
	for _, f := range p.Function {
		f.Filename = filepath.Base(f.Filename)
	}
}
