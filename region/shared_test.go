package region

import (
	"testing"

	"braid/raftstore"
)

// TestSharedFsyncReportsWhatIsAppended: with a shared sync pd must hear of an entry when it is
// appended. A report that waited for Work would come after the commit, and the cut would need a
// sync of its own.
func TestSharedFsyncReportsWhatIsAppended(t *testing.T) {
	for _, shared := range []bool{true, false} {
		h := newHost(1, testDesc, func(c *Config) { c.SharedFsync = shared })
		h.lead(6)
		h.commit(h.log.LastIndex())
		h.r.Write(&Write{Txn: putTxn("b", "1"), Reply: nil})
		h.r.Work(h.log)
		before := h.stream.reports
		h.r.Update(h.log, raftstore.Update{Appended: h.log.appended, Committed: h.log.committed})
		rep, _ := h.r.BuildReport()
		if told := h.stream.reports > before; told != shared || (rep.Upto == h.log.LastIndex()) != shared {
			t.Errorf("shared %v: report announced %v, through %d of %d", shared, told, rep.Upto, h.log.LastIndex())
		}
	}
}
