package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zapgrpc"
	"google.golang.org/grpc/grpclog"

	"braid/cmd/internal/config"
	"braid/cmd/internal/version"
)

// stopTimeout bounds a graceful stop; after it the process ends anyway. Nothing acknowledged
// depends on a clean stop.
const stopTimeout = 10 * time.Second

// failedStopTimeout bounds the stop of a node that has failed: whoever waits for its engine may
// wait for ever, as Pebble repeats a flush that fails.
const failedStopTimeout = 3 * time.Second

// impatience is how long after the first signal another one means "do not wait". Sooner it is an
// echo: supervisors signal a process and then its whole group.
const impatience = time.Second

// server is a running node.
type server interface {
	Done() <-chan error // delivers the error that stopped the node by itself
	Stop(ctx context.Context) error
}

// runServer runs a node until it is told to stop or fails, and returns the exit status.
func runServer(args, environ []string, stdout, stderr io.Writer) int {
	fail := func(err error) int {
		fmt.Fprintf(stderr, "braid: %s\n", config.OneLine(err))
		var usage *config.UsageError
		if errors.As(err, &usage) {
			return exitUsage
		}
		return exitError
	}
	p, err := config.Parse(args, environ)
	switch {
	case err != nil:
		return fail(err)
	case p.Help:
		fmt.Fprint(stdout, helpText())
		return exitOK
	case p.Version:
		fmt.Fprint(stdout, version.Get())
		return exitOK
	}
	cfg := p.Config
	if err := cfg.Validate(); err != nil {
		return fail(err)
	}
	// Before anything is opened: it may start the program anew.
	slackErr := allowTimerSlack(cfg.TimerSlack, p.File)
	lg, closeLog, err := cfg.BuildLogger()
	if err != nil {
		return fail(err)
	}
	defer closeLog()
	setGRPCLog(cfg.LogLevel, lg)
	announce(lg, p, args)
	if slackErr != nil {
		lg.Warn("timers keep the exactness that the process was started with; it takes more CPU", zap.Error(slackErr))
	}
	if err := cfg.Prepare(lg); err != nil {
		return fail(err)
	}
	sig, err := serve(cfg, lg, stdout)
	if err != nil {
		if !logsToStderr(cfg) {
			lg.Error("stopped by an error", zap.Error(err))
		}
		return fail(explain(err, cfg))
	}
	closeLog()
	return reraise(sig)
}

// serve starts the node, says that it is ready, and waits. It returns the signal that asked for
// the stop, or the error that made the node fail.
func serve(cfg *config.Config, lg *zap.Logger, stdout io.Writer) (os.Signal, error) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(signals)

	if os.Getenv("GOGC") == "" {
		// The live heap is small, because data lies in the state engine's own memory, so collecting half
		// as often as by default costs little memory. With a quarter as often, what the collector saves is
		// lost again where the first touch of a page is dear, on virtual machines most of all.
		debug.SetGCPercent(200)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	type started struct {
		s   server
		err error
	}
	startc := make(chan started, 1)
	go func() {
		s, err := startNode(ctx, cfg)
		startc <- started{s, err}
	}()
	var s server
	select {
	case sig := <-signals:
		// Told to stop while still starting, for example while there is no quorum yet, or in the midst
		// of a recovery from a disk that does not answer.
		lg.Info("received signal; shutting down", zap.String("signal", sig.String()))
		cancel()
		return sig, stop(func(ctx context.Context) error {
			if st := <-startc; st.err == nil {
				return st.s.Stop(ctx)
			}
			return nil
		}, lg, signals, stopTimeout)
	case st := <-startc:
		if st.err != nil {
			return nil, st.err
		}
		s = st.s
	}
	ready(cfg, lg, stdout)
	select {
	case err := <-s.Done():
		if err == nil {
			err = errors.New("the node stopped by itself")
		}
		if serr := stop(s.Stop, lg, signals, failedStopTimeout); serr != nil {
			err = fmt.Errorf("%w; %w", err, serr)
		}
		return nil, err
	case sig := <-signals:
		lg.Info("received signal; shutting down", zap.String("signal", sig.String()))
		return sig, stop(s.Stop, lg, signals, stopTimeout)
	}
}

// stop calls what stops the node; a second signal ends the wait, and so does the end of its time.
func stop(node func(ctx context.Context) error, lg *zap.Logger, signals <-chan os.Signal, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	// Who respects ctx needs a moment after it.
	over := time.NewTimer(timeout + time.Second)
	defer over.Stop()
	done := make(chan error, 1)
	go func() { done <- node(ctx) }()
	begin := time.Now()
	for {
		select {
		case err := <-done:
			if err != nil {
				return fmt.Errorf("stop: %w", err)
			}
			lg.Info("stopped")
			return nil
		case sig := <-signals:
			if time.Since(begin) >= impatience {
				return fmt.Errorf("stop: cut short by a second signal (%s)", sig)
			}
		case <-over.C:
			return fmt.Errorf("stop: not done after %v; the process ends without it", time.Since(begin).Round(time.Second))
		}
	}
}

