package sim

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region"
)

// backend pins and installs one region's state in the engine. What travels is a handle: the
// state itself is a Go value in the sender's table.
type backend struct {
	s    *store
	span mvcc.Span
}

type pinned struct {
	s    *store
	data *mvcc.MemSpan
}

func (b backend) Pin() (region.PinnedState, error) {
	data, _ := b.s.engine.ExportSpan(0, b.span)
	return pinned{b.s, data}, nil
}

// Position is asked for right after Pin.
func (p pinned) Position(group uint64) ([]byte, bool, error) {
	pos, ok := p.s.engine.Position(group)
	return pos, ok, nil
}

func (p pinned) Export(_ context.Context, _ mvcc.Span, w io.Writer) error {
	h := uint64(len(p.s.spans))<<4 | uint64(p.s.i)
	p.s.spans[h] = p.data
	_, err := w.Write(binary.BigEndian.AppendUint64(nil, h))
	return err
}

func (p pinned) Close() error { return nil }

func (b backend) Import(group uint64, _ mvcc.Span) (region.StateImport, error) {
	return &importer{s: b.s, group: group}, nil
}

type importer struct {
	s     *store
	group uint64
	buf   []byte
}

func (i *importer) Write(p []byte) (int, error) {
	i.buf = append(i.buf, p...)
	return len(p), nil
}

func (i *importer) Install(position []byte) error {
	if len(i.buf) != 8 {
		return fmt.Errorf("sim: snapshot of %d bytes", len(i.buf))
	}
	h := binary.BigEndian.Uint64(i.buf)
	data := i.s.w.stores[h&15].spans[h]
	if i.s.w.mut.noIndex {
		data = data.WithoutIndex()
	}
	delete(i.s.collected, pdpb.RegionID(i.group))
	if i.s.w.mut.ingestNoFlush {
		kind := mvcc.ImportAhead
		if i.s.w.rng.IntN(2) == 0 {
			kind = mvcc.ImportVolatile
		}
		return i.s.engine.ImportSpan(i.group, data, position, kind)
	}
	return i.s.engine.InstallSpan(i.group, data, position)
}

func (i *importer) Close() error { return nil }
