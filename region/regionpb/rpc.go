package regionpb

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

const rpcV1 = 1

// writeV2: V1 did not tell leases of one id apart.
const writeV2 = 2

// WriteRequest asks a region's leader for a transaction. Every write is one.
type WriteRequest struct {
	Region RegionID
	Epoch  uint64
	// Cut: the leader evaluates only when it is complete through it. The gateway sets it, from a
	// fresh read point, when a range inside the transaction names a revision (C-1); else 0.
	Cut pdpb.Cut
	// IfWrites: a transaction that would change nothing is refused with WritesNothing, and the sender reads
	// at a point: that needs no entry and no cut.
	IfWrites bool
	// Tokens are for leases that the region is to be registered for with this write.
	Tokens []LeaseToken
	// Lease is a command on a lease; then there is no Txn.
	Lease *LeaseCommand
	Txn   *pb.TxnRequest
}

const (
	writeTxn = iota
	writeTxnTokens
	writeLease
	writePut      // a transaction of one put and nothing else
	writeIfWrites // a transaction without tokens
)

// AppendWriteRequest appends the encoding of r to b.
func AppendWriteRequest(b []byte, r *WriteRequest) ([]byte, error) {
	b = append(b, writeV2)
	b = binary.AppendUvarint(b, uint64(r.Region))
	b = binary.AppendUvarint(b, r.Epoch)
	b = binary.AppendUvarint(b, uint64(r.Cut))
	switch {
	case r.Lease != nil:
		return appendTokens(appendLeaseCommand(append(b, writeLease), r.Lease), r.Tokens), nil
	case len(r.Tokens) > 0:
		b = appendTokens(append(b, writeTxnTokens), r.Tokens)
	case r.IfWrites:
		b = append(b, writeIfWrites)
	default:
		if put := lonePut(r.Txn); put != nil {
			return proto.MarshalOptions{}.MarshalAppend(append(b, writePut), put)
		}
		b = append(b, writeTxn)
	}
	return proto.MarshalOptions{}.MarshalAppend(b, r.Txn)
}

// DecodeWriteRequest reads what AppendWriteRequest wrote. The result does not alias data.
func DecodeWriteRequest(data []byte) (*WriteRequest, error) {
	d := decoder{b: data}
	d.version(writeV2, "write request")
	r := &WriteRequest{Region: RegionID(d.uvarint()), Epoch: d.uvarint(), Cut: pdpb.Cut(d.uvarint())}
	switch d.byte() {
	case writeTxn:
	case writeIfWrites:
		r.IfWrites = true
	case writeTxnTokens:
		r.Tokens = d.tokens()
	case writeLease:
		r.Lease = d.leaseCommand()
		r.Tokens = d.tokens()
		r.Lease.Span.Start, r.Lease.Span.End = bytes.Clone(r.Lease.Span.Start), bytes.Clone(r.Lease.Span.End)
		return r, d.done()
	case writePut:
		w := NewPut(&pb.PutRequest{})
		w.Region, w.Epoch, w.Cut = r.Region, r.Epoch, r.Cut
		if err := proto.Unmarshal(d.b, lonePut(w.Txn)); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		return w, d.err
	default:
		d.fail("write")
	}
	if d.err != nil {
		return nil, d.err
	}
	r.Txn = &pb.TxnRequest{}
	if err := proto.Unmarshal(d.b, r.Txn); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return r, nil
}

// AppendWriteResponse appends the answer to a write: resp, or err when it is not nil. An error
// that is no *Error travels as Stopped: only errors of a region cross the network here.
func AppendWriteResponse(b []byte, resp *pb.TxnResponse, err error) ([]byte, error) {
	b = append(b, rpcV1)
	if err != nil {
		return appendError(append(b, respFailed), err), nil
	}
	if isDonePut(resp) {
		return binary.AppendUvarint(append(b, respPut), uint64(resp.Header.Revision)), nil
	}
	return proto.MarshalOptions{}.MarshalAppend(append(b, respTxn), resp)
}

const (
	respTxn = iota
	respFailed
	respPut // as of NewPutResponse, with a revision
)

