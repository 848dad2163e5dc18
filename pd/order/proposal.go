package order

import (
	"encoding/binary"
	"fmt"
	"strings"

	"braid/mvcc"
	"braid/pd/pdpb"
)

// EventKind says what an Event does.
type EventKind uint8

const (
	// EventCompact moves the logical compaction floor to Rev (C3).
	EventCompact EventKind = iota + 1
	// EventRaiseFence raises the fence, effective after its cut (F1).
	EventRaiseFence
	// EventAllocIDs takes N consecutive ids that nobody else gets.
	EventAllocIDs
	// EventRegisterStore adds or replaces a store.
	EventRegisterStore
	// EventAbort aborts the attempt unless it is decided, and tells what it came to. Aborts take
	// effect before attempts complete in the same cut (P3, T3).
	EventAbort
	// EventCompactHash asks for the hash that came with a compaction at Rev.
	EventCompactHash
	// eventCompactHashed is EventCompact with a hash, on the wire.
	eventCompactHashed
)

// Event is one of pd's own decisions. Events are placed after the entries of their cut (P3), in
// the order of the list.
type Event struct {
	Kind  EventKind
	Rev   mvcc.Revision // EventCompact, EventCompactHash
	N     uint64        // EventAllocIDs: how many, 1..AllocIDsMax
	Store pdpb.Store    // EventRegisterStore
	// Attempt is what an EventAbort is about.
	Attempt pdpb.AttemptID
	// Hash may come with an EventCompact: what the store hashes to at Rev.
	Hash pdpb.CompactHash
}

// AllocIDsMax bounds one EventAllocIDs.
const AllocIDsMax = 1 << 20

// String prints the event in one stable line.
func (e *Event) String() string {
	switch e.Kind {
	case EventCompact:
		if e.Hash.Rev != 0 {
			return fmt.Sprintf("compact %d hash %08x above %d", e.Rev, e.Hash.Hash, e.Hash.Floor)
		}
		return fmt.Sprintf("compact %d", e.Rev)
	case EventRaiseFence:
		return "raise-fence"
	case EventAllocIDs:
		return fmt.Sprintf("alloc-ids %d", e.N)
	case EventRegisterStore:
		return "register-store " + e.Store.String()
	case EventAbort:
		return fmt.Sprintf("abort t%d", e.Attempt)
	case EventCompactHash:
		return fmt.Sprintf("compact-hash %d", e.Rev)
	}
	return fmt.Sprintf("event(%d)", e.Kind)
}

// Outcome is what became of an event.
type Outcome uint8

const (
	// Done: executed.
	Done Outcome = iota
	// Compacted and Future: what C3 answers to a Compact that is too low or too high.
	Compacted
	Future
	// Refused: pd's state forbids it.
	Refused
	// Aborted, Committed and Forgotten answer an EventAbort. Forgotten says that the attempt was
	// decided too long ago, so that nobody knows how; or, to an EventCompactHash, that there is none.
	Aborted
	Committed
	Forgotten
)

// EventResult is the recorded answer to an event; all members have the same.
type EventResult struct {
	Outcome Outcome
	Mark    pdpb.Mark // the state right after the event; Mark.Rev is a header's revision
	FirstID uint64    // EventAllocIDs
	// Rev is the revision of an attempt that is Committed.
	Rev mvcc.Revision
	// Hash answers an EventCompactHash.
	Hash pdpb.CompactHash
}

// Err is the error a caller sees; nil when done, or committed.
func (r *EventResult) Err() error {
	switch r.Outcome {
	case Done, Committed:
		return nil
	case Aborted:
		return ErrAborted
	case Forgotten:
		return ErrForgotten
	case Compacted:
		return ErrCompacted
	case Future:
		return ErrFutureRevision
	}
	return ErrInvalid
}

// String prints the result in one stable line.
func (r *EventResult) String() string {
	s := r.Outcome.String()
	if r.Outcome == Committed {
		s += fmt.Sprintf(" rev=%d", r.Rev)
	}
	if r.FirstID != 0 {
		s += fmt.Sprintf(" first-id=%d", r.FirstID)
	}
	return s + " at " + r.Mark.String()
}

