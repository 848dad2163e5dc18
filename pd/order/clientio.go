package order

import (
	"context"
	"sync"
	"time"

	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// with changes the core under the lock, and then does what it asks for without the lock.
func (c *Client) with(change func()) {
	c.mu.Lock()
	before := c.core.reads.id
	change()
	if len(c.asking) > 0 && c.core.reads.id != before {
		c.askAgain() // the request in flight was given up; its readers go into the next
		c.core.WantRead(len(c.readers) > 0)
	}
	out := c.take()
	c.mu.Unlock()
	c.execute(out)
}

// work is an Output together with what only the client knows. Called with mu held.
type work struct {
	Output
	member  Member
	closed  bool
	expired []func(EventResult, error)
}

func (c *Client) take() work {
	w := work{Output: c.core.Take(), member: c.member, closed: c.closed}
	for _, token := range w.Expired {
		w.expired = append(w.expired, c.events[token])
		delete(c.events, token)
	}
	for i := range w.Requests {
		if w.Requests[i].Method == MethodReadPoint {
			// Who waits now shares this request; who comes later waits for the next (S1).
			c.asking, c.readers = c.readers, nil
			c.core.readsWaiting = false
		}
	}
	return w
}

func (c *Client) execute(w work) {
	if w.closed {
		return
	}
	for _, done := range w.expired {
		if done != nil {
			done(EventResult{}, ErrUnknown)
		}
	}
	if w.PullLocal && w.member != nil {
		w.member.ReportsReady()
	}
	for i := range w.Requests {
		c.send(&w.Requests[i], w.member, nil)
	}
	if w.SendReports {
		c.sendReports(w.member)
	}
}

// build returns the reports that are due and say something.
func (c *Client) build(into []pdpb.Report) []pdpb.Report {
	c.mu.Lock()
	ids := c.core.Reporting(nil)
	sources := make([]ReportSource, len(ids))
	for i, id := range ids {
		sources[i] = c.sources[id]
	}
	c.mu.Unlock()
	n := len(into)
	for _, src := range sources {
		if src == nil {
			continue
		}
		if r, ok := src.BuildReport(); ok {
			into = append(into, r)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	kept := into[:n]
	for i := n; i < len(into); i++ {
		if c.core.Wants(&into[i]) {
			kept = append(kept, into[i])
		}
	}
	return kept
}

// PullReports appends the reports that are due; the member of this store calls it when it leads.
func (c *Client) PullReports(into []pdpb.Report) []pdpb.Report {
	n := len(into)
	into = c.build(into)
	c.with(func() { c.core.Pulled(into[n:]) })
	return into
}

func (c *Client) sendReports(member Member) {
	reports := c.build(nil)
	c.mu.Lock()
	req, ok := c.core.Reported(reports)
	c.mu.Unlock()
	if ok {
		c.send(&req, member, reports)
	}
}

// send performs a request, at the member in process or over the network.
func (c *Client) send(req *Request, member Member, reports []pdpb.Report) {
	id, m := req.ID, req.Method
	if req.To == c.cfg.Self && member != nil {
		c.sendLocal(req, member)
		return
	}
	if c.cfg.Net == nil {
		c.done(id, m, nil, errNoNet)
		return
	}
	var payload []byte
	switch m {
	case MethodReports:
		payload = AppendReports(nil, reports)
	case MethodPropose:
		payload = AppendEvent(nil, req.Event)
	case MethodSubscribe:
		payload = req.Subscribe.Append(nil)
	case MethodMark:
		payload = AppendMarkRequest(nil, req.Session, req.Cut)
	}
	to, outer := req.To, m
	if req.Via != 0 {
		to, outer, payload = req.Via, MethodForward, AppendForward(nil, m, payload)
	}
	c.cfg.Net.Call(to, outer, payload, func(b []byte, err error) {
		if err != nil {
			c.done(id, m, nil, err)
			return
		}
		r, err := DecodeReply(m, b)
		if err != nil {
			r = nil
		}
		c.done(id, m, r, err)
	})
}

func (c *Client) sendLocal(req *Request, member Member) {
	id, m := req.ID, req.Method
	switch m {
	case MethodReadPoint:
		member.ReadPoint(func(p pdpb.ReadPoint, err error) {
			c.done(id, m, localReply(Reply{ReadPoint: p, Err: err}), nil)
		})
	case MethodPropose:
		member.Propose(*req.Event, func(r EventResult, err error) {
			if r.Outcome != Done {
				err = nil
			}
			c.done(id, m, localReply(Reply{Result: r, Err: err}), nil)
		})
	case MethodSubscribe:
		member.Subscribe(c.cfg.Self, req.Subscribe)
		c.done(id, m, &Reply{}, nil)
	case MethodMark:
		member.WantMark(c.cfg.Self, req.Session, req.Cut)
		c.done(id, m, &Reply{}, nil)
	case MethodReports:
		// The member pulls. A remote request was meant, but leadership came here meanwhile.
		c.done(id, m, &Reply{Err: &NotLeaderError{}}, nil)
	default:
		c.done(id, m, &Reply{Err: ErrInvalid}, nil)
	}
}

func localReply(r Reply) *Reply {
	if nl, ok := r.Err.(*NotLeaderError); ok {
		r.Role = Role{Term: nl.Term, Leader: nl.Leader}
	}
	return &r
}

// done is the end of a request.
func (c *Client) done(id uint64, m Method, r *Reply, err error) {
	var readers []*reader
	var event func(EventResult, error)
	var dir *Directory
	ok := err == nil && r != nil && r.Err == nil
	c.with(func() {
		token, read := c.core.Done(id, r, err)
		if read {
			if ok {
				readers, c.asking = c.asking, nil
			} else {
				c.askAgain()
			}
			c.core.WantRead(len(c.readers) > 0)
		}
		if token != 0 {
			event = c.events[token]
			delete(c.events, token)
		}
		if ok && m == MethodDirectory {
			dir = r.Directory
		}
	})
	for _, q := range readers {
		q.done(r.ReadPoint, nil)
	}
	if event != nil {
		switch {
		case err != nil:
			event(EventResult{}, ErrUnknown)
		case r.Err != nil:
			event(EventResult{}, r.Err)
		default:
			event(r.Result, r.Result.Err())
		}
	}
	if dir != nil {
		c.HandleDirectory(dir)
	}
}

// askAgain puts the readers of a request that failed in front of those that wait. Called with mu
// held.
func (c *Client) askAgain() {
	c.readers = append(c.asking, c.readers...)
	c.asking = nil
	c.sweep()
}

// sweep drops readers whose callers went away. Called with mu held.
func (c *Client) sweep() {
	kept := c.readers[:0]
	for _, q := range c.readers {
		if !q.gone {
			kept = append(kept, q)
		}
	}
	clear(c.readers[len(kept):])
	c.readers, c.gone = kept, 0
}

// HandleFrame takes a frame of a member's stream. Frames of one member must come in order.
func (c *Client) HandleFrame(from raftid.StoreID, f *Frame) {
	c.frames.Lock()
	defer c.frames.Unlock()
	var items []pdpb.Item
	var ok bool
	var sources []ReportSource
	var woken []*markWaiter
	c.with(func() {
		if items, ok = c.core.Frame(from, f); !ok {
			return
		}
		if len(c.marks) > 0 {
			woken = c.takeMarks(c.reached)
		}
		for i := range items {
			sources = append(sources, c.sources[items[i].Region])
		}
	})
	if !ok {
		return
	}
	// One call for each stretch of items of one region.
	for i := 0; i < len(items); {
		j := i + 1
		for j < len(items) && items[j].Region == items[i].Region {
			j++
		}
		if sources[i] != nil {
			sources[i].Deliver(items[i:j:j])
		}
		i = j
	}
	for _, w := range woken {
		w.done(nil)
	}
	if c.cfg.OnMark != nil {
		c.cfg.OnMark()
	}
}

// HandleFrameBytes takes an encoded frame; the transport calls it. An error means damage or
// another version; the stream recovers by itself.
func (c *Client) HandleFrameBytes(from raftid.StoreID, payload []byte) error {
	f, err := DecodeFrame(payload)
	if err != nil {
		return err
	}
	c.HandleFrame(from, f)
	return nil
}

// HandleRole tells what the member in process knows of pd's leadership.
func (c *Client) HandleRole(r Role) {
	c.with(func() { c.core.SetRole(r) })
}

// HandleDown tells that a store fell silent or came back as another process.
func (c *Client) HandleDown(store raftid.StoreID) {
	c.with(func() { c.core.Down(store) })
}

// HandleDirectory takes a picture of the cluster; older ones are ignored.
func (c *Client) HandleDirectory(d *Directory) {
	c.directory.Lock()
	defer c.directory.Unlock()
	c.mu.Lock()
	news := d.Version > 0 && (c.dir == nil || d.Version > c.dir.Version)
	if news {
		c.dir = d
		c.core.HaveDirectory(d.Version)
	}
	c.mu.Unlock()
	if news && c.cfg.OnDirectory != nil {
		c.cfg.OnDirectory(d)
	}
}

// suspectsMax is how many replicas one Tick asks for items that they had no room for.
const suspectsMax = 64

// Tick brings the time, monotonic from any origin; every 20 to 100 ms. Timeouts and repetitions
// happen here and nowhere else.
func (c *Client) Tick(now time.Duration) {
	type probe struct {
		id  pdpb.RegionID
		src ReportSource
	}
	var probes []probe
	c.with(func() {
		c.core.Tick(now)
		if c.gone > 0 {
			c.sweep()
		}
		c.core.WantRead(len(c.readers) > 0)
		for _, id := range c.core.Suspects(nil, suspectsMax) {
			probes = append(probes, probe{id, c.sources[id]})
		}
		// And one in turn, in case a replica lost what it had.
		if len(c.order) > 0 {
			c.round++
			id := c.order[c.round%len(c.order)]
			probes = append(probes, probe{id, c.sources[id]})
		}
	})
	for _, p := range probes {
		wanted := p.src.Wanted()
		c.with(func() { c.core.Lacks(p.id, wanted) })
	}
}

// Caller is a transport's blocking call.
type Caller interface {
	Call(ctx context.Context, to raftid.StoreID, m Method, payload []byte) ([]byte, error)
}

// Calls makes a Net of a Caller: each call gets a goroutine for its duration. The client has few
// in flight at a time, and none for each request of a user. Close waits for all of them.
type Calls struct {
	caller  Caller
	timeout time.Duration
	ctx     context.Context
	cancel  context.CancelFunc

	mu     sync.Mutex
	closed bool
	wg     sync.WaitGroup
}

// NewCalls returns a Net whose calls end after timeout.
func NewCalls(caller Caller, timeout time.Duration) *Calls {
	ctx, cancel := context.WithCancel(context.Background())
	return &Calls{caller: caller, timeout: timeout, ctx: ctx, cancel: cancel}
}

// Call implements Net.
func (n *Calls) Call(to raftid.StoreID, m Method, payload []byte, done func([]byte, error)) {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return // the client is closed too; its waiters were told
	}
	n.wg.Add(1)
	n.mu.Unlock()
	go func() {
		defer n.wg.Done()
		ctx, cancel := context.WithTimeout(n.ctx, n.timeout)
		defer cancel()
		done(n.caller.Call(ctx, to, m, payload))
	}()
}

// Close ends all calls and waits for them.
func (n *Calls) Close() {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.cancel()
	n.wg.Wait()
}
