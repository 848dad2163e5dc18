package regionpb

import (
	"bytes"
	"errors"
	"math"
	"reflect"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"braid/mvcc"
	"braid/pd/pdpb"
)

var testDescriptor = pdpb.Descriptor{ID: 9, Span: mvcc.Span{Start: []byte("a"), End: []byte("n")}, Epoch: 4, Incarnation: 2,
	StartIndex: 10, StartTerm: 5, Peers: []pdpb.Peer{{Replica: 1, Store: 1 << 60}, {Replica: 2, Store: 7}}}

var testRecords = []RecordEffect{{Key: LeaseKey(-77), Value: []byte("x")}, {Key: RegisteredKey([]byte("a"), 5)}}

// testPrepares has one part that writes and one that is only read.
var testPrepares = []Prepared{
	{Attempt: 1 << 41, Participants: []RegionID{2, 9},
		Locks: []LockSpan{{Span: mvcc.Span{Start: []byte("k"), End: []byte("k\x00")}, Exclusive: true}, {Span: mvcc.Span{Start: []byte("m")}}, {Lease: -9, Exclusive: true}},
		Effects: []Effect{{Key: []byte("k"), Value: []byte("v"), Version: 3, CreateKind: CreateKnown, Create: 1 << 33, Lease: -5},
			{Key: []byte("l"), Delete: true, Detach: 5}},
		Subs: []int64{0, 70000}, Records: testRecords},
	{Attempt: 3, Participants: []RegionID{9}, Locks: []LockSpan{{Span: mvcc.Span{Start: []byte("k"), End: []byte{}}}}},
}

var testEntry = Entry{Term: 7, Index: 300, Fence: 2,
	Seals: []pdpb.Item{
		{Region: 9, Incarnation: 2, N: 41, Cut: 900, Upto: 280, UptoTerm: 7, Cum: 1 << 40, Count: 3, Base: 77, Fence: 1,
			Decisions: []pdpb.Decision{{Attempt: 6}, {Attempt: 1 << 45, Commit: true, Rev: 81}}},
		{Region: 9, Incarnation: 2, N: 42, Cut: 901, Upto: 290, UptoTerm: 7, Cum: 1<<40 + 2, Count: 2, Base: 90, Fence: 2},
	},
	Commands: []Command{
		{Effects: []Effect{
			{Key: []byte("k"), Value: bytes.Repeat([]byte("v"), 200), Version: 3, CreateKind: CreateKnown, Create: 1 << 33, Lease: -5},
			{Key: []byte("gone"), Delete: true},
			{Key: []byte("new"), Version: 1, CreateKind: CreateNew},
		}},
		{},
		{Effects: []Effect{{Key: []byte("k"), Value: []byte("w"), Version: 4, CreateKind: CreateResolve, Lease: math.MaxInt64}}},
	}}

