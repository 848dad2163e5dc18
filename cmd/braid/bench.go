package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"braid/cmd/internal/bench"
	"braid/cmd/internal/config"
)

// benchFlags are the flags of a load; each load registers those that it heeds.
type benchFlags struct {
	clientFlags
	user    string
	dist    string
	load    bench.Load
	options bench.Options
	noFill  bool
	against []string
	rounds  int
	plot    string
}

// newBenchFlags has the defaults of what a load has no flag for.
func newBenchFlags() *benchFlags {
	f := &benchFlags{dist: bench.Uniform, options: bench.Options{Duration: 10 * time.Second}}
	f.load.Defaults()
	return f
}

// registerLoad registers the flags that every load has.
func (f *benchFlags) registerLoad(cmd *cobra.Command) {
	f.register(cmd)
	fs := cmd.PersistentFlags()
	fs.Lookup("command-timeout").Usage = "timeout of a request"
	fs.Lookup("endpoints").Usage = "nodes to send to"
	fs.StringVar(&f.user, "user", "", "NAME:PASSWORD of a store with authentication")
	fs.IntVar(&f.options.Clients, "clients", 64, "clients that send at the same time")
	fs.IntVar(&f.options.Connections, "conns", 8, "connections they share, spread over the endpoints")
	fs.StringSliceVar(&f.against, "against", nil, "endpoints of a second store: rounds alternate between both, and ratios are printed")
	fs.IntVar(&f.rounds, "rounds", 5, "rounds of each store (with --against)")
	fs.StringVar(&f.plot, "plot", "", "write the result as a picture to this SVG file")
}

func (f *benchFlags) registerRate(fs *pflag.FlagSet, rate float64) {
	fs.Float64Var(&f.options.Rate, "rate", rate, "requests per second of all clients (open loop); 0: as fast as answers come (closed loop)")
}

func (f *benchFlags) registerTime(fs *pflag.FlagSet) {
	fs.DurationVar(&f.options.WarmUp, "warm-up", time.Second, "time that is not measured, before the duration; none with --count unless it is given")
	fs.DurationVar(&f.options.Duration, "duration", 10*time.Second, "measured time; 0: until --count, as when only that is given")
	fs.Int64Var(&f.options.Count, "count", 0, "end after so many requests; 0: after the duration")
}

func (f *benchFlags) registerNames(fs *pflag.FlagSet) {
	fs.StringVar(&f.load.Keys.Prefix, "prefix", "", "what all keys begin with")
	fs.IntVar(&f.load.Keys.Size, "key-size", 16, "bytes of a key, prefix included")
}

func (f *benchFlags) registerKeys(fs *pflag.FlagSet) {
	f.registerNames(fs)
	fs.Int64Var(&f.load.Keys.Space, "keys", 100_000, "keys in the key space")
	fs.StringVar(&f.dist, "dist", bench.Uniform, "which keys: uniform, sequential, zipf[:EXPONENT] or hot[:SHARE:PART], SHARE of the requests to the first PART of the space")
}

// registerKeyed registers the flags of a load of single keys or ranges; rate is the default of --rate.
func (f *benchFlags) registerKeyed(cmd *cobra.Command, rate float64) *pflag.FlagSet {
	f.registerLoad(cmd)
	fs := cmd.Flags()
	f.registerRate(fs, rate)
	f.registerTime(fs)
	f.registerKeys(fs)
	return fs
}

func (f *benchFlags) registerValues(fs *pflag.FlagSet) {
	fs.IntVar(&f.load.ValueSize, "value-size", 256, "bytes of a value")
}

// registerFill is for loads that read keys, which are written first.
func (f *benchFlags) registerFill(fs *pflag.FlagSet) {
	f.registerValues(fs)
	fs.BoolVar(&f.noFill, "no-fill", false, "do not write missing keys before a load that reads")
}

func (f *benchFlags) registerRange(fs *pflag.FlagSet) {
	fs.Int64Var(&f.load.RangeKeys, "range-keys", 1000, "keys of a range")
	fs.Int64Var(&f.load.Page, "page", 500, "keys of a page (list)")
}

func (f *benchFlags) registerTxn(fs *pflag.FlagSet) {
	fs.IntVar(&f.load.TxnKeys, "txn-keys", 10, "puts of a transaction")
	fs.IntVar(&f.load.TxnParts, "txn-parts", 5, "equal parts of the key space that a transaction touches")
}

