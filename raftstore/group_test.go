package raftstore

import (
	"context"
	"fmt"
	"sort"
	"strings"
	"testing"
	"testing/cryptotest"

	"github.com/cockroachdb/datadriven"
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"braid/raftstore/raftid"
)

// env runs replicas of one group in one goroutine: every message, flush and tick is a command of
// the script.
type env struct {
	t     *testing.T
	out   strings.Builder
	nodes map[uint64]*envNode
	net   []envMessage
	cut   map[uint64]bool
	trace bool
	sent  int
}

type envMessage struct {
	from, to uint64
	m        *raftpb.Message
	c        *Control
}

type envNode struct {
	e       *env
	id      uint64
	cfg     GroupConfig
	disk    *MemDisk
	toy     *toy
	g       *Group
	in      Input
	out     Output
	install *Staged
}

func TestGroupScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/group", func(t *testing.T, path string) {
		cryptotest.SetGlobalRandom(t, 1) // raft's election jitter
		e := &env{t: t, nodes: make(map[uint64]*envNode), cut: make(map[uint64]bool)}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			e.out.Reset()
			e.run(d)
			return e.out.String()
		})
	})
}

// storeOfReplica puts each replica on the store of the same number.
func storeOfReplica(r raftid.ReplicaID) (raftid.StoreID, bool) { return raftid.StoreID(r), true }

func (e *env) printf(format string, args ...any) { fmt.Fprintf(&e.out, format+"\n", args...) }

