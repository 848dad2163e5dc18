package sim

import (
	"errors"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"braid/pd/order"
	"braid/raftstore"
	"braid/raftstore/raftid"
	"braid/region"
)

type packetKind int

const (
	raftPacket packetKind = iota
	controlPacket
	snapshotPacket
	framePacket
	callPacket
	replyPacket
)

// packet is a message on its way.
type packet struct {
	kind     packetKind
	from, to int
	group    raftid.GroupID
	msg      *raftpb.Message
	control  raftstore.Control
	data     []byte
	method   order.Method
	id       uint64
	life     uint64 // of the store that waits for the answer
	due      int    // the step in which it arrives
	failed   bool
}

// network is what is under way, and which links are cut.
type network struct {
	packets []*packet // in the order of sending
	order   [storesMax][storesMax]int
	blocked [storesMax][storesMax]bool // from, to
	holes   [storesMax]int             // frames to a store that will be lost
	raft    int                        // messages of raft so far
}

// netMax bounds what is under way; beyond it a random packet is lost.
const netMax = 600

// send puts a packet on its way. Links keep the order, but a packet that is late is overtaken.
func (w *World) send(p *packet) {
	if p.to < 0 || p.to >= len(w.stores) {
		w.fail("a message to nowhere: %+v", p)
		return
	}
	n := &w.net
	if p.kind == raftPacket {
		n.raft++
	}
	switch {
	case w.calm:
		p.due = w.stats.Steps
	case p.kind == framePacket && n.holes[p.to] > 0:
		n.holes[p.to]--
		w.lose(p)
		return
	case w.quiet:
		last := &n.order[p.from][p.to]
		*last = max(*last, w.stats.Steps+w.rng.IntN(4))
		p.due = *last
	case w.chance(w.aim.loss), p.kind == raftPacket && p.group != raftid.PDGroup && w.chance(w.aim.raftLoss):
		w.lose(p)
		return
	case w.chance(w.aim.late):
		p.due = w.stats.Steps + w.rng.IntN(80)
	default:
		last := &n.order[p.from][p.to]
		*last = max(*last, w.stats.Steps+w.rng.IntN(4))
		p.due = *last
	}
	if !w.calm && !w.quiet && p.kind != snapshotPacket && w.chance(40) {
		c := *p
		if p.msg != nil {
			c.msg = proto.Clone(p.msg).(*raftpb.Message)
		}
		c.due += w.rng.IntN(40)
		w.stats.Duplicated++
		n.packets = append(n.packets, &c)
	}
	if len(n.packets) >= netMax && !w.calm {
		i := w.rng.IntN(len(n.packets))
		w.lose(n.packets[i])
		n.packets[i] = p
		return
	}
	n.packets = append(n.packets, p)
}

// lose drops a packet. The sender of a snapshot always learns what became of it, as it does from
// a broken stream.
func (w *World) lose(p *packet) {
	w.stats.Lost++
	if p.kind == snapshotPacket {
		w.snapshotSent(p, false)
	}
}

func (w *World) snapshotSent(p *packet, ok bool) {
	s := w.stores[p.from]
	if g := s.groups[p.group]; s.up && s.life == p.life && g != nil {
		g.in.Sent = append(g.in.Sent, raftstore.SnapshotSent{To: raftid.ReplicaID(p.msg.GetTo()), OK: ok})
		g.ready = true
	}
}

// deliverDue delivers what has arrived by now. What that makes the stores send waits for the next
// call.
func (w *World) deliverDue() {
	n := &w.net
	var due []*packet
	kept := n.packets[:0]
	for _, p := range n.packets {
		if p.due <= w.stats.Steps {
			due = append(due, p)
		} else {
			kept = append(kept, p)
		}
	}
	clear(n.packets[len(kept):])
	n.packets = kept
	for _, p := range due {
		if n.blocked[p.from][p.to] {
			w.lose(p)
			continue
		}
		w.stats.Delivered++
		w.deliver(p)
	}
}