func TestEntryRoundTrip(t *testing.T) {
	for _, e := range []*Entry{&testEntry, {Term: 1, Index: 1}, {Term: 1, Index: 2, Seals: testEntry.Seals[1:]},
		{Term: 1, Index: 3, Prepares: testPrepares}, {Term: 1, Index: 4, Commands: []Command{{}, {Records: testRecords},
			{Effects: []Effect{{Key: []byte("k"), Version: 1, CreateKind: CreateNew, Lease: 4, Detach: -4}}, Records: testRecords[:1]}}}, {Term: 1, Index: 3, Seals: testEntry.Seals, Commands: testEntry.Commands, Prepares: testPrepares}} {
		data := e.Encode()
		if len(data) != e.Size() {
			t.Errorf("Size is %d, the encoding has %d bytes", e.Size(), len(data))
		}
		var got Entry
		got.Commands = make([]Command, 9) // a reused one, with other content
		if err := DecodeEntry(data, &got); err != nil {
			t.Fatal(err)
		}
		if again := got.Encode(); !bytes.Equal(again, data) {
			t.Errorf("%+v came back as %+v", e, got)
		}
		s, err := Peek(data)
		if err != nil || s.Term != e.Term || s.Index != e.Index || s.Fence != e.Fence || s.Count != e.Count() ||
			s.Silent() != e.Silent() || !reflect.DeepEqual(s.Seals, e.Seals) || s.Resolves != e.resolves() {
			t.Errorf("summary of %+v: %+v, %v", e, s, err)
		}
		for i := range e.Prepares {
			p, f := &e.Prepares[i], pdpb.Fact{Attempt: e.Prepares[i].Attempt, Participants: e.Prepares[i].Participants, Writes: len(e.Prepares[i].Effects) > 0}
			if !reflect.DeepEqual(s.Prepares[i], f) {
				t.Errorf("prepare %+v is summarised as %v", p, &s.Prepares[i])
			}
		}
		for n := range data {
			if err := DecodeEntry(data[:n], &got); !errors.Is(err, ErrCorrupt) {
				t.Errorf("cut to %d of %d bytes: %v", n, len(data), err)
			}
		}
	}
	if n := testing.AllocsPerRun(100, func() { testEntry.Encode() }); n != 1 {
		t.Errorf("encoding allocates %v times", n)
	}
	e := testEntry
	e.Seals = nil
	data := e.Encode()
	var got Entry
	if n := testing.AllocsPerRun(100, func() { must(DecodeEntry(data, &got)) }); n != 0 {
		t.Errorf("decoding into a used entry allocates %v times", n)
	}
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func TestMetaEntry(t *testing.T) {
	data := EncodeMeta([]byte("cut"))
	s, err := Peek(data)
	if err != nil || !s.Meta || s.Silent() {
		t.Fatalf("%+v %v", s, err)
	}
	if p, ok := DecodeMeta(data); !ok || string(p) != "cut" {
		t.Fatalf("%q %v", p, ok)
	}
	if _, ok := DecodeMeta(testEntry.Encode()); ok {
		t.Fatal("an entry was taken for a meta command")
	}
}

func TestPositionRoundTrip(t *testing.T) {
	p := Position{Index: 1, Term: 2, Item: 3, Upto: 4, UptoTerm: 5, Cut: 6, Revision: 7, Cum: 8, Fence: 9, Sealed: 10,
		ConfIndex: 11, ConfState: []byte{1}, Floor: -1, Descriptor: testDescriptor, Meta: []byte("m")}
	data := p.Append(nil)
	got, err := DecodePosition(data)
	if err != nil || !reflect.DeepEqual(got, p) {
		t.Fatalf("%+v came back as %+v, %v", p, got, err)
	}
	p.Prepared = []Prepared{testPrepares[1], testPrepares[0]}
	got, err = DecodePosition(p.Append(nil))
	if err != nil || !reflect.DeepEqual(got, p) {
		t.Fatalf("%+v came back as %+v, %v", p, got, err)
	}
	p.Prepared = nil
	p.Descriptor.Span.End, p.Meta, p.ConfState, p.Descriptor.Peers = nil, nil, nil, nil
	got, err = DecodePosition(p.Append(nil))
	if err != nil || !reflect.DeepEqual(got, p) {
		t.Fatalf("%+v came back as %+v, %v", p, got, err)
	}
	data[0] = 9
	if _, err := DecodePosition(data); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("an unknown version: %v", err)
	}
}