func (f *benchFlags) registerLease(fs *pflag.FlagSet, ttl int64) {
	fs.Int64Var(&f.load.LeaseTTL, "ttl", ttl, "time to live of leases, seconds")
}

// registerWatchers is for loads that put; parts is the default of --watch-parts.
func (f *benchFlags) registerWatchers(fs *pflag.FlagSet, watchers, parts int) {
	fs.IntVar(&f.load.Watchers, "watchers", watchers, "watchers that receive events meanwhile; the delivery is measured too")
	fs.IntVar(&f.load.WatchParts, "watch-parts", parts, "equal parts of the key space; each watcher watches one of them; 0: as many as there are watchers")
}

// target makes the target of the endpoints.
func (f *benchFlags) benchTarget(endpoints []string) (bench.Target, error) {
	t := bench.Target{Endpoints: endpoints}
	if f.user != "" {
		var ok bool
		if t.Username, t.Password, ok = strings.Cut(f.user, ":"); !ok {
			return t, &config.UsageError{Msg: "--user must be NAME:PASSWORD"}
		}
	}
	secure := f.tls.CertFile != "" || f.tls.TrustedCAFile != "" || f.insecureSkipVerify
	for _, ep := range endpoints {
		_, s, err := f.clientFlags.target(ep)
		if err != nil {
			return t, &config.UsageError{Msg: err.Error()}
		}
		secure = secure || s
	}
	if secure {
		tc, err := f.tls.ClientConfig()
		if err != nil {
			return t, err
		}
		tc.InsecureSkipVerify = f.insecureSkipVerify
		t.TLS = tc
	}
	return t, nil
}

// prepare checks all flags, so that what is wrong is said before anything is sent.
func (f *benchFlags) prepare(cmd *cobra.Command) error {
	if err := f.environment(cmd.Flags()); err != nil {
		return &config.UsageError{Msg: err.Error()}
	}
	var err error
	if f.load.Keys.Dist, err = bench.ParseDist(f.dist); err != nil {
		return &config.UsageError{Msg: "--dist: " + err.Error()}
	}
	if f.options.Count > 0 {
		unless(cmd, "duration", func() { f.options.Duration = 0 })
		unless(cmd, "warm-up", func() { f.options.WarmUp = 0 })
	}
	f.load.RangeKeys = min(f.load.RangeKeys, f.load.Keys.Space)
	unless(cmd, "txn-keys", func() { f.load.TxnKeys = int(min(int64(f.load.TxnKeys), f.load.Keys.Space)) })
	unless(cmd, "txn-parts", func() { f.load.TxnParts = min(f.load.TxnParts, f.load.TxnKeys) })
	if f.load.WatchParts == 0 {
		f.load.WatchParts = max(f.load.Watchers, 1)
	}
	if f.rounds < 1 {
		return &config.UsageError{Msg: "--rounds must be at least 1"}
	}
	f.options.Timeout, f.options.Fill = f.timeout, !f.noFill
	if err := errors.Join(f.load.Validate(), f.options.Validate()); err != nil {
		return &config.UsageError{Msg: config.OneLine(err)}
	}
	return nil
}

// interruptible is a context that ends with the first interrupt; a second one ends the program as
// usual.
func interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}

// runLoad measures a load, at two stores in turn with --against, and prints what it took.
func (f *benchFlags) runLoad(cmd *cobra.Command, measure bench.Measure) error {
	if err := f.prepare(cmd); err != nil {
		return err
	}
	target, err := f.benchTarget(f.endpoints)
	if err != nil {
		return err
	}
	ctx, stop := interruptible(cmd.Context())
	defer stop()
	bar := bench.NewBar(cmd.ErrOrStderr())
	if len(f.against) == 0 {
		report, err := measure(ctx, target, f.load, f.options, bench.Observer{Progress: bar.Show})
		bar.Clear()
		if err != nil {
			return err
		}
		if err := f.show(cmd, report, []string{""}, report); err != nil {
			return err
		}
		return succeeded(report)
	}
	other, err := f.benchTarget(f.against)
	if err != nil {
		return err
	}
	names := [2]string{strings.Join(f.endpoints, ","), strings.Join(f.against, ",")}
	v, err := bench.Against(ctx, names, [2]bench.Target{target, other}, f.load, f.options, f.rounds, measure, func(round, side int) bench.Observer {
		bar.Title(fmt.Sprintf("round %d of %d, %s", round+1, f.rounds, names[side]))
		return bench.Observer{Progress: bar.Show}
	})
	bar.Clear()
	if err != nil {
		return err
	}
	if err := f.show(cmd, v, names[:], v.Rounds[0][0], v.Rounds[1][0]); err != nil {
		return err
	}
	return errors.Join(succeeded(v.Rounds[0]...), succeeded(v.Rounds[1]...))
}