// DecodeWriteResponse reads what AppendWriteResponse wrote; an error of the region comes back as
// *Error, damage as ErrCorrupt.
func DecodeWriteResponse(data []byte) (*pb.TxnResponse, error) {
	d := decoder{b: data}
	d.version(rpcV1, "write response")
	switch d.byte() {
	case respTxn:
	case respFailed:
		return nil, d.error()
	case respPut:
		resp := donePut(int64(d.uvarint()))
		return resp, d.done()
	default:
		d.fail("write response")
	}
	if d.err != nil {
		return nil, d.err
	}
	resp := &pb.TxnResponse{}
	if err := proto.Unmarshal(d.b, resp); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return resp, nil
}

func appendError(b []byte, err error) []byte {
	var e *Error
	if !errors.As(err, &e) {
		e = &Error{Code: Stopped}
	}
	b = append(b, byte(e.Code))
	b = binary.AppendUvarint(b, uint64(e.Leader))
	if e.Code == LeaseNotRegistered {
		b = appendTokens(b, []LeaseToken{e.Token})
	}
	if e.Descriptor == nil {
		return append(b, 0)
	}
	return appendDescriptor(append(b, 1), e.Descriptor)
}

// error reads an Error, or says what is wrong with its bytes.
func (d *decoder) error() error {
	e := &Error{Code: Code(d.byte()), Leader: raftid.StoreID(d.uvarint())}
	if e.Code == 0 || int(e.Code) >= len(codeNames) {
		d.fail("error code")
	}
	if e.Code == LeaseNotRegistered {
		if tokens := d.tokens(); len(tokens) == 1 {
			e.Token = tokens[0]
		} else {
			d.fail("lease token")
		}
	}
	if d.bool() {
		x := d.descriptor()
		e.Descriptor = &x
	}
	if err := d.done(); err != nil {
		return err
	}
	return e
}

// readV2: V1 could not ask for several leases.
const readV2 = 2

const (
	readKeysOnly = 1 << iota
	readCountOnly
	readWantCount
	readFilters
	readKeys
	readLeases
	readAttached
	readNoValues
	readOf
)

// AppendReadRequest appends the encoding of r to b.
func AppendReadRequest(b []byte, r *ReadRequest) []byte {
	b = append(b, readV2)
	var flags uint64
	set := func(on bool, bit uint64) {
		if on {
			flags |= bit
		}
	}
	filters := r.MinMod != 0 || r.MaxMod != 0 || r.MinCreate != 0 || r.MaxCreate != 0
	set(r.KeysOnly, readKeysOnly)
	set(r.CountOnly, readCountOnly)
	set(r.WantCount, readWantCount)
	set(filters, readFilters)
	set(len(r.Keys) > 0, readKeys)
	set(r.NoValues, readNoValues)
	set(r.Leases, readLeases)
	set(r.Lease != 0, readAttached)
	set(len(r.Of) > 0, readOf)
	b = binary.AppendUvarint(b, flags)
	b = binary.AppendUvarint(b, uint64(r.Region))
	b = binary.AppendUvarint(b, r.Epoch)
	b = binary.AppendUvarint(b, uint64(r.Cut))
	b = binary.AppendUvarint(b, zig(int64(r.Rev)))
	b = appendSpan(b, r.Span)
	b = binary.AppendUvarint(b, zig(r.Limit))
	b = binary.AppendUvarint(b, zig(r.MaxBytes))
	if filters {
		for _, v := range [...]mvcc.Revision{r.MinMod, r.MaxMod, r.MinCreate, r.MaxCreate} {
			b = binary.AppendUvarint(b, zig(int64(v)))
		}
	}
	if len(r.Keys) > 0 {
		b = binary.AppendUvarint(b, uint64(len(r.Keys)))
		for _, k := range r.Keys {
			b = appendBytes(b, k)
		}
	}
	if r.Lease != 0 {
		b = binary.AppendUvarint(b, zig(r.Lease))
	}
	if len(r.Of) > 0 {
		b = binary.AppendUvarint(b, uint64(len(r.Of)))
		for _, id := range r.Of {
			b = binary.AppendUvarint(b, zig(id))
		}
	}
	return b
}