func TestRPCRoundTrip(t *testing.T) {
	w := &WriteRequest{Region: 9, Epoch: 3, Cut: 12, Txn: &pb.TxnRequest{Success: []*pb.RequestOp{
		{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("k"), Value: []byte("v")}}}}}}
	data, err := AppendWriteRequest(nil, w)
	must(err)
	gw, err := DecodeWriteRequest(data)
	if err != nil || gw.Region != w.Region || gw.Epoch != w.Epoch || gw.Cut != w.Cut || !proto.Equal(gw.Txn, w.Txn) {
		t.Fatalf("%+v, %v", gw, err)
	}

	branch := &WriteRequest{Region: 9, Txn: &pb.TxnRequest{Compare: []*pb.Compare{{Key: []byte("k")}}, Success: w.Txn.Success}}
	data, err = AppendWriteRequest(nil, branch)
	must(err)
	if gw, err := DecodeWriteRequest(data); err != nil || !proto.Equal(gw.Txn, branch.Txn) {
		t.Fatalf("%+v, %v", gw, err)
	}

	w.Tokens = []LeaseToken{{Lease: -5, Grant: LockID{Term: 3, Seq: 9}}}
	data, err = AppendWriteRequest(nil, w)
	must(err)
	if gw, err := DecodeWriteRequest(data); err != nil || !reflect.DeepEqual(gw.Tokens, w.Tokens) || !proto.Equal(gw.Txn, w.Txn) {
		t.Fatalf("%+v, %v", gw, err)
	}
	lw := &WriteRequest{Region: 9, Tokens: w.Tokens, Lease: &LeaseCommand{Op: LeaseRegister, ID: -3, Grant: 1 << 63, TTL: 60, Remaining: 5, Span: testDescriptor.Span, Term: 8, More: []LeaseLeft{{7, 5, 0}, {-8, 1<<64 - 1, 1 << 40}}}}
	data, err = AppendWriteRequest(nil, lw)
	must(err)
	if gw, err := DecodeWriteRequest(data); err != nil || !reflect.DeepEqual(gw, lw) {
		t.Fatalf("%+v, %v", gw, err)
	}
	l := &LeaseRecord{Grant: 1 << 63, TTL: 60, Remaining: 7, Spans: []mvcc.Span{testDescriptor.Span, {Start: []byte("z")}}}
	if got, err := DecodeLeaseRecord(l.Append(nil)); err != nil || !reflect.DeepEqual(got, l) {
		t.Fatalf("%+v, %v", got, err)
	}

	head := func(rev int64) *pb.ResponseHeader { return &pb.ResponseHeader{Revision: rev} }
	put := func(p *pb.PutResponse) *pb.TxnResponse {
		return &pb.TxnResponse{Header: head(7), Succeeded: true, Responses: []*pb.ResponseOp{{Response: &pb.ResponseOp_ResponsePut{ResponsePut: p}}}}
	}
	for _, resp := range []*pb.TxnResponse{
		{Header: head(5), Succeeded: true},
		put(&pb.PutResponse{Header: head(7)}),
		put(&pb.PutResponse{Header: head(6)}),
		put(&pb.PutResponse{}),
		put(&pb.PutResponse{Header: head(7), PrevKv: &mvccpb.KeyValue{Key: []byte("k")}}),
	} {
		data, err = AppendWriteResponse(nil, resp, nil)
		must(err)
		if got, err := DecodeWriteResponse(data); err != nil || !proto.Equal(got, resp) {
			t.Fatalf("%v came back as %v, %v", resp, got, err)
		}
	}
	data, err = AppendWriteResponse(nil, nil, NotRegistered(w.Tokens[0]))
	must(err)
	var nr *Error
	if _, err := DecodeWriteResponse(data); !errors.As(err, &nr) || nr.Token != w.Tokens[0] {
		t.Fatalf("%v", err)
	}
	d := testDescriptor
	want := &Error{Code: EpochMismatch, Leader: 1 << 63, Descriptor: &d}
	data, err = AppendWriteResponse(nil, nil, want)
	must(err)
	var got *Error
	if _, err := DecodeWriteResponse(data); !errors.As(err, &got) || !reflect.DeepEqual(got, want) {
		t.Fatalf("%v came back as %v", want, err)
	}

	r := &ReadRequest{Region: 9, Epoch: 3, Cut: 12, Rev: 44, Span: mvcc.Span{Start: []byte("a"), End: []byte{}}, Limit: 3,
		KeysOnly: true, WantCount: true, MinMod: 4, MaxCreate: 9, MaxBytes: 100}
	keys := &ReadRequest{Region: 9, Span: mvcc.Span{Start: []byte("a"), End: []byte("d")}, Keys: [][]byte{[]byte("a"), []byte("bb")}}
	for _, r := range []*ReadRequest{r, keys} {
		gr, err := DecodeReadRequest(AppendReadRequest(nil, r))
		if err != nil || !reflect.DeepEqual(gr, r) {
			t.Fatalf("%+v came back as %+v, %v", r, gr, err)
		}
	}

	for _, r := range []*ReadRequest{{Region: 9, Cut: 4, Lease: -8, Leases: true, NoValues: true}, {Region: 9, Leases: true, Of: []int64{7, -1, 1 << 40}}} {
		if gr, err := DecodeReadRequest(AppendReadRequest(nil, r)); err != nil || !reflect.DeepEqual(gr, r) {
			t.Fatalf("%+v came back as %+v, %v", r, gr, err)
		}
	}

	rr := &ReadResponse{Count: 7, More: true, Resume: []byte("m"), Rev: 44, Now: 50, LimitHit: true, KVs: []*mvccpb.KeyValue{
		{Key: []byte("a"), Value: []byte("1"), CreateRevision: 4, ModRevision: 9, Version: 3, Lease: -7}, {Key: []byte("b")}}}
	data = AppendReadResponse(make([]byte, 0, ReadResponseSize(rr)), rr, nil)
	if len(data) > ReadResponseSize(rr) {
		t.Errorf("%d bytes, the bound is %d", len(data), ReadResponseSize(rr))
	}
	grr, err := DecodeReadResponse(data)
	if err != nil || grr.Count != 7 || !grr.More || string(grr.Resume) != "m" || grr.Rev != 44 || grr.Now != 50 || !grr.LimitHit || len(grr.KVs) != 2 {
		t.Fatalf("%+v, %v", grr, err)
	}
	for i := range rr.KVs {
		if !proto.Equal(grr.KVs[i], rr.KVs[i]) {
			t.Errorf("%v came back as %v", rr.KVs[i], grr.KVs[i])
		}
	}
	if _, err := DecodeReadResponse(AppendReadResponse(nil, nil, ErrorOf(Compacted))); !errors.Is(err, ErrorOf(Compacted)) {
		t.Fatalf("%v", err)
	}
}

