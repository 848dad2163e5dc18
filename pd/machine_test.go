package pd

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"braid/mvcc"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// parseBootstrap reads lines "store 1 name" and "region 2 a..c 1,2,3"; "." is an open end.
func parseBootstrap(t *testing.T, input string) *Bootstrap {
	b := &Bootstrap{ClusterID: 0xb1}
	for _, line := range strings.Split(input, "\n") {
		f := strings.Fields(line)
		switch {
		case len(f) == 0:
		case f[0] == "single":
			b.Mode = pdpb.SingleGroup
		case f[0] == "store":
			var id uint64
			if _, err := fmt.Sscan(f[1], &id); err != nil {
				t.Fatal(err)
			}
			b.Stores = append(b.Stores, pdpb.Store{ID: raftid.StoreID(id), Name: f[2], PeerURLs: []string{"http://" + f[2]}})
		case f[0] == "region":
			d := pdpb.Descriptor{Epoch: 1}
			if _, err := fmt.Sscan(f[1], &d.ID); err != nil {
				t.Fatal(err)
			}
			from, to, _ := strings.Cut(f[2], "..")
			d.Span.Start = []byte(from)
			if to != "." {
				d.Span.End = []byte(to)
			}
			for i, s := range strings.Split(f[3], ",") {
				var id uint64
				if _, err := fmt.Sscan(s, &id); err != nil {
					t.Fatal(err)
				}
				d.Peers = append(d.Peers, pdpb.Peer{Replica: raftid.ReplicaID(i + 1), Store: raftid.StoreID(id)})
			}
			b.Regions = append(b.Regions, d)
		}
	}
	return b
}

func TestMachine(t *testing.T) {
	datadriven.Walk(t, "testdata/machine", func(t *testing.T, path string) {
		m := NewMachine(order.Mutants{})
		apply := func(t *testing.T, e *Entry) string {
			res, err := m.Apply(e.Append(nil))
			if err != nil {
				return err.Error() + "\n"
			}
			// Every state goes through its encoding.
			n, err := LoadMachine(m.AppendState(nil), order.Mutants{})
			if err != nil || n.String() != m.String() {
				t.Fatalf("state changed by encoding: %v\n%v%v", err, m, n)
			}
			m = n
			return res.String()
		}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "bootstrap":
				return apply(t, &Entry{Bootstrap: parseBootstrap(t, d.Input)})
			case "cut":
				p := &order.CutProposal{}
				for _, line := range strings.Split(d.Input, "\n") {
					var r pdpb.Report
					var n uint64
					var name string
					if k, _ := fmt.Sscanf(line, "r%d upto=%d cum=%d", &r.Region, &r.Upto, &r.Cum); k == 3 {
						r.UptoTerm = 1
						r.Runs = []pdpb.Run{{Index: r.Upto, Cum: r.Cum}}
						p.Parts = append(p.Parts, r)
					} else if k, _ := fmt.Sscanf(line, "alloc %d", &n); k == 1 {
						p.Events = append(p.Events, order.Event{Kind: order.EventAllocIDs, N: n})
					} else if k, _ := fmt.Sscanf(line, "compact %d", &n); k == 1 {
						p.Events = append(p.Events, order.Event{Kind: order.EventCompact, Rev: mvcc.Revision(n)})
					} else if k, _ := fmt.Sscanf(line, "store %d %s", &n, &name); k == 2 {
						p.Events = append(p.Events, order.Event{Kind: order.EventRegisterStore, Store: pdpb.Store{ID: raftid.StoreID(n), Name: name}})
					} else {
						t.Fatalf("cut: %q", line)
					}
				}
				return apply(t, &Entry{Cut: p})
			case "find":
				r, ok := m.Directory().Find([]byte(d.CmdArgs[0].Key))
				return fmt.Sprintf("r%d %v\n", r.ID, ok)
			case "state":
				return m.String()
			}
			t.Fatalf("unknown command %q", d.Cmd)
			return ""
		})
	})
}

func TestMachineRefusesDamage(t *testing.T) {
	m := NewMachine(order.Mutants{})
	b := parseBootstrap(t, "store 1 a\nregion 2 ..m 1\nregion 3 m... 1")
	if _, err := m.Apply((&Entry{Bootstrap: b}).Append(nil)); err != nil {
		t.Fatal(err)
	}
	state := m.AppendState(nil)
	for i := range state {
		if _, err := LoadMachine(state[:i], order.Mutants{}); !errors.Is(err, pdpb.ErrCorrupt) {
			t.Fatalf("state cut at %d of %d: %v", i, len(state), err)
		}
	}
	if _, err := LoadMachine(append(state, 0), order.Mutants{}); !errors.Is(err, pdpb.ErrCorrupt) {
		t.Fatalf("longer state: %v", err)
	}
}
