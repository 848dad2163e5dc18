package config

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// parse reads a command line and an environment, filled in but not validated.
func parse(t *testing.T, args []string, env ...string) *Parsed {
	t.Helper()
	p, err := Parse(args, env)
	if err != nil {
		t.Fatalf("Parse(%q, %q): %v", args, env, err)
	}
	return p
}

func TestDefaultIsASingleNode(t *testing.T) {
	c := Default()
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"name": "default", "data-dir": "default.braid", "listen-client-urls": "http://localhost:2379",
		"listen-peer-urls": "http://localhost:2380", "initial-cluster": "default=http://localhost:2380",
		"heartbeat-interval": "100", "election-timeout": "1000", "max-txn-ops": "128", "max-request-bytes": "1572864",
		"grpc-keepalive-interval": "2h0m0s", "initial-cluster-token": "etcd-cluster", "single-group": "false",
	}
	for name, v := range want {
		if got := Lookup(name).value.get(c); got != v {
			t.Errorf("--%s: default %q, want %q", name, got, v)
		}
	}
	if p := parse(t, nil); !reflect.DeepEqual(p.Config, c) || len(p.Notices) != 0 {
		t.Errorf("an empty command line gives\n%v %v, want\n%v", p.Config, p.Notices, c)
	}
}

// TestIDsAreEtcds uses ids that etcd itself prints for these clusters.
func TestIDsAreEtcds(t *testing.T) {
	c := Default()
	if m, cl := c.MemberID(), c.ClusterID(); m != 0x8e9e05c52164694d || cl != 0xcdf818194e3a8c32 {
		t.Errorf("default cluster: member %x cluster %x, etcd has 8e9e05c52164694d and cdf818194e3a8c32", m, cl)
	}
	c = parse(t, []string{"--name", "infra0", "--initial-advertise-peer-urls", "http://127.0.0.1:12380",
		"--initial-cluster", "infra0=http://127.0.0.1:12380,infra1=http://127.0.0.1:22380,infra2=http://127.0.0.1:32380"}).Config
	ms := c.Members()
	if len(ms) != 3 || ms[0].ID >= ms[1].ID || ms[1].ID >= ms[2].ID {
		t.Fatalf("members are not sorted by id: %v", ms)
	}
	other := parse(t, []string{"--name", "infra1", "--initial-advertise-peer-urls", "http://127.0.0.1:22380",
		"--initial-cluster", "infra2=http://127.0.0.1:32380,infra1=http://127.0.0.1:22380,infra0=http://127.0.0.1:12380"}).Config
	if c.ClusterID() != other.ClusterID() || c.MemberID() == other.MemberID() {
		t.Errorf("two members of one cluster disagree: clusters %x %x, members %x %x", c.ClusterID(), other.ClusterID(), c.MemberID(), other.MemberID())
	}
	other.InitialClusterToken = "another"
	if c.ClusterID() == other.ClusterID() {
		t.Error("the token does not enter the cluster id")
	}
}

func TestSourcesInOrder(t *testing.T) {
	p := parse(t, []string{"--name=a", "--name", "b", "-max-txn-ops", "7"},
		"ETCD_NAME=env", "ETCD_MAX_TXN_OPS=9", "ETCD_ELECTION_TIMEOUT=2000", "ETCD_SINGLE_GROUP=true", "ETCD_NMAE=x", "ETCD_LOG_LEVEL=", "PATH=/bin")
	c := p.Config
	if c.Name != "b" || c.MaxTxnOps != 7 || c.ElectionMs != 2000 || !c.SingleGroup || c.LogLevel != "info" {
		t.Errorf("got %v", c)
	}
	var texts []string
	for _, n := range p.Notices {
		texts = append(texts, n.Text)
	}
	all := strings.Join(texts, "|")
	for _, want := range []string{"unrecognized environment variable", "shadowed", "recognized and used environment variable"} {
		if !strings.Contains(all, want) {
			t.Errorf("no notice %q in %q", want, all)
		}
	}
	if got := c.InitialCluster.String(); got != "b=http://localhost:2380" {
		t.Errorf("the initial cluster does not follow the name: %s", got)
	}
}

