package order

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// Method numbers the requests that a pd member answers; the transport gives 1-31 to this package.
type Method uint8

const (
	MethodReports   Method = iota + 1 // reports of a store, to the leader
	MethodReadPoint                   // a read point, from the leader
	MethodPropose                     // an Event, to the leader
	MethodSubscribe                   // changes of a store's stream, to any member
	MethodMark                        // "send a mark once you are at this cut", to any member
	MethodDirectory                   // the directory, from any member
	MethodForward                     // one of the first three, by way of a member that reaches the leader (S5)
)

// Methods lists all of them, for registration at the transport.
var Methods = []Method{MethodReports, MethodReadPoint, MethodPropose, MethodSubscribe, MethodMark, MethodDirectory, MethodForward}

func (m Method) String() string {
	if m >= MethodReports && m <= MethodForward {
		return [...]string{"reports", "read-point", "propose", "subscribe", "mark", "directory", "forward"}[m-1]
	}
	return fmt.Sprintf("method(%d)", uint8(m))
}

const wireVersion = 2

// Frame is one message of a member's stream to a store. It states the member's position after
// Mark, as far as the stream's regions go: all their items through Mark.Cut are in this frame or
// in earlier ones of the session (S2). Frames are numbered; a missing one ends the session.
type Frame struct {
	Session uint64 // chosen by the store; a frame of another session is ignored
	Seq     uint64 // 1, 2, 3 ... in a session
	Life    uint64 // of the member: one that restarted begins the session at 1 again, knowing less of it
	Role    Role   // what the member knows; Leading refers to the member
	Dir     uint64 // version of the member's directory
	Acks    []Ack
	Items   []pdpb.Item // ascending N for each region
	Mark    pdpb.Mark
}

// Ack acknowledges a subscription in the stream: as of this frame, before its items, the newest
// item of the region is Newest and its up-to Upto.
type Ack struct {
	Region pdpb.RegionID
	Newest uint64
	Upto   uint64
}

// Subscription asks for a region's items above Have.
type Subscription struct {
	Region pdpb.RegionID
	Have   uint64
}

// Subscribe changes a store's stream. A higher session than the member's current one of that
// store begins from nothing; a lower one is late and ignored.
type Subscribe struct {
	Session uint64
	Add     []Subscription
	Remove  []pdpb.RegionID
	Close   bool // the store listens elsewhere now
}

// Append appends the encoding of the frame.
func (f *Frame) Append(b []byte) []byte {
	b = append(b, wireVersion)
	b = binary.AppendUvarint(b, f.Session)
	b = binary.AppendUvarint(b, f.Seq)
	b = binary.AppendUvarint(b, f.Life)
	b = appendRole(b, f.Role)
	b = binary.AppendUvarint(b, f.Dir)
	b = binary.AppendUvarint(b, uint64(len(f.Acks)))
	for _, a := range f.Acks {
		b = binary.AppendUvarint(b, uint64(a.Region))
		b = binary.AppendUvarint(b, a.Newest)
		b = binary.AppendUvarint(b, a.Upto)
	}
	b = binary.AppendUvarint(b, uint64(len(f.Items)))
	for i := range f.Items {
		b = f.Items[i].Append(b)
	}
	return f.Mark.Append(b)
}

// DecodeFrame decodes a frame.
func DecodeFrame(b []byte) (*Frame, error) {
	d := pdpb.NewDec(b)
	f := &Frame{}
	d.Version(wireVersion)
	f.Session, f.Seq, f.Life, f.Role, f.Dir = d.Uvarint(), d.Uvarint(), d.Uvarint(), readRole(d), d.Uvarint()
	if n := d.Len(3); n > 0 {
		f.Acks = make([]Ack, n)
		for i := range f.Acks {
			f.Acks[i] = Ack{Region: pdpb.RegionID(d.Uvarint()), Newest: d.Uvarint(), Upto: d.Uvarint()}
		}
	}
	if n := d.Len(pdpb.ItemBytesMin); n > 0 {
		f.Items = make([]pdpb.Item, n)
		for i := range f.Items {
			f.Items[i] = d.Item()
		}
	}
	f.Mark = d.Mark()
	return f, d.Done()
}

// String prints the frame.
func (f *Frame) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "frame session=%d seq=%d dir=%d mark=[%v]", f.Session, f.Seq, f.Dir, f.Mark)
	for _, a := range f.Acks {
		fmt.Fprintf(&b, " ack(r%d newest=%d upto=%d)", a.Region, a.Newest, a.Upto)
	}
	for i := range f.Items {
		fmt.Fprintf(&b, " item(%v)", &f.Items[i])
	}
	return b.String()
}

// Append appends the encoding of the request.
func (s *Subscribe) Append(b []byte) []byte {
	b = append(b, wireVersion)
	b = binary.AppendUvarint(b, s.Session)
	b = binary.AppendUvarint(b, uint64(len(s.Add)))
	for _, a := range s.Add {
		b = binary.AppendUvarint(b, uint64(a.Region))
		b = binary.AppendUvarint(b, a.Have)
	}
	b = binary.AppendUvarint(b, uint64(len(s.Remove)))
	for _, r := range s.Remove {
		b = binary.AppendUvarint(b, uint64(r))
	}
	return pdpb.AppendBool(b, s.Close)
}

// DecodeSubscribe decodes a request.
func DecodeSubscribe(b []byte) (*Subscribe, error) {
	d := pdpb.NewDec(b)
	s := &Subscribe{}
	d.Version(wireVersion)
	s.Session = d.Uvarint()
	if n := d.Len(2); n > 0 {
		s.Add = make([]Subscription, n)
		for i := range s.Add {
			s.Add[i] = Subscription{Region: pdpb.RegionID(d.Uvarint()), Have: d.Uvarint()}
		}
	}
	if n := d.Len(1); n > 0 {
		s.Remove = make([]pdpb.RegionID, n)
		for i := range s.Remove {
			s.Remove[i] = pdpb.RegionID(d.Uvarint())
		}
	}
	s.Close = d.Bool()
	return s, d.Done()
}

