package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"braid/cmd/internal/admin"
	"braid/cmd/internal/cluster"
	"braid/cmd/internal/config"
)

// runCommand runs a subcommand and returns the exit status.
func runCommand(args []string, stdout, stderr io.Writer) int {
	root := &cobra.Command{
		Use:               "braid",
		SilenceUsage:      true,
		SilenceErrors:     true,
		DisableAutoGenTag: true,
		Args:              cobra.ArbitraryArgs, // or its own words for an unknown command, in several lines
		RunE: func(cmd *cobra.Command, args []string) error {
			msg := fmt.Sprintf("unknown command %q", args[0])
			if near := nearest(args[0], subcommands(cmd)); near != "" {
				msg += fmt.Sprintf("; did you mean %s?", near)
			} else {
				msg += "; a node is started with flags alone, see braid --help"
			}
			return &config.UsageError{Msg: msg}
		},
	}
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetArgs(args)
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(regionCommand(), pdCommand(), clusterCommand(), benchCommand())
	err := root.ExecuteContext(context.Background())
	if err == nil {
		return exitOK
	}
	fmt.Fprintf(stderr, "braid: %s\n", config.OneLine(err))
	var node *cluster.NodeError
	if errors.As(err, &node) {
		for _, line := range node.Last {
			fmt.Fprintln(stderr, line)
		}
	}
	var usage *config.UsageError
	if errors.As(err, &usage) || !knownCommand(root, args) {
		return exitUsage
	}
	return exitError
}

// knownCommand says whether the arguments name a command that exists and can be run.
func knownCommand(root *cobra.Command, args []string) bool {
	c, _, err := root.Find(args)
	return err == nil && c.Runnable()
}

// group is a command that only has subcommands; a wrong or missing one is a usage error that
// names the nearest.
func group(use, short string, subs ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, RunE: func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return &config.UsageError{Msg: fmt.Sprintf("%s needs a subcommand; see %s --help", cmd.CommandPath(), cmd.CommandPath())}
		}
		msg := fmt.Sprintf("%s has no subcommand %q", cmd.CommandPath(), args[0])
		if near := nearest(args[0], subcommands(cmd)); near != "" {
			msg += fmt.Sprintf("; did you mean %s?", near)
		}
		return &config.UsageError{Msg: msg}
	}}
	c.AddCommand(subs...)
	return c
}

// flagError names the nearest flag in place of one that does not exist, as a node does.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) || unknown.GetSpecifiedShortnames() != "" {
		return &config.UsageError{Msg: err.Error()}
	}
	var flags []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) { flags = append(flags, f.Name) })
	msg := fmt.Sprintf("unknown flag --%s", unknown.GetSpecifiedName())
	if near := nearest(unknown.GetSpecifiedName(), flags); near != "" {
		msg += fmt.Sprintf("; did you mean --%s?", near)
	}
	return &config.UsageError{Msg: fmt.Sprintf("%s (%s --help lists all flags)", msg, cmd.CommandPath())}
}

func subcommands(cmd *cobra.Command) (names []string) {
	for _, c := range cmd.Commands() {
		names = append(names, c.Name())
	}
	return names
}

// nearest is the name that is closest to a word, "" when none is close: at most two edits, fewer for
// short words, of which many are close to each other.
func nearest(word string, names []string) string {
	best, bestD := "", min(2, len(word)/2)+1
	for _, name := range names {
		if d := config.EditDistance(word, name); d < min(bestD, len(name)) {
			best, bestD = name, d
		}
	}
	return best
}

// exactArgs is cobra.ExactArgs with a usage error.
func exactArgs(n int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != n {
			return &config.UsageError{Msg: fmt.Sprintf("%s takes %d argument(s), not %d; usage: %s", cmd.CommandPath(), n, len(args), cmd.UseLine())}
		}
		return nil
	}
}

