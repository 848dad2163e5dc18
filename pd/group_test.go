package pd

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"go.etcd.io/raft/v3/raftpb"

	"braid/mvcc"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore"
	"braid/raftstore/raftid"
)

// cluster runs members of pd over real raft groups with logs in memory. One goroutine drives all
// groups; clients are called from others.
type cluster struct {
	t       *testing.T
	members []*member
	wake    chan struct{}
	stop    chan struct{}
	done    chan struct{}
	calls   []*order.Calls
}

type member struct {
	c       *cluster
	id      raftid.StoreID
	replica *Replica
	client  *order.Client
	group   *raftstore.Group
	log     *raftstore.MemLog

	mu      sync.Mutex
	woken   bool
	durable uint64
	inbox   []*raftpb.Message
}

func newCluster(t *testing.T, n int) *cluster {
	c := &cluster{t: t, wake: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{})}
	b := &Bootstrap{ClusterID: 1, Regions: []pdpb.Descriptor{{ID: 2, Epoch: 1}}}
	conf := &raftpb.ConfState{}
	var ids []raftid.StoreID
	for i := range n {
		id := raftid.StoreID(i + 1)
		ids = append(ids, id)
		conf.Voters = append(conf.Voters, uint64(id))
		b.Stores = append(b.Stores, pdpb.Store{ID: id, Name: "n"})
		b.Regions[0].Peers = append(b.Regions[0].Peers, pdpb.Peer{Replica: raftid.ReplicaID(id), Store: id})
	}
	storeOf := func(r raftid.ReplicaID) (raftid.StoreID, bool) { return raftid.StoreID(r), true }
	for _, id := range ids {
		m := &member{c: c, id: id, log: raftstore.NewMemLog()}
		c.members = append(c.members, m)
		calls := order.NewCalls(m, time.Second)
		c.calls = append(c.calls, calls)
		m.client = order.NewClient(order.ClientConfig{
			ClientOptions: order.ClientOptions{Self: id, Members: ids, Session: 1}, Net: calls,
		})
		var err error
		m.replica, err = NewReplica(Config{
			Store: id, Wake: m.wakeUp, StoreOf: storeOf, Bootstrap: b, Local: m.client, Sender: m, Net: calls,
		}, nil)
		if err != nil {
			t.Fatal(err)
		}
		m.group, err = raftstore.NewGroup(raftstore.GroupConfig{
			ID: raftid.PDGroup, Replica: raftid.ReplicaID(id), Peers: storeOf, ConfState: conf,
			Log: m.log, Machine: m.replica,
			Durable: func(token uint64) {
				m.mu.Lock()
				m.durable = max(m.durable, token)
				m.mu.Unlock()
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		m.client.SetMember(m.replica)
	}
	go c.run()
	t.Cleanup(func() {
		close(c.stop)
		<-c.done
		for i, m := range c.members {
			m.client.Close()
			c.calls[i].Close()
		}
	})
	return c
}

func (m *member) wakeUp() {
	m.mu.Lock()
	m.woken = true
	m.mu.Unlock()
	select {
	case m.c.wake <- struct{}{}:
	default:
	}
}

func (m *member) SendFrame(to raftid.StoreID, frame []byte) bool {
	return m.c.members[to-1].client.HandleFrameBytes(m.id, frame) == nil
}

// Call implements order.Caller.
func (m *member) Call(ctx context.Context, to raftid.StoreID, method order.Method, payload []byte) ([]byte, error) {
	type answer struct {
		b   []byte
		err error
	}
	ch := make(chan answer, 1)
	m.c.members[to-1].replica.Serve(method, m.id, payload, func(b []byte, err error) { ch <- answer{b, err} })
	select {
	case a := <-ch:
		return a.b, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (c *cluster) run() {
	defer close(c.done)
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	start := time.Now()
	var out raftstore.Output
	for {
		ticks := 0
		select {
		case <-c.stop:
			return
		case <-ticker.C:
			ticks = 1
			for _, m := range c.members {
				m.client.Tick(time.Since(start))
				m.replica.Tick()
			}
		case <-c.wake:
		}
		for busy := true; busy; {
			busy = false
			for _, m := range c.members {
				m.log.Flush(1 << 20)
				m.mu.Lock()
				in := raftstore.Input{Messages: m.inbox, Durable: m.durable, Ticks: ticks, Work: m.woken}
				m.inbox, m.woken, m.durable = nil, false, 0
				m.mu.Unlock()
				if len(in.Messages) == 0 && in.Durable == 0 && in.Ticks == 0 && !in.Work {
					continue
				}
				busy = true
				out.Reset()
				m.group.Process(&in, &out)
				for _, msg := range out.Messages {
					to := c.members[msg.GetTo()-1]
					to.inbox = append(to.inbox, msg)
				}
				if out.Again {
					m.wakeUp()
				}
			}
			ticks = 0
		}
	}
}

// counter is a replica whose region's log is a count.
type counter struct {
	mu    sync.Mutex
	leads bool
	upto  uint64
	items []pdpb.Item
	got   chan pdpb.Item
}

func (r *counter) Leading() bool { return r.leads }

func (r *counter) Wanted() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return uint64(len(r.items)) + 1
}

func (r *counter) BuildReport() (pdpb.Report, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rep := pdpb.Report{Region: 2, Upto: r.upto, Cum: r.upto, Sealed: uint64(len(r.items))}
	if n := len(r.items); n > 0 {
		rep.From = r.items[n-1].Upto
	}
	if rep.Upto > 0 {
		rep.UptoTerm = 1
	}
	if rep.Upto > rep.From {
		rep.Runs = []pdpb.Run{{Index: rep.Upto, Cum: rep.Cum}}
	}
	return rep, true
}

func (r *counter) Deliver(items []pdpb.Item) {
	for _, it := range items {
		r.mu.Lock()
		fresh := it.N == uint64(len(r.items))+1
		if fresh {
			r.items = append(r.items, it)
		}
		r.mu.Unlock()
		if fresh {
			r.got <- it
		}
	}
}

func (r *counter) write() {
	r.mu.Lock()
	r.upto++
	r.mu.Unlock()
}

func TestOverRaft(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("members=%d", n), func(t *testing.T) { overRaft(t, newCluster(t, n)) })
	}
}

func overRaft(t *testing.T, c *cluster) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	writer := c.members[len(c.members)-1]
	replicas := make([]*counter, len(c.members))
	for i, m := range c.members {
		replicas[i] = &counter{leads: m == writer, got: make(chan pdpb.Item, 64)}
		m.client.Register(2, replicas[i])
	}
	const writes = 20
	src := replicas[len(replicas)-1]
	for k := range uint64(writes) {
		src.write()
		writer.client.Report(2)
		for _, r := range replicas {
			select {
			case it := <-r.got:
				if it.Upto != k+1 || it.Base != order.FirstRevision+mvcc.Revision(k) {
					t.Fatalf("write %d: item %v", k, &it)
				}
			case <-ctx.Done():
				t.Fatalf("write %d: no item: %v", k, c.members[0].replica.Status())
			}
		}
	}
	for _, m := range c.members {
		p, err := m.client.ReadPoint(ctx)
		if err != nil || p.Rev != order.FirstRevision+writes || p.Floor != order.NoFloor {
			t.Fatalf("store %v: read point %v, %v", m.id, p, err)
		}
		if err := m.client.WaitMark(ctx, 2, p.Cut); err != nil {
			t.Fatal(err)
		}
		if mark, newest, ok := m.client.State(2); !ok || mark.Cut < p.Cut || newest != writes {
			t.Fatalf("store %v: state %v %d %v at %v", m.id, mark, newest, ok, p)
		}
	}
	// C3, from every store.
	rev, err := c.members[0].client.Compact(ctx, 5, pdpb.CompactHash{})
	if err != nil || rev != order.FirstRevision+writes {
		t.Fatalf("compact: %d, %v", rev, err)
	}
	for _, m := range c.members {
		if rev, err := m.client.Compact(ctx, 5, pdpb.CompactHash{}); !errors.Is(err, order.ErrCompacted) || rev != order.FirstRevision+writes {
			t.Fatalf("compact again: %d, %v", rev, err)
		}
		if rev, err := m.client.Compact(ctx, 1000, pdpb.CompactHash{}); !errors.Is(err, order.ErrFutureRevision) || rev != order.FirstRevision+writes {
			t.Fatalf("compact the future: %d, %v", rev, err)
		}
		if p, err := m.client.ReadPoint(ctx); err != nil || p.Floor != 5 {
			t.Fatalf("read point after compact: %v, %v", p, err)
		}
	}
	// Many callers share a batch; each gets ids of its own.
	var wg sync.WaitGroup
	ids := make(chan uint64, 100)
	for i := range cap(ids) {
		wg.Go(func() {
			m := c.members[i%len(c.members)]
			first, err := m.client.AllocIDs(ctx, 3)
			if err != nil {
				t.Error(err)
			}
			ids <- first
			if _, err := m.client.ReadPoint(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	close(ids)
	seen := map[uint64]bool{}
	for id := range ids {
		for k := id; k < id+3; k++ {
			if k == 0 || seen[k] {
				t.Errorf("id %d twice", k)
			}
			seen[k] = true
		}
	}
	if err := writer.client.RegisterStore(ctx, pdpb.Store{ID: 99, Name: "new"}); err != nil {
		t.Fatal(err)
	}
	if len(writer.client.Regions()) != 1 {
		t.Fatalf("regions %v", writer.client.Regions())
	}
	// A caller that goes away gets its answer at once.
	gone, cancelGone := context.WithCancel(ctx)
	cancelGone()
	if _, err := writer.client.ReadPoint(gone); err != nil && !errors.Is(err, order.ErrTimeout) {
		t.Fatalf("read point of a caller that went away: %v", err)
	}
	writer.client.Close()
	if _, err := writer.client.ReadPoint(ctx); !errors.Is(err, order.ErrClosed) {
		t.Fatalf("read point after close: %v", err)
	}
}
