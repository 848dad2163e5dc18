package rules

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
)

// pkg is what `go list -json` says of a package.
type pkg struct {
	ImportPath   string
	Standard     bool
	Imports      []string
	TestImports  []string
	XTestImports []string
	Deps         []string
	Module       *struct{ Path string }
}

const module = "braid"

// wall is what the packages below a path may import of ours, directly. A name allows the package
// itself; a name with /... allows the packages below it as well; leaves allows all of them.
type wall struct {
	under string
	leaf  bool // may import the leaves
	may   []string
}

// leaves are wire types, ids and the rules of etcd's API: everybody may import them.
var leaves = []string{"raftstore/raftid", "pd/pdpb", "region/regionpb", "mvcc/etcdrule"}

// walls are matched from the top; the first whose path covers a package holds.
var walls = []wall{
	// Leaves.
	{"raftstore/raftid", false, nil},
	{"pd/pdpb", false, []string{"mvcc", "raftstore/raftid"}},
	{"region/regionpb", false, []string{"mvcc", "pd/pdpb", "raftstore/raftid"}},
	// L0: neither knows the other, nor anything above.
	{"mvcc/engine", false, []string{"mvcc"}},
	{"mvcc", false, nil},
	{"raftstore", false, []string{"raftstore/..."}},
	// L1: they meet only through messages.
	{"pd", true, []string{"pd/...", "raftstore/...", "mvcc"}},
	{"region", true, []string{"region/...", "raftstore/...", "mvcc"}},
	// L2 and L3.
	{"router", true, []string{"router/...", "mvcc"}},
	{"watchsvc", true, []string{"watchsvc/...", "mvcc"}},
	{"leasesvc", true, []string{"leasesvc/...", "mvcc"}},
	{"gateway", true, []string{"gateway/...", "router", "watchsvc", "leasesvc", "mvcc"}},
	// L4 wires everything.
	{"cmd", true, []string{"..."}},
}

// outside names modules that only some packages may import, tests aside.
var outside = []struct {
	prefix string
	only   []string
}{
	{"github.com/cockroachdb/pebble", []string{"mvcc/engine", "cmd"}},
	{"go.etcd.io/raft/v3", []string{"raftstore", "pd", "region", "cmd"}},
	{"google.golang.org/grpc", []string{"raftstore/transport", "router", "gateway", "watchsvc", "leasesvc", "cmd"}},
	{"github.com/spf13", []string{"cmd"}},
	{"go.etcd.io/bbolt", []string{"gateway/dbfile"}},
	// etcd's server would bring its own storage and its process-wide metrics along. The first prefix
	// that fits decides: two services need nothing but a client, and one package is only a message.
	{"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock", []string{"gateway", "cmd/internal/node"}},
	{"go.etcd.io/etcd/server/v3/etcdserver/api/v3election", []string{"gateway", "cmd/internal/node"}},
	{"go.etcd.io/etcd/server/v3/lease/leasepb", []string{"gateway/dbfile"}},
	{"go.etcd.io/etcd/server", nil},
}

// forbiddenNames say nothing about what is inside.
var forbiddenNames = []string{"util", "utils", "common", "helper", "helpers", "misc"}

// listPackages runs go list over the module.
func listPackages(t *testing.T) map[string]*pkg {
	t.Helper()
	// Optimised by a profile, braid's packages would be listed a second time under other names.
	cmd := exec.Command("go", "list", "-pgo=off", "-e", "-deps", "-json=ImportPath,Standard,Imports,TestImports,XTestImports,Deps,Module", module+"/...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	pkgs := map[string]*pkg{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		p := &pkg{}
		if err := dec.Decode(p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs[p.ImportPath] = p
	}
	return pkgs
}

// within says whether the package rel lies at or below one of the paths.
func within(rel string, paths ...string) bool {
	return slices.ContainsFunc(paths, func(p string) bool { return rel == p || strings.HasPrefix(rel, p+"/") })
}

// allowed says whether a pattern of a wall covers rel.
func allowed(rel string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		if p == "..." {
			return true
		}
		if base, below := strings.CutSuffix(p, "/..."); below {
			return within(rel, base)
		}
		return rel == p
	})
}

// checkImport returns what is wrong with the package rel importing imp, "" when nothing is.
func checkImport(rel, imp string) string {
	if own, ok := strings.CutPrefix(imp, module+"/"); ok {
		for _, w := range walls {
			if !within(rel, w.under) {
				continue
			}
			if own == rel || allowed(own, w.may) || w.leaf && slices.Contains(leaves, own) {
				return ""
			}
			return fmt.Sprintf("%s must not import %s: packages under %s may import %v of ours", rel, own, w.under, w.may)
		}
		return fmt.Sprintf("%s lies in no room: add it to the walls", rel)
	}
	for _, o := range outside {
		if !within(imp, o.prefix) {
			continue
		}
		if within(rel, o.only...) {
			return ""
		}
		return fmt.Sprintf("%s must not import %s: only %v may", rel, imp, o.only)
	}
	return ""
}

func TestImportsPointDown(t *testing.T) {
	ours := 0
	for _, p := range listPackages(t) {
		rel, ok := strings.CutPrefix(p.ImportPath, module+"/")
		if p.Module == nil || p.Module.Path != module || !ok {
			continue
		}
		ours++
		for _, imp := range p.Imports {
			if msg := checkImport(rel, imp); msg != "" {
				t.Error(msg)
			}
		}
		// Tests may use what they test from above, but not what the walls keep out for good.
		for _, imp := range slices.Concat(p.TestImports, p.XTestImports) {
			if msg := checkImport(rel, imp); msg != "" && within(imp, "go.etcd.io/etcd/server") {
				t.Errorf("in tests: %s", msg)
			}
		}
		if slices.Contains(forbiddenNames, path.Base(rel)) {
			t.Errorf("%s: a package's name says what is inside", rel)
		}
	}
	if ours < 10 {
		t.Errorf("only %d packages of ours were looked at", ours)
	}
}

// TestWallsHold plants forbidden imports: each must be refused, and a legal one must not.
func TestWallsHold(t *testing.T) {
	for _, tc := range []struct {
		rel, imp string
		fine     bool
	}{
		{"mvcc", "braid/raftstore/raftid", false},
		{"mvcc/engine", "braid/mvcc", true},
		{"mvcc/engine", "braid/pd/pdpb", false},
		{"raftstore", "braid/mvcc", false},
		{"raftstore/wal", "braid/raftstore/raftid", true},
		{"region", "braid/pd", false},
		{"region", "braid/pd/pdpb", true},
		{"region", "braid/mvcc/engine", false},
		{"pd", "braid/region", false},
		{"pd/order", "braid/raftstore", true},
		{"router", "braid/region", false},
		{"router", "braid/region/regionpb", true},
		{"gateway", "braid/router", true},
		{"gateway", "braid/raftstore", false},
		{"gateway", "go.etcd.io/raft/v3", false},
		{"region", "github.com/cockroachdb/pebble/v2", false},
		{"mvcc/engine", "github.com/cockroachdb/pebble/v2/vfs", true},
		{"cmd/internal/node", "braid/mvcc/engine", true},
		{"cmd/internal/config", "go.etcd.io/etcd/server/v3/embed", false},
		{"elsewhere", "braid/mvcc", false},
	} {
		if msg := checkImport(tc.rel, tc.imp); (msg == "") != tc.fine {
			t.Errorf("%s importing %s: %q, want fine=%v", tc.rel, tc.imp, msg, tc.fine)
		}
	}
}