func TestUnknownFlagSuggestsTheNearest(t *testing.T) {
	for arg, want := range map[string]string{
		"--nmae=x": "--name", "--listen-client-url": "--listen-client-urls", "-data-dri": "--data-dir",
		"--region-split-key=a": "--region-split-keys", "--advertise-client-url=x": "--advertise-client-urls",
	} {
		_, err := Parse([]string{arg}, nil)
		var u *UsageError
		if !errors.As(err, &u) || !strings.Contains(u.Msg, "did you mean "+want+"?") {
			t.Errorf("%s: %v, want a suggestion of %s", arg, err, want)
		}
	}
	if _, err := Parse([]string{"--zzzzzz"}, nil); err == nil || strings.Contains(err.Error(), "did you mean") {
		t.Errorf("--zzzzzz: %v, want an error without a suggestion", err)
	}
}

func TestAutoCompaction(t *testing.T) {
	for _, args := range [][]string{{"--auto-compaction-retention=soon"}, {"--auto-compaction-mode=often"}} {
		p := parse(t, args)
		if err := p.Config.Validate(); err == nil || !strings.Contains(err.Error(), "--auto-compaction") {
			t.Errorf("%v: %v", args, err)
		}
	}
	p := parse(t, []string{"--auto-compaction-retention=90s"})
	if got, err := p.Config.AutoCompaction(); err != nil || got.Period != 90*time.Second {
		t.Errorf("%v %v", got, err)
	}
}

func TestFates(t *testing.T) {
	for _, tc := range []struct{ arg, want string }{
		{"--auth-token=jwt,pub-key=x", "refused"}, {"--quota-backend-bytes=1000000", "refused"},
		{"--force-new-cluster", "refused"}, {"--discovery-endpoints=http://x:1", "refused"},
		{"--wal-dir=/x", "refused"},
	} {
		_, err := Parse([]string{tc.arg}, nil)
		var u *UsageError
		if err == nil || !strings.Contains(err.Error(), tc.want) || errors.As(err, &u) {
			t.Errorf("%s: %v, want a configuration error with %q", tc.arg, err, tc.want)
		}
	}
	for _, arg := range []string{"--auto-compaction-retention=0", "--auto-compaction-retention=1h", "--auto-compaction-mode=revision", "--quota-backend-bytes=0", "--quota-backend-bytes=-1", "--auth-token=simple", "--cors=*"} {
		if p := parse(t, []string{arg}); len(p.Notices) != 0 {
			t.Errorf("%s: %v, want silence", arg, p.Notices)
		}
	}
	if _, err := Parse([]string{"--v2-deprecation", "not-yet"}, nil); err == nil || err.Error() != `invalid value "not-yet" for flag -v2-deprecation: invalid value "not-yet"` {
		t.Errorf("got %v, want etcd's text", err)
	}
	p := parse(t, []string{"--snapshot-count=100", "--initial-cluster-token", "x", "--initial-cluster-token", "y", "--v2-deprecation=gone"})
	if len(p.Notices) != 3 || !strings.HasPrefix(p.Notices[2].Text, "--v2-deprecation is deprecated") || p.Config.Inert["snapshot-count"] != "100" || p.Config.InitialClusterToken != "y" {
		t.Errorf("inert flags: notices %v, config %v %v", p.Notices, p.Config.Inert, p.Config)
	}
}

func TestBooleansThatAreOn(t *testing.T) {
	c := parse(t, []string{"--enable-grpc-gateway=false", "--warning-unary-request-duration=0s"}).Config
	if !c.DisableJSON || Default().DisableJSON || c.WarnUnaryRequest != Default().WarnUnaryRequest {
		t.Errorf("DisableJSON %v, WarnUnaryRequest %v", c.DisableJSON, c.WarnUnaryRequest)
	}
}