// ready says where clients connect: in the log, in etcd's words, which harnesses wait for, and in a
// line for people; and to the init system. Programs that read the output of both streams expect
// log entries only, so the line goes to stdout just where the log does not show.
func ready(cfg *config.Config, lg *zap.Logger, stdout io.Writer) {
	lg.Info("ready to serve client requests")
	serving := func(traffic string, urls []url.URL) {
		for _, u := range urls {
			msg := "serving client traffic securely"
			if !config.Secure(u) {
				msg = "serving client traffic insecurely; this is strongly discouraged!"
			}
			lg.Info(msg, zap.String("traffic", traffic), zap.String("address", config.Address(u)))
		}
	}
	if len(cfg.ListenClientHTTPURLs) == 0 {
		serving("grpc+http", cfg.ListenClientURLs)
	} else {
		serving("grpc", cfg.ListenClientURLs)
		serving("http", cfg.ListenClientHTTPURLs)
	}
	line := fmt.Sprintf("braid is ready: clients connect to %s", types.URLs(cfg.AdvertiseClientURLs))
	lg.Info(line)
	if !logsToStderr(cfg) {
		fmt.Fprintln(stdout, line)
	}
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil {
		lg.Warn("failed to notify systemd for readiness", zap.Error(err))
	}
}

// announce logs what is about to be started and what the configuration has to say.
func announce(lg *zap.Logger, p *config.Parsed, args []string) {
	v := version.Get()
	lg.Info("starting braid", append([]zap.Field{
		zap.String("braid-version", v.Version), zap.String("etcd-version", version.Etcd), zap.String("git-sha", v.Commit),
		zap.String("go-version", v.Go), zap.String("platform", v.Platform), zap.Strings("args", args),
		zap.String("member-id", types.ID(p.Config.MemberID()).String()),
		zap.String("cluster-id", types.ID(p.Config.ClusterID()).String()),
		zap.Duration("timer-slack-in-force", timerSlack()),
	}, p.Config.Fields()...)...)
	for _, n := range p.Notices {
		if ce := lg.Check(n.Level, n.Text); ce != nil {
			ce.Write(n.Fields...)
		}
	}
}

// setGRPCLog keeps gRPC's own chatter out of the log unless it is asked for.
func setGRPCLog(level string, lg *zap.Logger) {
	if level == zapcore.DebugLevel.String() {
		grpclog.SetLoggerV2(zapgrpc.NewLogger(lg))
		return
	}
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, os.Stderr))
}

func logsToStderr(cfg *config.Config) bool {
	for _, o := range cfg.LogOutputs {
		if o == "default" || o == "stderr" {
			return true
		}
	}
	return false
}

// explain adds what to do about the usual reasons for a failed start.
func explain(err error, cfg *config.Config) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("cannot start: %w; another process uses the port: stop it, or choose other --listen-client-urls and --listen-peer-urls", err)
	case errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EROFS):
		return fmt.Errorf("cannot start: %w; check the owner and the permissions of %s", err, absolute(cfg.DataDir))
	case errors.Is(err, syscall.ENOSPC):
		return fmt.Errorf("%w; the disk of %s is full: free space and start again, nothing acknowledged is lost", err, absolute(cfg.DataDir))
	}
	return err
}

func absolute(path string) string {
	if a, err := filepath.Abs(path); err == nil {
		return a
	}
	return path
}

// reraise ends the process by the signal that stopped it, as etcd does, so that a supervisor sees
// why it ended. Process 1 exits with 0: the kernel would ignore the signal.
func reraise(sig os.Signal) int {
	n, ok := sig.(syscall.Signal)
	if !ok || os.Getpid() == 1 {
		return exitOK
	}
	signal.Reset(n)
	if err := syscall.Kill(os.Getpid(), n); err != nil {
		return 128 + int(n)
	}
	// The signal is delivered to some thread, not necessarily before Kill returns. Should it never
	// arrive, the status is what a shell would have reported.
	<-time.NewTimer(time.Second).C
	return 128 + int(n)
}

// helpText is the text of --help.
func helpText() string {
	return strings.TrimSpace(`
braid runs a node of a key-value store that speaks etcd's v3 API.

Usage:
  braid [flags]                 run a node; without flags a full store on this machine
  braid region list|transfer    see regions, move their leadership
  braid pd status|transfer      see the placement group, move its leadership
  braid cluster start|status|stop
                                try out a cluster of several nodes on this machine
  braid bench put|get|...       measure a store that speaks etcd's API; bench --help lists the loads
  braid --version

Every flag can be given as an environment variable (--data-dir is ETCD_DATA_DIR) or as a key of
the YAML file named by --config-file.
`) + "\n\n" + config.Usage()
}
