package region

import (
	"errors"
	"strings"
	"testing"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/region/regionpb"
)

// TestRefusedPrepareFreesItsLock: a part that is too large, or for which there is no room beside those
// that are prepared, leaves nothing locked: who waits goes on in the same turn.
func TestRefusedPrepareFreesItsLock(t *testing.T) {
	h := newHost(1, testDesc, func(c *Config) { c.Limits.PrepareBytesMax, c.Limits.PreparedBytesMax = 2000, 3000 })
	h.lead(6)
	h.commit(11)
	prepare := func(attempt pdpb.AttemptID, key string, bytes int) (refused error) {
		t.Helper()
		var id regionpb.LockID
		h.r.Lock(&Lock{Attempt: attempt, Age: attempt, Owner: 1, Spans: []regionpb.LockSpan{{Span: mvcc.Key([]byte(key)), Exclusive: true}},
			Reply: func(l regionpb.LockGrant, err error) { id, refused = l.ID, err }})
		h.work()
		if refused != nil {
			t.Fatalf("no lock of %s: %v", key, refused)
		}
		h.r.Prepare(&Prepare{Request: &regionpb.PrepareRequest{Region: testDesc.ID, Attempt: attempt, Lock: id, Participants: []regionpb.RegionID{testDesc.ID},
			Effects: []regionpb.Effect{{Key: []byte(key), Value: []byte(strings.Repeat("x", bytes)), Version: 1}}, Subs: []int64{0}}, Reply: func(_ mvcc.Revision, err error) { refused = err }})
		h.work()
		return refused
	}
	if err := prepare(1, "a", 1800); err != nil {
		t.Fatal(err)
	}
	h.commit(h.log.LastIndex())
	rep, _ := h.r.BuildReport()
	it, _ := newFakeOrder(&testDesc).order(&rep, 0)
	h.r.Deliver([]pdpb.Item{*it})
	h.work()
	for _, c := range []struct {
		attempt pdpb.AttemptID
		key     string
		bytes   int
		want    regionpb.Code
	}{{2, "b", 5000, regionpb.TooLarge}, {3, "c", 1500, regionpb.TooManyRequests}} {
		if err := prepare(c.attempt, c.key, c.bytes); !errors.Is(err, regionpb.ErrorOf(c.want)) {
			t.Fatalf("a part of %d bytes: %v", c.bytes, err)
		}
		before := h.log.LastIndex()
		var fates []error
		h.r.Write(&Write{Txn: putTxn(c.key, "1"), Reply: reply(&fates)})
		h.work()
		if len(fates) > 0 || h.log.LastIndex() != before+1 || strings.Contains(h.r.Locks(), c.key+"\"") {
			t.Errorf("after %v a put still waits: %s", c.want, h.r.Locks())
		}
		h.commit(h.log.LastIndex())
	}
}
