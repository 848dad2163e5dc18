package region

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// TestScripts runs testdata: replicas are driven by hand, one line of input at a time, and print
// what they say. `go test ./region -run TestScripts -rewrite` writes the expectations.
//
// Commands; r=1 is the default replica:
//
//	new [limits=tiny|gather] [shared] [mut=name]   three replicas and an order, all new
//	lead r= term=        it leads; its opening entry is appended
//	follow r= term= leader=
//	write r= [drop] [gone] [tokens] [ifwrites]   one transaction per line, then one call of the group; with all
//	                     tokens that leaders gave out
//	append r= index= term= [header=index/term] [fence=] [silent] [seals=from-to]: an entry by another's hand; lines are puts
//	grant r= [as=1]      lease 5, its grant 1, to which "lease KEY [ID]" of write attaches; lease 9 has its record elsewhere
//	end r= [lease=] [term=] [of=]   of a grant, the command that ends a lease
//	left r= [ID=SECONDS ...] [of=]   the command that records what leases have left
//	lock r= [attempt=] [lease=] [shared]   the lock of an attempt that ends a lease, or that attaches
//	release r= [attempt=]
//	copy from= r= [through=]
//	commit r= index=     order [r=] [others=]    a cut of its report
//	fence                pd raises the fence
//	deliver r= [through=]   feed r=   (everything, and pd's mark)
//	tick r= n=           work r=      flush r=   crash r=   durable r=
//	read r= [cut=] [rev=] [key=] [end=] [lease=]    with lease, the keys that are attached to it
//	log r=   report r=   state r=   idle r=   floor r= rev=
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		s := &script{t: t}
		datadriven.RunTest(t, path, s.run)
	})
}

type script struct {
	t     *testing.T
	hosts map[int]*host
	o     *fakeOrder
	out   strings.Builder
	next  int
	// tokens are those that leaders gave out.
	tokens []regionpb.LeaseToken
	lock   regionpb.LockID // the last one that was granted
}

func (s *script) printf(format string, args ...any) { fmt.Fprintf(&s.out, format, args...) }

func arg(d *datadriven.TestData, key string, def uint64) uint64 {
	for _, a := range d.CmdArgs {
		if a.Key == key && len(a.Vals) > 0 {
			v, err := strconv.ParseUint(a.Vals[0], 10, 64)
			must(err)
			return v
		}
	}
	return def
}

func word(d *datadriven.TestData, key string) string {
	for _, a := range d.CmdArgs {
		if a.Key == key && len(a.Vals) > 0 {
			return a.Vals[0]
		}
	}
	return ""
}

