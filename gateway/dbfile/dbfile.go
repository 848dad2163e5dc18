// Package dbfile writes the database file of an etcd that holds given keys and leases, as it would be
// right after a compaction at its own revision: what `etcdutl snapshot restore` takes.
//
// It does not copy an etcd and does not read one: it knows the buckets, and what etcd 3.7 writes into
// them. bbolt makes the file.
//
// The life of a Writer: New; Begin with the revision, again for a new beginning; Keys and Lease as often
// as there is something; Finish; Size and WriteTo; Close in every case, which removes all files. It
// belongs to one goroutine. Keys come in the order of their keys and etcd's file is in the order of
// revisions, so they are sorted on disk: memory is bounded by a run of them, and bbolt is filled from
// left to right, which is quickest and leaves the file dense.
package dbfile

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"go.etcd.io/bbolt"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/server/v3/lease/leasepb"
	"google.golang.org/protobuf/proto"

	"braid/mvcc"
)

// ErrNoSpace says that going on would have left the disk without the room that its other user needs.
var ErrNoSpace = errors.New("dbfile: not enough space on the disk")

const (
	// reserveBytes must stay free on the disk: a node whose log finds no room stops.
	reserveBytes = 256 << 20
	// batchBytesMax bounds a transaction of bbolt, which is in memory until it ends.
	batchBytesMax = 8 << 20
	// fillPercent is etcd's for buckets that grow at their end.
	fillPercent = 0.9
)

// Meta is what the file says of the cluster that it comes from. A restore replaces the members.
type Meta struct {
	Index, Term uint64 // of the log
	Version     string // of cluster and storage, like "3.7.0"
	Members     []*pb.Member
}

// Writer makes one file.
type Writer struct {
	dir  string
	free func() (uint64, error)

	rev    mvcc.Revision
	runs   *runs
	leases []lease
	// runBytes is runBytesMax, or less in tests.
	runBytes int

	db *bbolt.DB
	tx *bbolt.Tx // for reading what is finished
}

type lease struct{ id, ttl, remaining int64 }

// New returns a writer with a folder of its own below dir, which is made as well. free says how many
// bytes the disk has left; nil means enough.
func New(dir string, free func() (uint64, error)) (*Writer, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	own, err := os.MkdirTemp(dir, "db-*")
	if err != nil {
		return nil, err
	}
	if free == nil {
		free = func() (uint64, error) { return 2 * reserveBytes, nil }
	}
	return &Writer{dir: own, free: free, runBytes: runBytesMax}, nil
}

// room checks the disk before a batch or a run is written.
func (w *Writer) room() error {
	free, err := w.free()
	if err != nil {
		return err
	}
	if free < reserveBytes {
		return fmt.Errorf("%w: %d MiB are free and %d MiB must stay so", ErrNoSpace, free>>20, reserveBytes>>20)
	}
	return nil
}

// Begin forgets what came before and starts a file at a revision.
func (w *Writer) Begin(rev mvcc.Revision) error {
	if w.runs != nil {
		if err := w.runs.close(); err != nil {
			return err
		}
	}
	w.rev, w.leases = rev, nil
	var err error
	w.runs, err = newRuns(filepath.Join(w.dir, "runs"), w.runBytes, w.room)
	return err
}

// Keys adds keys.
func (w *Writer) Keys(kvs []*mvccpb.KeyValue) error {
	for _, kv := range kvs {
		if err := w.runs.add(kv); err != nil {
			return err
		}
	}
	return nil
}

// Lease adds a lease: what was granted, and what was left at the last checkpoint or 0, in seconds.
func (w *Writer) Lease(id, ttl, remaining int64) error {
	w.leases = append(w.leases, lease{id, ttl, remaining})
	return nil
}

// The buckets of etcd 3.7, and the keys in meta, cluster and auth.
var (
	bucketKey   = []byte("key")
	bucketLease = []byte("lease")
	bucketMeta  = []byte("meta")
	bucketAuth  = []byte("auth")

	buckets = [][]byte{bucketKey, bucketMeta, bucketLease, bucketAuth, []byte("authUsers"), []byte("authRoles"),
		[]byte("alarm"), []byte("cluster"), []byte("members"), []byte("members_removed")}
)

// Finish writes the file.
func (w *Writer) Finish(ctx context.Context, m Meta) error {
	if err := w.runs.spill(); err != nil {
		return err
	}
	// Nothing here outlives the process, so nothing is synced. Like etcd's, the file has no list of
	// its free pages.
	opts := &bbolt.Options{NoSync: true, NoGrowSync: true, NoFreelistSync: true, FreelistType: bbolt.FreelistMapType}
	var err error
	if w.db, err = bbolt.Open(filepath.Join(w.dir, "db"), 0o600, opts); err != nil {
		return err
	}
	if err := w.db.Update(func(tx *bbolt.Tx) error { return w.writeMeta(tx, m) }); err != nil {
		return err
	}
	if err := w.writeLeases(ctx); err != nil {
		return err
	}
	if err := w.writeKeys(ctx); err != nil {
		return err
	}
	if err := w.runs.close(); err != nil {
		return err
	}
	w.tx, err = w.db.Begin(false)
	return err
}

