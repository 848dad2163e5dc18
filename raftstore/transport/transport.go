// Package transport carries what stores say to each other: batches of raft messages, order
// frames, requests with replies, snapshots. It knows none of their contents.
//
// It is not a membership service (the peers are given) and gives no guarantee beyond TCP's: a
// frame may be lost when a stream breaks or a queue is full, and what was sent on one stream in
// one lane arrives in that order or not at all. Everything above repairs loss itself.
//
// Between two stores there are, in each direction, one stream of frames and one of requests, on
// a connection each, so that a large answer never delays a heartbeat, and a third connection
// while a snapshot is on its way. The side that has something to say dials; frames flow from the
// dialer only, requests from the dialer and replies back. gRPC gives framing, flow control and
// TLS; the messages are bytes of our own (no protobuf) under a codec that does not look at them.
// Every stream opens with a handshake that names cluster, stores, protocol version and the
// process's incarnation; a mismatch is refused with a reason.
//
// Owners: a peer's two loops own its outgoing streams, a gRPC handler owns each incoming one;
// queues have a lock each. Life: New, Handle…, Register on a server, Start, Close (after the
// server stopped or not: it ends the streams itself).
package transport

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"braid/raftstore/raftid"
)

// Kind says whom a frame is for. Urgent kinds overtake the others.
type Kind uint8

// The kinds. Zero is the transport's own.
const (
	KindRaftUrgent Kind = 1 // raft's messages of the placement group (B9)
	KindRaft       Kind = 2
	KindOrder      Kind = 3 // reports, order items and marks; urgent

	kindPing Kind = 0
)

func (k Kind) lane() int {
	if k == KindRaft {
		return 1
	}
	return 0
}

func (k Kind) raft() bool { return k == KindRaft || k == KindRaftUrgent }

// Method says whom a request is for: 1–31 order, 32–63 region, 64–95 node.
type Method uint8

// Config configures a transport. Zero numbers mean the defaults named.
type Config struct {
	Self      raftid.StoreID
	ClusterID uint64
	// Terms says in words what else all stores must have in common, such as the mode that they
	// run in; at most 256 bytes. Stores whose terms differ refuse each other.
	Terms string
	// Fresh says that this store has no history yet; Admit is asked about peers that say so, and
	// its error refuses them. A store that is known to have a history and comes without it must
	// not be heard: it could vote twice (A7). Both may be nil, and are called on any goroutine.
	Fresh func() bool
	Admit func(raftid.StoreID) error
	// Refused is told that a peer refuses this store, again and again while it does, and with an
	// empty reason that it does so no longer. Optional.
	Refused func(store raftid.StoreID, reason string)
	// Peers are the peer URLs of all stores: http, https, unix or unixs. Self may be among
	// them and is not dialed.
	Peers map[raftid.StoreID][]string
	// TLS is what dialing https and unixs peers uses; nil: such peers are an error.
	TLS *tls.Config
	// LocalAddr is the address that peers are dialed from over TCP; the zero value leaves the
	// choice to the system.
	LocalAddr netip.Addr
	// QueueBytes (32 MiB) bounds each lane of frames to a peer; CallBytes (64 MiB) the requests
	// to a peer that are not yet sent, and the replies to one; Calls (16384) the requests of a
	// peer that are being handled.
	QueueBytes, CallBytes, Calls int
	// PingInterval (500 ms) is how often stores prove that they are alive; DownAfter (4
	// intervals) of silence, or of pings that it does not answer, or one interval after a stream
	// broke, a store counts as down. Both directions count: see peer.missed.
	PingInterval, DownAfter time.Duration
	// BackoffMin (50 ms) and BackoffMax (1 s) are the pauses between attempts to connect.
	BackoffMin, BackoffMax time.Duration
	// SnapshotStall (30 s) without progress ends a snapshot.
	SnapshotStall time.Duration
	Logger        *zap.Logger
	Metrics       Metrics
}

// Metrics are told what happened; each may be nil, must be quick and safe for concurrent use.
type Metrics struct {
	Sent     func(to raftid.StoreID, bytes int)
	Received func(from raftid.StoreID, bytes int)
	// Failed counts streams that could not be opened or broke.
	Failed func(to raftid.StoreID)
	// Dropped counts frames that found their queue full or their peer away.
	Dropped func(to raftid.StoreID, kind Kind)
}

