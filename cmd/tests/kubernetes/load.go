package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"braid/cmd/tests/proc"
)

// Where the suites' kube-apiservers listen.
var loadAPIs = []string{"127.0.0.1:16443", "127.0.0.1:16444"}

const kloadLog = "kload.log"

// suites calls the program that has Kubernetes' tests, with its logs in out. It is stopped, with
// what it started, when ctx ends.
func suites(ctx context.Context, o options, out string, env []string, args ...string) error {
	if o.suites == "" {
		return errors.New("-suites names no program")
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	bin, err := filepath.Abs(o.suites)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = append(append(os.Environ(), "OUT="+out), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w", bin, strings.Join(args, " "), err)
	}
	return nil
}

func storage(ctx context.Context, o options) error {
	return suites(ctx, o, o.dir, nil, "storage", o.braid)
}

// load runs one load through one kube-apiserver, or two.
func load(ctx context.Context, o options) (err error) {
	s, err := startStore(ctx, o, o.n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	if err := loadOnce(ctx, o, s, o.dir, nil); err != nil {
		return err
	}
	split, err := s.split(ctx)
	if err == nil && !split {
		err = fmt.Errorf("the load began later than %d s after the store, so its objects were all in one region: try again", loadWithin)
	}
	return err
}

// loadOnce runs one load on s and judges it and the consistent reads meanwhile.
func loadOnce(ctx context.Context, o options, s *store, out string, env []string) error {
	beside, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	meters := make([]meter, len(loadAPIs))
	for i, addr := range loadAPIs {
		meters[i].api = newAPI(addr)
		wg.Go(func() { meters[i].run(beside) })
	}
	var killErr error
	k := killer{cluster: s.cluster}
	if o.kill {
		wg.Go(func() { killErr = killWhileCounting(beside, &k, s, filepath.Join(out, kloadLog)) })
	}
	check := "load"
	if o.check == "load2" {
		check = o.check
	}
	err := suites(ctx, o, out, env, check, urls(s.cluster.Endpoints()), fmt.Sprint(o.n))
	stop()
	wg.Wait()
	if err := errors.Join(err, killErr); err != nil {
		return err
	}
	log, err := os.ReadFile(filepath.Join(out, kloadLog))
	if err != nil {
		return err
	}
	if err := judge(string(log), o.n, o.kill); err != nil {
		return err
	}
	for i := range meters {
		if err := meters[i].judge(); err != nil {
			return err
		}
	}
	if meters[0].seen.cache < loadRereads {
		return fmt.Errorf("only %d consistent reads were counted", meters[0].seen.cache)
	}
	if o.kill {
		fmt.Printf("nodes killed: %d\n", k.killed)
		if k.killed == 0 {
			return errors.New("the load was over before a node was killed")
		}
	}
	return nil
}

// killWhileCounting kills nodes during the steps of the load that count their failed requests; in
// the others a failed request ends the load, and so does a missing one among the first loadRereads
// objects. With a node die the requests that it is executing, and their clients cannot know what
// became of them.
func killWhileCounting(ctx context.Context, k *killer, s *store, logPath string) error {
	for {
		if err := proc.Wait(ctx, between/2); err != nil {
			return nil
		}
		log, err := os.ReadFile(logPath)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		steps := parseTally(string(log)).steps
		creating, updating := steps["create"] == nil, steps["versions"] != nil && steps["update"] == nil
		if !creating && !updating {
			continue
		}
		if creating {
			n, err := s.count(ctx, "/registry/configmaps/load-")
			if err != nil || n < 2*loadRereads {
				continue // looked at again
			}
		}
		if err := k.once(ctx); err != nil {
			return err
		}
	}
}

// meter asks a kube-apiserver for consistent lists all the time, of a kind whose watch covers many
// regions, and reads what all consistent reads were answered from.
type meter struct {
	api          *api
	asked, stale int // lists; and those with an earlier revision than one before
	failed       int
	seen         reads
}

const (
	// meterEvery is between two lists.
	meterEvery = 250 * time.Millisecond
	// metricsEvery is how many lists are between two looks at the metrics, which are megabytes.
	metricsEvery = 8
)

func (m *meter) run(ctx context.Context) {
	var last uint64
	for i := 0; proc.Wait(ctx, meterEvery) == nil; i++ {
		var configs list[struct{}]
		err := m.api.do(ctx, http.MethodGet, "/api/v1/namespaces/default/configmaps", nil, &configs)
		if err == nil {
			var revision uint64
			if _, err := fmt.Sscan(configs.Metadata.ResourceVersion, &revision); err != nil || revision < last {
				m.stale++
			}
			last = revision
			m.asked++
		} else {
			m.failed++ // also before kube-apiserver runs and after it has ended
		}
		if i%metricsEvery == 0 {
			m.look(ctx)
		}
	}
}

// look reads the counters; a kube-apiserver that was started again begins at zero.
func (m *meter) look(ctx context.Context) {
	if text, err := m.api.text(ctx, "/metrics"); err == nil {
		now := parseReads(text)
		m.seen = reads{cache: max(m.seen.cache, now.cache), store: max(m.seen.store, now.store)}
	}
}

// judge prints what was counted, and complains about reads that the cache could not answer.
func (m *meter) judge() error {
	if m.asked == 0 {
		return nil // it did not run
	}
	fmt.Printf("%s: %d consistent reads from the watch cache, %d from the store; of ours %d were answered and %d not\n",
		m.api.url, m.seen.cache, m.seen.store, m.asked, m.failed)
	var errs []error
	if m.seen.store > 0 {
		errs = append(errs, fmt.Errorf("%d consistent reads fell back to the store", m.seen.store))
	}
	if m.stale > 0 {
		errs = append(errs, fmt.Errorf("%d consistent lists had an earlier revision than one before", m.stale))
	}
	return errors.Join(errs...)
}

// consistency runs loads for a while, and beside them a kube-apiserver that compares its caches with
// the store. It does so once for each kind of objects, five to seven and a half minutes after its
// start, and ends itself when they differ.
func consistency(ctx context.Context, o options) (err error) {
	s, err := startStore(ctx, o, o.n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	const checker = "KUBE_WATCHCACHE_CONSISTENCY_CHECKER=true"
	c, err := startAPI(ctx, o, s.cluster.Endpoints(), checker)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.stop()) }()
	until := time.Now().Add(o.duration)
	for i := 1; time.Now().Before(until); i++ {
		if err := loadOnce(ctx, o, s, filepath.Join(o.dir, fmt.Sprintf("load-%d", i)), []string{checker}); err != nil {
			return err
		}
		if err := c.alive(); err != nil {
			return err
		}
	}
	text, err := c.api.text(ctx, "/metrics")
	if err != nil {
		return err
	}
	return judgeCaches(text)
}