func TestFeatureGates(t *testing.T) {
	const on = "--feature-gates=SetMemberLocalAddr=true"
	peers := "--initial-advertise-peer-urls="
	for _, tc := range []struct {
		args []string
		want string // "" leaves the choice to the system
	}{
		{[]string{on}, ""},
		{[]string{on, peers + "http://127.0.0.1:2380,http://[::1]:2380,http://0.0.0.0:2380,http://host:2380"}, ""},
		{[]string{on, peers + "http://127.0.0.1:2380,http://192.0.2.7:2380"}, "192.0.2.7"},
		{[]string{on, peers + "https://[2001:db8::2]:2380"}, "2001:db8::2"},
		{[]string{peers + "http://192.0.2.7:2380"}, ""},
		{[]string{"--feature-gates=SetMemberLocalAddr=false", peers + "http://192.0.2.7:2380"}, ""},
	} {
		p := parse(t, tc.args)
		got := ""
		if a := p.Config.PeerLocalAddr(); a.IsValid() {
			got = a.String()
		}
		if got != tc.want || len(p.Notices) != 0 {
			t.Errorf("%v: peers are dialed from %q, want %q; notices %v", tc.args, got, tc.want, p.Notices)
		}
	}
	p := parse(t, []string{"--feature-gates=CompactHashCheck=true, SetMemberLocalAddr=true"})
	if len(p.Notices) != 1 || !strings.Contains(p.Notices[0].Text, "CompactHashCheck") || strings.Contains(p.Notices[0].Text, "Local") {
		t.Errorf("notices %v, want one about CompactHashCheck", p.Notices)
	}
	for _, bad := range []string{"SetMemberLocalAddr", "SetMemberLocalAddr=2", "Unknown=true"} {
		if _, err := Parse([]string{"--feature-gates=" + bad}, nil); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
}

// TestTable checks every row: names are unique, defaults parse, what is read back reads in again,
// and inert and later rows say why.
func TestTable(t *testing.T) {
	seen := map[string]bool{}
	d := Default()
	for i := range Table {
		f := &Table[i]
		if seen[f.Name] {
			t.Errorf("--%s is listed twice", f.Name)
		}
		seen[f.Name] = true
		if f.Default != "" || f.Kind == String || f.Kind == List {
			if err := f.check(f.Default); err != nil {
				t.Errorf("--%s: default: %v", f.Name, err)
			}
		}
		if (f.Fate != Implemented) != (f.Why != "") {
			t.Errorf("--%s is %s and its reason is %q", f.Name, f.Fate, f.Why)
		}
		if f.Fate == Implemented && f.value == nil && f.Name != "config-file" && f.Name != "version" {
			t.Errorf("--%s is implemented but sets nothing", f.Name)
		}
		if f.value == nil {
			continue
		}
		printed := f.value.get(d)
		if printed == "" {
			continue
		}
		if err := f.value.set(d, printed); err != nil {
			t.Errorf("--%s: %q cannot be read back: %v", f.Name, printed, err)
		}
		if again := f.value.get(d); again != printed {
			t.Errorf("--%s: %q is read back as %q", f.Name, printed, again)
		}
	}
	if len(Table) < 113 {
		t.Errorf("the table has %d rows; etcd alone has 113 flags", len(Table))
	}
}

// TestHelpNamesEveryFlag keeps the help text complete.
func TestHelpNamesEveryFlag(t *testing.T) {
	u := Usage()
	for i := range Table {
		if f := &Table[i]; f.Why != whyOldName && strings.Contains(u, "--"+f.Name) == f.hidden {
			t.Errorf("--%s: hidden is %v, the help text shows the opposite", f.Name, f.hidden)
		}
	}
	for _, arg := range []string{"--help", "-h", "-help"} {
		if p := parse(t, []string{arg}); !p.Help {
			t.Errorf("%s does not ask for help", arg)
		}
	}
	if p := parse(t, []string{"-version"}); !p.Version {
		t.Error("-version does not ask for the version")
	}
}

func TestValidateReportsEverything(t *testing.T) {
	p := parse(t, []string{"--name", "n1", "--listen-client-urls", "https://example.com:2379", "--heartbeat-interval", "300",
		"--initial-cluster", "n2=http://127.0.0.1:2380", "--tls-min-version", "TLS1.3", "--tls-max-version", "TLS1.2"})
	err := p.Config.Validate()
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"expected IP in URL for binding (https://example.com:2379)",
		"--advertise-client-urls is required when --listen-client-urls is set explicitly",
		"--election-timeout[1000ms] should be at least as 5 times as --heartbeat-interval[300ms]",
		`couldn't find local name "n1" in the initial cluster configuration`,
		"min version (TLS1.3) is greater than max version (TLS1.2)",
		"TLS key/cert (--cert-file, --key-file) must be provided for client url https://example.com:2379",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing from:\n%v", want, err)
		}
	}
	if line := OneLine(err); strings.Contains(line, "\n") {
		t.Errorf("not one line: %q", line)
	}
}