// maxMessageBytes bounds a gRPC message; a frame or request must be smaller.
const maxMessageBytes = 256 << 20

// batchBytes is about how much is put into one gRPC message.
const batchBytes = 1 << 20

type (
	frameHandler    func(from raftid.StoreID, payload []byte)
	callHandler     func(ctx context.Context, from raftid.StoreID, payload []byte, reply func([]byte, error))
	snapshotHandler func(ctx context.Context, from raftid.StoreID, group raftid.GroupID, header []byte, r io.Reader) error
)

// Transport connects this store with the others. All methods are safe for concurrent use, but
// the Handle methods and OnDown must be called before Start.
type Transport struct {
	cfg         Config
	log         *zap.Logger
	incarnation uint64
	looksMax    int // looks of watch that a peer may miss
	peers       map[raftid.StoreID]*peer
	local       *sendQueue // frames to ourselves

	frames   [256]frameHandler
	calls    [256]callHandler
	snapshot snapshotHandler
	down     []func(raftid.StoreID)

	ctx     context.Context
	stop    context.CancelFunc
	wg      sync.WaitGroup // our goroutines
	started atomic.Bool
	serving struct { // incoming streams
		sync.Mutex
		closed bool
		n      int
		idle   *sync.Cond
	}
}

// New makes a transport; nothing is dialed before Start.
func New(cfg Config) (*Transport, error) {
	defInt := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	defInt(&cfg.QueueBytes, 32<<20)
	defInt(&cfg.CallBytes, 64<<20)
	defInt(&cfg.Calls, 16384)
	def(&cfg.PingInterval, 500*time.Millisecond)
	def(&cfg.DownAfter, 4*cfg.PingInterval)
	def(&cfg.BackoffMin, 50*time.Millisecond)
	def(&cfg.BackoffMax, time.Second)
	def(&cfg.SnapshotStall, 30*time.Second)
	if cfg.Logger == nil {
		cfg.Logger = zap.NewNop()
	}
	if cfg.Self == 0 {
		return nil, errors.New("transport: no store id")
	}
	var seed [8]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return nil, fmt.Errorf("transport: %w", err)
	}
	t := &Transport{cfg: cfg, log: cfg.Logger, incarnation: binary.BigEndian.Uint64(seed[:]), peers: make(map[raftid.StoreID]*peer)}
	t.looksMax = max(looksPerPing, int(looksPerPing*cfg.DownAfter/cfg.PingInterval))
	t.ctx, t.stop = context.WithCancel(context.Background())
	t.serving.idle = sync.NewCond(&t.serving.Mutex)
	t.local = newSendQueue(cfg.QueueBytes)
	t.local.setUp(true)
	for id, urls := range cfg.Peers {
		if id == cfg.Self {
			continue
		}
		p, err := newPeer(t, id, urls)
		if err != nil {
			t.stop()
			return nil, err
		}
		t.peers[id] = p
	}
	return t, nil
}

// Handle registers the receiver of a kind of frames. It is called on the stream's goroutine, must
// not block long, and may keep the payload.
func (t *Transport) Handle(kind Kind, f func(from raftid.StoreID, payload []byte)) {
	if t.started.Load() || kind == kindPing || t.frames[kind] != nil {
		panic(fmt.Sprintf("transport: kind %d is registered twice or too late", kind))
	}
	t.frames[kind] = f
}

// HandleCall registers the receiver of a method's requests. It is called on the stream's
// goroutine and must not block; reply is called once, from any goroutine, and does not block.
// The context ends with the caller's deadline, its cancellation or its connection.
func (t *Transport) HandleCall(method Method, f func(ctx context.Context, from raftid.StoreID, payload []byte, reply func([]byte, error))) {
	if t.started.Load() || t.calls[method] != nil {
		panic(fmt.Sprintf("transport: method %d is registered twice or too late", method))
	}
	t.calls[method] = f
}

// HandleRaft registers the receiver of raft's batches, urgent ones included.
func (t *Transport) HandleRaft(f func(from raftid.StoreID, batch []byte)) {
	t.Handle(KindRaft, f)
	t.Handle(KindRaftUrgent, f)
}