func has(d *datadriven.TestData, key string) bool {
	for _, a := range d.CmdArgs {
		if a.Key == key {
			return true
		}
	}
	return false
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	s.out.Reset()
	if d.Cmd == "new" {
		s.make(d)
		return "ok\n"
	}
	id := int(arg(d, "r", 1))
	h := s.hosts[id]
	before := h.log.LastIndex()
	switch d.Cmd {
	case "lead":
		h.lead(arg(d, "term", 0))
	case "follow":
		h.follow(arg(d, "term", 0), raftidOf(arg(d, "leader", 0)))
	case "write":
		h.log.dropAll = has(d, "drop")
		done := make(chan struct{})
		if has(d, "gone") {
			close(done)
		}
		for _, line := range strings.Split(strings.TrimSpace(d.Input), "\n") {
			s.next++
			n := s.next
			txn, cut := parseTxn(line)
			var tokens []regionpb.LeaseToken
			if has(d, "tokens") {
				tokens = slices.Clone(s.tokens)
			}
			h.r.Write(&Write{Txn: txn, IfWrites: has(d, "ifwrites"), Tokens: tokens, Cut: pdpb.Cut(cut), Done: done, Reply: func(resp *pb.TxnResponse, err error) {
				var re *regionpb.Error
				if errors.As(err, &re) && re.Code == regionpb.LeaseNotRegistered {
					s.printf("  r%d #%d: token %d/%d for lease %d\n", id, n, re.Token.Grant.Term, re.Token.Grant.Seq, re.Token.Lease)
					s.tokens = append(s.tokens, re.Token)
				} else if err != nil {
					s.printf("  r%d #%d: %v\n", id, n, err)
				} else {
					s.printf("  r%d #%d: %s\n", id, n, answerLine(resp))
				}
			}})
		}
		h.work()
		h.log.dropAll = false
	case "grant":
		h.r.Write(&Write{Lease: &regionpb.LeaseCommand{Op: regionpb.LeaseGrant, ID: int64(arg(d, "lease", 5)), Grant: arg(d, "as", 1), TTL: 60}, Reply: func(_ *pb.TxnResponse, err error) {
			if err != nil {
				s.printf("  grant: %v\n", err)
			}
		}})
		h.work()
	case "register":
		cmd := &regionpb.LeaseCommand{Op: regionpb.LeaseRegister, ID: int64(arg(d, "lease", 5)), Span: mvcc.Span{Start: []byte(word(d, "key")), End: []byte(word(d, "end"))}}
		h.r.Write(&Write{Lease: cmd, Reply: func(*pb.TxnResponse, error) {}})
		h.work()
	case "end":
		ids := []int64{int64(arg(d, "lease", 5))}
		if more := word(d, "leases"); more != "" {
			ids = idList(more)
		}
		var list []regionpb.LeaseLeft
		for _, id := range ids {
			list = append(list, regionpb.LeaseLeft{ID: id, Grant: arg(d, "of", 0)})
		}
		h.r.Write(&Write{Lease: regionpb.ManyLeases(regionpb.LeaseRevoke, list, arg(d, "term", 0)), Reply: func(resp *pb.TxnResponse, err error) {
			name := strings.Trim(fmt.Sprint(ids), "[]")
			if err != nil {
				s.printf("  end of %s: %v\n", name, err)
			} else {
				s.printf("  end of %s: rev %d\n", name, resp.Header.Revision)
			}
		}})
		h.work()
	case "left":
		cmd := &regionpb.LeaseCommand{Op: regionpb.LeaseCheckpoint}
		cmd.Grant = arg(d, "of", 0)
		for i, a := range d.CmdArgs {
			if a.Key == "of" {
				continue
			}
			id, err := strconv.ParseInt(a.Key, 10, 64)
			must(err)
			l := regionpb.LeaseLeft{ID: id, Grant: cmd.Grant, Remaining: int64(arg(d, a.Key, 0))}
			if i == 0 {
				cmd.ID, cmd.Remaining = l.ID, l.Remaining
			} else {
				cmd.More = append(cmd.More, l)
			}
		}
		h.r.Write(&Write{Lease: cmd, Reply: func(resp *pb.TxnResponse, err error) {
			if err != nil {
				s.printf("  left: %v\n", err)
			} else {
				s.printf("  left: rev %d\n", resp.Header.Revision)
			}
		}})
		h.work()
	case "lock":
		id := pdpb.AttemptID(arg(d, "attempt", 1))
		spans := []regionpb.LockSpan{{Lease: int64(arg(d, "lease", 5)), Exclusive: !has(d, "shared")}}
		h.r.Lock(&Lock{Attempt: id, Age: id, Owner: 1, Spans: spans, Reply: func(l regionpb.LockGrant, err error) {
			if err != nil {
				s.printf("  lock of t%d: %v\n", id, err)
			} else {
				s.lock = l.ID
				s.printf("  t%d has its lock%s\n", id, grantText(&l))
			}
		}})
		h.work()
	case "prepare":
		id := pdpb.AttemptID(arg(d, "attempt", 1))
		h.r.Prepare(&Prepare{Request: &regionpb.PrepareRequest{Region: testDesc.ID, Attempt: id, Lock: s.lock, Participants: []regionpb.RegionID{testDesc.ID}},
			Reply: func(_ mvcc.Revision, err error) { s.printf("  prepare of t%d: %v\n", id, err) }})
		h.work()
	case "release":
		h.r.Release(pdpb.AttemptID(arg(d, "attempt", 1)))
		h.work()
	case "append":
		s.append(h, d)
		h.work()
	case "copy":
		before = ^uint64(0)
		h.copyFrom(s.hosts[int(arg(d, "from", 1))], arg(d, "through", ^uint64(0)))
	case "commit":
		h.commit(arg(d, "index", h.log.LastIndex()))
	case "order":
		rep, _ := h.r.BuildReport()
		if it, ok := s.o.order(&rep, int(arg(d, "others", 0))); ok {
			s.printf("cut %d: %s\n", s.o.cut, it)
		} else {
			s.printf("cut %d: nothing of this region\n", s.o.cut)
		}
	case "fence":
		s.o.cut++
		s.o.fence++
		s.printf("cut %d: fence %d\n", s.o.cut, s.o.fence)
	case "deliver":
		h.feedTo(s.o, arg(d, "through", uint64(len(s.o.items))))
	case "feed":
		h.feed(s.o)
	case "tick":
		for range arg(d, "n", 1) {
			h.r.Tick()
		}
		h.work()
	case "work":
		h.work()
	case "flush":
		h.store.Flush()
	case "durable":
		p, _ := h.store.DurablePosition(uint64(testDesc.ID))
		must(h.r.DurableAt(p))
		h.work()
		s.printf("log %d..%d\n", h.log.first, h.log.LastIndex())
	case "crash":
		h.crash(testDesc.ID)
		h.work()
		before = h.log.LastIndex()
	case "read":
		s.read(h, d)
	case "log":
		for i := h.log.first; i <= h.log.LastIndex(); i++ {
			s.entry(h.log.entries[i-h.log.first])
		}
		before = h.log.LastIndex()
	case "report":
		rep, ok := h.r.BuildReport()
		s.printf("%s %v\n", &rep, ok)
	case "state":
		p := h.r.Applied()
		st := h.r.Stats()
		s.printf("%s; queued %d inflight %d overlay %d window %d wanted %d\n", &p, st.Queued, st.Inflight, st.OverlayKeys, st.Window, h.r.Wanted())
	case "idle":
		s.printf("%v\n", h.r.Idle())
	case "floor":
		q := &floorRequest{rev: mvcc.Revision(arg(d, "rev", 0)), done: make(chan mvcc.Revision, 1)}
		h.r.mu.Lock()
		h.r.mu.floors = append(h.r.mu.floors, q)
		h.r.mu.Unlock()
		h.work()
		s.printf("floor %d\n", <-q.done)
	default:
		t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
	}
	if before < h.log.LastIndex() {
		for i := before + 1; i <= h.log.LastIndex(); i++ {
			s.entry(h.log.entries[i-h.log.first])
		}
	}
	if h.fatal != nil {
		s.printf("FATAL %v\n", h.fatal)
		h.fatal = nil
	}
	if s.out.Len() == 0 {
		return "ok\n"
	}
	return s.out.String()
}

