// Package version says what was built: our own version, the commit, and the level of etcd's API
// that is served. It holds constants of the build and nothing else.
package version

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
)

// Etcd is the version of etcd whose API and flags are served. Clients switch features on by it,
// so a newer api module must not raise it by itself: a test compares the two.
const Etcd = "3.7.3"

// version and commit are set by the linker (make build); a plain go build leaves them empty, and
// the commit is then taken from what the go command recorded, if it did.
var version, commit string

// Info describes a build.
type Info struct {
	Version  string
	Commit   string
	Modified bool // built from a tree with uncommitted changes
	Go       string
	Platform string
}

// Get reads what the linker and the go command left in the binary.
func Get() Info {
	i := Info{Version: version, Commit: commit, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if b, ok := debug.ReadBuildInfo(); ok {
		for _, s := range b.Settings {
			switch s.Key {
			case "vcs.revision":
				if i.Commit == "" {
					i.Commit = s.Value
				}
			case "vcs.modified":
				i.Modified = s.Value == "true"
			}
		}
		if i.Version == "" && b.Main.Version != "" && b.Main.Version != "(devel)" {
			i.Version = strings.TrimPrefix(b.Main.Version, "v")
		}
	}
	if i.Version == "" {
		i.Version = "dev"
	}
	if i.Commit == "" {
		i.Commit = "unknown"
	}
	return i
}

// String is the text of --version. etcd's test framework looks for the line that begins with
// "etcd Version:" and parses the rest of it.
func (i Info) String() string {
	sha := i.Commit
	if i.Modified {
		sha += " (modified)"
	}
	return fmt.Sprintf("braid Version: %s\netcd Version: %s\nGit SHA: %s\nGo Version: %s\nGo OS/Arch: %s\n",
		i.Version, Etcd, sha, i.Go, i.Platform)
}
