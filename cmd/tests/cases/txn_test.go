package cases

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestTxnAllOrNothing is https://github.com/etcd-io/etcd/issues/7826: case 12. Transactions of 128
// puts over the regions, with nodes killed at random, are in or out as a whole at every moment.
func TestTxnAllOrNothing(t *testing.T) {
	perLayout(t, func(t *testing.T, l layout) {
		s := start(t, 3, l)
		ops := func(n int, value string) []*pb.RequestOp {
			var list []*pb.RequestOp
			for i := range n {
				list = append(list, opPut(fmt.Sprintf("%s/%03d", threeKeys[i%3], i), value))
			}
			return list
		}
		_, err := s.kv(0).Txn(within(t, time.Minute), &pb.TxnRequest{Success: ops(129, "x")})
		if !refused(err, codes.InvalidArgument, "etcdserver: too many operations in txn request") {
			t.Errorf("129 puts: %v", err)
		}

		watched := s.client().Watch(within(t, 15*time.Minute), "a", watchRange(2)...)
		tries := scaled(120, 1000)
		stop := make(chan struct{})
		var readers sync.WaitGroup
		var reads atomic.Int64
		broken := make(chan error, 8)
		for r := range 4 {
			readers.Go(func() {
				for node := r; ; node++ {
					select {
					case <-stop:
						return
					default:
					}
					if err := s.readWhole(node%3, r%2 == 1); err != nil {
						broken <- err
						return
					}
					reads.Add(1)
				}
			})
		}

		acked := map[int64]string{} // revision -> value
		unknown := map[string]bool{}
		failures := map[codes.Code]int{}
		rng := rand.New(rand.NewPCG(12, 12))
		down, kills, away := -1, 0, 0 // away: tries through a node that is down
		for i := range tries {
			// Every 20 tries a node dies somewhere in one, often the one that is spoken to, and the one
			// before comes back.
			var killed chan error
			if i%20 == 10 {
				if down >= 0 {
					s.revive(down)
				}
				down = rng.IntN(3)
				kills++
				killed = make(chan error, 1)
				after := time.Duration(rng.IntN(8000)) * time.Microsecond
				go func() {
					if err := waitFor(t.Context(), after); err != nil {
						killed <- err
						return
					}
					killed <- s.Nodes[down].Kill()
				}()
			}
			value := fmt.Sprintf("try %d", i)
			node := i % 3
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			r, err := s.kv(node).Txn(ctx, &pb.TxnRequest{Success: ops(128, value)})
			cancel()
			if killed != nil {
				if err := <-killed; err != nil {
					t.Fatal(err)
				}
			}
			if err == nil {
				acked[r.Header.Revision] = value
				continue
			}
			failures[status.Code(err)]++
			if node == down {
				away++
			}
			unknown[value] = true
			if c := status.Code(err); c != codes.Unavailable && c != codes.DeadlineExceeded {
				t.Fatalf("try %d: %v", i, err)
			}
		}
		if down >= 0 {
			s.revive(down)
		}
		// An unknown outcome is decided without the client's help: nothing stays locked.
		began := time.Now()
		for _, k := range threeKeys {
			for {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				_, err := s.kv(0).Put(ctx, &pb.PutRequest{Key: []byte(k + "/end"), Value: []byte("x")})
				cancel()
				if err == nil {
					break
				}
				if time.Since(began) > time.Minute {
					t.Fatalf("%s is still locked: %v", k, err)
				}
			}
		}
		end := s.txn(ops(128, "end")...)
		settled := time.Since(began)
		close(stop)
		readers.Wait()
		select {
		case err := <-broken:
			t.Fatal(err)
		default:
		}

		// One reply of the watch holds all 128 events of a try, at one revision, versions one apart.
		version, in := int64(0), map[string]int64{}
		for done := false; !done; {
			resp, ok := <-watched
			if !ok || resp.Err() != nil {
				t.Fatalf("the watch ended: %v", resp.Err())
			}
			byRev := map[int64]int{}
			for i := 0; i < len(resp.Events); i++ {
				kv := resp.Events[i].Kv
				if string(kv.Value) == "x" {
					continue
				}
				if byRev[kv.ModRevision]++; byRev[kv.ModRevision] == 1 {
					version++
					in[string(kv.Value)] = kv.ModRevision
				}
				if kv.Version != version || in[string(kv.Value)] != kv.ModRevision {
					t.Fatalf("%s has version %d at %d (%s), want %d", kv.Key, kv.Version, kv.ModRevision, kv.Value, version)
				}
				done = done || kv.ModRevision == end
			}
			for rev, n := range byRev {
				if n != 128 {
					t.Fatalf("a reply has %d events of revision %d", n, rev)
				}
			}
		}
		for rev, value := range acked {
			if in[value] != rev {
				t.Fatalf("%s was acknowledged at %d and is at %d", value, rev, in[value])
			}
		}
		late := 0
		for value := range unknown {
			if in[value] != 0 {
				late++
			}
		}
		if int(version) != len(acked)+late+1 {
			t.Fatalf("%d transactions are in, %d acknowledged, %d of unknown outcome", version-1, len(acked), late)
		}
		t.Logf("%d of %d acknowledged, %d unknown (%v) of which %d are in, all settled within %v; %d reads", len(acked), tries, len(unknown), failures, late, settled, reads.Load())
		// Through the nodes that live, only the try that saw a node die may fail, or the one after it.
		if failed := len(unknown) - away; failed > 2*kills {
			t.Errorf("%d tries through living nodes were not acknowledged while %d nodes died", failed, kills)
		}
	})
}

// readWhole reads everything through a node and fails unless all keys are of one transaction; errors
// of a node that is away are no failure. With past it reads the revision before again.
func (s *store) readWhole(node int, past bool) error {
	ctx, cancel := context.WithTimeout(s.t.Context(), 3*time.Second)
	defer cancel()
	for rev := int64(0); ; {
		r, err := s.kv(node).Range(ctx, &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z"), Revision: rev})
		if err != nil {
			return nil
		}
		mod, n := int64(0), 0
		for _, kv := range r.Kvs {
			if string(kv.Value) == "x" {
				continue
			}
			if n++; mod == 0 {
				mod = kv.ModRevision
			}
			if kv.ModRevision != mod {
				return fmt.Errorf("a read at %d (header %d) has keys of %d and of %d", rev, r.Header.Revision, mod, kv.ModRevision)
			}
		}
		if n != 0 && n != 128 {
			return fmt.Errorf("a read at %d (header %d) has %d keys", rev, r.Header.Revision, n)
		}
		if !past || rev != 0 || mod <= 2 {
			return nil
		}
		rev = mod - 1
	}
}
