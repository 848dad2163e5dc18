package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// kind is a kind of request.
type kind struct {
	name  string
	about string
	reads bool // it needs keys that are there
	// second names what some of its requests are counted as instead; "" when there is none.
	second string
	// send sends one request and waits for the answer; second says as which name it counts.
	send func(ctx context.Context, c *client) (second bool, err error)
	// begin and end, when not nil, prepare a client and give back what it holds.
	begin func(ctx context.Context, c *client) error
	end   func(c *client)
}

// kinds lists all kinds. To add one, add it here.
var kinds = []kind{
	{name: "put", about: "one key", send: put},
	{name: "get", about: "one key, linearizable", reads: true, send: get()},
	{name: "get-serializable", about: "one key, from the node that is asked, possibly stale", reads: true, send: get(clientv3.WithSerializable())},
	{name: "range", about: "a range in one answer", reads: true, send: scan()},
	{name: "list", about: "a range in pages at one revision, as Kubernetes lists", reads: true, send: list},
	{name: "stream", about: "a range as a stream of answers", reads: true, send: stream},
	{name: "keys", about: "the keys of a range", reads: true, send: scan(clientv3.WithKeysOnly())},
	{name: "count", about: "the number of keys in a range", reads: true, send: scan(clientv3.WithCountOnly())},
	{name: "delete", about: "one key", send: del},
	{name: "cas", about: "compare and put, as Kubernetes updates: the put happens when the key has not changed since this client saw it, else the answer has the key", second: "cas conflict", send: cas},
	{name: "txn", about: "a transaction of puts to several keys in several parts of the key space", send: txn},
	{name: "lease-grant", about: "a new lease", send: grant},
	{name: "keepalive", about: "a message on the client's keepalive stream, for its lease", send: keepAlive, begin: openKeepAlive, end: closeKeepAlive},
}

func kindOf(name string) *kind {
	for i := range kinds {
		if kinds[i].name == name {
			return &kinds[i]
		}
	}
	return nil
}

// KindNames lists the kinds of requests.
func KindNames() []string {
	var names []string
	for _, k := range kinds {
		names = append(names, k.name)
	}
	return names
}

// KindHelp has a line about each kind.
func KindHelp() string {
	text := ""
	for _, k := range kinds {
		text += fmt.Sprintf("  %-17s %s\n", k.name, k.about)
	}
	return text
}

// client is one of the concurrent senders. It belongs to its goroutine.
type client struct {
	id     int
	load   *Load
	conn   *clientv3.Client
	kv     clientv3.KV
	choose *Chooser
	rng    *rand.Rand
	values *values
	stamp  int64 // when the request was meant to start; its values carry it

	seen  map[int64]int64 // cas: modification revisions last seen, by key number
	lease clientv3.LeaseID
	alive pb.Lease_LeaseKeepAliveClient
	close context.CancelFunc // of alive
}

// values makes values that do not compress, so that what a store writes is what it was given.
type values struct {
	size int
	pool []byte
}

// stampSize is what the time at the head of a value takes.
const stampSize = 8

func newValues(size int) *values {
	rng := rand.NewChaCha8([32]byte{'b', 'r', 'a', 'i', 'd'})
	v := &values{size: size, pool: make([]byte, size+64<<10)}
	_, _ = rng.Read(v.pool) // never fails
	return v
}

// next is a value whose first bytes are a stamp, if there is room.
func (v *values) next(rng *rand.Rand, stamp int64) string {
	at := rng.IntN(len(v.pool) - v.size + 1)
	b := make([]byte, v.size)
	copy(b, v.pool[at:])
	if v.size >= stampSize {
		binary.BigEndian.PutUint64(b, uint64(stamp))
	}
	return string(b)
}

func (c *client) value() string { return c.values.next(c.rng, c.stamp) }

func put(ctx context.Context, c *client) (bool, error) {
	_, err := c.kv.Put(ctx, c.load.Keys.Key(c.choose.Next()), c.value())
	return false, err
}

func get(opts ...clientv3.OpOption) func(context.Context, *client) (bool, error) {
	return func(ctx context.Context, c *client) (bool, error) {
		_, err := c.kv.Get(ctx, c.load.Keys.Key(c.choose.Next()), opts...)
		return false, err
	}
}

func del(ctx context.Context, c *client) (bool, error) {
	_, err := c.kv.Delete(ctx, c.load.Keys.Key(c.choose.Next()))
	return false, err
}

// span draws a range of the load's length that lies within the key space.
func (c *client) span() (from, to string) {
	l := c.load
	first := min(c.choose.Next(), l.Keys.Space-l.RangeKeys)
	return l.Keys.Key(first), l.Keys.end(first + l.RangeKeys)
}

