package mvcc

import (
	"errors"
	"fmt"
	"math"
)

// SubMax bounds the events of one transaction: their position is kept in four bytes.
const SubMax = math.MaxUint32

// ErrBadVersion says that a version handed to a batch breaks Version's invariants.
var ErrBadVersion = errors.New("mvcc: bad version")

// Check returns an error when the version cannot have come from a transaction: a revision below
// 1, an event position outside [0, SubMax], a creation after the modification, a version number
// that is negative, or a tombstone that carries anything.
func (v *Version) Check() error {
	switch {
	case v.Mod < 1 || v.Mod == Latest, v.Sub < 0, v.Sub > SubMax, v.Version < 0:
	case v.Tombstone() && (v.Create != 0 || v.Lease != 0 || len(v.Value) != 0):
	case !v.Tombstone() && (v.Create < 1 || v.Create > v.Mod):
	default:
		return nil
	}
	return fmt.Errorf("%w: %v", ErrBadVersion, v)
}

// versionOverhead is what LogicalSize counts for a version beside its key and value: the size of
// etcd's revision key and the fixed part of a marshalled key-value, so that quotas tuned for etcd
// mean about the same here.
const versionOverhead = 32

// LogicalSize is the number of bytes a version counts for in sizes shown to users. It does not
// depend on how the engine lays the version out.
func (v *Version) LogicalSize() int64 {
	return int64(len(v.Key) + len(v.Value) + versionOverhead)
}

// String prints the version in one line.
func (v *Version) String() string {
	if v.Tombstone() {
		return fmt.Sprintf("%q@%d.%d deleted", v.Key, v.Mod, v.Sub)
	}
	s := fmt.Sprintf("%q@%d.%d create=%d version=%d", v.Key, v.Mod, v.Sub, v.Create, v.Version)
	if v.Lease != 0 {
		s += fmt.Sprintf(" lease=%d", v.Lease)
	}
	return s + fmt.Sprintf(" %q", v.Value)
}

// clone copies the version and, into one allocation, its slices.
func (v *Version) clone() *Version {
	c := *v
	buf := make([]byte, 0, len(v.Key)+len(v.Value))
	buf = append(append(buf, v.Key...), v.Value...)
	c.Key = buf[:len(v.Key):len(v.Key)]
	c.Value = buf[len(v.Key):]
	return &c
}