func regionCommand() *cobra.Command {
	var f clientFlags
	list := &cobra.Command{Use: "list", Short: "list the regions in key order, as the asked node knows them", Args: exactArgs(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.with(cmd, func(ctx context.Context, c *admin.Client) error {
				pd, err := c.PD(ctx)
				if err != nil {
					return err
				}
				var rs []admin.Region
				if err := c.EachRegion(ctx, func(r *admin.Region) error {
					rs = append(rs, *r)
					return nil
				}); err != nil {
					return err
				}
				return printRegions(cmd.OutOrStdout(), f.output, rs, names(&pd))
			})
		}}
	transfer := &cobra.Command{Use: "transfer REGION STORE", Short: "move a region's leadership to its replica on a store (name or id)", Args: exactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := strconv.ParseUint(args[0], 10, 64)
			if err != nil || id == 0 {
				return &config.UsageError{Msg: fmt.Sprintf("%q is not a region id; braid region list shows them", args[0])}
			}
			return f.with(cmd, func(ctx context.Context, c *admin.Client) error {
				pd, err := c.PD(ctx)
				if err != nil {
					return err
				}
				store, err := storeID(&pd, args[1])
				if err != nil {
					return err
				}
				if err := c.TransferRegion(ctx, id, store); err != nil {
					return err
				}
				if err := until(ctx, func() (bool, error) {
					led := false
					err := c.EachRegion(ctx, func(r *admin.Region) error {
						if r.ID == id {
							led = r.LeaderStore == store
							return errFound
						}
						return nil
					})
					if errors.Is(err, errFound) {
						err = nil
					}
					return led, err
				}); err != nil {
					return fmt.Errorf("region %d: the transfer was started but store %s does not lead yet: %w", id, names(&pd).of(store), err)
				}
				fmt.Fprintf(cmd.OutOrStdout(), "region %d is led by %s\n", id, names(&pd).of(store))
				return nil
			})
		}}
	cmd := group("region", "see regions and move their leadership", list, transfer)
	f.register(cmd)
	return cmd
}

func pdCommand() *cobra.Command {
	var f clientFlags
	status := &cobra.Command{Use: "status", Short: "show the placement group and the stores, as the asked node knows them", Args: exactArgs(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.with(cmd, func(ctx context.Context, c *admin.Client) error {
				pd, err := c.PD(ctx)
				if err != nil {
					return err
				}
				return printPD(cmd.OutOrStdout(), f.output, &pd)
			})
		}}
	transfer := &cobra.Command{Use: "transfer STORE", Short: "move the placement group's leadership to a store (name or id)", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.with(cmd, func(ctx context.Context, c *admin.Client) error {
				pd, err := c.PD(ctx)
				if err != nil {
					return err
				}
				store, err := storeID(&pd, args[0])
				if err != nil {
					return err
				}
				if err := c.TransferPD(ctx, store); err != nil {
					return err
				}
				if err := until(ctx, func() (bool, error) {
					pd, err := c.PD(ctx)
					return pd.LeaderStore == store, err
				}); err != nil {
					return fmt.Errorf("the transfer was started but store %s does not lead yet: %w", names(&pd).of(store), err)
				}
				fmt.Fprintf(cmd.OutOrStdout(), "the placement group is led by %s\n", names(&pd).of(store))
				return nil
			})
		}}
	cmd := group("pd", "see the placement group and move its leadership", status, transfer)
	f.register(cmd)
	return cmd
}

// errFound ends a walk over regions early.
var errFound = errors.New("found")

// pollInterval is how often an outcome is looked up.
const pollInterval = 50 * time.Millisecond

// until calls fn until it says true or fails, or ctx ends.
func until(ctx context.Context, fn func() (bool, error)) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		ok, err := fn()
		if ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// storeID finds a store by name, or by id as people see it (hexadecimal) or as JSON has it
// (decimal). It has to exist, so that one number cannot be taken for another.
func storeID(pd *admin.PD, s string) (uint64, error) {
	for _, st := range pd.Stores {
		if st.Name == s || fmt.Sprintf("%x", st.ID) == s || fmt.Sprint(st.ID) == s {
			return st.ID, nil
		}
	}
	return 0, fmt.Errorf("no store has the name or id %q; braid pd status shows them", s)
}
