package pd

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"braid/pd/order"
	"braid/pd/pdpb"
)

// Bootstrap creates the cluster. pd's first leader, finding empty state, proposes one; stores
// create their first replicas from it and from nothing else.
type Bootstrap struct {
	ClusterID uint64
	Mode      pdpb.Mode
	Stores    []pdpb.Store
	Regions   []pdpb.Descriptor // by start key; they cover the key space
}

// ErrBadBootstrap says that a Bootstrap does not describe a cluster.
var ErrBadBootstrap = errors.New("pd: invalid bootstrap")

// Check returns an error unless the regions cover the whole key space without overlap (I9), with
// unique ids and peers.
func (b *Bootstrap) Check() error {
	if b.Mode > pdpb.SingleGroup {
		return fmt.Errorf("%w: %v", ErrBadBootstrap, b.Mode)
	}
	if len(b.Stores) == 0 || len(b.Regions) == 0 {
		return fmt.Errorf("%w: %d stores and %d regions", ErrBadBootstrap, len(b.Stores), len(b.Regions))
	}
	if b.Mode == pdpb.SingleGroup && len(b.Regions) != 1 {
		return fmt.Errorf("%w: %d regions in single-group mode", ErrBadBootstrap, len(b.Regions))
	}
	stores := map[uint64]bool{}
	for i := range b.Stores {
		id := uint64(b.Stores[i].ID)
		if id == 0 || stores[id] {
			return fmt.Errorf("%w: store %x twice or zero", ErrBadBootstrap, id)
		}
		stores[id] = true
	}
	ids := map[pdpb.RegionID]bool{}
	next := []byte{}
	for i := range b.Regions {
		r := &b.Regions[i]
		if r.ID < firstRegion || ids[r.ID] {
			return fmt.Errorf("%w: region id %d", ErrBadBootstrap, r.ID)
		}
		ids[r.ID] = true
		if next == nil || !bytes.Equal(r.Span.Start, next) || r.Span.Empty() {
			return fmt.Errorf("%w: region %d does not begin where the one before it ends: %v", ErrBadBootstrap, r.ID, r.Span)
		}
		next = r.Span.End
		if len(r.Peers) == 0 {
			return fmt.Errorf("%w: region %d has no peers", ErrBadBootstrap, r.ID)
		}
		seen := map[uint64]bool{}
		for _, p := range r.Peers {
			if p.Replica == 0 || !stores[uint64(p.Store)] || seen[uint64(p.Store)] {
				return fmt.Errorf("%w: region %d: peer %d on store %s", ErrBadBootstrap, r.ID, p.Replica, p.Store)
			}
			seen[uint64(p.Store)] = true
		}
	}
	if next != nil {
		return fmt.Errorf("%w: nothing owns the keys from %q on", ErrBadBootstrap, next)
	}
	return nil
}

// Entry is what pd's log holds: exactly one of its fields is set.
type Entry struct {
	Bootstrap *Bootstrap
	Cut       *order.CutProposal
}

const (
	entryVersion   = 1
	entryBootstrap = 1
	entryCut       = 2
)

// Append appends the encoding of the entry.
func (e *Entry) Append(b []byte) []byte {
	b = append(b, entryVersion)
	if e.Bootstrap != nil {
		return e.Bootstrap.append(append(b, entryBootstrap))
	}
	return e.Cut.Append(append(b, entryCut))
}

func (b *Bootstrap) append(to []byte) []byte {
	to = binary.AppendUvarint(to, b.ClusterID)
	to = append(to, byte(b.Mode))
	to = binary.AppendUvarint(to, uint64(len(b.Stores)))
	for i := range b.Stores {
		to = b.Stores[i].Append(to)
	}
	to = binary.AppendUvarint(to, uint64(len(b.Regions)))
	for i := range b.Regions {
		to = b.Regions[i].Append(to)
	}
	return to
}

// DecodeEntry decodes an entry.
func DecodeEntry(data []byte) (*Entry, error) {
	d := pdpb.NewDec(data)
	e := &Entry{}
	d.Version(entryVersion)
	switch kind := d.Byte(); kind {
	case entryBootstrap:
		b := &Bootstrap{ClusterID: d.Uvarint(), Mode: pdpb.Mode(d.Byte())}
		for n := d.Len(5); n > 0 && d.Err() == nil; n-- {
			b.Stores = append(b.Stores, d.Store())
		}
		for n := d.Len(9); n > 0 && d.Err() == nil; n-- {
			b.Regions = append(b.Regions, d.Descriptor())
		}
		if d.Err() == nil {
			if err := b.Check(); err != nil {
				d.Fail("%v", err)
			}
		}
		e.Bootstrap = b
	case entryCut:
		e.Cut = order.ReadProposal(d)
	default:
		d.Fail("entry kind %d", kind)
	}
	if err := d.Done(); err != nil {
		return nil, fmt.Errorf("pd: log entry: %w", err)
	}
	return e, nil
}
