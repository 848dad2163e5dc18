package gateway_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/gateway"
)

func fetch(t *testing.T, method, url, body string) (int, string, http.Header) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(data), resp.Header
}

// TestPages compares health, version and other pages with what etcd 3.7.3 serves, byte by byte.
func TestPages(t *testing.T) {
	f := start(t, nil)
	lost := start(t, func(c *gateway.Config) { c.RequestTimeout = 500 * time.Millisecond })
	lost.store.Fail = func(op string) error {
		if op == "readpoint" {
			return errors.New("no quorum")
		}
		return nil
	}
	noSpace := []*pb.AlarmMember{{MemberID: 1, Alarm: pb.AlarmType_NOSPACE}}
	corrupt := []*pb.AlarmMember{{MemberID: 1, Alarm: pb.AlarmType_CORRUPT}}
	const allReady = "[+]data_corruption ok\n[+]serializable_read ok\n[+]linearizable_read ok\n[+]non_learner ok\n"
	for _, c := range []struct {
		name, method, path string
		set                func()
		code               int
		body               string
	}{
		{"healthy", "GET", "/health", nil, 200, `{"health":"true","reason":""}`},
		{"not by POST", "POST", "/health", nil, 405, "Method Not Allowed\n"},
		{"no space", "GET", "/health", func() { f.cluster.alarms = noSpace }, 503, `{"health":"false","reason":"ALARM NOSPACE"}` + "\n"},
		{"no space, excluded", "GET", "/health?exclude=NOSPACE", nil, 200, `{"health":"true","reason":""}`},
		{"corrupt", "GET", "/health", func() { f.cluster.alarms = corrupt }, 503, `{"health":"false","reason":"ALARM CORRUPT"}` + "\n"},
		{"corrupt, other excluded", "GET", "/health?exclude=NOSPACE", nil, 503, `{"health":"false","reason":"ALARM CORRUPT"}` + "\n"},
		{"corrupt is not ready", "GET", "/readyz?exclude=linearizable_read", nil, 503, "[-]data_corruption failed: alarm activated: CORRUPT\n[+]serializable_read ok\n[+]non_learner ok\n\n"},
		{"corrupt lives", "GET", "/livez", nil, 200, "ok\n"},
		{"no leader", "GET", "/health", func() { f.cluster.alarms = nil; f.cluster.leader.Store(0) }, 503, `{"health":"false","reason":"RAFT NO LEADER"}` + "\n"},
		{"no leader, serializable", "GET", "/health?serializable=true", nil, 200, `{"health":"true","reason":""}`},
		{"no read point", "GET", "/health", func() { f = lost }, 503, `{"health":"false","reason":"RANGE ERROR:etcdserver: request timed out"}` + "\n"},
		{"no read point, ready", "GET", "/readyz", nil, 503, strings.Replace(allReady, "[+]linearizable_read ok", "[-]linearizable_read failed: etcdserver: request timed out", 1) + "\n"},
		{"no read point, excluded", "GET", "/readyz?exclude=linearizable_read&exclude=unknown", nil, 200, "ok\n"},
		{"no read point, one check", "GET", "/readyz/linearizable_read", nil, 503, "[-]linearizable_read failed: etcdserver: request timed out\n\n"},
		{"lives", "GET", "/livez?verbose", nil, 200, "[+]serializable_read ok\nok\n"},
		{"ready", "GET", "/readyz", func() { f = start(t, nil) }, 200, "ok\n"},
		{"ready, verbose", "GET", "/readyz?verbose", nil, 200, allReady + "ok\n"},
		{"one check, verbose", "GET", "/readyz/serializable_read?verbose=1", nil, 200, "[+]serializable_read ok\nok\n"},
		{"ready not by PUT", "PUT", "/readyz", nil, 405, "Method Not Allowed\n"},
		{"learner", "GET", "/readyz/non_learner", func() { f.cluster.learner = true }, 503, "[-]non_learner failed: not supported for learner\n\n"},
		{"version", "GET", "/version", nil, 200, `{"etcdserver":"3.7.3","etcdcluster":"3.7.0","storage":"3.7.0"}`},
		{"version early", "GET", "/version", func() { f.cluster.version = "" }, 200, `{"etcdserver":"3.7.3","etcdcluster":"not_decided","storage":"unknown"}`},
		{"version not by POST", "POST", "/version", nil, 405, "Method Not Allowed\n"},
		{"nothing here", "GET", "/v2/keys", nil, 404, "404 page not found\n"},
		{"no pprof", "GET", "/debug/pprof/", nil, 404, "404 page not found\n"},
	} {
		if c.set != nil {
			c.set()
		}
		code, body, _ := fetch(t, c.method, "http://"+f.addr+c.path, "")
		if code != c.code || body != c.body {
			t.Errorf("%s: %s %s: %d %q, want %d %q", c.name, c.method, c.path, code, body, c.code, c.body)
		}
	}
}

// TestVars reads what etcd shows of itself as expvar.
func TestVars(t *testing.T) {
	f := start(t, nil)
	code, body, _ := fetch(t, "GET", "http://"+f.addr+"/debug/vars", "")
	vars := map[string]any{}
	if err := json.Unmarshal([]byte(body), &vars); err != nil || code != 200 {
		t.Fatalf("%d, %v: %s", code, err, body)
	}
	if raft, ok := vars["raft.status"].(map[string]any); !ok || raft["lead"] != "b2" {
		t.Errorf("raft.status is %v", vars["raft.status"])
	}
	if vars["memstats"] == nil {
		t.Error("no memstats")
	}
}