func (e *env) run(d *datadriven.TestData) {
	arg := func(name string) (v uint64) {
		if d.HasArg(name) {
			d.ScanArgs(e.t, name, &v)
		}
		return v
	}
	id := uint64(0)
	if len(d.CmdArgs) > 0 && len(d.CmdArgs[0].Vals) == 0 {
		fmt.Sscan(d.CmdArgs[0].Key, &id)
	}
	n := e.nodes[id]
	if n != nil && n.g == nil && d.Cmd != "new" && d.Cmd != "restart" && d.Cmd != "lose-state" && d.Cmd != "cut" && d.Cmd != "heal" {
		e.t.Fatalf("%s: replica %d is down", d.Pos, id)
	}
	switch d.Cmd {
	case "new":
		n = &envNode{e: e, id: id, disk: NewMemDisk()}
		e.nodes[id] = n
		var voters []uint64
		for _, v := range strings.Split(d.CmdArgs[1].Vals[0], " ") {
			var x uint64
			fmt.Sscan(v, &x)
			voters = append(voters, x)
		}
		if len(d.CmdArgs[1].Vals) > 1 {
			voters = nil
			for _, v := range d.CmdArgs[1].Vals {
				var x uint64
				fmt.Sscan(v, &x)
				voters = append(voters, x)
			}
		}
		n.toy = &toy{conf: &raftpb.ConfState{Voters: voters}, checkpoints: d.HasArg("checkpoints")}
		n.toy.durable.Index, n.toy.durable.Term = arg("applied"), arg("term")
		n.cfg = GroupConfig{
			ID: 7, Replica: raftid.ReplicaID(id), Uninitialized: d.HasArg("uninit"), KeepEntries: -1, KeepForFollowers: -1,
			QuiesceTicks: -1, LazyCommit: d.HasArg("lazy"), Peers: storeOfReplica, Mutants: &Mutants{NoUninitialisedVoters: d.HasArg("no-uninit-voters"), Forward: d.HasArg("forward"), EarlyAcknowledge: d.HasArg("early")},
		}
		if d.HasArg("keep") {
			n.cfg.KeepEntries = int(arg("keep"))
		}
		if d.HasArg("hold") {
			n.cfg.KeepForFollowers = int(arg("hold"))
		}
		if d.HasArg("quiesce") {
			n.cfg.QuiesceTicks = int(arg("quiesce"))
		}
		n.start()
	case "campaign":
		n.in.Campaign = true
		n.turn()
	case "tick":
		for range max(arg("n"), 1) {
			n.in.Ticks = 1
			if d.HasArg("hold") { // for the next turn, whatever brings it
				continue
			}
			n.turn()
			if d.HasArg("settle") {
				e.settle()
			}
		}
	case "tick-all": // one round at a time, everything delivered in between
		before := e.sent
		for range max(arg("n"), 1) {
			for _, id := range e.ids() {
				if x := e.nodes[id]; x.g != nil && !x.g.Asleep() {
					x.in.Ticks = 1
					x.turn()
				}
			}
			e.settle()
		}
		e.printf("messages: %v", e.sent > before)
	case "propose":
		n.toy.queue = append(n.toy.queue, strings.Fields(d.Input)...)
		n.in.Work = true
		n.turn()
	case "queue": // proposed in the next turn, whatever brings it
		n.toy.queue = append(n.toy.queue, strings.Fields(d.Input)...)
	case "read":
		n.toy.reads = append(n.toy.reads, strings.TrimSpace(d.Input))
		n.in.Work = true
		n.turn()
	case "work":
		n.in.Work = true
		n.turn()
	case "transfer":
		n.in.Transfer = raftid.ReplicaID(arg("to"))
		n.turn()
	case "down": // a store of the same number as its replica
		n.in.Down = append(n.in.Down, raftid.StoreID(arg("store")))
		if !d.HasArg("hold") { // else for the next turn, whatever brings it
			n.turn()
		}
	case "wake":
		n.in.Wake = true
		n.turn()
	case "busy":
		n.toy.busy = !n.toy.busy
		n.in.Work = true
		n.turn()
	case "deliver": // what is on the way now, without flushing
		e.deliver()
	case "flush":
		k := -1
		if d.HasArg("n") {
			k = int(arg("n"))
		}
		n.disk.Flush(k)
		n.turn()
	case "settle":
		e.settle()
	case "drop":
		kept := e.net[:0]
		for _, m := range e.net {
			if !(d.HasArg("to") && m.to == arg("to")) && !(d.HasArg("from") && m.from == arg("from")) && (d.HasArg("to") || d.HasArg("from")) {
				kept = append(kept, m)
			}
		}
		e.net = kept
	case "cut":
		e.cut[id] = true
	case "heal":
		delete(e.cut, id)
	case "persist":
		n.toy.persist(n.g.ConfState())
	case "truncate":
		n.toy.truncate = arg("to")
		n.in.Work = true
		n.turn()
	case "checkpoint":
		n.toy.checkpoint = true
		n.in.Work = true
		n.turn()
	case "crash":
		n.g, n.install = nil, nil
		n.disk = n.disk.Crash()
	case "lose-state":
		n.toy.durable.Index, n.toy.durable.Term, n.toy.durableState = 0, 0, nil
		n.cfg.Uninitialized = true
	case "restart":
		n.start()
	case "installed":
		if n.install == nil {
			e.printf("nothing to install")
			return
		}
		n.finishInstall()
		n.turn()
	case "trace":
		e.trace = !e.trace
	case "status":
		for _, id := range e.ids() {
			if x := e.nodes[id]; x.g != nil {
				e.printf("%d: %s: %s", id, x.g.Status(), strings.Join(x.toy.state, " "))
			}
		}
	default:
		e.t.Fatalf("%s: unknown command %s", d.Pos, d.Cmd)
	}
}

func (e *env) ids() []uint64 {
	var ids []uint64
	for id := range e.nodes {
		ids = append(ids, id)
	}
	sort.Slice(ids, func(i, j int) bool { return ids[i] < ids[j] })
	return ids
}

func (n *envNode) start() {
	old := n.toy
	log := n.disk.Log(7)
	n.toy = &toy{conf: old.conf, durable: old.durable, durableState: old.durableState, checkpoints: old.checkpoints, busy: old.busy}
	n.toy.applied, n.toy.state = n.toy.durable, append([]string(nil), n.toy.durableState...)
	n.toy.note = func(format string, args ...any) { n.e.printf("%d "+format, append([]any{n.id}, args...)...) }
	cfg := n.cfg
	cfg.Log, cfg.Machine = log, n.toy
	cfg.ConfState, cfg.Applied, cfg.AppliedTerm = n.toy.conf, n.toy.durable.Index, n.toy.durable.Term
	if cp := log.Checkpoint(); cp != nil && n.toy.checkpoints {
		n.toy.applied, n.toy.state = cp.Position, strings.Fields(string(cp.Data))
		cfg.ConfState, cfg.Applied, cfg.AppliedTerm = nil, cp.Index, cp.Term
	}
	in := &n.in
	n.in, n.out, n.install = Input{}, Output{}, nil
	cfg.Durable = func(token uint64) { in.Durable = token }
	g, err := NewGroup(cfg)
	if err != nil {
		n.e.printf("%d refused: %v", n.id, err)
		return
	}
	n.g = g
	n.turn()
}

