package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"braid/cmd/tests/proc"
)

// past reads the store's history, a whole state per revision, and keeps it. Compactions go through
// it, so that nothing is removed that has not been read. One goroutine at a time uses it.
type past struct {
	t      *Traffic
	conns  []*grpc.ClientConn
	states [][]*mvccpb.KeyValue // as History.States
	client int                  // id under which its compactions are recorded
}

const (
	pastReaders = 6
	pastTimeout = 5 * time.Second
)

func newPast(t *Traffic) (*past, error) {
	p := &past{t: t, states: make([][]*mvccpb.KeyValue, 1), client: clients}
	for _, endpoint := range t.endpoints {
		conn, err := dial(endpoint)
		if err != nil {
			return nil, err
		}
		p.conns = append(p.conns, conn)
	}
	return p, nil
}

func (p *past) close() {
	for _, conn := range p.conns {
		_ = conn.Close() // read-only use, all answers are in
	}
}

// read asks one endpoint after another until one answers.
func (p *past) read(ctx context.Context, at int, revision int64) (*pb.RangeResponse, error) {
	var resp *pb.RangeResponse
	err := proc.Poll(ctx, 100*time.Millisecond, func() (bool, error) {
		at++
		callCtx, cancel := context.WithTimeout(ctx, pastTimeout)
		defer cancel()
		var err error
		resp, err = pb.NewKVClient(p.conns[at%len(p.conns)]).Range(callCtx, &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z"), Revision: revision})
		if code := status.Code(err); err != nil && code != codes.Unavailable && code != codes.DeadlineExceeded && code != codes.Unknown {
			return false, fmt.Errorf("reading revision %d: %w", revision, err)
		}
		return err == nil, nil
	})
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// current is the store's revision now.
func (p *past) current(ctx context.Context) (int64, error) {
	resp, err := p.read(ctx, 0, 0)
	return resp.GetHeader().GetRevision(), err
}

// readThrough reads all revisions up to last.
func (p *past) readThrough(ctx context.Context, last int64) error {
	first := int64(len(p.states))
	if last < first {
		return nil
	}
	states := make([][]*mvccpb.KeyValue, last-first+1)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for reader := range int64(pastReaders) {
		wg.Go(func() {
			for rev := first + reader; rev <= last; rev += pastReaders {
				resp, err := p.read(ctx, int(reader), rev)
				if err != nil {
					cancel(err)
					return
				}
				states[rev-first] = resp.Kvs
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	p.states = append(p.states, states...)
	return nil
}

// compact reads the past through revision and compacts there, again and again until the answer is
// definite; each attempt is recorded.
func (p *past) compact(ctx context.Context, revision int64) error {
	if err := p.readThrough(ctx, revision); err != nil {
		return err
	}
	at := 0
	return proc.Poll(ctx, 200*time.Millisecond, func() (bool, error) {
		op := &Op{ID: int(p.t.ids.Add(1)), Client: p.client, Req: &pb.CompactionRequest{Revision: revision}}
		callCtx, cancel := context.WithTimeout(ctx, timeoutMax)
		defer cancel()
		op.Call = time.Since(p.t.start)
		err := send(callCtx, pb.NewKVClient(p.conns[at%len(p.conns)]), op, "")
		op.Return = time.Since(p.t.start)
		at++
		if err != nil {
			op.Resp, op.Err = nil, status.Convert(err).Message()
			p.t.record(op)
			return status.Code(err) == codes.OutOfRange, nil
		}
		p.t.record(op)
		return true, nil
	})
}
