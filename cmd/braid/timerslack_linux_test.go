package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestTimerSlack: a node's threads all have the slack that was asked for, also those that the
// runtime made before any code of ours ran; a slack of somebody else's choice stays.
func TestTimerSlack(t *testing.T) {
	if have := timerSlack(); have != inheritedTimerSlack {
		t.Skipf("this process was started with a timer slack of %v; a node leaves that as it is", have)
	}
	for flag, want := range map[string]time.Duration{
		"--timer-slack=1ms": time.Millisecond, "--timer-slack=300us": 300 * time.Microsecond,
		"--timer-slack=0": inheritedTimerSlack, "--timer-slack=1us": inheritedTimerSlack,
	} {
		cmd := program(t, "idle", flag)
		var stderr strings.Builder
		out := startUntil(t, cmd, &stderr, "braid is ready")
		if s := fmt.Sprintf(`"timer-slack":"%v"`, want); !strings.Contains(stderr.String(), s) {
			t.Errorf("%s: no %s in\n%s", flag, s, stderr.String())
		}
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", cmd.Process.Pid))
		if err != nil || len(tasks) < 2 {
			t.Fatalf("tasks %v, %v", tasks, err)
		}
		for _, task := range tasks {
			// Only the privileged may read that of another process, and not on every kernel.
			raw, err := os.ReadFile(fmt.Sprintf("/proc/%s/timerslack_ns", filepath.Base(task)))
			if err != nil {
				continue
			}
			if got := strings.TrimSpace(string(raw)); got != fmt.Sprint(want.Nanoseconds()) {
				t.Errorf("%s: thread %s has a slack of %s ns", flag, filepath.Base(task), got)
			}
		}
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, out); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // ended by the signal
	}
}