func (n *envNode) turn() {
	in := n.in
	n.in = Input{}
	n.out.Reset()
	n.g.Process(&in, &n.out)
	n.in.Work = n.out.Again
	for _, m := range n.out.Messages {
		n.e.send(n.id, m.GetTo(), m, nil)
	}
	for _, c := range n.out.Controls {
		n.e.send(n.id, uint64(c.To), nil, &c)
	}
	for _, s := range n.out.Snapshots {
		n.e.snapshot(n, s)
	}
	for _, s := range n.out.Discard {
		if err := s.Close(); err != nil {
			n.e.t.Fatal(err)
		}
		n.e.printf("%d closes a sink", n.id)
	}
	if f := n.out.Detached; f != nil {
		f()
		n.in.Detached = true
	}
	if n.out.Install != nil {
		n.install = n.out.Install
		n.e.printf("%d installs a snapshot at %d", n.id, n.install.Message.GetSnapshot().GetMetadata().GetIndex())
	}
}

func (n *envNode) finishInstall() {
	err := n.install.Sink.Install()
	n.in.Installed = &Installed{Sink: n.install.Sink, Err: err}
	n.cfg.Uninitialized = false
	n.install = nil
}

func (e *env) send(from, to uint64, m *raftpb.Message, c *Control) {
	if e.cut[from] || e.cut[to] || e.nodes[to] == nil {
		return
	}
	e.sent++
	if e.trace {
		if m != nil {
			e.printf("%s", raft.DescribeMessage(m, func(b []byte) string { return string(b) }))
		} else {
			e.printf("%s", c)
		}
	}
	if c != nil && !e.trace {
		e.printf("%s", c)
	}
	e.net = append(e.net, envMessage{from: from, to: to, m: m, c: c})
}

// snapshot moves a snapshot to its receiver at once, or fails.
func (e *env) snapshot(from *envNode, s OutgoingSnapshot) {
	to := s.Message.GetTo()
	x := e.nodes[to]
	md := s.Message.GetSnapshot().GetMetadata()
	ok := x != nil && x.g != nil && !e.cut[to] && !e.cut[from.id] && x.g.Status().WantsSnapshot(md.GetIndex()) && x.in.Staged == nil
	e.printf("%d sends a snapshot at %d to %d: %v", from.id, md.GetIndex(), to, ok)
	if ok {
		sink, err := x.toy.Receive(SnapshotMeta{Index: md.GetIndex(), Term: md.GetTerm(), ConfState: md.GetConfState()})
		if err == nil {
			err = s.Source.WriteTo(context.Background(), sink)
		}
		if err != nil {
			e.t.Fatal(err)
		}
		x.in.Staged = &Staged{Message: s.Message, Sink: sink}
	}
	from.in.Sent = append(from.in.Sent, SnapshotSent{To: raftid.ReplicaID(to), OK: ok})
}

func (e *env) deliver() {
	net := e.net
	e.net = nil
	for _, m := range net {
		x := e.nodes[m.to]
		if x.g == nil {
			continue
		}
		if m.m != nil {
			x.in.Messages = append(x.in.Messages, m.m)
		} else {
			x.in.Controls = append(x.in.Controls, *m.c)
		}
	}
	for _, id := range e.ids() {
		if x := e.nodes[id]; x.g != nil {
			x.turn()
		}
	}
}

// settle flushes, installs and delivers until nothing moves.
func (e *env) settle() {
	for range 1000 {
		busy := len(e.net) > 0
		for _, id := range e.ids() {
			x := e.nodes[id]
			if x.g == nil {
				continue
			}
			busy = busy || x.disk.Pending() > 0 || x.install != nil || x.in.Staged != nil || len(x.in.Sent) > 0 || x.in.Durable > 0 || x.in.Work || x.in.Installed != nil
			x.disk.Flush(-1)
			if x.install != nil {
				x.finishInstall()
			}
		}
		if !busy {
			return
		}
		e.deliver()
	}
	e.printf("does not settle")
}
