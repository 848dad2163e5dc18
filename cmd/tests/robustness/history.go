package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// Op is one call as its client saw it.
type Op struct {
	ID     int // unique in a history; every value put starts with it
	Client int // a client has one call at a time
	// Call and Return are nanoseconds since the history's start, by the monotonic clock.
	Call, Return time.Duration
	Req          proto.Message
	Resp         proto.Message // nil when Err is set
	Err          string        // what the client was told; a write's outcome is then unknown
}

// OK says whether the call was acknowledged.
func (o *Op) OK() bool { return o.Err == "" }

// Revision is the header's, 0 for a call without an answer.
func (o *Op) Revision() int64 {
	if h, ok := o.Resp.(interface{ GetHeader() *pb.ResponseHeader }); ok && o.OK() {
		return h.GetHeader().GetRevision()
	}
	return 0
}

// Wrote says whether the answer tells that a key was changed.
func (o *Op) Wrote() bool {
	switch r := o.Resp.(type) {
	case *pb.PutResponse:
		return true
	case *pb.DeleteRangeResponse:
		return r.Deleted > 0
	case *pb.TxnResponse:
		for _, op := range r.Responses {
			if op.GetResponsePut() != nil || op.GetResponseDeleteRange().GetDeleted() > 0 {
				return true
			}
		}
	}
	return false
}

// IsWrite says whether the request may change keys.
func (o *Op) IsWrite() bool {
	switch r := o.Req.(type) {
	case *pb.PutRequest, *pb.DeleteRangeRequest:
		return true
	case *pb.TxnRequest:
		for _, ops := range [][]*pb.RequestOp{r.Success, r.Failure} {
			for _, op := range ops {
				if op.GetRequestRange() == nil {
					return true
				}
			}
		}
	}
	return false
}

// Regions is how many of the traffic's regions a write touches.
func (o *Op) Regions() int {
	touched := map[byte]bool{}
	switch r := o.Req.(type) {
	case *pb.PutRequest:
		touched[r.Key[0]] = true
	case *pb.DeleteRangeRequest:
		for _, key := range keysIn(r) {
			touched[key[0]] = true
		}
	case *pb.TxnRequest:
		for _, op := range r.Success {
			for _, key := range [...][]byte{op.GetRequestPut().GetKey(), op.GetRequestDeleteRange().GetKey()} {
				if len(key) > 0 {
					touched[key[0]] = true
				}
			}
		}
	}
	return len(touched)
}

// Serializable says whether the call was a read that may be behind.
func (o *Op) Serializable() bool {
	r, ok := o.Req.(*pb.RangeRequest)
	return ok && r.Serializable
}

func (o *Op) String() string {
	answer := o.Err
	if o.OK() {
		answer = fmt.Sprint(o.Resp)
	}
	return fmt.Sprintf("op %d of client %d [%s, %s] %v -> %s", o.ID, o.Client, o.Call, o.Return, o.Req, answer)
}

// History is all that a round has seen: the calls, and the store's own past read afterwards.
type History struct {
	Seed uint64
	Ops  []*Op
	// States[r] is the whole store at revision r, for every r from 1 to the last one, keys in
	// order: read through Range at each revision, before compactions removed it. States[0] is nil.
	States [][]*mvccpb.KeyValue
}

// Last is the store's revision at the end of the round.
func (h *History) Last() int64 { return int64(len(h.States)) - 1 }

// opLine and stateLine are the lines of a history file.
type opLine struct {
	ID     int             `json:"id"`
	Client int             `json:"client"`
	Call   time.Duration   `json:"call"`
	Return time.Duration   `json:"return"`
	Type   string          `json:"type"`
	Req    json.RawMessage `json:"req"`
	Resp   json.RawMessage `json:"resp,omitempty"`
	Err    string          `json:"err,omitempty"`
}

type stateLine struct {
	Revision int64           `json:"revision"`
	State    json.RawMessage `json:"state"`
}

// kinds maps a request's type to empty messages of it and of its answer.
var kinds = map[string]func() (req, resp proto.Message){
	"range":   func() (proto.Message, proto.Message) { return new(pb.RangeRequest), new(pb.RangeResponse) },
	"put":     func() (proto.Message, proto.Message) { return new(pb.PutRequest), new(pb.PutResponse) },
	"delete":  func() (proto.Message, proto.Message) { return new(pb.DeleteRangeRequest), new(pb.DeleteRangeResponse) },
	"txn":     func() (proto.Message, proto.Message) { return new(pb.TxnRequest), new(pb.TxnResponse) },
	"compact": func() (proto.Message, proto.Message) { return new(pb.CompactionRequest), new(pb.CompactionResponse) },
}

func kindOf(req proto.Message) string {
	switch req.(type) {
	case *pb.RangeRequest:
		return "range"
	case *pb.PutRequest:
		return "put"
	case *pb.DeleteRangeRequest:
		return "delete"
	case *pb.TxnRequest:
		return "txn"
	case *pb.CompactionRequest:
		return "compact"
	}
	panic(fmt.Sprintf("no kind for %T", req))
}

// Save writes the history as JSON lines: calls first, then states.
func (h *History) Save(path string) (err error) {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := file.Close(); err == nil {
			err = cerr
		}
	}()
	out := bufio.NewWriter(file)
	enc := json.NewEncoder(out)
	for _, op := range h.Ops {
		line := opLine{ID: op.ID, Client: op.Client, Call: op.Call, Return: op.Return, Type: kindOf(op.Req), Err: op.Err}
		if line.Req, err = protojson.Marshal(op.Req); err != nil {
			return err
		}
		if op.Resp != nil {
			if line.Resp, err = protojson.Marshal(op.Resp); err != nil {
				return err
			}
		}
		if err := enc.Encode(line); err != nil {
			return err
		}
	}
	for rev := 1; rev < len(h.States); rev++ {
		state, err := protojson.Marshal(&pb.RangeResponse{Kvs: h.States[rev]})
		if err != nil {
			return err
		}
		if err := enc.Encode(stateLine{int64(rev), state}); err != nil {
			return err
		}
	}
	return out.Flush()
}

// LoadHistory reads what Save wrote.
func LoadHistory(path string) (*History, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	h := &History{States: make([][]*mvccpb.KeyValue, 1)}
	dec := json.NewDecoder(bufio.NewReader(file))
	for {
		var line struct {
			opLine
			stateLine
		}
		if err := dec.Decode(&line); err == io.EOF {
			return h, nil
		} else if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if line.State != nil {
			state := &pb.RangeResponse{}
			if err := protojson.Unmarshal(line.State, state); err != nil {
				return nil, err
			}
			h.States = append(h.States, state.Kvs)
			continue
		}
		newKind := kinds[line.Type]
		if newKind == nil {
			return nil, fmt.Errorf("%s: unknown type %q", path, line.Type)
		}
		op := &Op{ID: line.ID, Client: line.Client, Call: line.Call, Return: line.Return, Err: line.Err}
		req, resp := newKind()
		if err := protojson.Unmarshal(line.Req, req); err != nil {
			return nil, err
		}
		op.Req = req
		if line.Resp != nil {
			if err := protojson.Unmarshal(line.Resp, resp); err != nil {
				return nil, err
			}
			op.Resp = resp
		}
		h.Ops = append(h.Ops, op)
	}
}
