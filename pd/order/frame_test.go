package order

import (
	"context"
	"errors"
	"testing"
	"time"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// deliveredAt is a replica that looks at the client's marks while items are handed to it: it may
// apply and answer at once.
type deliveredAt struct {
	c      *Client
	marks  []pdpb.Mark
	newest []uint64
}

func (d *deliveredAt) BuildReport() (pdpb.Report, bool) { return pdpb.Report{}, false }
func (d *deliveredAt) Leading() bool                    { return false }
func (d *deliveredAt) Wanted() uint64                   { return 1 }
func (d *deliveredAt) Deliver([]pdpb.Item) {
	_, newest, _ := d.c.State(2)
	d.marks, d.newest = append(d.marks, d.c.Mark()), append(d.newest, newest)
}

// frameClient follows a member that exists only in this test's frames.
func frameClient(t *testing.T) (c *Client, src *deliveredAt, frame func(rev mvcc.Revision, items ...pdpb.Item)) {
	c = NewClient(ClientConfig{ClientOptions: ClientOptions{Self: 2, Members: []raftid.StoreID{1}, Session: 1}})
	t.Cleanup(c.Close)
	src = &deliveredAt{c: c}
	c.Register(2, src)
	seq := uint64(0)
	frame = func(rev mvcc.Revision, items ...pdpb.Item) {
		seq++
		f := &Frame{Session: c.core.stream.session, Seq: seq, Role: Role{Term: 1, Leader: 1}, Items: items, Mark: pdpb.Mark{Cut: pdpb.Cut(seq), Rev: rev}}
		if seq == 1 {
			f.Acks = []Ack{{Region: 2}}
		}
		c.HandleFrame(1, f)
	}
	frame(1)
	return c, src, frame
}

// TestMarkBeforeItems: when a replica gets an item, its store already knows the mark that has it.
// Who is answered by that replica and reads at the store's newest mark finds what was answered.
func TestMarkBeforeItems(t *testing.T) {
	_, src, frame := frameClient(t)
	frame(7, pdpb.Item{Region: 2, N: 1, Base: 6, Count: 1})
	if len(src.marks) != 1 || src.marks[0].Rev != 7 || src.newest[0] != 1 {
		t.Errorf("at delivery of the item that gives revision 7 the marks were %v, the newest items %v", src.marks, src.newest)
	}
}

// TestWaitRevision waits for a mark of which only the revision is known.
func TestWaitRevision(t *testing.T) {
	c, _, frame := frameClient(t)
	frame(7)
	if err := c.WaitRevision(t.Context(), 7); err != nil {
		t.Errorf("a revision that is there: %v", err)
	}
	done := make(chan error)
	go func() { done <- c.WaitRevision(context.Background(), 9) }()
	for waiting := false; !waiting; {
		c.mu.RLock()
		waiting = len(c.marks) == 1
		if waiting && c.core.want <= 2 {
			t.Error("no mark was asked for (S4)")
		}
		c.mu.RUnlock()
	}
	frame(8)
	select {
	case err := <-done:
		t.Fatalf("back at revision 8: %v", err)
	default:
	}
	frame(9)
	if err := <-done; err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := c.WaitRevision(ctx, 10); !errors.Is(err, ErrTimeout) || len(c.marks) != 0 {
		t.Errorf("%v, %d still wait", err, len(c.marks))
	}
}
