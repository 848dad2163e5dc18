package main

import (
	"bytes"
	"fmt"
	"math/rand/v2"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// splitKeys divides the generator's key space into the seven regions of the store of many.
var splitKeys = []string{"b", "d", "f", "h", "j", "l"}

// Limits the stores run with, etcd's defaults.
const (
	maxRequestBytes = 1572864
	grpcOverhead    = 512 << 10
	maxTxnOps       = 128
)

// generator draws requests from a seed. It is a pure function of the seed: nothing it draws depends
// on an answer (see Request on symbols).
type generator struct {
	rng *rand.Rand
	// home is the letter that the current request's keys mostly start with: a write should stay
	// in one region most of the time.
	home byte
	// focus is how much of the key choice home gets, percent.
	focus int
}

func newGenerator(seed uint64) *generator {
	return &generator{rng: rand.New(rand.NewPCG(seed, 0x6272616964))}
}

const letters = "abcdefghijklz"

func (g *generator) chance(percent int) bool { return g.rng.IntN(100) < percent }

func pick[T any](g *generator, from ...T) T { return from[g.rng.IntN(len(from))] }

// next draws a request.
func (g *generator) next() Request {
	g.home = letters[g.rng.IntN(len(letters))]
	g.focus = pick(g, 100, 100, 100, 100, 97, 60)
	if g.chance(12) {
		return g.leaseRequest()
	}
	switch n := g.rng.IntN(1000); {
	case n < 240:
		return Request{"Range", g.rangeRequest()}
	case n < 320:
		return Request{"RangeStream", g.rangeStreamRequest()}
	case n < 560:
		return Request{"Put", g.putRequest()}
	case n < 650:
		return Request{"DeleteRange", g.deleteRequest()}
	case n < 930:
		return Request{"Txn", g.txnRequest(0, 4)}
	case n < 950:
		return Request{"Compact", &pb.CompactionRequest{Revision: g.compactRevision(), Physical: g.chance(40)}}
	case n < 985:
		return Request{"HashKV", &pb.HashKVRequest{Revision: g.revision(40)}}
	case n < 993:
		return Request{"Status", &pb.StatusRequest{}}
	default:
		return Request{"MemberList", &pb.MemberListRequest{Linearizable: g.chance(50)}}
	}
}

func (g *generator) key() []byte {
	letter := g.home
	if !g.chance(g.focus) {
		letter = letters[g.rng.IntN(len(letters))]
	}
	switch g.rng.IntN(40) {
	case 0:
		return nil
	case 1:
		return pick(g, []byte("\x00"), []byte("\x00\x00"), []byte("\xff"), []byte("\xff\xff"), []byte("\xff\x00"))
	case 2:
		return []byte{letter, 0}
	case 3:
		return []byte{letter, 0xff}
	case 4:
		return append([]byte{letter}, bytes.Repeat([]byte("long"), pick(g, 64, 1024))...)
	case 5, 6, 7, 8:
		return []byte{letter}
	}
	return []byte(fmt.Sprintf("%c%d", letter, g.rng.IntN(5)))
}

// rangeEnd draws an end for key, all special forms included.
func (g *generator) rangeEnd(key []byte) []byte {
	switch g.rng.IntN(12) {
	case 0:
		return []byte{0}
	case 1:
		return append(bytes.Clone(key), 0)
	case 2:
		return bytes.Clone(key)
	case 3, 4, 5:
		return []byte{g.home + 1}
	case 6:
		if len(key) > 0 {
			end := bytes.Clone(key)
			end[len(end)-1]++
			return end
		}
		return []byte{0xff}
	case 7:
		return []byte{g.home, 0xff, 0xff}
	case 8:
		return []byte{0xff}
	}
	return g.key()
}

// revision draws a revision to read at; latest is the percentage of plain zeros.
func (g *generator) revision(latest int) int64 {
	if g.chance(latest) {
		return 0
	}
	switch g.rng.IntN(14) {
	case 0:
		return symCurrent
	case 1:
		return symCurrent + 1 + int64(g.rng.IntN(3))
	case 2:
		return pick(g, int64(1)<<40, -1<<40, -1, -5)
	case 3:
		return symCompact
	case 4:
		return symCompact - 1 - int64(g.rng.IntN(3))
	case 5:
		return symCompact + 1 + int64(g.rng.IntN(3))
	case 6:
		return int64(g.rng.IntN(4))
	}
	return symCurrent - int64(g.rng.IntN(30))
}

func (g *generator) compactRevision() int64 {
	switch g.rng.IntN(12) {
	case 0:
		return 0
	case 1:
		return -1 - int64(g.rng.IntN(3))
	case 2:
		return symCurrent + 1 + int64(g.rng.IntN(3))
	case 3:
		return symCompact - int64(g.rng.IntN(2))
	case 4:
		return symCompact + 1
	case 5:
		return symCurrent
	}
	return symCurrent - int64(g.rng.IntN(40))
}

func (g *generator) rangeRequest() *pb.RangeRequest {
	r := &pb.RangeRequest{Key: g.key()}
	if g.chance(75) {
		r.RangeEnd = g.rangeEnd(r.Key)
	}
	if g.chance(15) { // everything
		r.Key, r.RangeEnd = []byte{0}, []byte{0}
	}
	if g.chance(45) {
		r.Limit = pick[int64](g, 1, 2, 3, 5, 10, 100, 0, -1, 1<<40)
	}
	r.Revision = g.revision(60)
	if g.chance(35) {
		r.SortOrder = pick(g, pb.RangeRequest_NONE, pb.RangeRequest_ASCEND, pb.RangeRequest_DESCEND)
		r.SortTarget = pick(g, pb.RangeRequest_KEY, pb.RangeRequest_VERSION, pb.RangeRequest_CREATE, pb.RangeRequest_MOD, pb.RangeRequest_VALUE)
	}
	if g.chance(3) {
		r.SortOrder = pick[pb.RangeRequest_SortOrder](g, 3, -1, 99)
	}
	if g.chance(3) {
		r.SortTarget = pick[pb.RangeRequest_SortTarget](g, 5, -1, 99)
	}
	r.Serializable = g.chance(30)
	r.KeysOnly = g.chance(20)
	r.CountOnly = g.chance(15)
	if g.chance(20) {
		filters := []*int64{&r.MinModRevision, &r.MaxModRevision, &r.MinCreateRevision, &r.MaxCreateRevision}
		for range 1 + g.rng.IntN(2) {
			*filters[g.rng.IntN(len(filters))] = g.revision(10)
		}
	}
	return r
}

// rangeStreamRequest is a Range most of whose fields RangeStream accepts. A negative revision is
// left out: etcd reads it as latest but does not pin it, so chunks may disagree.
func (g *generator) rangeStreamRequest() *pb.RangeRequest {
	r := g.rangeRequest()
	if g.chance(85) {
		r.SortOrder, r.SortTarget = pb.RangeRequest_NONE, pb.RangeRequest_KEY
		r.MinModRevision, r.MaxModRevision, r.MinCreateRevision, r.MaxCreateRevision = 0, 0, 0, 0
	}
	return r
}

func (g *generator) value() []byte {
	switch n := g.rng.IntN(1500); {
	case n == 0:
		// Around both size limits, but not closer than the envelope that the store adds.
		return bytes.Repeat([]byte{'v'}, pick(g,
			maxRequestBytes-4096, maxRequestBytes+512,
			maxRequestBytes+grpcOverhead-64, maxRequestBytes+grpcOverhead+64))
	case n < 20:
		return bytes.Repeat([]byte{byte('a' + g.rng.IntN(26))}, 1+g.rng.IntN(20_000))
	case n < 150:
		return nil
	}
	return []byte(fmt.Sprint("v", g.rng.IntN(40)))
}

func (g *generator) putRequest() *pb.PutRequest {
	p := &pb.PutRequest{Key: g.key(), Value: g.value(), PrevKv: g.chance(35)}
	if g.chance(6) {
		p.IgnoreValue = true
		if g.chance(80) {
			p.Value = nil
		}
	}
	if g.chance(5) {
		p.IgnoreLease = true
	}
	if g.chance(25) {
		p.Lease = g.leaseID(3)
	}
	return p
}

func (g *generator) deleteRequest() *pb.DeleteRangeRequest {
	d := &pb.DeleteRangeRequest{Key: g.key(), PrevKv: g.chance(50)}
	if g.chance(45) {
		d.RangeEnd = g.rangeEnd(d.Key)
	}
	return d
}

func (g *generator) compare() *pb.Compare {
	c := &pb.Compare{
		Key:    g.key(),
		Target: pick(g, pb.Compare_VERSION, pb.Compare_CREATE, pb.Compare_MOD, pb.Compare_VALUE, pb.Compare_LEASE),
		Result: pick(g, pb.Compare_EQUAL, pb.Compare_EQUAL, pb.Compare_EQUAL, pb.Compare_GREATER, pb.Compare_LESS, pb.Compare_NOT_EQUAL),
	}
	off := pick[int64](g, 0, 0, 0, 0, 1, -1)
	union := c.Target
	if g.chance(5) { // a union that does not fit the target
		union = pick(g, pb.Compare_VERSION, pb.Compare_CREATE, pb.Compare_MOD, pb.Compare_VALUE, pb.Compare_LEASE)
	}
	zero := g.chance(25)
	number := func(sym int64) int64 {
		if zero {
			return 0
		}
		return sym + off
	}
	switch union {
	case pb.Compare_VERSION:
		c.TargetUnion = &pb.Compare_Version{Version: number(symVersion)}
	case pb.Compare_CREATE:
		c.TargetUnion = &pb.Compare_CreateRevision{CreateRevision: number(symCreate)}
	case pb.Compare_MOD:
		c.TargetUnion = &pb.Compare_ModRevision{ModRevision: number(symMod)}
	case pb.Compare_VALUE:
		value := g.value()
		if len(value) > 1000 || g.chance(60) {
			value = symValue
		}
		c.TargetUnion = &pb.Compare_Value{Value: value}
	case pb.Compare_LEASE:
		c.TargetUnion = &pb.Compare_Lease{Lease: pick(g, 0, 0, g.leaseID(20))}
	}
	if g.chance(3) {
		c.TargetUnion = nil
	}
	if g.chance(2) {
		c.Result = pick[pb.Compare_CompareResult](g, 4, -1, 77)
	}
	if g.chance(1) {
		c.Target = pick[pb.Compare_CompareTarget](g, 5, -1, 77)
	}
	if g.chance(20) {
		c.RangeEnd = g.rangeEnd(c.Key)
	}
	return c
}

// txnRequest draws a transaction; opsMax bounds each list and shrinks with depth.
func (g *generator) txnRequest(depth, opsMax int) *pb.TxnRequest {
	if depth == 0 && g.chance(1) {
		return g.wideTxn()
	}
	t := &pb.TxnRequest{}
	for range pick(g, 0, 1, 1, 1, 2, 3) {
		t.Compare = append(t.Compare, g.compare())
	}
	readOnly := g.chance(20)
	ops := func() []*pb.RequestOp {
		var list []*pb.RequestOp
		for range g.rng.IntN(opsMax + 1) {
			list = append(list, g.op(depth, readOnly))
		}
		return list
	}
	t.Success, t.Failure = ops(), ops()
	return t
}

func (g *generator) op(depth int, readOnly bool) *pb.RequestOp {
	n := g.rng.IntN(100)
	switch {
	case n == 0 && g.chance(30):
		return &pb.RequestOp{} // no operation at all: refused
	case n < 15 && depth < 2 && !readOnly:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: g.txnRequest(depth+1, 2)}}
	case readOnly || n < 45:
		r := g.rangeRequest()
		if g.chance(70) {
			r.Revision = 0
		}
		if g.chance(80) { // read-only transactions are rarely cut short by a bad option
			r.SortOrder, r.SortTarget = pb.RangeRequest_NONE, pb.RangeRequest_KEY
		}
		return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: r}}
	case n < 80:
		p := g.putRequest()
		if len(p.Value) > 1<<20 {
			p.Value = p.Value[:100]
		}
		return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: p}}
	}
	return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: g.deleteRequest()}}
}

// wideTxn is at the limit of operations, or one over it, in one list or another.
func (g *generator) wideTxn() *pb.TxnRequest {
	t := &pb.TxnRequest{}
	n := maxTxnOps + pick(g, -1, 0, 0, 1)
	puts := func() (ops []*pb.RequestOp) {
		for i := range n {
			key := []byte(fmt.Sprintf("%cw%03d", g.home, i))
			ops = append(ops, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: key, Value: []byte{'w'}}}})
		}
		return ops
	}
	switch g.rng.IntN(4) {
	case 0:
		t.Success = puts()
	case 1:
		t.Failure = puts()
	case 2:
		for range n {
			t.Compare = append(t.Compare, &pb.Compare{Key: []byte{g.home}, Target: pb.Compare_VERSION, Result: pb.Compare_GREATER, TargetUnion: &pb.Compare_Version{Version: -1}})
		}
	case 3: // the allowance shrinks by what the parent has used
		inner := &pb.TxnRequest{Success: puts()[:n-2]}
		t.Success = []*pb.RequestOp{
			{Request: &pb.RequestOp_RequestTxn{RequestTxn: inner}},
			{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte{g.home}}}},
		}
	}
	return t
}
