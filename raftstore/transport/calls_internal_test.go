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

// TestCallTooLarge: a call that fits into no message has an end of its own whether or not the peer is
// there, so that it is not taken for one that may be sent again; the largest that fits is taken.
func TestCallTooLarge(t *testing.T) {
	payload := make([]byte, maxMessageBytes-itemOverhead) // never touched
	for _, up := range []bool{false, true} {
		q := newCallQueue(1 << 20)
		q.setUp(up)
		if err := q.start(&call{payload: payload, done: make(chan struct{})}); !errors.Is(err, ErrTooLarge) {
			t.Errorf("up %v: %v", up, err)
		}
		err := q.start(&call{payload: payload[1:], done: make(chan struct{})})
		if up && err != nil || !up && !errors.Is(err, ErrUnavailable) {
			t.Errorf("one byte less, up %v: %v", up, err)
		}
	}
}
