// Package router turns requests of the whole key space into requests of regions. It knows which
// region holds a key, splits what has to be split, reads every region of a range at one revision
// and repeats what was certainly not executed.
//
// It is not a cache of data and not a proxy: it holds no state but the configuration it was
// built with. Which regions exist, what revision a read may use and how a region is reached come
// through two small interfaces, Oracle and Stores, which the node implements; the router never
// sees raft, sockets or files.
//
// The life of a read: take a read point (S1), or a local mark if the client asked for a
// serializable read; walk the regions of the range in key order, each in replies of bounded size
// at that one revision (S3); put together count, more, order and limit exactly as etcd does.
// The life of a write: find the one region that holds all its keys, hand it over, and try again
// with growing pauses only while the answer says that nothing happened and nothing will. A write
// with keys in several regions is coordinated here (package txn): lock, evaluate at a read point,
// have every region prepare, and hear from them when a cut has committed it.
//
// All methods may be called from any number of goroutines. Ranges run on the caller's goroutine;
// counting and hashing over many regions use a bounded number of their own, which have ended
// when the method returns.
package router

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
	"braid/router/txn"
)

var (
	// ErrTimeout says that the request's own time was up, as opposed to the client's. A write
	// may have been executed, or may be later.
	ErrTimeout = errors.New("router: request timed out")
	// ErrUnknownOutcome wraps what went wrong after a write had been handed over: it may have
	// been executed, or may be later.
	ErrUnknownOutcome = errors.New("router: outcome of a write is unknown")
	// ErrNotSent is wrapped by Stores when a request never left this node.
	ErrNotSent = txn.ErrNotSent
	// ErrNoRegion says that the directory does not cover the key yet, as before bootstrap.
	ErrNoRegion = errors.New("router: no region holds this key")
	// errSeveral says that a transaction's keys lie in more than one region.
	errSeveral = errors.New("router: keys of several regions")
	// errInvalid is wrapped by what is said of a reply that breaks the contract of Stores.
	errInvalid = errors.New("router: invalid reply")
)

// Oracle is what the router needs of the placement group. All methods may be called from any
// goroutine.
type Oracle interface {
	// ReadPoint returns a confirmed position of the whole store (S1).
	ReadPoint(ctx context.Context) (pdpb.ReadPoint, error)
	// Mark returns the newest mark this node knows, without any communication. Its Rev is 0
	// before the first one.
	Mark() pdpb.Mark
	// WaitRevision returns once Mark is at rev or above; an answer named rev, so there is such a
	// mark.
	WaitRevision(ctx context.Context, rev mvcc.Revision) error
	// Compact decides a compaction at its place among the cuts (C3) and returns the revision of
	// the store there. Its refusals are *regionpb.Error with Compacted or FutureRevision. A hash
	// whose Rev is not 0 is remembered, if its floor is still that of the store.
	Compact(ctx context.Context, rev int64, hash pdpb.CompactHash) (mvcc.Revision, error)
	// CompactHash returns the hash that is remembered of a compaction; its Rev is 0 when none is.
	CompactHash(ctx context.Context, rev mvcc.Revision) (pdpb.CompactHash, error)
	// Attempt returns the id of a new attempt of a transaction over several regions. Ids rise over
	// time (T5); fresh asks for one that is newer than all that this node took before.
	Attempt(ctx context.Context, fresh bool) (pdpb.AttemptID, error)
	// Abort aborts an attempt unless it is decided, and says how it was decided: nil with the
	// revision of the commit, or a *regionpb.Error with Aborted. Any other error leaves it open.
	Abort(ctx context.Context, attempt pdpb.AttemptID) (mvcc.Revision, error)
	// Abandon has an attempt aborted unless it is decided. Nobody waits, and it may be lost.
	Abandon(attempt pdpb.AttemptID)
	// Regions returns the directory, sorted by start key and without gaps. The slice is an
	// immutable snapshot.
	Regions() []pdpb.Descriptor
	// RegionsVersion rises with every change of Regions.
	RegionsVersion() uint64
}

// Stores reaches regions, on this node or on others. Errors are *regionpb.Error, wrap ErrNotSent,
// or are those of ctx; anything else means that the request was sent and no answer came.
type Stores interface {
	// Write hands a transaction to the region's leader. All its keys lie in the region. It waits until
	// ctx ends, or expired is closed, which is as the end of ctx's time; nil never is. The request may
	// be kept after that.
	Write(ctx context.Context, expired <-chan struct{}, region pdpb.Descriptor, req *regionpb.WriteRequest) (*pb.TxnResponse, error)
	// Lock asks a region's leader for an attempt's locks, and waits for the grant.
	Lock(ctx context.Context, region pdpb.Descriptor, req *regionpb.LockRequest) (regionpb.LockGrant, error)
	// Prepare asks the leader that granted a lock to prepare, and waits for the decision: the
	// revision of the commit, or an error that says what is known. The request may be kept.
	Prepare(ctx context.Context, region pdpb.Descriptor, req *regionpb.PrepareRequest) (mvcc.Revision, error)
	// Release gives up a lock that is not used. Nobody waits, and it may be lost.
	Release(region pdpb.Descriptor, req *regionpb.ReleaseRequest)
	// Read reads on the nearest replica, local ones first.
	Read(ctx context.Context, region pdpb.Descriptor, req *regionpb.ReadRequest) (*regionpb.ReadResponse, error)
	// Hash opens streams that together give the hash records of all the regions, each record
	// once, each stream in order of (revision, sub). How many streams is the callee's choice: one
	// for everything that is local, say, and one for each remote store.
	Hash(ctx context.Context, regions []pdpb.Descriptor, req HashRequest) ([]HashStream, error)
}