// TestMetricsPage looks for names that dashboards use, and for what requests did to them.
func TestMetricsPage(t *testing.T) {
	f := start(t, nil)
	for _, k := range []string{"a", "b"} {
		if _, err := pb.NewKVClient(f.conn).Put(t.Context(), &pb.PutRequest{Key: []byte(k)}); err != nil {
			t.Fatal(err)
		}
	}
	_, body, _ := fetch(t, "GET", "http://"+f.addr+"/metrics", "")
	for _, line := range []string{
		"etcd_mvcc_put_total 2", "etcd_server_has_leader 1", "etcd_server_is_leader 1", `etcd_server_version{server_version="3.7.3"} 1`,
		`etcd_cluster_version{cluster_version="3.7"} 1`, `etcd_server_id{server_id="b2"} 1`, "etcd_debugging_mvcc_current_revision 3",
		`grpc_server_handled_total{grpc_code="OK",grpc_method="Put",grpc_service="etcdserverpb.KV",grpc_type="unary"} 2`,
		`grpc_server_started_total{grpc_method="Watch",grpc_service="etcdserverpb.Watch",grpc_type="bidi_stream"} 0`,
		`etcd_server_client_requests_total{client_api_version="unknown",type="unary"} 2`,
		`etcd_server_request_duration_seconds_count{success="true",type="Put"} 2`, "etcd_mvcc_db_total_size_in_bytes 1000",
		"etcd_server_quota_backend_bytes 2.147483648e+09", "process_resident_memory_bytes ", "etcd_debugging_mvcc_keys_total 3", "etcd_server_proposals_pending 0", "etcd_server_leader_changes_seen_total 1",
		"etcd_disk_backend_commit_duration_seconds_count 0", "os_fd_used ", "promhttp_metric_handler_requests_in_flight 1", "go_goroutines ",
	} {
		if !strings.Contains(body, "\n"+line) {
			t.Errorf("no line %q", line)
		}
	}
	if strings.Contains(body, "etcd_network_client_grpc_received_bytes_total 0\n") {
		t.Error("no bytes were counted")
	}
}

// TestJSON speaks the JSON form.
func TestJSON(t *testing.T) {
	f := start(t, nil, "m")
	url := "http://" + f.addr
	same := func(got, want string) bool {
		var a, b bytes.Buffer
		return json.Compact(&a, []byte(got)) == nil && json.Compact(&b, []byte(want)) == nil && a.String() == b.String()
	}
	const header = `"header":{"cluster_id":"193","member_id":"178","revision":"%","raft_term":"3"}`
	h := func(rev string) string { return strings.Replace(header, "%", rev, 1) }
	for _, c := range []struct {
		path, ask string
		code      int
		want      string
	}{
		{"/v3/kv/put", `{"key":"YQ==","value":"MQ=="}`, 200, `{` + h("2") + `}`},
		{"/v3beta/kv/put", `{"key":"eg==","value":"Mg==","unknown":1}`, 200, `{` + h("3") + `}`},
		{"/v3/kv/range", `{"key":"AA==","range_end":"AA==","limit":1}`, 200,
			`{` + h("3") + `,"kvs":[{"key":"YQ==","create_revision":"2","mod_revision":"2","version":"1","value":"MQ=="}],"more":true,"count":"2"}`},
		{"/v3/kv/put", `{"value":"MQ=="}`, 400, `{"code":3,"message":"etcdserver: key is not provided"}`},
		{"/v3/kv/range", `{"key":"YQ==","revision":"9"}`, 400, `{"code":11,"message":"etcdserver: mvcc: required revision is a future revision"}`},
		{"/v3/cluster/member/list", `{}`, 200, `{"header":{"cluster_id":"193","member_id":"178","raft_term":"3"},"members":[{"ID":"178","name":"one","peerURLs":["http://p:2380"],"clientURLs":["http://c:2379"]}]}`},
		{"/v3/auth/enable", `{}`, 501, `{"code":12,"message":"braid: Auth.AuthEnable is not available yet"}`},
	} {
		code, body, head := fetch(t, "POST", url+c.path, c.ask)
		if code != c.code || !same(body, c.want) {
			t.Errorf("%s %s: %d %s, want %d %s", c.path, c.ask, code, body, c.code, c.want)
		}
		if head.Get("Access-Control-Allow-Origin") != "*" {
			t.Errorf("%s: no CORS header", c.path)
		}
	}
	if code, _, _ := fetch(t, "GET", url+"/v3/kv/put", ""); code != 501 {
		t.Errorf("GET of a method: %d", code)
	}
	if code, _, _ := fetch(t, "OPTIONS", url+"/v3/kv/put", ""); code != 200 {
		t.Errorf("OPTIONS: %d", code)
	}
}

// TestAccess refuses foreign host names over plain HTTP and foreign origins everywhere.
func TestAccess(t *testing.T) {
	f := start(t, func(c *gateway.Config) {
		c.HostWhitelist = []string{"good"}
		c.CORS = []string{"http://friend"}
		c.DisableJSON = true
	})
	ask := func(host, origin string) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+f.addr+"/version", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		req.Header.Set("Origin", origin)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode, resp.Header.Get("Access-Control-Allow-Origin")
	}
	if code, _ := ask("evil:2379", ""); code != http.StatusMisdirectedRequest {
		t.Errorf("foreign host: %d", code)
	}
	if code, allowed := ask("good:2379", "http://friend"); code != 200 || allowed != "http://friend" {
		t.Errorf("known host and origin: %d, %q", code, allowed)
	}
	if code, allowed := ask("good", "http://foe"); code != 200 || allowed != "" {
		t.Errorf("known host, foreign origin: %d, %q", code, allowed)
	}
	if code, _, _ := fetch(t, "POST", "http://"+f.addr+"/v3/kv/put", "{}"); code != http.StatusMisdirectedRequest {
		t.Errorf("loopback is not on the list: %d", code)
	}
}
