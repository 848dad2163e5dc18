package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"braid/raftstore/raftid"
)

// identityFormat is the version of the data directory's layout as a whole; the log and the state
// engine carry their own versions inside.
const identityFormat = 1

// identity says whose data a directory holds, so that a store is never started on another's.
type identity struct {
	Format    int            `json:"format"`
	ClusterID uint64         `json:"clusterID"`
	StoreID   raftid.StoreID `json:"storeID"`
	Name      string         `json:"name"`
	// Mode is how the store numbers its entries; it cannot be changed by a flag (A16).
	Mode string `json:"mode"`
	// Starts counts the starts on this directory, this one included. It tells one life of the store
	// from another, whatever the clock says.
	Starts uint64 `json:"starts"`
	// Joining is set until the store knows the cluster that it is a member of. A member that lost
	// its directory stays joining however often it is started, so the others go on refusing it.
	Joining bool `json:"joining,omitempty"`
}

// openIdentity creates the data directory with the given identity, or checks that an existing one
// has it, and counts the start. An error says what to do about it. A directory with nothing but the
// identity of a store that never joined its cluster takes the new one: no log was there to vote in.
func openIdentity(dir string, want identity) (identity, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return identity{}, fmt.Errorf("cannot create data directory: %w", err)
	}
	if err := checkWritable(dir); err != nil {
		return identity{}, err
	}
	path := identityPath(dir)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := refuseForeign(dir); err != nil {
			return identity{}, err
		}
		want.Format, want.Starts, want.Joining = identityFormat, 1, true
		return want, writeIdentity(dir, want)
	}
	if err != nil {
		return identity{}, fmt.Errorf("cannot read %s: %w", path, err)
	}
	var have identity
	if err := json.Unmarshal(data, &have); err != nil {
		return identity{}, fmt.Errorf("%s is damaged (%w): restore it from a backup, or move the data directory away to start afresh", path, err)
	}
	if have.Format != identityFormat {
		return identity{}, fmt.Errorf("data directory %s has layout version %d and this binary reads version %d: use the binary that wrote it", dir, have.Format, identityFormat)
	}
	never := ""
	if have.Joining {
		switch name, err := firstForeign(dir); {
		case err != nil:
			return identity{}, err
		case name == "":
			want.Format, want.Starts, want.Joining = identityFormat, have.Starts+1, true
			return want, writeIdentity(dir, want)
		}
		never = "; if this node never was a member of a cluster, the directory may be removed"
	}
	switch {
	case have.ClusterID != want.ClusterID:
		return identity{}, fmt.Errorf("data directory %s belongs to cluster %x, but --initial-cluster and --initial-cluster-token describe cluster %x: correct the flags, or name another --data-dir%s", dir, have.ClusterID, want.ClusterID, never)
	case have.StoreID != want.StoreID:
		return identity{}, fmt.Errorf("data directory %s belongs to member %s (%s), but the flags describe member %s: correct --name and the peer URLs, or name another --data-dir%s", dir, have.StoreID, have.Name, want.StoreID, never)
	case have.Mode != want.Mode:
		return identity{}, fmt.Errorf("data directory %s holds a store in %s mode, and the flags ask for %s mode: the mode of a store cannot be changed by a flag; start it as before, or name another --data-dir%s", dir, have.Mode, want.Mode, never)
	}
	have.Starts++
	return have, writeIdentity(dir, have)
}

func identityPath(dir string) string { return filepath.Join(dir, "identity.json") }

// refuseForeign keeps a first start from mixing with somebody else's files.
func refuseForeign(dir string) error {
	switch name, err := firstForeign(dir); {
	case err != nil || name == "":
		return err
	case name == "member":
		return fmt.Errorf("data directory %s was written by etcd, whose files are not read here: name another --data-dir", dir)
	default:
		return fmt.Errorf("data directory %s is not empty (%s) and holds no identity.json: name another --data-dir, or empty it", dir, name)
	}
}

// firstForeign names something in dir that a store puts there only after its identity, or never.
func firstForeign(dir string) (string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", fmt.Errorf("cannot read data directory: %w", err)
	}
	for _, e := range entries {
		switch e.Name() {
		case "identity.json", "identity.json.tmp": // the latter of a first start that was cut short
		case "fixtures", "lost+found": // automatic certificates; the root of a file system
		default:
			return e.Name(), nil
		}
	}
	return "", nil
}

func checkWritable(dir string) error {
	f, err := os.CreateTemp(dir, ".write-check-*")
	if err != nil {
		return fmt.Errorf("data directory is not writable: %w", err)
	}
	err = errors.Join(f.Close(), os.Remove(f.Name()))
	if err != nil {
		return fmt.Errorf("data directory is not writable: %w", err)
	}
	return nil
}

// writeIdentity makes the file durable before anything else is written: data without an identity
// would be refused at the next start.
func writeIdentity(dir string, id identity) error {
	data, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	path := identityPath(dir)
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	_, werr := f.Write(append(data, '\n'))
	if err := errors.Join(werr, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	return errors.Join(d.Sync(), d.Close())
}
