package gateway_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the expectations in testdata")

// TestGolden sends the requests of testdata/*.txt to a gateway over three regions and compares the
// answers with those written below each request. A file is a list of blocks: a line "METHOD" and
// the request as prototext, a line "----", the answer as canonical text. go test -rewrite writes the
// answers anew; what changes is to be judged against etcd.
func TestGolden(t *testing.T) {
	entries, err := os.ReadDir("testdata")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".txt") {
			continue
		}
		t.Run(strings.TrimSuffix(e.Name(), ".txt"), func(t *testing.T) {
			path := "testdata/" + e.Name()
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			f := start(t, nil, "g", "p")
			var out strings.Builder
			for _, block := range strings.Split(strings.TrimSpace(string(data)), "\n\n") {
				ask, want, _ := strings.Cut(block, "\n----\n")
				got := answer(t, f, ask)
				if !*rewrite && strings.TrimSpace(want) != got {
					t.Errorf("%s\ngot\n%s\nwant\n%s", ask, got, want)
				}
				fmt.Fprintf(&out, "%s\n----\n%s\n\n", ask, got)
			}
			if *rewrite {
				if err := os.WriteFile(path, []byte(strings.TrimRight(out.String(), "\n")+"\n"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// answer sends one request and prints what comes back.
func answer(t *testing.T, f *fixture, ask string) string {
	t.Helper()
	var lines []string
	for _, l := range strings.Split(ask, "\n") {
		if !strings.HasPrefix(l, "#") {
			lines = append(lines, l)
		}
	}
	method, text, _ := strings.Cut(strings.Join(lines, "\n"), "\n")
	kv := pb.NewKVClient(f.conn)
	ctx := context.Background()
	var resp proto.Message
	var err error
	parse := func(m proto.Message) {
		if err := prototext.Unmarshal([]byte(text), m); err != nil {
			t.Fatalf("%s: %v", ask, err)
		}
	}
	switch method {
	case "Put":
		r := &pb.PutRequest{}
		parse(r)
		resp, err = kv.Put(ctx, r)
	case "Range":
		r := &pb.RangeRequest{}
		parse(r)
		resp, err = kv.Range(ctx, r)
	case "DeleteRange":
		r := &pb.DeleteRangeRequest{}
		parse(r)
		resp, err = kv.DeleteRange(ctx, r)
	case "Txn":
		r := &pb.TxnRequest{}
		parse(r)
		resp, err = kv.Txn(ctx, r)
	case "Compact":
		r := &pb.CompactionRequest{}
		parse(r)
		resp, err = kv.Compact(ctx, r)
	case "MemberList":
		r := &pb.MemberListRequest{}
		parse(r)
		resp, err = pb.NewClusterClient(f.conn).MemberList(ctx, r)
	case "Status":
		resp, err = pb.NewMaintenanceClient(f.conn).Status(ctx, &pb.StatusRequest{})
	default:
		t.Fatalf("unknown method %q", method)
	}
	if err != nil {
		st := status.Convert(err)
		return fmt.Sprintf("error %s: %s", st.Code(), st.Message())
	}
	return canonical(resp)
}

// canonical prints a message in a form that does not change between runs: prototext adds spaces at
// random to keep people from relying on it.
func canonical(m proto.Message) string {
	text := prototext.MarshalOptions{Multiline: true, Indent: " "}.Format(m)
	lines := strings.Split(strings.TrimSpace(text), "\n")
	for i, l := range lines {
		indent := len(l) - len(strings.TrimLeft(l, " "))
		lines[i] = l[:indent] + strings.Join(strings.Fields(l), " ")
	}
	return strings.Join(lines, "\n")
}
