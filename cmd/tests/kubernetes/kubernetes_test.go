package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
)

// good is what a load of 3,000 objects printed.
const good = `create                                             1.30s  errs=0 max=36.4ms
list consistent (cache)                            0.03s  items=3000 rv=3072
read-your-writes: 200 x (update, consistent list of 1)     3.39s  stale=0
list limit=250 with continue                       0.04s  items=3000 pages=12 firstRemaining=2750
list RV=0 / Exact / NotOlderThan / label selector     0.09s  3000/3000/3000/300 exact-too-new=0
update with optimistic lock                        7.89s  errs=0 max=365.210622ms
conflict: 16 writers x 20 increments on one object    13.99s  value=320 want=320 conflicts=2883
1000 events (ttl lease)                            1.57s  errs=0
I1130 09:33:09.482029   27924 leaderelection.go:258] "Attempting to acquire leader lease..." lock="x/lead"
leaderelection (Lease object), handover            1.08s  a->b
informer caught up                                 0.00s  informer=3000
deletecollection                                  11.60s  left=0 informer=0
watch: added=3001 modified=3520 deleted=3001 out-of-order=0 reopened=1 (want 3001/3520/3001/0)
`

// TestJudge accepts a good report and refuses it with any of its counts wrong.
func TestJudge(t *testing.T) {
	if err := judge(good, 3000, false); err != nil {
		t.Errorf("a good load: %v", err)
	}
	for _, change := range []struct{ old, new string }{
		{"create                                             1.30s  errs=0", "create  1.30s  errs=1"},
		{"items=3000 rv", "items=2999 rv"},
		{"stale=0", "stale=1"},
		{"items=3000 pages=12", "items=3001 pages=12"},
		{"pages=12", "pages=13"},
		{"firstRemaining=2750", "firstRemaining=-1"},
		{"3000/3000/3000/300", "2999/3000/3000/300"},
		{"3000/3000/3000/300", "3000/3000/3001/300"},
		{"3000/3000/3000/300", "3000/3000/3000/299"},
		{"too-new=0", "too-new=2"},
		{"value=320", "value=319"},
		{"informer=3000", "informer=2999"},
		{"left=0", "left=1"},
		{"added=3001", "added=3000"},
		{"modified=3520", "modified=3519"},
		{"deleted=3001", "deleted=3002"},
		{"out-of-order=0", "out-of-order=1"},
		{"deletecollection                                  11.60s  left=0 informer=0\n", ""},
		{"watch: ", "rewatch failed\nwatch: "},
		{"list limit", "  page rv changed 5 6\nlist limit"},
	} {
		log := strings.Replace(good, change.old, change.new, 1)
		if log == good {
			t.Fatalf("%q is not in the report", change.old)
		}
		if judge(log, 3000, false) == nil {
			t.Errorf("%q instead of %q was accepted", change.new, change.old)
		}
	}
}

// TestJudgeUnanswered lets failed requests have happened or not, but not both.
func TestJudgeUnanswered(t *testing.T) {
	// Five creates and four updates failed; two of the objects are there nevertheless, and one of
	// those updates.
	log := strings.NewReplacer(
		"1.30s  errs=0", "1.30s  errs=5", "7.89s  errs=0", "7.89s  errs=4",
		"items=3000", "items=2997", "firstRemaining=2750", "firstRemaining=2747", "3000/3000/3000/300", "2997/2997/2997/299",
		"informer=3000", "informer=2997", "added=3001", "added=2998", "modified=3520", "modified=3517", "deleted=3001", "deleted=2998",
	).Replace("  err 17 etcdserver: request timed out\n" + good)
	if err := judge(log, 3000, true); err != nil {
		t.Errorf("explained counts: %v", err)
	}
	if judge(log, 3000, false) == nil {
		t.Error("failed requests were accepted though no node was killed")
	}
	for _, change := range []struct{ old, new string }{
		{"items=2997 rv", "items=2994 rv"},   // more lost than failed
		{"added=2998", "added=2997"},         // listed and not seen by the watch
		{"modified=3517", "modified=3515"},   // an acknowledged update was not seen
		{"informer=2997", "informer=2998"},   // one too many in a cache
		{"2997/2997/2997", "2997/2996/2997"}, // lists that disagree
	} {
		if judge(strings.Replace(log, change.old, change.new, 1), 3000, true) == nil {
			t.Errorf("%q instead of %q was accepted", change.new, change.old)
		}
	}
}

