package node

import (
	"encoding/binary"
	"errors"
	"fmt"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/transport"
)

// Methods by which a node gets the events of regions without a replica on it.
const (
	methodFollow transport.Method = 67 // what has happened since, or will
	methodPast   transport.Method = 68 // a page of history
	methodGet    transport.Method = 69 // what a key held at a revision
)

// All four messages begin with a version byte; numbers are varints, byte strings have a length.
const followV1 = 1

var errBadFollow = errors.New("node: malformed message about events")

// followQuery asks for what some regions have brought beyond a revision each. The answer comes when
// there is something, or when the wait is over.
type followQuery struct {
	waitMs  uint64
	want    mvcc.Revision // the asker knows that the order has come this far
	regions []followed
}

// followed is one region of a query and, with what was found, of an answer.
type followed struct {
	id    pdpb.RegionID
	after mvcc.Revision

	state   byte
	led     bool
	floor   mvcc.Revision
	through mvcc.Revision
	events  []mvcc.Version // all in (after, through], unless there is a gap
}

// States of a region in an answer.
const (
	followWhole  = 0
	followGap    = 1 // the events of (after, through] are in the history only
	followAbsent = 2 // the region has no replica there
)

func (q *followQuery) append(b []byte) []byte {
	b = append(b, followV1)
	b = binary.AppendUvarint(b, q.waitMs)
	b = binary.AppendVarint(b, int64(q.want))
	for i := range q.regions {
		b = binary.AppendUvarint(b, uint64(q.regions[i].id))
		b = binary.AppendVarint(b, int64(q.regions[i].after))
	}
	return b
}

func decodeFollowQuery(b []byte) (*followQuery, error) {
	d, err := followBody(b)
	if err != nil {
		return nil, err
	}
	q := &followQuery{waitMs: d.unsigned(), want: mvcc.Revision(d.signed())}
	for len(d.b) > 0 {
		q.regions = append(q.regions, followed{id: pdpb.RegionID(d.unsigned()), after: mvcc.Revision(d.signed())})
	}
	if d.bad {
		return nil, errBadFollow
	}
	return q, nil
}

func followBody(b []byte) (*varints, error) {
	if len(b) == 0 || b[0] != followV1 {
		return nil, errBadFollow
	}
	return &varints{b: b[1:]}, nil
}

// appendFollowAnswer encodes the regions of an answer.
func appendFollowAnswer(b []byte, list []followed) []byte {
	b = append(b, followV1)
	for i := range list {
		f := &list[i]
		led := byte(0)
		if f.led {
			led = 1
		}
		b = binary.AppendUvarint(b, uint64(f.id))
		b = append(b, f.state, led)
		for _, n := range [...]mvcc.Revision{f.after, f.floor, f.through} {
			b = binary.AppendVarint(b, int64(n))
		}
		b = appendEvents(b, f.events)
	}
	return b
}

func decodeFollowAnswer(b []byte) (list []followed, err error) {
	d, err := followBody(b)
	if err != nil {
		return nil, err
	}
	for len(d.b) > 0 {
		f := followed{id: pdpb.RegionID(d.unsigned()), state: d.byte(), led: d.byte() == 1,
			after: mvcc.Revision(d.signed()), floor: mvcc.Revision(d.signed()), through: mvcc.Revision(d.signed())}
		f.events = d.events(f.after, f.through)
		list = append(list, f)
	}
	if d.bad {
		return nil, errBadFollow
	}
	return list, nil
}

func appendEvents(b []byte, events []mvcc.Version) []byte {
	b = binary.AppendUvarint(b, uint64(len(events)))
	for i := range events {
		b = appendEvent(b, &events[i])
	}
	return b
}

func appendEvent(b []byte, v *mvcc.Version) []byte {
	for _, n := range [...]int64{int64(v.Mod), v.Sub, int64(v.Create), v.Version, v.Lease} {
		b = binary.AppendVarint(b, n)
	}
	for _, s := range [...][]byte{v.Key, v.Value} {
		b = append(binary.AppendUvarint(b, uint64(len(s))), s...)
	}
	return b
}