// succeeded is an error when reports of a store have nothing but failures.
func succeeded(reports ...*bench.Report) error {
	for _, r := range reports {
		if r.Interrupted || r.Succeeded() {
			return nil
		}
	}
	return fmt.Errorf("no request succeeded at %s", strings.Join(reports[0].Endpoints, ","))
}

// show prints a result and draws its reports.
func (f *benchFlags) show(cmd *cobra.Command, result interface{ Print(io.Writer) error }, names []string, reports ...*bench.Report) error {
	if f.plot != "" {
		var picture bytes.Buffer
		if err := bench.Plot(&picture, names, reports); err != nil {
			return err
		}
		if err := os.WriteFile(f.plot, picture.Bytes(), 0o644); err != nil {
			return err
		}
	}
	if f.output == "json" {
		return printJSON(cmd.OutOrStdout(), result)
	}
	return result.Print(cmd.OutOrStdout())
}

// unless does nothing when the flag was given.
func unless(cmd *cobra.Command, flag string, set func()) {
	if !cmd.Flags().Changed(flag) {
		set()
	}
}

// loadCommand is a subcommand that sends one kind of request.
func loadCommand(use, short, kind string, flags func(*benchFlags, *pflag.FlagSet)) *cobra.Command {
	f := newBenchFlags()
	c := &cobra.Command{Use: use, Short: short, Args: exactArgs(0), RunE: func(cmd *cobra.Command, _ []string) error {
		return f.runKind(cmd, kind)
	}}
	f.registerLoad(c)
	f.registerRate(c.Flags(), 0)
	f.registerTime(c.Flags())
	flags(f, c.Flags())
	return c
}

// runKind measures a load of one kind of request.
func (f *benchFlags) runKind(cmd *cobra.Command, kind string) error {
	f.load.Mix, f.load.Name = []bench.Share{{Kind: kind, Weight: 1}}, kind
	return f.runLoad(cmd, bench.Run)
}

func benchCommand() *cobra.Command {
	puts := func(f *benchFlags, fs *pflag.FlagSet) {
		f.registerKeys(fs)
		f.registerValues(fs)
		f.registerWatchers(fs, 0, 1)
	}
	lease := group("lease", "grant, keep alive or let expire leases",
		loadCommand("grant", "grant leases", "lease-grant", func(f *benchFlags, fs *pflag.FlagSet) { f.registerLease(fs, 60) }),
		loadCommand("keepalive", "send keepalives, a stream and a lease for each client", "keepalive", func(f *benchFlags, fs *pflag.FlagSet) { f.registerLease(fs, 60) }),
		expiryCommand())
	return group("bench", "measure a store that speaks etcd's API",
		loadCommand("put", "write single keys", "put", puts),
		getCommand(), rangeCommand(),
		loadCommand("delete", "delete single keys", "delete", (*benchFlags).registerKeys),
		loadCommand("cas", "compare and put, as Kubernetes updates", "cas", puts),
		loadCommand("txn", "transactions of several puts in several parts of the key space", "txn", func(f *benchFlags, fs *pflag.FlagSet) { puts(f, fs); f.registerTxn(fs) }),
		mixedCommand(), watchCommand(), catchUpCommand(), lease, compareCommand())
}

func getCommand() *cobra.Command {
	f := newBenchFlags()
	c := &cobra.Command{Use: "get", Short: "read single keys", Args: exactArgs(0)}
	fs := f.registerKeyed(c, 0)
	f.registerFill(fs)
	serializable := fs.Bool("serializable", false, "from the node that is asked, possibly stale")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if *serializable {
			return f.runKind(cmd, "get-serializable")
		}
		return f.runKind(cmd, "get")
	}
	return c
}

