package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"braid/cmd/internal/cluster"
	"braid/cmd/internal/config"
)

func clusterCommand() *cobra.Command {
	var dir string
	var o cluster.Options
	var splitKeys string
	var single bool
	start := &cobra.Command{
		Use:   "start [-- FLAGS OF EVERY NODE]",
		Short: "start a local cluster, or start a stopped one again",
		Long: "Start nodes of this binary as processes of this machine and wait until they are ready. The\n" +
			"directory keeps their data, their logs and a state file; a stopped cluster is started again\n" +
			"from it.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 && cmd.ArgsLenAtDash() != 0 {
				return &config.UsageError{Msg: fmt.Sprintf("%s takes no argument but flags of the nodes after --, not %q", cmd.CommandPath(), args[0])}
			}
			if single && splitKeys != "" {
				return &config.UsageError{Msg: "--single-group and --region-split-keys exclude each other: one group holds all keys"}
			}
			bin, err := os.Executable()
			if err != nil {
				return fmt.Errorf("cannot find this program: %w", err)
			}
			o.Dir, o.Binary, o.Out = dir, bin, cmd.OutOrStdout()
			if splitKeys != "" {
				if _, err := config.ParseSplitKeys(splitKeys); err != nil {
					return &config.UsageError{Msg: "--region-split-keys: " + err.Error()}
				}
				o.Args = append(o.Args, "--region-split-keys="+splitKeys)
			}
			if single {
				o.Args = append(o.Args, "--single-group")
			}
			o.Args = append(o.Args, args...)
			fs := cmd.Flags()
			o.Given.Nodes, o.Given.BasePort, o.Given.Args = fs.Changed("nodes"), fs.Changed("base-port"), len(o.Args) > 0
			s, err := cluster.Start(cmd.Context(), o)
			if err != nil {
				return err
			}
			return explainCluster(cmd.OutOrStdout(), s, dir)
		},
	}
	start.Flags().IntVar(&o.Nodes, "nodes", 3, "number of nodes")
	start.Flags().IntVar(&o.BasePort, "base-port", 2379, "first port; every node takes two")
	start.Flags().StringVar(&splitKeys, "region-split-keys", "", "keys at which the new store is split into regions")
	start.Flags().BoolVar(&single, "single-group", false, "one raft group for everything")
	status := &cobra.Command{Use: "status", Short: "say which nodes run and are ready", Args: exactArgs(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := cluster.Load(dir)
			if err != nil {
				return err
			}
			var rows [][]string
			for i := range s.Nodes {
				n := &s.Nodes[i]
				pid, state := "-", "stopped"
				if n.Process.Alive() {
					pid, state = fmt.Sprint(n.Process.PID), "ready"
					if err := cluster.Ready(cmd.Context(), n.Client); err != nil {
						state = "not ready: " + err.Error()
					}
				} else if n.Process.PID != 0 {
					state = "ended by itself; see its log"
				}
				rows = append(rows, []string{n.Name, pid, n.Client, n.Peer, filepath.Join(dir, n.Log), state})
			}
			return table(cmd.OutOrStdout(), "NODE PROCESS CLIENTS PEERS LOG STATE", rows)
		}}
	stop := &cobra.Command{Use: "stop", Short: "stop the nodes; their data stays", Args: exactArgs(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			n, err := cluster.Stop(cmd.Context(), dir, cmd.OutOrStdout())
			if err == nil && n == 0 {
				fmt.Fprintln(cmd.OutOrStdout(), "no node runs")
			}
			return err
		}}
	cmd := group("cluster", "try out a cluster of several nodes on this machine", start, status, stop)
	cmd.PersistentFlags().StringVar(&dir, "dir", cluster.DefaultDir, "directory of the cluster")
	return cmd
}

// explainCluster says how to use what was started.
func explainCluster(w io.Writer, s *cluster.State, dir string) error {
	nodes, them := fmt.Sprintf("%d nodes are", len(s.Nodes)), "them"
	if len(s.Nodes) == 1 {
		nodes, them = "1 node is", "it"
	}
	_, err := fmt.Fprintf(w, `
%s ready. Use %s with etcdctl:

  export ETCDCTL_ENDPOINTS=%s
  etcdctl put greeting hello
  etcdctl get greeting
  braid region list

Stop %s with: braid cluster stop%s
`, nodes, them, s.Endpoints(), them, cluster.DirFlag(dir))
	return err
}