func (s *script) make(d *datadriven.TestData) {
	s.hosts, s.next, s.tokens = map[int]*host{}, 0, nil
	for id := 1; id <= 3; id++ {
		s.hosts[id] = newHost(raftidOf(uint64(id)), testDesc, func(c *Config) {
			if word(d, "limits") == "tiny" {
				c.Limits = TinyLimits
			}
			if word(d, "limits") == "gather" {
				c.Limits.PipelineCommandsMin = 3
			}
			c.Limits.SealDelayTicks = 2
			c.SharedFsync = has(d, "shared")
			switch word(d, "mut") {
			case "":
			case "evalearly":
				c.Mutants.EvalEarly = true
			case "commitfromitem":
				c.Mutants.CommitFromItem = true
			case "sealuncommitted":
				c.Mutants.SealUncommitted = true
			case "fromidx":
				c.Mutants.FromIdx = true
			case "sealping":
				c.Mutants.SealPing = true
			case "nofence":
				c.Mutants.NoFence = true
			default:
				s.t.Fatalf("no mutant %s", word(d, "mut"))
			}
		})
	}
	s.o = newFakeOrder(&testDesc)
}

// append puts an entry into a log as a leader elsewhere would have made it.
func (s *script) append(h *host, d *datadriven.TestData) {
	index, term := arg(d, "index", h.log.LastIndex()+1), arg(d, "term", h.log.role.Term)
	e := &raftpb.Entry{Index: new(index), Term: new(term)}
	if !has(d, "silent") || has(d, "seals") {
		entry := regionpb.Entry{Index: index, Term: term, Fence: pdpb.Fence(arg(d, "fence", 0))}
		if hd := word(d, "header"); hd != "" {
			_, err := fmt.Sscanf(hd, "%d@%d", &entry.Index, &entry.Term)
			must(err)
		}
		if sl := word(d, "seals"); sl != "" {
			var from, to int
			_, err := fmt.Sscanf(sl, "%d-%d", &from, &to)
			must(err)
			entry.Seals = s.o.items[from-1 : to]
		}
		for _, f := range strings.Fields(d.Input) {
			k, v, _ := strings.Cut(f, "=")
			entry.Commands = append(entry.Commands, regionpb.Command{Effects: []regionpb.Effect{{Key: []byte(k), Value: []byte(v), Version: 1}}})
		}
		e.Data = entry.Encode()
	}
	h.log.put(e)
}