// end is the end of a range: the key with a number, or one behind all keys.
func (k *Keys) end(n int64) string {
	if n < k.Space {
		return k.Key(n)
	}
	return k.Key(k.Space-1) + "\x00"
}

func scan(opts ...clientv3.OpOption) func(context.Context, *client) (bool, error) {
	return func(ctx context.Context, c *client) (bool, error) {
		from, to := c.span()
		_, err := c.kv.Get(ctx, from, append(opts[:len(opts):len(opts)], clientv3.WithRange(to))...)
		return false, err
	}
}

func list(ctx context.Context, c *client) (bool, error) {
	from, to := c.span()
	revision := int64(0)
	for {
		resp, err := c.kv.Get(ctx, from, clientv3.WithRange(to), clientv3.WithLimit(c.load.Page), clientv3.WithRev(revision))
		if err != nil || !resp.More || len(resp.Kvs) == 0 {
			return false, err
		}
		from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
		revision = resp.Header.Revision
	}
}

func stream(ctx context.Context, c *client) (bool, error) {
	from, to := c.span()
	answers, err := c.kv.GetStream(ctx, from, clientv3.WithRange(to))
	if err != nil {
		return false, err
	}
	for a := range answers {
		if err := a.Err(); err != nil && !errors.Is(err, io.EOF) {
			return false, err
		}
	}
	return false, nil
}

// cas sends If(unchanged) Then(put) Else(get), which is what Kubernetes' storage sends for an
// update, with the revision from this client's last sight of the key as from a cache.
func cas(ctx context.Context, c *client) (bool, error) {
	n := c.choose.Next()
	key := c.load.Keys.Key(n)
	resp, err := c.kv.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(key), "=", c.seen[n])).
		Then(clientv3.OpPut(key, c.value())).
		Else(clientv3.OpGet(key)).
		Commit()
	if err != nil {
		return false, err
	}
	if resp.Succeeded {
		c.seen[n] = resp.Header.Revision
		return false, nil
	}
	c.seen[n] = 0
	if kvs := resp.Responses[0].GetResponseRange().GetKvs(); len(kvs) == 1 {
		c.seen[n] = kvs[0].ModRevision
	}
	return true, nil
}

func txn(ctx context.Context, c *client) (bool, error) {
	ops := make([]clientv3.Op, 0, c.load.TxnKeys)
	for _, n := range txnNumbers(c.choose.Next(), c.load) {
		ops = append(ops, clientv3.OpPut(c.load.Keys.Key(n), c.value()))
	}
	_, err := c.kv.Txn(ctx).Then(ops...).Commit()
	return false, err
}

// txnNumbers picks the keys of a transaction: neighbours from a drawn one on, in each part.
func txnNumbers(drawn int64, l *Load) []int64 {
	parts := int64(l.TxnParts)
	length := l.Keys.Space / parts
	numbers := make([]int64, l.TxnKeys)
	for i := range numbers {
		part, nth := int64(i)%parts, int64(i)/parts
		numbers[i] = part*length + (drawn+nth)%length
	}
	return numbers
}

func grant(ctx context.Context, c *client) (bool, error) {
	_, err := c.conn.Grant(ctx, c.load.LeaseTTL)
	return false, err
}

func openKeepAlive(ctx context.Context, c *client) error {
	resp, err := c.conn.Grant(ctx, c.load.LeaseTTL)
	if err != nil {
		return err
	}
	c.lease = resp.ID
	// The stream outlives the request that opened it.
	streamCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c.alive, err = pb.NewLeaseClient(c.conn.ActiveConnection()).LeaseKeepAlive(streamCtx)
	c.close = cancel
	if err != nil {
		cancel()
	}
	return err
}

func keepAlive(ctx context.Context, c *client) (bool, error) {
	// A stream has no deadline of its own.
	stop := context.AfterFunc(ctx, c.close)
	defer stop()
	if err := c.alive.Send(&pb.LeaseKeepAliveRequest{ID: int64(c.lease)}); err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	resp, err := c.alive.Recv() // has the stream's error when Send has none
	if err == nil && resp.TTL <= 0 {
		err = errors.New("the lease has expired")
	}
	return false, err
}

// revokeTimeout bounds the clean-up after a run.
const revokeTimeout = 5 * time.Second

func closeKeepAlive(c *client) {
	if c.close != nil {
		c.close()
	}
	if c.lease != 0 {
		ctx, cancel := context.WithTimeout(context.Background(), revokeTimeout)
		defer cancel()
		_, _ = c.conn.Revoke(ctx, c.lease) // it expires by itself otherwise
	}
}