var outcomeNames = [...]string{"done", "compacted", "future", "refused", "aborted", "committed", "forgotten"}

func (o Outcome) String() string {
	if int(o) < len(outcomeNames) {
		return outcomeNames[o]
	}
	return fmt.Sprintf("outcome(%d)", uint8(o))
}

// CutProposal is what pd's log says of one cut: at most one report of each region, by ascending
// region id, and then pd's own events.
type CutProposal struct {
	Parts  []pdpb.Report
	Events []Event
}

const proposalVersion = 2

// Append appends the encoding of the proposal. It panics when the parts are not in ascending
// order of regions: every member would refuse such an entry.
func (p *CutProposal) Append(b []byte) []byte {
	b = append(b, proposalVersion)
	b = binary.AppendUvarint(b, uint64(len(p.Parts)))
	for i := range p.Parts {
		if i > 0 && p.Parts[i].Region <= p.Parts[i-1].Region {
			panic(fmt.Sprintf("order: cut parts out of order: r%d after r%d", p.Parts[i].Region, p.Parts[i-1].Region))
		}
		b = p.Parts[i].Append(b)
	}
	b = binary.AppendUvarint(b, uint64(len(p.Events)))
	for i := range p.Events {
		b = p.Events[i].append(b)
	}
	return b
}

// ReadProposal reads a proposal at d's place.
func ReadProposal(d *pdpb.Dec) *CutProposal {
	p := &CutProposal{}
	d.Version(proposalVersion)
	if n := d.Len(pdpb.ReportBytesMin); n > 0 {
		p.Parts = make([]pdpb.Report, n)
		for i := range p.Parts {
			p.Parts[i] = d.Report()
			if i > 0 && d.Err() == nil && p.Parts[i].Region <= p.Parts[i-1].Region {
				d.Fail("cut parts out of order: r%d after r%d", p.Parts[i].Region, p.Parts[i-1].Region)
			}
		}
	}
	if n := d.Len(1); n > 0 {
		p.Events = make([]Event, n)
		for i := range p.Events {
			p.Events[i] = readEvent(d)
		}
	}
	return p
}

func (e *Event) append(b []byte) []byte {
	if e.Kind == EventCompact && e.Hash.Rev != 0 {
		return e.Hash.Append(append(b, byte(eventCompactHashed)))
	}
	b = append(b, byte(e.Kind))
	switch e.Kind {
	case EventCompact, EventCompactHash:
		b = binary.AppendVarint(b, int64(e.Rev))
	case EventAllocIDs:
		b = binary.AppendUvarint(b, e.N)
	case EventRegisterStore:
		b = e.Store.Append(b)
	case EventAbort:
		b = binary.AppendUvarint(b, uint64(e.Attempt))
	}
	return b
}

func readEvent(d *pdpb.Dec) (e Event) {
	e.Kind = EventKind(d.Byte())
	switch e.Kind {
	case EventCompact, EventCompactHash:
		e.Rev = mvcc.Revision(d.Varint())
	case eventCompactHashed:
		e.Kind, e.Hash = EventCompact, d.CompactHash()
		if e.Rev = e.Hash.Rev; e.Rev == 0 {
			d.Fail("a hash of nothing")
		}
	case EventRaiseFence:
	case EventAllocIDs:
		e.N = d.Uvarint()
	case EventRegisterStore:
		e.Store = d.Store()
	case EventAbort:
		e.Attempt = pdpb.AttemptID(d.Uvarint())
	default:
		d.Fail("event kind %d", e.Kind)
	}
	return e
}

// String prints the proposal, a line for each part and event.
func (p *CutProposal) String() string {
	var b strings.Builder
	for i := range p.Parts {
		fmt.Fprintf(&b, "part %v\n", &p.Parts[i])
	}
	for i := range p.Events {
		fmt.Fprintf(&b, "event %v\n", &p.Events[i])
	}
	return b.String()
}