func TestTimerSlackIsBounded(t *testing.T) {
	for v, want := range map[string]string{
		"0": "", "1us": "", "10ms": "", "10s": "--timer-slack[10s] must not be more than 10ms", "10001us": "must not be more than 10ms",
	} {
		err := parse(t, []string{"--timer-slack", v}).Config.Validate()
		if (want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", v, err, want)
		}
	}
	if _, err := Parse([]string{"--timer-slack=-1ms"}, nil); err == nil || !strings.Contains(err.Error(), `invalid value "-1ms" for --timer-slack: must not be negative`) {
		t.Errorf("negative: %v", err)
	}
}

func TestPeerURLs(t *testing.T) {
	for _, tc := range []struct{ name, cluster, advertise, want string }{
		{"equal", "n=http://127.0.0.1:1", "http://127.0.0.1:1", ""},
		{"same place", "n=http://localhost:1", "http://127.0.0.1:1", ""},
		{"two", "n=http://127.0.0.1:1,n=http://127.0.0.1:2", "http://127.0.0.1:2,http://127.0.0.1:1", ""},
		{"unix", "n=unix://sock:1", "unix://sock:1", ""},
		{"other port", "n=http://127.0.0.1:1", "http://127.0.0.1:2", "--initial-cluster has n=http://127.0.0.1:1 but missing from --initial-advertise-peer-urls=http://127.0.0.1:2"},
		{"one more", "n=http://127.0.0.1:1", "http://127.0.0.1:1,http://127.0.0.1:2", "--initial-advertise-peer-urls has http://127.0.0.1:2 but missing from --initial-cluster=n=http://127.0.0.1:1"},
		{"shared", "n=http://127.0.0.1:1,m=http://127.0.0.1:1", "http://127.0.0.1:1", "has duplicate url"},
	} {
		c := parse(t, []string{"--name", "n", "--initial-cluster", tc.cluster, "--initial-advertise-peer-urls", tc.advertise}).Config
		err := c.Validate()
		if (tc.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
}

func TestFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "braid.yaml")
	text := `
name: filed
data-dir: /tmp/filed
listen-client-urls: http://127.0.0.1:1111,http://127.0.0.1:1112
election-timeout: 3000
grpc-keepalive-min-time: 7000000000
log-outputs: [stderr]
quota-backend-bytes: 0
snapshot-count: 10000
region-split-keys: [b, "0x63"]
strict-reconfig-check: false
unknown-thing: 1
nam: typo
cors:
host-whitelist: ""
client-transport-security:
  cert-file: c.pem
  key-file: k.pem
  client-cert-auth: true
  trusted-ca-file: ca.pem
  allowed-hostname: [h1, h2]
  allowed-cn: [cn]
peer-transport-security:
  auto-tls: true
  allowed-cn: [cn1, cn2]
  skip-client-san-verification: true
`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := parse(t, []string{"--config-file", path, "--name", "flag"}, "ETCD_NAME=env", "ETCD_MAX_TXN_OPS=3")
	c := p.Config
	if c.Name != "filed" || c.MaxTxnOps != 128 || c.ElectionMs != 3000 || c.GRPCKeepAliveMinTime != 7*time.Second ||
		len(c.ListenClientURLs) != 2 || len(c.SplitKeys) != 2 || string(c.SplitKeys[1]) != "c" {
		t.Errorf("got %v", c)
	}
	if c.ClientTLS.CertFile != "c.pem" || !c.ClientTLS.ClientCertAuth || len(c.ClientTLS.AllowedHostnames) != 2 || len(c.ClientTLS.AllowedCNs) != 1 ||
		!c.PeerAutoTLS || c.ClientAutoTLS || len(c.PeerTLS.AllowedCNs) != 2 || !c.PeerTLS.SkipClientSANVerify {
		t.Errorf("TLS: client %+v, peer %+v auto %v", c.ClientTLS, c.PeerTLS, c.PeerAutoTLS)
	}
	if got := types.URLs(c.AdvertiseClientURLs).String(); got != "http://localhost:2379" {
		t.Errorf("advertised client URLs %s; etcd keeps the default in a file", got)
	}
	unknown := 0
	for _, n := range p.Notices {
		if strings.HasPrefix(n.Text, "unknown key") {
			unknown++
		}
	}
	if unknown != 2 {
		t.Errorf("%d unknown keys reported, want 2: %v", unknown, p.Notices)
	}
	for _, bad := range []string{"- a\n", "name: [a]\n", "name: {a: b}\n", "name: a\nname: b\n", "peer-transport-security: 3\n",
		"max-txn-ops: many\n", "discovery-config: {token: x}\n"} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Parse([]string{"--config-file", path}, nil); err == nil {
			t.Errorf("no error for %q", bad)
		}
	}
	if _, err := Parse(nil, []string{"ETCD_CONFIG_FILE=" + filepath.Join(dir, "missing")}); err == nil {
		t.Error("a missing file is not an error")
	}
}

