package node

import (
	"encoding/binary"
	"errors"
	"fmt"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
	"braid/router"
)

// hashQuery is what travels.
type hashQuery struct {
	router.HashRequest
	// onlyAlive asks whether any key is alive and for nothing else; alive says that one is.
	onlyAlive, alive bool
	// What is wanted lies behind this place.
	rev     mvcc.Revision
	sub     int64
	regions []pdpb.RegionID
}

// hashAnswer is what comes back: a page, and whether that was all.
type hashAnswer struct {
	alive, last bool
	records     []router.HashRecord
}

// Both are a version byte and varints; an answer that is an error is the version byte and the
// error as a region encodes it.
const hashV1 = 1

var errBadHash = errors.New("node: malformed hash query")

func (q *hashQuery) append(b []byte) []byte {
	flags := byte(0)
	if q.onlyAlive {
		flags |= 1
	}
	if q.alive {
		flags |= 2
	}
	b = append(b, hashV1, flags)
	b = binary.AppendUvarint(b, uint64(q.Cut))
	for _, n := range [...]int64{int64(q.At), int64(q.Floor), int64(q.rev), q.sub} {
		b = binary.AppendVarint(b, n)
	}
	for _, id := range q.regions {
		b = binary.AppendUvarint(b, uint64(id))
	}
	return b
}

// varints reads numbers one after another; bad sticks.
type varints struct {
	b   []byte
	bad bool
}

func (d *varints) unsigned() uint64 {
	v, n := binary.Uvarint(d.b)
	d.skip(n)
	return v
}

func (d *varints) signed() int64 {
	v, n := binary.Varint(d.b)
	d.skip(n)
	return v
}

func (d *varints) skip(n int) {
	if n <= 0 {
		d.b, d.bad = nil, true
		return
	}
	d.b = d.b[n:]
}

func decodeHashQuery(b []byte) (*hashQuery, error) {
	if len(b) < 2 || b[0] != hashV1 {
		return nil, errBadHash
	}
	q := &hashQuery{onlyAlive: b[1]&1 != 0, alive: b[1]&2 != 0}
	d := varints{b: b[2:]}
	q.Cut = pdpb.Cut(d.unsigned())
	q.At, q.Floor, q.rev, q.sub = mvcc.Revision(d.signed()), mvcc.Revision(d.signed()), mvcc.Revision(d.signed()), d.signed()
	for len(d.b) > 0 {
		q.regions = append(q.regions, pdpb.RegionID(d.unsigned()))
	}
	if d.bad || q.At < 0 || q.rev < 0 {
		return nil, errBadHash
	}
	return q, nil
}

const hashRecordBytes = 8 + 8 + 4 + 4

func (a *hashAnswer) append(err error) ([]byte, error) {
	var re *regionpb.Error
	if err != nil && !errors.As(err, &re) {
		return nil, err
	}
	if re != nil {
		return []byte{hashV1, 4, byte(re.Code)}, nil
	}
	flags := byte(0)
	if a.alive {
		flags |= 1
	}
	if a.last {
		flags |= 2
	}
	b := append(make([]byte, 0, 2+hashRecordBytes*len(a.records)), hashV1, flags)
	for _, r := range a.records {
		b = binary.BigEndian.AppendUint64(b, uint64(r.Rev))
		b = binary.BigEndian.AppendUint64(b, uint64(r.Sub))
		b = binary.BigEndian.AppendUint32(b, uint32(r.Len))
		b = binary.BigEndian.AppendUint32(b, r.CRC)
	}
	return b, nil
}

func decodeHashAnswer(b []byte) (*hashAnswer, error) {
	switch {
	case len(b) < 2 || b[0] != hashV1:
		return nil, errBadHash
	case b[1]&4 != 0:
		if len(b) != 3 {
			return nil, errBadHash
		}
		return nil, regionpb.ErrorOf(regionpb.Code(b[2]))
	case (len(b)-2)%hashRecordBytes != 0:
		return nil, fmt.Errorf("%w: %d bytes", errBadHash, len(b))
	}
	a := &hashAnswer{alive: b[1]&1 != 0, last: b[1]&2 != 0}
	for b = b[2:]; len(b) > 0; b = b[hashRecordBytes:] {
		a.records = append(a.records, router.HashRecord{
			Rev: mvcc.Revision(binary.BigEndian.Uint64(b)), Sub: int64(binary.BigEndian.Uint64(b[8:])),
			Len: int(binary.BigEndian.Uint32(b[16:])), CRC: binary.BigEndian.Uint32(b[20:]),
		})
	}
	return a, nil
}
