package bench

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Target is a store to be measured.
type Target struct {
	Endpoints          []string
	TLS                *tls.Config // nil: none, unless an endpoint says https
	Username, Password string
}

// dialTimeout bounds the wait for a store's first answer.
const dialTimeout = 5 * time.Second

// dial opens n connections, connection i to endpoint i modulo their number, and makes sure that
// each of these endpoints answers.
func (t *Target) dial(ctx context.Context, n int) ([]*clientv3.Client, error) {
	if len(t.Endpoints) == 0 {
		return nil, errors.New("no endpoints are given")
	}
	conns := make([]*clientv3.Client, 0, n)
	for i := range n {
		c, err := clientv3.New(clientv3.Config{
			Context:   context.WithoutCancel(ctx), // requests have contexts of their own
			Endpoints: []string{t.Endpoints[i%len(t.Endpoints)]},
			TLS:       t.TLS, Username: t.Username, Password: t.Password,
			DialTimeout: dialTimeout,
			// Ranges of many large values, and transactions of many puts, are what is measured.
			MaxCallSendMsgSize: 1 << 30, MaxCallRecvMsgSize: 1<<31 - 1,
			Logger: zap.NewNop(),
		})
		if err != nil {
			closeAll(conns)
			return nil, fmt.Errorf("%s: %w", t.Endpoints[i%len(t.Endpoints)], err)
		}
		conns = append(conns, c)
	}
	// The first request of a connection pays for its set-up; it is not one that is measured.
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i, c := range conns {
		wg.Go(func() {
			// Not through clientv3, which would try again until the time is up and forget why.
			kv := pb.NewKVClient(c.ActiveConnection())
			if _, err := kv.Range(ctx, &pb.RangeRequest{Key: []byte{0}, CountOnly: true, Serializable: true}); err != nil {
				reason := errorText(err)
				if ctx.Err() != nil {
					reason = "timeout of the client"
				}
				errs[i] = fmt.Errorf("%s does not answer: %s", c.Endpoints()[0], reason)
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			closeAll(conns)
			return nil, err // one says it; all would say the same
		}
	}
	return conns, nil
}

func closeAll(conns []*clientv3.Client) {
	for _, c := range conns {
		_ = c.Close() // nothing is under way
	}
}

// errorText is the kind of an error: its gRPC code and etcd's text, without what differs from one
// request to the next.
func errorText(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return "timeout of the client"
	}
	var e rpctypes.EtcdError
	if errors.As(err, &e) {
		return fmt.Sprintf("%s: %s", e.Code(), e.Error())
	}
	if s, ok := status.FromError(err); ok && s.Code() != codes.Unknown {
		text := s.Message()
		if reason, failed := ConnectionError(text); failed {
			return reason
		}
		if s.Code() == codes.Unavailable { // names sockets and their ports
			text, _, _ = strings.Cut(text, "{")
		}
		const textMax = 120
		if len(text) > textMax {
			text = text[:textMax] + "..."
		}
		return fmt.Sprintf("%s: %s", s.Code(), text)
	}
	return err.Error()
}

// ConnectionError is what is to be said of gRPC's text about a connection that was not made: the
// reason, without the layers that passed it on. ok is false for any other text.
func ConnectionError(text string) (reason string, ok bool) {
	_, rest, ok := strings.Cut(text, `connection error: desc = `)
	if !ok {
		return "", false
	}
	quoted, err := strconv.QuotedPrefix(rest)
	if err != nil {
		return "", false
	}
	reason, err = strconv.Unquote(quoted)
	if err != nil {
		return "", false
	}
	reason = strings.TrimPrefix(reason, "transport: ")
	if dial, ok := strings.CutPrefix(reason, "Error while dialing: "); ok {
		// The last part is the reason; those before it name the address, which is said already.
		reason = strings.TrimSpace(dial[strings.LastIndex(dial, ": ")+1:])
	}
	return reason, true
}
