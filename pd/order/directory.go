package order

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"sort"
	"strings"

	"braid/pd/pdpb"
)

// Directory is a picture of who and what is in the cluster, as of a version. It is immutable:
// readers may keep it and share it.
type Directory struct {
	Version   uint64 // grows with every change; 0 is "not bootstrapped"
	ClusterID uint64
	Mode      pdpb.Mode
	Regions   []pdpb.Descriptor // by start key; they cover the key space without overlap (I9)
	Stores    []pdpb.Store      // by id
}

// Find returns the region that owns the key; false when the directory is empty.
func (d *Directory) Find(key []byte) (pdpb.Descriptor, bool) {
	i := sort.Search(len(d.Regions), func(i int) bool { return bytes.Compare(d.Regions[i].Span.Start, key) > 0 })
	if i == 0 || !d.Regions[i-1].Span.Contains(key) {
		return pdpb.Descriptor{}, false
	}
	return d.Regions[i-1], true
}

func (d *Directory) append(b []byte) []byte {
	b = append(b, wireVersion)
	b = binary.AppendUvarint(b, d.Version)
	b = binary.AppendUvarint(b, d.ClusterID)
	b = append(b, byte(d.Mode))
	b = binary.AppendUvarint(b, uint64(len(d.Regions)))
	for i := range d.Regions {
		b = d.Regions[i].Append(b)
	}
	b = binary.AppendUvarint(b, uint64(len(d.Stores)))
	for i := range d.Stores {
		b = d.Stores[i].Append(b)
	}
	return b
}

func readDirectory(d *pdpb.Dec) *Directory {
	r := &Directory{}
	d.Version(wireVersion)
	r.Version, r.ClusterID, r.Mode = d.Uvarint(), d.Uvarint(), pdpb.Mode(d.Byte())
	for n := d.Len(9); n > 0; n-- {
		r.Regions = append(r.Regions, d.Descriptor())
	}
	for n := d.Len(5); n > 0; n-- {
		r.Stores = append(r.Stores, d.Store())
	}
	return r
}

// String prints the directory, a line for each region and store.
func (d *Directory) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "directory v%d cluster=%x %v\n", d.Version, d.ClusterID, d.Mode)
	for i := range d.Regions {
		fmt.Fprintf(&b, "  %v\n", &d.Regions[i])
	}
	for i := range d.Stores {
		fmt.Fprintf(&b, "  %v\n", &d.Stores[i])
	}
	return b.String()
}
