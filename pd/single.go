package pd

import (
	"encoding/binary"
	"fmt"
	"sync"

	"braid/pd/order"
	"braid/pd/pdpb"
)

// Single is the placement group of a single-group store (architecture 12): the same machine, driven by
// the log of the store's one group. Each committed entry of the log goes through the order core as a
// cut of its own, and what pd decides by itself is a command in the same log, another cut.
//
// The machine belongs to the group's owner, who calls what region.Orderer and region.MetaMachine name;
// every replica makes the same calls in the same order, so all machines are alike. Command and Take may
// be called from any goroutine.
type Single struct {
	cfg     SingleConfig
	machine *Machine

	mu struct {
		sync.Mutex
		seq     uint64
		waiting map[CommandID]*order.EventResult // commands made here, nil until applied
	}
}

// SingleConfig makes a Single.
type SingleConfig struct {
	// Bootstrap is what a new store begins with; it must be the same on all nodes.
	Bootstrap *Bootstrap
	// Origin distinguishes the commands of this process from those of all others.
	Origin uint64
	// OnCut sees each cut at its place, and OnChange the machine when a command was applied to it or it
	// was loaded. The group's owner calls them; optional.
	OnCut    func(index, term uint64, p *order.CutProposal, res *order.CutResult)
	OnChange func(m *Machine)
	Mutants  order.Mutants
}

// CommandID names a command in the log.
type CommandID struct{ origin, seq uint64 }

const commandHeader = 16 // bytes of a CommandID

// NewSingle returns a Single without a machine; Load must come first.
func NewSingle(cfg SingleConfig) *Single {
	s := &Single{cfg: cfg}
	s.mu.waiting = map[CommandID]*order.EventResult{}
	return s
}

// Load replaces the machine, at a start and after a snapshot. Empty means a new store.
func (s *Single) Load(state []byte) error {
	if len(state) == 0 {
		m := NewMachine(s.cfg.Mutants)
		if _, err := m.Apply((&Entry{Bootstrap: s.cfg.Bootstrap}).Append(nil)); err != nil {
			return err
		}
		s.machine = m
	} else {
		m, err := LoadMachine(state, s.cfg.Mutants)
		if err != nil {
			return err
		}
		s.machine = m
	}
	s.changed()
	return nil
}

func (s *Single) changed() {
	if s.cfg.OnChange != nil {
		s.cfg.OnChange(s.machine)
	}
}

// AppendState appends the machine's state to b.
func (s *Single) AppendState(b []byte) []byte { return s.machine.AppendState(b) }

// OrderCommitted makes a cut of one entry.
func (s *Single) OrderCommitted(r pdpb.Report) pdpb.Item {
	p := &order.CutProposal{Parts: []pdpb.Report{r}}
	res := s.machine.Core().Apply(p)
	if len(res.Items) != 1 {
		panic(fmt.Sprintf("pd: entry %d of the single group was not ordered: %v", r.Upto, &res))
	}
	s.cut(r.Upto, r.UptoTerm, p, &res)
	return res.Items[0]
}

func (s *Single) cut(index, term uint64, p *order.CutProposal, res *order.CutResult) {
	if s.cfg.OnCut != nil {
		s.cfg.OnCut(index, term, p, res)
	}
}

// Mark is the position after the last cut. Owner only.
func (s *Single) Mark() pdpb.Mark { return s.machine.Core().Mark() }

// ApplyMeta applies a command at its place in the log, and keeps its result if it was made here.
func (s *Single) ApplyMeta(index, term uint64, payload []byte) {
	if len(payload) < commandHeader {
		panic(fmt.Sprintf("pd: command %d/%d of the single group has %d bytes", index, term, len(payload)))
	}
	id := CommandID{binary.BigEndian.Uint64(payload), binary.BigEndian.Uint64(payload[8:])}
	e, err := DecodeEntry(payload[commandHeader:])
	if err != nil {
		panic(fmt.Sprintf("pd: command %d/%d of the single group: %v", index, term, err))
	}
	res := s.machine.apply(e)
	s.changed()
	if res.Cut == nil {
		return
	}
	s.cut(index, term, e.Cut, res.Cut)
	if id.origin != s.cfg.Origin || len(res.Cut.Events) != 1 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.mu.waiting[id]; ok {
		s.mu.waiting[id] = &res.Cut.Events[0]
	}
}

// Command makes a command for the log of an event. Take must follow once it is known what became of it.
func (s *Single) Command(e order.Event) (payload []byte, id CommandID) {
	s.mu.Lock()
	s.mu.seq++
	id = CommandID{s.cfg.Origin, s.mu.seq}
	s.mu.waiting[id] = nil
	s.mu.Unlock()
	payload = binary.BigEndian.AppendUint64(nil, id.origin)
	payload = binary.BigEndian.AppendUint64(payload, id.seq)
	return (&Entry{Cut: &order.CutProposal{Events: []order.Event{e}}}).Append(payload), id
}

// Take returns what a command came to, and forgets it; false when it was not applied here.
func (s *Single) Take(id CommandID) (order.EventResult, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	res := s.mu.waiting[id]
	delete(s.mu.waiting, id)
	if res == nil {
		return order.EventResult{}, false
	}
	return *res, true
}
