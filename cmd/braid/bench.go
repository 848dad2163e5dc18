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

// benchFlags are the flags of the loads.
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

func (f *benchFlags) registerLoad(fs *pflag.FlagSet) {
	fs.StringVar(&f.user, "user", "", "NAME:PASSWORD of a store with authentication")
	fs.IntVar(&f.options.Clients, "clients", 64, "clients that send at the same time")
	fs.IntVar(&f.options.Connections, "conns", 8, "connections they share, spread over the endpoints")
	fs.Float64Var(&f.options.Rate, "rate", 0, "requests per second of all clients (open loop); 0: as fast as answers come (closed loop)")
	fs.DurationVar(&f.options.WarmUp, "warm-up", time.Second, "time that is not measured, before the duration")
	fs.DurationVar(&f.options.Duration, "duration", 10*time.Second, "measured time; 0: until --count")
	fs.Int64Var(&f.options.Count, "count", 0, "end after so many requests; 0: after the duration")
	fs.StringVar(&f.load.Keys.Prefix, "prefix", "", "what all keys begin with")
	fs.IntVar(&f.load.Keys.Size, "key-size", 16, "bytes of a key, prefix included")
	fs.IntVar(&f.load.ValueSize, "value-size", 256, "bytes of a value")
	fs.Int64Var(&f.load.Keys.Space, "keys", 100_000, "keys in the key space")
	fs.StringVar(&f.dist, "dist", bench.Uniform, "which keys: uniform, sequential, zipf[:EXPONENT] or hot[:SHARE:PART], SHARE of the requests to the first PART of the space")
	fs.BoolVar(&f.noFill, "no-fill", false, "do not write missing keys before a load that reads")
	fs.Int64Var(&f.load.RangeKeys, "range-keys", 1000, "keys of a range")
	fs.Int64Var(&f.load.Page, "page", 500, "keys of a page (list)")
	fs.IntVar(&f.load.TxnKeys, "txn-keys", 10, "puts of a transaction (txn)")
	fs.IntVar(&f.load.TxnParts, "txn-parts", 5, "equal parts of the key space that a transaction touches (txn)")
	fs.Int64Var(&f.load.LeaseTTL, "ttl", 60, "time to live of leases, seconds")
	fs.IntVar(&f.load.Watchers, "watchers", 0, "watchers that receive events meanwhile; the delivery is measured too")
	fs.IntVar(&f.load.WatchParts, "watch-parts", 1, "equal parts of the key space; each watcher watches one of them")
	fs.StringSliceVar(&f.against, "against", nil, "endpoints of a second store: rounds alternate between both, and ratios are printed")
	fs.IntVar(&f.rounds, "rounds", 5, "rounds of each store (with --against)")
	fs.StringVar(&f.plot, "plot", "", "write the result as a picture to this SVG file")
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
	if f.options.Count > 0 && !cmd.Flags().Changed("duration") {
		f.options.Duration = 0
	}
	f.load.RangeKeys = min(f.load.RangeKeys, f.load.Keys.Space)
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
		return f.show(cmd, report, []string{""}, report)
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
	return f.show(cmd, v, names[:], v.Rounds[0][0], v.Rounds[1][0])
}

