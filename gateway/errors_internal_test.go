package gateway

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"braid/region/regionpb"
	"braid/router"
)

// wire returns the code and text that gRPC sends for what a handler returns.
func wire(err error) (codes.Code, string) {
	st, ok := status.FromError(err)
	if !ok {
		st = status.FromContextError(err)
	}
	return st.Code(), st.Message()
}

// TestErrorTable has an expectation for every error that can reach the edge, and fails for a code
// that is added without one.
func TestErrorTable(t *testing.T) {
	expect := map[regionpb.Code]struct {
		code codes.Code
		text string
	}{
		regionpb.NotLeader:       {codes.Unavailable, "etcdserver: leader changed"},
		regionpb.EpochMismatch:   {codes.Unavailable, "etcdserver: leader changed"},
		regionpb.RegionNotFound:  {codes.Unavailable, "etcdserver: leader changed"},
		regionpb.VoidByFence:     {codes.Unavailable, "etcdserver: leader changed"},
		regionpb.NotComplete:     {codes.Unavailable, "etcdserver: leader changed"},
		regionpb.TooManyRequests: {codes.Unknown, "etcdserver: too many requests"},
		regionpb.Unknown:         {codes.Unavailable, "etcdserver: request timed out, possibly due to previous leader failure"},
		regionpb.KeyNotFound:     {codes.InvalidArgument, "etcdserver: key not found"},
		regionpb.LeaseNotFound:   {codes.NotFound, "etcdserver: requested lease not found"},
		regionpb.Compacted:       {codes.OutOfRange, "etcdserver: mvcc: required revision has been compacted"},
		regionpb.FutureRevision:  {codes.OutOfRange, "etcdserver: mvcc: required revision is a future revision"},
		regionpb.Stopped:         {codes.Unavailable, "etcdserver: server stopped"},
		regionpb.LockLost:        {codes.Unavailable, "etcdserver: leader changed"},
		regionpb.WritesNothing:   {codes.Unavailable, "etcdserver: leader changed"},
		regionpb.LockBusy:        {codes.Unavailable, "etcdserver: leader changed"},
		regionpb.Aborted:         {codes.Unavailable, "etcdserver: leader changed"},
		regionpb.TooLarge:        {codes.InvalidArgument, "etcdserver: request is too large"},

		regionpb.LeaseExists:        {codes.FailedPrecondition, "etcdserver: lease already exists"},
		regionpb.LeaseNotRegistered: {codes.Unavailable, "etcdserver: leader changed"},
		regionpb.LeaseSpread:        {codes.Unavailable, "etcdserver: leader changed"},
		regionpb.LeaseTermOver:      {codes.Unavailable, "etcdserver: leader changed"},
		regionpb.Abandoned:          {codes.Unavailable, "etcdserver: request timed out"},
	}
	// Codes are numbered from 1; the first without a name is one beyond the last.
	last := regionpb.Code(1)
	for last.String() != regionpb.Code(0).String() {
		last++
	}
	if int(last) != len(expect)+1 || len(regionErrors) != len(expect) {
		t.Errorf("%d codes exist, %d are expected, %d are in the table", last-1, len(expect), len(regionErrors))
	}
	for code, want := range expect {
		for _, err := range []error{
			&regionpb.Error{Code: code}, &regionpb.Error{Code: code, Leader: 7}, fmt.Errorf("wrapped: %w", regionpb.ErrorOf(code)),
		} {
			if c, text := wire(toStatus(err)); c != want.code || text != want.text {
				t.Errorf("%v: %v %q, want %v %q", err, c, text, want.code, want.text)
			}
		}
	}
	for _, c := range []struct {
		err  error
		code codes.Code
		text string
	}{
		{router.ErrTimeout, codes.Unavailable, "etcdserver: request timed out"},
		{fmt.Errorf("%w: %w", router.ErrUnknownOutcome, errors.New("reset")), codes.Unavailable, "etcdserver: request timed out, possibly due to connection lost"},
		{router.ErrNotSent, codes.Unavailable, "etcdserver: request timed out, possibly due to connection lost"},
		{router.ErrNoRegion, codes.Unavailable, "etcdserver: no leader"},
		{context.Canceled, codes.Canceled, "context canceled"},
		{fmt.Errorf("reading: %w", context.DeadlineExceeded), codes.DeadlineExceeded, "reading: context deadline exceeded"},
		{rpctypes.ErrGRPCNoSpace, codes.ResourceExhausted, "etcdserver: mvcc: database space exceeded"},
		{errors.New("disk on fire"), codes.Unknown, "disk on fire"},
		{&regionpb.Error{Code: 200}, codes.Unknown, "region: ?"},
	} {
		if code, text := wire(toStatus(c.err)); code != c.code || text != c.text {
			t.Errorf("%v: %v %q, want %v %q", c.err, code, text, c.code, c.text)
		}
	}
	if toStatus(nil) != nil {
		t.Error("no error became one")
	}
}

// TestLimits fills both limits and empties them again.
func TestLimits(t *testing.T) {
	l := limits{requestsMax: 2, bytesMax: 100}
	for _, c := range []struct {
		enter, leave int // -1: none
		ok           bool
	}{
		{500, -1, true}, // larger than the limit, but alone
		{1, -1, false},  // bytes
		{0, 0, true},    // which a read does not have
		{1, 500, false}, // still; then the 500 leave
		{60, -1, true},
		{40, -1, true},
		{0, -1, false}, // requests
	} {
		if got := l.enter(c.enter); got != c.ok {
			t.Errorf("%+v: %v", c, got)
		}
		if c.leave >= 0 {
			l.leave(c.leave)
		}
	}
	l.leave(60)
	l.leave(40)
	if l.requests.Load() != 0 || l.bytes.Load() != 0 {
		t.Errorf("%d requests and %d bytes are left", l.requests.Load(), l.bytes.Load())
	}
}