func (d *varints) byte() byte {
	if len(d.b) == 0 {
		d.bad = true
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

// bytes returns a part of the message, nil for an empty one.
func (d *varints) bytes() []byte {
	n := d.unsigned()
	if n > uint64(len(d.b)) {
		d.b, d.bad = nil, true
	}
	if d.bad || n == 0 {
		return nil
	}
	v := d.b[:n:n]
	d.b = d.b[n:]
	return v
}

func (d *varints) event() mvcc.Version {
	v := mvcc.Version{Mod: mvcc.Revision(d.signed()), Sub: d.signed(), Create: mvcc.Revision(d.signed()), Version: d.signed(), Lease: d.signed()}
	v.Key, v.Value = d.bytes(), d.bytes()
	return v
}

// events reads a list whose revisions must rise inside (after, through]: the hub relies on it.
func (d *varints) events(after, through mvcc.Revision) (list []mvcc.Version) {
	last := after + 1
	for n := d.unsigned(); n > 0 && !d.bad; n-- {
		v := d.event()
		if v.Mod < last || v.Mod > through {
			d.bad = true
		}
		last = v.Mod
		list = append(list, v)
	}
	return list
}

// pastQuery asks for events of [from, to], or of one key's state at `to`.
type pastQuery struct {
	region    pdpb.RegionID
	from, to  mvcc.Revision
	span      mvcc.Span // of methodPast; Start is the key of methodGet
	bytesHint int       // about how much is wanted at once
}

func (q *pastQuery) append(b []byte) []byte {
	b = append(b, followV1)
	b = binary.AppendUvarint(b, uint64(q.region))
	b = binary.AppendVarint(b, int64(q.from))
	b = binary.AppendVarint(b, int64(q.to))
	b = binary.AppendUvarint(b, uint64(q.bytesHint))
	for _, s := range [...][]byte{q.span.Start, q.span.End} {
		b = append(binary.AppendUvarint(b, uint64(len(s))), s...)
	}
	return b
}

func decodePastQuery(b []byte) (*pastQuery, error) {
	d, err := followBody(b)
	if err != nil {
		return nil, err
	}
	q := &pastQuery{region: pdpb.RegionID(d.unsigned()), from: mvcc.Revision(d.signed()), to: mvcc.Revision(d.signed()), bytesHint: int(d.unsigned())}
	q.span.Start, q.span.End = d.bytes(), d.bytes() // an empty end is none
	if d.bad || len(d.b) > 0 || q.bytesHint < 0 {
		return nil, errBadFollow
	}
	return q, nil
}

// pastAnswer is a page of history: all events of [from, end].
type pastAnswer struct {
	state      byte // followWhole, followAbsent, or pastGone
	floor, end mvcc.Revision
	events     []mvcc.Version
}

// pastGone: what was asked for lies below the floor, and some of it is gone.
const pastGone = 3

func (a *pastAnswer) append(b []byte) []byte {
	b = append(b, followV1, a.state)
	b = binary.AppendVarint(b, int64(a.floor))
	b = binary.AppendVarint(b, int64(a.end))
	return appendEvents(b, a.events)
}

// decodePastAnswer reads the answer to a question about revisions above one.
func decodePastAnswer(b []byte, after mvcc.Revision) (*pastAnswer, error) {
	d, err := followBody(b)
	if err != nil {
		return nil, err
	}
	a := &pastAnswer{state: d.byte(), floor: mvcc.Revision(d.signed()), end: mvcc.Revision(d.signed())}
	a.events = d.events(after, a.end)
	if d.bad || len(d.b) > 0 || a.state > pastGone {
		return nil, fmt.Errorf("%w: %d bytes", errBadFollow, len(b))
	}
	return a, nil
}
