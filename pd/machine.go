package pd

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/google/btree"

	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// Machine is pd's replicated state: the order of the store, the directory of regions and stores,
// and the counter of ids. It is a pure state machine; its owner calls it from one goroutine.
// Members that applied the same log are equal, and so are their encodings.
type Machine struct {
	core      *order.Core
	clusterID uint64
	mode      pdpb.Mode
	booted    bool
	nextID    uint64
	version   uint64 // of the directory
	regions   map[pdpb.RegionID]pdpb.Descriptor
	byStart   *btree.BTreeG[pdpb.Descriptor] // ordered by start key; the spans do not overlap
	stores    map[raftid.StoreID]pdpb.Store
	picture   *order.Directory // of the current version; nil until somebody asks
}

// NewMachine returns the state before any entry.
func NewMachine(m order.Mutants) *Machine {
	c := order.NewCore()
	c.Mutants = m
	return &Machine{
		core:    c,
		regions: map[pdpb.RegionID]pdpb.Descriptor{},
		byStart: btree.NewG(16, startLess),
		stores:  map[raftid.StoreID]pdpb.Store{},
	}
}

func startLess(a, b pdpb.Descriptor) bool { return bytes.Compare(a.Span.Start, b.Span.Start) < 0 }

// Core is the order inside. Only the machine applies to it.
func (m *Machine) Core() *order.Core { return m.core }

// Bootstrapped says whether the cluster exists.
func (m *Machine) Bootstrapped() bool { return m.booted }

// Result is what an entry did.
type Result struct {
	// Cut is set when the entry was a cut.
	Cut *order.CutResult
	// Bootstrap is set when the entry was a Bootstrap; false says that it came second and was
	// ignored.
	Bootstrap *bool
}

// String prints the result.
func (r Result) String() string {
	switch {
	case r.Cut != nil:
		return r.Cut.String()
	case r.Bootstrap != nil && *r.Bootstrap:
		return "bootstrapped\n"
	case r.Bootstrap != nil:
		return "already bootstrapped\n"
	}
	return "nothing\n"
}

// Apply applies one entry of pd's log. An error says that the bytes are no entry this version
// knows; the caller must stop: other members may have understood it.
func (m *Machine) Apply(data []byte) (Result, error) {
	e, err := DecodeEntry(data)
	if err != nil {
		return Result{}, err
	}
	return m.apply(e), nil
}

func (m *Machine) apply(e *Entry) Result {
	if e.Bootstrap != nil {
		ok := m.bootstrap(e.Bootstrap)
		return Result{Bootstrap: &ok}
	}
	res := m.core.Apply(e.Cut)
	for i := range e.Cut.Events {
		m.event(&e.Cut.Events[i], &res.Events[i])
	}
	return Result{Cut: &res}
}

// bootstrap creates the cluster, once. What a Bootstrap says was checked before it was proposed
// (Bootstrap.Check), and decoding checked it again.
func (m *Machine) bootstrap(b *Bootstrap) bool {
	if m.booted {
		return false
	}
	m.booted, m.clusterID, m.mode = true, b.ClusterID, b.Mode
	m.nextID = uint64(raftid.FirstRegion)
	for _, s := range b.Stores {
		m.stores[s.ID] = s
	}
	for _, r := range b.Regions {
		m.addRegion(r)
		m.nextID = max(m.nextID, uint64(r.ID)+1)
		for _, p := range r.Peers {
			m.nextID = max(m.nextID, uint64(p.Replica)+1)
		}
	}
	m.changed()
	return true
}

func (m *Machine) addRegion(r pdpb.Descriptor) {
	m.regions[r.ID] = r
	m.byStart.ReplaceOrInsert(r)
	m.core.AddRegion(&r)
}

func (m *Machine) changed() {
	m.version++
	m.picture = nil
}

