package region

import (
	"go.etcd.io/raft/v3/raftpb"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/region/regionpb"
)

// proposal is an entry that was proposed here and whose clients wait (E6): keyed by index and
// term, because another term's entry may be applied at its index.
type proposal struct {
	index, term uint64
	cmds        []*command
	prepares    []deciding
	meta        *metaWrite
	bytes       int
}

// fail answers all clients with err.
func (p *proposal) fail(err *regionpb.Error) {
	for _, c := range p.cmds {
		c.reply(nil, err)
	}
	for _, d := range p.prepares {
		d.reply(0, err)
	}
	if p.meta != nil {
		p.meta.done(err)
	}
}

// inflight holds proposals in log order. It belongs to the group's owner.
type inflight struct {
	list  []*proposal
	bytes int
}

func (f *inflight) empty() bool { return len(f.list) == 0 }

func (f *inflight) push(p *proposal) {
	f.list = append(f.list, p)
	f.bytes += p.bytes
}

// take removes and returns the proposal at index, and those below it: another entry was applied
// in their place.
func (f *inflight) take(index uint64) (at *proposal, passed []*proposal) {
	passed = f.below(index)
	if len(f.list) > 0 && f.list[0].index == index {
		at = f.list[0]
		f.bytes -= at.bytes
		f.list[0] = nil
		f.list = f.list[1:]
	}
	return at, passed
}

// below removes and returns the proposals below index.
func (f *inflight) below(index uint64) []*proposal {
	n := 0
	for n < len(f.list) && f.list[n].index < index {
		n++
	}
	return f.remove(0, n)
}

// replaced removes and returns the proposals whose entries the log lost because e was put at its
// index.
func (f *inflight) replaced(e *raftpb.Entry) []*proposal {
	for i, p := range f.list {
		if p.index < e.GetIndex() {
			continue
		}
		if p.term == e.GetTerm() {
			return nil // the log got what was proposed here
		}
		return f.remove(i, len(f.list))
	}
	return nil
}

func (f *inflight) remove(i, j int) []*proposal {
	if i == j {
		return nil
	}
	out := append([]*proposal(nil), f.list[i:j]...)
	f.list = append(f.list[:i], f.list[j:]...)
	for _, p := range out {
		f.bytes -= p.bytes
	}
	return out
}

// drain removes everything.
func (f *inflight) drain() []*proposal { return f.remove(0, len(f.list)) }

// answer is a reply that waits for its batch to be visible.
type answer struct {
	cmd  *command
	meta *metaWrite
	resp *pb.TxnResponse
	err  *regionpb.Error
	// prepare is the reply of a prepare, with rev.
	prepare func(mvcc.Revision, error)
	rev     mvcc.Revision
}

func (a *answer) send() {
	switch {
	case a.prepare != nil && a.err != nil:
		a.prepare(0, a.err)
	case a.prepare != nil:
		a.prepare(a.rev, nil)
	case a.meta != nil && a.err != nil:
		a.meta.done(a.err)
	case a.meta != nil:
		a.meta.done(nil)
	case a.err != nil:
		a.cmd.reply(nil, a.err)
	default:
		a.cmd.reply(a.resp, nil)
	}
}

// settle numbers a command at its place in the order and makes its answer. before is the last
// revision given out before it.
func (c *command) settle(before mvcc.Revision) answer {
	if len(c.effects) > 0 {
		c.num.rev = before + 1
	}
	if c.fault != nil {
		return answer{cmd: c, err: c.fault}
	}
	return answer{cmd: c, resp: c.tmpl.fill(before)}
}