// HandleSnapshot registers the receiver of snapshots. It runs on a goroutine of its own, reads
// until io.EOF, and its error is the sender's error.
func (t *Transport) HandleSnapshot(f func(ctx context.Context, from raftid.StoreID, group raftid.GroupID, header []byte, r io.Reader) error) {
	t.snapshot = f
}

// OnDown adds a listener: a store fell silent or cannot be reached, or came back as another process.
// It must not block.
func (t *Transport) OnDown(f func(raftid.StoreID)) { t.down = append(t.down, f) }

// Start connects to the peers and accepts them.
func (t *Transport) Start() {
	t.started.Store(true)
	t.wg.Go(t.loopback)
	if len(t.peers) > 0 {
		t.wg.Go(t.watch)
	}
	for _, p := range t.peers {
		t.wg.Go(p.sendFrames)
		t.wg.Go(p.sendCalls)
	}
}

// Close ends all streams, fails all calls and waits for the transport's goroutines.
func (t *Transport) Close() {
	t.stop()
	t.wg.Wait()
	t.serving.Lock()
	defer t.serving.Unlock()
	t.serving.closed = true
	for t.serving.n > 0 {
		t.serving.idle.Wait()
	}
}

// Send queues a frame. False: it was dropped, because the store is unknown or away or its queue
// is full. The payload is the transport's from now on.
func (t *Transport) Send(to raftid.StoreID, kind Kind, payload []byte) bool {
	q := t.local
	if to != t.cfg.Self {
		p := t.peers[to]
		if p == nil {
			return false
		}
		q = p.frames
	}
	ok := q.push(frame{kind: kind, payload: payload})
	if !ok && t.cfg.Metrics.Dropped != nil {
		t.cfg.Metrics.Dropped(to, kind)
	}
	return ok
}

// SendRaft is Send for a batch of raft messages.
func (t *Transport) SendRaft(to raftid.StoreID, urgent bool, batch []byte) bool {
	if urgent {
		return t.Send(to, KindRaftUrgent, batch)
	}
	return t.Send(to, KindRaft, batch)
}

// Alive says whether a store was lately heard and reached. A store is alive to itself.
func (t *Transport) Alive(store raftid.StoreID) bool {
	if store == t.cfg.Self {
		return true
	}
	p := t.peers[store]
	return p != nil && p.alive.Load()
}

// loopback delivers frames to ourselves.
func (t *Transport) loopback() {
	for {
		select {
		case <-t.ctx.Done():
			return
		case <-t.local.some:
		}
		for _, f := range t.local.takeFrames(batchBytes) {
			if h := t.frames[f.kind]; h != nil {
				h(t.cfg.Self, f.payload)
			}
		}
	}
}

// looksPerPing is how often watch looks in each ping interval.
const looksPerPing = 2

// watch notices stores that are silent or out of reach.
func (t *Transport) watch() {
	tick := time.NewTicker(t.cfg.PingInterval / looksPerPing)
	defer tick.Stop()
	for {
		select {
		case <-t.ctx.Done():
			return
		case <-tick.C:
		}
		for _, p := range t.peers {
			if p.look() {
				t.notifyDown(p.id)
			}
		}
	}
}

func (t *Transport) notifyDown(id raftid.StoreID) {
	t.log.Warn("a store is down or was restarted", zap.Stringer("store", id))
	for _, f := range t.down {
		f(id)
	}
}

// enter counts an incoming stream; false when the transport does not accept any.
func (t *Transport) enter() bool {
	t.serving.Lock()
	defer t.serving.Unlock()
	if !t.started.Load() || t.serving.closed || t.ctx.Err() != nil {
		return false
	}
	t.serving.n++
	return true
}

func (t *Transport) leave() {
	t.serving.Lock()
	t.serving.n--
	t.serving.idle.Broadcast()
	t.serving.Unlock()
}

func (t *Transport) sent(to raftid.StoreID, n int) {
	if t.cfg.Metrics.Sent != nil {
		t.cfg.Metrics.Sent(to, n)
	}
}

func (t *Transport) received(from raftid.StoreID, n int) {
	if t.cfg.Metrics.Received != nil {
		t.cfg.Metrics.Received(from, n)
	}
}
