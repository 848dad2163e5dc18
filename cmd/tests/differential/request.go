package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
)

// Request is one call: the method's name and its message. A message may hold symbolic numbers and
// values (below) that are replaced just before it is sent.
type Request struct {
	Method string
	Msg    proto.Message
}

// Symbolic numbers. A sequence stays meaningful while it is being shrunk only if "the revision
// before the current one" is written as such; so generated messages carry base+offset, and resolve
// turns that into the number of the moment. Real revisions of a run are far below these.
const (
	symCurrent int64 = 1 << 50 // the store's current revision
	symCompact int64 = 1 << 51 // the last compacted revision
	symMod     int64 = 1 << 52 // in a compare: the key's own mod revision; likewise below
	symCreate  int64 = 1 << 53
	symVersion int64 = 1 << 54
	symSpan    int64 = 1 << 20 // how far an offset may lie from its base
)

// symValue as a compare's value stands for the key's actual value.
var symValue = []byte("\x00the-actual-value")

// methods maps each method to an empty message of its request.
var methods = map[string]func() proto.Message{
	"Range":       func() proto.Message { return new(pb.RangeRequest) },
	"RangeStream": func() proto.Message { return new(pb.RangeRequest) },
	"Put":         func() proto.Message { return new(pb.PutRequest) },
	"DeleteRange": func() proto.Message { return new(pb.DeleteRangeRequest) },
	"Txn":         func() proto.Message { return new(pb.TxnRequest) },
	"Compact":     func() proto.Message { return new(pb.CompactionRequest) },
	"HashKV":      func() proto.Message { return new(pb.HashKVRequest) },
	"Status":      func() proto.Message { return new(pb.StatusRequest) },
	"MemberList":  func() proto.Message { return new(pb.MemberListRequest) },

	"LeaseGrant":      func() proto.Message { return new(pb.LeaseGrantRequest) },
	"LeaseRevoke":     func() proto.Message { return new(pb.LeaseRevokeRequest) },
	"LeaseKeepAlive":  func() proto.Message { return new(pb.LeaseKeepAliveRequest) },
	"LeaseTimeToLive": func() proto.Message { return new(pb.LeaseTimeToLiveRequest) },
	"LeaseLeases":     func() proto.Message { return new(pb.LeaseLeasesRequest) },
}

// Text is the request in one line, as replay files hold it and parseRequests reads it.
func (r Request) Text() string {
	return r.Method + " " + text(r.Msg)
}

// text prints a message in one line. prototext varies its spacing on purpose; that is undone
// outside quotes so that equal messages print equally.
func text(m proto.Message) string {
	if m == nil {
		return "<nil>"
	}
	raw, err := prototext.Marshal(m)
	if err != nil {
		return "unprintable: " + err.Error()
	}
	var out strings.Builder
	quoted, escaped, space := false, false, false
	for _, b := range raw {
		if !quoted && b == ' ' {
			if space {
				continue
			}
			space = true
		} else {
			space = false
		}
		switch {
		case escaped:
			escaped = false
		case b == '\\':
			escaped = true
		case b == '"':
			quoted = !quoted
		}
		out.WriteByte(b)
	}
	return out.String()
}

// parseRequests reads a replay file: a request a line, empty lines and # comments skipped.
func parseRequests(r io.Reader) ([]Request, error) {
	var requests []Request
	lines := bufio.NewScanner(r)
	const lineBytesMax = 64 << 20 // a value at the size limit, escaped
	lines.Buffer(nil, lineBytesMax)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		method, body, _ := strings.Cut(line, " ")
		newMsg := methods[method]
		if newMsg == nil {
			return nil, fmt.Errorf("unknown method %q in replay file", method)
		}
		msg := newMsg()
		if err := prototext.Unmarshal([]byte(body), msg); err != nil {
			return nil, fmt.Errorf("replay line %q: %w", line, err)
		}
		requests = append(requests, Request{method, msg})
	}
	return requests, lines.Err()
}

// world is what resolve needs to know; it is kept from the reference's answers alone, so the same
// seed gives the same requests whatever the other stores answer.
type world struct {
	current int64 // from the last header
	compact int64 // -1 as long as nothing was compacted
	// lookup reads a key's present state from the reference; nil when it does not exist.
	lookup func(key []byte) *pb.RangeResponse
}

// resolve returns the message to send: a copy without symbols.
func (w *world) resolve(r Request) Request {
	msg := proto.Clone(r.Msg)
	switch m := msg.(type) {
	case *pb.RangeRequest:
		w.resolveRange(m)
	case *pb.TxnRequest:
		w.resolveTxn(m)
	case *pb.CompactionRequest:
		m.Revision = w.number(m.Revision)
	case *pb.HashKVRequest:
		m.Revision = w.number(m.Revision)
	}
	return Request{r.Method, msg}
}

func (w *world) resolveRange(m *pb.RangeRequest) {
	if m == nil {
		return
	}
	for _, n := range []*int64{&m.Revision, &m.MinModRevision, &m.MaxModRevision, &m.MinCreateRevision, &m.MaxCreateRevision} {
		*n = w.number(*n)
	}
}

func (w *world) resolveTxn(m *pb.TxnRequest) {
	if m == nil {
		return
	}
	for _, c := range m.Compare {
		w.resolveCompare(c)
	}
	for _, ops := range [][]*pb.RequestOp{m.Success, m.Failure} {
		for _, op := range ops {
			w.resolveRange(op.GetRequestRange())
			w.resolveTxn(op.GetRequestTxn())
		}
	}
}

func (w *world) resolveCompare(c *pb.Compare) {
	near := func(n, base int64) bool { return n > base-symSpan && n < base+symSpan }
	actual := func(n int64) int64 {
		var mod, create, version int64
		if resp := w.lookup(c.Key); resp != nil && len(resp.Kvs) == 1 {
			mod, create, version = resp.Kvs[0].ModRevision, resp.Kvs[0].CreateRevision, resp.Kvs[0].Version
		}
		switch {
		case near(n, symMod):
			return mod + n - symMod
		case near(n, symCreate):
			return create + n - symCreate
		case near(n, symVersion):
			return version + n - symVersion
		}
		return n
	}
	switch u := c.TargetUnion.(type) {
	case *pb.Compare_Version:
		u.Version = actual(u.Version)
	case *pb.Compare_CreateRevision:
		u.CreateRevision = actual(u.CreateRevision)
	case *pb.Compare_ModRevision:
		u.ModRevision = actual(u.ModRevision)
	case *pb.Compare_Value:
		if bytes.Equal(u.Value, symValue) {
			u.Value = nil
			if resp := w.lookup(c.Key); resp != nil && len(resp.Kvs) == 1 {
				u.Value = resp.Kvs[0].Value
			}
		}
	}
}

// number resolves a revision.
func (w *world) number(n int64) int64 {
	switch {
	case n > symCurrent-symSpan && n < symCurrent+symSpan:
		return w.current + n - symCurrent
	case n > symCompact-symSpan && n < symCompact+symSpan:
		return w.compact + n - symCompact
	}
	return n
}