func (s *script) entry(e *raftpb.Entry) {
	s.printf("  %d@%d", e.GetIndex(), e.GetTerm())
	if len(e.GetData()) > 0 {
		var x regionpb.Entry
		must(regionpb.DecodeEntry(e.GetData(), &x))
		if x.Term != e.GetTerm() || x.Index != e.GetIndex() {
			s.printf(" for %d@%d", x.Index, x.Term)
		}
		s.printf(" f%d", x.Fence)
		if n := len(x.Seals); n > 0 {
			s.printf(" seals %d-%d", x.Seals[0].N, x.Seals[n-1].N)
		}
		for i := range x.Commands {
			s.printf(" [")
			for j, f := range x.Commands[i].Effects {
				if j > 0 {
					s.printf(" ")
				}
				if f.Delete {
					s.printf("del %s", f.Key)
					continue
				}
				s.printf("put %s=%s v%d c%s", f.Key, f.Value, f.Version, [...]string{"new", strconv.FormatInt(int64(f.Create), 10), "?"}[f.CreateKind])
			}
			for j := range x.Commands[i].Records {
				if j > 0 || len(x.Commands[i].Effects) > 0 {
					s.printf(" ")
				}
				s.printf("%s", recordLine(&x.Commands[i].Records[j]))
			}
			s.printf("]")
		}
	}
	s.printf("\n")
}

func recordLine(x *regionpb.RecordEffect) string {
	switch {
	case x.Key.Kind == mvcc.RecordLease && len(x.Value) == 0:
		return fmt.Sprintf("lease %d gone", x.Key.ID)
	case x.Key.Kind == mvcc.RecordLease:
		rec, err := regionpb.DecodeLeaseRecord(x.Value)
		must(err)
		return fmt.Sprintf("lease %d %s", x.Key.ID, rec)
	case len(x.Value) == 0:
		return fmt.Sprintf("not registered for %d", x.Key.ID)
	}
	return fmt.Sprintf("registered for %d", x.Key.ID)
}

func (s *script) read(h *host, d *datadriven.TestData) {
	req := &regionpb.ReadRequest{Region: testDesc.ID, Cut: pdpb.Cut(arg(d, "cut", 0)), Rev: mvcc.Revision(arg(d, "rev", 0)),
		Span: testDesc.Span, WantCount: true, Limit: int64(arg(d, "limit", 0)), KeysOnly: has(d, "keysonly"), CountOnly: has(d, "countonly"),
		MinMod: mvcc.Revision(arg(d, "minmod", 0)), Lease: int64(arg(d, "lease", 0))}
	if k := word(d, "key"); k != "" {
		req.Span = mvcc.Key([]byte(k))
		if e := word(d, "end"); e != "" {
			req.Span.End = []byte(e)
		}
	}
	if of := word(d, "of"); of != "" {
		req.Of, req.Leases, req.WantCount, req.MaxBytes = idList(of), has(d, "records"), false, int64(arg(d, "bytes", 0))
	}
	if k := word(d, "keys"); k != "" {
		for _, k := range strings.Split(k, "+") {
			req.Keys = append(req.Keys, []byte(k))
		}
	}
	resp, err := h.r.TryRead(req)
	if err != nil {
		s.printf("%v\n", err)
		return
	}
	s.printf("at %d now %d count %d", resp.Rev, resp.Now, resp.Count)
	if resp.LimitHit {
		s.printf(" limit")
	}
	if resp.More {
		s.printf(" more from %s", resp.Resume)
	}
	for _, kv := range resp.KVs {
		switch {
		case req.Leases:
			rec, err := regionpb.DecodeLeaseRecord(kv.Value)
			must(err)
			s.printf(" %d %v", binary.BigEndian.Uint64(kv.Key), rec)
		case len(req.Of) > 0:
			s.printf(" %s of %d", kv.Key, kv.Lease)
		default:
			s.printf(" %s=%s@%d", kv.Key, kv.Value, kv.ModRevision)
		}
	}
	s.printf("\n")
}

// idList reads ids that are joined by plus signs.
func idList(s string) (ids []int64) {
	for _, f := range strings.Split(s, "+") {
		id, err := strconv.ParseInt(f, 10, 64)
		must(err)
		ids = append(ids, id)
	}
	return ids
}

