package pdpb

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Mode says who gives out revisions: the cuts of pd, or the one region's own log (A16).
type Mode uint8

const (
	// MultiGroup: many regions, numbered by cuts.
	MultiGroup Mode = iota
	// SingleGroup: one region that numbers its own entries.
	SingleGroup
)

// String names the mode.
func (m Mode) String() string {
	switch m {
	case MultiGroup:
		return "multi-group"
	case SingleGroup:
		return "single-group"
	}
	return fmt.Sprintf("mode(%d)", uint8(m))
}

// ErrMalformed says that a report contradicts itself.
var ErrMalformed = errors.New("pdpb: malformed report")

// Check returns an error when the report contradicts itself: its runs must cover exactly
// (From, Upto], with counts that do not fall and end at Cum. It knows nothing of pd's state.
func (r *Report) Check() error {
	if r.From > r.Upto {
		return fmt.Errorf("%w: from above up-to: %v", ErrMalformed, r)
	}
	if r.From == r.Upto {
		if len(r.Runs) > 0 || len(r.Facts) > 0 {
			return fmt.Errorf("%w: runs without entries: %v", ErrMalformed, r)
		}
		return nil
	}
	if len(r.Runs) == 0 {
		return fmt.Errorf("%w: entries without runs: %v", ErrMalformed, r)
	}
	index, cum := r.From, uint64(0)
	for _, x := range r.Runs {
		if x.Index <= index || x.Cum < cum {
			return fmt.Errorf("%w: runs out of order: %v", ErrMalformed, r)
		}
		index, cum = x.Index, x.Cum
	}
	if index != r.Upto || cum != r.Cum {
		return fmt.Errorf("%w: runs do not end at up-to: %v", ErrMalformed, r)
	}
	index = r.From + 1
	for i := range r.Facts {
		f := &r.Facts[i]
		if f.Index < index || f.Index > r.Upto {
			return fmt.Errorf("%w: facts out of order: %v", ErrMalformed, r)
		}
		if !slices.IsSorted(f.Participants) || !slices.Contains(f.Participants, r.Region) {
			return fmt.Errorf("%w: participants: %v", ErrMalformed, r)
		}
		index = f.Index
	}
	return nil
}

// String prints the fact in one stable line.
func (f *Fact) String() string {
	s := "reads"
	if f.Writes {
		s = "writes"
	}
	return fmt.Sprintf("t%d@%d:f%d %s of %v", f.Attempt, f.Index, f.Stamp, s, f.Participants)
}

// String prints the decision in one stable line.
func (d Decision) String() string {
	if d.Commit {
		return fmt.Sprintf("t%d=%d", d.Attempt, d.Rev)
	}
	return fmt.Sprintf("t%d=abort", d.Attempt)
}

// String prints the report in one stable line.
func (r *Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "r%d/%d (%d,%d@%d] cum=%d sealed=%d", r.Region, r.Incarnation, r.From, r.Upto, r.UptoTerm, r.Cum, r.Sealed)
	for _, x := range r.Runs {
		fmt.Fprintf(&b, " ..%d:f%d=%d", x.Index, x.Stamp, x.Cum)
	}
	for i := range r.Facts {
		fmt.Fprintf(&b, " [%v]", &r.Facts[i])
	}
	return b.String()
}

// String prints the item in one stable line.
func (it *Item) String() string {
	s := fmt.Sprintf("r%d/%d #%d c%d upto=%d@%d cum=%d base=%d count=%d f%d",
		it.Region, it.Incarnation, it.N, it.Cut, it.Upto, it.UptoTerm, it.Cum, it.Base, it.Count, it.Fence)
	for _, d := range it.Decisions {
		s += " " + d.String()
	}
	return s
}

// String prints the mark in one stable line.
func (m Mark) String() string {
	return fmt.Sprintf("c%d rev=%d floor=%d f%d", m.Cut, m.Rev, m.Floor, m.Fence)
}

// String prints the read point in one stable line.
func (p ReadPoint) String() string {
	return fmt.Sprintf("c%d rev=%d floor=%d", p.Cut, p.Rev, p.Floor)
}

// String prints the descriptor in one stable line.
func (r *Descriptor) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "r%d/%d %v epoch=%d start=%d@%d", r.ID, r.Incarnation, r.Span, r.Epoch, r.StartIndex, r.StartTerm)
	for _, p := range r.Peers {
		fmt.Fprintf(&b, " %d@%s", p.Replica, p.Store)
	}
	return b.String()
}

// String prints the store in one stable line.
func (s *Store) String() string {
	return fmt.Sprintf("store %s %q peer=%s client=%s", s.ID, s.Name, strings.Join(s.PeerURLs, ","), strings.Join(s.ClientURLs, ","))
}
