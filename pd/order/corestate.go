package order

import (
	"encoding/binary"

	"braid/mvcc"
	"braid/pd/pdpb"
)

const coreVersion = 3

// AppendState appends the encoding of the whole state, the same bytes for equal states.
func (c *Core) AppendState(b []byte) []byte {
	b = append(b, coreVersion)
	b = binary.AppendUvarint(b, uint64(c.cut))
	b = binary.AppendVarint(b, int64(c.rev))
	b = binary.AppendVarint(b, int64(c.floor))
	b = binary.AppendUvarint(b, uint64(c.fence))
	b = binary.AppendUvarint(b, uint64(len(c.regions)))
	for i := range c.regions {
		g := &c.regions[i]
		b = binary.AppendUvarint(b, uint64(g.id))
		b = binary.AppendUvarint(b, uint64(g.incarnation))
		b = binary.AppendUvarint(b, g.upto)
		b = binary.AppendUvarint(b, g.uptoTerm)
		b = binary.AppendUvarint(b, g.cum)
		b = binary.AppendUvarint(b, g.newest)
		b = binary.AppendUvarint(b, uint64(len(g.items)))
		for i := range g.items {
			b = g.items[i].Append(b)
		}
	}
	return c.hashes.append(c.txns.append(b))
}

// ReadCore reads a state at d's place.
func ReadCore(d *pdpb.Dec) *Core {
	c := NewCore()
	d.Version(coreVersion)
	c.cut = pdpb.Cut(d.Uvarint())
	c.rev = mvcc.Revision(d.Varint())
	c.floor = mvcc.Revision(d.Varint())
	c.fence = pdpb.Fence(d.Uvarint())
	last := pdpb.RegionID(0)
	for n := d.Len(7); n > 0 && d.Err() == nil; n-- {
		g := regionOrder{id: pdpb.RegionID(d.Uvarint())}
		inc := d.Uvarint()
		g.incarnation = uint32(inc)
		g.upto, g.uptoTerm, g.cum, g.newest = d.Uvarint(), d.Uvarint(), d.Uvarint(), d.Uvarint()
		m := d.Len(pdpb.ItemBytesMin)
		for i := range m {
			it := d.Item()
			// The retained items are the newest, without holes.
			if d.Err() == nil && (it.Region != g.id || it.N != g.newest-uint64(m-1-i)) {
				d.Fail("region %d newest %d holds %v", g.id, g.newest, &it)
			}
			g.items = append(g.items, it)
		}
		if d.Err() == nil && (g.id <= last || inc > 1<<32-1 || uint64(m) > g.newest) {
			d.Fail("region %d after %d, incarnation %d, %d items of %d", g.id, last, inc, m, g.newest)
		}
		last = g.id
		c.regions = append(c.regions, g)
		c.held += m
	}
	c.txns = readTxns(d)
	c.hashes = readHashes(d)
	return c
}

// LoadState decodes what AppendState wrote and returns the bytes behind it.
func LoadState(b []byte) (c *Core, rest []byte, err error) {
	d := pdpb.NewDec(b)
	c = ReadCore(d)
	return c, d.Rest(), d.Err()
}
