package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"braid/cmd/tests/proc"
)

// Answer is what a store said: a message, or a code and text. Shape is empty unless a stream broke
// a rule about which chunk carries what.
type Answer struct {
	Msg   proto.Message
	Code  codes.Code
	Text  string
	Shape string
}

// OK says whether the call succeeded.
func (a Answer) OK() bool { return a.Code == codes.OK }

func (a Answer) String() string {
	if !a.OK() {
		return fmt.Sprintf("%s: %s", a.Code, a.Text)
	}
	s := text(a.Msg)
	if a.Shape != "" {
		s += "   [" + a.Shape + "]"
	}
	return s
}

// Target is one store under test: a process and a connection to it.
type Target struct {
	Name string
	node *proc.Node
	conn *grpc.ClientConn
	// tamper, when set, stands between the store and the comparison: the planted bugs.
	tamper func(t *Target, r Request, call func(Request) Answer) Answer
}

const (
	startTimeout = 30 * time.Second
	callTimeout  = 15 * time.Second
)

func startTarget(ctx context.Context, name, bin, dir string, args ...string) (*Target, error) {
	cluster, err := proc.NewCluster(bin, dir, 1, args...)
	if err != nil {
		return nil, err
	}
	t := &Target{Name: name, node: cluster.Nodes[0]}
	startCtx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := t.node.Start(startCtx); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", name, err), t.node.Kill())
	}
	t.conn, err = grpc.NewClient(t.node.Endpoint(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.MaxCallSendMsgSize(math.MaxInt32)))
	if err != nil {
		return nil, errors.Join(err, t.node.Kill())
	}
	return t, nil
}

func (t *Target) close() error {
	return errors.Join(t.conn.Close(), t.node.Kill())
}

// restart kills the store the hard way and starts it again on its data: answers must not change.
func (t *Target) restart(ctx context.Context) error {
	if err := t.node.Kill(); err != nil {
		return err
	}
	startCtx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := t.node.Start(startCtx); err != nil {
		return fmt.Errorf("%s after kill -9: %w", t.Name, err)
	}
	t.conn.ResetConnectBackoff()
	return nil
}

// Do sends the request and returns what came back.
func (t *Target) Do(ctx context.Context, r Request) Answer {
	call := func(r Request) Answer { return t.call(ctx, r) }
	if t.tamper != nil {
		return t.tamper(t, r, call)
	}
	return call(r)
}

func (t *Target) call(ctx context.Context, r Request) Answer {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	kv, maintenance, leases := pb.NewKVClient(t.conn), pb.NewMaintenanceClient(t.conn), pb.NewLeaseClient(t.conn)
	var msg proto.Message
	var err error
	shape := ""
	switch m := r.Msg.(type) {
	case *pb.RangeRequest:
		if r.Method == "RangeStream" {
			msg, shape, err = rangeStream(ctx, kv, m)
		} else {
			msg, err = kv.Range(ctx, m, grpc.WaitForReady(true))
		}
	case *pb.PutRequest:
		msg, err = kv.Put(ctx, m, grpc.WaitForReady(true))
	case *pb.DeleteRangeRequest:
		msg, err = kv.DeleteRange(ctx, m, grpc.WaitForReady(true))
	case *pb.TxnRequest:
		msg, err = kv.Txn(ctx, m, grpc.WaitForReady(true))
	case *pb.CompactionRequest:
		msg, err = kv.Compact(ctx, m, grpc.WaitForReady(true))
	case *pb.HashKVRequest:
		msg, err = maintenance.HashKV(ctx, m, grpc.WaitForReady(true))
	case *pb.StatusRequest:
		msg, err = maintenance.Status(ctx, m, grpc.WaitForReady(true))
	case *pb.MemberListRequest:
		msg, err = pb.NewClusterClient(t.conn).MemberList(ctx, m, grpc.WaitForReady(true))
	case *pb.LeaseGrantRequest:
		msg, err = leases.LeaseGrant(ctx, m, grpc.WaitForReady(true))
	case *pb.LeaseRevokeRequest:
		msg, err = leases.LeaseRevoke(ctx, m, grpc.WaitForReady(true))
	case *pb.LeaseKeepAliveRequest:
		msg, err = keepAlive(ctx, leases, m)
	case *pb.LeaseTimeToLiveRequest:
		msg, err = leases.LeaseTimeToLive(ctx, m, grpc.WaitForReady(true))
	case *pb.LeaseLeasesRequest:
		msg, err = leases.LeaseLeases(ctx, m, grpc.WaitForReady(true))
	default:
		panic(fmt.Sprintf("no call for %T", m))
	}
	if err != nil {
		s := status.Convert(err)
		return Answer{Code: s.Code(), Text: s.Message()}
	}
	return Answer{Msg: msg, Shape: shape}
}

// rangeStream merges the chunks. How many there are is the store's business; that only the last one
// carries header, more and count is the contract.
func rangeStream(ctx context.Context, kv pb.KVClient, req *pb.RangeRequest) (*pb.RangeResponse, string, error) {
	stream, err := kv.RangeStream(ctx, req, grpc.WaitForReady(true))
	if err != nil {
		return nil, "", err
	}
	merged := &pb.RangeResponse{}
	shape := ""
	for chunks := 0; ; chunks++ {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			if chunks == 0 {
				shape = "no chunk at all"
			}
			return merged, shape, nil
		}
		if err != nil {
			return nil, "", err
		}
		if merged.Header != nil || merged.More || merged.Count != 0 {
			shape = fmt.Sprintf("chunk %d, not the last, has header, more or count", chunks-1)
		}
		proto.Merge(merged, resp.RangeResponse)
	}
}