// event does what the order does not know of.
func (m *Machine) event(e *order.Event, res *order.EventResult) {
	switch e.Kind {
	case order.EventAllocIDs:
		if !m.booted || e.N == 0 || e.N > order.AllocIDsMax {
			res.Outcome = order.Refused
			return
		}
		res.FirstID = m.nextID
		m.nextID += e.N
	case order.EventRegisterStore:
		if !m.booted || e.Store.ID == 0 {
			res.Outcome = order.Refused
			return
		}
		if old, ok := m.stores[e.Store.ID]; ok && old.String() == e.Store.String() {
			return
		}
		m.stores[e.Store.ID] = e.Store
		m.changed()
	}
}

// Region returns a region's descriptor.
func (m *Machine) Region(id pdpb.RegionID) (pdpb.Descriptor, bool) {
	r, ok := m.regions[id]
	return r, ok
}

// Version is the directory's.
func (m *Machine) Version() uint64 { return m.version }

// Directory returns the picture of the current version; it is made once for each version.
func (m *Machine) Directory() *order.Directory {
	if m.picture == nil {
		d := &order.Directory{Version: m.version, ClusterID: m.clusterID, Mode: m.mode}
		d.Regions = make([]pdpb.Descriptor, 0, m.byStart.Len())
		m.byStart.Ascend(func(r pdpb.Descriptor) bool {
			d.Regions = append(d.Regions, r)
			return true
		})
		for _, id := range slices.Sorted(maps.Keys(m.stores)) {
			d.Stores = append(d.Stores, m.stores[id])
		}
		m.picture = d
	}
	return m.picture
}

const machineVersion = 1

// AppendState appends the encoding of the whole state.
func (m *Machine) AppendState(b []byte) []byte {
	b = append(b, machineVersion)
	b = pdpb.AppendBool(b, m.booted)
	b = binary.AppendUvarint(b, m.clusterID)
	b = append(b, byte(m.mode))
	b = binary.AppendUvarint(b, m.nextID)
	b = binary.AppendUvarint(b, m.version)
	b = binary.AppendUvarint(b, uint64(m.byStart.Len()))
	m.byStart.Ascend(func(r pdpb.Descriptor) bool {
		b = r.Append(b)
		return true
	})
	b = binary.AppendUvarint(b, uint64(len(m.stores)))
	for _, id := range slices.Sorted(maps.Keys(m.stores)) {
		s := m.stores[id]
		b = s.Append(b)
	}
	return m.core.AppendState(b)
}

// LoadMachine decodes what AppendState wrote.
func LoadMachine(b []byte, mut order.Mutants) (*Machine, error) {
	d := pdpb.NewDec(b)
	m := NewMachine(mut)
	d.Version(machineVersion)
	m.booted, m.clusterID, m.mode = d.Bool(), d.Uvarint(), pdpb.Mode(d.Byte())
	m.nextID, m.version = d.Uvarint(), d.Uvarint()
	for n := d.Len(9); n > 0 && d.Err() == nil; n-- {
		r := d.Descriptor()
		m.regions[r.ID] = r
		m.byStart.ReplaceOrInsert(r)
	}
	for n := d.Len(5); n > 0 && d.Err() == nil; n-- {
		s := d.Store()
		m.stores[s.ID] = s
	}
	m.core = order.ReadCore(d)
	m.core.Mutants = mut
	if err := d.Done(); err != nil {
		return nil, fmt.Errorf("pd: state of the placement group: %w", err)
	}
	if m.core.Regions() != len(m.regions) || m.byStart.Len() != len(m.regions) {
		return nil, fmt.Errorf("pd: state of the placement group: %w: %d regions in the directory, %d ordered", pdpb.ErrCorrupt, len(m.regions), m.core.Regions())
	}
	return m, nil
}

// String prints the whole state.
func (m *Machine) String() string {
	var b strings.Builder
	b.WriteString(m.Directory().String())
	fmt.Fprintf(&b, "  next-id %d\n", m.nextID)
	b.WriteString(m.core.String())
	return b.String()
}
