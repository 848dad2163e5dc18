package region

import (
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// Intake brings a region's log and its order items together. It is pure: it is told what the log
// holds and which items there are, and says what may be applied next and what a report must say.
//
// It keeps a summary of every entry above the applied index (the window), the items that are not
// applied, and those that are applied but not yet sealed in the committed log, because a leader
// must seal them. Invariants: the window is contiguous and starts at applied+1; items do not
// change; every item up to Item() is applied and none above.
type Intake struct {
	mut    *Mutants
	shared bool // report what is appended (A1)
	limits *Limits
	own    bool // single-group: items come from this log, nobody else keeps them, so none needs a seal

	desc      pdpb.Descriptor
	index     uint64 // applied, or passed because silent
	term      uint64 // of that entry
	item      uint64 // last applied
	upto      uint64 // where it reached
	uptoTerm  uint64
	cum       uint64 // through upto
	sealed    uint64 // highest item sealed in the log through index
	committed uint64

	window []entryInfo // entries index+1 .. (from head)
	head   int
	bytes  int // payloads kept in window
	items  map[uint64]pdpb.Item

	rep     pdpb.Report
	scanned uint64 // the report covers the window through here
	last    reportKey
}

// entryInfo is what the window knows of an entry.
type entryInfo struct {
	index, term uint64
	count       uint64
	fence       pdpb.Fence
	sealMax     uint64 // highest item sealed in it
	data        []byte // nil when it must be read from the log again
	size        int
	silent      bool
	void        bool // its header names another place (E1); it consumes nothing
	meta        bool
	resolves    bool // it has an effect of CreateResolve
	facts       []pdpb.Fact
}

type reportKey struct{ upto, term, sealed uint64 }

// NewIntake starts at a position, with an empty window.
func NewIntake(p *Position, l *Limits, shared bool, m *Mutants) *Intake {
	in := &Intake{mut: m, shared: shared, limits: l, items: map[uint64]pdpb.Item{}}
	in.Reset(p)
	return in
}

// Reset goes on from another position, with an empty window: a snapshot was installed. Items
// above it stay.
func (in *Intake) Reset(p *Position) {
	in.desc = p.Descriptor
	in.index, in.term, in.item, in.upto, in.uptoTerm = p.Index, p.Term, p.Item, p.Upto, p.UptoTerm
	in.cum, in.sealed, in.committed = p.Cum, p.Sealed, p.Index
	clear(in.window)
	in.window, in.head, in.bytes = in.window[:0], 0, 0
	for n := range in.items {
		if n <= in.sealed {
			delete(in.items, n)
		}
	}
	in.last = reportKey{}
	in.startReport()
}

// Item is the number of the last applied item; Index the applied index; Last the end of the log.
func (in *Intake) Item() uint64  { return in.item }
func (in *Intake) Index() uint64 { return in.index }
func (in *Intake) Last() uint64  { return in.index + uint64(len(in.window)-in.head) }

func (in *Intake) at(index uint64) *entryInfo {
	if index <= in.index || index > in.Last() {
		return nil
	}
	return &in.window[in.head+int(index-in.index)-1]
}

// Append takes what was put into the log. It replaces everything at or above its first index;
// entries at or below the applied index are skipped.
func (in *Intake) Append(entries []*raftpb.Entry) error {
	for len(entries) > 0 && entries[0].GetIndex() <= in.index {
		entries = entries[1:]
	}
	if len(entries) == 0 {
		return nil
	}
	first := entries[0].GetIndex()
	if first > in.Last()+1 {
		return fmt.Errorf("%w: entry %d appended after %d", ErrDiverged, first, in.Last())
	}
	for i := in.head + int(first-in.index) - 1; i < len(in.window); i++ {
		in.bytes -= len(in.window[i].data)
		in.window[i] = entryInfo{}
	}
	in.window = in.window[:in.head+int(first-in.index)-1]
	if first <= in.committed {
		return fmt.Errorf("%w: committed entry %d replaced", ErrDiverged, first)
	}
	if first <= in.scanned {
		in.startReport()
	}
	for _, e := range entries {
		if e.GetIndex() != in.Last()+1 {
			return fmt.Errorf("%w: entry %d appended after %d", ErrDiverged, e.GetIndex(), in.Last())
		}
		info, err := in.summarise(e)
		if err != nil {
			return err
		}
		in.window = append(in.window, info)
	}
	return nil
}

// summarise makes an entry's summary and takes the items that it seals: they come from committed
// cuts, whether or not the entry will be committed (O1).
func (in *Intake) summarise(e *raftpb.Entry) (entryInfo, error) {
	info := entryInfo{index: e.GetIndex(), term: e.GetTerm(), size: len(e.GetData()), silent: true}
	if e.GetType() != raftpb.EntryNormal || len(e.GetData()) == 0 {
		return info, nil
	}
	s, err := regionpb.Peek(e.GetData())
	if err != nil {
		return info, fmt.Errorf("entry %d of region %d: %w", info.index, in.desc.ID, err)
	}
	info.silent = s.Silent() && !in.mut.SealPing
	info.meta = s.Meta
	if !s.Meta {
		info.fence, info.resolves = s.Fence, s.Resolves
		info.void = (s.Term != info.term || s.Index != info.index) && !in.mut.Forward
		if !info.void {
			info.count = s.Count
			info.facts = s.Prepares
			for i := range info.facts {
				info.facts[i].Index, info.facts[i].Stamp = info.index, info.fence
			}
		}
	}
	for i := range s.Seals {
		if err := in.AddItem(&s.Seals[i]); err != nil {
			return info, err
		}
		info.sealMax = s.Seals[i].N
	}
	if !info.silent && in.bytes+info.size <= in.limits.WindowBytesMax {
		info.data = e.GetData()
		in.bytes += info.size
	}
	return info, nil
}

// keep holds an entry's payload until the entry is applied.
func (in *Intake) keep(e *entryInfo, data []byte) {
	if e.data == nil {
		e.data = data
		in.bytes += len(data)
	}
}

// AddItem takes an item from the stream or from a seal. It is idempotent; an item that says
// something else than its number said before is ErrDiverged. Items of another incarnation are
// none of this log (A15). When full, an item above the next one is dropped: Wanted tells from
// where to deliver again.
func (in *Intake) AddItem(it *pdpb.Item) error {
	if it.Incarnation != in.desc.Incarnation || it.N <= in.sealed {
		return nil
	}
	if old, ok := in.items[it.N]; ok {
		if !old.Equal(it) {
			return fmt.Errorf("%w: item %d is %+v and %+v", ErrDiverged, it.N, old, *it)
		}
		return nil
	}
	if len(in.items) >= in.limits.ItemsMax && it.N > in.item+1 {
		return nil
	}
	in.items[it.N] = *it
	return nil
}

// Wanted is the lowest item that this replica should hold and does not: the stream must deliver
// from it on. Items that are applied are wanted until they are sealed in the log, because a
// leader that restarted could not seal them otherwise, and nothing after them (P4).
func (in *Intake) Wanted() uint64 {
	n := in.sealed + 1
	for {
		if _, ok := in.items[n]; !ok {
			return n
		}
		n++
	}
}

// Commit moves the commit index.
func (in *Intake) Commit(index uint64) {
	if index > in.committed {
		in.committed = index
	}
}

// silentAhead passes the silent entries that follow the applied index: everything before them is
// applied, so they are (O2). It stops before one that seals an item that is not applied.
func (in *Intake) silentAhead() (passed uint64) {
	for in.head < len(in.window) {
		e := &in.window[in.head]
		if !e.silent || e.index > in.committed || e.sealMax > in.item {
			break
		}
		in.drop(e)
		passed++
	}
	return passed
}

// drop removes the first entry of the window: it is applied.
func (in *Intake) drop(e *entryInfo) {
	in.index, in.term = e.index, e.term
	if e.sealMax > in.sealed {
		for n := in.sealed + 1; n <= e.sealMax; n++ {
			delete(in.items, n)
		}
		in.sealed = e.sealMax
	}
	in.bytes -= len(e.data)
	*e = entryInfo{}
	in.head++
	if in.head == len(in.window) {
		in.window, in.head = in.window[:0], 0
	} else if in.head > 1024 && in.head*2 > len(in.window) {
		n := copy(in.window, in.window[in.head:])
		clear(in.window[n:])
		in.window, in.head = in.window[:n], 0
	}
}

// Next returns the next item if it may be applied now (O1), with the entries it orders; they
// are valid until the next call of Append or Applied. The item is checked against this replica's
// own count (O3).
func (in *Intake) Next() (*pdpb.Item, []entryInfo, error) {
	it, ok := in.items[in.item+1]
	if !ok || it.Upto > in.Last() {
		return nil, nil, nil
	}
	if it.Upto <= in.index {
		if it.Upto != in.upto || it.Count != 0 {
			return nil, nil, fmt.Errorf("%w: item %d reaches %d, applied is %d", ErrDiverged, it.N, it.Upto, in.index)
		}
		return &it, nil, nil
	}
	// Either raft says that the entry is committed, or the item proves it, because no other
	// entry of that index and term exists. The index alone proves nothing: a deposed leader may
	// hold another entry there (A6).
	last := in.at(it.Upto)
	if it.Upto > in.committed && last.term != it.UptoTerm && !in.mut.CommitFromItem {
		return nil, nil, nil
	}
	if last.term != it.UptoTerm && !in.mut.CommitFromItem {
		return nil, nil, fmt.Errorf("%w: item %d names %d of term %d, the log has term %d", ErrDiverged, it.N, it.Upto, it.UptoTerm, last.term)
	}
	entries := in.window[in.head : in.head+int(it.Upto-in.index)]
	cum, valid := in.cum, uint64(0)
	for i := range entries {
		e := &entries[i]
		cum += e.count
		if e.fence >= it.Fence || in.mut.NoFence {
			valid += e.count
		}
		if e.sealMax >= it.N {
			return nil, nil, fmt.Errorf("%w: entry %d seals item %d, which item %d orders", ErrDiverged, e.index, e.sealMax, it.N)
		}
	}
	if cum != it.Cum || valid != it.Count {
		return nil, nil, fmt.Errorf("%w: item %d has count %d, cum %d; this replica counts %d and %d", ErrDiverged, it.N, it.Count, it.Cum, valid, cum)
	}
	return &it, entries, nil
}

// Applied moves past an item that Next returned.
func (in *Intake) Applied(it *pdpb.Item) {
	for in.index < it.Upto {
		in.drop(&in.window[in.head])
	}
	in.item, in.upto, in.uptoTerm, in.cum = it.N, it.Upto, it.UptoTerm, it.Cum
	if it.Upto > in.committed {
		in.committed = it.Upto
	}
	if in.own {
		in.sealed = it.N
	}
	if it.N <= in.sealed {
		delete(in.items, it.N)
	}
}

// SealedInLog is the highest item sealed in any entry of the log.
func (in *Intake) SealedInLog() uint64 {
	for i := len(in.window) - 1; i >= in.head; i-- {
		if m := in.window[i].sealMax; m > 0 {
			return m
		}
	}
	return in.sealed
}

// Seals returns the items from n on that a leader can seal next: contiguous ones, at most max.
func (in *Intake) Seals(n uint64, max int) []pdpb.Item {
	var out []pdpb.Item
	for len(out) < max {
		it, ok := in.items[n]
		if !ok {
			break
		}
		out = append(out, it)
		n++
	}
	return out
}

// Quiet says that nothing waits here: every entry is applied and every applied item is sealed.
func (in *Intake) Quiet() bool {
	return in.head == len(in.window) && in.sealed >= in.item
}
