package config

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// where returns a pointer to what the flag sets.
func (f field[T]) where(c *Config) uintptr { return reflect.ValueOf(f.at(c)).Pointer() }

// TestImplementedFlagsAreRead looks for a reader of every field that a flag sets. A flag that is
// called implemented and read by nobody would be a lie.
func TestImplementedFlagsAreRead(t *testing.T) {
	read := map[string]bool{}
	for _, dir := range []string{".", "../node", "../../braid"} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			name := e.Name()
			if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") || dir == "." && name == "table.go" {
				continue
			}
			file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, name), nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(file, func(n ast.Node) bool {
				if s, ok := n.(*ast.SelectorExpr); ok {
					read[s.Sel.Name] = true
				}
				return true
			})
		}
	}
	c := &Config{}
	cv := reflect.ValueOf(c).Elem()
	for i := range Table {
		f := &Table[i]
		at, ok := f.value.(interface{ where(*Config) uintptr })
		if f.Fate != Implemented || !ok {
			continue
		}
		p := at.where(c)
		for j := range cv.NumField() {
			from := cv.Field(j).Addr().Pointer()
			if p < from || p >= from+cv.Field(j).Type().Size() {
				continue
			}
			if name := cv.Type().Field(j).Name; !read[name] {
				t.Errorf("--%s is implemented, but nobody reads Config.%s", f.Name, name)
			}
		}
	}
}
