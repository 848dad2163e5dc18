package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"braid/cmd/internal/bench"
	"braid/cmd/internal/bench/compare"
	"braid/cmd/internal/config"
)

// compareCommand is `braid bench compare`.
func compareCommand() *cobra.Command {
	var o compare.Options
	var etcd, keep, plot, output string
	var systems []string
	var quiet bool
	c := &cobra.Command{
		Use:   "compare",
		Short: "compare many groups, a single group and etcd on this machine",
		Long: "Start local clusters of braid with many raft groups, of braid with a single one and, when --etcd\n" +
			"names a binary, of etcd; send a suite of loads to them in turn; print one table. The suite\n" +
			"readme has these stages:\n\n" + compare.StageHelp("readme") +
			"\nWith etcd the table has a column of goals: what many groups should reach, most of them as a\n" +
			"multiple of etcd (≤ 0.65× is at most so much of it), and whether they did. `make binaries` in\n" +
			"cmd/tests builds an etcd and prints where it is.\n" +
			"\nServers and clients share the machine: trust the ratios, not the rates.",
		Args: exactArgs(0),
	}
	fs := c.Flags()
	fs.StringVar(&o.Suite, "suite", "readme", "which suite: "+strings.Join(compare.Suites(), ", "))
	fs.StringSliceVar(&o.Stages, "stages", nil, "only these stages of it")
	fs.StringVar(&etcd, "etcd", "", "etcd binary to compare with")
	fs.StringSliceVar(&systems, "systems", nil, "which of multi, single, etcd (default all, etcd if --etcd is given)")
	fs.IntSliceVar(&o.Nodes, "nodes", []int{3, 1}, "sizes of the clusters")
	fs.IntVar(&o.Rounds, "rounds", 5, "rounds of each system")
	fs.Float64Var(&o.Scale, "scale", 1, "scale of times and amounts; 0.1 takes minutes instead of hours")
	fs.StringVar(&o.Dir, "dir", "", "folder for data, removed afterwards (default: a temporary one)")
	fs.StringVar(&keep, "keep", "", "JSON file of the table; stages measured before stay in it, so that a table can be made in pieces")
	fs.StringVar(&plot, "plot", "", "write the ratios to etcd, without it those to a single group, as a picture to this SVG file")
	fs.StringVarP(&output, "write-out", "o", "table", "output format: table, markdown or json")
	fs.BoolVarP(&quiet, "quiet", "q", false, "print nothing but the table")
	c.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if output != "table" && output != "json" && output != "markdown" {
			return &config.UsageError{Msg: fmt.Sprintf("--write-out must be table, markdown or json, not %q", output)}
		}
		if o.Systems, err = compareSystems(systems, etcd); err != nil {
			return err
		}
		if err := o.Validate(); err != nil {
			return &config.UsageError{Msg: config.OneLine(err)}
		}
		t := &compare.Table{}
		if keep != "" {
			if t, err = compare.Load(keep); err != nil {
				return err
			}
		}
		if o.Dir == "" {
			if o.Dir, err = os.MkdirTemp("", "braid-compare-"); err != nil {
				return err
			}
			defer func() { err = errors.Join(err, os.RemoveAll(o.Dir)) }()
		}
		o.Command = commandLine(os.Args[1:])
		o.Bar = bench.NewBar(cmd.ErrOrStderr())
		if !quiet {
			o.Note = func(line string) { fmt.Fprintln(cmd.ErrOrStderr(), line) }
		}
		ctx, stop := interruptible(cmd.Context())
		defer stop()
		runErr := compare.Run(ctx, o, t)
		if ctx.Err() != nil && errors.Is(runErr, context.Canceled) {
			runErr = errors.New("interrupted; stages that were not finished are missing")
		}
		if len(t.Rows) == 0 && runErr != nil {
			return runErr
		}
		// What was measured before an interrupt or a failure is shown all the same.
		if keep != "" {
			runErr = errors.Join(runErr, t.Save(keep))
		}
		if plot != "" {
			var picture bytes.Buffer
			runErr = errors.Join(runErr, t.Plot(&picture), os.WriteFile(plot, picture.Bytes(), 0o644))
		}
		switch out := cmd.OutOrStdout(); output {
		case "json":
			return errors.Join(runErr, printJSON(out, t))
		case "markdown":
			return errors.Join(runErr, t.Markdown(out))
		default:
			return errors.Join(runErr, t.Print(out))
		}
	}
	return c
}

// commandLine is what a table says of its origin; where files lie on this machine is left out.
func commandLine(args []string) string {
	line := "braid"
	for _, a := range args {
		flag, path, found := strings.Cut(a, "=")
		if !found {
			flag, path = "", a
		}
		a = filepath.Base(path)
		if found {
			a = flag + "=" + a
		}
		line += " " + a
	}
	return line
}

// compareSystems turns names into programs.
func compareSystems(names []string, etcd string) ([]compare.System, error) {
	if len(names) == 0 {
		names = []string{compare.Multi, compare.Single}
		if etcd != "" {
			names = append(names, compare.Etcd)
		}
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("cannot find this program: %w", err)
	}
	var systems []compare.System
	for _, name := range names {
		switch name {
		case compare.Multi, compare.Single:
			systems = append(systems, compare.System{Name: name, Binary: self})
		case compare.Etcd:
			if etcd == "" {
				return nil, &config.UsageError{Msg: "--systems names etcd: say with --etcd where its binary is"}
			}
			if _, err := os.Stat(etcd); err != nil {
				return nil, &config.UsageError{Msg: "--etcd: " + err.Error()}
			}
			systems = append(systems, compare.System{Name: name, Binary: etcd})
		default:
			return nil, &config.UsageError{Msg: fmt.Sprintf("there is no system %q: multi, single, etcd", name)}
		}
	}
	return systems, nil
}