func TestTxnRPCRoundTrip(t *testing.T) {
	x := &testPrepares[0]
	l := &LockRequest{Region: 9, Epoch: 3, Attempt: x.Attempt, Age: 77, Locks: x.Locks, Term: 12, Now: true}
	if got, err := DecodeLockRequest(AppendLockRequest(nil, l)); err != nil || !reflect.DeepEqual(got, l) {
		t.Errorf("%+v came back as %+v, %v", l, got, err)
	}
	id := LockID{Term: 7, Seq: 1 << 50}
	for _, g := range []*LockGrant{{ID: id}, {ID: id, Whole: true}, {ID: id, Whole: true,
		Records:  []Lease{{ID: -3, Record: &LeaseRecord{Grant: 8, TTL: 9, Spans: []mvcc.Span{{Start: []byte("b")}}}}, {ID: 4, Record: &LeaseRecord{}}},
		Attached: []Attachment{{Lease: -3, Key: []byte("k")}, {Lease: 4, Key: []byte("l")}}}} {
		if got, err := DecodeLockResponse(AppendLockResponse(nil, g, nil)); err != nil || !reflect.DeepEqual(&got, g) {
			t.Errorf("%+v came back as %+v, %v", g, got, err)
		}
	}
	if _, err := DecodeLockResponse(AppendLockResponse(nil, nil, ErrorOf(NotLeader))); !errors.Is(err, ErrorOf(NotLeader)) {
		t.Errorf("%v", err)
	}
	p := &PrepareRequest{Region: 9, Attempt: x.Attempt, Lock: id, Participants: x.Participants, Effects: x.Effects, Subs: x.Subs, Records: x.Records}
	if got, err := DecodePrepareRequest(AppendPrepareRequest(nil, p)); err != nil || !reflect.DeepEqual(got, p) {
		t.Errorf("%+v came back as %+v, %v", p, got, err)
	}
	if rev, err := DecodePrepareResponse(AppendPrepareResponse(nil, 99, nil)); err != nil || rev != 99 {
		t.Errorf("%d %v", rev, err)
	}
	for _, code := range []Code{Aborted, LockLost, Unknown} {
		if _, err := DecodePrepareResponse(AppendPrepareResponse(nil, 0, ErrorOf(code))); !errors.Is(err, ErrorOf(code)) {
			t.Errorf("%v", err)
		}
	}
	r := &ReleaseRequest{Region: 9, Attempt: 4}
	if got, err := DecodeReleaseRequest(AppendReleaseRequest(nil, r)); err != nil || *got != *r {
		t.Errorf("%+v came back as %+v, %v", r, got, err)
	}
}

