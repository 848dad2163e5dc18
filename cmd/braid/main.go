// Command braid runs a node of the store and, with a subcommand, asks nodes about their regions
// or runs a small cluster on this machine.
//
// Without a subcommand it takes etcd's flags and runs a node: flags and environment become a
// config.Config, cmd/internal/node assembles the node from it, and this package owns what belongs
// to the process only: its exit status, its signals, its logger and what it prints.
package main

import (
	"os"
	"runtime"
	"strings"
)

// Exit statuses, etcd's.
const (
	exitOK    = 0
	exitError = 1 // configuration or start-up, one line on stderr says what
	exitUsage = 2 // the command line cannot be understood
)

func main() { os.Exit(run(os.Args[1:])) }

// run takes the arguments without the program's name. etcd's command line has flags only, so a
// first argument that is a word is a subcommand of ours.
func run(args []string) int {
	if len(args) > 0 && args[0] != "" && !strings.HasPrefix(args[0], "-") {
		runtime.UnlockOSThread() // only a node has a use for the first thread
		return runCommand(args, os.Stdout, os.Stderr)
	}
	return runServer(args, os.Environ(), os.Stdout, os.Stderr)
}