// AppendReports appends the encoding of a batch of reports.
func AppendReports(b []byte, rs []pdpb.Report) []byte {
	b = append(b, wireVersion)
	b = binary.AppendUvarint(b, uint64(len(rs)))
	for i := range rs {
		b = rs[i].Append(b)
	}
	return b
}

// DecodeReports decodes a batch of reports.
func DecodeReports(b []byte) ([]pdpb.Report, error) {
	d := pdpb.NewDec(b)
	d.Version(wireVersion)
	rs := make([]pdpb.Report, d.Len(pdpb.ReportBytesMin))
	for i := range rs {
		rs[i] = d.Report()
	}
	return rs, d.Done()
}

// AppendEvent appends the encoding of an event as a request.
func AppendEvent(b []byte, e *Event) []byte { return e.append(append(b, wireVersion)) }

// DecodeEvent decodes an event.
func DecodeEvent(b []byte) (Event, error) {
	d := pdpb.NewDec(b)
	d.Version(wireVersion)
	e := readEvent(d)
	return e, d.Done()
}

// AppendMarkRequest appends the encoding of a MethodMark request.
func AppendMarkRequest(b []byte, session uint64, cut pdpb.Cut) []byte {
	b = binary.AppendUvarint(append(b, wireVersion), session)
	return binary.AppendUvarint(b, uint64(cut))
}

// DecodeMarkRequest decodes a MethodMark request.
func DecodeMarkRequest(b []byte) (session uint64, cut pdpb.Cut, err error) {
	d := pdpb.NewDec(b)
	d.Version(wireVersion)
	session, cut = d.Uvarint(), pdpb.Cut(d.Uvarint())
	return session, cut, d.Done()
}

// AppendForward wraps a request for MethodForward. Its reply is the reply to the inner method.
func AppendForward(b []byte, m Method, payload []byte) []byte {
	return append(append(b, wireVersion, byte(m)), payload...)
}

// DecodeForward unwraps a request; only requests to the leader are forwarded.
func DecodeForward(b []byte) (m Method, payload []byte, err error) {
	d := pdpb.NewDec(b)
	d.Version(wireVersion)
	if m = Method(d.Byte()); d.Err() == nil && m != MethodReports && m != MethodReadPoint && m != MethodPropose {
		d.Fail("forward of %v", m)
	}
	return m, d.Rest(), d.Err()
}

// Reply is the answer to any method: an error or what was asked for, and what the member knows
// of pd's leadership, so that every answer also teaches whom to ask next.
type Reply struct {
	Role      Role
	Err       error // one of the errors of this package
	ReadPoint pdpb.ReadPoint
	Result    EventResult
	Directory *Directory
}

// replyCode numbers the errors on the wire.
var replyCodes = []error{nil, nil, ErrNoLeader, ErrTimeout, ErrUnknown, ErrOverloaded, ErrClosed, ErrInvalid}

const codeNotLeader = 1

// AppendReply appends the encoding of the answer to a method.
func AppendReply(b []byte, m Method, r *Reply) []byte {
	b = append(b, wireVersion)
	b = appendRole(b, r.Role)
	code := replyCode(r.Err)
	b = append(b, code)
	if code != 0 {
		return b
	}
	switch m {
	case MethodReadPoint:
		b = r.ReadPoint.Append(b)
	case MethodPropose:
		b = append(b, byte(r.Result.Outcome))
		b = r.Result.Mark.Append(b)
		b = binary.AppendUvarint(b, r.Result.FirstID)
		b = binary.AppendUvarint(b, uint64(r.Result.Rev))
		b = r.Result.Hash.Append(b)
	case MethodDirectory:
		b = r.Directory.append(b)
	}
	return b
}

func replyCode(err error) byte {
	var nl *NotLeaderError
	if errors.As(err, &nl) {
		return codeNotLeader
	}
	for i, e := range replyCodes {
		if i != codeNotLeader && errors.Is(err, e) {
			return byte(i)
		}
	}
	return byte(len(replyCodes) - 1)
}

// DecodeReply decodes the answer to a method.
func DecodeReply(m Method, b []byte) (*Reply, error) {
	d := pdpb.NewDec(b)
	r := &Reply{}
	d.Version(wireVersion)
	r.Role = readRole(d)
	code := d.Byte()
	switch {
	case d.Err() != nil:
	case code == codeNotLeader:
		r.Err = &NotLeaderError{Leader: r.Role.Leader, Term: r.Role.Term}
	case int(code) >= len(replyCodes):
		d.Fail("reply code %d", code)
	case code != 0:
		r.Err = replyCodes[code]
	case m == MethodReadPoint:
		r.ReadPoint = d.ReadPoint()
	case m == MethodPropose:
		r.Result = EventResult{Outcome: Outcome(d.Byte()), Mark: d.Mark(), FirstID: d.Uvarint(), Rev: mvcc.Revision(d.Uvarint()), Hash: d.CompactHash()}
	case m == MethodDirectory:
		r.Directory = readDirectory(d)
	}
	return r, d.Done()
}

func appendRole(b []byte, r Role) []byte {
	b = binary.AppendUvarint(b, r.Term)
	b = binary.AppendUvarint(b, uint64(r.Leader))
	return pdpb.AppendBool(b, r.Leading)
}

func readRole(d *pdpb.Dec) Role {
	return Role{Term: d.Uvarint(), Leader: raftid.StoreID(d.Uvarint()), Leading: d.Bool()}
}
