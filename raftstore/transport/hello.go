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
// big endian, a byte that is 1 for a store that has only just been made, and the terms.
type hello struct {
	cluster     uint64
	from, to    raftid.StoreID
	incarnation uint64 // of the sender's process
	fresh       bool
	terms       string
}

const (
	helloBytes    = 1 + 4*8 + 1 // without the terms
	termsBytesMax = 256
)

func (h hello) encode() []byte {
	b := make([]byte, 0, helloBytes+len(h.terms))
	b = append(b, protocolVersion)
	for _, v := range [...]uint64{h.cluster, uint64(h.from), uint64(h.to), h.incarnation} {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	fresh := byte(0)
	if h.fresh {
		fresh = 1
	}
	return append(append(b, fresh), h.terms...)
}

func decodeHello(b []byte) (hello, error) {
	if len(b) == 0 || b[0] != protocolVersion {
		return hello{}, status.Errorf(codes.FailedPrecondition, "the nodes speak different peer protocols (this one version %d): run the same release on both", protocolVersion)
	}
	if len(b) < helloBytes || len(b) > helloBytes+termsBytesMax || b[helloBytes-1] > 1 {
		return hello{}, status.Error(codes.InvalidArgument, "malformed handshake")
	}
	v := func(i int) uint64 { return binary.BigEndian.Uint64(b[1+8*i:]) }
	return hello{cluster: v(0), from: raftid.StoreID(v(1)), to: raftid.StoreID(v(2)), incarnation: v(3),
		fresh: b[helloBytes-1] == 1, terms: string(b[helloBytes:])}, nil
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
	if err := t.agree(&h); err != nil {
		return nil, err
	}
	p := t.peers[h.from]
	if p == nil {
		return nil, status.Errorf(codes.FailedPrecondition, "store %s is not a member of this cluster", h.from)
	}
	if h.fresh && t.cfg.Admit != nil {
		if err := t.cfg.Admit(h.from); err != nil {
			return nil, status.Error(codes.FailedPrecondition, err.Error())
		}
	}
	p.met(h.incarnation)
	return p, nil
}

// agree compares what all stores must have in common.
func (t *Transport) agree(h *hello) error {
	if h.terms == t.cfg.Terms {
		return nil
	}
	return status.Errorf(codes.FailedPrecondition, "store %s was started in %s, store %s in %s: all stores of a cluster must be started alike", h.from, h.terms, t.cfg.Self, t.cfg.Terms)
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
	if h.fresh && p.t.cfg.Admit != nil {
		// What it cannot understand must not reach it: raft's messages are about a log that it lost.
		if err := p.t.cfg.Admit(p.id); err != nil {
			return err
		}
	}
	return p.t.agree(&h)
}

func (t *Transport) hello(to raftid.StoreID) []byte {
	fresh := t.cfg.Fresh != nil && t.cfg.Fresh()
	return hello{cluster: t.cfg.ClusterID, from: t.cfg.Self, to: to, incarnation: t.incarnation, fresh: fresh, terms: t.cfg.Terms}.encode()
}
