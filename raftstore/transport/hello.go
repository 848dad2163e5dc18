package transport

import (
	"encoding/binary"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"braid/raftstore/raftid"
)

// protocolVersion is what both ends of a stream must speak.
const protocolVersion = 1

// hello opens every stream in both directions: version byte, then four numbers of eight bytes,
// big endian.
type hello struct {
	cluster     uint64
	from, to    raftid.StoreID
	incarnation uint64 // of the sender's process
}

const helloBytes = 1 + 4*8

func (h hello) encode() []byte {
	b := make([]byte, 0, helloBytes)
	b = append(b, protocolVersion)
	for _, v := range [...]uint64{h.cluster, uint64(h.from), uint64(h.to), h.incarnation} {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	return b
}

func decodeHello(b []byte) (hello, error) {
	if len(b) == 0 || b[0] != protocolVersion {
		return hello{}, status.Errorf(codes.FailedPrecondition, "the nodes speak different peer protocols (this one version %d): run the same release on both", protocolVersion)
	}
	if len(b) != helloBytes {
		return hello{}, status.Error(codes.InvalidArgument, "malformed handshake")
	}
	v := func(i int) uint64 { return binary.BigEndian.Uint64(b[1+8*i:]) }
	return hello{cluster: v(0), from: raftid.StoreID(v(1)), to: raftid.StoreID(v(2)), incarnation: v(3)}, nil
}

// greet is the acceptor's half of the handshake: it checks who calls.
func (t *Transport) greet(b []byte) (*peer, error) {
	h, err := decodeHello(b)
	if err != nil {
		return nil, err
	}
	switch {
	case h.cluster != t.cfg.ClusterID:
		return nil, status.Errorf(codes.FailedPrecondition, "cluster ID mismatch: the caller belongs to cluster %x, this node to %x", h.cluster, t.cfg.ClusterID)
	case h.to != t.cfg.Self:
		return nil, status.Errorf(codes.FailedPrecondition, "store ID mismatch: the caller looks for store %s at this address, this is %s", h.to, t.cfg.Self)
	}
	p := t.peers[h.from]
	if p == nil {
		return nil, status.Errorf(codes.FailedPrecondition, "store %s is not a member of this cluster", h.from)
	}
	p.met(h.incarnation)
	return p, nil
}

// checkReply is the dialer's half: is this the store it looked for?
func (p *peer) checkReply(b []byte) error {
	h, err := decodeHello(b)
	if err != nil {
		return err
	}
	if h.cluster != p.t.cfg.ClusterID || h.from != p.id {
		return fmt.Errorf("transport: store %s of cluster %x answered in place of store %s", h.from, h.cluster, p.id)
	}
	return nil
}

func (t *Transport) hello(to raftid.StoreID) []byte {
	return hello{cluster: t.cfg.ClusterID, from: t.cfg.Self, to: to, incarnation: t.incarnation}.encode()
}
