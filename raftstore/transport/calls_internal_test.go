package transport

import (
	"errors"
	"testing"
)

// TestSilentPeer: calls to a peer that falls silent on a standing connection end, each with what is
// known of it, and new ones are refused until it is heard again.
func TestSilentPeer(t *testing.T) {
	q := newCallQueue(1 << 20)
	q.setUp(true)
	open := func() *call {
		c := &call{method: 1, payload: []byte("x"), done: make(chan struct{})}
		if err := q.start(c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	sent := open()
	if b, _ := q.take(); b == nil {
		t.Fatal("nothing to send")
	}
	waiting := open()
	q.setSilent(true)
	<-sent.done
	<-waiting.done
	if !sent.err.Sent || !errors.Is(sent.err, ErrLost) {
		t.Errorf("what was sent ended with %+v", sent.err)
	}
	if waiting.err.Sent || !errors.Is(waiting.err, ErrUnavailable) {
		t.Errorf("what was not sent ended with %+v", waiting.err)
	}
	if err := q.start(&call{done: make(chan struct{})}); !errors.Is(err, ErrUnavailable) {
		t.Errorf("a call to a silent peer: %v", err)
	}
	q.answer(sent.id, replyOK, nil) // late
	q.setSilent(false)
	again := open()
	q.take()
	q.answer(again.id, replyOK, []byte("y"))
	<-again.done
	if again.err != nil || string(again.reply) != "y" {
		t.Errorf("%q, %v", again.reply, again.err)
	}
}
