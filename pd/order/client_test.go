package order

import (
	"testing"

	"braid/mvcc"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// calls is a Net whose calls wait for the test to answer them.
type calls []call

type call struct {
	to   raftid.StoreID
	m    Method
	done func([]byte, error)
}

func (c *calls) Call(to raftid.StoreID, m Method, _ []byte, done func([]byte, error)) {
	*c = append(*c, call{to, m, done})
}

func (c *calls) last(t *testing.T, to raftid.StoreID, m Method) call {
	t.Helper()
	if len(*c) == 0 || (*c)[len(*c)-1].to != to || (*c)[len(*c)-1].m != m {
		t.Fatalf("the last call is not %v to %v: %v", m, to, *c)
	}
	return (*c)[len(*c)-1]
}

// TestReadersTurn has pd's leader fall silent with a request for a read point: whoever waits for it,
// and whoever came since, gets the answer of the next leader, once; the old one's counts no more.
func TestReadersTurn(t *testing.T) {
	net := &calls{}
	c := NewClient(ClientConfig{ClientOptions: ClientOptions{Self: 9, Members: []raftid.StoreID{1, 2, 3}, Session: 1}, Net: net})
	c.HandleRole(Role{Term: 1, Leader: 1})
	var got []pdpb.ReadPoint
	ask := func() {
		c.ReadPointFunc(func(p pdpb.ReadPoint, err error) {
			if err != nil {
				t.Errorf("read point: %v", err)
			}
			got = append(got, p)
		})
	}
	ask()
	silent := net.last(t, 1, MethodReadPoint)
	ask() // waits for the next request (S1)
	net.last(t, 1, MethodReadPoint)

	c.HandleRole(Role{Term: 2, Leader: 2})
	answer := func(rev mvcc.Revision) []byte {
		return AppendReply(nil, MethodReadPoint, &Reply{Role: Role{Term: 2, Leader: 2}, ReadPoint: pdpb.ReadPoint{Cut: 5, Rev: rev}})
	}
	next := net.last(t, 2, MethodReadPoint)
	silent.done(answer(3), nil)
	if len(got) > 0 {
		t.Fatalf("the answer to a request that was given up counted: %v", got)
	}
	next.done(answer(7), nil)
	if len(got) != 2 || got[0].Rev != 7 || got[1].Rev != 7 {
		t.Fatalf("readers got %v", got)
	}
	if n := len(*net); n != 3 { // one of them opens the stream
		t.Fatalf("%d calls: %v", n, *net)
	}
}
