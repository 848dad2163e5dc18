package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// inheritedTimerSlack is the slack that Linux gives the first process: who still has it was not
// given another by whoever started it (systemd's TimerSlackNSec, for example).
const inheritedTimerSlack = 50 * time.Microsecond

// main runs on the process's first thread until allowTimerSlack has returned. What was asked for that
// thread, to be told of the parent's end for example (PR_SET_PDEATHSIG), outlives an exec on no other.
func init() { runtime.LockOSThread() }

// allowTimerSlack lets the kernel wake threads up to slack late, so that wake-ups fall together.
// Go's monitor thread asks for 20 µs at a time for as long as the process has anything to do, and
// a processor that looks for work for 3 µs: with Linux' 50 µs that is up to 14,000 changes of
// thread a second and process, up to a quarter of the CPU of puts, for sleeps that nobody waits for.
//
// A thread passes its slack on to threads that it creates and across exec, and to none that
// exists. The monitor exists before any code of ours runs, so the process executes itself anew,
// once. It returns if there is nothing to change, or with an error. The configuration was read from
// configFile, "" for none, and would be read anew.
func allowTimerSlack(slack time.Duration, configFile string) error {
	defer runtime.UnlockOSThread()
	if timerSlack() != inheritedTimerSlack || slack <= inheritedTimerSlack {
		return nil
	}
	if err := repeatable(configFile); err != nil {
		return fmt.Errorf("start anew: %w", err)
	}
	program, err := ownProgram()
	if err != nil {
		return fmt.Errorf("start anew: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(slack.Nanoseconds()), 0, 0, 0); err != nil {
		return fmt.Errorf("set timer slack: %w", err)
	}
	if have := timerSlack(); have == slack {
		err = fmt.Errorf("start %s anew: %w", program, syscall.Exec(program, os.Args, os.Environ()))
	} else {
		// Where it does not stick, the program started anew would start itself anew, for ever.
		err = fmt.Errorf("set timer slack: it is %v, not %v", have, slack)
	}
	// All threads or none: 0 is what this one had at first.
	return errors.Join(err, unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0))
}

// repeatable refuses a configuration that can be read once only: from a pipe, for example.
func repeatable(configFile string) error {
	if configFile == "" {
		return nil
	}
	info, err := os.Stat(configFile)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("the configuration cannot be read again from %s, which is no regular file", configFile)
	}
	return nil
}

// ownProgram is the path by which this process was started, so that it keeps the name that it has in
// lists of processes. What runs may be another program than the first argument says: the dynamic
// loader for one, which was given the program to load.
func ownProgram() (string, error) {
	program, err := exec.LookPath(os.Args[0])
	if err != nil {
		return "", err
	}
	named, err := os.Stat(program)
	if err != nil {
		return "", err
	}
	runs, err := os.Stat("/proc/self/exe")
	if err != nil {
		return "", err
	}
	if !os.SameFile(named, runs) {
		return "", fmt.Errorf("%s is not the program that runs", program)
	}
	return program, nil
}

// timerSlack is that of the calling thread; 0 where it cannot be known.
func timerSlack() time.Duration {
	ns, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
	if err != nil {
		return 0
	}
	return time.Duration(ns)
}
