package leasesvc

import (
	"slices"

	"braid/pd/pdpb"
)

// todo is what the core has asked for and nobody carries out yet, in piles of what may be carried out
// together. What is looked through to find the next thing are piles, however much is on them. The service
// guards it; the core bounds it (EndingMax, RecordingMax).
type todo struct {
	piles []*pile // none is empty; whichever something was taken from goes to the end
	by    map[pileKey]*pile
	n     int // actions
}

// pileKey is what actions have in common that may be carried out together: leases whose ends share a fate
// (group), and what is recorded in a region. An end that failed before shares its pile and is taken off it
// alone.
type pileKey struct {
	kind   ActionKind
	region pdpb.RegionID
	term   uint64
	group  uint64
	alone  bool
}

type pile struct {
	key     pileKey
	actions []Action
}

func (t *todo) add(list []Action) {
	if t.by == nil {
		t.by = map[pileKey]*pile{}
	}
	for _, a := range list {
		k := pileKey{kind: a.Kind, region: a.Region, term: a.Term, group: a.Group, alone: a.Alone}
		p := t.by[k]
		if p == nil {
			p = &pile{key: k}
			t.by[k] = p
			t.piles = append(t.piles, p)
		}
		p.actions = append(p.actions, a)
	}
	t.n += len(list)
}

// take takes the first actions off a pile that still stand, at most so many, and drops those before them that
// do not. It may come to none.
func (t *todo) take(at, most int, stands func(*Action) bool) (list []Action) {
	p := t.piles[at]
	n := 0
	for ; n < len(p.actions) && len(list) < most; n++ {
		if stands(&p.actions[n]) {
			list = append(list, p.actions[n])
		}
	}
	t.n -= n
	p.actions = p.actions[n:]
	t.piles = slices.Delete(t.piles, at, at+1)
	if len(p.actions) > 0 {
		t.piles = append(t.piles, p)
	} else {
		delete(t.by, p.key)
	}
	return list
}