func rangeCommand() *cobra.Command {
	f := newBenchFlags()
	c := &cobra.Command{Use: "range", Short: "read ranges", Args: exactArgs(0)}
	fs := f.registerKeyed(c, 0)
	f.registerFill(fs)
	f.registerRange(fs)
	how := fs.String("as", "range", "range (one answer), list (pages), stream, keys (only), count (only)")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		switch *how {
		case "range", "list", "stream", "keys", "count":
			return f.runKind(cmd, *how)
		}
		return &config.UsageError{Msg: fmt.Sprintf("--as must be range, list, stream, keys or count, not %q", *how)}
	}
	return c
}

func mixedCommand() *cobra.Command {
	f := newBenchFlags()
	c := &cobra.Command{Use: "mixed REQUEST=WEIGHT,...", Short: "send several kinds of requests",
		Long: "Send several kinds of requests, each as often as its weight says. The kinds:\n\n" + bench.KindHelp(),
		Args: exactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
			mix, err := bench.ParseMix(args[0])
			if err != nil {
				return &config.UsageError{Msg: err.Error()}
			}
			f.load.Mix, f.load.Name = mix, ""
			return f.runLoad(cmd, bench.Run)
		}}
	fs := f.registerKeyed(c, 0)
	f.registerFill(fs)
	f.registerRange(fs)
	f.registerTxn(fs)
	f.registerLease(fs, 60)
	f.registerWatchers(fs, 0, 1)
	return c
}

func watchCommand() *cobra.Command {
	f := newBenchFlags()
	c := &cobra.Command{Use: "watch", Short: "put while watchers receive the events",
		Long: "Put while watchers receive the events. Each event reaches the watchers of its part of the key space:\n" +
			"--watchers divided by --watch-parts, one unless flags say otherwise, all with --watch-parts 1.",
		Args: exactArgs(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			f.load.Mix, f.load.Name = []bench.Share{{Kind: "put", Weight: 1}}, "watch"
			return f.runLoad(cmd, bench.Run)
		}}
	fs := f.registerKeyed(c, 1000)
	f.registerValues(fs)
	f.registerWatchers(fs, 100, 0)
	return c
}

func catchUpCommand() *cobra.Command {
	f := newBenchFlags()
	c := &cobra.Command{Use: "catch-up", Short: "a watcher that resumes far in the past while puts go on", Args: exactArgs(0)}
	f.registerLoad(c)
	fs := c.Flags()
	fs.Float64Var(&f.options.Rate, "rate", 1000, "puts per second meanwhile")
	fs.DurationVar(&f.options.WarmUp, "warm-up", time.Second, "time that is not measured, before the puts are measured without the watcher, which takes three times as long")
	fs.DurationVar(&f.options.Duration, "duration", 2*time.Minute, "time within which the watcher has to catch up")
	f.registerKeys(fs)
	f.registerValues(fs)
	behind := fs.Int64("behind", 100_000, "revisions; they are written first")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		f.load.Mix, f.load.Name = []bench.Share{{Kind: "put", Weight: 1}}, "catch-up"
		return f.runLoad(cmd, func(ctx context.Context, t bench.Target, l bench.Load, o bench.Options, ob bench.Observer) (*bench.Report, error) {
			return bench.CatchUp(ctx, t, l, o, *behind, ob)
		})
	}
	return c
}

func expiryCommand() *cobra.Command {
	f := newBenchFlags()
	c := &cobra.Command{Use: "expiry", Short: "many leases with a key each that expire at about the same time", Args: exactArgs(0)}
	f.registerLoad(c)
	fs := c.Flags()
	c.PersistentFlags().Lookup("clients").Usage = "clients that grant at the same time"
	f.registerNames(fs)
	f.registerLease(fs, 10)
	leases := fs.Int64("leases", 10_000, "how many")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		f.load.Mix, f.load.Name = []bench.Share{{Kind: "put", Weight: 1}}, "expiry"
		return f.runLoad(cmd, func(ctx context.Context, t bench.Target, l bench.Load, o bench.Options, ob bench.Observer) (*bench.Report, error) {
			return bench.Expiry(ctx, t, l, o, *leases, ob)
		})
	}
	return c
}
