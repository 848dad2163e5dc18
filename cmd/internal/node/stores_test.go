package node

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"braid/raftstore/transport"
	"braid/region/regionpb"
	"braid/router"
)

// TestCallErrors: what was not sent may be sent again, but for what no connection takes, which is the
// client's to make smaller; and what was sent is neither.
func TestCallErrors(t *testing.T) {
	for _, x := range []struct {
		err               error
		notSent, tooLarge bool
	}{
		{nil, false, false},
		{&transport.CallError{Err: transport.ErrUnavailable}, true, false},
		{&transport.CallError{Err: transport.ErrOverloaded}, true, false},
		{&transport.CallError{Err: fmt.Errorf("%w: full", transport.ErrRefused)}, true, false},
		{&transport.CallError{Err: transport.ErrTooLarge}, false, true},
		{&transport.CallError{Err: transport.ErrLost, Sent: true}, false, false},
		{&transport.CallError{Err: transport.ErrTooLarge, Sent: true}, false, false},
		{context.Canceled, false, false},
	} {
		err := callError(x.err)
		if got := errors.Is(err, router.ErrNotSent); got != x.notSent {
			t.Errorf("%v: not sent: %v", x.err, got)
		}
		if got := errors.Is(err, regionpb.ErrorOf(regionpb.TooLarge)); got != x.tooLarge {
			t.Errorf("%v: too large: %v", x.err, got)
		}
		if !errors.Is(err, x.err) {
			t.Errorf("%v became %v", x.err, err)
		}
	}
}
