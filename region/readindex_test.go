package region

import (
	"errors"
	"slices"
	"testing"

	"go.etcd.io/raft/v3"

	"braid/raftstore/raftid"
)

// TestConfirmLeader: only an answer to a question that this replica put as leader confirms its term.
func TestConfirmLeader(t *testing.T) {
	h := newHost(1, testDesc, nil)
	type answer struct {
		term uint64
		err  error
	}
	answers := make(chan answer, 1)
	// ask puts the question and has raft asked.
	ask := func() {
		t.Helper()
		h.r.ConfirmLeader(func(term uint64, err error) { answers <- answer{term, err} })
		h.work()
	}
	said := func(what string, n int, want uint64) {
		t.Helper()
		if len(h.log.reads) != n {
			t.Fatalf("%s: %d questions, want %d", what, len(h.log.reads), n)
		}
		h.turn(nil, []raft.ReadState{{Index: 11, RequestCtx: h.log.reads[n-1]}})
		if a := <-answers; a.term != want || a.err != nil {
			t.Errorf("%s: term %d, %v; want %d", what, a.term, a.err, want)
		}
	}
	h.follow(5, 2)
	ask()
	said("a follower, whose leader answers", 1, 0)

	h.lead(6)
	ask()
	if len(h.log.reads) != 1 {
		t.Fatal("asked before the term's opening entry was applied")
	}
	h.commit(11)
	h.work()
	said("a leader", 2, 6)

	// The answer is lost with the leadership; what the successor answers confirms nothing here.
	ask()
	h.follow(7, 3)
	said("a leader that was deposed", 4, 0)

	h.lead(8)
	h.commit(12)
	ask()
	h.r.Stop()
	if a := <-answers; !errors.Is(a.err, ErrStopped) {
		t.Errorf("stopped: %v", a)
	}
}

// TestReadIndexNames: a question of another replica, or of an earlier life of this one, has another name
// than the one that waits, and its answer is not taken for one.
func TestReadIndexNames(t *testing.T) {
	read := map[*host][]uint64{}
	first := func(id raftid.ReplicaID, life uint64) (*host, []byte) {
		h := newHost(id, testDesc, func(c *Config) { c.Life = life })
		h.follow(5, 3)
		h.r.ReadIndex(func(index uint64, _ error) { read[h] = append(read[h], index) })
		h.work()
		return h, h.log.reads[0]
	}
	h, own := first(1, 2)
	_, earlier := first(1, 1)
	_, other := first(2, 2)
	for name, ctx := range map[string][]byte{"an earlier life": earlier, "another replica": other} {
		h.turn(nil, []raft.ReadState{{Index: 11, RequestCtx: ctx}})
		if len(read[h]) > 0 {
			t.Fatalf("the answer to %s was taken", name)
		}
	}
	h.turn(nil, []raft.ReadState{{Index: 12, RequestCtx: own}})
	if !slices.Equal(read[h], []uint64{12}) {
		t.Errorf("answered: %v", read[h])
	}
}