func (w *World) deliver(p *packet) {
	s := w.stores[p.to]
	if !s.up {
		w.lose(p)
		return
	}
	switch p.kind {
	case raftPacket, controlPacket, snapshotPacket:
		g := s.groups[p.group]
		if g == nil {
			if g = s.appear(p); g == nil {
				w.lose(p)
				return
			}
		}
		w.deliverToGroup(g, p)
	case framePacket:
		if err := s.client.HandleFrameBytes(storeID(p.from), p.data); err != nil {
			w.fail("store %d: frame: %v", p.to, err)
		}
	case callPacket:
		s.member.Serve(p.method, storeID(p.from), p.data, func(b []byte, err error) {
			w.send(&packet{kind: replyPacket, from: p.to, to: p.from, id: p.id, life: p.life, data: b, failed: err != nil})
		})
	case replyPacket:
		if done := s.calls[p.id]; done != nil && s.life == p.life {
			delete(s.calls, p.id)
			var err error
			if p.failed {
				err = errRemote
			}
			done(p.data, err)
		}
	}
}

var errRemote = errors.New("sim: the call failed")

// appear makes an uninitialised replica of a group that this store has not heard of: it votes and
// waits for a snapshot (B6).
func (s *store) appear(p *packet) *group {
	if p.group == raftid.PDGroup || p.kind != raftPacket {
		return nil
	}
	switch p.msg.GetType() {
	case raftpb.MsgVote, raftpb.MsgPreVote, raftpb.MsgApp, raftpb.MsgHeartbeat:
	default:
		return nil
	}
	d := s.w.boot.Regions[p.group-raftid.FirstRegion]
	if err := s.startRegion(region.InitialPosition(d, 1), true); err != nil {
		s.w.fail("store %d region %d: %v", s.i, p.group, err)
		return nil
	}
	s.w.event("s%d g%d appears uninitialised", s.i, p.group)
	return s.groups[p.group]
}

func (w *World) deliverToGroup(g *group, p *packet) {
	switch p.kind {
	case raftPacket:
		g.in.Messages = append(g.in.Messages, p.msg)
	case controlPacket:
		g.in.Controls = append(g.in.Controls, p.control)
	case snapshotPacket:
		w.stage(g, p)
		return
	}
	g.ready = true
}

// stage hands a whole snapshot to its group.
func (w *World) stage(g *group, p *packet) {
	md := p.msg.GetSnapshot().GetMetadata()
	if !g.g.Status().WantsSnapshot(md.GetIndex()) {
		g.in.Messages = append(g.in.Messages, raftstore.ProbeOf(p.msg))
		g.ready = true
		w.snapshotSent(p, false)
		return
	}
	if g.in.Staged != nil || g.install != nil {
		w.snapshotSent(p, false)
		return
	}
	meta := raftstore.SnapshotMeta{Index: md.GetIndex(), Term: md.GetTerm(), ConfState: md.GetConfState()}
	var machine raftstore.StateMachine = g.s.member
	if g.replica != nil {
		machine = g.replica
	}
	sink, err := machine.Receive(meta)
	if err == nil {
		_, err = sink.Write(p.data)
	}
	if err != nil {
		// As at a real store, a snapshot that does not fit is refused, for example one that is
		// behind what was applied meanwhile.
		w.event("s%d g%d refuses a snapshot: %v", g.s.i, g.id, err)
		w.snapshotSent(p, false)
		return
	}
	g.in.Staged = &raftstore.Staged{Message: p.msg, Sink: sink}
	g.ready = true
	w.snapshotSent(p, true)
}

// simNet is a store's way to the others, as pd's client and member see it.
type simNet struct{ s *store }

// Call implements order.Net.
func (n simNet) Call(to raftid.StoreID, m order.Method, payload []byte, done func([]byte, error)) {
	n.s.lastID++
	n.s.calls[n.s.lastID] = done
	n.s.w.send(&packet{kind: callPacket, from: n.s.i, to: int(to) - 1, method: m, id: n.s.lastID, data: payload, life: n.s.life})
}

// SendFrame implements pd.Sender.
func (n simNet) SendFrame(to raftid.StoreID, frame []byte) bool {
	n.s.w.send(&packet{kind: framePacket, from: n.s.i, to: int(to) - 1, data: frame})
	return true
}