// TestReads sums the metric over kinds of objects.
func TestReads(t *testing.T) {
	got := parseReads(`# TYPE apiserver_watch_cache_consistent_read_total counter
apiserver_watch_cache_consistent_read_total{fallback="false",group="",resource="configmaps",success="true"} 205
apiserver_watch_cache_consistent_read_total{fallback="false",group="",resource="services",success="true"} 1
apiserver_watch_cache_consistent_read_total{fallback="true",group="",resource="services",success="true"} 2
apiserver_watch_cache_consistent_read_total_other{fallback="true"} 7
`)
	if want := (reads{cache: 206, store: 2}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// TestJudgeCaches wants every kind compared, and none different.
func TestJudgeCaches(t *testing.T) {
	line := func(group, kind, status string, n int) string {
		return fmt.Sprintf("apiserver_storage_consistency_checks_total{group=%q,resource=%q,status=%q} %d\n", group, kind, status, n)
	}
	same := line("", "configmaps", "success", 1) + line("apps", "deployments", "success", 2)
	for _, c := range []struct {
		metrics string
		good    bool
	}{
		{same, true},
		{same + line("apps", "deployments", "error", 1), true},
		{same + line("apps", "daemonsets", "error", 1), false},
		{same + line("apps", "deployments", "failure", 1), false},
		{same + line("apps", "daemonsets", "failure", 0), true},
		{line("apps", "deployments", "success", 1), false},
		{"", false},
	} {
		if err := judgeCaches(c.metrics); (err == nil) != c.good {
			t.Errorf("%v after\n%s", err, c.metrics)
		}
	}
}

// TestKubelets shows the kubelets a pod to run, one that ends, one that runs and one without a node,
// the first two in a list, the others in the watch that follows it.
func TestKubelets(t *testing.T) {
	ctx, done := context.WithCancel(t.Context())
	defer done()
	entry := func(name, node, phase, deleted string) object {
		return object{"metadata": object{"name": name, "namespace": "n", "uid": "u-" + name, "deletionTimestamp": deleted},
			"spec": object{"nodeName": node}, "status": object{"phase": phase}}
	}
	var mu sync.Mutex
	var calls []string // guarded by mu
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Header.Get("Authorization") != "Bearer "+token:
			w.WriteHeader(http.StatusUnauthorized)
		case strings.HasSuffix(r.URL.Path, "/leases/fake-1"):
			fmt.Fprint(w, "{}")
		case r.URL.Query().Get("watch") != "":
			if r.URL.Query().Get("resourceVersion") != "7" {
				w.WriteHeader(http.StatusGone)
				return
			}
			for _, p := range []object{entry("c", "fake-1", "Running", ""), entry("d", "", "Pending", "")} {
				_ = json.NewEncoder(w).Encode(object{"type": "ADDED", "object": p})
			}
		case r.URL.Path == "/api/v1/pods":
			_ = json.NewEncoder(w).Encode(object{"metadata": object{"resourceVersion": "7"},
				"items": []object{entry("a", "fake-1", "Pending", ""), entry("b", "fake-1", "Running", "2026-01-01T00:00:00Z")}})
		default:
			mu.Lock()
			defer mu.Unlock()
			calls = append(calls, r.Method+" "+strings.TrimPrefix(r.URL.Path, "/api/v1/namespaces/n/pods/"))
			if len(calls) >= 4 { // both twice: the list was taken twice, with the watch between
				done()
			}
			fmt.Fprint(w, "{}")
		}
	}))
	defer server.Close()
	k := kubelets{api: newAPI(strings.TrimPrefix(server.URL, "https://")), nodes: []string{"fake-1"}}
	if err := k.run(ctx); err != nil {
		t.Error(err)
	}
	mu.Lock()
	defer mu.Unlock()
	slices.Sort(calls)
	if got := slices.Compact(calls); !slices.Equal(got, []string{"DELETE b", "PATCH a/status"}) {
		t.Errorf("the kubelets did %q", got)
	}
}