// DecodeReadRequest reads what AppendReadRequest wrote; its span and keys alias data.
func DecodeReadRequest(data []byte) (*ReadRequest, error) {
	d := decoder{b: data}
	d.version(readV2, "read request")
	flags := d.uvarint()
	r := &ReadRequest{
		KeysOnly: flags&readKeysOnly != 0, CountOnly: flags&readCountOnly != 0, WantCount: flags&readWantCount != 0,
		Region: RegionID(d.uvarint()), Epoch: d.uvarint(), Cut: pdpb.Cut(d.uvarint()), Rev: mvcc.Revision(d.varint()),
		Span: d.span(), Limit: d.varint(), MaxBytes: d.varint(),
	}
	if flags&readFilters != 0 {
		for _, v := range [...]*mvcc.Revision{&r.MinMod, &r.MaxMod, &r.MinCreate, &r.MaxCreate} {
			*v = mvcc.Revision(d.varint())
		}
	}
	if flags&readKeys != 0 {
		r.Keys = make([][]byte, d.count(1))
		for i := range r.Keys {
			r.Keys[i] = d.bytes()
		}
	}
	r.Leases, r.NoValues = flags&readLeases != 0, flags&readNoValues != 0
	if flags&readAttached != 0 {
		if r.Lease = d.varint(); r.Lease == 0 {
			d.fail("lease")
		}
	}
	if flags&readOf != 0 {
		r.Of = make([]int64, d.count(1))
		for i := range r.Of {
			r.Of[i] = d.varint()
		}
	}
	if err := d.done(); err != nil {
		return nil, err
	}
	return r, nil
}

const (
	respMore = 1 << iota
	respLimitHit
)

// ReadResponseSize bounds the encoding of r from above.
func ReadResponseSize(r *ReadResponse) int {
	n := 64 + len(r.Resume)
	for _, kv := range r.KVs {
		n += len(kv.Key) + len(kv.Value) + 50
	}
	return n
}

// AppendReadResponse appends the answer to a read: r, or err when it is not nil.
func AppendReadResponse(b []byte, r *ReadResponse, err error) []byte {
	b = append(b, rpcV1)
	if err != nil {
		return appendError(append(b, 1), err)
	}
	var flags byte
	if r.More {
		flags |= respMore
	}
	if r.LimitHit {
		flags |= respLimitHit
	}
	b = append(b, 0, flags)
	b = binary.AppendUvarint(b, uint64(r.Rev))
	b = binary.AppendUvarint(b, uint64(r.Now))
	b = binary.AppendUvarint(b, uint64(r.Count))
	b = appendBytes(b, r.Resume)
	b = binary.AppendUvarint(b, uint64(len(r.KVs)))
	for _, kv := range r.KVs {
		b = appendBytes(b, kv.Key)
		b = appendBytes(b, kv.Value)
		b = binary.AppendUvarint(b, uint64(kv.CreateRevision))
		b = binary.AppendUvarint(b, uint64(kv.ModRevision))
		b = binary.AppendUvarint(b, uint64(kv.Version))
		b = binary.AppendUvarint(b, zig(kv.Lease))
	}
	return b
}

// DecodeReadResponse reads what AppendReadResponse wrote; keys and values alias data. An error
// of the region comes back as *Error, damage as ErrCorrupt.
func DecodeReadResponse(data []byte) (*ReadResponse, error) {
	d := decoder{b: data}
	d.version(rpcV1, "read response")
	if failed := d.bool(); d.err != nil {
		return nil, d.err
	} else if failed {
		return nil, d.error()
	}
	flags := d.byte()
	r := &ReadResponse{
		More: flags&respMore != 0, LimitHit: flags&respLimitHit != 0,
		Rev: mvcc.Revision(d.uvarint()), Now: mvcc.Revision(d.uvarint()), Count: int64(d.uvarint()), Resume: d.bytes(),
	}
	if n := d.count(6); n > 0 {
		block := make([]mvccpb.KeyValue, n)
		r.KVs = make([]*mvccpb.KeyValue, n)
		for i := range block {
			kv := &block[i]
			kv.Key, kv.Value = d.bytes(), d.bytes()
			kv.CreateRevision, kv.ModRevision, kv.Version = int64(d.uvarint()), int64(d.uvarint()), int64(d.uvarint())
			kv.Lease = d.varint()
			r.KVs[i] = kv
		}
	}
	if err := d.done(); err != nil {
		return nil, err
	}
	return r, nil
}