func TestSplitKeys(t *testing.T) {
	for in, want := range map[string][]string{
		"": nil, "b": {"b"}, "c,a,b": {"a", "b", "c"}, "0x00ff,a": {"\x00\xff", "a"},
		`a\,b,c\\d,\x00`: {"\x00", "a,b", `c\d`}, `\x30x1`: {"0x1"}, "/registry/pods/": {"/registry/pods/"},
	} {
		got, err := ParseSplitKeys(in)
		if err != nil || len(got) != len(want) {
			t.Errorf("%q: %q, %v, want %q", in, got, err, want)
			continue
		}
		for i := range want {
			if string(got[i]) != want[i] {
				t.Errorf("%q: %q, want %q", in, got, want)
			}
		}
		if back, err := ParseSplitKeys(FormatSplitKeys(got)); err != nil || !reflect.DeepEqual(back, got) {
			t.Errorf("%q: printed as %q, read back as %q, %v", in, FormatSplitKeys(got), back, err)
		}
	}
	for _, bad := range []string{",", "a,", ",a", "a,a", "0x", "0xz", "0x123", `a\`, `\q`, `\x0`, `\xzz`, "0x61,a"} {
		if got, err := ParseSplitKeys(bad); err == nil {
			t.Errorf("%q: %q, want an error", bad, got)
		}
	}
}

func FuzzSplitKeys(f *testing.F) {
	f.Add("a,0x62,\\x00")
	f.Fuzz(func(t *testing.T, s string) {
		keys, err := ParseSplitKeys(s)
		if err != nil {
			return
		}
		back, err := ParseSplitKeys(FormatSplitKeys(keys))
		if err != nil || !reflect.DeepEqual(back, keys) {
			t.Fatalf("%q gives %q, printed %q, read back as %q, %v", s, keys, FormatSplitKeys(keys), back, err)
		}
	})
}

func TestPrepareMakesCertificates(t *testing.T) {
	c := parse(t, []string{"--auto-tls", "--data-dir", t.TempDir(), "--listen-client-urls", "https://127.0.0.1:0",
		"--advertise-client-urls", "https://127.0.0.1:0", "--tls-min-version", "TLS1.2", "--tls-max-version", "TLS1.3",
		"--cipher-suites", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"}).Config
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	core, logs := observer.New(zap.InfoLevel)
	if err := c.Prepare(zap.New(core)); err != nil {
		t.Fatal(err)
	}
	srv, err := c.ClientTLS.ServerConfig()
	if err != nil {
		t.Fatal(err)
	}
	if srv.MinVersion == 0 || len(srv.CipherSuites) != 1 || logs.FilterMessage("automatically generate certificates").Len() != 1 {
		t.Errorf("server config %+v, logs %v", srv, logs.All())
	}
	if !c.PeerTLS.Empty() {
		t.Error("peers got a certificate that nobody asked for")
	}
}

func TestLoggerWritesEtcdsFields(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	c := parse(t, []string{"--log-outputs", path, "--log-level", "warn"}).Config
	lg, done, err := c.BuildLogger()
	if err != nil {
		t.Fatal(err)
	}
	lg.Info("quiet")
	lg.Warn("loud", zap.Int("n", 3))
	done()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got := string(b)
	if strings.Contains(got, "quiet") || !strings.HasPrefix(got, `{"level":"warn","ts":"2`) ||
		!strings.Contains(got, `"caller":"config/config_test.go:`) || !strings.Contains(got, `"msg":"loud","n":3}`) {
		t.Errorf("got %s", got)
	}
	for _, bad := range [][]string{{"--log-outputs", "default,stderr"}, {"--enable-log-rotation"}, {"--log-outputs", "/no/such/dir/x"},
		{"--enable-log-rotation", "--log-outputs", path, "--log-rotation-config-json", "{"}} {
		if _, _, err := parse(t, bad).Config.BuildLogger(); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}