// writeMeta makes the buckets and fills the small ones.
func (w *Writer) writeMeta(tx *bbolt.Tx, m Meta) error {
	for _, name := range buckets {
		if _, err := tx.CreateBucket(name); err != nil {
			return err
		}
	}
	put := func(bucket, key string, value []byte) error { return tx.Bucket([]byte(bucket)).Put([]byte(key), value) }
	be := func(v uint64) []byte { return binary.BigEndian.AppendUint64(nil, v) }
	conf := confState{Voters: []uint64{}}
	for _, member := range m.Members {
		if member.IsLearner {
			conf.Learners = append(conf.Learners, member.ID)
		} else {
			conf.Voters = append(conf.Voters, member.ID)
		}
		value, err := json.Marshal(memberJSON{ID: member.ID, PeerURLs: member.PeerURLs, IsLearner: member.IsLearner,
			Name: member.Name, ClientURLs: member.ClientURLs})
		if err != nil {
			return err
		}
		if err := put("members", fmt.Sprintf("%x", member.ID), value); err != nil {
			return err
		}
	}
	slices.Sort(conf.Voters)
	slices.Sort(conf.Learners)
	state, err := json.Marshal(conf)
	if err != nil {
		return err
	}
	compacted := revisionKey(int64(w.rev), 0)
	return errors.Join(
		put("meta", "consistent_index", be(m.Index)),
		put("meta", "term", be(m.Term)),
		put("meta", "confState", state),
		put("meta", "storageVersion", []byte(m.Version)),
		put("meta", "scheduledCompactRev", compacted),
		put("meta", "finishedCompactRev", compacted),
		put("cluster", "clusterVersion", []byte(m.Version)),
		put("auth", "authRevision", be(1)), // as it is where auth was never on
	)
}

// memberJSON is etcd's membership.Member as it is stored.
type memberJSON struct {
	ID         uint64   `json:"id"`
	PeerURLs   []string `json:"peerURLs"`
	IsLearner  bool     `json:"isLearner,omitempty"`
	Name       string   `json:"name,omitempty"`
	ClientURLs []string `json:"clientURLs,omitempty"`
}

// confState is raft's as it is stored.
type confState struct {
	Voters    []uint64 `json:"voters"`
	Learners  []uint64 `json:"learners,omitempty"`
	AutoLeave bool     `json:"auto_leave"`
}

// revisionKey is etcd's key of a change.
func revisionKey(main, sub int64) []byte {
	k := binary.BigEndian.AppendUint64(make([]byte, 0, 17), uint64(main))
	return binary.BigEndian.AppendUint64(append(k, '_'), uint64(sub))
}

func (w *Writer) writeLeases(ctx context.Context) error {
	slices.SortFunc(w.leases, func(a, b lease) int { return cmp.Compare(uint64(a.id), uint64(b.id)) })
	b := batch{w: w, bucket: bucketLease}
	for _, l := range w.leases {
		value, err := proto.Marshal(&leasepb.Lease{ID: l.id, TTL: l.ttl, RemainingTTL: l.remaining})
		if err != nil {
			return errors.Join(err, b.abort())
		}
		if err := b.put(ctx, binary.BigEndian.AppendUint64(nil, uint64(l.id)), value); err != nil {
			return errors.Join(err, b.abort())
		}
	}
	return b.commit(ctx)
}

func (w *Writer) writeKeys(ctx context.Context) error {
	b := batch{w: w, bucket: bucketKey}
	var main, sub int64
	err := w.runs.merge(func(rev int64, value []byte) error {
		// What one transaction wrote has one revision, and its changes are numbered. Their own numbers
		// are not in what is read; the order of keys is as good, and the same each time.
		if sub++; rev != main {
			main, sub = rev, 0
		}
		return b.put(ctx, revisionKey(main, sub), value)
	})
	if err != nil {
		return errors.Join(err, b.abort())
	}
	return b.commit(ctx)
}

// batch fills a bucket in order, by transactions of bounded size.
type batch struct {
	w      *Writer
	bucket []byte
	tx     *bbolt.Tx // nil between two
	bytes  int
}

// put may keep what it is given.
func (b *batch) put(ctx context.Context, key, value []byte) error {
	if b.tx == nil {
		var err error
		if b.tx, err = b.w.db.Begin(true); err != nil {
			return err
		}
	}
	bucket := b.tx.Bucket(b.bucket)
	bucket.FillPercent = fillPercent
	if err := bucket.Put(key, value); err != nil {
		return err
	}
	const itemBytes = 128 // what bbolt has of an item besides its value, about
	if b.bytes += len(value) + itemBytes; b.bytes < batchBytesMax {
		return nil
	}
	return b.commit(ctx)
}

func (b *batch) commit(ctx context.Context) error {
	if b.tx == nil {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return errors.Join(err, b.abort())
	}
	if err := b.w.room(); err != nil {
		return errors.Join(err, b.abort())
	}
	tx := b.tx
	b.tx, b.bytes = nil, 0
	return tx.Commit()
}

func (b *batch) abort() error {
	if b.tx == nil {
		return nil
	}
	tx := b.tx
	b.tx = nil
	return tx.Rollback()
}

// Size is the number of bytes of the finished file.
func (w *Writer) Size() int64 { return w.tx.Size() }

// WriteTo writes the finished file.
func (w *Writer) WriteTo(out io.Writer) (int64, error) { return w.tx.WriteTo(out) }

// Close removes everything.
func (w *Writer) Close() error {
	var errs []error
	if w.tx != nil {
		errs = append(errs, w.tx.Rollback())
	}
	if w.db != nil {
		errs = append(errs, w.db.Close())
	}
	if w.runs != nil {
		errs = append(errs, w.runs.close())
	}
	return errors.Join(append(errs, os.RemoveAll(w.dir))...)
}
