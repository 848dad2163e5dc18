package gateway

import (
	"context"
	"errors"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"braid/region/regionpb"
	"braid/router"
)

// regionErrors gives each code of a region its etcd error. What may be tried again is Unavailable,
// and so is what may have happened: clientv3 repeats reads on that code, and no write.
var regionErrors = map[regionpb.Code]error{
	// The router repeats these until the request's time is up; one that comes through all the
	// same is told to the client as what it is: leadership or placement moved.
	regionpb.NotLeader:      rpctypes.ErrGRPCLeaderChanged,
	regionpb.EpochMismatch:  rpctypes.ErrGRPCLeaderChanged,
	regionpb.RegionNotFound: rpctypes.ErrGRPCLeaderChanged,
	regionpb.VoidByFence:    rpctypes.ErrGRPCLeaderChanged,
	regionpb.NotComplete:    rpctypes.ErrGRPCLeaderChanged,
	// etcd's server returns its client-side error value here, which has the text and no gRPC
	// code: on the wire it is Unknown. Clients go by the text.
	regionpb.TooManyRequests: rpctypes.ErrTooManyRequests,
	regionpb.Unknown:         rpctypes.ErrGRPCTimeoutDueToLeaderFail,
	regionpb.KeyNotFound:     rpctypes.ErrGRPCKeyNotFound,
	regionpb.LeaseNotFound:   rpctypes.ErrGRPCLeaseNotFound,
	regionpb.Compacted:       rpctypes.ErrGRPCCompacted,
	regionpb.FutureRevision:  rpctypes.ErrGRPCFutureRev,
	regionpb.Stopped:         rpctypes.ErrGRPCStopped,
	regionpb.LeaseExists:     rpctypes.ErrGRPCLeaseExist,
	regionpb.TooLarge:        rpctypes.ErrGRPCRequestTooLarge,
	regionpb.Abandoned:       rpctypes.ErrGRPCTimeout,
	// Attempts over several regions that ended so are repeated; what is left is a request whose
	// time was up before one succeeded.
	regionpb.LeaseNotRegistered: rpctypes.ErrGRPCLeaderChanged,
	regionpb.LeaseSpread:        rpctypes.ErrGRPCLeaderChanged,
	regionpb.LeaseTermOver:      rpctypes.ErrGRPCLeaderChanged,
	regionpb.LockLost:           rpctypes.ErrGRPCLeaderChanged,
	regionpb.LockBusy:           rpctypes.ErrGRPCLeaderChanged,
	regionpb.WritesNothing:      rpctypes.ErrGRPCLeaderChanged, // the router reads instead
	regionpb.Aborted:            rpctypes.ErrGRPCLeaderChanged,
}

// routerErrors are the router's own.
var routerErrors = []struct{ is, status error }{
	{router.ErrTimeout, rpctypes.ErrGRPCTimeout},
	{router.ErrUnknownOutcome, rpctypes.ErrGRPCTimeoutDueToConnectionLost},
	{router.ErrNotSent, rpctypes.ErrGRPCTimeoutDueToConnectionLost},
	{router.ErrNoRegion, rpctypes.ErrGRPCNoLeader},
	{router.ErrOvertaken, status.Error(codes.Aborted, "braid: a compaction passed the snapshot's revision each time it was begun: save it again, or compact less often")},
}

// toStatus is the only place where errors become gRPC's.
func toStatus(err error) error {
	if err == nil {
		return nil
	}
	// gRPC itself turns these into Canceled and DeadlineExceeded.
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	var re *regionpb.Error
	if errors.As(err, &re) {
		if st, ok := regionErrors[re.Code]; ok {
			return st
		}
	}
	for _, e := range routerErrors {
		if errors.Is(err, e.is) {
			return e.status
		}
	}
	return status.Error(codes.Unknown, err.Error())
}