// Options configure a Router; zero values mean the defaults.
type Options struct {
	// RequestTimeout bounds a unary request, and the wait for the read point of a stream.
	// etcd's rule is 5 s plus two election timeouts. Default 7 s.
	RequestTimeout time.Duration
	// ChunkBytes is the size that chunks of RangeStream grow or shrink towards. A stream holds a few
	// of them. Default 256 KiB; etcd's is its max-request-bytes.
	ChunkBytes int
	// PageBytes bounds one reply of a region. Default 2 MiB.
	PageBytes int64
	// PartBytesMax bounds what a transaction over several regions changes in one of them: a region
	// refuses a larger part for good, so there is no use in reading all of it. Default 64 MiB.
	PartBytesMax int
	// CountWorkers bounds how many regions one request counts at a time. Default 8.
	CountWorkers int
	// LocalWait is how long a serializable read waits for the newest mark to come up to what this
	// node has told, and then for the local replicas to come up to the mark, before it takes what
	// is applied. Default 500 ms: longer than a busy machine is late, shorter than the second after
	// which clients of a node that is cut off give up.
	LocalWait time.Duration
	// RetryMin and RetryMax bound the pauses between attempts. Defaults 2 ms and 100 ms.
	RetryMin, RetryMax time.Duration
	// Scrubbed waits until this node has removed what a compaction at rev superseded; it is
	// what Compact with "physical" waits for. Nil: nothing to wait for.
	Scrubbed func(ctx context.Context, rev mvcc.Revision) error
}

func (o Options) withDefaults() Options {
	def := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&o.RequestTimeout, 7*time.Second)
	def(&o.LocalWait, 500*time.Millisecond)
	def(&o.RetryMin, 2*time.Millisecond)
	def(&o.RetryMax, 100*time.Millisecond)
	if o.ChunkBytes <= 0 {
		o.ChunkBytes = 256 << 10
	}
	if o.PageBytes <= 0 {
		o.PageBytes = 2 << 20
	}
	if o.PartBytesMax <= 0 {
		o.PartBytesMax = 64 << 20
	}
	if o.CountWorkers <= 0 {
		o.CountWorkers = 8
	}
	return o
}

// Router answers the requests of etcd's KV service over regions.
type Router struct {
	oracle Oracle
	stores Stores
	opts   Options
	counts counts
	told   told
	// expiries are of first tries.
	expiries expiries
}

// told is the highest revision in any answer of this node to a write or a linearizable read. Whoever
// got one finds at least that in a serializable read at the same node, as in etcd, where a member
// answers after applying; here the answer may have come from a region's leader elsewhere.
type told struct{ rev atomic.Int64 }

func (t *told) raise(rev int64) {
	for old := t.rev.Load(); rev > old; old = t.rev.Load() {
		if t.rev.CompareAndSwap(old, rev) {
			return
		}
	}
}

// New returns a router. It owns nothing that would have to be closed.
func New(oracle Oracle, stores Stores, opts Options) *Router {
	opts = opts.withDefaults()
	return &Router{oracle: oracle, stores: stores, opts: opts, counts: newCounts(), expiries: expiries{after: opts.RequestTimeout}}
}

// Told is the highest revision in any answer of this node to a write or a linearizable read; the mark
// of the same node may be a moment behind it.
func (r *Router) Told() mvcc.Revision { return mvcc.Revision(r.told.rev.Load()) }

// deadline bounds a request by the configured time, unless the client's own deadline is earlier.
func (r *Router) deadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if d, ok := ctx.Deadline(); ok && time.Until(d) <= r.opts.RequestTimeout {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, r.opts.RequestTimeout)
}

// settle gives an error its final form: what the client did to its own request passes through,
// the router's deadline becomes ErrTimeout.
func settle(client context.Context, err error) error {
	if err == nil {
		return nil
	}
	if cerr := client.Err(); cerr != nil {
		return cerr
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return ErrTimeout
	}
	return err
}

// codeOf returns the code of a region's error, 0 for any other error.
func codeOf(err error) regionpb.Code {
	if err == nil {
		return 0 // without the allocation that As needs
	}
	var re *regionpb.Error
	if errors.As(err, &re) {
		return re.Code
	}
	return 0
}

// notExecuted says whether a write had certainly no effect, never will, and may fare better when
// it is tried again. Overload is not in the list: repeating would add to it.
func notExecuted(err error) bool {
	switch codeOf(err) {
	case regionpb.NotLeader, regionpb.EpochMismatch, regionpb.RegionNotFound, regionpb.VoidByFence,
		regionpb.Stopped: // the store that led; another one will
		return true
	case 0:
		return errors.Is(err, ErrNotSent) || errors.Is(err, ErrNoRegion)
	}
	return false
}

// readAgain says whether a read may fare better when it is tried again. A read has no effect, so
// that an unknown outcome or a lost connection is as good as a refusal.
func readAgain(err error) bool {
	switch codeOf(err) {
	case regionpb.NotLeader, regionpb.EpochMismatch, regionpb.RegionNotFound, regionpb.VoidByFence,
		regionpb.NotComplete, regionpb.Unknown, regionpb.Stopped:
		return true
	case 0:
		for _, final := range [...]error{context.Canceled, context.DeadlineExceeded, errRaced, errInvalid} {
			if errors.Is(err, final) {
				return false
			}
		}
		return true
	}
	return false
}

func compacted() error { return &regionpb.Error{Code: regionpb.Compacted} }
func future() error    { return &regionpb.Error{Code: regionpb.FutureRevision} }

// unknown marks the error of a write whose fate is open, unless it says so already.
func unknown(err error) error {
	var re *regionpb.Error
	if errors.As(err, &re) || errors.Is(err, ErrNotSent) || errors.Is(err, ErrNoRegion) ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
}
