package cluster

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// Handle names a process beyond doubt: process ids are reused, the pair of id and start is not.
type Handle struct {
	PID   int    `json:"pid,omitempty"`
	Start string `json:"start,omitempty"` // as the system prints it; only compared
}

// handleOf describes a running process.
func handleOf(pid int) (Handle, error) {
	start, err := startOf(pid)
	return Handle{PID: pid, Start: start}, err
}

// Alive says whether the process still runs. A process that has ended but whose parent has not
// looked yet (a zombie) does not.
func (h Handle) Alive() bool {
	if h.PID == 0 {
		return false
	}
	start, err := startOf(h.PID)
	return err == nil && start == h.Start
}

// errGone is returned for a process that does not exist.
var errGone = errors.New("no such process")

// startOf returns the moment a process was started, in the unit of the system: on Linux clock
// ticks since boot, from /proc; elsewhere what ps prints.
func startOf(pid int) (string, error) {
	if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil {
		// The second field is the program's name in parentheses and may hold anything; the
		// state is the first field after it and the start time the twentieth.
		rest := string(b)
		if i := strings.LastIndexByte(rest, ')'); i >= 0 {
			rest = rest[i+1:]
		}
		f := strings.Fields(rest)
		if len(f) < 20 {
			return "", fmt.Errorf("/proc/%d/stat has %d fields", pid, len(f))
		}
		// A process whose first thread has gone is a zombie before its other threads have gone, and
		// until then its ports are in use; the eighteenth field is how many threads there are.
		if threads := f[17]; f[0] == "X" || f[0] == "Z" && (threads == "0" || threads == "1") {
			return "", errGone
		}
		return f[19], nil
	} else if _, perr := os.Stat("/proc/self/stat"); perr == nil {
		return "", errGone
	}
	out, err := exec.Command("ps", "-o", "lstart=", "-p", strconv.Itoa(pid)).Output()
	if s := strings.TrimSpace(string(out)); err == nil && s != "" {
		return s, nil
	}
	return "", errGone
}

// signal sends sig to the process if it is still the one that was started.
func (h Handle) signal(sig syscall.Signal) error {
	if !h.Alive() {
		return errGone
	}
	if err := syscall.Kill(h.PID, sig); err != nil {
		return fmt.Errorf("process %d: %w", h.PID, err)
	}
	return nil
}
