package main

import (
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// inheritedTimerSlack is the slack that Linux gives the first process: who still has it was not
// given another by whoever started it (systemd's TimerSlackNSec, for example).
const inheritedTimerSlack = 50 * time.Microsecond

// allowTimerSlack lets the kernel wake threads up to slack late, so that wake-ups fall together.
// Go's monitor thread asks for 20 µs at a time for as long as the process has anything to do, and
// a processor that looks for work for 3 µs: with Linux' 50 µs that is up to 14,000 changes of
// thread a second and process, a tenth of the CPU of puts, for sleeps that nobody waits for.
//
// A thread passes its slack on to threads that it creates and across exec, and to none that
// exists. The monitor exists before any code of ours runs, so the process executes itself anew,
// once. It returns if there is nothing to change, or with an error.
func allowTimerSlack(slack time.Duration) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if timerSlack() != inheritedTimerSlack || slack <= inheritedTimerSlack {
		return nil
	}
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(slack.Nanoseconds()), 0, 0, 0); err != nil {
		return fmt.Errorf("set timer slack: %w", err)
	}
	// Where it does not stick, the program started anew would start itself anew, for ever.
	if have := timerSlack(); have != slack {
		return fmt.Errorf("set timer slack: it is %v, not %v", have, slack)
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("start anew: %w", err)
	}
	return fmt.Errorf("start %s anew: %w", exe, syscall.Exec(exe, os.Args, os.Environ()))
}

// timerSlack is that of the calling thread; 0 where it cannot be known.
func timerSlack() time.Duration {
	ns, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
	if err != nil {
		return 0
	}
	return time.Duration(ns)
}