// show prints a result and draws its reports.
func (f *benchFlags) show(cmd *cobra.Command, result interface{ Print(io.Writer) error }, names []string, reports ...*bench.Report) error {
	if f.plot != "" {
		var picture bytes.Buffer
		if err := bench.Plot(&picture, f.load.Name, names, reports); err != nil {
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

// unless sets a default of one subcommand: it does nothing when the flag was given.
func unless(cmd *cobra.Command, flag string, set func()) {
	if !cmd.Flags().Changed(flag) {
		set()
	}
}

func benchCommand() *cobra.Command {
	var f benchFlags
	load := func(use, short, kind string) *cobra.Command {
		return &cobra.Command{Use: use, Short: short, Args: exactArgs(0), RunE: func(cmd *cobra.Command, _ []string) error {
			f.load.Mix = []bench.Share{{Kind: kind, Weight: 1}}
			f.load.Name = kind
			return f.runLoad(cmd, bench.Run)
		}}
	}
	get := &cobra.Command{Use: "get", Short: "read single keys", Args: exactArgs(0)}
	serializable := get.Flags().Bool("serializable", false, "from the node that is asked, possibly stale")
	get.RunE = func(cmd *cobra.Command, _ []string) error {
		kind := "get"
		if *serializable {
			kind = "get-serializable"
		}
		f.load.Mix, f.load.Name = []bench.Share{{Kind: kind, Weight: 1}}, kind
		return f.runLoad(cmd, bench.Run)
	}
	mixed := &cobra.Command{Use: "mixed REQUEST=WEIGHT,...", Short: "send several kinds of requests",
		Long: "Send several kinds of requests, each as often as its weight says. The kinds:\n\n" + bench.KindHelp(),
		Args: exactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
			mix, err := bench.ParseMix(args[0])
			if err != nil {
				return &config.UsageError{Msg: err.Error()}
			}
			f.load.Mix = mix
			return f.runLoad(cmd, bench.Run)
		}}
	rng := &cobra.Command{Use: "range", Short: "read ranges", Args: exactArgs(0)}
	how := rng.Flags().String("as", "range", "range (one answer), list (pages), stream, keys (only), count (only)")
	rng.RunE = func(cmd *cobra.Command, _ []string) error {
		switch *how {
		case "range", "list", "stream", "keys", "count":
		default:
			return &config.UsageError{Msg: fmt.Sprintf("--as must be range, list, stream, keys or count, not %q", *how)}
		}
		f.load.Mix, f.load.Name = []bench.Share{{Kind: *how, Weight: 1}}, *how
		return f.runLoad(cmd, bench.Run)
	}
	watch := &cobra.Command{Use: "watch", Short: "put while watchers receive the events (1,000 puts per second to 100 watchers unless flags say otherwise)", Args: exactArgs(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			unless(cmd, "watchers", func() { f.load.Watchers = 100 })
			unless(cmd, "watch-parts", func() { f.load.WatchParts = f.load.Watchers })
			unless(cmd, "rate", func() { f.options.Rate = 1000 })
			f.load.Mix, f.load.Name = []bench.Share{{Kind: "put", Weight: 1}}, "watch"
			return f.runLoad(cmd, bench.Run)
		}}
	catchUp := &cobra.Command{Use: "catch-up", Short: "a watcher that resumes far in the past while puts go on (1,000 per second unless --rate says otherwise)", Args: exactArgs(0)}
	behind := catchUp.Flags().Int64("behind", 100_000, "revisions; they are written first")
	catchUp.RunE = func(cmd *cobra.Command, _ []string) error {
		unless(cmd, "rate", func() { f.options.Rate = 1000 })
		unless(cmd, "duration", func() { f.options.Duration = 2 * time.Minute })
		f.load.Mix, f.load.Name = []bench.Share{{Kind: "put", Weight: 1}}, "catch-up"
		return f.runLoad(cmd, func(ctx context.Context, t bench.Target, l bench.Load, o bench.Options, ob bench.Observer) (*bench.Report, error) {
			return bench.CatchUp(ctx, t, l, o, *behind, ob)
		})
	}
	expiry := &cobra.Command{Use: "expiry", Short: "many leases with a key each that expire at about the same time", Args: exactArgs(0)}
	leases := expiry.Flags().Int64("leases", 10_000, "how many")
	expiry.RunE = func(cmd *cobra.Command, _ []string) error {
		unless(cmd, "ttl", func() { f.load.LeaseTTL = 10 })
		f.load.Mix, f.load.Name = []bench.Share{{Kind: "put", Weight: 1}}, "expiry"
		return f.runLoad(cmd, func(ctx context.Context, t bench.Target, l bench.Load, o bench.Options, ob bench.Observer) (*bench.Report, error) {
			return bench.Expiry(ctx, t, l, o, *leases, ob)
		})
	}
	lease := group("lease", "grant, keep alive or let expire leases",
		load("grant", "grant leases", "lease-grant"), load("keepalive", "send keepalives, a stream and a lease for each client", "keepalive"), expiry)
	loads := []*cobra.Command{
		load("put", "write single keys", "put"), get, rng,
		load("delete", "delete single keys", "delete"),
		load("cas", "compare and put, as Kubernetes updates", "cas"),
		load("txn", "transactions of several puts in several parts of the key space", "txn"),
		mixed, watch, catchUp, lease}
	for _, c := range loads {
		f.register(c)
		f.registerLoad(c.PersistentFlags())
	}
	return group("bench", "measure a store that speaks etcd's API", append(loads, compareCommand())...)
}
