package engine

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// formatVersion is the layout of a store directory: keys, values, comparer and merger as this
// package writes them. It is raised with every change that older code could misread.
const formatVersion = 2

const (
	formatFile    = "FORMAT"
	formatTmpFile = "FORMAT.tmp"
	formatFmt     = "braid engine %d\n"
	importPrefix  = "import-"
)

// ErrFormat says that a directory holds something this version cannot open.
var ErrFormat = errors.New("engine: directory cannot be opened by this version")

// checkFormat reads the directory's format record, or writes one into a directory without
// Pebble's files. It comes before Pebble opens anything, so that a newer store is left untouched.
func checkFormat(fs vfs.FS, dir string) error {
	path := fs.PathJoin(dir, formatFile)
	f, err := fs.Open(path)
	if isNotExist(err) {
		return createFormat(fs, dir)
	}
	if err != nil {
		return fmt.Errorf("engine: %w", err)
	}
	text, err := io.ReadAll(io.LimitReader(f, 256))
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("engine: read %s: %w", path, err)
	}
	var v int
	if _, err := fmt.Sscanf(string(text), formatFmt, &v); err != nil {
		return fmt.Errorf("%w: %s does not name a format: %q", ErrFormat, path, text)
	}
	if v != formatVersion {
		return fmt.Errorf("%w: %s says format %d, this version knows %d: use the version that wrote it, or an empty directory",
			ErrFormat, path, v, formatVersion)
	}
	return nil
}

func createFormat(fs vfs.FS, dir string) error {
	names, err := fs.List(dir)
	if err != nil {
		return fmt.Errorf("engine: %w", err)
	}
	for _, name := range names {
		if strings.HasPrefix(name, "MANIFEST-") || strings.HasPrefix(name, "CURRENT") || strings.HasPrefix(name, "marker.") {
			return fmt.Errorf("%w: %s holds %s but no %s file", ErrFormat, dir, name, formatFile)
		}
	}
	tmp := fs.PathJoin(dir, formatTmpFile)
	f, err := fs.Create(tmp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return fmt.Errorf("engine: %w", err)
	}
	_, err = fmt.Fprintf(f, formatFmt, formatVersion)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("engine: write %s: %w", tmp, err)
	}
	if err := fs.Rename(tmp, fs.PathJoin(dir, formatFile)); err != nil {
		return fmt.Errorf("engine: %w", err)
	}
	d, err := fs.OpenDir(dir)
	if err != nil {
		return fmt.Errorf("engine: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("engine: sync %s: %w", dir, err)
	}
	return nil
}

// removeImports deletes what a crash left of incoming snapshots.
func removeImports(fs vfs.FS, dir string) error {
	names, err := fs.List(dir)
	if err != nil {
		return fmt.Errorf("engine: %w", err)
	}
	for _, name := range names {
		if strings.HasPrefix(name, importPrefix) {
			if err := fs.RemoveAll(fs.PathJoin(dir, name)); err != nil {
				return fmt.Errorf("engine: remove left import: %w", err)
			}
		}
	}
	return nil
}