// FuzzDecode: no input makes a decoder panic or ask for much memory, and what is accepted says
// the same when it is written again.
func FuzzDecode(f *testing.F) {
	f.Add(testEntry.Encode())
	f.Add((&Entry{Prepares: testPrepares}).Encode())
	f.Add(AppendPrepareRequest(nil, &PrepareRequest{Participants: testPrepares[0].Participants, Effects: testPrepares[0].Effects, Subs: testPrepares[0].Subs}))
	f.Add(AppendLockRequest(nil, &LockRequest{Locks: testPrepares[0].Locks}))
	f.Add(EncodeMeta([]byte("x")))
	p := Position{Descriptor: testDescriptor}
	f.Add(p.Append(nil))
	f.Add(AppendReadRequest(nil, &ReadRequest{Limit: 4, MinMod: 3}))
	f.Add(AppendReadRequest(nil, &ReadRequest{Keys: [][]byte{[]byte("k")}}))
	f.Add(AppendReadResponse(nil, &ReadResponse{KVs: []*mvccpb.KeyValue{{Key: []byte("k")}}}, nil))
	f.Add(AppendReadResponse(nil, nil, &Error{Code: EpochMismatch, Descriptor: &testDescriptor}))
	f.Fuzz(func(t *testing.T, data []byte) {
		var e, e2 Entry
		if DecodeEntry(data, &e) == nil {
			again := e.Encode()
			if len(again) != e.Size() {
				t.Fatalf("size %d, length %d", e.Size(), len(again))
			}
			must(DecodeEntry(again, &e2))
			if !bytes.Equal(e2.Encode(), again) {
				t.Fatalf("%+v is not stable", e)
			}
			if _, err := Peek(again); err != nil {
				t.Fatal(err)
			}
		}
		if p, err := DecodePosition(data); err == nil {
			q, err := DecodePosition(p.Append(nil))
			if err != nil || !reflect.DeepEqual(p, q) {
				t.Fatalf("%+v, %+v, %v", p, q, err)
			}
		}
		if r, err := DecodeReadRequest(data); err == nil {
			q, err := DecodeReadRequest(AppendReadRequest(nil, r))
			if err != nil || !reflect.DeepEqual(r, q) {
				t.Fatalf("%+v, %+v, %v", r, q, err)
			}
		}
		if r, err := DecodeReadResponse(data); err == nil {
			if _, err := DecodeReadResponse(AppendReadResponse(nil, r, nil)); err != nil {
				t.Fatal(err)
			}
		}
		_, _ = DecodeLockRequest(data)
		_, _ = DecodePrepareRequest(data)
		_, _ = DecodeReleaseRequest(data)
		_, _ = DecodeLockResponse(data)
		_, _ = DecodePrepareResponse(data)
		_, _ = DecodeWriteRequest(data)
		_, _ = DecodeWriteResponse(data)
	})
}
