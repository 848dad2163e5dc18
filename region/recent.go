package region

import (
	"fmt"
	"sync/atomic"

	lru "github.com/hashicorp/golang-lru/v2"

	"braid/mvcc"
)

// Recent remembers of keys that leaders of one store wrote or looked at lately what evaluation
// needs of their newest versions: everything but the value. A put to such a key does not look into
// the engine. All replicas of a store share one, so that its size does not depend on their number,
// and any goroutine may use it.
//
// What it holds is what the engine's newest visible state holds, for as long as its replica leads in
// one term: every version that is applied goes through note, and a term begins with a lease of its
// own on the table, so that nothing of an earlier one is seen, nor what a snapshot replaced.
type Recent struct {
	versions *lru.Cache[string, recentVersion]
	terms    atomic.Uint64
}

// recentKeyMax bounds the keys that are remembered, so that the count bounds the memory.
const recentKeyMax = 256

type recentVersion struct {
	term    uint64 // of whose leadership
	mod     mvcc.Revision
	create  mvcc.Revision
	version int64 // 0 after a deletion
	lease   int64
}

// NewRecent returns a table of so many keys, at least one. In memory each takes from 180 bytes, for a
// key of 16, to 420, for one of 250.
func NewRecent(keys int) *Recent {
	versions, err := lru.New[string, recentVersion](keys)
	if err != nil {
		panic(fmt.Sprintf("region: a table of %d recent versions: %v", keys, err))
	}
	return &Recent{versions: versions}
}

// recentTerm is one leadership's part of a table; its zero value remembers nothing.
type recentTerm struct {
	table *Recent
	term  uint64
}

// begin starts a leadership. A nil table remembers nothing.
func (r *Recent) begin() recentTerm {
	if r == nil {
		return recentTerm{}
	}
	return recentTerm{r, r.terms.Add(1)}
}

// note remembers a version that is, or is about to become, its key's newest applied one.
func (t recentTerm) note(v *mvcc.Version) {
	if t.table == nil || len(v.Key) > recentKeyMax {
		return
	}
	t.table.versions.Add(string(v.Key), recentVersion{term: t.term, mod: v.Mod, create: v.Create, version: v.Version, lease: v.Lease})
}

// forget is note of a version that nobody is likely to ask for.
func (t recentTerm) forget(key []byte) {
	if t.table != nil && len(key) <= recentKeyMax {
		t.table.versions.Remove(string(key))
	}
}

// get returns what is known of a key, without its value; false when nothing is.
func (t recentTerm) get(key []byte) (pending, bool) {
	if t.table == nil {
		return pending{}, false
	}
	v, ok := t.table.versions.Get(string(key))
	if !ok || v.term != t.term {
		return pending{}, false
	}
	return pending{mod: known(v.mod), create: known(v.create), version: v.version, lease: v.lease}, true
}