// parseTxn reads "[cut=N] [cond & cond ?] op; op [: op; op]" with conditions "key target op number" and
// operations "put k v [prev]", "del k [end]", "get k [end] [rev=N]".
func parseTxn(line string) (*pb.TxnRequest, uint64) {
	t := &pb.TxnRequest{}
	var cut uint64
	if rest, ok := strings.CutPrefix(strings.TrimSpace(line), "cut="); ok {
		num, tail, _ := strings.Cut(rest, " ")
		v, err := strconv.ParseUint(num, 10, 64)
		must(err)
		cut, line = v, tail
	}
	if conds, rest, ok := strings.Cut(line, "?"); ok {
		line = rest
		for _, c := range strings.Split(conds, "&") {
			f := strings.Fields(c)
			x, err := strconv.ParseInt(f[3], 10, 64)
			must(err)
			cmp := &pb.Compare{Key: []byte(f[0]), Result: map[string]pb.Compare_CompareResult{"=": 0, ">": 1, "<": 2, "!=": 3}[f[2]]}
			switch f[1] {
			case "mod":
				cmp.Target, cmp.TargetUnion = pb.Compare_MOD, &pb.Compare_ModRevision{ModRevision: x}
			case "create":
				cmp.Target, cmp.TargetUnion = pb.Compare_CREATE, &pb.Compare_CreateRevision{CreateRevision: x}
			case "version":
				cmp.Target, cmp.TargetUnion = pb.Compare_VERSION, &pb.Compare_Version{Version: x}
			}
			t.Compare = append(t.Compare, cmp)
		}
	}
	yes, no, _ := strings.Cut(line, ":")
	t.Success, t.Failure = parseOps(yes), parseOps(no)
	return t, cut
}

func parseOps(s string) (ops []*pb.RequestOp) {
	for _, o := range strings.Split(s, ";") {
		f := strings.Fields(o)
		if len(f) == 0 {
			continue
		}
		end := func(i int) []byte {
			if len(f) > i && !strings.Contains(f[i], "=") {
				return []byte(f[i])
			}
			return nil
		}
		switch f[0] {
		case "put":
			ops = append(ops, putOp(&pb.PutRequest{Key: []byte(f[1]), Value: []byte(f[2]), PrevKv: len(f) > 3}))
		case "keep":
			ops = append(ops, putOp(&pb.PutRequest{Key: []byte(f[1]), IgnoreValue: true}))
		case "lease":
			id := int64(5)
			if len(f) > 2 {
				var err error
				id, err = strconv.ParseInt(f[2], 10, 64)
				must(err)
			}
			ops = append(ops, putOp(&pb.PutRequest{Key: []byte(f[1]), Lease: id}))
		case "del":
			ops = append(ops, deleteOp(&pb.DeleteRangeRequest{Key: []byte(f[1]), RangeEnd: end(2)}))
		case "get":
			r := &pb.RangeRequest{Key: []byte(f[1]), RangeEnd: end(2)}
			for _, w := range f[2:] {
				if v, ok := strings.CutPrefix(w, "rev="); ok {
					x, err := strconv.ParseInt(v, 10, 64)
					must(err)
					r.Revision = x
				}
			}
			ops = append(ops, rangeOp(r))
		default:
			panic("unknown operation " + o)
		}
	}
	return ops
}

func answerLine(resp *pb.TxnResponse) string {
	var b strings.Builder
	fmt.Fprintf(&b, "rev %d %v", resp.Header.Revision, resp.Succeeded)
	for _, o := range resp.Responses {
		switch {
		case o.GetResponsePut() != nil:
			fmt.Fprintf(&b, " put@%d", o.GetResponsePut().Header.Revision)
			if p := o.GetResponsePut().PrevKv; p != nil {
				fmt.Fprintf(&b, " prev %s=%s mod %d create %d v%d", p.Key, p.Value, p.ModRevision, p.CreateRevision, p.Version)
			}
		case o.GetResponseDeleteRange() != nil:
			fmt.Fprintf(&b, " del@%d n=%d", o.GetResponseDeleteRange().Header.Revision, o.GetResponseDeleteRange().Deleted)
		case o.GetResponseRange() != nil:
			r := o.GetResponseRange()
			fmt.Fprintf(&b, " get@%d", r.Header.Revision)
			sort.SliceStable(r.Kvs, func(i, j int) bool { return string(r.Kvs[i].Key) < string(r.Kvs[j].Key) })
			for _, kv := range r.Kvs {
				fmt.Fprintf(&b, " %s=%s@%d", kv.Key, kv.Value, kv.ModRevision)
			}
		}
	}
	return b.String()
}

// grantText is what a grant says of the leases that are to be ended.
func grantText(g *regionpb.LockGrant) (s string) {
	if !g.Whole {
		return ""
	}
	for _, l := range g.Records {
		s += fmt.Sprintf(" lease %d", l.ID)
		for _, span := range l.Record.Spans {
			s += fmt.Sprintf(" %v", span)
		}
	}
	for _, k := range g.Attached {
		s += fmt.Sprintf(" %s of %d", k.Key, k.Lease)
	}
	return ", whole:" + s
}
