package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// playStart makes the program say that it starts, in a line for whoever counts how often, and brings
// about what the test asked for.
func playStart() {
	asked := os.Getenv("BRAID_TEST_START")
	if asked == "" {
		return
	}
	var deathSignal int32
	if err := unix.Prctl(unix.PR_GET_PDEATHSIG, uintptr(unsafe.Pointer(&deathSignal)), 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	fmt.Fprintf(os.Stderr, "started with death signal %d\n", deathSignal)
	switch asked {
	case "exec fails":
		// No single variable may be as long.
		if err := os.Setenv("BRAID_TEST_LONG", strings.Repeat("x", 1<<20)); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	case "wander":
		// Goroutines that may move from thread to thread do so soon.
		var over atomic.Bool
		defer over.Store(true)
		for range 16 {
			go func() {
				for !over.Load() {
					runtime.Gosched()
				}
			}()
		}
		for began := time.Now(); time.Since(began) < 200*time.Millisecond; runtime.Gosched() {
			if unix.Gettid() != os.Getpid() {
				runtime.LockOSThread() // or it may come back
				break
			}
		}
	}
}

// startWithSlack starts cmd from a thread with a timer slack.
func startWithSlack(t *testing.T, cmd *exec.Cmd, slack time.Duration, stderr io.Writer) io.Reader {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own := timerSlack()
	set := func(slack time.Duration) {
		if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(slack), 0, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	set(slack)
	defer set(own)
	return startUntil(t, cmd, stderr, "braid is ready")
}

// TestTimerSlack: a node's threads all have the slack that was asked for, also those that the
// runtime made before any code of ours ran; a slack of somebody else's choice stays. Where a node
// cannot start itself anew all threads keep what they had, and it runs on.
func TestTimerSlack(t *testing.T) {
	t.Setenv("BRAID_TEST_START", "yes")
	const chosen = 60 * time.Microsecond
	var read int
	for _, tc := range []struct {
		flag, start     string
		inherited, want time.Duration
		starts          int
		change          func(cmd *exec.Cmd)
	}{
		{flag: "--timer-slack=1ms", want: time.Millisecond, starts: 2},
		{flag: "--timer-slack=300us", want: 300 * time.Microsecond, starts: 2},
		{flag: "--timer-slack=0", want: inheritedTimerSlack, starts: 1},
		{flag: "--timer-slack=1us", want: inheritedTimerSlack, starts: 1},
		{flag: "--timer-slack=1ms", inherited: chosen, want: chosen, starts: 1},
		{flag: "--timer-slack=1ms", start: "exec fails", want: inheritedTimerSlack, starts: 1},
		{flag: "--timer-slack=1ms", start: "wander", want: time.Millisecond, starts: 2},
		// As through the dynamic loader, which is given the program as an argument.
		{flag: "--timer-slack=1ms", want: inheritedTimerSlack, starts: 1, change: func(cmd *exec.Cmd) { cmd.Args[0] = "/bin/sh" }},
		{flag: "--timer-slack=1ms", want: time.Millisecond, starts: 2, change: func(cmd *exec.Cmd) {
			link := filepath.Join(cmd.Dir, "etcd")
			if err := os.Symlink(cmd.Path, link); err != nil {
				t.Fatal(err)
			}
			cmd.Path, cmd.Args[0] = link, link
		}},
	} {
		if tc.inherited == 0 {
			tc.inherited = inheritedTimerSlack
		}
		cmd := program(t, "idle", tc.flag)
		if tc.start != "" {
			cmd.Env = append(cmd.Env, "BRAID_TEST_START="+tc.start)
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGUSR1}
		if tc.change != nil {
			tc.change(cmd)
		}
		name := fmt.Sprintf("%s, %s, started as %s", tc.flag, tc.start, filepath.Base(cmd.Args[0]))
		var stderr strings.Builder
		out := startWithSlack(t, cmd, tc.inherited, &stderr)
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", cmd.Process.Pid))
		if want := fmt.Sprintf("%.15s", filepath.Base(cmd.Path)); err != nil || strings.TrimSpace(string(comm)) != want {
			t.Errorf("%s: the process is called %q, not %q, %v", name, comm, want, err)
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
			read++
			if got := strings.TrimSpace(string(raw)); got != fmt.Sprint(tc.want.Nanoseconds()) {
				t.Errorf("%s: thread %s has a slack of %s ns", name, filepath.Base(task), got)
			}
		}
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, out); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // ended by the signal
		for s, n := range map[string]int{
			fmt.Sprintf(`"timer-slack-in-force":"%v"`, tc.want): 1,
			`"timer-slack":`:                 1, // one key of that name: the flag
			"started with death signal 10\n": tc.starts,
			"started with death":             tc.starts,
			"timers keep the exactness":      map[bool]int{true: 1}[tc.start == "exec fails" || cmd.Args[0] == "/bin/sh"],
		} {
			if got := strings.Count(stderr.String(), s); got != n {
				t.Errorf("%s: %q %d times, want %d, in\n%s", name, s, got, n, stderr.String())
			}
		}
	}
	if read == 0 {
		t.Log("the slack of no thread could be read")
	}
}

// TestConfigFromPipe: what can be read only once is read once.
func TestConfigFromPipe(t *testing.T) {
	t.Setenv("BRAID_TEST_START", "yes")
	for _, file := range []string{"/dev/stdin", "file"} {
		cmd := program(t, "idle", "--config-file="+file)
		const text = "name: from-the-file\n"
		if file == "file" {
			if err := os.WriteFile(filepath.Join(cmd.Dir, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		} else {
			cmd.Stdin = io.MultiReader(strings.NewReader(text)) // over a pipe
		}
		var stderr strings.Builder
		out := startWithSlack(t, cmd, inheritedTimerSlack, &stderr)
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, out); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // ended by the signal
		if s := `"name":"from-the-file"`; !strings.Contains(stderr.String(), s) {
			t.Errorf("%s: no %s in\n%s", file, s, stderr.String())
		}
		if got, want := strings.Count(stderr.String(), "started with death"), map[string]int{"/dev/stdin": 1, "file": 2}[file]; got != want {
			t.Errorf("%s: started %d times, want %d\n%s", file, got, want, stderr.String())
		}
	}
}
