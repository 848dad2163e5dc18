// Package etcdbin provides the programs the tests start: the real etcd server and etcdctl, built
// from the module versions pinned in this module's go.mod, and braid itself, built from the
// repository around it.
//
// It is not a downloader: what go build needs comes through the ordinary module cache. Binaries
// land in Dir and are shared by all test programs and runs; etcd's are named with their version
// and never rebuilt, braid is handed to go build each time, which is quick when nothing changed.
package etcdbin

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
)

// Version is the etcd release that braid is compared with.
const Version = "3.7.3"

// Dir is where binaries are kept: $BRAID_TESTS_CACHE, else braid-tests in the user's cache
// directory.
func Dir() (string, error) {
	if dir := os.Getenv("BRAID_TESTS_CACHE"); dir != "" {
		return dir, os.MkdirAll(dir, 0o755)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no cache directory for test binaries (set BRAID_TESTS_CACHE): %w", err)
	}
	dir := filepath.Join(cache, "braid-tests")
	return dir, os.MkdirAll(dir, 0o755)
}

// Etcd returns the path of the etcd server: $ETCD_BIN if set, else built when it is not there yet.
func Etcd() (string, error) {
	return cached("ETCD_BIN", "etcd", "go.etcd.io/etcd/server/v3")
}

// Etcdctl returns the path of etcdctl: $ETCDCTL_BIN if set, else built when it is not there yet.
func Etcdctl() (string, error) {
	return cached("ETCDCTL_BIN", "etcdctl", "go.etcd.io/etcd/etcdctl/v3")
}

// Braid returns the path of the binary under test: $BRAID_BIN if set, else built from cmd/braid of
// the repository this module lies in.
func Braid() (string, error) {
	if path := os.Getenv("BRAID_BIN"); path != "" {
		return filepath.Abs(path)
	}
	dir, err := Dir()
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "braid")
	return path, build(filepath.Join(moduleDir(), "..", ".."), path, "./cmd/braid")
}

func cached(env, name, pkg string) (string, error) {
	if path := os.Getenv(env); path != "" {
		return filepath.Abs(path)
	}
	dir, err := Dir()
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, name+"-"+Version)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	return path, build(moduleDir(), path, pkg)
}

// build writes to a temporary name first: two test programs may build at the same time, and a
// half-written binary must never be found under the final name.
func build(dir, path, pkg string) error {
	tmp := fmt.Sprintf("%s.%d", path, os.Getpid())
	cmd := exec.Command("go", "build", "-o", tmp, pkg)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building %s: %w\n%s", pkg, err, out)
	}
	return os.Rename(tmp, path)
}

// moduleDir is the folder of this module's go.mod, known from where this file was compiled.
func moduleDir() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(file))
}
